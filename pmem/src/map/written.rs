//! Pages that a shadow has written, by object and index: forked processes share most of theirs, at the same addresses.

use std::sync::Arc;

use crate::checkpoint::StoredCheckpoint;
use crate::ids::PageNo;

/// Objects that another one is compared with.
const MAX_OBJECTS: usize = 8;
/// Bytes of DRAM that the pages of a shadow's objects are remembered in. Those of 64 GiB if pages follow each other,
/// and of 9 GiB if none does.
const MAX_BYTES: usize = 64 << 20;

/// Stored pages of one object, ascending.
#[derive(Default)]
pub(crate) struct WrittenPages {
    runs: Vec<Run>,
    /// CRC32s of all pages.
    crcs: Vec<u32>,
    /// Checkpoints that have some of the pages: they stay where they are while these references exist.
    parents: Vec<Arc<StoredCheckpoint>>,
    /// Run of the last look-up: nearly always the next one's, too.
    recent: usize,
}

/// Pages whose indices and locations follow each other.
struct Run {
    first_index: u64,
    location: PageNo,
    /// Place of the first page's checksum.
    crc: usize,
}

impl WrittenPages {
    /// Adds a page behind all others.
    pub(crate) fn push(&mut self, index: u64, location: PageNo, crc: u32) {
        let follows = self.runs.last().is_some_and(|last| {
            let pages = (self.crcs.len() - last.crc) as u64;
            last.first_index + pages == index && last.location.plus(pages) == location
        });
        if !follows {
            self.runs.push(Run {
                first_index: index,
                location,
                crc: self.crcs.len(),
            });
        }
        self.crcs.push(crc);
    }

    /// Keeps the pages of a checkpoint in their places.
    pub(crate) fn keep(&mut self, parent: &Arc<StoredCheckpoint>) {
        let id = parent.copy_id();
        if !self.parents.iter().any(|kept| kept.copy_id() == id) {
            self.parents.push(Arc::clone(parent));
        }
    }

    fn bytes(&self) -> usize {
        size_of_val(self.runs.as_slice()) + size_of_val(self.crcs.as_slice())
    }

    /// Returns the location and the checksum of the page at `index`. O(1) if look-ups ascend.
    fn find(&mut self, index: u64) -> Option<(PageNo, u32)> {
        let begins_by =
            |runs: &[Run], at: usize| runs.get(at).is_some_and(|run| run.first_index <= index);
        if begins_by(&self.runs, self.recent + 1) || !begins_by(&self.runs, self.recent) {
            let after = self.runs.partition_point(|run| run.first_index <= index);
            self.recent = after.saturating_sub(1);
        }
        let run = self.runs.get(self.recent)?;
        let end = self.runs.get(self.recent + 1);
        let end = end.map_or(self.crcs.len(), |next| next.crc);
        let skip = index.checked_sub(run.first_index)?;
        let crc = run.crc.checked_add(usize::try_from(skip).ok()?)?;
        let crc = self.crcs[..end].get(crc)?;
        Some((run.location.plus(skip), *crc))
    }
}

/// Written objects of a shadow.
#[derive(Default)]
pub(crate) struct WrittenObjects {
    objects: Vec<WrittenPages>,
    /// Object that had the last equal page.
    recent: usize,
    /// Checkpoints that have pages of objects which are not compared with any more: others may have found them there.
    parents: Vec<Arc<StoredCheckpoint>>,
}

impl WrittenObjects {
    /// Adds an object, if there is room for it. The first one stays, as the process that the others were forked from is
    /// dumped first; of the others the latest.
    pub(crate) fn add(&mut self, object: WrittenPages) {
        if self.objects.len() == MAX_OBJECTS {
            let gone = self.objects.remove(1);
            self.parents.extend(gone.parents);
        }
        let bytes: usize = self.objects.iter().map(WrittenPages::bytes).sum();
        if bytes + object.bytes() <= MAX_BYTES {
            self.objects.push(object);
        }
        self.recent = 0;
    }

    /// Returns the location of a page at `index` with this checksum.
    pub(crate) fn find(&mut self, index: u64, crc: u32) -> Option<PageNo> {
        let count = self.objects.len();
        let order = (self.recent..count).chain(0..self.recent.min(count));
        for object in order {
            if let Some((location, found)) = self.objects[object].find(index)
                && found == crc
            {
                self.recent = object;
                return Some(location);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crc(page: u64) -> u32 {
        u32::try_from(page).unwrap()
    }

    #[test]
    fn pages_are_found_by_index_in_any_order() {
        let mut pages = WrittenPages::default();
        let all = [
            (3, 100),
            (4, 101),
            (5, 200),
            (9, 201),
            (10, 202),
            (4096, 203),
        ];
        for (index, location) in all {
            pages.push(index, PageNo(location), crc(index));
        }
        assert_eq!(pages.runs.len(), 4);
        for (index, location) in all.into_iter().chain(all.into_iter().rev()) {
            assert_eq!(pages.find(index), Some((PageNo(location), crc(index))));
        }
        for absent in [0, 2, 6, 8, 11, 4095, 4097, u64::MAX] {
            assert_eq!(pages.find(absent), None, "{absent}");
        }
        assert_eq!(WrittenPages::default().find(0), None);
    }

    #[test]
    fn the_first_object_and_the_latest_are_compared_with() {
        let mut objects = WrittenObjects::default();
        for object in 0..20 {
            let mut pages = WrittenPages::default();
            pages.push(7, PageNo(object), crc(object));
            objects.add(pages);
        }
        let found = (0..20).filter(|&object| objects.find(7, crc(object)).is_some());
        assert_eq!(found.collect::<Vec<_>>(), [0, 13, 14, 15, 16, 17, 18, 19]);
        assert_eq!(objects.find(7, 15), Some(PageNo(15)));
        assert_eq!(objects.find(8, 15), None);
    }
}
