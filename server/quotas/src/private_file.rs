//! Files of lines that belong to this user or root and that nobody else can read or write. They are read again
//! when they change.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Minimum time between two checks of a file: one `stat` each, and only when its contents are requested.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Maximum size of a file. A line has some 120 bytes.
const MOST_BYTES: u64 = 1 << 20;

/// A kind of file.
#[derive(Debug)]
pub struct FileKind<T> {
    /// Name of the kind in messages, such as `tokens`.
    pub name: &'static str,
    /// Advice for a line that does not parse.
    pub line_hint: &'static str,
    /// Advice for a missing file.
    pub missing_hint: &'static str,
    /// Parses the text; an error is the number of the line, from 1, and a description of the defect.
    pub parse: fn(&str) -> Result<T, (usize, String)>,
    /// Contents to use while the file is missing or accessible to others: none, or the last ones read.
    pub unusable: Unusable,
}

/// Contents to use while a file is unusable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// Use no contents: the file gave rights.
    Forget,
    /// Keep the last contents read: the file set limits.
    Keep,
}

/// Reason why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PrivateFileError {
    /// The file is missing, or not readable.
    #[error("read {name} in {}", path.display())]
    Read {
        /// The kind of file.
        name: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Advice for the operator.
        hint: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Others can read or replace the file, or it is no regular file.
    #[error("the file of {name} {} {what}", path.display())]
    Unsafe {
        /// The kind of file.
        name: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Description of the defect.
        what: String,
    },
    /// A line does not parse.
    #[error("{}:{line}: {what}", path.display())]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Description of the defect.
        what: String,
        /// Advice for the operator.
        hint: &'static str,
    },
}

impl PrivateFileError {
    /// Returns advice for the operator.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Read { hint, .. } | Self::Line { hint, .. } => hint,
            Self::Unsafe { .. } => {
                "chmod 600 it, and chown it to the user that permafrostd runs as"
            }
        }
    }
}

/// State of a file as `stat` shows it.
type Stamp = (u64, u64, u64, i64, i64, i64, i64, u32);

/// A private file and its current contents.
#[derive(Debug)]
pub struct PrivateFile<T: 'static> {
    kind: &'static FileKind<T>,
    path: PathBuf,
    look_every: Duration,
    known: Mutex<Known<T>>,
}

#[derive(Debug)]
struct Known<T> {
    contents: Arc<T>,
    looked: Instant,
    stamp: Option<Stamp>,
}

impl<T: Default + 'static> PrivateFile<T> {
    /// Reads the file.
    ///
    /// # Errors
    /// See [`PrivateFileError`].
    pub fn load(
        kind: &'static FileKind<T>,
        path: &Path,
        look_every: Duration,
    ) -> Result<Self, PrivateFileError> {
        let stamp = stamp(path);
        let known = Known {
            contents: Arc::new(read(kind, path)?),
            looked: Instant::now(),
            stamp,
        };
        Ok(Self {
            kind,
            path: path.to_owned(),
            look_every,
            known: Mutex::new(known),
        })
    }

    /// Returns the current contents, read again if the file has changed.
    pub fn contents(&self) -> Arc<T> {
        let mut known = self.known.lock();
        if known.looked.elapsed() >= self.look_every {
            self.look(&mut known);
        }
        Arc::clone(&known.contents)
    }

    fn look(&self, known: &mut Known<T>) {
        known.looked = Instant::now();
        // Before the file is read: a change in between shows at the next check.
        let stamp = stamp(&self.path);
        if stamp == known.stamp {
            return;
        }
        known.stamp = stamp;
        let name = self.kind.name;
        match (read(self.kind, &self.path), self.kind.unusable) {
            (Ok(contents), _) => {
                tracing::info!(event = "private-file-reloaded", path = %self.path.display(), "{name} read again");
                known.contents = Arc::new(contents);
            }
            // A typing error changes nothing.
            (Err(error @ PrivateFileError::Line { .. }), _) | (Err(error), Unusable::Keep) => {
                tracing::error!(event = "private-file-not-reloaded", %error, hint = error.hint(), "the {name} before stay");
            }
            (Err(error), Unusable::Forget) => {
                tracing::error!(event = "private-file-unusable", %error, hint = error.hint(), "no {name} are taken until this is mended");
                known.contents = Arc::default();
            }
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(path).ok()?;
    Some((
        found.dev(),
        found.ino(),
        found.size(),
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec(),
        found.mode(),
    ))
}

fn read<T>(kind: &FileKind<T>, path: &Path) -> Result<T, PrivateFileError> {
    let failed = |source| PrivateFileError::Read {
        name: kind.name,
        path: path.to_owned(),
        hint: kind.missing_hint,
        source,
    };
    let file = File::open(path).map_err(failed)?;
    // The metadata of the open file: no other file can come between.
    let found = file.metadata().map_err(failed)?;
    let refused = |what: String| PrivateFileError::Unsafe {
        name: kind.name,
        path: path.to_owned(),
        what,
    };
    if !found.is_file() || found.size() > MOST_BYTES {
        let what = format!("is no regular file of at most {MOST_BYTES} bytes");
        return Err(refused(what));
    }
    if found.mode() & 0o077 != 0 {
        let mode = found.mode() & 0o7777;
        return Err(refused(format!("is open to others (mode {mode:04o})")));
    }
    let owner = found.uid();
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(refused(format!("belongs to user {owner}")));
    }
    let mut text = String::new();
    file.take(MOST_BYTES)
        .read_to_string(&mut text)
        .map_err(failed)?;
    (kind.parse)(&text).map_err(|(line, what)| PrivateFileError::Line {
        path: path.to_owned(),
        line,
        what,
        hint: kind.line_hint,
    })
}

/// Returns the lines of `text` that are neither empty nor begin with `#`, with their numbers from 1.
pub fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..)
        .zip(text.lines().map(str::trim))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}
