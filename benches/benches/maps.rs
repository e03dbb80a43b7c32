//! Maps over a long chain of deltas: bytes of nodes for what was changed, nodes that are hashed, the time that a dump
//! takes beside its pages, and the time to read everything, at depth 1, 100 and 1,000.
//!
//! A process of [`PAGES`] pages is dumped generation after generation; each changes so many pages, chosen at random,
//! and refers to its parent for the rest, as CRIU does with the kernel's dirty bits. The last two checkpoints are
//! kept, and the region is cleaned when it is half full. Each figure is of ten generations.
//!
//! `cargo bench -p permafrost-benches --bench maps [GENERATIONS]`

use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_benches::{Numbers, noise, region};
use permafrost_pmem::{
    CheckpointId, FormatOptions, MapRoot, PAGE_SIZE, Region, RunKind, StoredCheckpoint,
};

/// Pages of the process: 256 MiB.
const PAGES: u64 = 65_536;
const REGION_BYTES: u64 = 1 << 30;
/// Generations of which a figure is the mean.
const WINDOW: u64 = 10;

fn main() {
    let given = std::env::args().find_map(|argument| argument.parse().ok());
    let generations: u64 = given.unwrap_or(1_000);
    println!("{PAGES} pages, {generations} generations, the last two kept");
    println!("changed  depth  map/delta  nodes/page  page changed, us  read all, ms");
    for per_mille in [1, 10, 100] {
        chain(per_mille, generations);
    }
}

/// Sums over some generations.
#[derive(Default)]
struct Window {
    pages: u64,
    map_bytes: u64,
    nodes: u64,
    took: Duration,
}

fn chain(per_mille: u64, generations: u64) {
    let region = region(REGION_BYTES, &FormatOptions::default());
    let contents = noise(1024);
    let (contents, _) = contents.as_chunks::<PAGE_SIZE>();
    let mut numbers = Numbers::default();
    let mut parent: Option<Arc<StoredCheckpoint>> = None;
    let mut window = Window::default();
    for depth in 0..=generations {
        let mut changed: Vec<u64> = match &parent {
            None => (0..PAGES).collect(),
            Some(_) => (0..PAGES * per_mille / 1000)
                .map(|_| numbers.draw() % PAGES)
                .collect(),
        };
        changed.sort_unstable();
        changed.dedup();
        let began = Instant::now();
        let mut shadow = region.begin();
        let mut map = shadow.map();
        let mut cursor = parent
            .as_ref()
            .map(|last| last.map(&root_of(last)).cursor());
        let mut index = 0;
        for &next in changed.iter().chain([&PAGES]) {
            if let (Some(cursor), true) = (&mut cursor, index < next) {
                let added = shadow.reference(&mut map, index, next - index, cursor);
                added.expect("refer to the parent");
            }
            if next < PAGES {
                let content = &contents[usize::try_from(numbers.draw() % 1024).unwrap_or(0)];
                let added = shadow.append(&mut map, next, 0, content, None);
                added.expect("append");
            }
            index = next + 1;
        }
        let (root, stats) = shadow.finish(map).expect("finish the map");
        window.took += began.elapsed();
        window.pages += stats.stored;
        window.nodes += stats.nodes;
        window.map_bytes += shadow.added_bytes() - stats.stored * PAGE_SIZE as u64;
        drop(cursor);
        let id = CheckpointId::new(u128::from(depth) + 1);
        let sealed = shadow.seal(id, &root.to_bytes(), None).expect("seal");
        if let Some(last) = parent.replace(sealed)
            && depth > 1
        {
            region
                .delete(CheckpointId::new(last.id().value() - 1))
                .expect("delete");
        }
        let at = [0, 1, 100, 1_000].contains(&depth) || depth == generations;
        if let (true, Some(checkpoint)) = (at, &parent) {
            row(per_mille, depth, &window, checkpoint);
        }
        if at || depth % WINDOW == 0 {
            window = Window::default();
        }
        let usage = region.usage();
        if usage.free_bytes < usage.capacity_bytes / 2 {
            clean(&region);
        }
    }
}

fn row(per_mille: u64, depth: u64, window: &Window, checkpoint: &Arc<StoredCheckpoint>) {
    let pages = window.pages.max(1) as f64;
    let mut times: Vec<_> = (0..5).map(|_| read_all(checkpoint)).collect();
    times.sort_unstable();
    println!(
        "{:>5.1} %  {depth:>5}  {:>7.1} %  {:>10.2}  {:>16.2}  {:>12.1}",
        per_mille as f64 / 10.0,
        window.map_bytes as f64 * 100.0 / (pages * PAGE_SIZE as f64),
        window.nodes as f64 / pages,
        window.took.as_secs_f64() * 1e6 / pages,
        times[2].as_secs_f64() * 1e3,
    );
}

/// Reads all pages, verified.
fn read_all(checkpoint: &Arc<StoredCheckpoint>) -> Duration {
    let began = Instant::now();
    let map = checkpoint.map(&root_of(checkpoint));
    let mut pages = 0;
    for run in map.runs() {
        let run = run.expect("an intact map");
        assert!(matches!(run.kind, RunKind::Stored { .. }));
        pages += map.read(&run).expect("intact pages").len() as u64 / PAGE_SIZE as u64;
    }
    assert_eq!(pages, PAGES);
    began.elapsed()
}

fn clean(region: &Arc<Region>) {
    let mut survey = region.survey(&|checkpoint| Some(vec![root_of(checkpoint)]));
    region.clean(&mut survey, u64::MAX).expect("clean");
}

fn root_of(checkpoint: &Arc<StoredCheckpoint>) -> MapRoot {
    let manifest = checkpoint.manifest().expect("manifest");
    MapRoot::try_from(manifest.as_slice()).expect("map root")
}
