//! Measurements of regions with many checkpoints, run by name:
//! `TMPDIR=/dev/shm cargo test --release -p permafrost-server --test upkeep scale -- --ignored --nocapture`.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use permafrost_cluster::scrub::ScrubOptions;
use permafrost_criu::frontend::PageSink as _;

use super::site::{PID, Site};

/// Number of checkpoints that fit into a journal of the largest size.
const MOST: u64 = 65_534;

#[test]
#[ignore = "a measurement that takes a minute and gigabytes"]
fn a_pass_of_the_scrub_costs_the_same_for_each_checkpoint() {
    println!(
        "checkpoints | first listing | a pass, processor time | for each | longest wait for the lock"
    );
    for count in [1_000, 10_000, MOST] {
        let measured = measure(count);
        let each = measured.pass / u32::try_from(count).unwrap();
        let (listing, pass, wait) = (measured.listing, measured.pass, measured.longest_wait);
        println!("{count:>11} | {listing:>13.1?} | {pass:>22.1?} | {each:>8.1?} | {wait:.1?}");
    }
}

struct Measured {
    listing: Duration,
    pass: Duration,
    longest_wait: Duration,
}

/// Fills a region with checkpoints of three pages, all of them overdue, and has the scrub read each once.
fn measure(count: u64) -> Measured {
    // Two segments for each at the most, and the journal.
    let site = Site::of(count * (128 << 10) + (64 << 20));
    let ids = fill(&site, count);
    let long_ago: serde_json::Map<_, _> = ids.into_iter().map(|id| (id, 1.into())).collect();
    let memory = serde_json::json!({ "v": 1, "verified_unix_ms": long_ago });
    std::fs::write(site.memory(), memory.to_string()).unwrap();

    let options = ScrubOptions {
        period: Some(Duration::from_secs(3600)),
        share_percent: 100,
        memory: Some(site.memory()),
    };
    let scrubber = site.scrubber(options);
    let began = Instant::now();
    assert!(scrubber.status().oldest_s > 3600);
    let listing = began.elapsed();

    let done = Arc::new(AtomicBool::new(false));
    let waiting = {
        let (scrubber, done) = (Arc::clone(&scrubber), Arc::clone(&done));
        std::thread::spawn(move || {
            let mut longest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let began = Instant::now();
                // Takes the lock, and asks about nothing.
                scrubber.verified(&Default::default()).unwrap();
                longest = longest.max(began.elapsed());
                std::thread::sleep(Duration::from_millis(1));
            }
            longest
        })
    };
    let scrubbing = scrubber.start().unwrap();
    let mut pass = Duration::ZERO;
    while scrubber.counters().checkpoints.value() < count {
        std::thread::sleep(Duration::from_millis(1));
        pass = processor_time("scrub").unwrap_or(pass);
    }
    done.store(true, Ordering::Relaxed);
    let longest_wait = waiting.join().unwrap();
    drop(scrubbing);
    Measured {
        listing,
        pass,
        longest_wait,
    }
}

/// Seals so many checkpoints of a hundred jobs. Returns their ids.
fn fill(site: &Site, count: u64) -> Vec<String> {
    let images = tempfile::tempdir().unwrap();
    for (name, bytes) in [
        ("inventory.img", 9),
        (&format!("core-{PID}.img"), 40),
        (&format!("mm-{PID}.img"), 40),
    ] {
        std::fs::write(images.path().join(name), vec![1; bytes]).unwrap();
    }
    let seal = |number: u64| {
        let job = format!("job-{}", number % 100);
        let (session, mut sink) = site.begin(&job, number * 3..number * 3 + 3);
        sink.close().unwrap();
        drop(sink);
        let directory = OwnedFd::from(File::open(images.path()).unwrap());
        site.store.seal_session(&session, directory).unwrap().id
    };
    (0..count).map(seal).collect()
}

/// Returns the processor time of the thread of this name.
fn processor_time(name: &str) -> Option<Duration> {
    for task in std::fs::read_dir("/proc/self/task").ok()?.flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file)).ok();
        if read("comm")?.trim() == name {
            let schedstat = read("schedstat")?;
            let ns = schedstat.split(' ').next()?.parse().ok()?;
            return Some(Duration::from_nanos(ns));
        }
    }
    None
}
