//! Finds pages that other jobs of a namespace have stored, so that a dump refers to them.
//!
//! Jobs that run the same program on the same data, a model server on many machines say, have most pages in common,
//! but at other addresses. Of the newest checkpoint of each job one page in [`ANCHORS`] is in an index in DRAM,
//! chosen by its checksum, so that equal pages are chosen everywhere. A page of a dump that equals one of them says
//! where to look for those that follow it: as far from there as they are from it. So a run of equal pages is found
//! from its first anchor on, without an index of all pages.
//!
//! The index only proposes. The region compares a page in full before it refers to it.

#![forbid(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use permafrost_pmem::{
    CheckpointId, CopyId, FindEqual, MapCursor, MapRoot, Region, RunKind, StoredCheckpoint,
};

/// One page in so many is in the index.
pub const ANCHORS: u32 = 64;
/// Most pages in the index of a namespace: those of 1 TiB, in about 150 MB of DRAM.
const MAX_ANCHORS: usize = 4 << 20;

/// Namespaces whose jobs share pages, and the indexes of their pages.
#[derive(Default)]
pub struct SharedPages {
    namespaces: Vec<String>,
    indexes: Mutex<HashMap<String, Arc<Mutex<Index>>>>,
}

/// Page that is in the index.
struct Anchor {
    map: u32,
    index: u64,
}

/// Newest checkpoint of a job.
struct Newest {
    id: CheckpointId,
    /// Numbers of its maps, once their pages are in the index.
    maps: Option<Vec<u32>>,
}

#[derive(Default)]
struct Index {
    jobs: HashMap<String, Newest>,
    /// Maps, in the copies of checkpoints that they were read in.
    maps: HashMap<u32, (CheckpointId, CopyId, MapRoot)>,
    next_map: u32,
    /// Anchors by checksum; the latest one with a checksum counts.
    anchors: HashMap<u32, Anchor>,
}

/// Function that opens a checkpoint and reads the map roots of its processes; `None` if it is not there.
pub type OpenCheckpoint<'a> =
    dyn Fn(CheckpointId) -> Option<(Arc<StoredCheckpoint>, Vec<MapRoot>)> + 'a;

impl SharedPages {
    /// Makes the indexes, empty, of these namespaces; `*` stands for all.
    #[must_use]
    pub fn new(namespaces: Vec<String>) -> Self {
        Self {
            namespaces,
            indexes: Mutex::default(),
        }
    }

    /// Returns true if no namespace shares pages.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.namespaces.is_empty()
    }

    /// Returns true if the jobs of a namespace share pages.
    #[must_use]
    pub fn covers(&self, namespace: &str) -> bool {
        let mut listed = self.namespaces.iter();
        listed.any(|listed| listed == "*" || listed == namespace)
    }

    fn index(&self, namespace: &str) -> Arc<Mutex<Index>> {
        let mut indexes = self.indexes.lock();
        Arc::clone(indexes.entry(namespace.to_owned()).or_default())
    }

    /// Notes the newest checkpoint of a job, whose namespace is covered. Reads nothing.
    pub fn note(&self, namespace: &str, job: &str, id: CheckpointId) {
        let index = self.index(namespace);
        let mut index = index.lock();
        match index.jobs.get_mut(job) {
            Some(newest) if newest.id == id => {}
            Some(newest) => {
                newest.id = id;
                let maps = newest.maps.take();
                index.forget(maps);
            }
            None => {
                let newest = Newest { id, maps: None };
                index.jobs.insert(job.to_owned(), newest);
            }
        }
    }

    /// Brings the index of a namespace up to date, until `deadline` at the latest: what is left is done the next time.
    /// Reads the maps of each job's newest checkpoint that is not in it, about 20 ns a page.
    pub fn refresh(
        &self,
        region: &Region,
        namespace: &str,
        open: &OpenCheckpoint<'_>,
        deadline: Instant,
    ) {
        let shared = self.index(namespace);
        let wanted: Vec<(String, CheckpointId)> = {
            let mut index = shared.lock();
            index.forget_gone(region);
            let missing = index
                .jobs
                .iter()
                .filter(|(_, newest)| newest.maps.is_none());
            missing
                .map(|(job, newest)| (job.clone(), newest.id))
                .collect()
        };
        for (job, id) in wanted {
            if Instant::now() >= deadline {
                break;
            }
            let Some((checkpoint, roots)) = open(id) else {
                shared.lock().jobs.remove(&job);
                continue;
            };
            let found: Vec<_> = roots
                .into_iter()
                .map(|root| (root, anchors(&checkpoint, &root)))
                .collect();
            shared.lock().add(&job, (id, checkpoint.copy_id()), found);
        }
    }

    /// Returns a finder for one dump of a namespace.
    #[must_use]
    pub fn finder(&self, region: &Arc<Region>, namespace: &str) -> PageFinder {
        PageFinder {
            region: Arc::clone(region),
            index: self.index(namespace),
            current: None,
        }
    }
}

impl Index {
    fn add(
        &mut self,
        job: &str,
        (id, copy): (CheckpointId, CopyId),
        found: Vec<(MapRoot, Vec<(u32, u64)>)>,
    ) {
        // A later one was noted meanwhile.
        let Some(newest) = self.jobs.get_mut(job).filter(|newest| newest.id == id) else {
            return;
        };
        let mut maps = Vec::new();
        for (root, anchors) in found {
            let map = self.next_map;
            self.next_map = self.next_map.wrapping_add(1);
            self.maps.insert(map, (id, copy, root));
            maps.push(map);
            for (crc32, index) in anchors {
                if self.anchors.len() >= MAX_ANCHORS {
                    break;
                }
                self.anchors.insert(crc32, Anchor { map, index });
            }
        }
        newest.maps = Some(maps);
    }

    fn forget(&mut self, maps: Option<Vec<u32>>) {
        let maps: HashSet<u32> = maps.into_iter().flatten().collect();
        if !maps.is_empty() {
            self.maps.retain(|map, _| !maps.contains(map));
            self.anchors.retain(|_, anchor| !maps.contains(&anchor.map));
        }
    }

    /// Forgets the jobs whose newest checkpoint was removed.
    fn forget_gone(&mut self, region: &Region) {
        let gone = self.jobs.extract_if(|_, newest| !region.lists(newest.id));
        let maps: Vec<u32> = gone
            .filter_map(|(_, newest)| newest.maps)
            .flatten()
            .collect();
        self.forget(Some(maps));
    }

    fn find(&self, crc32: u32) -> Option<(CheckpointId, CopyId, MapRoot, u64)> {
        let anchor = self.anchors.get(&crc32)?;
        let (id, copy, root) = self.maps.get(&anchor.map)?;
        Some((*id, *copy, *root, anchor.index))
    }
}

/// Returns the checksums and indices of a map's anchors. Damage ends it: what is behind is not found.
fn anchors(checkpoint: &Arc<StoredCheckpoint>, root: &MapRoot) -> Vec<(u32, u64)> {
    let map = checkpoint.map(root);
    let mut cursor = map.clone().cursor();
    let mut found = Vec::new();
    for run in map.runs().map_while(Result::ok) {
        if run.kind == RunKind::Zero {
            continue;
        }
        for index in run.first_index..run.end_index() {
            if let Some(crc32) = cursor.page_crc32(index).filter(|&crc32| is_anchor(crc32)) {
                found.push((crc32, index));
            }
        }
    }
    found
}

fn is_anchor(crc32: u32) -> bool {
    crc32.is_multiple_of(ANCHORS)
}

/// Looks for the pages of one dump.
pub struct PageFinder {
    region: Arc<Region>,
    index: Arc<Mutex<Index>>,
    /// Map that had the last equal page, and how much further on its pages are there.
    current: Option<(MapCursor, u64)>,
}

impl FindEqual for PageFinder {
    fn find(&mut self, index: u64, crc32: u32) -> Option<(&mut MapCursor, u64)> {
        let follows = self.current.as_mut().is_some_and(|(cursor, shift)| {
            cursor.page_crc32(index.wrapping_add(*shift)) == Some(crc32)
        });
        if !follows {
            if !is_anchor(crc32) {
                return None;
            }
            let (id, copy, root, theirs) = self.index.lock().find(crc32)?;
            // A copy that has taken another's place may hold the same segments, and not refer to the same pages.
            let checkpoint = self.region.checkpoint(id)?;
            if checkpoint.copy_id() != copy {
                return None;
            }
            let cursor = checkpoint.map(&root).cursor();
            self.current = Some((cursor, theirs.wrapping_sub(index)));
        }
        let (cursor, shift) = self.current.as_mut()?;
        Some((cursor, index.wrapping_add(*shift)))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use permafrost_pmem::{
        DataKey, FormatOptions, KeyId, MapStats, PAGE_SIZE, create_medium_in_memory, sim::mix,
    };

    use super::*;

    fn pages(numbers: impl Iterator<Item = u64>) -> Vec<u8> {
        let page = |number: u64| {
            let words = (0..PAGE_SIZE as u64 / 8).map(move |word| mix(number << 20 | word));
            words.flat_map(u64::to_le_bytes)
        };
        numbers.flat_map(page).collect()
    }

    struct Site {
        region: Arc<Region>,
        shared: SharedPages,
        /// Key that dumps are encrypted with.
        key: Option<KeyId>,
    }

    impl Site {
        fn new() -> Self {
            let medium = create_medium_in_memory(64 << 20).unwrap();
            Region::format(Arc::clone(&medium), &FormatOptions::default()).unwrap();
            Self {
                region: Region::open(medium).unwrap().0,
                shared: SharedPages::new(vec!["lab".to_owned()]),
                key: None,
            }
        }

        /// Encrypts from now on, with the key of this number.
        fn encrypt(&mut self, number: u8) -> KeyId {
            let id = KeyId::new(number.into()).unwrap();
            let cipher = DataKey::new([number; 32]).cipher(self.region.usage().uuid.as_bytes());
            self.region.keys().insert(id, cipher);
            self.key = Some(id);
            id
        }

        /// Dumps pages as a job's checkpoint; its manifest is the root of its map.
        fn dump(&self, job: &str, first_index: u64, pages: &[u8]) -> (CheckpointId, MapStats) {
            let open = |id| {
                let checkpoint = self.region.checkpoint(id)?;
                let root = MapRoot::try_from(&checkpoint.manifest().ok()?[..]).ok()?;
                Some((checkpoint, vec![root]))
            };
            let deadline = Instant::now() + Duration::from_secs(600);
            self.shared.refresh(&self.region, "lab", &open, deadline);
            let mut shadow = self.region.begin_encrypted(self.key).unwrap();
            shadow.look_in(Box::new(self.shared.finder(&self.region, "lab")));
            let mut map = shadow.map();
            shadow
                .append(&mut map, first_index, 0, pages, None)
                .unwrap();
            let (root, stats) = shadow.finish(map).unwrap();
            let id = CheckpointId::random();
            shadow.seal(id, &root.to_bytes(), None).unwrap();
            self.shared.note("lab", job, id);
            (id, stats)
        }

        fn content(&self, id: CheckpointId) -> Vec<u8> {
            let checkpoint = self.region.checkpoint(id).unwrap();
            let root = MapRoot::try_from(&checkpoint.manifest().unwrap()[..]).unwrap();
            let map = checkpoint.map(&root);
            let runs = map.runs().map(Result::unwrap);
            runs.flat_map(|run| map.read(&run).unwrap().to_vec())
                .collect()
        }
    }

    #[test]
    fn pages_at_other_addresses_are_stored_once() {
        let site = Site::new();
        let first = pages(0..2000);
        let (a, stats) = site.dump("lab/a", 0x1000, &first);
        assert_eq!((stats.stored, stats.shared), (2000, 0));

        // Elsewhere, in two parts, and with a page in ten modified.
        let changed = |number: u64| {
            if number % 10 == 3 {
                number << 32
            } else {
                number
            }
        };
        let second = pages((1000..2000).chain(0..1000).map(changed));
        let (b, stats) = site.dump("lab/b", 7, &second);
        assert_eq!(stats.stored + stats.shared, 2000);
        // A run is found from its first anchor on: about 64 pages are missed each time.
        assert!(stats.shared > 1300, "{stats:?}");
        assert!(site.content(b) == second);

        // What was referred to outlives the checkpoint that stored it, which is no longer found itself.
        site.region.delete(a).unwrap();
        assert!(site.content(b) == second);
        let (c, stats) = site.dump("lab/c", 0, &first);
        assert!(stats.shared > 1300, "of lab/b: {stats:?}");
        assert!(site.content(c) == first);
        let unlike = pages(9000..9500);
        let (_, stats) = site.dump("lab/d", 0, &unlike);
        assert_eq!(stats.shared, 0);
    }

    #[test]
    fn encrypted_pages_are_shared_and_stay_so_under_another_key() {
        let mut site = Site::new();
        let old = site.encrypt(1);
        let content = pages(0..2000);
        let (a, _) = site.dump("lab/a", 0x1000, &content);
        let (b, stats) = site.dump("lab/b", 7, &content);
        assert!(stats.shared > 1300, "{stats:?}");
        let new = site.encrypt(2);
        let roots = |checkpoint: &Arc<StoredCheckpoint>| {
            let root = MapRoot::try_from(&checkpoint.manifest().ok()?[..]).ok()?;
            Some(vec![root])
        };
        let survey = site.region.survey_keys(&roots, &[old]);
        let changed = site.region.change_keys(&survey, new, u64::MAX).unwrap();
        assert!(
            changed.segments > 0 && changed.left_segments == 0,
            "{changed:?}"
        );
        drop(survey);
        assert!(site.region.take_unused_key(old));
        assert!(site.content(a) == content && site.content(b) == content);
        let (c, stats) = site.dump("lab/c", 0, &content);
        assert!(stats.shared > 1300, "{stats:?}");
        assert!(site.content(c) == content);
    }

    #[test]
    fn only_the_newest_checkpoint_of_a_job_is_in_the_index() {
        let site = Site::new();
        let (old, new) = (pages(0..500), pages(1000..1500));
        site.dump("lab/a", 0, &old);
        site.dump("lab/a", 0, &new);
        assert_eq!(site.dump("lab/b", 100, &old).1.shared, 0);
        assert!(site.dump("lab/c", 100, &new).1.shared > 300);
        let index = site.shared.index("lab");
        let index = index.lock();
        assert!(index.maps.len() <= 3 && index.anchors.len() < 40);
    }

    #[test]
    fn namespaces_are_covered_by_name_or_all() {
        assert!(SharedPages::default().is_off());
        assert!(!SharedPages::default().covers("lab"));
        let lab = SharedPages::new(vec!["lab".to_owned()]);
        assert!(lab.covers("lab") && !lab.covers("laboratory"));
        assert!(SharedPages::new(vec!["*".to_owned()]).covers("lab"));
    }
}
