//! Many sessions, readers and deletions at once.

#![allow(missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use permafrost_pmem::sim::mix;
use permafrost_pmem::{
    CheckpointId, FormatOptions, MapRoot, PAGE_SIZE, Region, RunKind, ShadowError,
    StoredCheckpoint, create_medium_in_memory,
};

fn region(bytes: u64, segment_bytes: u32) -> Arc<Region> {
    let medium = create_medium_in_memory(bytes).unwrap();
    let options = FormatOptions {
        segment_bytes,
        journal_records: None,
        uuid: None,
    };
    Region::format(Arc::clone(&medium), &options).unwrap();
    Region::open(medium).unwrap().0
}

fn pages(id: u64, count: u64) -> Vec<u8> {
    (0..count * PAGE_SIZE as u64 / 8)
        .flat_map(|i| mix(id << 40 ^ i).to_le_bytes())
        .collect()
}

/// Seals `count` pages that follow from `id`; the manifest is their map root.
fn dump(region: &Arc<Region>, id: u64, count: u64) -> Result<Arc<StoredCheckpoint>, ShadowError> {
    let mut shadow = region.begin();
    let mut map = shadow.map();
    for (chunk, index) in pages(id, count).chunks(8 * PAGE_SIZE).zip((0..).step_by(8)) {
        shadow.append(&mut map, index, 0, chunk, None)?;
    }
    let (root, _) = shadow.finish(map)?;
    match shadow.seal(CheckpointId::new(id.into()), &root.to_bytes(), None) {
        Ok(sealed) => Ok(sealed),
        Err(permafrost_pmem::SealError::Shadow(error)) => Err(error),
        Err(error) => panic!("seal: {error}"),
    }
}

fn check(checkpoint: &Arc<StoredCheckpoint>) {
    let manifest = checkpoint.manifest().unwrap();
    let map = checkpoint.map(&MapRoot::try_from(manifest.as_slice()).unwrap());
    let expected = pages(
        u64::try_from(checkpoint.id().value()).unwrap(),
        map.root().pages(),
    );
    let mut at = 0;
    for run in map.runs() {
        let run = run.unwrap();
        assert!(matches!(run.kind, RunKind::Stored { .. }));
        let bytes = map.read(&run).unwrap();
        assert!(bytes == &expected[at..at + bytes.len()]);
        at += bytes.len();
    }
    assert_eq!(at, expected.len());
}

#[test]
fn sessions_readers_and_deletions_at_once() {
    let region = region(8 << 20, 64 << 10);
    let next = AtomicU64::new(1);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut read = 0_u64;
                    while !done.load(Ordering::Relaxed) {
                        for checkpoint in region.checkpoints() {
                            check(&checkpoint);
                            read += 1;
                        }
                    }
                    read
                })
            })
            .collect();
        let writers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..60 {
                        let id = next.fetch_add(1, Ordering::Relaxed);
                        match dump(&region, id, 10 + id % 50) {
                            Ok(sealed) => check(&sealed),
                            Err(ShadowError::Full { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                        if region.checkpoints().len() > 12
                            && let Some(oldest) = region.checkpoints().first()
                        {
                            // Another writer may have been faster.
                            let _ = region.delete(oldest.id());
                        }
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
    });
    let left: Vec<_> = region.checkpoints().iter().map(|c| c.id()).collect();
    assert!(left.len() >= 10);
    let medium = Arc::clone(region.medium());
    drop(region);
    let (region, _) = Region::open(medium).unwrap();
    let mut held = std::collections::BTreeSet::new();
    for checkpoint in region.checkpoints() {
        check(&checkpoint);
        held.extend(checkpoint.segment_numbers());
    }
    assert_eq!(
        region
            .checkpoints()
            .iter()
            .map(|c| c.id())
            .collect::<Vec<_>>(),
        left
    );
    let usage = region.usage();
    assert_eq!(
        usage.free_bytes / usage.segment_bytes + held.len() as u64,
        usage.segments
    );
}

#[test]
fn a_thousand_checkpoints_are_recovered() {
    let region = region(160 << 20, 64 << 10);
    for id in 1..=1000 {
        dump(&region, id, 20).unwrap();
    }
    let medium = Arc::clone(region.medium());
    drop(region);
    let start = Instant::now();
    let (region, report) = Region::open(medium).unwrap();
    println!(
        "recovered {} checkpoints in {:?}",
        report.checkpoints,
        start.elapsed()
    );
    assert_eq!(report.checkpoints, 1000);
    for checkpoint in region.checkpoints().iter().step_by(37) {
        check(checkpoint);
    }
}
