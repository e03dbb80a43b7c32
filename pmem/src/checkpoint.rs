//! A sealed checkpoint, for reading.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::alloc::Lease;
use crate::error::{BlobError, OpenError, PageError};
use crate::ids::{CheckpointId, PageNo, SegmentNo};
use crate::map::{MapRoot, PageMap};
use crate::readers::Reader;
use crate::root;
use crate::space::Space;

/// Attribute bit 0: retention policies keep the checkpoint. The region itself deletes any checkpoint on request.
pub const ATTR_PINNED: u32 = 1;

/// Attribute bit 1: the cluster lists it. Never collected as left over.
pub const ATTR_PUBLISHED: u32 = 2;

/// Attribute bit 2: sealed for a cluster that does not list it yet, as far as is known here.
pub const ATTR_PROVISIONAL: u32 = 4;

/// Names one copy of a checkpoint while its region is open. The default names none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyId(u64);

impl CopyId {
    /// Makes an id from a number: one of a seal, which ascends.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }
}

/// A reference to a sealed, immutable checkpoint. While any reference to one lives, its segments are not reused, even
/// after it was deleted, nor are the slots that they were in before a move.
pub struct StoredCheckpoint {
    sealed: Arc<Sealed>,
    reader: Reader,
}

/// A sealed checkpoint, as the region has it.
pub(crate) struct Sealed {
    id: CheckpointId,
    space: Arc<Space>,
    lease: Arc<Lease>,
    /// Page number of its root, and that page's CRC32.
    root: (PageNo, u32),
    manifest: MapRoot,
    manifest_bytes: u64,
    attrs: AtomicU32,
    /// Ascends with every seal.
    pub(crate) order: u64,
}

impl Sealed {
    pub(crate) fn new(
        id: CheckpointId,
        space: &Arc<Space>,
        lease: Lease,
        root: (PageNo, u32),
        (manifest, manifest_bytes): (MapRoot, u64),
        attrs: u32,
        order: u64,
    ) -> Self {
        Self {
            id,
            space: Arc::clone(space),
            lease: Arc::new(lease),
            root,
            manifest,
            manifest_bytes,
            attrs: AtomicU32::new(attrs),
            order,
        }
    }

    pub(crate) fn id(&self) -> CheckpointId {
        self.id
    }

    pub(crate) fn attrs(&self) -> u32 {
        self.attrs.load(Ordering::Relaxed)
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    pub(crate) fn segments(&self) -> u64 {
        self.lease.count()
    }

    pub(crate) fn store_attrs(&self, bits: u32) {
        self.attrs.store(bits, Ordering::Relaxed);
    }
}

impl StoredCheckpoint {
    /// Makes a reference, through which pages can be read.
    pub(crate) fn of(sealed: &Arc<Sealed>) -> Arc<Self> {
        Arc::new(Self {
            reader: Reader::new(&sealed.space, &sealed.lease),
            sealed: Arc::clone(sealed),
        })
    }

    /// Returns true if a page was lost in a slot that segments of the checkpoint were in while this reference existed.
    pub(crate) fn lost_retired_page(&self) -> bool {
        self.reader
            .any_slot(|slot| self.sealed.space.has_lost_page(slot))
    }

    /// Returns the id of the checkpoint in the region.
    #[must_use]
    pub fn id(&self) -> CheckpointId {
        self.sealed.id
    }

    /// Reads both copies of every root page. Returns the number of pages of which one copy is damaged while the other
    /// one is intact. A region whose root pages have lost both copies does not open.
    ///
    /// # Errors
    /// [`OpenError`]: the error with which the next open would refuse the region.
    pub fn check_root(&self) -> Result<u64, OpenError> {
        let (page, crc32) = self.sealed.root;
        root::load(&self.sealed.space, self.sealed.id, page, crc32, true)
            .map(|root| root.damaged_copies)
    }

    /// Returns the manifest as sealed, verified.
    ///
    /// # Errors
    /// [`PageError`] if the manifest is damaged.
    pub fn manifest(self: &Arc<Self>) -> Result<Vec<u8>, PageError> {
        let sealed = &self.sealed;
        if sealed.manifest.is_empty() {
            let (page, crc32) = sealed.root;
            return root::manifest(&sealed.space, page, crc32);
        }
        let mut manifest = Vec::new();
        let map = self.map(&sealed.manifest);
        let copied = map.read_blob(0, sealed.manifest_bytes, |bytes| {
            manifest.extend_from_slice(bytes);
            Ok(())
        });
        match copied {
            Ok(()) => Ok(manifest),
            Err(BlobError::Page(error)) => Err(error),
            Err(BlobError::Sink(error)) => Err(PageError::Io(error)),
        }
    }

    /// Returns the attribute bits, as last set.
    #[must_use]
    pub fn attrs(&self) -> u32 {
        self.sealed.attrs()
    }

    /// Returns the id of this copy: another checkpoint sealed under the same id has another one. Valid while the
    /// region is open.
    #[must_use]
    pub fn copy_id(&self) -> CopyId {
        CopyId(self.sealed.order)
    }

    /// Returns the number of segments with pages of the checkpoint, inherited ones included.
    #[must_use]
    pub fn segments(&self) -> u64 {
        self.sealed.segments()
    }

    /// Returns the numbers of the segments with pages of the checkpoint, inherited ones included, ascending.
    pub fn segment_numbers(&self) -> impl Iterator<Item = SegmentNo> {
        self.sealed.lease.segments()
    }

    /// Returns a map that the manifest refers to, for reading. The root is not read before pages are.
    #[must_use]
    pub fn map(self: &Arc<Self>, root: &MapRoot) -> PageMap {
        PageMap::new(Arc::clone(self), *root)
    }

    pub(crate) fn space(&self) -> &Arc<Space> {
        &self.sealed.space
    }

    pub(crate) fn lease(&self) -> &Arc<Lease> {
        &self.sealed.lease
    }

    pub(crate) fn manifest_map(self: &Arc<Self>) -> PageMap {
        self.map(&self.sealed.manifest)
    }

    /// Reads the root, and returns its pages: each is the first of two equal ones.
    pub(crate) fn root_pages(&self) -> Result<Vec<PageNo>, OpenError> {
        let (page, crc32) = self.sealed.root;
        root::load(&self.sealed.space, self.sealed.id, page, crc32, false).map(|root| root.pages)
    }
}

impl fmt::Debug for StoredCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("id", &self.id())
            .field("attrs", &self.attrs())
            .finish_non_exhaustive()
    }
}
