//! Reads a checkpoint to pass it on: run by run, each page verified, in bounded memory.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use permafrost_agent::remote::{MapDigest, OutlinePages, ProofEncoder};
use permafrost_criu::source::PageRun;
use permafrost_pmem::{MapCursor, PageError, PageMap, RunKind, StoredRun};
use permafrost_protocol::control;
use permafrost_protocol::manifest::{AddressSpace, Manifest, SpaceType};

use super::dump::{Parent, map_root};
use super::reader::{LocalCheckpoint, ReadError};
use super::{Store, StoreError, digest, manifest_of};
use crate::in_use::ReadGuard;
use crate::{ContentDigest, MissingObject};

/// Pages handed out at once: the capacity of a wire frame.
const CHUNK_PAGES: u32 = 64;

/// A checkpoint that is being read to pass it on. Its segments are kept until this is dropped.
pub struct Fetch {
    reader: LocalCheckpoint,
    /// Retention leaves the checkpoint alone for a while.
    read: ReadGuard,
    digest: ContentDigest,
    parent: Option<Parent>,
    /// Map of each address space, and that of its counterpart in the parent.
    maps: Vec<(PageMap, Option<PageMap>)>,
}

/// A run of pages of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fetched<'a> {
    /// Pages of this checkpoint: zeros, or at most 64 whole pages, verified, lent from the medium.
    Own(PageRun<'a>),
    /// Pages that the parent has at the same place.
    Parent {
        /// Index of the first one.
        first_index: u64,
        /// CRIU's flags, which need not be the parent's.
        flags: u16,
        /// Number of pages.
        pages: u64,
    },
}

impl Store {
    /// Opens a checkpoint (32 hex digits) to pass it on. Pages equal to those of `parent`, a checkpoint that the
    /// receiver has, are passed on as references to it. If `parent` is not here, nothing is
    /// compared with it. What is in a cold tier stays there: see [`Fetch::recall`].
    ///
    /// # Errors
    /// The checkpoint is not here; its manifest is damaged.
    pub fn open_fetch(&self, checkpoint: &str, parent: &str) -> Result<Fetch, StoreError> {
        let held = match (self.checkpoint(checkpoint), self.reads.held(checkpoint)) {
            // Removed since its reader came last.
            (Err(_), Some(held)) => held,
            (held, _) => held?,
        };
        let record = self.summary(&held, &manifest_of(&held)?);
        let digest = digest::of_checkpoint(&held)?;
        let reader = self.open_held(record, Arc::clone(&held))?;
        let parent = if parent.is_empty() {
            None
        } else {
            self.parent_by_id(parent)
        };
        let mut maps = Vec::with_capacity(reader.manifest.spaces.len());
        let mut shared_before = 0;
        for space in &reader.manifest.spaces {
            let theirs = match &parent {
                Some(parent) => match space.space_id() {
                    Ok(id) => parent.counterpart(id, shared_before),
                    Err(_) => None,
                }
                .map(|space| {
                    Ok::<_, StoreError>(parent.checkpoint.map(&map_root(&space.map_root)?))
                })
                .transpose()?,
                None => None,
            };
            shared_before += usize::from(space.space_type() == SpaceType::SharedMemory);
            maps.push((reader.map(space)?, theirs));
        }
        Ok(Fetch {
            read: self.reads.begin(checkpoint, true),
            reader,
            digest,
            parent,
            maps,
        })
    }
}

impl Fetch {
    /// Moves what is in a cold tier to a faster one, as far as there is room: before all of it is read. A few pages are
    /// read where they are.
    ///
    /// # Errors
    /// The tier is away.
    pub fn recall(&self, store: &Store) -> Result<(), StoreError> {
        store.recall(self.reader.checkpoint())
    }

    /// Keeps the pages for a while after this fetch, for a reader that comes back: even if the checkpoint is removed.
    pub fn hold(&self) {
        self.read.hold(self.reader.checkpoint());
    }

    /// Returns the manifest of the checkpoint that pages are compared with, if it is here.
    #[must_use]
    pub fn compared_with(&self) -> Option<&Manifest> {
        self.parent.as_ref().map(|parent| &parent.manifest)
    }

    /// Returns the checkpoint's manifest; its map roots mean nothing elsewhere.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.reader.manifest
    }

    /// Returns the checkpoint's line of the listing.
    #[must_use]
    pub fn checkpoint(&self) -> &control::Checkpoint {
        &self.reader.record
    }

    /// Returns the digest of the contents, independent of where they are stored.
    #[must_use]
    pub fn content_digest(&self) -> ContentDigest {
        self.digest
    }

    /// Returns true if the requested parent is here to be compared with.
    #[must_use]
    pub fn has_parent(&self) -> bool {
        self.parent.is_some()
    }

    /// Returns the runs of the address space at `place` in the manifest (from 0), ascending, from `from_index` on,
    /// `pages` pages at most (0 for all). Returns no runs if there is no such space.
    #[must_use]
    pub fn runs(&self, place: usize, from_index: u64, pages: u64) -> FetchedRuns<'_> {
        let at = self.maps.get(place).zip(self.manifest().spaces.get(place));
        FetchedRuns {
            source: at.map(|((map, parent), space)| Source {
                fetch: self,
                space,
                map,
                cursor: map.clone().cursor(),
                parent: parent
                    .as_ref()
                    .map(|parent| (parent, parent.clone().cursor())),
            }),
            next_index: from_index,
            left: if pages == 0 { u64::MAX } else { pages },
        }
    }

    /// Passes on the positions and checksums of the pages of the address space at `place`, ascending: first index, flags
    /// and pages. Reads the map, and no page.
    ///
    /// # Errors
    /// The map is damaged; an error of the taker.
    pub fn outline<E: From<StoreError>>(
        &self,
        place: usize,
        take: impl FnMut(u64, u16, OutlinePages<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.reader.outline(place, take)
    }

    /// Adds to a proof of the address space at `place`: of the pages with these indices, or, without indices, of the
    /// positions of all pages. Calls `sent` after each record. Reads the map, and no page.
    ///
    /// # Errors
    /// The map is damaged; an error of `sent`.
    pub fn prove<E: From<StoreError>>(
        &self,
        place: usize,
        indices: Option<Range<u64>>,
        proof: &mut ProofEncoder,
        sent: impl FnMut(&mut ProofEncoder) -> Result<(), E>,
    ) -> Result<(), E> {
        self.reader.prove(place, indices, proof, sent)
    }

    /// Returns the digest of the pages of the address space at `place` before `from_index`, each of them verified.
    ///
    /// # Errors
    /// One of those pages or the map is damaged.
    pub fn digest_before(&self, place: usize, from_index: u64) -> Result<MapDigest, StoreError> {
        self.reader.digest_before(place, from_index)
    }

    /// Passes on a small image, piece by piece, after all of it was verified.
    ///
    /// # Errors
    /// There is no image of that name, or it is damaged; the receiver's own error as [`StoreError::Io`].
    pub fn image(
        &self,
        name: &str,
        sink: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), StoreError> {
        let mut images = self.manifest().images.iter();
        let place = images.position(|image| image.name == name);
        let place = place.ok_or_else(|| StoreError::NotFound(self.no_image(name)))?;
        self.image_at(place, sink)
    }

    fn no_image(&self, image: impl ToString) -> MissingObject {
        MissingObject::Image {
            name: image.to_string(),
            checkpoint: self.reader.name.clone(),
        }
    }

    /// Passes on the image at `place` in the manifest, from 0, as [`Self::image`] does.
    ///
    /// # Errors
    /// Those of [`Self::image`].
    pub fn image_at(
        &self,
        place: usize,
        mut sink: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> Result<(), StoreError> {
        let image = self.manifest().images.get(place);
        let image = image.ok_or_else(|| StoreError::NotFound(self.no_image(place)))?;
        let name = &image.name;
        match self.reader.small_image(image, &mut sink) {
            Ok(()) => Ok(()),
            Err(ReadError::Source(error)) => Err(error),
            Err(ReadError::Taker(error)) => {
                Err(StoreError::io(format!("pass on image {name}"))(error))
            }
        }
    }
}

/// Iterator over the pages of an address space. It ends after an error.
pub struct FetchedRuns<'a> {
    source: Option<Source<'a>>,
    next_index: u64,
    left: u64,
}

struct Source<'a> {
    fetch: &'a Fetch,
    space: &'a AddressSpace,
    map: &'a PageMap,
    cursor: MapCursor,
    parent: Option<(&'a PageMap, MapCursor)>,
}

impl<'a> Iterator for FetchedRuns<'a> {
    type Item = Result<Fetched<'a>, StoreError>;

    fn next(&mut self) -> Option<Self::Item> {
        let source = self.source.as_mut().filter(|_| self.left > 0)?;
        match source.next(self.next_index, self.left) {
            Ok(None) => None,
            Ok(Some(fetched)) => {
                let (first_index, pages) = fetched.span();
                self.next_index = first_index + pages;
                self.left -= pages;
                Some(Ok(fetched))
            }
            Err(error) => {
                let error = source
                    .fetch
                    .reader
                    .corrupt(source.space, self.next_index, error);
                self.source = None;
                Some(Err(error))
            }
        }
    }
}

impl Fetched<'_> {
    fn span(&self) -> (u64, u64) {
        match self {
            Self::Own(run) => run.span(),
            Self::Parent {
                first_index, pages, ..
            } => (*first_index, *pages),
        }
    }
}

impl<'a> Source<'a> {
    fn next(&mut self, index: u64, left: u64) -> Result<Option<Fetched<'a>>, PageError> {
        let Some(run) = self.cursor.seek(index)? else {
            return Ok(None);
        };
        let first_index = run.first_index.max(index);
        let here = (run.end_index() - first_index).min(left);
        let flags = run.flags;
        let RunKind::Stored { .. } = run.kind else {
            return Ok(Some(Fetched::Own(PageRun::Zero {
                first_index,
                flags,
                pages: here,
            })));
        };
        let shared = self.shared(&run, first_index, here);
        if shared > 0 {
            return Ok(Some(Fetched::Parent {
                first_index,
                flags,
                pages: shared,
            }));
        }
        let chunk = u32::try_from(here).unwrap_or(u32::MAX).min(CHUNK_PAGES);
        let mut bytes = self.map.read_range(&run, first_index, chunk)?;
        let (equal, different) = self.compare(first_index, &bytes);
        Ok(Some(if equal > 0 {
            Fetched::Parent {
                first_index,
                flags,
                pages: equal,
            }
        } else {
            match &mut bytes {
                Cow::Borrowed(bytes) => *bytes = &bytes[..different],
                Cow::Owned(bytes) => bytes.truncate(different),
            }
            Fetched::Own(PageRun::Pages {
                first_index,
                flags,
                bytes,
            })
        }))
    }

    /// Returns how many pages from `first_index` on the parent keeps at the same location in the region: those are
    /// equal and need not be read.
    fn shared(&mut self, run: &StoredRun, first_index: u64, most: u64) -> u64 {
        let Some((_, cursor)) = self.parent.as_mut() else {
            return 0;
        };
        // A damaged parent is not compared with: whole pages are sent instead.
        let Ok(Some(theirs)) = cursor.lookup(first_index) else {
            return 0;
        };
        match (place_of(run, first_index), place_of(&theirs, first_index)) {
            (Some(ours), Some(same)) if ours == same => most.min(theirs.end_index() - first_index),
            _ => 0,
        }
    }

    /// Compares pages that were read with the parent's: returns how many pages at the front are equal, or else how
    /// many bytes at the front differ.
    fn compare(&mut self, first_index: u64, bytes: &[u8]) -> (u64, usize) {
        let Some((map, cursor)) = self.parent.as_mut() else {
            return (0, bytes.len());
        };
        let page_bytes = permafrost_pmem::PAGE_SIZE;
        let mut equal = 0_u64;
        let mut theirs: Option<StoredRun> = None;
        for (page, at) in bytes.chunks_exact(page_bytes).zip(0_u64..) {
            let index = first_index + at;
            if !theirs.is_some_and(|run| run.contains(index)) {
                theirs = cursor.lookup(index).ok().flatten();
            }
            let same = match theirs {
                // The page is verified, so the receiver's copy of the parent has the same bytes.
                Some(run) => map
                    .read_range(&run, index, 1)
                    .is_ok_and(|old| *old == *page),
                None => false,
            };
            match (same, at == equal) {
                (true, true) => equal += 1,
                (true, false) if equal == 0 => {
                    return (0, usize::try_from(at).unwrap_or(0) * page_bytes);
                }
                (false, _) if equal > 0 => break,
                _ => {}
            }
        }
        (equal, bytes.len())
    }
}

/// Returns the location of a page of a run: segment and page. `None` for zero pages.
fn place_of(run: &StoredRun, index: u64) -> Option<permafrost_pmem::PageNo> {
    match run.kind {
        RunKind::Stored { location, .. } => Some(location.plus(index - run.first_index)),
        RunKind::Zero => None,
    }
}
