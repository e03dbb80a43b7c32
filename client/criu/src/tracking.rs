//! Markers of the checkpoints that the soft-dirty bits of processes refer to.
//!
//! A dump with `--track-mem` resets the bits of a whole tree, and the next dump leaves out the pages that are
//! clean since then. That is right only if the *last* reset was made by the very checkpoint that the next dump
//! is compared with. That is not so if a later dump reset the bits and then failed, or belonged to another job,
//! or was a dump of a part of the tree, or of a larger tree: leaving out clean pages would then lose the writes
//! in between, and nothing could detect it. So a marker for the root of each tracked tree names the checkpoint
//! of its last reset:
//!
//! 1. *lock*: one tracked dump on this machine at a time, from the look at the marker to the new one;
//! 2. *forget*, before CRIU runs: the markers of the root, of its ancestors and of its descendants go;
//! 3. *record*, after the seal: the root's marker names the new checkpoint.
//!
//! A process that is forked between 2 and the freeze has no marker that could be wrong: only 3 makes one.
//!
//! The directory is one for the machine, and root's. Other users may not dump with `--track-mem` at all: their
//! resets could not outdate the markers of root, which root trusts. Not detected are a `criu --track-mem` by
//! hand and one inside of a container with a `/run` of its own; after these, the next dump has to be taken with
//! `--full`.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use permafrost_protocol::manifest::Origin;
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::processes::{self, Kinship};
use crate::scratch;

/// Directory of the markers.
const DIRECTORY: &str = "/run/permafrost-tracking";

/// Name of the lock file in that directory.
const LOCK: &str = "lock";

/// Interval at which a lock that another dump holds is tried again.
const RETRY: Duration = Duration::from_millis(20);

/// The markers of this machine.
#[derive(Debug)]
pub struct Markers {
    directory: PathBuf,
}

/// The markers, locked until dropped (or until this process ends).
#[derive(Debug)]
pub struct Locked {
    markers: Markers,
    _lock: File,
}

/// Returns true if this user may dump with `--track-mem`.
pub fn permitted() -> bool {
    rustix::process::geteuid().is_root()
}

impl Markers {
    /// Opens the markers of this machine, and makes their directory if need be.
    ///
    /// # Errors
    /// The directory cannot be made, or is not root's alone; a dump with `--track-mem` must not go on then.
    pub fn of_this_machine() -> io::Result<Self> {
        if !permitted() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Self::within(Path::new(DIRECTORY))
    }

    fn within(directory: &Path) -> io::Result<Self> {
        scratch::create_private(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// Returns true if the bits of the process that `origin` names were last reset by checkpoint `id`.
    pub fn names(&self, origin: &Origin, id: &str) -> bool {
        !id.is_empty()
            && fs::read_to_string(self.path(origin)).is_ok_and(|named| named == content(origin, id))
    }

    /// Locks the markers, and waits while another dump holds the lock. `wait` is called now and then; if it
    /// returns false, the result is `None`.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn lock(self, mut wait: impl FnMut() -> bool) -> io::Result<Option<Locked>> {
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(self.directory.join(LOCK))?;
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    return Ok(Some(Locked {
                        markers: self,
                        _lock: lock,
                    }));
                }
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if wait() => thread::sleep(RETRY),
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn path(&self, origin: &Origin) -> PathBuf {
        self.directory
            .join(format!("{}-{}", origin.pid, origin.start_ticks))
    }
}

impl Locked {
    /// Returns the result of [`Markers::names`] under the lock.
    pub fn names(&self, origin: &Origin, id: &str) -> bool {
        self.markers.names(origin, id)
    }

    /// Removes the markers of the tree below `pid`, of the trees it is a part of, and of dead processes,
    /// because the bits are about to be reset. If it is unclear whether two processes are related, the marker
    /// is removed too. Costs a few reads of `/proc` a marker.
    ///
    /// # Errors
    /// An error of the file system; the dump must not go on then.
    pub fn forget(&self, pid: u32) -> io::Result<()> {
        for entry in fs::read_dir(&self.markers.directory)? {
            let entry = entry?;
            if entry.file_name() == LOCK {
                continue;
            }
            let marked = entry
                .file_name()
                .to_str()
                .and_then(|name| name.split_once('-')?.0.parse().ok());
            if marked.is_some_and(|marked| processes::kinship(pid, marked) == Kinship::None) {
                continue;
            }
            fs::remove_file(entry.path())?;
        }
        Ok(())
    }

    /// Records that checkpoint `id` was the last to reset the bits of the tree below the process that `origin`
    /// names.
    ///
    /// # Errors
    /// An error of the file system; the next dump then leaves nothing out.
    pub fn record(self, origin: &Origin, id: &str) -> io::Result<()> {
        // A marker that is cut short names nothing.
        fs::write(self.markers.path(origin), content(origin, id))
    }
}

/// Returns the contents of a marker. They name the boot, which resets the bits: pid and start time may come
/// again.
fn content(origin: &Origin, id: &str) -> String {
    format!("{} {id}", origin.boot_id)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn origin(pid: u32, start_ticks: u64) -> Origin {
        Origin {
            pid,
            start_ticks,
            boot_id: "boot".to_owned(),
            ..Origin::default()
        }
    }

    fn locked(directory: &Path) -> Locked {
        let markers = Markers::within(directory).unwrap();
        // A child that another test is just starting holds the descriptor too, until it becomes its program.
        markers.lock(|| true).unwrap().unwrap()
    }

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    fn directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::remove_dir(directory.path()).unwrap();
        directory
    }

    #[test]
    fn a_marker_names_the_last_reset_of_one_process_only() {
        let directory = directory();
        let one = origin(std::process::id(), 100);
        let markers = locked(directory.path());
        assert!(!markers.names(&one, "a"));
        markers.forget(one.pid).unwrap();
        markers.record(&one, "a").unwrap();
        let markers = locked(directory.path());
        assert!(markers.names(&one, "a") && !markers.names(&one, "b"));
        // The next dump failed: nothing is known any more.
        markers.forget(one.pid).unwrap();
        assert!(!markers.names(&one, "a"));
        markers.record(&one, "b").unwrap();
        let markers = locked(directory.path());
        assert!(!markers.names(&origin(one.pid, 101), "b"));
        let rebooted = Origin {
            boot_id: "another".to_owned(),
            ..one
        };
        assert!(!markers.names(&rebooted, "b"));
    }

    #[test]
    fn a_reset_outdates_ancestors_and_descendants_and_nobody_else() {
        let directory = directory();
        let (mut child, mut sibling) = (sleeper(), sleeper());
        let root = origin(std::process::id(), 1);
        let (child_origin, sibling_origin) = (origin(child.id(), 2), origin(sibling.id(), 3));
        let mark = |origin: &Origin| locked(directory.path()).record(origin, "a").unwrap();
        let marked = |origin: &Origin| locked(directory.path()).names(origin, "a");

        mark(&root);
        mark(&sibling_origin);
        locked(directory.path()).forget(child.id()).unwrap();
        assert!(!marked(&root), "the larger tree's marker is outdated");
        assert!(marked(&sibling_origin));

        mark(&child_origin);
        locked(directory.path()).forget(root.pid).unwrap();
        assert!(!marked(&child_origin), "so is that of a part");

        mark(&child_origin);
        child.kill().unwrap();
        child.wait().unwrap();
        locked(directory.path()).forget(sibling.id()).unwrap();
        assert!(!marked(&child_origin), "and the dead's");
        sibling.kill().unwrap();
        sibling.wait().unwrap();
    }

    #[test]
    fn two_dumps_do_not_interleave() {
        let directory = directory();
        let first = locked(directory.path());
        let mut asked = 0;
        let second = Markers::within(directory.path()).unwrap().lock(|| {
            asked += 1;
            asked < 3
        });
        assert!(second.unwrap().is_none() && asked == 3);
        first.record(&origin(7, 1), "a").unwrap();
        assert!(locked(directory.path()).names(&origin(7, 1), "a"));
    }
}
