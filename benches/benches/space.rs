//! Space and writes over many generations of random changes: how much a region holds for what is live, and how much is
//! written for what was changed.
//!
//! A process of [`PAGES`] pages is dumped generation after generation; each changes so many pages, chosen at random.
//! The last [`KEPT`] checkpoints are kept. With cleaning, the region is cleaned whenever the daemon would do it, with a
//! dump every few seconds: when it has grown, and after each eighth dump. The worst value of the first dumps, until
//! [`SETTLED`] times the memory was changed, stands apart from that of all later ones. Bytes of maps have a column of their own; `maps.rs`
//! measures maps alone.
//!
//! `cargo bench -p permafrost-benches --bench space [GENERATIONS]`

use std::collections::VecDeque;
use std::sync::Arc;

use permafrost_benches::{Numbers, noise, region};
use permafrost_pmem::{
    CheckpointId, FormatOptions, MapRoot, MediumUsage, PAGE_SIZE, Region, StoredCheckpoint,
    has_grown,
};

/// Pages of the process: 64 MiB.
const PAGES: usize = 16_384;
/// Checkpoints that are kept.
const KEPT: usize = 4;
/// Region in which segments can be left uncleaned for long.
const REGION_BYTES: u64 = 2 << 30;
/// Changed pages, as a multiple of the memory, after which the region is in its steady state.
const SETTLED: u64 = 4;
/// Generations after which the region is looked at, to be cleaned or only measured.
const BETWEEN: [usize; 2] = [8, 64];
/// Generations, unless another number is given.
const GENERATIONS: usize = 10_000;

fn main() {
    let given = std::env::args().find_map(|argument| argument.parse().ok());
    let generations: usize = given.unwrap_or(GENERATIONS);
    println!("{PAGES} pages, {generations} generations, the last {KEPT} kept, segments of 1 MiB");
    println!(
        "changed  cleaned  used/live: last, worst, worst at first  written/changed: dumps, of it maps, cleaning"
    );
    for per_mille in [1, 10, 100] {
        for cleaned in [true, false] {
            let run = Run::new(per_mille, cleaned, generations);
            println!("{}", run.row(per_mille, cleaned));
        }
    }
}

/// Result of one run.
#[derive(Default)]
struct Run {
    last: f64,
    worst: f64,
    worst_at_first: f64,
    used_then: u64,
    changed: u64,
    dumped: u64,
    maps: u64,
    moved: u64,
    /// Generation at which the region was full; 0: never.
    full_at: usize,
}

impl Run {
    fn new(per_mille: usize, cleaned: bool, generations: usize) -> Self {
        let region = region(REGION_BYTES, &FormatOptions::default());
        let contents = noise(1024);
        let (contents, _) = contents.as_chunks::<PAGE_SIZE>();
        let mut numbers = Numbers::default();
        let (mut run, mut kept) = (Self::default(), VecDeque::new());
        let mut newest = None;
        for generation in 0..generations {
            // Not kept beyond the dump: a reference keeps the slots that segments leave.
            let parent = newest.and_then(|id| region.checkpoint(id));
            let mut changed = vec![parent.is_none(); PAGES];
            for _ in 0..PAGES * per_mille / 1000 {
                changed[draw(&mut numbers, PAGES)] = true;
            }
            let mut shadow = region.begin();
            let mut map = shadow.map();
            let mut cursor = parent
                .as_ref()
                .map(|parent| parent.map(&root_of(parent)).cursor());
            let mut filled = true;
            for (index, &changed) in (0_u64..).zip(&changed) {
                let added = match &mut cursor {
                    Some(cursor) if !changed => shadow.reference(&mut map, index, 1, cursor),
                    _ => {
                        let content = &contents[draw(&mut numbers, contents.len())];
                        shadow.append(&mut map, index, 0, content, None)
                    }
                };
                filled &= added.is_ok();
            }
            let Some((root, stats)) = filled.then(|| shadow.finish(map).ok()).flatten() else {
                run.full_at = generation;
                return run;
            };
            let added = shadow.added_bytes();
            let id = CheckpointId::new(generation as u128 + 1);
            drop((cursor, parent));
            if shadow.seal(id, &root.to_bytes(), None).is_err() {
                run.full_at = generation;
                return run;
            };
            if generation > 0 {
                run.changed += stats.stored * PAGE_SIZE as u64;
                run.dumped += added;
                run.maps += added - stats.stored * PAGE_SIZE as u64;
            }
            newest = Some(id);
            kept.push_back(id);
            if kept.len() > KEPT {
                let oldest = kept.pop_front().expect("several are kept");
                region.delete(oldest).expect("delete");
            }
            run.clean_and_measure(&region, cleaned, generation);
        }
        run
    }

    fn clean_and_measure(&mut self, region: &Region, cleaned: bool, generation: usize) {
        let [cleaning, measuring] = BETWEEN;
        let between = if cleaned { cleaning } else { measuring };
        let usage = usage(region);
        let grown = cleaned && has_grown(self.used_then, usage.used_bytes(), usage.segment_bytes);
        if !grown && !(generation + 1).is_multiple_of(between) {
            return;
        }
        let mut survey = region.survey(&|checkpoint| Some(vec![root_of(checkpoint)]));
        let live = survey.live_bytes() as f64;
        let settled = self.changed >= SETTLED * (PAGES * PAGE_SIZE) as u64;
        let worst = if settled {
            &mut self.worst
        } else {
            &mut self.worst_at_first
        };
        *worst = worst.max(usage.used_bytes() as f64 / live);
        if cleaned && usage.is_worth_cleaning(survey.reclaimable_bytes(usage.segment_bytes)) {
            let done = region.clean(&mut survey, u64::MAX).expect("clean");
            self.moved += done.written_bytes;
        }
        drop(survey);
        self.used_then = self::usage(region).used_bytes();
        self.last = self.used_then as f64 / live;
    }

    fn row(&self, per_mille: usize, cleaned: bool) -> String {
        let per_changed = |bytes: u64| bytes as f64 / self.changed.max(1) as f64;
        let full = match self.full_at {
            0 => String::new(),
            generation => format!("  full at generation {generation}"),
        };
        format!(
            "{:>5.1} %  {:>7}  {:>9.2} {:>9.2} {:>9.2}        {:>8.2} {:>8.2} {:>8.2}{full}",
            per_mille as f64 / 10.0,
            if cleaned { "yes" } else { "no" },
            self.last,
            self.worst,
            self.worst_at_first,
            per_changed(self.dumped),
            per_changed(self.maps),
            per_changed(self.moved),
        )
    }
}

fn usage(region: &Region) -> MediumUsage {
    region.usage_of_media()[0]
}

/// Returns a number below `count`.
fn draw(numbers: &mut Numbers, count: usize) -> usize {
    usize::try_from(numbers.draw() % count as u64).unwrap_or(0)
}

fn root_of(checkpoint: &Arc<StoredCheckpoint>) -> MapRoot {
    let manifest = checkpoint.manifest().expect("manifest");
    MapRoot::try_from(manifest.as_slice()).expect("map root")
}
