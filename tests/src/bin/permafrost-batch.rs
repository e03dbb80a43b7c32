//! A batch task, as the papers' experiments on preemption run it: it writes random values to all of its memory, works
//! for a while, and reads the memory back (paper 001, §IV-C). With `--touch` it writes to its memory at random instead,
//! from several threads, until it is killed (paper 004, §2.2).

#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use permafrost_protocol::PAGE_SIZE;
use permafrost_tests::contents::{Contents, fill, page_checksum};
use permafrost_tests::random::Random;

/// Time that a step of the work takes. It is slept, so that other processes on the machine do not lengthen it.
const STEP: Duration = Duration::from_millis(10);

/// Number of writes after which a thread that touches memory counts them, and sleeps.
const TOUCHES: u64 = 1000;

/// A task that fills its memory, works, and checks it.
#[derive(Parser)]
struct Options {
    /// Memory, MiB.
    #[arg(long)]
    memory_mib: usize,
    /// Work, milliseconds, in steps of ten.
    #[arg(long, default_value_t = 0)]
    work_ms: u64,
    /// Number of threads that write to the memory at random, without end, instead of the work.
    #[arg(long, default_value_t = 0)]
    touch: u64,
    /// File into which the number of done steps, or of writes, is written, in decimal.
    #[arg(long)]
    progress: PathBuf,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let progress = File::create(&options.progress).context("create the file of the progress")?;
    let report = |done: u64| {
        let line = format!("{done:<20}");
        progress.write_all_at(line.as_bytes(), 0)
    };
    let bytes = options.memory_mib << 20;
    if options.touch > 0 {
        return touch(bytes, options.touch, report);
    }
    let mut memory = vec![0; bytes];
    let mut kept = 0;
    for (index, page) in (0..).zip(memory.as_chunks_mut::<PAGE_SIZE>().0) {
        fill(Contents::Random, 1, index, 0, page);
        kept ^= page_checksum(index, page);
    }
    let steps = options.work_ms / u64::try_from(STEP.as_millis())?;
    for step in 0..steps {
        report(step)?;
        thread::sleep(STEP);
    }
    let pages = (0..).zip(memory.as_chunks::<PAGE_SIZE>().0);
    let found = pages.fold(0, |sum, (index, page)| sum ^ page_checksum(index, page));
    ensure!(found == kept, "the memory is not what was written");
    report(steps)?;
    Ok(())
}

/// Writes to memory at random from `threads` threads, and reports the number of writes.
fn touch(bytes: usize, threads: u64, report: impl Fn(u64) -> std::io::Result<()>) -> Result<()> {
    let words: Vec<AtomicU64> = (1..).take(bytes / 8).map(AtomicU64::new).collect();
    let done = AtomicU64::new(0);
    thread::scope(|scope| {
        for seed in 0..threads {
            let (words, done) = (&words, &done);
            scope.spawn(move || {
                let mut random = Random::of(seed);
                loop {
                    for _ in 0..TOUCHES {
                        if let Some(word) = words.get(random.index(words.len())) {
                            word.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    done.fetch_add(TOUCHES, Ordering::Relaxed);
                    // Others need the processors, too.
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        loop {
            report(done.load(Ordering::Relaxed))?;
            thread::sleep(STEP);
        }
    })
}
