//! A catalog that records the position of its region.

use std::sync::Arc;

use permafrost_pmem::Region;
use permafrost_protocol::control::Checkpoint;

use super::{Around, Catalog, CatalogError, RegionPosition};

/// Records the region's position after each change, so that the next start finds a region that is older than
/// its catalog.
///
/// The region's change is durable before its position is recorded, so after a crash the region may be ahead of
/// the record, and never behind.
pub struct Positioned {
    inner: Box<dyn Catalog>,
    region: Arc<Region>,
}

impl Positioned {
    /// Wraps the catalog of a region.
    #[must_use]
    pub fn new(inner: Box<dyn Catalog>, region: Arc<Region>) -> Self {
        Self { inner, region }
    }

    fn note_now(&self) -> Result<(), CatalogError> {
        // A region that takes no writes may have lost changes.
        if self.region.failure().is_some() {
            return Ok(());
        }
        self.inner.note(&RegionPosition {
            region: self.region.usage().uuid.to_string(),
            position: self.region.position(),
        })
    }
}

impl Catalog for Positioned {
    fn put(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        self.inner.put(checkpoint)?;
        self.note_now()
    }

    fn remove(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        self.inner.remove(checkpoint)?;
        self.note_now()
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Checkpoint>, CatalogError> {
        self.inner.find(job, generation)
    }

    fn head(&self, job: &str) -> Result<Option<Checkpoint>, CatalogError> {
        self.inner.head(job)
    }

    fn around(&self, job: &str, generation: u64) -> Result<Around, CatalogError> {
        self.inner.around(job, generation)
    }

    fn parked(&self, session: &str) -> Result<Option<Checkpoint>, CatalogError> {
        self.inner.parked(session)
    }

    fn list(&self, job: Option<&str>) -> Result<Vec<Checkpoint>, CatalogError> {
        self.inner.list(job)
    }

    fn visit_sealed(
        &self,
        after: (&str, u64),
        visit: &mut dyn FnMut(Checkpoint) -> bool,
    ) -> Result<(), CatalogError> {
        self.inner.visit_sealed(after, visit)
    }

    fn all_parked(&self) -> Result<Vec<Checkpoint>, CatalogError> {
        self.inner.all_parked()
    }

    fn next_generation(&self, job: &str) -> Result<u64, CatalogError> {
        self.inner.next_generation(job)
    }

    fn note(&self, position: &RegionPosition) -> Result<(), CatalogError> {
        self.inner.note(position)
    }

    fn noted(&self) -> Result<Option<RegionPosition>, CatalogError> {
        self.inner.noted()
    }

    fn flush(&self) -> Result<(), CatalogError> {
        self.note_now()?;
        self.inner.flush()
    }
}
