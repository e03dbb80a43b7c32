//! Finding runs in a map, cheaply so in ascending order.

use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::node::Node;
use super::{PageMap, RunKind, StoredRun};
use crate::error::{MapFault, PageError, SegmentPlace};
use crate::ids::PageNo;

/// Place in a map. Owns its data: the path of nodes to a leaf, each a verified copy, and a reference to the
/// checkpoint, whose segments therefore stay. Ascending look-ups are O(1) amortised, others O(height).
pub struct MapCursor {
    map: PageMap,
    /// Nodes from the root down; the last one is a leaf after a successful seek.
    path: Vec<Step>,
    /// Index after the map's last page, once the root is loaded.
    end_index: Option<u64>,
    checksums: Option<RunChecksums>,
}

struct Step {
    node: Node,
    /// Last entry visited.
    at: usize,
    /// Index from which, up to the node's end, look-ups lead to this node; may be less than its first index if the
    /// gap before it was looked up.
    from_index: u64,
}

/// The verified page checksums of one run.
struct RunChecksums {
    run: StoredRun,
    place: SegmentPlace,
    location: PageNo,
    crcs: Vec<U32>,
}

/// Stored pages of one run, with their checksums.
pub(crate) struct StoredPages<'a> {
    pub(crate) location: PageNo,
    pub(crate) place: SegmentPlace,
    pub(crate) crcs: &'a [U32],
}

/// A page of a parent.
pub(crate) enum ParentPage {
    Zero,
    Stored {
        location: PageNo,
        place: SegmentPlace,
        crc: U32,
    },
}

impl MapCursor {
    pub(super) fn new(map: PageMap) -> Self {
        Self {
            map,
            path: Vec::new(),
            end_index: None,
            checksums: None,
        }
    }

    /// Returns the map that the cursor reads.
    #[must_use]
    pub fn map(&self) -> &PageMap {
        &self.map
    }

    /// Returns the first run that ends after `index`: the one with the page, or if there is none the next.
    ///
    /// # Errors
    /// [`PageError`] if a node on the way is damaged.
    pub fn seek(&mut self, index: u64) -> Result<Option<StoredRun>, PageError> {
        if self.map.root().is_empty() || self.end_index.is_some_and(|end| index >= end) {
            return Ok(None);
        }
        while self
            .path
            .last()
            .is_some_and(|s| index < s.from_index || s.node.end_index <= index)
        {
            self.path.pop();
        }
        if self.path.is_empty() {
            let root = self.map.root().stored();
            let node = self
                .map
                .load(self.map.root().node(), root.crc32.get(), root.level.get())?;
            self.end_index = Some(node.end_index);
            if index >= node.end_index {
                return Ok(None);
            }
            self.enter(node, index);
        }
        loop {
            let Some(step) = self.path.last_mut() else {
                return Ok(None);
            };
            if step.node.level == 0 {
                let here = step.node.run(step.at)?;
                if !here.contains(index) {
                    step.at = step.node.run_after(index);
                }
                return step.node.run(step.at).map(Some);
            }
            // A gap ends in the next child: the last one ends with the node, which `index` is before.
            let mut child = step.node.child_for(index);
            let mut node = load_child(&self.map, &step.node, child)?;
            if node.end_index <= index {
                child += 1;
                if child >= step.node.entries {
                    return Err(self.malformed());
                }
                node = load_child(&self.map, &step.node, child)?;
                if node.end_index <= index {
                    return Err(self.malformed());
                }
            }
            step.at = child;
            self.enter(node, index);
        }
    }

    /// Returns the run with the page.
    ///
    /// # Errors
    /// The errors of [`seek`](Self::seek).
    pub fn lookup(&mut self, index: u64) -> Result<Option<StoredRun>, PageError> {
        Ok(self.seek(index)?.filter(|run| run.first_index <= index))
    }

    /// Returns the page at `index` with its checksum.
    pub(crate) fn page(&mut self, index: u64) -> Result<Option<ParentPage>, PageError> {
        if !self
            .checksums
            .as_ref()
            .is_some_and(|c| c.run.contains(index))
        {
            match self.lookup(index)? {
                None => return Ok(None),
                Some(StoredRun {
                    kind: RunKind::Zero,
                    ..
                }) => return Ok(Some(ParentPage::Zero)),
                Some(run) => self.load_checksums(run)?,
            }
        }
        Ok(self.checksums.as_ref().and_then(|c| {
            let skip = index.checked_sub(c.run.first_index)?;
            let crc = *c.crcs.get(permafrost_medium::convert::to_usize(skip))?;
            let page = c.place.page + u32::try_from(skip).ok()?;
            let place = SegmentPlace {
                segment: c.place.segment,
                page,
            };
            Some(ParentPage::Stored {
                location: c.location.plus(skip),
                place,
                crc,
            })
        }))
    }

    /// Returns the checksums of `pages` pages of `run` from `skip` on, with their place.
    pub(crate) fn checksums(
        &mut self,
        run: StoredRun,
        skip: u64,
        pages: u32,
    ) -> Result<Option<StoredPages<'_>>, PageError> {
        if self.checksums.as_ref().is_none_or(|c| c.run != run) {
            self.load_checksums(run)?;
        }
        Ok(self.checksums.as_ref().and_then(|c| {
            let from = permafrost_medium::convert::to_usize(skip);
            let crcs = c
                .crcs
                .get(from..from + permafrost_medium::convert::to_usize(u64::from(pages)))?;
            let page = c.place.page + u32::try_from(skip).ok()?;
            let place = SegmentPlace {
                segment: c.place.segment,
                page,
            };
            Some(StoredPages {
                location: c.location.plus(skip),
                place,
                crcs,
            })
        }))
    }

    fn load_checksums(&mut self, run: StoredRun) -> Result<(), PageError> {
        let mut crcs = self.checksums.take().map(|c| c.crcs).unwrap_or_default();
        crcs.clear();
        let RunKind::Stored {
            location,
            crcs_crc32,
        } = run.kind
        else {
            return Ok(());
        };
        let place = self.map.read_checksums(location, run.pages, &mut crcs)?;
        let found = crc32fast::hash(crcs.as_bytes());
        if found != crcs_crc32 {
            let fault = MapFault::PageChecksums {
                expected: crcs_crc32,
                found,
            };
            return Err(PageError::MapCorrupt { location, fault });
        }
        self.checksums = Some(RunChecksums {
            run,
            place,
            location,
            crcs,
        });
        Ok(())
    }

    fn enter(&mut self, node: Node, index: u64) {
        let from_index = node.first_index.min(index);
        self.path.push(Step {
            node,
            at: 0,
            from_index,
        });
    }

    fn malformed(&self) -> PageError {
        PageError::MapCorrupt {
            location: self.map.root().node(),
            fault: MapFault::Malformed,
        }
    }
}

fn load_child(map: &PageMap, node: &Node, i: usize) -> Result<Node, PageError> {
    let entry = node.child(i);
    map.load(PageNo(entry.node.get()), entry.crc32.get(), node.level - 1)
}
