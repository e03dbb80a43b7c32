//! Report of a workload about itself.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Report of a workload. The file is replaced as a whole by a rename, so a reader never sees half of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Pid of the root process.
    pub pid: u32,
    /// Ticks of about a millisecond since the start; a restore does not reset them.
    pub counter: u64,
    /// Number of times that pages were modified.
    pub generation: u32,
    /// Number of pages filled, in all processes.
    pub pages: u64,
    /// Number of changed or lost pages, as of the last verification.
    pub bad_pages: u64,
    /// Checksum that the root has updated since it filled its memory.
    pub checksum_kept: u64,
    /// The checksum recomputed from memory; 0 before the first verification.
    pub checksum_found: u64,
    /// Other faults found: shared memory that is not shared, pipes that do not answer, an open file at another
    /// position.
    pub faults: Vec<String>,
    /// True if this report comes from a verification.
    pub verified: bool,
    /// Members' process ids.
    pub members: Vec<u32>,
    /// Ticks of all threads but the main one.
    pub thread_ticks: u64,
}

impl Status {
    /// Returns true if the report comes from a verification that found no fault.
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
