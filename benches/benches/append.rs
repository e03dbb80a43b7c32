//! `Shadow::append`: copies pages from a buffer into a shadow's segments. The hot path of a dump: a task is frozen
//! for as long as this takes, and the socket should be the slower of the two.
//!
//! One iteration appends 64 MiB in calls of 64 KiB, 256 KiB (the front end's) or 1 MiB, each time from one buffer, as
//! the front end does: so the column also shows from which size on the buffer is no longer in a cache near the core.
//! `random` pages are checksummed and stored; `equal` ones are checksummed and compared with the parent's, which are
//! read from the medium; `zero` ones are only compared with zero. Nothing is flushed here: see `seal.rs`.

use std::sync::Arc;

use divan::Bencher;
use divan::counter::BytesCount;
use permafrost_benches::{noise, region};
use permafrost_pmem::{
    CheckpointId, FormatOptions, MapCursor, MapStats, MapWriter, PAGE_SIZE, Region, Shadow,
};

/// Bytes of one dump: more than the last cache of a usual core complex, so that parents come from memory.
const DUMP_BYTES: usize = 64 << 20;
/// Room for a parent and the dump in hand, with their maps.
const REGION_BYTES: u64 = 256 << 20;
/// Bytes a call.
const CALL_BYTES: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];

fn main() {
    divan::main();
}

#[divan::bench(args = CALL_BYTES, sample_size = 1)]
fn random(bencher: Bencher<'_, '_>, call_bytes: usize) {
    let region = region(REGION_BYTES, &FormatOptions::default());
    let pages = noise(call_bytes / PAGE_SIZE);
    bench(bencher, &region, &pages, |stats| stats.stored, || None);
}

#[divan::bench(args = CALL_BYTES, sample_size = 1)]
fn equal(bencher: Bencher<'_, '_>, call_bytes: usize) {
    let region = region(REGION_BYTES, &FormatOptions::default());
    let pages = noise(call_bytes / PAGE_SIZE);
    let mut shadow = region.begin();
    let mut writer = shadow.map();
    dump(&mut shadow, &mut writer, &pages, None);
    let (root, _) = shadow.finish(writer).expect("finish the parent's map");
    let parent = shadow
        .seal(CheckpointId::new(1), &root.to_bytes(), None)
        .expect("seal the parent");
    let parent = || Some(parent.map(&root).cursor());
    bench(bencher, &region, &pages, |stats| stats.parent, parent);
}

#[divan::bench(args = CALL_BYTES, sample_size = 1)]
fn zero(bencher: Bencher<'_, '_>, call_bytes: usize) {
    let region = region(REGION_BYTES, &FormatOptions::default());
    let pages = vec![0; call_bytes];
    bench(bencher, &region, &pages, |stats| stats.zero, || None);
}

/// Times the dump alone; its shadow is begun before, and its segments are freed after. All of its pages must be
/// counted as the kind that is measured.
fn bench(
    bencher: Bencher<'_, '_>,
    region: &Arc<Region>,
    pages: &[u8],
    measured: impl Fn(&MapStats) -> u64,
    parent: impl Fn() -> Option<MapCursor>,
) {
    let begin = || {
        let shadow = region.begin();
        let writer = shadow.map();
        (shadow, writer, parent())
    };
    let (mut shadow, mut writer, mut parent) = begin();
    dump(&mut shadow, &mut writer, pages, parent.as_mut());
    let (_, stats) = shadow.finish(writer).expect("finish the map");
    assert_eq!(measured(&stats), (DUMP_BYTES / PAGE_SIZE) as u64);
    drop(shadow);

    bencher
        .counter(BytesCount::new(DUMP_BYTES))
        .with_inputs(begin)
        .bench_local_refs(|(shadow, writer, parent)| dump(shadow, writer, pages, parent.as_mut()));
}

fn dump(
    shadow: &mut Shadow,
    writer: &mut MapWriter,
    pages: &[u8],
    mut parent: Option<&mut MapCursor>,
) {
    for (call, _) in (0..DUMP_BYTES).step_by(pages.len()).enumerate() {
        let first_index = (call * pages.len() / PAGE_SIZE) as u64;
        shadow
            .append(writer, first_index, 0, pages, parent.as_deref_mut())
            .expect("append");
    }
}
