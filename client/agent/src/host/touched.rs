//! The orders in which restored processes accessed their pages: a small file for each checkpoint, in a directory of
//! the daemon or the agent. Losing one costs the next hybrid restore some speed, and nothing else.

use std::fs::{self, DirEntry};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use permafrost_lazy::TouchedPages;

/// Most files that are kept, 200 kB each at most: the oldest goes.
const MAX_FILES: usize = 256;

/// Directory of the orders.
pub struct TouchedFiles(PathBuf);

impl TouchedFiles {
    /// Returns the orders below a directory.
    #[must_use]
    pub fn within(directory: &Path) -> Self {
        Self(directory.join("touched"))
    }

    /// Returns the order of a checkpoint (32 hex digits); an empty one if none is known.
    #[must_use]
    pub fn load(&self, checkpoint: &str) -> TouchedPages {
        fs::read(self.0.join(checkpoint)).map_or_else(
            |_| TouchedPages::default(),
            |bytes| TouchedPages::decode(&bytes),
        )
    }

    /// Keeps the order of a checkpoint.
    pub fn store(&self, checkpoint: &str, touched: &TouchedPages) {
        if let Err(error) = self.try_store(checkpoint, touched) {
            tracing::warn!(event = "access-order-not-kept", checkpoint, %error, "order of accesses not kept");
        }
    }

    fn try_store(&self, checkpoint: &str, touched: &TouchedPages) -> io::Result<()> {
        super::make_private_dir(&self.0).map_err(io::Error::other)?;
        self.remove_oldest()?;
        let new = self.0.join(format!("{checkpoint}.new"));
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(&touched.encode())?;
        fs::rename(new, self.0.join(checkpoint))
    }

    fn remove_oldest(&self) -> io::Result<()> {
        let entries: Vec<DirEntry> = fs::read_dir(&self.0)?.collect::<io::Result<_>>()?;
        if entries.len() < MAX_FILES {
            return Ok(());
        }
        let written = |entry: &&DirEntry| {
            let modified = entry.metadata().and_then(|metadata| metadata.modified());
            modified.unwrap_or(SystemTime::UNIX_EPOCH)
        };
        match entries.iter().min_by_key(written) {
            Some(oldest) => fs::remove_file(oldest.path()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use permafrost_lazy::TouchedPage;

    use super::*;

    #[test]
    fn orders_come_back_and_there_are_only_so_many() {
        let dir = tempfile::tempdir().unwrap();
        let files = TouchedFiles::within(dir.path());
        let mut touched = TouchedPages::default();
        touched.push(TouchedPage { pid: 1, index: 2 });
        assert_eq!(files.load("a"), TouchedPages::default());
        files.store("a", &touched);
        assert_eq!(files.load("a"), touched);
        for n in 0..2 * MAX_FILES {
            files.store(&n.to_string(), &touched);
        }
        assert!(fs::read_dir(dir.path().join("touched")).unwrap().count() <= MAX_FILES);
        assert_eq!(files.load("a"), TouchedPages::default());
    }
}
