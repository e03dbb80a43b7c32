//! Cleaning: the pages of sparse segments that checkpoints still refer to are packed into fewer slots.
//!
//! ```text
//! slot 3  │hdr│▒│ │ │▒│ │ │ │     segments 3, 9 and 4 have a few live pages (▒) each
//! slot 9  │hdr│ │ │▒│ │ │ │ │
//! slot 4  │hdr│ │▒│ │ │ │▒│ │
//!                  ▼
//! slot 12 │hhh│▒│▒│▒│▒│▒│ │ │     segments 3, 9 and 4, packed behind their headers; slots 3, 9 and 4 are free
//! ```
//!
//! Maps name pages by segment and place, and a packed segment's header says which places it stores. So no map, no
//! root and no checkpoint changes: the price of moving a segment is its live pages and an entry of the segment table,
//! however many checkpoints share it.
//!
//! A page is live if a listed checkpoint refers to it. A [`Survey`] finds the live pages, holds their segments, so
//! that none of them is reused while it counts, and takes away the tails of those that are to be moved, so that none
//! of these is appended to. The tail that the next dump goes on with stays, unless it gives little room. From then on
//! their live pages only become fewer: a shadow that refers to a page has found it through a checkpoint.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

use crate::alloc::{Lease, SlotHold};
use crate::checkpoint::{CopyId, StoredCheckpoint};
use crate::cool::fetch_slot;
use crate::encrypted::KeyChange;
use crate::error::{CleanError, SegmentPlace};
use crate::ids::{CheckpointId, PageNo, SegmentNo, SlotNo};
use crate::layout::{PackedHeader, PackedSize, StoredPages, packed_header_bytes};
use crate::map::MapRoot;
use crate::region::Region;
use crate::space::{Space, packed_checksum};
use crate::table::Position;
use crate::{PAGE_BYTES, PAGE_SIZE};
use permafrost_cipher::KeyId;
use permafrost_liveness::{Found, Liveness};
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{FetchedPages, Flushed, MAX_MEDIA, Medium};

/// Live pages of a region, and the slots that are worth cleaning. Holds all segments that were in use when it was made,
/// so it should not be kept for long.
pub struct Survey {
    pub(crate) live: HashMap<SegmentNo, StoredPages>,
    /// Those of them that opening, listing and surveys read: roots, manifests and map nodes.
    nodes: HashMap<SegmentNo, StoredPages>,
    /// Segments that a dump is writing to, or may go on with.
    growing: HashSet<SegmentNo>,
    /// Pages of roots, with the number that each is encrypted under.
    pub(crate) roots: HashMap<PageNo, PageNo>,
    /// Keys that segments are to be moved away from.
    pub(crate) keys: Vec<KeyId>,
    /// Segments that could not be moved to another key: what they have in an object store is damaged or away.
    pub(crate) stuck: Mutex<HashSet<SegmentNo>>,
    /// Sparse slots with the segments in them: by medium, and of each the sparsest one last.
    sparse: Vec<SparseSlot>,
    used_bytes: u64,
    live_bytes: u64,
    unknown_bytes: u64,
    _leases: Vec<Arc<Lease>>,
}

/// Pages of roots, with the number that each is encrypted under.
type RootPages = HashMap<PageNo, PageNo>;

/// A slot that is worth cleaning.
pub(crate) struct SparseSlot {
    /// Medium that the slot is on.
    medium: usize,
    segments: Vec<SegmentNo>,
    size: PackedSize,
}

impl SparseSlot {
    pub(crate) fn medium(&self) -> usize {
        self.medium
    }

    pub(crate) fn segments(&self) -> &[SegmentNo] {
        &self.segments
    }

    /// Fetches pages of it that are in an object store, so that they are read from memory while the result is kept.
    pub(crate) fn fetch(&self, space: &Space) -> io::Result<Vec<FetchedPages>> {
        let slots: HashSet<_> = self
            .segments
            .iter()
            .filter_map(|s| space.table.slot(*s))
            .collect();
        let fetched = slots.into_iter().map(|slot| fetch_slot(space, slot));
        fetched.filter_map(Result::transpose).collect()
    }
}

/// Result of a step of cleaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cleaned {
    /// Slots whose segments were all moved. They are reused once no reader has a checkpoint that was in them.
    pub slots: u64,
    /// Slots that were filled with them.
    pub filled: u64,
    /// Bytes written: pages, segment headers.
    pub written_bytes: u64,
    /// Segments left where they are, because a page of them is damaged.
    pub damaged_segments: u64,
    /// True if nothing more is worth cleaning.
    pub done: bool,
}

impl Survey {
    /// Bytes of the slots in use.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes of the pages that checkpoints refer to, in segments that can be moved.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Bytes of segments whose live pages are not known: dumps under way, readers of removed checkpoints or damaged
    /// maps refer to them. They are not cleaned.
    #[must_use]
    pub fn unknown_bytes(&self) -> u64 {
        self.unknown_bytes
    }

    /// Bytes that cleaning would free, unless it meets damage or dumps begin meanwhile.
    #[must_use]
    pub fn reclaimable_bytes(&self, segment_bytes: u64) -> u64 {
        self.reclaimable_by_medium(segment_bytes).values().sum()
    }

    /// Bytes that cleaning would free on each medium, by its number.
    #[must_use]
    pub fn reclaimable_by_medium(&self, segment_bytes: u64) -> BTreeMap<usize, u64> {
        let mut left = &self.sparse[..];
        let mut freed = BTreeMap::new();
        while let Some(last) = left.last() {
            let count = fitting(left, segment_bytes / PAGE_BYTES);
            let rest = if count > 1 {
                *freed.entry(last.medium).or_default() += to_u64(count - 1) * segment_bytes;
                left.len() - count
            } else {
                left.partition_point(|slot| slot.medium < last.medium)
            };
            left = &left[..rest];
        }
        freed
    }
}

impl Region {
    /// Finds the live pages of all checkpoints. `roots` returns the map roots that a checkpoint's manifest names,
    /// `None` if it cannot be read. Reads the maps of checkpoints that no survey has read before, of these the nodes
    /// that no other checkpoint has.
    pub fn survey(&self, roots: &dyn Fn(&Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>>) -> Survey {
        self.survey_keys(roots, &[])
    }

    /// Finds the live pages as [`survey`](Self::survey) does, so that segments with those keys can be moved to another
    /// one.
    pub fn survey_keys(
        &self,
        roots: &dyn Fn(&Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>>,
        keys: &[KeyId],
    ) -> Survey {
        let space = self.space();
        let mut known = self.liveness();
        // Their segments are held from here on.
        let listed: HashMap<u64, _> = self.leases().into_iter().collect();
        known.retain(|order| listed.contains_key(&order));
        let allocator = space.allocator();
        known.retain_segments(|segment| !allocator.is_free(segment));
        drop(allocator);
        let (mut live, mut nodes, mut leases) = (HashMap::new(), HashMap::new(), Vec::new());
        let mut root_pages = HashMap::new();
        let mut holders: HashMap<SegmentNo, u32> = HashMap::new();
        let mut unknown: HashSet<SegmentNo> = HashSet::new();
        for (order, (id, lease)) in listed {
            for segment in lease.segments() {
                *holders.entry(segment).or_default() += 1;
                live.entry(segment).or_insert_with(StoredPages::default);
            }
            let is_known = known.has(order) || self.remember((order, id), roots, &mut known);
            if !is_known || !keys.is_empty() && !self.add_root_pages((order, id), &mut root_pages) {
                unknown.extend(lease.segments());
            }
            leases.push(lease);
        }
        for (&segment, live) in &mut live {
            *live = known.live(segment);
            nodes.insert(segment, known.nodes(segment));
        }
        drop(known);
        // More holders than these: shadows, readers of removed checkpoints, checkpoints sealed since.
        let mut allocator = space.allocator();
        let others = |(segment, count): (&SegmentNo, &u32)| {
            (allocator.holders(*segment) != *count).then_some(*segment)
        };
        unknown.extend(holders.iter().filter_map(others));
        // Under the same lock: nothing is appended any more to a segment that may be moved.
        allocator.forget_tails_of(keys);
        let segment_pages = space.geometry.segment_pages();
        let roomy: [bool; MAX_MEDIA] = std::array::from_fn(|medium| {
            allocator.order().contains(&medium) && allocator.count(medium).has_spare()
        });
        allocator.choose_tails(|(medium, segment), page, is_next| {
            let Some(mut size) = live.get(&segment).map(PackedSize::of) else {
                return true;
            };
            // The next dump fills it: to move it now would write its pages twice, and give no more room. But many keys,
            // each with a tail that only its own dumps go on with, must not fill a medium.
            if is_next && roomy[medium] {
                size.pages += segment_pages.saturating_sub(page);
            }
            unknown.contains(&segment) || !size.is_sparse(segment_pages)
        });
        let growing = allocator.growing();
        let dead = |(segment, live): (&SegmentNo, &StoredPages)| {
            let is_known = !unknown.contains(segment) && !growing.contains(segment);
            (live.count() == 0 && is_known).then_some(*segment)
        };
        allocator.add_dead(live.iter().filter_map(dead));
        drop(allocator);
        let mut survey = Survey {
            used_bytes: 0,
            live_bytes: 0,
            unknown_bytes: unknown
                .iter()
                .map(|segment| space.segment_bytes(*segment))
                .sum(),
            live,
            nodes,
            growing,
            roots: root_pages,
            keys: keys.to_vec(),
            stuck: Mutex::default(),
            sparse: Vec::new(),
            _leases: leases,
        };
        survey.live.retain(|segment, _| !unknown.contains(segment));
        survey.find_sparse(space);
        survey
    }

    /// Returns a copy of a checkpoint, unless another one has taken its place.
    fn listed_copy(&self, order: u64, id: CheckpointId) -> Option<Arc<StoredCheckpoint>> {
        let checkpoint = self.checkpoint(id);
        checkpoint.filter(|found| found.copy_id() == CopyId::new(order))
    }

    /// Notes the pages of a checkpoint's root; returns false if it cannot be read.
    fn add_root_pages(&self, (order, id): (u64, CheckpointId), root_pages: &mut RootPages) -> bool {
        let checkpoint = self.listed_copy(order, id);
        let Some(Ok(pages)) = checkpoint.map(|checkpoint| checkpoint.root_pages()) else {
            return false;
        };
        for page in pages {
            root_pages.extend([(page, page), (page.plus(1), page)]);
        }
        true
    }

    /// Finds and remembers the live pages of a checkpoint; returns false if its root or a map cannot be read, or it is
    /// not listed any more.
    fn remember(
        &self,
        (order, id): (u64, CheckpointId),
        roots: &dyn Fn(&Arc<StoredCheckpoint>) -> Option<Vec<MapRoot>>,
        known: &mut Liveness,
    ) -> bool {
        let Some(checkpoint) = self.listed_copy(order, id) else {
            return false;
        };
        let (Some(roots), Ok(pages)) = (roots(&checkpoint), checkpoint.root_pages()) else {
            return false;
        };
        let mut found = Found::default();
        for page in pages {
            found.add_node_page(page);
            found.add_node_page(page.plus(1));
        }
        let maps = roots.iter().map(|root| (checkpoint.map(root), false));
        // Opening and listing read manifests as they read nodes.
        for (map, is_manifest) in maps.chain([(checkpoint.manifest_map(), true)]) {
            if map.visit(known, &mut found, is_manifest).is_err() {
                known.give_back(found);
                return false;
            }
        }
        known.add_checkpoint(order, found);
        true
    }

    /// Moves segments of sparse slots, about `max_bytes` of pages. Dumps and readers go on meanwhile.
    ///
    /// # Errors
    /// [`CleanError`]; nothing is lost, and what was moved before stays moved.
    pub fn clean(&self, survey: &mut Survey, max_bytes: u64) -> Result<Cleaned, CleanError> {
        let space = self.space();
        let mut cleaned = Cleaned::default();
        while cleaned.written_bytes < max_bytes {
            self.journal().check()?;
            let Some((medium, batch)) = survey.next_batch(space) else {
                cleaned.done = true;
                break;
            };
            let done = self.move_batch(survey, medium, &batch, None)?;
            cleaned.slots += done.slots;
            cleaned.filled += u64::from(done.written_bytes > 0);
            cleaned.written_bytes += done.written_bytes;
            cleaned.damaged_segments += done.damaged_segments;
        }
        Ok(cleaned)
    }

    /// Packs the segments of sparse slots of a medium into a free one, as they are or under another key: there, or on
    /// another one if it has none. Those of a medium that dumps do not go to, as it is drained or cold, go to another
    /// one.
    pub(crate) fn move_batch(
        &self,
        survey: &Survey,
        medium: usize,
        batch: &[SparseSlot],
        change: Option<&KeyChange<'_>>,
    ) -> Result<Cleaned, CleanError> {
        let space = self.space();
        let others = space.allocator().order().to_vec();
        let stays = others.contains(&medium);
        let target = stays.then(|| SlotHold::take_on(space, medium)).flatten();
        let target = target.or_else(|| SlotHold::take_spare(space, &others));
        let target = target.ok_or(CleanError::Full)?;
        let (mut cleaned, mut moves, mut flushed) =
            (Cleaned::default(), Vec::new(), Flushed::new());
        let _moving = space.lock_moves();

        // 1. Write the packed segments to a slot that no entry names, and make them durable. A crash here leaves a free
        //    slot.
        let size = batch
            .iter()
            .fold(PackedSize::default(), |size, slot| size.plus(slot.size));
        let slot_at = space.table.slots().at(target.slot);
        let (mut header_at, mut pages_at) = (slot_at, slot_at + size.header_pages() * PAGE_BYTES);
        for slot in batch {
            let mut whole = true;
            for &segment in &slot.segments {
                let Some(live) = survey.live.get(&segment) else {
                    continue;
                };
                let place = (header_at, pages_at);
                if !copy_packed(space, segment, live, place, change, &mut flushed)? {
                    cleaned.damaged_segments += 1;
                    whole = false;
                    continue;
                }
                let packed_pages = Some(live.count());
                moves.push((
                    segment,
                    Position {
                        header_at,
                        packed_pages,
                    },
                ));
                header_at += packed_header_bytes(live.count());
                pages_at += u64::from(live.count()) * PAGE_BYTES;
            }
            cleaned.slots += u64::from(whole);
        }
        if moves.is_empty() {
            return Ok(cleaned);
        }
        cleaned.written_bytes = pages_at - slot_at;
        space
            .medium
            .flush(slot_at, size.header_pages() * PAGE_BYTES, &mut flushed)?;
        space.fence(&mut flushed)?;

        move_durably(space, &moves, &mut flushed)?;
        Ok(cleaned)
    }
}

/// Steps 2 and 3 of a move; the pages are durable in both places.
pub(crate) fn move_durably(
    space: &Arc<Space>,
    moves: &[(SegmentNo, Position)],
    flushed: &mut Flushed,
) -> Result<(), CleanError> {
    // 2. Point the table to them, one copy after the other. A crash leaves each segment in the one or the other
    //    place, and both places hold its pages until step 3.
    let left: Vec<_> = moves
        .iter()
        .filter_map(|&(segment, to)| Some((segment, Arc::new(space.move_segment(segment, to)?))))
        .collect();
    if let Err(error) = write_entries(space, moves, flushed) {
        space.fail("move segments", &error);
        // The entries on the medium may name the one or the other place: neither is reused before the next open.
        left.into_iter()
            .for_each(|(_, hold)| std::mem::forget(hold));
        return Err(error.into());
    }

    // 3. Give the places back that the segments have left, once nobody reads there.
    space.readers.keep(&left);
    Ok(())
}

impl Survey {
    /// Returns true if all live pages of a segment are known, and no dump writes more of them.
    pub(crate) fn knows(&self, segment: SegmentNo) -> bool {
        self.live.contains_key(&segment) && !self.growing.contains(&segment)
    }

    /// Returns the live pages of a segment, ascending, each with true if it is a root, a manifest's or a map node.
    pub(crate) fn pages(&self, segment: SegmentNo) -> impl Iterator<Item = (u32, bool)> {
        let nodes = self.nodes.get(&segment);
        let live = self
            .live
            .get(&segment)
            .into_iter()
            .flat_map(StoredPages::iter);
        live.map(move |page| {
            (
                page,
                nodes.is_some_and(|nodes| nodes.rank(page, 1).is_some()),
            )
        })
    }

    /// Finds the slots with segments that can all be moved, and are worth it.
    fn find_sparse(&mut self, space: &Space) {
        let mut slots: HashMap<SlotNo, SparseSlot> = HashMap::new();
        for (&segment, live) in &self.live {
            self.live_bytes += u64::from(live.count()) * PAGE_BYTES;
            let Some(slot) = space.table.slot(segment) else {
                continue;
            };
            let slot = slots.entry(slot).or_insert(SparseSlot {
                medium: slot.medium(),
                segments: Vec::new(),
                size: PackedSize::default(),
            });
            slot.segments.push(segment);
            slot.size = slot.size.plus(PackedSize::of(live));
        }
        let allocator = space.allocator();
        let used = (0..MAX_MEDIA).map(|medium| allocator.count(medium).used());
        let used: u32 = used.sum();
        self.used_bytes = u64::from(used) * u64::from(space.geometry.segment_bytes);
        let sparse = slots.into_iter().filter(|(slot, sparse)| {
            // One that something else occupies would not become free. One that is drained is emptied anyhow.
            allocator.order().contains(&slot.medium())
                && !sparse.segments.iter().any(|s| self.growing.contains(s))
                && sparse.size.is_sparse(space.geometry.segment_pages())
                && to_usize(u64::from(allocator.occupants(*slot))) == sparse.segments.len()
        });
        self.sparse = sparse.map(|(_, sparse)| sparse).collect();
        drop(allocator);
        for slot in &mut self.sparse {
            slot.segments.sort_unstable();
        }
        self.sparse.sort_unstable_by_key(|slot| {
            (
                slot.medium,
                Reverse(slot.size.all_pages()),
                Reverse(slot.segments.first().copied()),
            )
        });
    }

    /// Divides segments into batches, each of which fits into one slot of the medium that its first segment is on.
    pub(crate) fn batches(&self, space: &Space, segments: &[SegmentNo]) -> Vec<SparseSlot> {
        let pages = u64::from(space.geometry.segment_pages());
        let mut batches: Vec<SparseSlot> = Vec::new();
        for &segment in segments {
            let (Some(live), Some(slot)) = (self.live.get(&segment), space.table.slot(segment))
            else {
                continue;
            };
            let (size, medium) = (PackedSize::of(live), slot.medium());
            let fits = |last: &&mut SparseSlot| {
                last.medium == medium && last.size.plus(size).all_pages() <= pages
            };
            match batches.last_mut().filter(fits) {
                Some(last) => {
                    last.segments.push(segment);
                    last.size = last.size.plus(size);
                }
                None => batches.push(SparseSlot {
                    medium,
                    segments: vec![segment],
                    size,
                }),
            }
        }
        batches
    }

    /// Takes the sparsest slots of a medium whose segments fit together into one; `None` if that frees no slot of any.
    fn next_batch(&mut self, space: &Space) -> Option<(usize, Vec<SparseSlot>)> {
        let pages = u64::from(space.geometry.segment_pages());
        loop {
            let medium = self.sparse.last()?.medium;
            let count = fitting(&self.sparse, pages);
            if count > 1 {
                let batch = self.sparse.split_off(self.sparse.len() - count);
                return Some((medium, batch));
            }
            // The others of this medium are no sparser.
            self.sparse.retain(|slot| slot.medium != medium);
        }
    }
}

/// Returns how many of the sparsest slots of the last one's medium fit together into one of so many pages.
fn fitting(sparse: &[SparseSlot], pages: u64) -> usize {
    let Some(medium) = sparse.last().map(|last| last.medium) else {
        return 0;
    };
    let mut size = PackedSize::default();
    let fitting = sparse.iter().rev().take_while(|slot| {
        size = size.plus(slot.size);
        slot.medium == medium && size.all_pages() <= pages
    });
    fitting.count()
}

/// Writes a segment's header and its live pages to their places, and flushes the pages: as they are, or under another
/// key. Returns false if one of them is damaged: such a segment stays where it is, to be healed or salvaged.
fn copy_packed(
    space: &Space,
    segment: SegmentNo,
    live: &StoredPages,
    (header_at, pages_at): (u64, u64),
    change: Option<&KeyChange<'_>>,
    flushed: &mut Flushed,
) -> io::Result<bool> {
    let mut crcs = Vec::new();
    let position = space.table.position(segment);
    let key = position.map_or(Ok(None), |position| space.key_at(segment, position));
    let Ok(key) = key else {
        return Ok(false);
    };
    let key = change.map_or(key, |change| Some(change.to.id));
    for (page, at) in live.iter().zip((pages_at..).step_by(PAGE_SIZE)) {
        let place = SegmentPlace { segment, page };
        let Ok(mut content) = space.read_page(place) else {
            return Ok(false);
        };
        let crc = crc32fast::hash(content.as_slice());
        let read = space.read_crcs(place, 1, &mut crcs);
        if read.is_err() || crcs.last().map(|crc| crc.get()) != Some(crc) {
            return Ok(false);
        }
        if let Some(change) = change {
            change.apply(space.geometry.page_no(segment, page), &mut content);
            let crc = crc32fast::hash(content.as_slice());
            crcs.pop();
            crcs.push(U32::new(crc));
        }
        // SAFETY: the slot is held by this move alone, and no entry names it: nobody reads it.
        unsafe { space.medium.write_streaming(at, content.as_slice())? };
    }
    let mut header = PackedHeader {
        crc32: U32::ZERO,
        segment: U32::new(segment.0),
        first: U64::new(pages_at / PAGE_BYTES),
        stored: live.0.map(U64::new),
        key: U64::new(key.map_or(0, KeyId::get)),
        reserved: [0; 8],
    };
    header.crc32 = U32::new(packed_checksum(space.uuid, &header));
    // SAFETY: as above.
    unsafe {
        space.medium.write(header_at, header.as_bytes())?;
        space.medium.write(
            header_at + to_u64(size_of::<PackedHeader>()),
            crcs.as_bytes(),
        )?;
    }
    let len_bytes = u64::from(live.count()) * PAGE_BYTES;
    space.medium.flush_streamed(pages_at, len_bytes, flushed)?;
    Ok(true)
}

/// Writes the entries of moved segments: the first copies, durable, and then the second ones.
fn write_entries(
    space: &Space,
    moves: &[(SegmentNo, Position)],
    flushed: &mut Flushed,
) -> io::Result<()> {
    for copy in [0, 1] {
        for &(segment, _) in moves {
            space
                .table
                .write_copy(&space.medium, segment, copy, flushed)?;
        }
        space.fence(flushed)?;
    }
    Ok(())
}
