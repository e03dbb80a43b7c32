//! Cost of a seal, and of the recovery at a restart.
//!
//! `seal` makes a shadow of the given number of pages a checkpoint: manifest and root, flush, fence, one journal
//! record, flush, fence. The task is still frozen. `open` recovers a region with the given number of checkpoints that
//! was never closed: it reads the journal and a root for each, and the node is out of service until then. Both use a
//! journal of 1 MiB in two halves.
//!
//! The medium is memory, where a flush is a system call without work: the bench measures the software's part. A disk
//! adds its two fences.

use std::sync::Arc;

use divan::Bencher;
use divan::counter::ItemsCount;
use permafrost_benches::{noise, region};
use permafrost_pmem::{CheckpointId, FormatOptions, Region, Shadow};

/// The smallest segments: thousands of checkpoints in little memory.
const OPTIONS: FormatOptions = FormatOptions {
    segment_bytes: 64 << 10,
    journal_records: None,
    uuid: None,
};
/// Segments for 1,000 checkpoints, and as many again.
const REGION_BYTES: u64 = 128 << 20;
/// Approximate length of the manifest of a small process.
const MANIFEST_BYTES: usize = 1500;

fn main() {
    divan::main();
}

#[divan::bench(args = [1, 256], sample_size = 1, sample_count = 500)]
fn seal(bencher: Bencher<'_, '_>, pages: usize) {
    let region = region(REGION_BYTES, &OPTIONS);
    let (pages, manifest) = (noise(pages), [7; MANIFEST_BYTES]);
    bencher
        .with_inputs(|| shadow(&region, &pages))
        .bench_local_values(|shadow| {
            let id = CheckpointId::random();
            shadow.seal(id, &manifest, None).expect("seal");
            Deleted(&region, id)
        });
}

#[divan::bench(args = [100, 1_000], sample_size = 1)]
fn open(bencher: Bencher<'_, '_>, checkpoints: u64) {
    let region = region(REGION_BYTES, &OPTIONS);
    let (page, manifest) = (noise(1), [7; MANIFEST_BYTES]);
    for id in 0..checkpoints {
        shadow(&region, &page)
            .seal(CheckpointId::new(id.into()), &manifest, None)
            .expect("seal");
    }
    let medium = Arc::clone(region.medium());
    drop(region);
    bencher
        .counter(ItemsCount::new(checkpoints))
        .bench_local(|| {
            let (region, report) = Region::open(Arc::clone(&medium)).expect("open");
            assert!(!report.clean && report.checkpoints == checkpoints);
            region
        });
}

/// Returns a shadow with one finished map, not flushed.
fn shadow(region: &Arc<Region>, pages: &[u8]) -> Shadow {
    let mut shadow = region.begin();
    let mut writer = shadow.map();
    shadow
        .append(&mut writer, 0, 0, pages, None)
        .expect("append");
    shadow.finish(writer).expect("finish the map");
    shadow
}

/// Deletes a checkpoint when it is dropped, after the time was taken.
struct Deleted<'a>(&'a Region, CheckpointId);

impl Drop for Deleted<'_> {
    fn drop(&mut self) {
        self.0.delete(self.1).expect("delete");
    }
}
