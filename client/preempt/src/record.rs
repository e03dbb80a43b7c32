//! Records of what was done to a target, so that it can be put back whatever became of the command.
//!
//! A record is a file of JSON lines. Each line is appended before the change that it announces, in one write, so a
//! killed command leaves at most an announced change that was not made: putting it back does nothing. A torn last line
//! is of a change that was not made either. The file is locked while a command works on its target, and removed when
//! nothing is left to be put back. Records are of one boot, as the processes are.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use permafrost_criu::scratch;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::cgroup::{Group, Version};
use crate::error::PreemptError;
use crate::target::{Process, Target};

/// Most bytes of a record that are read: some hundred thousand processes.
const MAX_BYTES: u64 = 64 << 20;

/// A record that could not be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Another command works on the target.
    #[error("another command works on {target}")]
    Busy {
        /// Target that is in use.
        target: String,
    },
    /// The file is not a record, or of another target.
    #[error("{path} is no record of {target}")]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Target whose record was expected.
        target: String,
    },
    /// The operating system failed.
    #[error("{action} {path}: {source}")]
    Io {
        /// Verb of what was tried.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl RecordError {
    fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            action,
            path: path.to_owned(),
            source,
        }
    }
}

/// Kind of preemption that a record is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Record of a suspension in memory.
    Suspended,
    /// Record of resources that were taken.
    Shrunk,
}

impl RecordKind {
    const fn prefix(self) -> &'static str {
        match self {
            Self::Suspended => "suspended-",
            Self::Shrunk => "shrunk-",
        }
    }
}

/// A line of a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Entry {
    /// The first line.
    Target { target: Target },
    /// A process that is about to be signalled.
    Process {
        #[serde(flatten)]
        process: Process,
        /// True if it was stopped already: it is not continued.
        was_stopped: bool,
    },
    /// A group that is about to be made.
    Made { path: PathBuf },
    /// A group that is about to be frozen.
    Frozen { path: PathBuf, version_2: bool },
    /// A file of a group that is about to be changed, with its contents before.
    Setting { path: PathBuf, value: String },
}

/// The record of one target, locked as long as it is open.
#[derive(Debug)]
pub(crate) struct Record {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
}

/// The records of one user on this machine.
#[derive(Clone, Debug)]
pub struct Records {
    directory: PathBuf,
}

impl Records {
    /// Opens the records of this user and this boot, and makes their directory if need be: `/run/permafrost-preempted`
    /// for root, where no other user can take the name, else `/var/tmp/permafrost-preempted-UID-BOOT_ID`. It does not
    /// depend on the environment, and stays when the user logs out: logind removes `/run/user/UID`, and what the user
    /// has in `/dev/shm`.
    ///
    /// # Errors
    /// The directory cannot be made, or is not private; the boot's id cannot be read.
    pub fn of_this_user() -> Result<Self, RecordError> {
        let uid = rustix::process::geteuid();
        if uid.is_root() {
            return Self::within(Path::new("/run/permafrost-preempted"));
        }
        let here = permafrost_criu::origin::here().map_err(|error| {
            let path = Path::new("/proc/sys/kernel/random/boot_id");
            RecordError::io("read", path, io::Error::other(error))
        })?;
        let name = format!("permafrost-preempted-{}-{}", uid.as_raw(), here.boot_id);
        Self::within(&Path::new("/var/tmp").join(name))
    }

    /// Opens the records in a directory, which is made if need be.
    ///
    /// # Errors
    /// The directory cannot be made, or is not private.
    pub fn within(directory: &Path) -> Result<Self, RecordError> {
        scratch::create_private(directory)
            .map_err(|error| RecordError::io("use", directory, error))?;
        Ok(Self {
            directory: directory.to_owned(),
        })
    }

    /// Returns the targets with a record of a kind, in order. What cannot be read is left out.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn targets(&self, kind: RecordKind) -> Result<Vec<Target>, RecordError> {
        let all = self.read_all(kind)?.into_iter();
        let mut targets: Vec<Target> = all.map(|(target, _)| target).collect();
        targets.sort();
        Ok(targets)
    }

    /// Returns a target with a record of a kind, other than `own`, that one of the processes belongs to: it was
    /// preempted as a part of that target.
    ///
    /// # Errors
    /// The directory cannot be read, or the members of a target cannot.
    pub fn other_holder(
        &self,
        kind: RecordKind,
        own: &Target,
        pids: &[u32],
    ) -> Result<Option<Target>, PreemptError> {
        for (target, entries) in self.read_all(kind)? {
            if target == *own {
                continue;
            }
            let known: Vec<Process> = processes(&entries).map(|(process, _)| process).collect();
            let members = target.members(&known)?;
            if members.iter().any(|member| pids.contains(&member.pid)) {
                return Ok(Some(target));
            }
        }
        Ok(None)
    }

    /// Reads all records of a kind, each with its target. What cannot be read is left out.
    fn read_all(&self, kind: RecordKind) -> Result<Vec<(Target, Vec<Entry>)>, RecordError> {
        let entries = fs::read_dir(&self.directory)
            .map_err(|error| RecordError::io("list", &self.directory, error))?;
        let mut all = Vec::new();
        for entry in entries.flatten() {
            if !entry
                .file_name()
                .as_bytes()
                .starts_with(kind.prefix().as_bytes())
            {
                continue;
            }
            let read = File::open(entry.path()).and_then(|file| read_entries(&file));
            if let Ok(entries) = read
                && let Some(Entry::Target { target }) = entries.first()
            {
                all.push((target.clone(), entries));
            }
        }
        Ok(all)
    }

    /// Opens the record of a target, and makes an empty one if there is none.
    pub(crate) fn open(&self, kind: RecordKind, target: &Target) -> Result<Record, RecordError> {
        let path = self.path(kind, target);
        loop {
            let mut options = OpenOptions::new();
            options.read(true).append(true).create(true).mode(0o600);
            let file = options
                .open(&path)
                .map_err(|error| RecordError::io("open", &path, error))?;
            if let Some(mut record) = lock(file, &path, target)? {
                if record.entries.is_empty() {
                    record.push(Entry::Target {
                        target: target.clone(),
                    })?;
                }
                return Ok(record);
            }
        }
    }

    /// Opens the record of a target if there is one.
    pub(crate) fn find(
        &self,
        kind: RecordKind,
        target: &Target,
    ) -> Result<Option<Record>, RecordError> {
        let path = self.path(kind, target);
        loop {
            let file = match OpenOptions::new().read(true).append(true).open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(RecordError::io("open", &path, error)),
            };
            if let Some(record) = lock(file, &path, target)? {
                return Ok(Some(record));
            }
        }
    }

    fn path(&self, kind: RecordKind, target: &Target) -> PathBuf {
        let name = match target {
            Target::Tree { pid, start_ticks } => format!("tree-{pid}-{start_ticks}"),
            Target::Group { path, .. } => {
                format!("group-{:016x}", fnv(path.as_os_str().as_bytes()))
            }
        };
        self.directory.join(format!("{}{name}", kind.prefix()))
    }
}

/// Locks a record, and reads it. Returns `None` if it was removed before it was locked.
fn lock(file: File, path: &Path, target: &Target) -> Result<Option<Record>, RecordError> {
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            return Err(RecordError::Busy {
                target: target.to_string(),
            });
        }
        Err(error) => return Err(RecordError::io("lock", path, error.into())),
    }
    let failed = |error| RecordError::io("read", path, error);
    let own = file.metadata().map_err(failed)?;
    let is_current =
        fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino()));
    if !is_current {
        return Ok(None);
    }
    let entries = read_entries(&file).map_err(failed)?;
    let is_of_target = match entries.first() {
        None => true,
        Some(Entry::Target { target: of }) => of == target,
        Some(_) => false,
    };
    if !is_of_target {
        return Err(RecordError::Foreign {
            path: path.to_owned(),
            target: target.to_string(),
        });
    }
    Ok(Some(Record {
        path: path.to_owned(),
        file,
        entries,
    }))
}

fn processes(entries: &[Entry]) -> impl DoubleEndedIterator<Item = (Process, bool)> {
    entries.iter().filter_map(|entry| match entry {
        Entry::Process {
            process,
            was_stopped,
        } => Some((*process, *was_stopped)),
        _ => None,
    })
}

fn read_entries(file: &File) -> io::Result<Vec<Entry>> {
    let mut text = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    // A torn line is of a change that was not made; a new line may follow it.
    Ok(text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect())
}

impl Record {
    /// Appends a line, unless it is there already.
    pub(crate) fn push(&mut self, entry: Entry) -> Result<(), RecordError> {
        if self.entries.contains(&entry) {
            return Ok(());
        }
        let failed = |error| RecordError::io("write", &self.path, error);
        let line = serde_json::to_string(&entry).map_err(|error| failed(error.into()))?;
        // The newline comes first, too: it ends a line that a killed command has torn.
        (self.file.write_all(format!("\n{line}\n").as_bytes())).map_err(failed)?;
        self.entries.push(entry);
        Ok(())
    }

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the processes of the record, each with true if it was stopped before.
    pub(crate) fn processes(&self) -> impl DoubleEndedIterator<Item = (Process, bool)> {
        processes(&self.entries)
    }

    /// Returns the groups that were frozen, the oldest first.
    pub(crate) fn frozen(&self) -> impl Iterator<Item = Group> {
        self.entries.iter().filter_map(|entry| match entry {
            Entry::Frozen { path, version_2 } => Some(Group {
                version: if *version_2 { Version::V2 } else { Version::V1 },
                path: path.clone(),
                is_root: false,
            }),
            _ => None,
        })
    }

    /// Returns the groups that were made, the newest first.
    pub(crate) fn made(&self) -> impl Iterator<Item = &Path> {
        self.entries.iter().rev().filter_map(|entry| match entry {
            Entry::Made { path } => Some(path.as_path()),
            _ => None,
        })
    }

    /// Removes the record: nothing is left to be put back.
    pub(crate) fn remove(self) -> Result<(), RecordError> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(RecordError::io("remove", &self.path, error))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Record {
    /// Unlocks the file. To close it is not enough: a child that another thread has just forked holds a duplicate of
    /// it, and with it the lock, until it executes its program.
    fn drop(&mut self) {
        // An error is one of a lock that is not held.
        let _ = rustix::fs::flock(&self.file, FlockOperation::NonBlockingUnlock);
    }
}

/// Returns a hash of a path (FNV-1a, 64 bits) for a file name; the record itself has the path.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target() -> Target {
        Target::Tree {
            pid: 7,
            start_ticks: 99,
        }
    }

    fn process(pid: u32) -> Entry {
        Entry::Process {
            process: Process {
                pid,
                start_ticks: 5,
            },
            was_stopped: pid.is_multiple_of(2),
        }
    }

    #[test]
    fn a_record_is_free_again_while_a_forked_child_still_holds_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::within(&dir.path().join("records")).unwrap();
        let record = records.open(RecordKind::Shrunk, &target()).unwrap();
        let inherited = record.file.try_clone().unwrap();
        drop(record);
        let found = records.find(RecordKind::Shrunk, &target()).unwrap();
        assert!(found.is_some());
        drop(inherited);
    }

    #[test]
    fn a_record_is_locked_grows_by_lines_and_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::within(&dir.path().join("records")).unwrap();
        assert!(
            records
                .find(RecordKind::Shrunk, &target())
                .unwrap()
                .is_none()
        );
        let mut record = records.open(RecordKind::Suspended, &target()).unwrap();
        record.push(process(7)).unwrap();
        record.push(process(8)).unwrap();
        record.push(process(8)).unwrap();
        let busy = records.open(RecordKind::Suspended, &target()).unwrap_err();
        assert_eq!(busy.to_string(), "another command works on process 7");
        assert!(
            records
                .find(RecordKind::Shrunk, &target())
                .unwrap()
                .is_none()
        );
        assert_eq!(records.targets(RecordKind::Suspended).unwrap(), [target()]);
        drop(record);
        let record = records
            .find(RecordKind::Suspended, &target())
            .unwrap()
            .unwrap();
        let pids: Vec<_> = record
            .processes()
            .map(|(one, was)| (one.pid, was))
            .collect();
        assert_eq!(pids, [(7, false), (8, true)]);
        record.remove().unwrap();
        assert!(records.targets(RecordKind::Suspended).unwrap().is_empty());
    }

    #[test]
    fn a_torn_line_is_left_out_and_what_follows_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::within(&dir.path().join("records")).unwrap();
        let mut record = records.open(RecordKind::Shrunk, &target()).unwrap();
        let setting = Entry::Setting {
            path: "/sys/fs/cgroup/x/cpu.max".into(),
            value: "max 100000".to_owned(),
        };
        record.push(setting.clone()).unwrap();
        record
            .file
            .write_all(b"\n{\"event\":\"process\",\"pi")
            .unwrap();
        drop(record);
        let mut record = records.open(RecordKind::Shrunk, &target()).unwrap();
        assert_eq!(record.entries()[1..], [setting]);
        record.push(process(9)).unwrap();
        drop(record);
        let record = records
            .find(RecordKind::Shrunk, &target())
            .unwrap()
            .unwrap();
        assert_eq!(record.processes().count(), 1);
        // A file of something else is not taken for a record.
        fs::write(&record.path, "{\"event\":\"made\",\"path\":\"/x\"}\n").unwrap();
        drop(record);
        let foreign = records.open(RecordKind::Shrunk, &target()).unwrap_err();
        assert!(matches!(foreign, RecordError::Foreign { .. }), "{foreign}");
    }

    #[test]
    fn a_directory_that_others_can_read_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(Records::within(dir.path()).is_err());
    }
}
