//! Finding pages and runs in a map, cheaply so in ascending order.

use std::ops::Range;

use super::node::{MapNode, NodeRef, is_zeros, span_pages};
use super::reader::PageExtent;
use super::{PageMap, RunKind, StoredRun};
use crate::error::{PageError, SegmentPlace};
use crate::ids::PageNo;

/// Place in a map. Owns its data: the path of nodes to a leaf, each a verified copy, and a reference to the
/// checkpoint, whose segments therefore stay. Ascending look-ups are O(1) amortised, others O(height).
pub struct MapCursor {
    map: PageMap,
    /// Nodes from the root down, each within a slot of the one before.
    path: Vec<(NodeRef, MapNode)>,
    /// Indices without a page around the one that was looked up last.
    gap: Range<u64>,
}

/// Result of a look-up in a map: a page, or a block of zeros.
pub(crate) struct Found {
    pub(crate) first_index: u64,
    pages: u64,
    pub(crate) flags: u16,
    /// Location and checksum of a stored page.
    pub(crate) stored: Option<(PageNo, u32)>,
}

impl Found {
    pub(crate) fn end_index(&self) -> u64 {
        self.first_index.saturating_add(self.pages)
    }
}

/// A page of a parent.
pub(crate) enum ParentPage {
    Zero,
    Stored {
        location: PageNo,
        place: SegmentPlace,
        crc: u32,
    },
}

/// Block of a parent that a map may share.
pub(crate) struct SharedBlock {
    pub(super) at: NodeRef,
    pub(super) node: MapNode,
    /// Flags of all of its pages.
    pub(crate) flags: u16,
}

impl SharedBlock {
    pub(crate) fn pages(&self) -> u64 {
        self.node.pages
    }
}

impl MapCursor {
    pub(super) fn new(map: PageMap) -> Self {
        Self {
            map,
            path: Vec::new(),
            gap: 0..0,
        }
    }

    /// Returns the map that the cursor reads.
    #[must_use]
    pub fn map(&self) -> &PageMap {
        &self.map
    }

    pub(super) fn path(&self) -> &[(NodeRef, MapNode)] {
        &self.path
    }

    /// Returns the pages from `index` on that are kept in one way, as many as follow each other; if there is no page at
    /// `index`, from the next one on.
    ///
    /// # Errors
    /// [`PageError`] if a node on the way is damaged.
    pub fn seek(&mut self, index: u64) -> Result<Option<StoredRun>, PageError> {
        let Some((first_index, found)) = self.next(index)? else {
            return Ok(None);
        };
        let (flags, mut crcs) = (found.flags, crc32fast::Hasher::new());
        let mut end = first_index;
        let mut next = Some((first_index, found));
        let location = next.as_ref().and_then(|(_, found)| found.stored);
        while let Some((at, found)) = next.take() {
            let follows = at == end && found.flags == flags;
            let skip = end - first_index;
            match (location, found.stored) {
                (None, None) if follows => {}
                (Some((first, _)), Some((here, crc))) if follows && here == first.plus(skip) => {
                    crcs.update(&crc.to_le_bytes());
                }
                _ => break,
            }
            // A run's pages are counted in 32 bits.
            let most = first_index.saturating_add(u64::from(u32::MAX));
            end = found.end_index().min(most);
            if end < most {
                // Damage further on is met when it is looked for.
                next = self.next(end).ok().flatten();
            }
        }
        let kind = match location {
            None => RunKind::Zero,
            Some((location, _)) => RunKind::Stored {
                location,
                crcs_crc32: crcs.finalize(),
            },
        };
        Ok(Some(StoredRun {
            first_index,
            pages: u32::try_from(end - first_index).unwrap_or(u32::MAX),
            flags,
            kind,
        }))
    }

    /// Returns the pages from `index` on that are kept in one way; `None` if there is none at `index`.
    ///
    /// # Errors
    /// The errors of [`seek`](Self::seek).
    pub fn lookup(&mut self, index: u64) -> Result<Option<StoredRun>, PageError> {
        Ok(self.seek(index)?.filter(|run| run.first_index == index))
    }

    /// Returns the page at `index` with its checksum.
    pub(crate) fn page(&mut self, index: u64) -> Result<Option<ParentPage>, PageError> {
        let Some(found) = self.find(index)? else {
            return Ok(None);
        };
        let Some((location, crc)) = found.stored else {
            return Ok(Some(ParentPage::Zero));
        };
        let place = self.place(location)?;
        Ok(Some(ParentPage::Stored {
            location,
            place,
            crc,
        }))
    }

    /// Returns the CRC32 of the stored page at `index`; `None` if there is none, or the map is damaged there.
    #[must_use]
    pub fn page_crc32(&mut self, index: u64) -> Option<u32> {
        let found = self.find(index).ok().flatten()?;
        found.stored.map(|(_, crc)| crc)
    }

    /// Returns the place of a page, in a segment that the checkpoint holds.
    pub(crate) fn place(&self, location: PageNo) -> Result<SegmentPlace, PageError> {
        self.map.place(location, 1)
    }

    /// Returns what there is at `index`.
    pub(crate) fn find(&mut self, index: u64) -> Result<Option<Found>, PageError> {
        if !self.enter(index)? {
            return Ok(None);
        }
        while let Some((_, node)) = self.path.last() {
            let slot = node.slot_of(index);
            let Some(entry) = node.entry(slot) else {
                break;
            };
            if !is_zeros(entry) && node.level > 0 {
                if !self.descend(index)? {
                    return Ok(None);
                }
                continue;
            }
            let stored =
                (!is_zeros(entry)).then(|| (PageNo(entry.location.get()), entry.crc32.get()));
            return Ok(Some(Found {
                first_index: node.slot_first(slot),
                pages: span_pages(node.level),
                flags: entry.detail.get(),
                stored,
            }));
        }
        if let Some((_, node)) = self.path.last() {
            let first = node.slot_first(node.slot_of(index));
            self.gap = first..first.saturating_add(span_pages(node.level));
        }
        Ok(None)
    }

    /// Returns the largest block that begins at `index`, ends by `end`, has all of its pages, all with the same flags
    /// (with `flags`, if given), and is a node. Reads nothing below it.
    pub(crate) fn block(
        &mut self,
        index: u64,
        end: u64,
        flags: Option<u16>,
    ) -> Result<Option<SharedBlock>, PageError> {
        let suitable = |(at, node): &(NodeRef, MapNode)| {
            let here = node.first_index == index && node.end_index() <= end && node.is_full();
            let common = node.flags.filter(|_| here)?;
            flags
                .is_none_or(|flags| flags == common)
                .then_some(SharedBlock {
                    at: *at,
                    node: *node,
                    flags: common,
                })
        };
        if index.saturating_add(span_pages(1)) > end
            || !index.is_multiple_of(span_pages(1))
            || !self.enter(index)?
        {
            return Ok(None);
        }
        loop {
            if let Some(block) = self.path.iter().find_map(suitable) {
                return Ok(Some(block));
            }
            let child = self.path.last().and_then(|(_, node)| {
                let entry = node.entry(node.slot_of(index))?;
                (node.level > 0 && !is_zeros(entry)).then_some(())
            });
            if child.is_none() || !self.descend(index)? {
                return Ok(None);
            }
        }
    }

    /// Returns the pages from `index` on, or from the next one on, that a block with all of its pages has, or that are
    /// kept in one way.
    pub(super) fn extent(&mut self, mut index: u64) -> Result<Option<PageExtent>, PageError> {
        loop {
            if let Some(block) = self.block(index, u64::MAX, None)? {
                return Ok(Some(PageExtent {
                    first_index: index,
                    pages: block.pages(),
                    flags: block.flags,
                }));
            }
            if let Some(found) = self.find(index)? {
                return Ok(Some(PageExtent {
                    first_index: index,
                    pages: found.end_index() - index,
                    flags: found.flags,
                }));
            }
            if self.gap.end == u64::MAX {
                return Ok(None);
            }
            index = self.gap.end;
        }
    }

    /// Returns what there is at `index` or next, with the index from which on it counts.
    fn next(&mut self, mut index: u64) -> Result<Option<(u64, Found)>, PageError> {
        loop {
            if let Some(found) = self.find(index)? {
                return Ok(Some((index, found)));
            }
            if self.gap.end == u64::MAX {
                return Ok(None);
            }
            index = self.gap.end;
        }
    }

    /// Makes the last node of the path one that covers `index`; returns false if there is none.
    fn enter(&mut self, index: u64) -> Result<bool, PageError> {
        if self.gap.contains(&index) {
            return Ok(false);
        }
        while self.path.len() > 1
            && self
                .path
                .last()
                .is_some_and(|(_, node)| !node.covers(index))
        {
            self.path.pop();
        }
        if self.path.is_empty() {
            self.path.extend(self.map.root_node()?);
        }
        self.gap = match self.path.last() {
            Some((_, node)) if node.covers(index) => return Ok(true),
            Some((_, node)) if index < node.first_index => 0..node.first_index,
            Some((_, node)) => node.end_index()..u64::MAX,
            None => 0..u64::MAX,
        };
        Ok(false)
    }

    /// Adds the child with `index` to the path; returns false if the child is all before or behind it.
    fn descend(&mut self, index: u64) -> Result<bool, PageError> {
        let Some((_, node)) = self.path.last() else {
            return Ok(false);
        };
        let slot = node.slot_of(index);
        let Some(entry) = node.entry(slot) else {
            return Ok(false);
        };
        let child = self.map.child(node, slot, entry)?;
        if child.covers(index) {
            self.path.push((NodeRef::of(entry), child));
            return Ok(true);
        }
        self.gap = if index < child.first_index {
            node.slot_first(slot)..child.first_index
        } else {
            child.end_index()..node.slot_first(slot).saturating_add(span_pages(node.level))
        };
        Ok(false)
    }
}
