//! Building a map while pages come in, out of new nodes and nodes of the parent's map.

use std::sync::Arc;

use zerocopy::FromZeros;

use super::cursor::SharedBlock;
use super::node::{
    Below, MapNode, NodeRef, block_of, is_zeros, page_entry, slot_of, span_pages, zeros_entry,
};
use super::pieces::{Kept, Piece, PieceLog};
use super::written::WrittenPages;
use super::{MAX_LEVEL, MapCursor, MapRoot};
use crate::checkpoint::StoredCheckpoint;
use crate::error::ShadowError;
use crate::ids::PageNo;
use crate::layout::digest;
use crate::layout::{NODE_SLOTS, SlotEntry};
use crate::segment::SegmentWriter;

/// Counts of the pages in a map, and the map's digest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapStats {
    /// Pages, however they are kept.
    pub pages: u64,
    /// Pages that this shadow stored.
    pub stored: u64,
    /// Pages that are all zero.
    pub zero: u64,
    /// Pages that equal the parent's (compared, or referred to by the caller), whether stored there or zero.
    pub parent: u64,
    /// Pages that equal another object's page at the same index, and are stored with that object.
    pub sibling: u64,
    /// Pages that equal another checkpoint's, and are stored there ([`Shadow::look_in`](crate::Shadow::look_in)).
    pub shared: u64,
    /// Stored pages that the parent may have as well: the parent is damaged there.
    pub parent_damaged: u64,
    /// Nodes whose block was hashed: those with a change below.
    pub nodes: u64,
    /// Digest of the map ([`PageMap::digest`](super::PageMap::digest)), once it is finished.
    pub digest: [u8; 32],
}

/// A page map being written; for the shadow that made it. Holds an open node a level, and the path of one leaf of the
/// parent: a few tens of kilobytes, whatever the number of pages.
pub struct MapWriter {
    /// Open nodes by level: each is before those of lower levels.
    open: Vec<OpenNode>,
    parent: Parent,
    next_index: u64,
    log: Option<PieceLog>,
    /// Stored pages so far, if those of other objects are compared with them.
    pub(crate) written: Option<WrittenPages>,
    pub(crate) stats: MapStats,
}

/// A node that may get more entries.
struct OpenNode {
    first_index: u64,
    slots: u8,
    entries: [SlotEntry; NODE_SLOTS],
    below: [Below; NODE_SLOTS],
}

/// Part of a map that is complete: an entry for a node above.
struct Part {
    first_index: u64,
    entry: SlotEntry,
    below: Below,
}

/// Nodes of the parent's map around the last page that was taken from it, by level: what is written equal to one of
/// them need not be written.
#[derive(Default)]
struct Parent {
    /// Keeps their segments.
    checkpoint: Option<Arc<StoredCheckpoint>>,
    nodes: Vec<Option<(NodeRef, MapNode)>>,
}

impl MapWriter {
    pub(crate) fn new() -> Self {
        Self {
            open: Vec::new(),
            parent: Parent::default(),
            next_index: 0,
            log: None,
            written: None,
            stats: MapStats::default(),
        }
    }

    /// Records from now on the storage of the pages that come in, for [`MapWriter::pieces`].
    pub fn watch(&mut self) {
        self.log.get_or_insert_default();
    }

    /// Returns the storage of the pages since the last call, ascending: after one call of
    /// [`Shadow::append`](crate::Shadow::append) they are exactly its pages. Nothing unless [`MapWriter::watch`] was
    /// called.
    pub fn pieces(&mut self) -> impl Iterator<Item = Piece> + '_ {
        self.log.iter_mut().flat_map(PieceLog::drain)
    }

    /// Stores pages that equal another object's at the same index once: for the processes of one dump, which have been
    /// forked from each other. Only among the objects of a shadow that this was called for. 4 bytes of DRAM a page.
    pub fn share_with_siblings(&mut self) {
        self.written.get_or_insert_default();
    }

    pub(crate) fn note(&mut self, first_index: u64, pages: u64, flags: u16, kept: Kept) {
        if let Some(log) = &mut self.log {
            log.push(Piece {
                first_index,
                pages,
                flags,
                kept,
            });
        }
    }

    /// Checks that `pages` pages may come at `index`.
    pub(crate) fn admit(&self, index: u64, pages: u64) -> Result<(), ShadowError> {
        if index < self.next_index {
            return Err(ShadowError::NotAscending {
                index,
                expected: self.next_index,
            });
        }
        match index.checked_add(pages) {
            // The end is an index, too.
            Some(_) => Ok(()),
            None => Err(ShadowError::TooManyPages { index, pages }),
        }
    }

    /// A page at `location`.
    pub(crate) fn push_stored(
        &mut self,
        out: &mut SegmentWriter,
        index: u64,
        flags: u16,
        location: PageNo,
        crc: u32,
    ) -> Result<(), ShadowError> {
        self.count(index, 1);
        if let Some(written) = &mut self.written {
            written.push(index, location, crc);
        }
        let part = Part::of_pages(index, page_entry(location, flags, crc));
        self.insert(out, 0, &part)
    }

    /// Pages of zeros.
    pub(crate) fn push_zero(
        &mut self,
        out: &mut SegmentWriter,
        mut index: u64,
        flags: u16,
        mut pages: u64,
    ) -> Result<(), ShadowError> {
        if pages > 0 {
            self.count(index, pages);
        }
        while pages > 0 {
            // The largest block that begins here.
            let span = (0..=MAX_LEVEL)
                .rev()
                .find(|&span| span_pages(span) <= pages && index.is_multiple_of(span_pages(span)));
            let span = span.unwrap_or(0);
            let part = Part::of_pages(index, zeros_entry(flags));
            self.place(out, span, &part)?;
            index += span_pages(span);
            pages -= span_pages(span);
        }
        Ok(())
    }

    /// A block of the parent's, with all of its pages.
    pub(crate) fn push_block(
        &mut self,
        out: &mut SegmentWriter,
        block: &SharedBlock,
    ) -> Result<(), ShadowError> {
        let node = &block.node;
        self.count(node.first_index, node.pages);
        self.place(out, node.level + 1, &Part::of_node(block.at, node))
    }

    /// Keeps the pages of a checkpoint in their places as long as other objects are compared with this one's.
    pub(crate) fn keep(&mut self, checkpoint: &Arc<StoredCheckpoint>) {
        if let Some(written) = &mut self.written {
            written.keep(checkpoint);
        }
    }

    /// Notes the nodes of the parent around the page that is about to come.
    pub(crate) fn beside(&mut self, parent: &MapCursor) {
        let theirs = parent.map().checkpoint();
        let ours = self.parent.checkpoint.as_ref();
        if !ours.is_some_and(|ours| Arc::ptr_eq(ours, theirs)) {
            self.parent.nodes.clear();
            self.parent.checkpoint = Some(Arc::clone(theirs));
            self.keep(theirs);
        }
        let nodes = &mut self.parent.nodes;
        // A leaf that was noted has its path noted, too.
        for (at, node) in parent.path().iter().rev() {
            let level = usize::from(node.level);
            if nodes.len() <= level {
                nodes.resize(level + 1, None);
            }
            let noted = &mut nodes[level];
            if noted.is_some_and(|(noted, _)| noted == *at) {
                break;
            }
            *noted = Some((*at, *node));
        }
    }

    fn count(&mut self, index: u64, pages: u64) {
        self.next_index = index + pages;
        self.stats.pages += pages;
    }

    /// Puts a part of `8^span` pages, or a node of the level below `span`, into the node above.
    fn place(&mut self, out: &mut SegmentWriter, span: u8, part: &Part) -> Result<(), ShadowError> {
        for level in 0..span {
            if self.is_open(level) {
                self.close(out, level)?;
            }
        }
        self.insert(out, span, part)
    }

    fn is_open(&self, level: u8) -> bool {
        let open = self.open.get(usize::from(level));
        open.is_some_and(|open| open.slots != 0)
    }

    fn insert(
        &mut self,
        out: &mut SegmentWriter,
        level: u8,
        part: &Part,
    ) -> Result<(), ShadowError> {
        let first_index = block_of(part.first_index, level + 1);
        while self.open.len() <= usize::from(level) {
            self.open.push(OpenNode::new());
        }
        let open = &self.open[usize::from(level)];
        if open.slots == 0 || open.first_index != first_index {
            self.close_before(out, level, part.first_index)?;
        }
        let open = &mut self.open[usize::from(level)];
        let slot = slot_of(part.first_index, level);
        open.first_index = first_index;
        open.slots |= 1 << slot;
        open.entries[slot] = part.entry;
        if level > 0 {
            open.below[slot] = part.below;
        }
        Ok(())
    }

    /// Ends the nodes from `level` on that end before `index`: the parent's equal ones are noted until its next page.
    fn close_before(
        &mut self,
        out: &mut SegmentWriter,
        level: u8,
        index: u64,
    ) -> Result<(), ShadowError> {
        for level in level..=MAX_LEVEL {
            let Some(open) = self.open.get(usize::from(level)) else {
                break;
            };
            if open.slots == 0 {
                continue;
            }
            if open.first_index == block_of(index, level + 1) {
                break;
            }
            self.close(out, level)?;
        }
        Ok(())
    }

    /// Ends a level's node, and puts it into the one above.
    fn close(&mut self, out: &mut SegmentWriter, level: u8) -> Result<(), ShadowError> {
        let part = self.end_node(out, level)?;
        self.insert(out, level + 1, &part)
    }

    /// Ends a level's node. One with a single child is that child, one full of zeros is zeros: so neither is stored,
    /// and a sparse map has no more than two nodes for each leaf.
    fn end_node(&mut self, out: &mut SegmentWriter, level: u8) -> Result<Part, ShadowError> {
        let open = &mut self.open[usize::from(level)];
        let slots = std::mem::take(&mut open.slots);
        let first = slots.trailing_zeros() as usize % NODE_SLOTS;
        let (entry, below) = (open.entries[first], open.below[first]);
        if level > 0 && slots.is_power_of_two() && !is_zeros(&entry) {
            return Ok(Part {
                first_index: below.first_index,
                entry,
                below,
            });
        }
        if slots == u8::MAX && is_zeros(&entry) && open.entries.iter().all(|e| *e == entry) {
            return Ok(Part::of_pages(open.first_index, entry));
        }
        let node = if level == 0 {
            MapNode::leaf(open.first_index, slots, &open.entries)
        } else {
            MapNode::inner(level, open.first_index, slots, &open.entries, &open.below)
        };
        self.stats.nodes += 1;
        let at = match self.parent.equal(&node) {
            Some(at) => {
                let place = out.space().geometry.place(at.location, 1);
                let place = place.map_err(|_| crate::error::outside(at.location))?;
                out.holdings().share(place.segment);
                at
            }
            None => {
                let (bytes, len) = node.to_bytes();
                let (location, offset) = out.append_node(&bytes[..len])?;
                let crc32 = crc32fast::hash(&bytes[..len]);
                NodeRef {
                    location,
                    offset,
                    crc32,
                }
            }
        };
        Ok(Part::of_node(at, &node))
    }

    /// Writes the remaining nodes, leaves first.
    pub(crate) fn finish(
        mut self,
        out: &mut SegmentWriter,
    ) -> Result<(MapRoot, MapStats), ShadowError> {
        self.stats.digest = digest::of_nothing();
        let mut level = 0;
        while usize::from(level) < self.open.len() {
            if self.is_open(level) {
                let part = self.end_node(out, level)?;
                let above = level + 1..=MAX_LEVEL + 1;
                // Zeros are no node: there is one above them.
                if !is_zeros(&part.entry) && !above.into_iter().any(|level| self.is_open(level)) {
                    self.stats.digest = part.below.digest();
                    let root =
                        MapRoot::new(NodeRef::of(&part.entry), part.below.level, &self.stats);
                    return Ok((root, self.stats));
                }
                self.insert(out, level + 1, &part)?;
            }
            level += 1;
        }
        Ok((MapRoot::EMPTY, self.stats))
    }
}

impl OpenNode {
    fn new() -> Self {
        Self {
            first_index: 0,
            slots: 0,
            entries: [SlotEntry::new_zeroed(); NODE_SLOTS],
            below: [Below::NOTHING; NODE_SLOTS],
        }
    }
}

impl Part {
    fn of_pages(first_index: u64, entry: SlotEntry) -> Self {
        Self {
            first_index,
            entry,
            below: Below::NOTHING,
        }
    }

    fn of_node(at: NodeRef, node: &MapNode) -> Self {
        Self {
            first_index: node.first_index,
            entry: at.entry(),
            below: node.below(),
        }
    }
}

impl Parent {
    /// Returns the parent's node that equals `node`.
    fn equal(&self, node: &MapNode) -> Option<NodeRef> {
        let (at, theirs) = self.nodes.get(usize::from(node.level))?.as_ref()?;
        theirs.equals(node).then_some(*at)
    }
}
