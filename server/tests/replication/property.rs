//! Any sequence of dumps gives the same pages on every node.

use std::collections::BTreeMap;

use permafrost_clustered::Durability;
use permafrost_criu::frontend::PageSink as _;
use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::manifest::SpaceType;
use permafrost_protocol::pageserver::{PE_PRESENT, SpaceId};

use super::fakes::{Pages, Whole, World, images, page, request};

/// Number of random sequences that are tried.
const RUNS: u64 = 12;

/// The SplitMix64 random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

fn space(n: u64) -> SpaceId {
    match n {
        // A shared memory's id is new in every dump.
        100.. => SpaceId {
            space_type: SpaceType::SharedMemory,
            id: n,
        },
        pid => SpaceId::process(u32::try_from(pid).unwrap()),
    }
}

#[test]
fn random_dumps_are_byte_equal_on_all_nodes() {
    let base = std::process::id().into();
    for seed in (base..).take(usize::try_from(RUNS).unwrap()) {
        println!("seed {seed}");
        sequence(seed);
    }
}

fn sequence(seed: u64) {
    let mut random = Random(seed);
    let mut world = World::new(2, Durability::All);
    let mut memory: BTreeMap<u64, Pages> = BTreeMap::new();
    for round in 1..=5_u64 {
        if random.below(4) == 0 {
            world.replace(usize::try_from(random.below(2)).unwrap());
        }
        let before = memory.clone();
        let shared = memory.iter().find(|(id, _)| **id >= 100).map(|(id, _)| *id);
        let moved = shared.and_then(|id| memory.remove(&id));
        memory.insert(100 + round, moved.unwrap_or_default());
        for pid in 1..=1 + random.below(3) {
            memory.entry(pid).or_default();
        }
        for pages in memory.values_mut() {
            for _ in 0..random.below(150) {
                let (index, salt) = (random.below(400), random.below(1000));
                match random.below(8) {
                    0 => drop(pages.remove(&index)),
                    1 => drop(pages.insert(index, page(0))),
                    _ => drop(pages.insert(index, page(salt))),
                }
            }
        }
        let store = &world.origin.store;
        let session = store.open_session(request("job", true)).unwrap();
        let mut sink = session.start(store.local(), Box::new(|| {})).unwrap();
        for (id, pages) in &memory {
            let has_parent = sink.open(space(*id)).unwrap();
            assert_eq!(has_parent, before.contains_key(id), "seed {seed}");
            for (index, page) in pages {
                let vaddr = index * PAGE_SIZE as u64;
                let clean = before.get(id).and_then(|old| old.get(index)) == Some(page);
                if has_parent && clean && random.below(2) == 0 {
                    sink.hole(vaddr, 1).unwrap();
                } else {
                    let lazy = u16::try_from(random.below(2) * 2).unwrap();
                    sink.pages(vaddr, PE_PRESENT | lazy, page).unwrap();
                }
            }
        }
        sink.close().unwrap();
        let pids: Vec<u32> = memory
            .keys()
            .filter(|id| **id < 100)
            .map(|id| u32::try_from(*id).unwrap())
            .collect();
        let sealed = store.seal_session(&session.id, images(&pids)).unwrap();
        let own = Whole::of(store, &sealed.id);
        assert_eq!(&own.pages(), memory.values().next().unwrap(), "seed {seed}");
        for replica in &world.replicas {
            assert_eq!(Whole::of(&replica.store, &sealed.id), own, "seed {seed}");
        }
    }
}
