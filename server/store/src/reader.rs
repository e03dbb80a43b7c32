//! Reads this store's copy of a checkpoint through its manifest.

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use permafrost_agent::remote::{LAZY_FLAGS, MapDigest, ProofEncoder, is_listed_as};
use permafrost_criu::source::{self, CheckpointSource, OutlinePages, PageRun, PagesOut};
use permafrost_pmem::{
    BlobError, PageError, PageMap, ProofRecord, ProofScope, RunKind, StoredCheckpoint, StoredRun,
};
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control;
use permafrost_protocol::images::{PagemapEntry, PagemapWriter};
use permafrost_protocol::manifest::{AddressSpace, Image, Manifest, SpaceType};

use super::dump::map_root;
use super::{Store, StoreError, manifest_of};
use crate::ReadingError;
use crate::in_use::ReadGuard;

/// A checkpoint that is being read. Its segments are kept until this is dropped.
pub struct LocalCheckpoint {
    /// Name of the checkpoint as people write it.
    pub(super) name: String,
    /// Record of the checkpoint in the listing.
    pub(super) record: control::Checkpoint,
    /// Manifest of the checkpoint.
    pub(super) manifest: Manifest,
    checkpoint: Arc<StoredCheckpoint>,
    /// Retention and cooling leave the checkpoint alone meanwhile.
    _read: [ReadGuard; 2],
}

/// Reason why an image could not be passed on: damage, or an error of the receiver.
pub(super) type ReadError = source::ReadError<StoreError>;

impl From<StoreError> for ReadError {
    fn from(error: StoreError) -> Self {
        Self::Source(error)
    }
}

/// Compares a checkpoint's line of the listing with its manifest: the listing is not trusted about contents.
///
/// # Errors
/// [`StoreError::Mislisted`].
pub fn check_listed_as(
    record: &control::Checkpoint,
    manifest: &Manifest,
) -> Result<(), StoreError> {
    if is_listed_as(record, manifest) {
        return Ok(());
    }
    Err(ReadingError::Mislisted {
        name: checkpoint_name(record),
        id: record.id.clone(),
    }
    .into())
}

impl Store {
    /// Opens this store's copy of a listed checkpoint.
    ///
    /// # Errors
    /// There is no copy here; its manifest is damaged, or of another checkpoint than is listed; it is in the cold tier,
    /// which is away.
    pub fn open(&self, record: control::Checkpoint) -> Result<LocalCheckpoint, StoreError> {
        let opened = self.open_in_place(record)?;
        self.recall(&opened.checkpoint)?;
        Ok(opened)
    }

    /// Opens this store's copy of a listed checkpoint as [`open`](Self::open) does, but moves nothing out of a cold tier:
    /// for those who look at the manifest, or read a few pages.
    ///
    /// # Errors
    /// There is no copy here; its manifest is damaged, or of another checkpoint than is listed.
    pub fn open_in_place(
        &self,
        record: control::Checkpoint,
    ) -> Result<LocalCheckpoint, StoreError> {
        let checkpoint = self.checkpoint(&record.id)?;
        self.open_held(record, checkpoint)
    }

    /// Opens this store's copy of a listed checkpoint, which may have been removed since.
    pub(super) fn open_held(
        &self,
        record: control::Checkpoint,
        checkpoint: Arc<StoredCheckpoint>,
    ) -> Result<LocalCheckpoint, StoreError> {
        let manifest = manifest_of(&checkpoint)?;
        check_listed_as(&record, &manifest)?;
        // Before it is recalled: it is not cooled again under the reader.
        let held = self.cooling.hold(&record.id);
        let read = self.reads.begin(&record.id, false);
        Ok(LocalCheckpoint {
            _read: [read, held],
            name: checkpoint_name(&record),
            record,
            manifest,
            checkpoint,
        })
    }
}

impl LocalCheckpoint {
    /// Passes on a small image, piece by piece. All of it is verified before the first piece: CRIU takes some
    /// images that just end for whole.
    pub(super) fn small_image(
        &self,
        image: &Image,
        sink: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        let map = self.image_map(image)?;
        let told = |error| match error {
            BlobError::Page(source) => ReadError::Source(self.corrupt_image(image, source)),
            BlobError::Sink(error) => ReadError::Taker(error),
            other => ReadError::Taker(io::Error::other(other)),
        };
        let (at, len_bytes) = (image.offset_bytes, image.len_bytes);
        map.read_blob(at, len_bytes, |_| Ok(())).map_err(told)?;
        let passed_on = map.read_blob(at, len_bytes, sink);
        // Another copy cannot continue where this one broke off.
        passed_on.map_err(|error| match told(error) {
            ReadError::Source(damage) => ReadError::Taker(io::Error::other(damage)),
            out => out,
        })
    }

    /// Returns the copy in the region.
    #[must_use]
    pub fn checkpoint(&self) -> &Arc<StoredCheckpoint> {
        &self.checkpoint
    }

    /// Opens the page map of a small image.
    pub(super) fn image_map(&self, image: &Image) -> Result<PageMap, StoreError> {
        Ok(self.checkpoint.map(&map_root(&image.map_root)?))
    }

    /// Opens the page map of an address space.
    pub(super) fn map(&self, space: &AddressSpace) -> Result<PageMap, StoreError> {
        Ok(self.checkpoint.map(&map_root(&space.map_root)?))
    }

    /// Returns the pagemap image of an address space.
    fn pagemap_of(&self, space: &AddressSpace) -> Result<Vec<u8>, StoreError> {
        let mut pagemap = PagemapWriter::new(space.pages_id);
        for extent in self.map(space)?.extents() {
            let extent = extent.map_err(|source| self.corrupt(space, 0, source))?;
            pagemap.push(PagemapEntry {
                vaddr: extent.first_index * PAGE_BYTES,
                nr_pages: extent.pages,
                flags: extent.flags,
            });
        }
        Ok(pagemap.finish())
    }

    /// Writes the pages of the address space at `place`, ascending. If that fails, all pages before `next_index` are
    /// written.
    ///
    /// # Errors
    /// A page or the map is damaged; an error of the destination.
    pub fn write_pages(
        &self,
        place: usize,
        out: &mut PagesOut<'_>,
        next_index: &mut u64,
    ) -> Result<(), ReadError> {
        match out {
            PagesOut::File(file, progress) => self.write_file(place, file, next_index, progress),
            PagesOut::Pipe(pipe) => self.write_pipe(place, pipe, next_index),
        }
    }

    /// Passes on the positions and checksums of an address space's pages, as [`Fetch::outline`](crate::Fetch::outline)
    /// does.
    pub(super) fn outline<E: From<StoreError>>(
        &self,
        place: usize,
        mut take: impl FnMut(u64, u16, OutlinePages<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(space) = self.manifest.spaces.get(place) else {
            return Ok(());
        };
        let map = self.map(space)?;
        let mut next_index = 0;
        for run in map.runs() {
            let run = run.map_err(|error| self.corrupt(space, next_index, error))?;
            next_index = run.end_index();
            let pages = u64::from(run.pages);
            match run.kind {
                RunKind::Zero => take(run.first_index, run.flags, OutlinePages::Zero(pages))?,
                RunKind::Stored { .. } => {
                    let crcs = map.checksums(&run);
                    let crcs = crcs.map_err(|error| self.corrupt(space, run.first_index, error))?;
                    take(run.first_index, run.flags, OutlinePages::Stored(&crcs))?;
                }
            }
        }
        Ok(())
    }

    /// Adds to a proof of an address space, as [`Fetch::prove`](crate::Fetch::prove) does.
    pub(super) fn prove<E: From<StoreError>>(
        &self,
        place: usize,
        indices: Option<Range<u64>>,
        proof: &mut ProofEncoder,
        mut sent: impl FnMut(&mut ProofEncoder) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(space) = self.manifest.spaces.get(place) else {
            return Ok(());
        };
        let first_index = indices.as_ref().map_or(0, |indices| indices.start);
        let scope = indices.map_or(
            ProofScope::Positions { flags: LAZY_FLAGS },
            ProofScope::Indices,
        );
        let proven = self.map(space)?.prove(&scope, &mut |record| {
            match record {
                ProofRecord::Leaf { first_index, pages } => proof.leaf(first_index, &pages),
                ProofRecord::Block {
                    level,
                    first_index,
                    slots,
                } => proof.block(level, first_index, slots),
                ProofRecord::Zeros { flags } => proof.zeros(flags),
                ProofRecord::Full { digest } => proof.full(&digest),
                ProofRecord::Hidden { digest } => proof.hidden(&digest),
            }
            sent(proof).map_err(Unproven::Taker)
        });
        proven.map_err(|error| match error {
            Unproven::Map(error) => self.corrupt(space, first_index, error).into(),
            Unproven::Taker(error) => error,
        })
    }

    /// Returns the digest of the pages of the address space at `place` before `from_index`, each of them verified, so
    /// that another source can continue from there.
    ///
    /// # Errors
    /// One of those pages or the map is damaged.
    pub fn digest_before(&self, place: usize, from_index: u64) -> Result<MapDigest, StoreError> {
        let Some(space) = self.manifest.spaces.get(place) else {
            return Ok(MapDigest::default());
        };
        let map = self.map(space)?;
        let mut digest = MapDigest::default();
        let mut runs = map.runs();
        let mut next_index = 0;
        // Later pages are not visited: the damage may be there.
        while next_index < from_index {
            let Some(run) = runs.next() else { break };
            let run = run.map_err(|source| self.corrupt(space, next_index, source))?;
            next_index = run.end_index();
            let pages = next_index.min(from_index).saturating_sub(run.first_index);
            match run.kind {
                RunKind::Zero => digest.zeros(run.first_index, run.flags, pages),
                RunKind::Stored { .. } => {
                    let pages = u32::try_from(pages).unwrap_or(run.pages);
                    let bytes = map.read_range(&run, run.first_index, pages);
                    let bytes = bytes.map_err(|e| self.corrupt(space, run.first_index, e))?;
                    digest.pages(run.first_index, run.flags, &bytes);
                }
            }
        }
        Ok(digest)
    }

    /// Returns the pages of a run before the damaged one that `error` names; there may be none.
    pub(super) fn before_damage<'m>(
        map: &'m PageMap,
        run: &StoredRun,
        error: &PageError,
    ) -> (u64, Cow<'m, [u8]>) {
        let nothing = (run.first_index, Cow::Borrowed(&[][..]));
        let Some(index) = error.index() else {
            return nothing;
        };
        let pages = u32::try_from(index.saturating_sub(run.first_index)).unwrap_or(0);
        match map.read_range(run, run.first_index, pages) {
            Ok(bytes) if !bytes.is_empty() => (index, bytes),
            _ => nothing,
        }
    }

    /// Returns the error for damage in an address space, by name and address; `index` is the page's where the
    /// damage does not say.
    pub(super) fn corrupt(
        &self,
        space: &AddressSpace,
        index: u64,
        source: PageError,
    ) -> StoreError {
        let index = source.index().unwrap_or(index);
        let space = match space.space_type() {
            SpaceType::Process => format!("process {}", space.id),
            SpaceType::SharedMemory => format!("shared memory {}", space.id),
        };
        StoreError::Reading(ReadingError::Corrupt {
            part: format!("{}: {space} address {:#x}", self.name, index * PAGE_BYTES),
            source,
        })
    }

    /// Returns the error for damage in a small image.
    pub(super) fn corrupt_image(&self, image: &Image, source: PageError) -> StoreError {
        StoreError::Reading(ReadingError::Corrupt {
            part: format!("{}: image {}", self.name, image.name),
            source,
        })
    }
}

/// Reason why a proof ended early.
enum Unproven<E> {
    Map(PageError),
    Taker(E),
}

impl<E> From<PageError> for Unproven<E> {
    fn from(error: PageError) -> Self {
        Self::Map(error)
    }
}

impl CheckpointSource for LocalCheckpoint {
    type Error = StoreError;

    fn record(&self) -> &control::Checkpoint {
        &self.record
    }

    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn small(
        &self,
        place: usize,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        self.small_image(&self.manifest.images[place], sink)
    }

    fn pagemap(&self, place: usize) -> Result<Vec<u8>, StoreError> {
        self.pagemap_of(&self.manifest.spaces[place])
    }

    fn positions(
        &self,
        place: usize,
        take: &mut dyn FnMut(u64, OutlinePages<'_>),
    ) -> Result<(), StoreError> {
        self.outline(place, |first_index, _, pages| {
            take(first_index, pages);
            Ok(())
        })
    }

    fn pages(&self, place: usize, out: &mut PagesOut<'_>) -> Result<(), ReadError> {
        self.write_pages(place, out, &mut 0)
    }

    fn range(
        &self,
        place: usize,
        first_index: u64,
        pages: u64,
        take: &mut dyn FnMut(PageRun<'_>) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        let space = &self.manifest.spaces[place];
        let map = self.map(space)?;
        let mut cursor = map.clone().cursor();
        let end = first_index.saturating_add(pages);
        let mut index = first_index;
        while index < end {
            let run = cursor.seek(index);
            let Some(run) = run.map_err(|source| self.corrupt(space, index, source))? else {
                break;
            };
            index = index.max(run.first_index);
            let damaged = |source| self.corrupt(space, index, source);
            let count = run.end_index().min(end).saturating_sub(index);
            let Some(count) = u32::try_from(count).ok().filter(|count| *count > 0) else {
                break;
            };
            let (first_index, flags) = (index, run.flags);
            match run.kind {
                RunKind::Zero => take(PageRun::Zero {
                    first_index,
                    flags,
                    pages: count.into(),
                })?,
                RunKind::Stored { .. } => {
                    let bytes = map.read_range(&run, index, count).map_err(damaged)?;
                    let taken = take(PageRun::Pages {
                        first_index,
                        flags,
                        bytes,
                    });
                    // The taker may have got zeros in place of a lost page: no other copy helps any more.
                    map.confirm(&run, index, count)
                        .map_err(|source| io::Error::other(damaged(source)))?;
                    taken?;
                }
            }
            index += u64::from(count);
        }
        Ok(())
    }
}

/// Returns the name of a checkpoint as people write it.
#[must_use]
pub fn checkpoint_name(record: &control::Checkpoint) -> String {
    if record.generation == 0 {
        format!("session {}", record.session)
    } else {
        format!("{}@{}", record.job, record.generation)
    }
}
