//! Storage of the policies of retention.

use std::fs;
use std::io::{self, Read as _};
use std::path::PathBuf;

use parking_lot::Mutex;
use permafrost_store::{StoreError, private};

/// Longest document that is read, bytes: far beyond the most rules there may be.
const MAX_DOCUMENT_BYTES: u64 = 16 << 20;

/// Keeps the document of the policies: a node in its data directory, a cluster in its registry, so that every node
/// decides alike. All methods block, each for a bounded time.
pub trait PolicyKeeper: Send + Sync {
    /// Returns the document; `None` if none was ever kept.
    ///
    /// # Errors
    /// It cannot be read, or its author is not believed.
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError>;

    /// Replaces the document durably, if it is still `before`. Returns false if it is not.
    ///
    /// # Errors
    /// It cannot be written.
    fn replace(&self, before: Option<&[u8]>, after: &[u8]) -> Result<bool, StoreError>;
}

/// The policies of a single node: a file.
#[derive(Debug)]
pub struct PolicyFile {
    path: PathBuf,
    writing: Mutex<()>,
}

impl PolicyFile {
    /// Returns the keeper over the file, which need not be there.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            writing: Mutex::default(),
        }
    }
}

impl PolicyKeeper for PolicyFile {
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError> {
        let read = || {
            let file = match fs::File::open(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                file => file?,
            };
            let mut document = Vec::new();
            // Cut off, a longer one does not decode.
            file.take(MAX_DOCUMENT_BYTES).read_to_end(&mut document)?;
            Ok(Some(document))
        };
        read().map_err(StoreError::io(format!("read {}", self.path.display())))
    }

    fn replace(&self, before: Option<&[u8]>, after: &[u8]) -> Result<bool, StoreError> {
        let _writing = self.writing.lock();
        if self.read()?.as_deref() != before {
            return Ok(false);
        }
        let replaced = private::replace(&self.path, after).and_then(|()| {
            let directory = self.path.parent().unwrap_or(&self.path);
            fs::File::open(directory)?.sync_all()
        });
        replaced.map_err(StoreError::io(format!("write {}", self.path.display())))?;
        Ok(true)
    }
}

/// Policies that end with the process: for stores that are made for a moment.
#[derive(Debug, Default)]
pub struct PolicyMemory(Mutex<Option<Vec<u8>>>);

impl PolicyKeeper for PolicyMemory {
    fn read(&self) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.0.lock().clone())
    }

    fn replace(&self, before: Option<&[u8]>, after: &[u8]) -> Result<bool, StoreError> {
        let mut kept = self.0.lock();
        let same = kept.as_deref() == before;
        if same {
            *kept = Some(after.to_vec());
        }
        Ok(same)
    }
}
