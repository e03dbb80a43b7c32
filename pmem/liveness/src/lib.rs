//! Counts of what is in use of a region, in memory: no I/O here. [`slots`] counts what is in each slot, [`Liveness`]
//! what refers to each page, from one survey to the next.
//!
//! Checkpoints never change, and maps share nodes. So each map node of a higher level is remembered with the pages that
//! lie below it and in no other remembered node, and with the number of nodes and checkpoints that refer to it. A new
//! checkpoint costs its nodes that no other has; a removed one gives back those that no other refers to.
//!
//! Memory: 2 bytes for each page of the segments in use; for each remembered node some 100 bytes, and 16 for each
//! run of its pages; for each checkpoint some 100 bytes, and 16 for each run of pages that no remembered node has.

#![forbid(unsafe_code)]

pub mod slots;
mod usage;
mod worth;

pub use usage::{MediumUsage, RegionUsage};
pub use worth::has_grown;

use std::collections::HashMap;

use permafrost_layout::StoredPages;
use permafrost_layout::ids::{PageNo, SegmentNo};
use permafrost_medium::convert::to_usize;

/// Place of a map node: its page, and its byte offset there.
pub type NodeKey = (PageNo, u16);

/// Nodes and pages below a node, or of a checkpoint.
#[derive(Debug, Default)]
pub struct Found {
    nodes: Vec<NodeKey>,
    pages: Vec<u64>,
    /// Those of the pages that have nodes, or the like.
    node_pages: Vec<u64>,
}

impl Found {
    /// Adds a page.
    pub fn add_page(&mut self, page: PageNo) {
        if self.pages.last() != Some(&page.0) {
            self.pages.push(page.0);
        }
    }

    /// Adds a page of nodes, of a root or of a manifest.
    pub fn add_node_page(&mut self, page: PageNo) {
        self.add_page(page);
        if self.node_pages.last() != Some(&page.0) {
            self.node_pages.push(page.0);
        }
    }

    /// Adds a remembered node, of which the caller has taken a use.
    pub fn add_node(&mut self, node: NodeKey) {
        self.nodes.push(node);
    }

    fn remember(mut self) -> Remembered {
        self.pages.sort_unstable();
        self.pages.dedup();
        let mut runs: Vec<(u64, u32)> = Vec::new();
        for page in self.pages {
            match runs.last_mut() {
                Some((first, pages)) if *first + u64::from(*pages) == page => *pages += 1,
                _ => runs.push((page, 1)),
            }
        }
        Remembered {
            nodes: self.nodes.into_boxed_slice(),
            runs: runs.into_boxed_slice(),
        }
    }
}

/// Nodes and runs of pages of a [`Found`].
#[derive(Debug)]
struct Remembered {
    nodes: Box<[NodeKey]>,
    /// First page, and number of pages.
    runs: Box<[(u64, u32)]>,
}

/// Number of references to each page of a segment.
#[derive(Debug)]
struct SegmentPages {
    counts: Box<[u16]>,
    live: StoredPages,
    /// Those of the live pages that have nodes, or the like: what a page has does not change while it is live.
    nodes: StoredPages,
}

/// Remembered checkpoints, nodes and pages.
#[derive(Debug)]
pub struct Liveness {
    /// Number of page 0 of segment 0.
    first_page: u64,
    segment_pages: u64,
    segments: HashMap<SegmentNo, SegmentPages>,
    /// Nodes with the number of their uses.
    nodes: HashMap<NodeKey, (u32, Remembered)>,
    checkpoints: HashMap<u64, Remembered>,
}

impl Liveness {
    /// Makes one for a region whose segments begin at a page number, and have so many pages.
    #[must_use]
    pub fn new(first_page: u64, segment_pages: u32) -> Self {
        Self {
            first_page,
            segment_pages: u64::from(segment_pages.max(1)),
            segments: HashMap::new(),
            nodes: HashMap::new(),
            checkpoints: HashMap::new(),
        }
    }

    /// Returns true if a checkpoint is remembered.
    #[must_use]
    pub fn has(&self, checkpoint: u64) -> bool {
        self.checkpoints.contains_key(&checkpoint)
    }

    /// Takes one more use of a node, if it is remembered. Returns false if it is not.
    pub fn share(&mut self, node: NodeKey) -> bool {
        let Some((uses, _)) = self.nodes.get_mut(&node) else {
            return false;
        };
        *uses += 1;
        true
    }

    /// Remembers a node, with one use.
    pub fn add_node(&mut self, node: NodeKey, found: Found) {
        let remembered = self.remember(found);
        self.nodes.insert(node, (1, remembered));
    }

    /// Remembers a checkpoint.
    pub fn add_checkpoint(&mut self, checkpoint: u64, found: Found) {
        let remembered = self.remember(found);
        self.checkpoints.insert(checkpoint, remembered);
    }

    /// Gives back the uses of nodes that were taken for something that is not remembered after all.
    pub fn give_back(&mut self, found: Found) {
        self.give_back_nodes(&found.nodes);
    }

    /// Forgets the checkpoints for which `keep` returns false. To be called before others are added: what they have may
    /// be where these were.
    pub fn retain(&mut self, keep: impl Fn(u64) -> bool) {
        let gone = self
            .checkpoints
            .extract_if(|&checkpoint, _| !keep(checkpoint));
        for (_, gone) in gone.collect::<Vec<_>>() {
            self.count(&gone.runs, -1);
            self.give_back_nodes(&gone.nodes);
        }
    }

    /// Returns the live pages of a segment.
    #[must_use]
    pub fn live(&self, segment: SegmentNo) -> StoredPages {
        let pages = self.segments.get(&segment);
        pages.map_or_else(StoredPages::default, |pages| pages.live)
    }

    /// Returns the live pages of a segment that have nodes, roots or manifests.
    #[must_use]
    pub fn nodes(&self, segment: SegmentNo) -> StoredPages {
        let pages = self.segments.get(&segment);
        pages.map_or_else(StoredPages::default, |pages| pages.nodes)
    }

    fn remember(&mut self, mut found: Found) -> Remembered {
        let node_pages = std::mem::take(&mut found.node_pages);
        let remembered = found.remember();
        self.count(&remembered.runs, 1);
        for page in node_pages {
            let (segment, place) = self.place(page);
            if let Some(counted) = self.segments.get_mut(&segment) {
                counted.nodes.insert(place, 1);
            }
        }
        remembered
    }

    fn place(&self, page: u64) -> (SegmentNo, u32) {
        let at = page.saturating_sub(self.first_page);
        let segment = SegmentNo(u32::try_from(at / self.segment_pages).unwrap_or(u32::MAX));
        (segment, u32::try_from(at % self.segment_pages).unwrap_or(0))
    }

    fn give_back_nodes(&mut self, nodes: &[NodeKey]) {
        let mut unused = nodes.to_vec();
        while let Some(node) = unused.pop() {
            let Some((uses, _)) = self.nodes.get_mut(&node) else {
                continue;
            };
            *uses -= 1;
            if *uses == 0
                && let Some((_, gone)) = self.nodes.remove(&node)
            {
                self.count(&gone.runs, -1);
                unused.extend(&gone.nodes);
            }
        }
    }

    /// Counts references to pages, or takes them back. A count that reached its end stays there: its page is taken to
    /// be live for as long as its segment is in use.
    fn count(&mut self, runs: &[(u64, u32)], change: i8) {
        for &(first, pages) in runs {
            for page in first..first + u64::from(pages) {
                self.count_page(page, change);
            }
        }
    }

    fn count_page(&mut self, page: u64, change: i8) {
        let (segment, place) = self.place(page);
        let counted = self
            .segments
            .entry(segment)
            .or_insert_with(|| SegmentPages {
                counts: vec![0; to_usize(self.segment_pages)].into(),
                live: StoredPages::default(),
                nodes: StoredPages::default(),
            });
        let count = &mut counted.counts[to_usize(u64::from(place))];
        if *count == u16::MAX {
            return;
        }
        *count = if change > 0 {
            *count + 1
        } else {
            count.saturating_sub(1)
        };
        match (*count, change > 0) {
            (1, true) => counted.live.insert(place, 1),
            (0, false) => {
                counted.live.remove(place);
                counted.nodes.remove(place);
                if counted.live.count() == 0 {
                    self.segments.remove(&segment);
                }
            }
            _ => {}
        }
    }

    /// Forgets the counts of segments for which `in_use` returns false, as those that reached their end never fall.
    pub fn retain_segments(&mut self, in_use: impl Fn(SegmentNo) -> bool) {
        self.segments.retain(|&segment, _| in_use(segment));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(nodes: &[NodeKey], pages: &[u64]) -> Found {
        let mut found = Found::default();
        nodes.iter().for_each(|&node| found.add_node(node));
        pages.iter().for_each(|&page| found.add_page(PageNo(page)));
        found
    }

    fn live(of: &Liveness) -> Vec<u32> {
        of.live(SegmentNo(1)).iter().collect()
    }

    #[test]
    fn a_page_is_live_while_something_refers_to_it() {
        let mut all = Liveness::new(100, 16);
        let (leaf, other, top) = ((PageNo(117), 0), (PageNo(117), 164), (PageNo(117), 328));
        all.add_node(leaf, found(&[], &[118, 119, 120, 117]));
        all.add_node(top, found(&[leaf], &[117]));
        let mut first = found(&[top], &[130]);
        first.add_node_page(PageNo(131));
        all.add_checkpoint(1, first);
        assert_eq!(all.nodes(SegmentNo(1)).iter().collect::<Vec<_>>(), [15]);
        // The second shares a leaf, and has a page of its own.
        assert!(all.share(leaf) && !all.share(other));
        all.add_node(other, found(&[leaf], &[117, 121, 119]));
        all.add_checkpoint(2, found(&[other], &[]));
        assert!(all.has(1) && all.has(2) && !all.has(3));
        assert_eq!(live(&all), [1, 2, 3, 4, 5, 14, 15]);
        // One that is given up in the middle leaves nothing.
        assert!(all.share(top));
        all.give_back(found(&[top], &[122]));
        all.retain(|checkpoint| checkpoint != 1);
        assert_eq!(live(&all), [1, 2, 3, 4, 5]);
        assert!(!all.share(top));
        all.retain(|_| false);
        assert_eq!(live(&all), [] as [u32; 0]);
        assert!(all.nodes.is_empty() && all.segments.is_empty());
    }

    #[test]
    fn a_count_at_its_end_stays_until_its_segment_is_free() {
        let mut all = Liveness::new(0, 16);
        for checkpoint in 0..70_000 {
            all.add_checkpoint(checkpoint, found(&[], &[20]));
        }
        all.retain(|_| false);
        assert_eq!(live(&all), [4]);
        all.retain_segments(|_| false);
        assert_eq!(live(&all), [] as [u32; 0]);
    }
}
