//! `permafrost get`, `put` and `verify`: the commands that transfer or read a checkpoint's pages.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use clap::Args;
use permafrost_criu::scratch;
use permafrost_protocol::control::{Exported, Verified, request};
use permafrost_protocol::manifest::is_repeatable;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::{checkpoint_name, job_name, name_of};
use permafrost_terminal::progress::{ProgressDisplay, QueueDisplay};
use permafrost_terminal::table::facts;

use crate::archive::{self, CompressionName};
use crate::arguments::Durability;

#[derive(Debug, Args)]
pub(crate) struct GetArguments {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
    /// Target directory; created if need be. The images hold the process's secrets.
    #[arg(required_unless_present = "archive")]
    pub(crate) directory: Option<PathBuf>,
    /// Write the archive that `put --archive` has read, byte for byte but for the compression; - for standard output.
    #[arg(long, value_name = "FILE", conflicts_with = "directory")]
    pub(crate) archive: Option<PathBuf>,
    /// Compression of the archive [default: by the end of its name, .tar, .tar.gz or .tar.zst].
    #[arg(long, value_enum, requires = "archive")]
    pub(crate) compress: Option<CompressionName>,
    /// Put the archive together in this directory instead of in memory.
    #[arg(long, value_name = "DIR", requires = "archive")]
    pub(crate) work_dir: Option<PathBuf>,
    /// Write into a directory that is not empty, or replace an archive.
    #[arg(long, short)]
    pub(crate) force: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PutArguments {
    /// Job the checkpoint will belong to.
    #[arg(value_parser = job_name)]
    pub(crate) job: String,
    /// A directory that `criu dump` wrote.
    #[arg(required_unless_present = "archive")]
    pub(crate) directory: Option<PathBuf>,
    /// Read a container's checkpoint instead, as `podman container checkpoint --export` and kubelet's checkpoint API
    /// write it; - for standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "directory")]
    pub(crate) archive: Option<PathBuf>,
    /// Take the archive apart in this directory instead of in memory.
    #[arg(long, value_name = "DIR", requires = "archive")]
    pub(crate) work_dir: Option<PathBuf>,
    /// Do not compare with the job's newest checkpoint.
    #[arg(long)]
    pub(crate) full: bool,
    /// On how many nodes it must be durable before it is sealed [default: the node's].
    #[arg(long, value_enum)]
    pub(crate) durability: Option<Durability>,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArguments {
    /// JOB or JOB@GEN; everything without it.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: Option<String>,
    /// Fetch pages in a cold tier, too, and verify them. For JOB and JOB@GEN that is always done.
    #[arg(long)]
    pub(crate) cold: bool,
}

pub(crate) fn get(context: &Context, arguments: &GetArguments) -> Result<(), Failure> {
    match (&arguments.archive, &arguments.directory) {
        (Some(archive), _) => archive::get(context, arguments, archive),
        (None, Some(directory)) => get_directory(context, arguments, directory),
        (None, None) => Err(no_target()),
    }
}

/// Returns the failure for a command line with neither a directory nor an archive, which clap refuses.
fn no_target() -> Failure {
    Failure::new(
        Code::Invalid,
        "name a directory, or an archive with --archive",
    )
}

fn get_directory(context: &Context, arguments: &GetArguments, path: &Path) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let created = prepare_directory(path, arguments.force)?;
    let directory = open_directory(path)?;
    let label = format!("get {}", arguments.checkpoint);
    let mut progress = ProgressDisplay::new(context, label.clone());
    let mut queue = QueueDisplay::new(context, label, "restores", "");
    let exported = connection.call_with(
        request::Export {
            checkpoint: arguments.checkpoint.clone(),
            ..request::Export::default()
        },
        Some(directory.as_fd()),
        &mut |so_far| {
            queue.update(so_far);
            progress.begun(so_far);
        },
    );
    drop((progress, queue));
    match exported {
        Ok(exported) => context.print(&exported, |exported| human_exported(exported, path)),
        Err(error) => {
            if created {
                // Only if nothing was written into it.
                let _ = fs::remove_dir(path);
            }
            Err(interrupts.explain(error.into()))
        }
    }
}

/// Makes the directory, private, or checks that it is empty. Returns true if it was made.
pub(crate) fn prepare_directory(path: &Path, force: bool) -> Result<bool, Failure> {
    match fs::read_dir(path) {
        Ok(mut entries) => {
            if entries.next().is_some() && !force {
                return Err(Failure::new(
                    Code::Conflict,
                    format!("{} is not empty", path.display()),
                )
                .hint("name another directory, or pass --force to write into this one"));
            }
            Ok(false)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            scratch::create_private(path).map_err(|error| Failure::io("create", path, &error))?;
            Ok(true)
        }
        Err(error) => Err(Failure::io("read", path, &error)),
    }
}

fn human_exported(exported: &Exported, path: &Path) -> String {
    let name = exported
        .checkpoint
        .as_ref()
        .map(name_of)
        .unwrap_or_default();
    let origin = exported.origin.clone().unwrap_or_default();
    let mut restore = format!("criu restore --images-dir {} -d", path.display());
    let (repeated, refused): (Vec<_>, Vec<_>) = origin
        .restore_options
        .into_iter()
        .partition(|option| is_repeatable(option));
    for option in repeated {
        restore.push(' ');
        restore.push_str(&option);
    }
    facts(
        &format!("{name} is in {}", path.display()),
        &[
            ("files", exported.files.to_string()),
            ("size", human::bytes(exported.bytes)),
            ("restore with", restore),
            (
                "left out",
                if refused.is_empty() {
                    String::new()
                } else {
                    format!(
                        "{refused:?}: recorded, but they may run programs or reach files of this host"
                    )
                },
            ),
        ],
    )
}

pub(crate) fn put(context: &Context, arguments: &PutArguments) -> Result<(), Failure> {
    match (&arguments.archive, &arguments.directory) {
        (Some(archive), _) => archive::put(context, arguments, archive),
        (None, Some(directory)) => {
            let interrupts = Interrupts::install()?;
            import(context, &interrupts, arguments, &open_directory(directory)?)
        }
        (None, None) => Err(no_target()),
    }
}

/// Has the daemon read an images directory as the job's next checkpoint, and prints it.
pub(crate) fn import(
    context: &Context,
    interrupts: &Interrupts,
    arguments: &PutArguments,
    directory: &File,
) -> Result<(), Failure> {
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let label = format!("put {}", arguments.job);
    let mut progress = ProgressDisplay::new(context, label.clone());
    let mut queue = QueueDisplay::new(context, label, "dumps", "");
    let checkpoint = connection
        .call_with(
            request::Import {
                job: arguments.job.clone(),
                no_parent: arguments.full,
                durability: Durability::word(arguments.durability),
            },
            Some(directory.as_fd()),
            &mut |so_far| {
                queue.update(so_far);
                progress.begun(so_far);
            },
        )
        .map_err(|error| interrupts.explain(error.into()))?;
    drop((progress, queue));
    context.print(&checkpoint, |checkpoint| {
        facts(
            &format!("{} is sealed", name_of(checkpoint)),
            &[
                ("memory", human::bytes(checkpoint.memory_bytes)),
                ("stored", human::bytes(checkpoint.added_bytes)),
            ],
        )
    })
}

pub(crate) fn verify(context: &Context, arguments: &VerifyArguments) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let mut progress = ProgressDisplay::new(context, "verify");
    let verified = connection
        .call_with(
            request::Verify {
                checkpoint: arguments.checkpoint.clone().unwrap_or_default(),
                cold: arguments.cold,
            },
            None,
            &mut |so_far| progress.update(so_far.done_bytes, so_far.total_bytes),
        )
        .map_err(|error| interrupts.explain(error.into()))?;
    drop(progress);
    context.print(&verified, human_verified)?;
    match verified.damage.len() {
        0 => Ok(()),
        damaged => Err(Failure::new(
            Code::Corrupt,
            format!("{damaged} damaged; what they name cannot be restored from here"),
        )
        .hint("dump the job again if it still runs, or restore an older generation; the medium may be failing")),
    }
}

fn human_verified(verified: &Verified) -> String {
    let read = format!(
        "{} and {} read",
        human::count(verified.checkpoints, "checkpoint", "checkpoints"),
        human::count(verified.pages, "page", "pages"),
    );
    let left = permafrost_operations::not_verified(verified.unverified_pages, &verified.away);
    if verified.damage.is_empty() {
        format!("{read}: every checksum matches{left}")
    } else {
        format!("{read}{left}\n{}", verified.damage.join("\n"))
    }
}

/// Opens a directory to hand to the daemon.
pub(crate) fn open_directory(path: &Path) -> Result<File, Failure> {
    let directory = File::open(path).map_err(|error| Failure::io("open", path, &error))?;
    match directory.metadata() {
        Ok(metadata) if metadata.is_dir() => Ok(directory),
        _ => Err(Failure::new(
            Code::Invalid,
            format!("{} is not a directory", path.display()),
        )),
    }
}
