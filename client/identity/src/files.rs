//! Directories of certificates and keys that change as a whole.
//!
//! ```text
//! DIR/current   -> versions/VERSION     what counts; a rename replaces this link
//! DIR/versions/VERSION/{ca,cert,key}.pem
//! DIR/ca.pem    -> current/ca.pem       for programs that want files (CRIU, openssl)
//! ```
//!
//! A reader that resolves `current` once and opens its files in the directory found always gets files that
//! belong together: a version's files never change. The previous version is kept for readers that resolved it
//! just before. One file with all contents would do too, but CRIU requires three.
//!
//! A directory without `current` holds the files itself; one with `..data` is a volume of a cluster manager
//! that switches in the same way.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use super::IdentityError;

/// Largest file that is read: hundreds of certificates.
const MAX_FILE_BYTES: u64 = 1 << 20;

pub(crate) const CURRENT: &str = "current";
const VERSIONS: &str = "versions";

pub(crate) const CA: &str = "ca.pem";
pub(crate) const CERTIFICATE: &str = "cert.pem";
pub(crate) const KEY: &str = "key.pem";
pub(crate) const CA_KEY: &str = "ca-key.pem";
pub(crate) const CHAIN: &str = "chain.pem";

pub(crate) fn io_error(
    action: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> IdentityError {
    move |source| IdentityError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Returns the directory that holds the current files of the identity `directory`: the target of its version
/// link, if any.
pub(crate) fn resolve(directory: &Path) -> Result<PathBuf, IdentityError> {
    for link in [CURRENT, "..data"] {
        let path = directory.join(link);
        match fs::read_link(&path) {
            Ok(target) => return Ok(directory.join(target)),
            Err(error)
                if matches!(
                    error.kind(),
                    // InvalidInput: not a link.
                    io::ErrorKind::NotFound | io::ErrorKind::InvalidInput
                ) => {}
            Err(error) => return Err(io_error("read", &path)(error)),
        }
    }
    Ok(directory.to_owned())
}

/// Reads a file that may be public.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, IdentityError> {
    read_checked(path, |_| Ok(()))
}

/// Reads a key, if no other user could read it.
pub(crate) fn read_key(path: &Path) -> Result<Vec<u8>, IdentityError> {
    read_checked(path, |metadata| {
        let mode = metadata.permissions().mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(IdentityError::ReadableKey {
                path: path.to_owned(),
                mode,
            });
        }
        let owner = metadata.uid();
        if owner != 0 && owner != rustix::process::geteuid().as_raw() {
            return Err(IdentityError::ForeignKey {
                path: path.to_owned(),
                owner,
            });
        }
        Ok(())
    })
}

/// Reads a list that only this user or root may change: it must belong to one of them, and not be writable by
/// others.
pub(crate) fn read_ours(path: &Path) -> Result<Vec<u8>, IdentityError> {
    read_checked(path, |metadata| {
        let mode = metadata.permissions().mode() & 0o7777;
        let owner = metadata.uid();
        let is_ours = owner == 0 || owner == rustix::process::geteuid().as_raw();
        if mode & 0o022 == 0 && is_ours {
            return Ok(());
        }
        Err(IdentityError::OpenList {
            path: path.to_owned(),
            mode,
            owner,
        })
    })
}

/// Reads a file after checks. The checks are on the open file, not on the name, which may change between.
fn read_checked(
    path: &Path,
    check: impl FnOnce(&fs::Metadata) -> Result<(), IdentityError>,
) -> Result<Vec<u8>, IdentityError> {
    // Without O_NONBLOCK, opening a FIFO in place of the file would block for ever.
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nonblock)
        .open(path)
        .map_err(io_error("open", path))?;
    let metadata = file.metadata().map_err(io_error("stat", path))?;
    if !metadata.is_file() || metadata.len() > MAX_FILE_BYTES {
        return Err(IdentityError::NotAFile {
            path: path.to_owned(),
            limit_bytes: MAX_FILE_BYTES,
        });
    }
    check(&metadata)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES)
        .read_to_end(&mut bytes)
        .map_err(io_error("read", path))?;
    Ok(bytes)
}

/// File attributes that differ once a file has changed since it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    size_bytes: u64,
    modified: (i64, i64),
    /// Time of the last change of the inode, which also records a chmod that makes a refused key acceptable.
    changed: (i64, i64),
}

/// Returns the stamps of `names` in `directory`, `None` for files that do not exist.
pub(crate) fn stamps<const N: usize>(directory: &Path, names: [&str; N]) -> [Option<Stamp>; N] {
    let directory = resolve(directory).unwrap_or_else(|_| directory.to_owned());
    names.map(|name| stamp(&directory.join(name)))
}

/// Returns the stamp of a file, `None` if it does not exist.
pub(crate) fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path).ok()?;
    Some(Stamp {
        device: metadata.dev(),
        inode: metadata.ino(),
        size_bytes: metadata.len(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
    })
}

/// A file to be written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewFile<'a> {
    pub(crate) name: &'static str,
    pub(crate) contents: &'a str,
    pub(crate) secret: bool,
}

/// Returns true if `directory` holds a version link or the file `name` itself.
pub(crate) fn is_taken(directory: &Path, name: &str) -> bool {
    [CURRENT, name]
        .iter()
        .any(|name| fs::symlink_metadata(directory.join(name)).is_ok())
}

/// Returns true if `directory` holds the file `name`, directly or in its current version.
pub(crate) fn holds(directory: &Path, name: &str) -> bool {
    let place = resolve(directory).unwrap_or_else(|_| directory.to_owned());
    [directory, &place]
        .iter()
        .any(|place| fs::symlink_metadata(place.join(name)).is_ok())
}

/// Makes `files` the current version of `directory`. With `replace` unset, fails with `AlreadyExists` if there
/// is one.
///
/// 1. The files are written into a directory of their own and made durable.
/// 2. `current` is pointed there by a rename; before that, no reader sees them, and a crash leaves a directory
///    that the next call removes.
/// 3. Links for plain names, which point through `current`: not before it exists, or they would dangle.
/// 4. Versions but the new one and its predecessor are removed.
pub(crate) fn write_version(
    directory: &Path,
    files: &[NewFile<'_>],
    replace: bool,
) -> Result<(), IdentityError> {
    fs::create_dir_all(directory).map_err(io_error("create", directory))?;
    let versions = directory.join(VERSIONS);
    fs::create_dir_all(&versions).map_err(io_error("create", &versions))?;
    let version = uuid::Uuid::new_v4().simple().to_string();
    let target = Path::new(VERSIONS).join(&version);
    let place = directory.join(&target);

    DirBuilder::new()
        .mode(0o755)
        .create(&place)
        .map_err(io_error("create", &place))?;
    files
        .iter()
        .try_for_each(|file| write_new(&place.join(file.name), file))
        .and_then(|()| sync(&place))
        .inspect_err(|_| {
            let _ = fs::remove_dir_all(&place);
        })?;
    sync(&versions)?;

    let current = directory.join(CURRENT);
    if replace && fs::symlink_metadata(&current).is_ok_and(|current| current.is_dir()) {
        // A copy of such a directory that followed its links. The plain files beside are as good as it.
        let aside = versions.join(format!("{version}.copy"));
        fs::rename(&current, aside).map_err(io_error("replace", &current))?;
    }
    let before = fs::read_link(&current).ok();
    if replace {
        point(directory, CURRENT, &target, &version)?;
    } else {
        // Creates the link without a rename: of two concurrent calls, one has to fail.
        symlink(&target, &current).map_err(io_error("create", &current))?;
    }
    for file in files {
        let through = Path::new(CURRENT).join(file.name);
        if fs::read_link(directory.join(file.name)).ok().as_ref() != Some(&through) {
            point(directory, file.name, &through, &version)?;
        }
    }
    sync(directory)?;

    let keep = |path: &Path| {
        path.file_name() == place.file_name()
            || before
                .as_ref()
                .is_some_and(|before| path.file_name() == before.file_name())
    };
    // Rubbish is no reason to fail once the new version counts.
    for entry in fs::read_dir(&versions).into_iter().flatten().flatten() {
        if !keep(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Makes `name` a link to `target`, and replaces an existing file or link.
fn point(directory: &Path, name: &str, target: &Path, unique: &str) -> Result<(), IdentityError> {
    let path = directory.join(name);
    let beside = directory.join(format!(".{name}.{unique}"));
    symlink(target, &beside).map_err(io_error("create", &beside))?;
    fs::rename(&beside, &path).map_err(|error| {
        let _ = fs::remove_file(&beside);
        io_error("replace", &path)(error)
    })
}

fn write_new(path: &Path, file: &NewFile<'_>) -> Result<(), IdentityError> {
    let mode = if file.secret { 0o600 } else { 0o644 };
    let mut opened = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .map_err(io_error("create", path))?;
    opened
        .write_all(file.contents.as_bytes())
        .and_then(|()| opened.sync_all())
        .map_err(io_error("write", path))
}

fn sync(directory: &Path) -> Result<(), IdentityError> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(io_error("flush", directory))
}
