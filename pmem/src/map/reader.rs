//! Reading a checkpoint's pages through a map.

use std::borrow::Cow;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::node::{self, MapNode, NodeRef, run_len};
use super::{MapCursor, MapRoot, ParentPage, RunKind, StoredRun};
use crate::checkpoint::StoredCheckpoint;
use crate::encrypted::decrypt_pages;
use crate::error::{BlobError, MapFault, PageError, SegmentPlace, outside};
use crate::ids::PageNo;
use crate::layout::SlotEntry;
use crate::{PAGE_BYTES, PAGE_SIZE};
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{LostPage, MEDIUM_SPAN, Medium, NotRecalled};

/// Zeros from which a blob's zero runs are passed on, a piece at a time.
static ZEROS: [u8; 16 * PAGE_SIZE] = [0; 16 * PAGE_SIZE];

/// A page map of a checkpoint, for reading. Cheap to clone.
#[derive(Clone)]
pub struct PageMap {
    pub(super) checkpoint: Arc<StoredCheckpoint>,
    root: MapRoot,
}

impl PageMap {
    pub(crate) fn new(checkpoint: Arc<StoredCheckpoint>, root: MapRoot) -> Self {
        Self { checkpoint, root }
    }

    /// Returns the root of the map.
    #[must_use]
    pub fn root(&self) -> &MapRoot {
        &self.root
    }

    /// Returns the checkpoint that the map is read from.
    #[must_use]
    pub fn checkpoint(&self) -> &Arc<StoredCheckpoint> {
        &self.checkpoint
    }

    /// Returns all runs, ascending.
    #[must_use]
    pub fn runs(&self) -> Runs {
        Runs {
            cursor: self.clone().cursor(),
            next_index: Some(0),
        }
    }

    /// Returns the indices that have a page, ascending, and the pages' flags. Neighbours may have equal flags. Reads
    /// nothing below a block that has all of its pages. Ends after an error.
    pub fn extents(&self) -> impl Iterator<Item = Result<PageExtent, PageError>> + use<> {
        let (mut cursor, mut next) = (self.clone().cursor(), Some(0));
        std::iter::from_fn(move || {
            let extent = cursor.extent(next?);
            let found = extent.as_ref().ok().and_then(Option::as_ref);
            next = found.map(|found| found.first_index.saturating_add(found.pages));
            extent.transpose()
        })
    }

    /// Returns a cursor for look-ups in ascending order, and as a parent for a shadow.
    #[must_use]
    pub fn cursor(self) -> MapCursor {
        MapCursor::new(self)
    }

    /// Returns the run with the page. Reads a node a level; a [`cursor`](Self::cursor) remembers them.
    ///
    /// # Errors
    /// [`PageError::MapCorrupt`].
    pub fn lookup(&self, index: u64) -> Result<Option<StoredRun>, PageError> {
        self.clone().cursor().lookup(index)
    }

    /// Returns a run's pages, every one of them verified; empty for zeros. They are lent from the mapped medium, or
    /// decrypted. Costs a CRC32 of all of them.
    ///
    /// # Errors
    /// [`PageError::Corrupt`] or [`PageError::Lost`] names the first page that differs from the sealed one.
    pub fn read(&self, run: &StoredRun) -> Result<Cow<'_, [u8]>, PageError> {
        self.read_range(run, run.first_index, run.pages)
    }

    /// Returns some of a run's pages, verified; empty for zeros and for pages that are not the run's.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub fn read_range(
        &self,
        run: &StoredRun,
        first_index: u64,
        pages: u32,
    ) -> Result<Cow<'_, [u8]>, PageError> {
        let nothing = Cow::Borrowed(&[][..]);
        let RunKind::Stored {
            location,
            crcs_crc32,
        } = run.kind
        else {
            return Ok(nothing);
        };
        let Some(skip) = first_index.checked_sub(run.first_index) else {
            return Ok(nothing);
        };
        if skip.saturating_add(u64::from(pages)) > u64::from(run.pages) || pages == 0 {
            return Ok(nothing);
        }
        let place = self.place(location, run.pages)?;
        let located = self.checkpoint.space().locate_encrypted(place, run.pages);
        let (run_at, cipher) = located.map_err(|error| error.at(location))?;
        let at = run_at + skip * PAGE_BYTES;
        let medium = &self.checkpoint.space().medium;
        // SAFETY: the pages lie in a segment that the checkpoint's lease holds (`place` has
        // checked it), which is given back at the earliest when the last reference to the checkpoint
        // goes: not before the slice, which borrows from one. A held segment is written to by the
        // shadow that allocated it only, and sealing has consumed that one. If the segment is moved, the
        // checkpoint keeps the slot that it was in.
        let lent = unsafe { medium.bytes(at, run_len(pages)) };
        let lost = |error| lost_page(error, (first_index, at), location.plus(skip));
        let bytes = match lent {
            // In an object store, which has them copied only.
            Err(error) if NotRecalled::is(&error) => {
                let mut copy = vec![0; run_len(pages)];
                medium.read(at, &mut copy).map_err(lost)?;
                Cow::Owned(copy)
            }
            lent => Cow::Borrowed(lent.map_err(lost)?),
        };
        if let Some(cipher) = cipher {
            let mut bytes = bytes.into_owned();
            decrypt_pages(&cipher, location.plus(skip), &mut bytes);
            let compared = self.verify_by_leaves(run, first_index, &bytes);
            medium.check(at, to_u64(bytes.len())).map_err(lost)?;
            return compared.map(|()| Cow::Owned(bytes));
        }
        if pages == run.pages {
            let mut all = crc32fast::Hasher::new();
            for page in bytes.chunks_exact(PAGE_SIZE) {
                all.update(&crc32fast::hash(page).to_le_bytes());
            }
            medium.check(at, to_u64(bytes.len())).map_err(lost)?;
            if all.finalize() == crcs_crc32 {
                return Ok(bytes);
            }
        }
        if let Some(key) = self.checkpoint.space().locked(place.segment) {
            return Err(PageError::Locked { location, key });
        }
        // Some of the run, or one of its pages is damaged: each by itself.
        let (_, crcs) = self.verified_checksums(location, run.pages, crcs_crc32)?;
        let expected = crcs.iter().skip(to_usize(skip));
        let mut pages = bytes
            .chunks_exact(PAGE_SIZE)
            .zip(expected)
            .zip(first_index..);
        let damaged = pages.find_map(|((page, expected), index)| {
            let found = crc32fast::hash(page);
            (found != expected.get()).then(|| PageError::Corrupt {
                index,
                location: location.plus(index - run.first_index),
                expected: expected.get(),
                found,
            })
        });
        // A page that was lost just now is zeros, which may be what its checksum is of.
        medium.check(at, to_u64(bytes.len())).map_err(lost)?;
        match damaged {
            Some(error) => Err(error),
            None => Ok(bytes),
        }
    }

    /// Returns true if pages of a run are in an object store: reading them asks it. Asks it for nothing itself.
    #[must_use]
    pub fn is_out(&self, run: &StoredRun) -> bool {
        let RunKind::Stored { location, .. } = run.kind else {
            return false;
        };
        let space = self.checkpoint.space();
        let located = self.place(location, run.pages).ok();
        let located = located.and_then(|place| space.locate(place, run.pages).ok());
        let Some(at) = located.filter(|at| space.is_cold(to_usize(at / MEDIUM_SPAN))) else {
            return false;
        };
        // SAFETY: as in `read_range`; nothing is read.
        let lent = unsafe { space.medium.bytes(at, run_len(run.pages)) };
        lent.is_err_and(|error| NotRecalled::is(&error))
    }

    /// Compares some of a run's pages with the checksums in the map, which are of pages before they were encrypted.
    fn verify_by_leaves(
        &self,
        run: &StoredRun,
        first_index: u64,
        bytes: &[u8],
    ) -> Result<(), PageError> {
        let (pages, _) = bytes.as_chunks::<PAGE_SIZE>();
        let RunKind::Stored { crcs_crc32, .. } = run.kind else {
            return Ok(());
        };
        let crcs: Vec<u32> = pages.iter().map(|page| crc32fast::hash(page)).collect();
        if pages.len() == to_usize(run.pages.into()) {
            let mut all = crc32fast::Hasher::new();
            crcs.iter().for_each(|crc| all.update(&crc.to_le_bytes()));
            if all.finalize() == crcs_crc32 {
                return Ok(());
            }
        }
        let mut leaves = self.clone().cursor();
        for (index, found) in (first_index..).zip(crcs) {
            let Some(ParentPage::Stored { location, crc, .. }) = leaves.page(index)? else {
                return Err(outside(self.root.node().location));
            };
            if found != crc {
                return Err(PageError::Corrupt {
                    index,
                    location,
                    expected: crc,
                    found,
                });
            }
        }
        Ok(())
    }

    /// Fails if a page that [`read_range`](Self::read_range) lent was lost since. To be called after the pages were
    /// copied or passed on, and before the result counts: a page that is lost while it is used reads as zeros.
    ///
    /// # Errors
    /// [`PageError::Lost`].
    pub fn confirm(&self, run: &StoredRun, first_index: u64, pages: u32) -> Result<(), PageError> {
        let (RunKind::Stored { location, .. }, Some(skip)) =
            (run.kind, first_index.checked_sub(run.first_index))
        else {
            return Ok(());
        };
        let space = self.checkpoint.space();
        let place = space.geometry.place(location, run.pages);
        let located = space.locate(place.map_err(|_| outside(location))?, run.pages);
        let at = located.map_err(|error| error.at(location))? + skip * PAGE_BYTES;
        space
            .medium
            .check(at, u64::from(pages) * PAGE_BYTES)
            .map_err(|error| lost_page(error, (first_index, at), location.plus(skip)))?;
        // The bytes may have been lent from where the segment was before.
        if self.checkpoint.lost_retired_page() {
            return Err(PageError::Lost {
                index: first_index,
                location: location.plus(skip),
            });
        }
        Ok(())
    }

    /// Verifies a run's page checksums, and none of its pages: for pages that other maps share, and that were read
    /// through one of those maps.
    ///
    /// # Errors
    /// [`PageError::MapCorrupt`].
    pub fn check_checksums(&self, run: &StoredRun) -> Result<(), PageError> {
        match run.kind {
            RunKind::Zero => Ok(()),
            RunKind::Stored {
                location,
                crcs_crc32,
            } => match self.is_encrypted(location, run.pages)? {
                // Its checksums are those in the map, which were verified on the way to the run.
                true => Ok(()),
                false => self
                    .verified_checksums(location, run.pages, crcs_crc32)
                    .map(drop),
            },
        }
    }

    /// Returns the verified CRC32s of a run's pages, as they were before they were encrypted; none for zeros. Reads no
    /// page.
    ///
    /// # Errors
    /// [`PageError::MapCorrupt`].
    pub fn checksums(&self, run: &StoredRun) -> Result<Vec<u32>, PageError> {
        let RunKind::Stored {
            location,
            crcs_crc32,
        } = run.kind
        else {
            return Ok(Vec::new());
        };
        if !self.is_encrypted(location, run.pages)? {
            let (_, crcs) = self.verified_checksums(location, run.pages, crcs_crc32)?;
            return Ok(crcs.iter().map(|crc| crc.get()).collect());
        }
        let mut leaves = self.clone().cursor();
        let indices = run.first_index..run.end_index();
        indices
            .map(|index| match leaves.page(index)? {
                Some(ParentPage::Stored { crc, .. }) => Ok(crc),
                _ => Err(outside(location)),
            })
            .collect()
    }

    fn is_encrypted(&self, location: PageNo, pages: u32) -> Result<bool, PageError> {
        let place = self.place(location, pages)?;
        let located = self.checkpoint.space().locate_encrypted(place, pages);
        Ok(located.map_err(|error| error.at(location))?.1.is_some())
    }

    /// Returns the location of a run's pages in the medium's file, once every one of them was verified: `None` where
    /// there is no file, for zeros, and for encrypted pages. For `splice`, after which the pipe refers to the pages
    /// themselves: the checkpoint must be kept until they have been read out of the pipe.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub fn splice_source(
        &self,
        run: &StoredRun,
    ) -> Result<Option<(BorrowedFd<'_>, u64)>, PageError> {
        let space = self.checkpoint.space();
        let RunKind::Stored { location, .. } = run.kind else {
            return Ok(None);
        };
        if self.is_encrypted(location, run.pages)? {
            return Ok(None);
        }
        let place = self.place(location, run.pages)?;
        let at = space.locate(place, run.pages);
        let at = at.map_err(|error| error.at(location))?;
        let file = space.medium.file_at(at);
        if file.is_some() {
            self.read(run)?;
        }
        Ok(file)
    }

    /// Passes on bytes of a blob, `len_bytes` of them from `at` on, in pieces of at most a segment.
    ///
    /// # Errors
    /// [`BlobError`]: a damaged page, pages missing, or the receiver's own error.
    pub fn read_blob(
        &self,
        at: u64,
        len_bytes: u64,
        mut sink: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), BlobError> {
        let end = at.saturating_add(len_bytes);
        let mut at = at;
        let mut runs = self.runs();
        runs.next_index = Some(at / PAGE_BYTES);
        while at < end {
            let index = at / PAGE_BYTES;
            let run = runs.next().transpose()?;
            let Some(run) = run.filter(|run| run.first_index <= index) else {
                let fault = MapFault::BlobGap { len_bytes, index };
                let location = self.root.node().location;
                return Err(PageError::MapCorrupt { location, fault }.into());
            };
            let until = end.min(run.end_index() * PAGE_BYTES);
            let (skip, len) = (to_usize(at % PAGE_BYTES), to_usize(until - at));
            match run.kind {
                RunKind::Stored { .. } => {
                    let pages = until.div_ceil(PAGE_BYTES) - index;
                    let pages = u32::try_from(pages).unwrap_or(run.pages);
                    let bytes = self.read_range(&run, index, pages)?;
                    let passed_on = sink(&bytes[skip..skip + len]);
                    self.confirm(&run, index, pages)?;
                    passed_on.map_err(BlobError::Sink)?;
                }
                RunKind::Zero => {
                    let mut zeros = len;
                    while zeros > 0 {
                        let part = zeros.min(ZEROS.len());
                        sink(&ZEROS[..part]).map_err(BlobError::Sink)?;
                        zeros -= part;
                    }
                }
            }
            at = until;
        }
        Ok(())
    }

    /// Reads the topmost node; `None` if the map has no page.
    pub(super) fn root_node(&self) -> Result<Option<(NodeRef, MapNode)>, PageError> {
        if self.root.is_empty() {
            return Ok(None);
        }
        let at = self.root.node();
        let node = node::load(&self.checkpoint, at, self.root.level())?;
        Ok(Some((at, node)))
    }

    /// Reads the child in a slot of a node that is no leaf.
    pub(super) fn child(
        &self,
        node: &MapNode,
        slot: usize,
        entry: &SlotEntry,
    ) -> Result<MapNode, PageError> {
        let at = NodeRef::of(entry);
        let child = node::load(&self.checkpoint, at, node.level.saturating_sub(1))?;
        let within =
            node.first_index <= child.first_index && node.slot_of(child.first_index) == slot;
        if node.covers(child.first_index) && within {
            return Ok(child);
        }
        Err(PageError::MapCorrupt {
            location: at.location,
            fault: MapFault::Malformed,
        })
    }

    /// Returns the verified page checksums of a stored run, and the place of its pages.
    pub(super) fn verified_checksums(
        &self,
        location: PageNo,
        pages: u32,
        crcs_crc32: u32,
    ) -> Result<(SegmentPlace, Vec<U32>), PageError> {
        let mut crcs = Vec::new();
        let place = self.read_checksums(location, pages, &mut crcs)?;
        let found = crc32fast::hash(crcs.as_bytes());
        if found != crcs_crc32 {
            let fault = MapFault::PageChecksums {
                expected: crcs_crc32,
                found,
            };
            return Err(PageError::MapCorrupt { location, fault });
        }
        Ok((place, crcs))
    }

    /// Reads the page checksums of a stored run, unverified, and returns the place of its pages: in a segment that
    /// the checkpoint holds.
    pub(super) fn read_checksums(
        &self,
        location: PageNo,
        pages: u32,
        into: &mut Vec<U32>,
    ) -> Result<SegmentPlace, PageError> {
        let (space, place) = (self.checkpoint.space(), self.place(location, pages)?);
        space
            .read_crcs(place, pages, into)
            .map_err(|error| error.at(location))?;
        Ok(place)
    }

    /// Returns the place of consecutive pages, in a segment that the checkpoint holds.
    pub(super) fn place(&self, location: PageNo, pages: u32) -> Result<SegmentPlace, PageError> {
        let place = self.checkpoint.space().geometry.place(location, pages);
        place
            .ok()
            .filter(|place| self.checkpoint.lease().holds(place.segment))
            .ok_or_else(|| outside(location))
    }
}

/// Makes the error for the page that an error of the medium is about, among pages from an index, a byte offset and a
/// location on.
fn lost_page(error: io::Error, (index, at): (u64, u64), location: PageNo) -> PageError {
    let Some(lost) = LostPage::of(&error) else {
        return PageError::Io(error);
    };
    let skip = lost.at.saturating_sub(at) / PAGE_BYTES;
    PageError::Lost {
        index: index + skip,
        location: location.plus(skip),
    }
}

/// Iterator over a map's runs. After an error it ends.
pub struct Runs {
    cursor: MapCursor,
    next_index: Option<u64>,
}

impl Iterator for Runs {
    type Item = Result<StoredRun, PageError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.cursor.seek(self.next_index?) {
            Ok(Some(run)) => {
                self.next_index = Some(run.end_index());
                Some(Ok(run))
            }
            Ok(None) => {
                self.next_index = None;
                None
            }
            Err(error) => {
                self.next_index = None;
                Some(Err(error))
            }
        }
    }
}

/// Consecutive pages with equal flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageExtent {
    /// Index of the first page.
    pub first_index: u64,
    /// Number of pages.
    pub pages: u64,
    /// Flags of all of them.
    pub flags: u16,
}
