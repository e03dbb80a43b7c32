//! Private directories in memory for what CRIU reads and writes around a dump or a restore.
//!
//! Images hold the process's secrets, so they never touch a disk on the way: the directories lie on tmpfs, have
//! mode 0700, and are removed with their [`Scratch`], on failure too. Only the log is kept then. Directories of
//! an owner that was killed are removed by the next owner in the same place: each owner holds a lock on its directory,
//! and CRIU's command line names it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, OFlags};
use tempfile::TempDir;

/// Values of `f_type` for tmpfs and ramfs (linux/magic.h).
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// Values of `f_type` for file systems of this machine alone (linux/magic.h): tmpfs, ramfs, ext4, XFS, Btrfs, F2FS,
/// ZFS, overlayfs. On those of several machines, a lock may count on its own machine only.
const LOCAL: [u64; 8] = [
    IN_MEMORY[0],
    IN_MEMORY[1],
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0x794c_7630,
];

/// Bytes left free besides those requested: for logs, and for files that CRIU writes itself.
const SLACK_BYTES: u64 = 16 << 20;

/// Name prefix of directories in use, or left by an owner that was killed.
const PREFIX: &str = "permafrost-";

/// Words that follow the prefix where images are built; other names with the prefix are of directories that
/// hold these.
const PURPOSES: [&str; 2] = ["dump-", "restore-"];

/// Name prefix of directories that were left on purpose.
const LEFT_PREFIX: &str = "kept-";

/// Most attempts to make a directory that another process keeps removing because it takes it for a dead
/// owner's.
const ATTEMPTS: u32 = 8;

/// Name prefix of directories kept for their log.
const KEPT_PREFIX: &str = "failed-";

/// Time for which the directories of failures are kept. They hold no images, but memory all the same.
const KEPT_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// A private directory that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// No candidate is on tmpfs, private and large enough.
    #[error("no tmpfs with {needed_bytes} bytes free: {}", tried.join("; "))]
    NoPlace {
        /// Number of bytes requested.
        needed_bytes: u64,
        /// Candidates, each with the reason why it was refused.
        tried: Vec<String>,
    },
    /// The directory named by the user cannot be used.
    #[error("use {}: {source}", path.display())]
    Unusable {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

/// A private directory, removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    directory: TempDir,
    /// Lock on the directory, held as long as its owner lives.
    _lock: File,
}

impl Scratch {
    /// Makes a directory on the first tmpfs with `needed_bytes` free, among the user's runtime directory,
    /// `/run/permafrost-UID`, `/dev/shm/permafrost-UID` and `/dev/shm`; `purpose` becomes part of its name.
    ///
    /// # Errors
    /// [`ScratchError::NoPlace`], naming each candidate.
    pub fn in_memory(purpose: &str, needed_bytes: u64) -> Result<Self, ScratchError> {
        for (parent, _) in candidates() {
            remove_abandoned(&parent);
        }
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

    /// Makes a directory inside `parent`, on any file system. On a local one, directories of killed owners are removed.
    ///
    /// # Errors
    /// [`ScratchError::Unusable`].
    pub fn within(parent: &Path, purpose: &str) -> Result<Self, ScratchError> {
        if is_one_of(parent, &LOCAL).unwrap_or(false) {
            remove_abandoned(parent);
        }
        make_in(parent, purpose).map_err(|source| ScratchError::Unusable {
            path: parent.to_owned(),
            source,
        })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Makes a private directory inside this one.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn subdirectory(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.path().join(name);
        create_private(&path)?;
        Ok(path)
    }

    /// Removes everything but the file `keep` (a path inside), and leaves that file in a directory named as of
    /// a failure. Returns its new path.
    ///
    /// # Errors
    /// An error of the file system; the whole directory is removed then.
    pub fn keep_only(self, keep: &Path) -> io::Result<PathBuf> {
        let name = keep.file_name().unwrap_or(OsStr::new("log"));
        let own_name = self.path().file_name().unwrap_or(OsStr::new("scratch"));
        let mut kept_name = OsString::from(KEPT_PREFIX);
        kept_name.push(own_name);
        let kept = self.path().with_file_name(kept_name);
        create_private(&kept)?;
        fs::rename(keep, kept.join(name)).inspect_err(|_| {
            // The directory is empty: nothing was kept.
            let _ = fs::remove_dir(&kept);
        })?;
        Ok(kept.join(name))
    }

    /// Leaves the whole directory, under a name that tells it from an abandoned one, and returns its path.
    pub fn keep(self) -> PathBuf {
        let path = self.directory.keep();
        let mut name = OsString::from(LEFT_PREFIX);
        name.push(path.file_name().unwrap_or(OsStr::new("scratch")));
        let kept = path.with_file_name(name);
        match fs::rename(&path, &kept) {
            Ok(()) => kept,
            Err(_) => path,
        }
    }
}

/// Creates a directory of mode 0700; a directory that exists already must be private.
///
/// # Errors
/// An error of the file system, or [`io::ErrorKind::PermissionDenied`] for a directory that other users can
/// read.
pub fn create_private(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check_private(path),
        created => created,
    }
}

/// Returns the candidate parents, and for each whether other users may write there too (with the sticky bit).
fn candidates() -> Vec<(PathBuf, bool)> {
    let uid = rustix::process::geteuid().as_raw();
    let mut candidates = Vec::new();
    if let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()) {
        candidates.push((PathBuf::from(runtime).join("permafrost"), false));
    }
    candidates.push((PathBuf::from(format!("/run/permafrost-{uid}")), false));
    candidates.push((PathBuf::from(format!("/dev/shm/permafrost-{uid}")), false));
    // For the case that another user took that name.
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

/// Checks that a file system is tmpfs; called for the parent before anything is made in it.
fn in_memory(path: &Path) -> io::Result<()> {
    if is_one_of(path, &IN_MEMORY)? {
        Ok(())
    } else {
        Err(io::Error::other("not on tmpfs"))
    }
}

/// Returns true if files below `path` take memory, and are lost when the machine stops. False if `path` cannot be
/// examined.
#[must_use]
pub fn is_in_memory(path: &Path) -> bool {
    in_memory(path).is_ok()
}

fn is_one_of(path: &Path, kinds: &[u64]) -> io::Result<bool> {
    let kind = rustix::fs::statfs(path)?.f_type;
    Ok(u64::try_from(kind).is_ok_and(|kind| kinds.contains(&kind)))
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
    for _ in 0..ATTEMPTS {
        // A name that no other process has: mkdir fails on an existing one.
        let directory = tempfile::Builder::new()
            .permissions(fs::Permissions::from_mode(0o700))
            .prefix(&format!("{PREFIX}{purpose}-"))
            .tempdir_in(parent)?;
        if let Some(lock) = lock(directory.path())? {
            return Ok(Scratch {
                directory,
                _lock: lock,
            });
        }
    }
    Err(io::ErrorKind::ResourceBusy.into())
}

/// Locks a directory; returns `None` if another process holds the lock or removed the directory.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(i32::try_from(flags.bits()).unwrap_or_default())
        .open(path);
    let directory = match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    // Another process may have taken the directory for abandoned and removed it between mkdir and here.
    let (ours, there) = (directory.metadata()?, fs::symlink_metadata(path));
    Ok(there
        .is_ok_and(|there| there.ino() == ours.ino() && there.dev() == ours.dev())
        .then_some(directory))
}

/// Removes the directories in `parent` whose owners were killed. Errors are ignored.
fn remove_abandoned(parent: &Path) {
    let own = rustix::process::geteuid().as_raw();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let purpose = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let path = entry.path();
        if purpose.is_some_and(|purpose| PURPOSES.iter().any(|known| purpose.starts_with(known)))
            && entry
                .metadata()
                .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == own)
            // Held until it is gone.
            && let Ok(Some(_lock)) = lock(&path)
            && !named_by_a_process(&path)
        {
            let _ = fs::remove_dir_all(&path);
        }
    }
}

/// Returns true if `path` occurs on the command line of a process: a CRIU that outlived its `permafrost` reads
/// and writes there.
fn named_by_a_process(path: &Path) -> bool {
    let path = path.as_os_str().as_bytes();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().as_bytes()[0].is_ascii_digit())
        .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .any(|line| line.windows(path.len()).any(|part| part == path))
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

/// Removes the directories of failures older than [`KEPT_FOR`]. Errors are ignored: this only saves memory.
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

    fn until(condition: impl Fn() -> bool) {
        for _ in 0..1000 {
            if condition() {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("not within 5 s");
    }

    #[test]
    fn what_a_killed_owner_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let make = |purpose| Scratch::within(parent.path(), purpose).unwrap();
        // Drops the lock but not the directory, as SIGKILL does.
        let abandon = |scratch: Scratch| {
            fs::create_dir(scratch.path().join("images")).unwrap();
            scratch.directory.keep()
        };
        let dead = abandon(make("dump-train"));
        let dead_too = abandon(make("restore-train"));
        let alive = make("dump-train");
        let kept = make("restore-train").keep();
        let other = abandon(make("1000"));
        let used = abandon(make("restore-train"));
        let mut user = std::process::Command::new("sh")
            .args(["-c", "read line", "criu", "--images-dir"])
            .arg(used.join("images"))
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();

        // A process has no command line yet in the first moments of its program.
        let cmdline = format!("/proc/{}/cmdline", user.id());
        until(|| fs::read_to_string(&cmdline).is_ok_and(|line| line.contains("images")));
        // A child that another test is just starting holds the locks too, until it becomes its program.
        until(|| {
            remove_abandoned(parent.path());
            !dead.exists() && !dead_too.exists()
        });
        assert!(alive.path().exists() && kept.exists() && other.exists() && used.exists());
        drop(user.stdin.take());
        user.wait().unwrap();
        until(|| {
            remove_abandoned(parent.path());
            !used.exists()
        });
        assert!(alive.path().exists() && kept.exists());
    }

    #[test]
    fn the_next_owner_in_a_directory_removes_what_a_killed_one_left() {
        // On tmpfs: the file system of /tmp may be a shared one.
        let parent = tempfile::tempdir_in("/dev/shm").unwrap();
        let make = |purpose| Scratch::within(parent.path(), purpose).unwrap();
        let dead = make("restore-train@1").directory.keep();
        fs::write(dead.join("core-1.img"), "secret").unwrap();
        let alive = make("dump-train");
        let foreign = parent.path().join("permafrost-restore");
        fs::create_dir(&foreign).unwrap();
        // A child that another test is just starting holds the locks too, until it becomes its program.
        until(|| {
            drop(make("dump-other"));
            !dead.exists()
        });
        assert!(alive.path().exists() && foreign.exists());
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
