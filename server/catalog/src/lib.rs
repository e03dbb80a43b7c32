//! The catalog: an index of the checkpoints by job and generation.
//!
//! On one machine it is only an index over the regions: where the two differ, the catalog is wrong, and
//! [`reconcile`] corrects it at every start.

mod counted;
mod memory;
mod part;
mod positioned;
mod reconcile;
mod sled;

use std::path::PathBuf;

use permafrost_protocol::control::{Checkpoint, Checkpoints};

pub use self::counted::{Counted, NamespaceSums, PRE_COPY, Stored};
pub use self::memory::MemoryCatalog;
pub use self::part::{ListPart, ListPartError, in_list_order};
pub use self::positioned::Positioned;
pub use self::reconcile::{Hidden, Reconciled, add_missing, reconcile, remove_stale};
pub use self::sled::{Contents, Opened, SledCatalog};

/// Encryption of an index: its records name jobs.
pub trait RecordCipher: Send + Sync {
    /// Returns 16 bytes in place of a name; equal names have equal ones.
    fn name(&self, name: &[u8]) -> Vec<u8>;

    /// Encrypts the record that is stored under `key`.
    fn seal(&self, key: &[u8], record: &[u8]) -> Vec<u8>;

    /// Decrypts the record that is stored under `key`; `None` if it was not encrypted so.
    fn open(&self, key: &[u8], sealed: &[u8]) -> Option<Vec<u8>>;
}

/// An index of checkpoints. Parked ones (no job yet) are found by their session.
pub trait Catalog: Send + Sync {
    /// Adds or replaces a checkpoint.
    ///
    /// # Errors
    /// The index cannot be written.
    fn put(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError>;

    /// Removes a checkpoint; removing a missing one succeeds.
    ///
    /// # Errors
    /// The index cannot be written.
    fn remove(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError>;

    /// Returns a job's checkpoint of that generation.
    ///
    /// # Errors
    /// The index cannot be read.
    fn find(&self, job: &str, generation: u64) -> Result<Option<Checkpoint>, CatalogError>;

    /// Returns a job's newest checkpoint.
    ///
    /// # Errors
    /// The index cannot be read.
    fn head(&self, job: &str) -> Result<Option<Checkpoint>, CatalogError>;

    /// Returns a job's next older and next newer checkpoints around a generation, which need not be there.
    ///
    /// # Errors
    /// The index cannot be read.
    fn around(&self, job: &str, generation: u64) -> Result<Around, CatalogError>;

    /// Returns the parked checkpoint of that session.
    ///
    /// # Errors
    /// The index cannot be read.
    fn parked(&self, session: &str) -> Result<Option<Checkpoint>, CatalogError>;

    /// Lists a job's checkpoints, or all with `None`, by job and generation, parked ones last.
    ///
    /// # Errors
    /// The index cannot be read.
    fn list(&self, job: Option<&str>) -> Result<Vec<Checkpoint>, CatalogError>;

    /// Passes over the sealed checkpoints behind a job's generation, by job and generation, until `visit` returns
    /// false. Keeps one in memory at a time; costs nothing for those before, and those behind the last one visited.
    ///
    /// # Errors
    /// The index cannot be read.
    fn visit_sealed(
        &self,
        after: (&str, u64),
        visit: &mut dyn FnMut(Checkpoint) -> bool,
    ) -> Result<(), CatalogError>;

    /// Lists a part of the checkpoints, at a cost that depends on the part; for the checkpoints of the namespace
    /// `default`, on the number of all.
    ///
    /// # Errors
    /// The index cannot be read.
    fn part(&self, part: &ListPart) -> Result<Checkpoints, CatalogError> {
        let mut listed = Checkpoints::default();
        if let Some((job, generation)) = part.sealed_after() {
            let mut is_complete = false;
            self.visit_sealed((&job, generation), &mut |record| {
                let is_last = part.ends_before(&record);
                is_complete = !part.take(&mut listed, record);
                !is_complete && !is_last
            })?;
            if is_complete {
                return Ok(listed);
            }
        }
        for record in self.all_parked()? {
            if !part.take(&mut listed, record) {
                break;
            }
        }
        Ok(listed)
    }

    /// Lists the parked checkpoints, at a cost that does not depend on the number of others.
    ///
    /// # Errors
    /// The index cannot be read.
    fn all_parked(&self) -> Result<Vec<Checkpoint>, CatalogError>;

    /// Returns the number for the job's next checkpoint: above every number the job ever used, as far as the index
    /// remembers; a rebuilt one remembers what is still there.
    ///
    /// # Errors
    /// The index cannot be read.
    fn next_generation(&self, job: &str) -> Result<u64, CatalogError>;

    /// Records the region's position at which the index last agreed with the region.
    ///
    /// # Errors
    /// The index cannot be written.
    fn note(&self, position: &RegionPosition) -> Result<(), CatalogError>;

    /// Returns the position that was recorded last, if any.
    ///
    /// # Errors
    /// The index cannot be read.
    fn noted(&self) -> Result<Option<RegionPosition>, CatalogError>;

    /// Makes all earlier writes durable. Called when the daemon stops; after a crash the index is reconciled with
    /// the region instead.
    ///
    /// # Errors
    /// The index cannot be written.
    fn flush(&self) -> Result<(), CatalogError>;
}

/// Checkpoints of a job around a generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Around {
    /// Next older one.
    pub older: Option<Checkpoint>,
    /// Next newer one.
    pub newer: Option<Checkpoint>,
}

/// Progress of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionPosition {
    /// UUID of the region.
    pub region: String,
    /// Number that ascends with each change of the region.
    pub position: u64,
}

/// The index failed; the checkpoints are safe in their region.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The embedded database failed.
    #[error("catalog database: {0}")]
    Database(#[from] ::sled::Error),
    /// Another process has the database open.
    #[error("catalog {path} is in use by another process")]
    InUse {
        /// Path of the catalog.
        path: PathBuf,
    },
    /// A record is encrypted with another key, or damaged.
    #[error("a catalog record cannot be decrypted")]
    Encrypted,
    /// A record does not decode.
    #[error("catalog record {key:?} does not decode")]
    Record {
        /// Key of the record.
        key: String,
        /// Error of the decoder.
        #[source]
        source: prost::DecodeError,
    },
}
