//! Times for which parked dumps have been kept, over restarts.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

/// Maximum time between two saves while something is parked.
const SAVE_PERIOD: Duration = Duration::from_secs(60);

/// Version of the file.
const VERSION: u32 = 1;

/// Maximum size of the file, for 2^20 checkpoints. A longer file was not written by this module.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Times for which parked checkpoints have been kept, by id.
#[derive(Default)]
pub struct ParkedTimes(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    kept: HashMap<String, Kept>,
    file: Option<PathBuf>,
    saved: Option<Instant>,
    /// True if something was added or removed since the last save.
    changed: bool,
}

struct Kept {
    /// Time that earlier daemons kept the checkpoint.
    before: Duration,
    /// Time since which this daemon keeps the checkpoint.
    since: Instant,
}

impl Kept {
    fn total(&self) -> Duration {
        self.before.saturating_add(self.since.elapsed())
    }
}

#[derive(Serialize, Deserialize)]
struct File {
    v: u32,
    /// Milliseconds that each checkpoint has been kept, by checkpoint id.
    kept_ms: HashMap<String, u64>,
}

impl ParkedTimes {
    /// Continues from the times in `file`, and saves them there. If the file cannot be read, all times begin at
    /// zero. Without a file nothing is saved.
    #[must_use]
    pub fn new(file: Option<PathBuf>) -> Self {
        let known = file.as_deref().map_or_else(HashMap::new, |file| {
            load(file).unwrap_or_else(|error| {
                tracing::warn!(event = "parked-times-unreadable", %error, path = %file.display(), "times of parked dumps cannot be read: they begin anew");
                HashMap::new()
            })
        });
        let since = Instant::now();
        let kept = known.into_iter().map(|(id, kept_ms)| {
            let before = Duration::from_millis(kept_ms);
            (id, Kept { before, since })
        });
        Self(Mutex::new(Inner {
            kept: kept.collect(),
            file,
            ..Inner::default()
        }))
    }

    /// Returns the time that a parked checkpoint has been kept; it begins with the first call.
    pub fn kept_for(&self, id: &str) -> Duration {
        let mut inner = self.lock();
        if let Some(kept) = inner.kept.get(id) {
            return kept.total();
        }
        let begins = Kept {
            before: Duration::ZERO,
            since: Instant::now(),
        };
        inner.kept.insert(id.to_owned(), begins);
        inner.changed = true;
        Duration::ZERO
    }

    /// Forgets all checkpoints but these.
    pub fn retain(&self, parked: &HashSet<&str>) {
        let mut inner = self.lock();
        let before = inner.kept.len();
        inner.kept.retain(|id, _| parked.contains(id.as_str()));
        inner.changed |= inner.kept.len() != before;
    }

    /// Forgets one checkpoint.
    pub fn forget(&self, id: &str) {
        let mut inner = self.lock();
        inner.changed |= inner.kept.remove(id).is_some();
    }

    /// Saves the times if [`SAVE_PERIOD`] has passed.
    pub fn save_now_and_then(&self) {
        let inner = self.lock();
        let due = inner.saved.is_none_or(|at| at.elapsed() >= SAVE_PERIOD);
        if inner.changed || (due && !inner.kept.is_empty()) {
            drop(inner);
            self.save();
        }
    }

    /// Saves the times, atomically.
    pub fn save(&self) {
        let mut inner = self.lock();
        let Some(path) = inner.file.clone() else {
            return;
        };
        let ms = |kept: &Kept| u64::try_from(kept.total().as_millis()).unwrap_or(u64::MAX);
        let kept = inner.kept.iter();
        let file = File {
            v: VERSION,
            kept_ms: kept.map(|(id, kept)| (id.clone(), ms(kept))).collect(),
        };
        inner.saved = Some(Instant::now());
        match write(&path, &file) {
            Ok(()) => inner.changed = false,
            Err(error) => {
                tracing::warn!(event = "parked-times-not-written", %error, path = %path.display(), "times of parked dumps are not written down: a restart begins them anew");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock()
    }
}

fn load(path: &Path) -> io::Result<HashMap<String, u64>> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HashMap::new()),
        Err(error) => return Err(error),
        Ok(file) if file.len() > MAX_FILE_BYTES => return Err(io::Error::other("too long")),
        Ok(_) => {}
    }
    let file: File = serde_json::from_slice(&fs::read(path)?)?;
    if file.v == VERSION {
        Ok(file.kept_ms)
    } else {
        Err(io::Error::other(format!("version {}", file.v)))
    }
}

fn write(path: &Path, file: &File) -> io::Result<()> {
    let aside = path.with_extension("new");
    fs::write(&aside, serde_json::to_vec(file)?)?;
    fs::rename(aside, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_go_on_after_a_restart_and_rubbish_begins_them_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("parked.json");
        std::fs::write(&path, r#"{"v":1,"kept_ms":{"a":3600000,"gone":5}}"#).unwrap();
        let hour = Duration::from_secs(3600);
        let parking = ParkedTimes::new(Some(path.clone()));
        assert!(parking.kept_for("a") >= hour);
        assert!(parking.kept_for("b") < hour);
        parking.retain(&HashSet::from(["a", "b"]));
        parking.save_now_and_then();

        let next = ParkedTimes::new(Some(path.clone()));
        assert!(next.kept_for("a") >= hour);
        assert_eq!(next.lock().kept.len(), 2);
        next.forget("a");
        assert!(next.kept_for("a") < hour);
        for rubbish in [&b"{\"v\":2,\"kept_ms\":{\"a\":1}}"[..], b"{", b""] {
            std::fs::write(&path, rubbish).unwrap();
            let next = ParkedTimes::new(Some(path.clone()));
            assert_eq!(next.lock().kept.len(), 0);
        }
    }
}
