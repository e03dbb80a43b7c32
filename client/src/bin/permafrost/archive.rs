//! `permafrost put --archive` and `get --archive`: checkpoints of containers as podman, CRI-O and containerd export them.
//!
//! The archive is taken apart, or put together, in a private directory; the daemon reads and writes there as it does for
//! an images directory, and knows no archives.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use permafrost_archive::{ArchiveCompression, ArchiveError, ArchiveLimits, INDEX_NAME};
use permafrost_criu::scratch::Scratch;
use permafrost_protocol::control::{Detail, Exported, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::name_of;
use permafrost_terminal::progress::{ProgressDisplay, QueueDisplay};
use permafrost_terminal::table::facts;

use crate::transfer::{GetArguments, PutArguments, import, open_directory};

/// Compression of an archive that is written.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum CompressionName {
    /// A plain tar
    None,
    /// Compressed with gzip
    Gzip,
    /// Compressed with zstd
    Zstd,
}

/// Stores an archive as the next checkpoint of a job.
pub(crate) fn put(
    context: &Context,
    arguments: &PutArguments,
    archive: &Path,
) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    // A daemon that does not answer is found before an archive of gigabytes is taken apart.
    drop(context.connect()?);
    let label = format!("unpack {}", archive.display());
    let mut progress = ProgressDisplay::new(context, label);
    let (input, total_bytes) = open(archive)?;
    let scratch = scratch(
        arguments.work_dir.as_deref(),
        &format!("dump-{}", arguments.job),
        total_bytes,
    )?;
    let images = directory(&scratch)?;
    let failed = |error| failure(error, archive);
    let room = permafrost_archive::room(scratch.path(), arguments.work_dir.is_none());
    let limits = ArchiveLimits::with_room(room.map_err(failed)?);
    let input = permafrost_archive::input(input, |done_bytes| {
        progress.update(done_bytes, total_bytes);
        !interrupts.came()
    });
    permafrost_archive::unpack(input, &images, &limits).map_err(failed)?;
    drop(progress);
    import(context, &interrupts, arguments, &open_directory(&images)?)
}

/// Writes a checkpoint that came as an archive as the same archive again.
pub(crate) fn get(
    context: &Context,
    arguments: &GetArguments,
    archive: &Path,
) -> Result<(), Failure> {
    let compression = compression(arguments.compress, archive)?;
    let to_stdout = is_standard(archive);
    if !to_stdout && !arguments.force && fs::symlink_metadata(archive).is_ok() {
        let message = format!("{} exists already", archive.display());
        return Err(Failure::new(Code::Conflict, message)
            .hint("name another file, or pass --force to replace this one"));
    }
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let show = request::Show {
        checkpoint: arguments.checkpoint.clone(),
    };
    let detail = connection
        .call(show)
        .map_err(|error| interrupts.explain(error.into()))?;
    let name = detail
        .checkpoint
        .as_ref()
        .map_or(arguments.checkpoint.clone(), name_of);
    let needed_bytes = size_of(&detail).ok_or_else(|| no_archive(&name))?;
    let scratch = scratch(
        arguments.work_dir.as_deref(),
        &format!("restore-{name}"),
        needed_bytes,
    )?;
    let in_memory = arguments.work_dir.is_none();
    permafrost_archive::check_room(scratch.path(), in_memory, needed_bytes)
        .map_err(|error| failure(error, archive))?;
    let images = directory(&scratch)?;

    let label = format!("get {name}");
    let mut progress = ProgressDisplay::new(context, label.clone());
    let mut queue = QueueDisplay::new(context, label, "restores", "");
    let export = request::Export {
        checkpoint: name.clone(),
        ..request::Export::default()
    };
    let target = open_directory(&images)?;
    let exported = connection
        .call_with(export, Some(target.as_fd()), &mut |so_far| {
            queue.update(so_far);
            progress.begun(so_far);
        })
        .map_err(|error| interrupts.explain(error.into()))?;
    drop((progress, queue, connection));
    interrupts.leave_alone();

    let mut progress = ProgressDisplay::new(context, format!("write {}", archive.display()));
    let mut step = |bytes| {
        progress.update(bytes, needed_bytes);
        !interrupts.came()
    };
    let failed = |error| match error {
        ArchiveError::NoArchive => no_archive(&name),
        error => failure(error, archive),
    };
    if to_stdout {
        let output = io::BufWriter::new(io::stdout().lock());
        let packed = permafrost_archive::pack(&images, compression, output, &mut step);
        let bytes = packed.map_err(failed)?.bytes;
        context.remark(&format!("{name}: {} written", human::bytes(bytes)));
        return Ok(());
    }
    let force = arguments.force;
    let packed =
        permafrost_archive::pack_into_file(&images, compression, archive, force, &mut step);
    let packed = packed.map_err(failed)?;
    drop(progress);
    let exported = Exported {
        files: packed.files,
        bytes: packed.bytes,
        ..exported
    };
    context.print(&exported, |exported| {
        human_archived(exported, &name, archive)
    })
}

/// Returns the size of all that an export writes, bytes; `None` for a checkpoint that was not stored from an archive.
fn size_of(detail: &Detail) -> Option<u64> {
    let images = &detail.manifest.as_ref()?.images;
    images.iter().find(|image| image.name == INDEX_NAME)?;
    let memory_bytes = detail
        .checkpoint
        .as_ref()
        .map_or(0, |checkpoint| checkpoint.memory_bytes);
    Some(images.iter().fold(memory_bytes, |sum, image| {
        sum.saturating_add(image.len_bytes)
    }))
}

fn no_archive(name: &str) -> Failure {
    Failure::new(
        Code::Invalid,
        format!("{name} was not stored from an archive"),
    )
    .hint(format!(
        "write its images directory: permafrost get {name} DIRECTORY"
    ))
}

fn human_archived(exported: &Exported, name: &str, archive: &Path) -> String {
    facts(
        &format!("{name} is in {}", archive.display()),
        &[
            ("files", exported.files.to_string()),
            ("size", human::bytes(exported.bytes)),
            (
                "restore with",
                format!("podman container restore --import {}", archive.display()),
            ),
        ],
    )
}

fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// Opens an archive, and returns its size; 0 for standard input, whose size is not known.
fn open(path: &Path) -> Result<(File, u64), Failure> {
    if is_standard(path) {
        let input = io::stdin().as_fd().try_clone_to_owned();
        let input = input.map_err(|error| Failure::io("read", path, &error))?;
        return Ok((input.into(), 0));
    }
    let file = File::open(path).map_err(|error| Failure::io("open", path, &error))?;
    let metadata = file
        .metadata()
        .map_err(|error| Failure::io("stat", path, &error))?;
    if metadata.is_dir() {
        let message = format!("{} is a directory", path.display());
        return Err(Failure::new(Code::Invalid, message)
            .hint("leave --archive out to store an images directory"));
    }
    Ok((file, metadata.len()))
}

fn compression(
    chosen: Option<CompressionName>,
    path: &Path,
) -> Result<ArchiveCompression, Failure> {
    let by_name = || {
        if is_standard(path) {
            return Some(ArchiveCompression::None);
        }
        ArchiveCompression::of_name(path.file_name()?.to_str()?)
    };
    match chosen {
        Some(CompressionName::None) => Ok(ArchiveCompression::None),
        Some(CompressionName::Gzip) => Ok(ArchiveCompression::Gzip),
        Some(CompressionName::Zstd) => Ok(ArchiveCompression::Zstd),
        None => by_name().ok_or_else(|| {
            Failure::new(
                Code::Invalid,
                format!("the name {} says no compression", path.display()),
            )
            .hint("end it with .tar, .tar.gz or .tar.zst, or pass --compress")
        }),
    }
}

/// Makes the private directory for the members: in memory, as the images hold secrets, or in `work_dir`.
fn scratch(work_dir: Option<&Path>, purpose: &str, needed_bytes: u64) -> Result<Scratch, Failure> {
    match work_dir {
        None => Ok(Scratch::in_memory(purpose, needed_bytes)?),
        Some(directory) => {
            let directory = fs::canonicalize(directory)
                .map_err(|error| Failure::io("use", directory, &error))?;
            Ok(Scratch::within(&directory, purpose)?)
        }
    }
}

fn directory(scratch: &Scratch) -> Result<PathBuf, Failure> {
    let made = scratch.subdirectory("images");
    made.map_err(|error| Failure::io("create a directory in", scratch.path(), &error))
}

fn failure(error: ArchiveError, archive: &Path) -> Failure {
    let message = format!("{}: {error}", archive.display());
    match error {
        ArchiveError::Interrupted => Failure::interrupted("interrupted"),
        ArchiveError::Altered { .. } | ArchiveError::BadIndex => {
            Failure::new(Code::Corrupt, message)
                .hint("get an older generation, or look with permafrost verify")
        }
        ArchiveError::Io { source, .. } if source.kind() == io::ErrorKind::BrokenPipe => {
            Failure::new(Code::Unread, String::new())
        }
        ArchiveError::Io { source, .. } => {
            let code = Failure::io("", archive, &source).code;
            Failure::new(code, message)
        }
        ArchiveError::NoRoom { .. } | ArchiveError::NoRoomToPack { .. } => {
            Failure::new(Code::NoSpace, message)
                .hint("name a private directory with more room with --work-dir")
        }
        ArchiveError::Compression { .. } => Failure::new(Code::Invalid, message)
            .hint("decompress it, and pass it on standard input: --archive -"),
        ArchiveError::Missing { .. } => Failure::new(Code::Invalid, message).hint(
            "pass a file of podman container checkpoint --export, or of kubelet's checkpoint API",
        ),
        ArchiveError::PagesDiffer { .. } => Failure::new(Code::Invalid, message)
            .hint("export a whole checkpoint: no pre-checkpoint, and without --with-previous"),
        _ => Failure::new(Code::Invalid, message),
    }
}
