//! What a workload reports about itself.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// A workload's report; the file is replaced whole by a rename, so a reader never sees half of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The root process.
    pub pid: u32,
    /// Ticks of about a millisecond since it started; goes on after a restore where it was.
    pub counter: u64,
    /// How often pages were modified.
    pub generation: u32,
    /// Pages filled, in all processes.
    pub pages: u64,
    /// Pages that are not what they should be, as of the last verification.
    pub bad_pages: u64,
    /// Checksum that the root has kept up since it filled its memory.
    pub checksum_kept: u64,
    /// The same, recomputed from memory; 0 before the first verification.
    pub checksum_found: u64,
    /// Whether everything else held too: shared memory is shared, pipes answer, the open file stands where it did.
    pub faults: Vec<String>,
    /// Whether this report comes from a verification.
    pub verified: bool,
    /// Members' process ids.
    pub members: Vec<u32>,
    /// Ticks of all threads but the main one.
    pub thread_ticks: u64,
}

impl Status {
    /// Whether the report is of a verification that found nothing wrong.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.verified
            && self.bad_pages == 0
            && self.faults.is_empty()
            && self.checksum_found == self.checksum_kept
    }

    /// Reads a report, `None` while there is none.
    ///
    /// # Errors
    /// Fails when the file cannot be read or is not a report.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        match std::fs::read(path) {
            Ok(bytes) => Ok(Some(
                serde_json::from_slice(&bytes)
                    .with_context(|| format!("parse {}", path.display()))?,
            )),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    /// Replaces the report.
    ///
    /// # Errors
    /// Fails when the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let new = path.with_extension("new");
        std::fs::write(&new, serde_json::to_vec(self)?)
            .with_context(|| format!("write {}", new.display()))?;
        std::fs::rename(&new, path).with_context(|| format!("rename to {}", path.display()))
    }
}
