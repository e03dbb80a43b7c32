//! Regions with very many checkpoints: the work of a seal does not depend on their number, that of an open is a page
//! for each.

#![allow(missing_docs, clippy::cast_possible_truncation, unsafe_code)]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use permafrost_pmem::{
    CheckpointId, Flushed, FormatOptions, Guarantee, MapRoot, Medium, PAGE_SIZE, Region,
    StoredCheckpoint, create_medium_in_memory,
};

/// A medium that counts accesses.
struct Counting {
    medium: Arc<dyn Medium>,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    flushes: AtomicU64,
}

impl Counting {
    fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            medium: create_medium_in_memory(bytes).unwrap(),
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            flushes: AtomicU64::new(0),
        })
    }

    /// Returns the bytes read and written and the flushes since the last call.
    fn take(&self) -> Work {
        let take = |count: &AtomicU64| count.swap(0, Ordering::Relaxed);
        Work {
            read_bytes: take(&self.read_bytes),
            written_bytes: take(&self.written_bytes),
            flushes: take(&self.flushes),
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Work {
    read_bytes: u64,
    written_bytes: u64,
    flushes: u64,
}

fn count(counter: &AtomicU64, n: usize) {
    counter.fetch_add(n as u64, Ordering::Relaxed);
}

impl Medium for Counting {
    fn capacity_bytes(&self) -> u64 {
        self.medium.capacity_bytes()
    }
    fn guarantee(&self) -> &Guarantee {
        self.medium.guarantee()
    }
    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.medium.file()
    }
    fn lost_pages(&self) -> u64 {
        self.medium.lost_pages()
    }
    fn check(&self, at: u64, len_bytes: u64) -> io::Result<()> {
        self.medium.check(at, len_bytes)
    }
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        count(&self.read_bytes, into.len());
        self.medium.read(at, into)
    }
    unsafe fn bytes(&self, at: u64, len: usize) -> io::Result<&[u8]> {
        count(&self.read_bytes, len);
        // SAFETY: the caller's promise.
        unsafe { self.medium.bytes(at, len) }
    }
    unsafe fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        count(&self.written_bytes, from.len());
        // SAFETY: the caller's promise.
        unsafe { self.medium.write(at, from) }
    }
    unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()> {
        count(&self.written_bytes, from.len());
        // SAFETY: the caller's promise.
        unsafe { self.medium.write_streaming(at, from) }
    }
    fn flush(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        count(&self.flushes, 1);
        self.medium.flush(at, len_bytes, flushed)
    }
    fn flush_streamed(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        count(&self.flushes, 1);
        self.medium.flush_streamed(at, len_bytes, flushed)
    }
    fn fence(&self, flushed: &mut Flushed) -> io::Result<()> {
        self.medium.fence(flushed)
    }
    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.medium.rewrite_page(at, page) }
    }
}

fn format(medium: &Arc<Counting>, records: u32) -> Arc<Region> {
    let shared = || Arc::clone(medium) as Arc<dyn Medium>;
    let options = FormatOptions {
        journal_records: Some(records),
        ..FormatOptions::default()
    };
    Region::format(shared(), &options).unwrap();
    Region::open(shared()).unwrap().0
}

/// Seals a checkpoint of one page, or an empty one.
fn seal(region: &Arc<Region>, id: u64, is_empty: bool) {
    let mut shadow = region.begin();
    let mut map = shadow.map();
    let page = [id.to_le_bytes(); PAGE_SIZE / 8].concat();
    if !is_empty {
        shadow.append(&mut map, 0, 0, &page, None).unwrap();
    }
    let (root, _) = shadow.finish(map).unwrap();
    let id = CheckpointId::new(id.into());
    shadow.seal(id, &root.to_bytes(), None).unwrap();
}

#[test]
fn the_work_of_a_seal_does_not_grow_and_an_open_reads_a_page_of_each() {
    const COUNT: u64 = 20_000;
    let medium = Counting::new(512 << 20);
    let region = format(&medium, 32 << 10);
    medium.take();
    let mut worst = Work::default();
    for id in 1..=COUNT {
        seal(&region, id, false);
        // Attributes fill the journal, which is compacted meanwhile.
        region.set_attrs(CheckpointId::new(id.into()), 1).unwrap();
        let work = medium.take();
        worst.read_bytes = worst.read_bytes.max(work.read_bytes);
        worst.written_bytes = worst.written_bytes.max(work.written_bytes);
        worst.flushes = worst.flushes.max(work.flushes);
    }
    // Its pages and some records; no part of it is proportional to the checkpoints there are.
    assert!(
        worst.written_bytes < 64 << 10 && worst.read_bytes < 64 << 10,
        "{worst:?}"
    );
    assert!(worst.flushes < 32, "{worst:?}");
    drop(region);
    medium.take();
    let shared = Arc::clone(&medium) as Arc<dyn Medium>;
    let (region, report) = Region::open(shared).unwrap();
    assert_eq!((report.checkpoints, report.records_repaired), (COUNT, 0));
    let work = medium.take();
    // A root page, the journal of 256 bytes a record, and the segment table.
    let expected = COUNT * PAGE_SIZE as u64 + 256 * (32 << 10) + (1 << 20);
    assert!(work.read_bytes < expected, "{work:?}");
    drop(region);
}

#[test]
fn a_survey_reads_what_has_come_since_the_last_one() {
    let medium = Counting::new(64 << 20);
    let region = format(&medium, 2 << 10);
    let root = |checkpoint: &Arc<StoredCheckpoint>| {
        MapRoot::try_from(checkpoint.manifest().unwrap().as_slice()).unwrap()
    };
    let survey = |region: &Arc<Region>| {
        medium.take();
        let survey = region.survey(&|checkpoint| Some(vec![root(checkpoint)]));
        let found = (
            survey.live_bytes(),
            survey.used_bytes(),
            survey.unknown_bytes(),
        );
        (found, medium.take().read_bytes)
    };
    // Deltas of a process of 2,048 pages.
    let dump = |id: u64| {
        let parent = region.checkpoint(CheckpointId::new((id - 1).into()));
        let mut shadow = region.begin();
        let mut map = shadow.map();
        let mut cursor = parent.map(|parent| parent.map(&root(&parent)).cursor());
        for index in 0..2048 {
            match &mut cursor {
                Some(cursor) if index != id * 37 % 2048 => {
                    shadow.reference(&mut map, index, 1, cursor).unwrap();
                }
                _ => {
                    let page = [(id + index).to_le_bytes(); PAGE_SIZE / 8].concat();
                    shadow.append(&mut map, index, 0, &page, None).unwrap();
                }
            }
        }
        let (root, _) = shadow.finish(map).unwrap();
        let id = CheckpointId::new(id.into());
        shadow.seal(id, &root.to_bytes(), None).unwrap();
    };
    (1..=40).for_each(dump);
    let (_, first) = survey(&region);
    assert!(first > 2048 * 14, "{first}");
    assert_eq!(survey(&region).1, 0, "nothing has come");
    for id in 41..=80 {
        dump(id);
        if id % 3 > 0 {
            region.delete(CheckpointId::new((id - 40).into())).unwrap();
        }
        // The root, its second copy not, and the path of nodes to the page.
        let (_, read) = survey(&region);
        assert!((1..32 << 10).contains(&read), "{read}");
    }
    // Found anew it is the same.
    let (found, _) = survey(&region);
    drop(region);
    let shared = Arc::clone(&medium) as Arc<dyn Medium>;
    let (region, _) = Region::open(shared).unwrap();
    let (anew, read) = survey(&region);
    assert_eq!((found, read > first), (anew, true));
}

/// Returns the memory of the process that is not shared, bytes.
fn own_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Returns the processor time of this thread: other work of the machine does not count.
fn processor_time() -> Duration {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(schedstat.split(' ').next().unwrap().parse().unwrap())
}

#[test]
#[ignore = "a measurement: cargo test --release -p permafrost-pmem --test many -- --ignored --nocapture"]
fn recovery_and_seal_at_a_thousand_and_a_million() {
    println!(
        "checkpoints | median seal | p99.9 seal | longest | open | of it processor time | memory for each"
    );
    for checkpoints in [1_000_u64, 1_000_000] {
        let medium = Counting::new(checkpoints * (9 << 10) + (1 << 30));
        let region = format(&medium, 2 << 20);
        let mut times: Vec<Duration> = Vec::with_capacity(checkpoints as usize);
        for id in 1..=checkpoints {
            let since = Instant::now();
            // Roots only, so that a million fit into memory.
            seal(&region, id, true);
            times.push(since.elapsed());
        }
        let longest = *times.iter().max().unwrap();
        let last = times.len().saturating_sub(1000);
        let mut times = times.split_off(last);
        times.sort_unstable();
        let (median, high) = (times[times.len() / 2], times[times.len() - 2]);
        drop(region);
        let before = own_memory();
        let (since, cpu) = (Instant::now(), processor_time());
        let shared = Arc::clone(&medium) as Arc<dyn Medium>;
        let (region, report) = Region::open(shared).unwrap();
        let (took, cpu) = (since.elapsed(), processor_time() - cpu);
        assert_eq!(report.checkpoints, checkpoints);
        let memory = own_memory().saturating_sub(before) / checkpoints;
        println!(
            "{checkpoints} | {median:.1?} | {high:.1?} | {longest:.1?} | {took:.2?} | {cpu:.2?} | {memory}"
        );
        drop(region);
    }
}
