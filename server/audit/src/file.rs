//! The file of the audit log, and the thread that writes it.
//!
//! Lines are written in the order of their requests, and synchronised with the disk after each batch, so that
//! lines are on the disk within moments if it keeps up; a crash of the machine loses at most the batch under
//! way. No request waits for it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use permafrost_store::clock::unix_ms;
use rustix::fs::OFlags;

/// Maximum number of lines that wait for the disk, some hundred bytes each. Further lines are lost while the
/// disk does not answer.
const QUEUE: usize = 8192;

/// Maximum bytes that are written and synchronised at once.
const BATCH_BYTES: usize = 256 << 10;

enum Message {
    Line(Vec<u8>),
    Reopen,
}

/// The file, as seen by requests.
pub(super) struct Writer {
    lines: Option<SyncSender<Message>>,
    lost: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Opens the file and starts its thread.
    pub(super) fn start(path: PathBuf) -> io::Result<Self> {
        let file = open(&path)?;
        check(&path, &file)?;
        let (lines, queue) = sync_channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let log = Log {
            path,
            file: Some(file),
            torn: false,
            failing: false,
            noted: 0,
            lost: Arc::clone(&lost),
        };
        let thread = std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || log.run(&queue))?;
        Ok(Self {
            lines: Some(lines),
            lost,
            thread: Some(thread),
        })
    }

    /// Passes a line to the thread. A line that finds the queue full is lost, and counted.
    pub(super) fn write(&self, line: Vec<u8>) {
        let Some(lines) = &self.lines else { return };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            lines.try_send(Message::Line(line))
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn reopen(&self) {
        if let Some(lines) = &self.lines {
            // With a full queue the thread has lines to write, and notices by itself that the file was moved.
            let _ = lines.try_send(Message::Reopen);
        }
    }

    pub(super) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // The thread ends after the last line.
        self.lines = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The file, as seen by its thread.
struct Log {
    path: PathBuf,
    /// `None` while it cannot be opened.
    file: Option<File>,
    /// True if the last write ended in the middle of a line.
    torn: bool,
    failing: bool,
    /// Number of lost lines that the file records as missing.
    noted: u64,
    lost: Arc<AtomicU64>,
}

impl Log {
    fn run(mut self, queue: &Receiver<Message>) {
        while let Ok(first) = queue.recv() {
            let (mut batch, mut lines) = (Vec::new(), 0);
            let mut reopen = false;
            let mut next = Some(first);
            while let Some(message) = next {
                match message {
                    Message::Line(line) => {
                        batch.extend_from_slice(&line);
                        lines += 1;
                    }
                    Message::Reopen => reopen = true,
                }
                next = (batch.len() < BATCH_BYTES)
                    .then(|| queue.try_recv().ok())
                    .flatten();
            }
            if reopen || self.was_moved() {
                self.file = None;
            }
            if lines > 0 {
                self.append(&batch, lines);
            }
        }
    }

    /// Returns true if the path names another file than the open one: it was rotated away, or removed.
    fn was_moved(&self) -> bool {
        let Some(open) = self.file.as_ref().and_then(|file| file.metadata().ok()) else {
            return true;
        };
        let named = std::fs::symlink_metadata(&self.path);
        named.map_or(true, |named| {
            (named.dev(), named.ino()) != (open.dev(), open.ino())
        })
    }

    fn append(&mut self, batch: &[u8], lines: u64) {
        match self.try_append(batch) {
            Ok(()) => {
                if std::mem::take(&mut self.failing) {
                    tracing::warn!(event = "audit-log-recovered", path = %self.path.display(), lost = self.noted, "the audit log is written again");
                }
            }
            Err(error) => {
                self.lost.fetch_add(lines, Ordering::Relaxed);
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::error!(
                        event = "audit-log-failed", path = %self.path.display(),
                        %error,
                        "the audit log cannot be written: requests are answered, and recorded here alone"
                    );
                }
            }
        }
    }

    fn try_append(&mut self, batch: &[u8]) -> io::Result<()> {
        let lost = self.lost.load(Ordering::Relaxed);
        let mut bytes = Vec::new();
        if self.torn {
            bytes.push(b'\n');
        }
        if lost > self.noted {
            let gap = serde_json::json!({
                "time_unix_ms": unix_ms(),
                "action": "lines-lost",
                "left_out": lost - self.noted,
            });
            bytes.extend_from_slice(gap.to_string().as_bytes());
            bytes.push(b'\n');
        }
        bytes.extend_from_slice(batch);
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open(&self.path)?),
        };
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match file.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => {
                    self.torn = rest[written - 1] != b'\n';
                    rest = &rest[written..];
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.noted = lost;
        file.sync_data()
    }
}

/// Opens the file for appending; creates it, for its owner alone, if it is missing.
fn open(path: &Path) -> io::Result<File> {
    let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or(0);
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(flags)
        .open(path)
}

/// Refuses a file that another user could change.
fn check(path: &Path, file: &File) -> io::Result<()> {
    let found = file.metadata()?;
    let user = rustix::process::geteuid().as_raw();
    let wrong = if !found.is_file() {
        "is no regular file: name another".to_owned()
    } else if found.uid() != user {
        format!(
            "belongs to uid {}, and this is uid {user}: chown it, or name another",
            found.uid()
        )
    } else if found.mode() & 0o022 != 0 {
        format!(
            "can be written by others (mode {:04o}): chmod 0600 it",
            found.mode() & 0o7777
        )
    } else {
        return Ok(());
    };
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("{} {wrong}", path.display()),
    ))
}
