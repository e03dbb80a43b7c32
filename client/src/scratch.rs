//! Private directories in memory for what CRIU reads and writes around a dump or a restore.
//!
//! Images hold the process's secrets, so they never touch a disk on the way: the directories lie on
//! tmpfs, mode 0700, and go away with their [`Scratch`], on failure too. Only the log is kept then.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

/// `f_type` of tmpfs and ramfs (linux/magic.h).
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// Left free beside the bytes asked for: logs, and what CRIU writes itself.
const SLACK_BYTES: u64 = 16 << 20;

/// Name prefix of directories kept for their log.
const KEPT_PREFIX: &str = "failed-";

/// How long those are kept. They hold no images, but memory all the same.
const KEPT_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// Why there is no private directory in memory.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// No candidate is on tmpfs, private and large enough.
    #[error("no tmpfs with {needed_bytes} bytes free: {}", tried.join("; "))]
    NoPlace {
        /// Bytes asked for.
        needed_bytes: u64,
        /// Each candidate and what is wrong with it.
        tried: Vec<String>,
    },
    /// The directory named by the user cannot be used.
    #[error("use {}: {source}", path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A private directory, removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    directory: TempDir,
}

impl Scratch {
    /// Makes one on the first tmpfs with `needed_bytes` free, among the user's runtime directory,
    /// `/run/permafrost-UID`, `/dev/shm/permafrost-UID` and `/dev/shm`; `purpose` becomes part of its name.
    ///
    /// # Errors
    /// [`ScratchError::NoPlace`], naming each candidate.
    pub fn in_memory(purpose: &str, needed_bytes: u64) -> Result<Self, ScratchError> {
        let mut tried = Vec::new();
        for (parent, shared) in candidates() {
            match usable(&parent, shared, needed_bytes).and_then(|()| make_in(&parent, purpose)) {
                Ok(scratch) => return Ok(scratch),
                Err(error) => tried.push(format!("{}: {error}", parent.display())),
            }
        }
        Err(ScratchError::NoPlace {
            needed_bytes,
            tried,
        })
    }

    /// Makes one inside `parent`, wherever that lies.
    ///
    /// # Errors
    /// [`ScratchError::Unusable`].
    pub fn within(parent: &Path, purpose: &str) -> Result<Self, ScratchError> {
        make_in(parent, purpose).map_err(|source| ScratchError::Unusable {
            path: parent.to_owned(),
            source,
        })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Makes a private directory in it.
    ///
    /// # Errors
    /// The file system's.
    pub fn subdirectory(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.path().join(name);
        create_private(&path)?;
        Ok(path)
    }

    /// Removes everything but the file `keep` (a path inside), and leaves that lying in a directory
    /// named as of a failure. Returns where.
    ///
    /// # Errors
    /// The file system's; the whole directory is removed then.
    pub fn keep_only(self, keep: &Path) -> io::Result<PathBuf> {
        let name = keep.file_name().unwrap_or(OsStr::new("log"));
        let own_name = self.path().file_name().unwrap_or(OsStr::new("scratch"));
        let mut kept_name = std::ffi::OsString::from(KEPT_PREFIX);
        kept_name.push(own_name);
        let kept = self.path().with_file_name(kept_name);
        create_private(&kept)?;
        fs::rename(keep, kept.join(name)).inspect_err(|_| {
            // The directory is empty: nothing was kept.
            let _ = fs::remove_dir(&kept);
        })?;
        Ok(kept.join(name))
    }

    /// Leaves it all where it is, and returns where.
    pub fn keep(self) -> PathBuf {
        self.directory.keep()
    }
}

/// Creates a directory of mode 0700; one that exists already must be private.
///
/// # Errors
/// The file system's, or [`io::ErrorKind::PermissionDenied`] where others could look in.
pub fn create_private(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check_private(path),
        created => created,
    }
}

/// Candidate parents, and whether others may write there too (with the sticky bit).
fn candidates() -> Vec<(PathBuf, bool)> {
    let uid = rustix::process::geteuid().as_raw();
    let mut candidates = Vec::new();
    if let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        candidates.push((PathBuf::from(runtime).join("permafrost"), false));
    }
    candidates.push((PathBuf::from(format!("/run/permafrost-{uid}")), false));
    candidates.push((PathBuf::from(format!("/dev/shm/permafrost-{uid}")), false));
    // Where somebody else took that name.
    candidates.push((PathBuf::from("/dev/shm"), true));
    candidates
}

fn usable(parent: &Path, shared: bool, needed_bytes: u64) -> io::Result<()> {
    if shared {
        in_memory(parent)?;
    } else {
        in_memory(parent.parent().unwrap_or(parent))?;
        create_private(parent)?;
        remove_old_failures(parent);
    }
    let free = rustix::fs::statvfs(parent)?;
    let free_bytes = free.f_bavail.saturating_mul(free.f_frsize);
    if free_bytes < needed_bytes.saturating_add(SLACK_BYTES) {
        return Err(io::Error::other(format!("{free_bytes} bytes free")));
    }
    Ok(())
}

/// Whether a file system is tmpfs; asked of the parent before anything is made in it.
fn in_memory(path: &Path) -> io::Result<()> {
    let kind = rustix::fs::statfs(path)?.f_type;
    if u64::try_from(kind).is_ok_and(|kind| IN_MEMORY.contains(&kind)) {
        Ok(())
    } else {
        Err(io::Error::other("not on tmpfs"))
    }
}

fn make_in(parent: &Path, purpose: &str) -> io::Result<Scratch> {
    // A job's name may hold anything; a file name may not.
    let purpose: String = purpose
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "-_.@".contains(c) {
                c
            } else {
                '_'
            }
        })
        .take(100)
        .collect();
    // A name nobody else has: mkdir fails on one that exists.
    let directory = tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o700))
        .prefix(&format!("permafrost-{purpose}-"))
        .tempdir_in(parent)?;
    Ok(Scratch { directory })
}

fn check_private(path: &Path) -> io::Result<()> {
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o077 != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "exists and is not private to this user (mode 0700)",
        ));
    }
    Ok(())
}

/// Removes what failures of more than [`KEPT_FOR`] ago left. Best effort: it only saves memory.
fn remove_old_failures(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let old = entry
            .metadata()
            .and_then(|metadata| metadata.modified())
            .is_ok_and(|modified| {
                SystemTime::now()
                    .duration_since(modified)
                    .is_ok_and(|age| age > KEPT_FOR)
            });
        if old && entry.file_name().to_string_lossy().starts_with(KEPT_PREFIX) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_is_private_and_goes_away() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::within(parent.path(), "dump-a/b c").unwrap();
        let path = scratch.path().to_owned();
        assert!(
            path.file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("permafrost-dump-a_b_c-")
        );
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        let images = scratch.subdirectory("images").unwrap();
        assert_eq!(fs::metadata(&images).unwrap().mode() & 0o777, 0o700);
        fs::write(images.join("core-1.img"), "secret").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }

    #[test]
    fn a_failure_keeps_its_log_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::within(parent.path(), "dump").unwrap();
        let images = scratch.subdirectory("images").unwrap();
        fs::write(images.join("core-1.img"), "secret").unwrap();
        let log = scratch.subdirectory("work").unwrap().join("dump.log");
        fs::write(&log, "why").unwrap();
        let path = scratch.path().to_owned();
        let kept = scratch.keep_only(&log).unwrap();
        assert_eq!(fs::read_to_string(&kept).unwrap(), "why");
        assert!(!path.exists());
        assert_eq!(fs::read_dir(kept.parent().unwrap()).unwrap().count(), 1);
        assert_eq!(
            fs::metadata(kept.parent().unwrap()).unwrap().mode() & 0o777,
            0o700
        );
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let open = parent.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(
            create_private(&open).unwrap_err().kind(),
            io::ErrorKind::PermissionDenied
        );
        std::os::unix::fs::symlink(parent.path(), parent.path().join("link")).unwrap();
        assert!(create_private(&parent.path().join("link")).is_err());
    }

    #[test]
    fn more_than_there_is_names_every_candidate() {
        match Scratch::in_memory("restore", u64::MAX / 2).unwrap_err() {
            ScratchError::NoPlace { tried, .. } => {
                assert!(
                    tried.iter().any(|place| place.starts_with("/dev/shm")),
                    "{tried:?}"
                );
            }
            other => panic!("{other}"),
        }
    }
}
