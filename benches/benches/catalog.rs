//! The catalog with 10,000 checkpoints, 100 of each of 100 jobs: the index between a seal and its answer, and
//! behind `permafrost ls`.
//!
//! `put` adds a job's next checkpoint; `head` finds a job's newest, as every dump does;
//! `list` decodes all 10,000, as a start does that reconciles them with the region. The database is in a
//! temporary directory and writes behind, so `put` is not durable here, nor need it be: the region is what
//! counts.

use divan::Bencher;
use divan::counter::ItemsCount;
use permafrost_catalog::{Catalog, SledCatalog};
use permafrost_protocol::control::Checkpoint;
use tempfile::TempDir;

const JOBS: u64 = 100;
const GENERATIONS: u64 = 100;

fn main() {
    divan::main();
}

#[divan::bench(sample_size = 10)]
fn put(bencher: Bencher<'_, '_>) {
    let (_dir, catalog) = filled();
    let mut next = checkpoints(GENERATIONS + 1..u64::MAX);
    bencher
        .counter(ItemsCount::new(1_u64))
        .with_inputs(|| next.next().expect("numbers do not run out"))
        .bench_local_refs(|checkpoint| catalog.put(checkpoint).expect("put"));
}

#[divan::bench(sample_size = 10)]
fn head(bencher: Bencher<'_, '_>) {
    let (_dir, catalog) = filled();
    let mut jobs = (0..JOBS).cycle().map(job);
    bencher
        .counter(ItemsCount::new(1_u64))
        .with_inputs(|| jobs.next().expect("a cycle"))
        .bench_local_refs(|job| {
            let head = catalog.head(job).expect("head");
            assert!(head.as_ref().is_some_and(|c| c.generation == GENERATIONS));
            head
        });
}

#[divan::bench(sample_size = 1)]
fn list(bencher: Bencher<'_, '_>) {
    let (_dir, catalog) = filled();
    bencher
        .counter(ItemsCount::new(JOBS * GENERATIONS))
        .bench_local(|| {
            let all = catalog.list(None).expect("list");
            assert_eq!(all.len() as u64, JOBS * GENERATIONS);
            all
        });
}

/// Returns a catalog of all jobs, and its directory.
fn filled() -> (TempDir, SledCatalog) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("catalog");
    let (catalog, _) = SledCatalog::open_or_replace(&path).expect("open catalog");
    for checkpoint in checkpoints(1..GENERATIONS + 1) {
        catalog.put(&checkpoint).expect("put");
    }
    (dir, catalog)
}

/// Returns every job's checkpoints, generation by generation, with every field that a record has.
fn checkpoints(generations: std::ops::Range<u64>) -> impl Iterator<Item = Checkpoint> {
    generations.flat_map(|generation| {
        (0..JOBS).map(move |nr| Checkpoint {
            job: job(nr),
            generation,
            id: format!("{:032x}", generation * JOBS + nr),
            kind: "full".into(),
            created_unix_ms: 1_700_000_000_000 + generation,
            memory_bytes: 256 << 20,
            added_bytes: 16 << 20,
            processes: 3,
            session: format!("{:032x}", nr * GENERATIONS + generation),
            parent_generation: generation - 1,
            parent_bytes: 224 << 20,
            zero_bytes: 16 << 20,
            ..Checkpoint::default()
        })
    })
}

fn job(nr: u64) -> String {
    format!("team/batch-{nr:03}")
}
