//! `permafrost-workload`: a process worth freezing. It fills its memory with contents that it can make
//! again from a seed, counts, and on a signal modifies or checks itself and reports into a status file:
//!
//! - SIGHUP: report
//! - SIGUSR1: modify some of the pages, report
//! - SIGUSR2: check everything, report
//! - SIGINT: the same, and end: with 0 if all is as it should be, with 1 if not
//!
//! It can be dumped as it is: a session of its own, standard streams on /dev/null, no file open between
//! reports. With `--members` it is a tree of processes over shared memory, pipes either way.

#![forbid(unsafe_code)]

mod member;
mod memory;
mod open_file;
mod shared;
mod ticker;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use permafrost_tests::contents::Contents;
use permafrost_tests::process;
use permafrost_tests::status::Status;
use signal_hook::consts::{SIGHUP, SIGINT, SIGUSR1, SIGUSR2};

use crate::member::Members;
use crate::memory::Memory;
use crate::open_file::OpenFile;
use crate::shared::Shared;
use crate::ticker::Ticker;

/// A process that fills its memory and can tell whether it is still what it was.
#[derive(Parser)]
struct Options {
    /// Directory of the status file and of the open file.
    #[arg(long)]
    dir: PathBuf,
    /// Private memory, MiB.
    #[arg(long, default_value_t = 16)]
    size_mib: usize,
    /// Contents of the memory: random, zero-rich, text, heap.
    #[arg(long, default_value = "random")]
    contents: Contents,
    /// Processes beside the root, each with a sixteenth of its memory.
    #[arg(long, default_value_t = 0)]
    members: u32,
    /// Memory that all of them share, MiB.
    #[arg(long, default_value_t = 0)]
    shared_mib: usize,
    /// Threads beside the main one, in each process.
    #[arg(long, default_value_t = 0)]
    threads: u32,
    /// Keep a file open, half read.
    #[arg(long)]
    open_file: bool,
    /// Share of the memory that a modification changes, percent.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=100))]
    modify_percent: u64,
    /// Seed of the contents.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run as member N of a tree, told what to do on stdin.
    #[arg(long, hide = true)]
    member: Option<u32>,
    /// Descriptor of the shared memory.
    #[arg(long, hide = true)]
    shared_fd: Option<u32>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    match options.member {
        Some(index) => member::run(index, &options),
        None => Root::start(options)?.run(),
    }
}

/// Sees to it that this process leads a session: CRIU refuses one whose leader is outside the tree.
fn own_session() -> Result<()> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    if process::session_of_this_process()? == own {
        return Ok(());
    }
    // Fails for a process group's leader, as an interactive shell makes one; started from a program, it is not.
    rustix::process::setsid()
        .map(drop)
        .context("start a session; from a shell, run it under `setsid`")
}

/// Points standard error at /dev/null: what a start complains about may go to a file, but a process that is
/// frozen has none open.
fn leave_stderr() -> Result<()> {
    let null = std::fs::File::options()
        .write(true)
        .open("/dev/null")
        .context("open /dev/null")?;
    rustix::stdio::dup2_stderr(&null).context("replace standard error")
}

/// The root process.
struct Root {
    options: Options,
    memory: Memory,
    shared: Option<Shared>,
    members: Members,
    file: Option<OpenFile>,
    ticker: Ticker,
    counter: u64,
}

impl Root {
    fn start(options: Options) -> Result<Self> {
        own_session()?;
        let shared = (options.shared_mib > 0)
            .then(|| Shared::create(options.shared_mib << 20, options.seed))
            .transpose()?;
        let members = Members::start(&options, shared.as_ref())?;
        let memory = Memory::filled(options.size_mib << 20, options.contents, options.seed);
        let file = options
            .open_file
            .then(|| OpenFile::create(&options.dir))
            .transpose()?;
        let ticker = Ticker::start(options.threads);
        Ok(Self {
            options,
            memory,
            shared,
            members,
            file,
            ticker,
            counter: 0,
        })
    }

    fn run(mut self) -> Result<()> {
        let [report, modify, verify, finish] = [SIGHUP, SIGUSR1, SIGUSR2, SIGINT].map(|signal| {
            let raised = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(signal, Arc::clone(&raised)).map(|_| raised)
        });
        let (report, modify, verify, finish) = (report?, modify?, verify?, finish?);
        leave_stderr()?;
        self.report(false, 0, 0, Vec::new())?;
        loop {
            self.counter += 1;
            if modify.swap(false, Ordering::Relaxed) {
                self.modify()?;
            }
            if verify.swap(false, Ordering::Relaxed) {
                self.verify()?;
            }
            if finish.load(Ordering::Relaxed) {
                ensure!(self.verify()?.is_sound(), "not what it was");
                return Ok(());
            }
            if report.swap(false, Ordering::Relaxed) {
                self.report(false, 0, 0, Vec::new())?;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn modify(&mut self) -> Result<Status> {
        self.memory.modify(self.options.modify_percent);
        if let Some(shared) = &mut self.shared {
            shared.modify(self.options.modify_percent)?;
        }
        let faults = self.members.modify();
        self.report(false, 0, 0, faults)
    }

    fn verify(&mut self) -> Result<Status> {
        let mut found = self.memory.verify();
        let mut faults = Vec::new();
        let token = self.counter;
        if let Some(shared) = &mut self.shared {
            found.bad_pages += shared.verify()?;
            // What is written here must be what the members read: shared still, not copied.
            shared.set_token(token)?;
        }
        let (bad_pages, more) = self.members.verify(self.shared.is_some().then_some(token));
        faults.extend(more);
        if let Some(file) = &mut self.file {
            faults.extend(
                file.verify()
                    .err()
                    .map(|error| format!("open file: {error:#}")),
            );
        }
        faults.extend(self.ticker.verify());
        self.report(true, found.bad_pages + bad_pages, found.checksum, faults)
    }

    fn report(
        &self,
        verified: bool,
        bad_pages: u64,
        checksum_found: u64,
        faults: Vec<String>,
    ) -> Result<Status> {
        let shared_pages = self.shared.as_ref().map_or(0, Shared::pages);
        let status = Status {
            pid: std::process::id(),
            counter: self.counter,
            generation: self.memory.generation(),
            pages: self.memory.pages() + shared_pages + self.members.pages(),
            bad_pages,
            checksum_kept: self.memory.checksum_kept(),
            checksum_found,
            faults,
            verified,
            members: self.members.pids(),
            thread_ticks: self.ticker.ticks(),
        };
        status.write(&self.options.dir.join("workload.status"))?;
        Ok(status)
    }
}
