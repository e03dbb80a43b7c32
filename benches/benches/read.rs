//! `PageMap`: finding a checkpoint's pages and reading them, verified. A restore waits for this, and `permafrost
//! verify` does it with every page.
//!
//! `read` lends 64 MiB from the mapped medium, in runs of the given number of pages: the cost of one is a CRC32 of
//! its pages and, before, one of its checksums, so short runs show the cost of a run by itself. `lookup` finds one
//! page among 100,000 runs from the root down, each node verified; `ascending` visits all of those runs with a
//! cursor, which remembers the path: the difference is why comparing with a parent uses a cursor.

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use permafrost_benches::{Numbers, noise, region};
use permafrost_pmem::{CheckpointId, FormatOptions, PAGE_SIZE, PageMap};

/// Pages that `read` reads: 64 MiB, more than the last cache of a usual core complex.
const READ_PAGES: usize = (64 << 20) / PAGE_SIZE;
/// Room for them and their map.
const REGION_BYTES: u64 = 128 << 20;
/// Runs in the map of `lookup` and `ascending`: a fragmented address space.
const RUNS: u64 = 100_000;

fn main() {
    divan::main();
}

#[divan::bench(args = [1, 16, 128], sample_size = 1)]
fn read(bencher: Bencher<'_, '_>, run_pages: usize) {
    // A page that is missing after each run keeps it apart from the next.
    let pages = noise(READ_PAGES);
    let runs = pages.chunks(run_pages * PAGE_SIZE).zip(0_u64..);
    let map = map_of(runs.map(|(run, nr)| (nr * (run_pages as u64 + 1), run)));
    let runs: Vec<_> = map.runs().map(|run| run.expect("an intact map")).collect();
    bencher
        .counter(BytesCount::new(pages.len()))
        .bench_local(|| {
            for run in &runs {
                black_box(map.read(run).expect("intact pages"));
            }
        });
}

#[divan::bench(sample_size = 100)]
fn lookup(bencher: Bencher<'_, '_>) {
    let map = fragmented();
    let mut numbers = Numbers::default();
    bencher
        .counter(ItemsCount::new(1_u64))
        .with_inputs(|| numbers.draw() % RUNS * 2)
        .bench_local_values(|index| {
            let run = map.lookup(index).expect("an intact map");
            assert!(run.is_some());
            run
        });
}

#[divan::bench(sample_size = 1)]
fn ascending(bencher: Bencher<'_, '_>) {
    let map = fragmented();
    bencher
        .counter(ItemsCount::new(RUNS))
        .bench_local(|| assert_eq!(map.runs().flatten().count() as u64, RUNS));
}

/// Returns a map of every second page, each a run of its own. Zero pages: the content does not matter here.
fn fragmented() -> PageMap {
    let zero = [0; PAGE_SIZE];
    map_of((0..RUNS).map(|nr| (nr * 2, zero.as_slice())))
}

/// Returns a sealed map of pages, given with their first indices.
fn map_of<'a>(runs: impl Iterator<Item = (u64, &'a [u8])>) -> PageMap {
    let region = region(REGION_BYTES, &FormatOptions::default());
    let mut shadow = region.begin();
    let mut writer = shadow.map();
    for (first_index, pages) in runs {
        shadow
            .append(&mut writer, first_index, 0, pages, None)
            .expect("append");
    }
    let (root, _) = shadow.finish(writer).expect("finish the map");
    let sealed = shadow
        .seal(CheckpointId::new(1), &root.to_bytes(), None)
        .expect("seal");
    // It keeps the region's memory.
    sealed.map(&root)
}
