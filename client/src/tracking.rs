//! Which checkpoint a process's soft-dirty bits refer to.
//!
//! A dump with `--track-mem` resets the bits, and the next one leaves out the pages that are clean since.
//! That is right only if the *last* reset was the one of the very checkpoint that the next dump is
//! compared with. It was not if, after it, a dump reset the bits and then failed, or belonged to another
//! job: leaving out clean pages would then lose what the process wrote in between, and nothing could
//! tell. So a marker in memory, gone with the boot as the bits are, names the checkpoint of the last
//! reset. It is removed before CRIU runs with `--track-mem` and written when the seal is there.
//!
//! A `criu --track-mem` by hand is not seen here; whoever does that takes the next dump with `--full`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use permafrost_protocol::manifest::Origin;

use crate::scratch;

/// The marker of one process.
#[derive(Debug)]
pub struct Marker {
    path: PathBuf,
}

impl Marker {
    /// The marker of the process that `origin` names; `None` where nothing can be remembered, and so no
    /// dump may leave anything out.
    pub fn of(origin: &Origin) -> Option<Self> {
        let directory = scratch::runtime_directory()?.join("tracked");
        scratch::create_private(&directory).ok()?;
        Some(Self::within(&directory, origin))
    }

    fn within(directory: &Path, origin: &Origin) -> Self {
        Self {
            path: directory.join(format!("{}-{}", origin.pid, origin.start_ticks)),
        }
    }

    /// Whether the bits were last reset by checkpoint `id`.
    pub fn names(&self, id: &str) -> bool {
        fs::read_to_string(&self.path).is_ok_and(|named| !id.is_empty() && named == id)
    }

    /// Forgets: the bits are about to be reset.
    ///
    /// # Errors
    /// The file system's; the dump must not go on then.
    pub fn forget(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Remembers that checkpoint `id` was the last to reset them.
    ///
    /// # Errors
    /// The file system's; the next dump then leaves nothing out.
    pub fn record(&self, id: &str) -> io::Result<()> {
        self.remove_of_dead_processes();
        fs::write(&self.path, id)
    }

    /// Best effort: it only saves memory.
    fn remove_of_dead_processes(&self) {
        let entries = self
            .path
            .parent()
            .and_then(|directory| fs::read_dir(directory).ok());
        for entry in entries.into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if let Some((pid, _)) = name.split_once('-')
                && !Path::new("/proc").join(pid).exists()
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_names_the_last_reset_of_one_process_only() {
        let directory = tempfile::tempdir().unwrap();
        let origin = Origin {
            pid: 7,
            start_ticks: 100,
            ..Origin::default()
        };
        let marker = Marker::within(directory.path(), &origin);
        assert!(!marker.names("a"));
        marker.forget().unwrap();
        marker.record("a").unwrap();
        assert!(marker.names("a") && !marker.names("b") && !marker.names(""));
        // The next dump failed: nothing is known any more.
        marker.forget().unwrap();
        assert!(!marker.names("a"));
        marker.record("b").unwrap();
        let reused = Origin {
            start_ticks: 101,
            ..origin
        };
        assert!(!Marker::within(directory.path(), &reused).names("b"));
    }
}
