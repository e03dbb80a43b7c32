//! `cargo xtask bench`: real dumps of real processes, side by side with CRIU's own ways, in one run.

mod clients;
mod contenders;
mod figures;
mod lazy;
mod predictions;
mod queues;
mod recovery;
mod replicas;
mod report;
mod suspension;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use permafrost_tests::contents::Contents;
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::process;
use permafrost_tests::workload::{self, Workload};
use serde_json::Value;

use self::contenders::{Contender, Programs, Sample};
use crate::rig::{self, Interrupt};
use crate::setup::{self, Criu};
use crate::ui;

/// Benches besides the comparison with CRIU.
#[derive(Clone, Debug, clap::Subcommand)]
enum Bench {
    /// Dumps that are on another host when they are acknowledged, beside CRIU's page server and bare QUIC
    Replicas(replicas::Options),
    /// Copies made anew elsewhere when a node leaves: alone, and beside dumps
    Repair(replicas::repair::Options),
    /// Predicted durations of dumps and restores, compared with the measured ones
    Predictions(predictions::Options),
    /// Predicted waits of queues, compared with the measured ones
    Queues(queues::Options),
    /// Lazy restores beside plain ones: time until the process runs, and rate at which its memory follows
    Lazy(lazy::Options),
    /// Dumps beside clients that ask the HTTP API without pause
    Clients(clients::Options),
    /// Suspending, killing and shrinking real tasks that share a limited memory, as in papers 001 and 004
    Suspension(suspension::Options),
}

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    other: Option<Bench>,
    /// Sizes of the dumped process, MiB.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 2048])]
    sizes: Vec<u64>,
    /// Dumps of each size by each contender, in turn.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Contents of the process: random, zero-rich, text, heap.
    #[arg(long, default_value = "random")]
    contents: Contents,
    /// Checkpoints in the region whose recovery is timed; 0 leaves that out.
    #[arg(long, default_value_t = 1000)]
    recovery: u64,
    /// Measure this criu-image-streamer too: <https://github.com/checkpoint-restore/criu-image-streamer>, built by hand.
    #[arg(long, value_name = "PROGRAM")]
    image_streamer: Option<PathBuf>,
    /// Print JSON instead of tables.
    #[arg(long)]
    json: bool,
}

/// All measurements at one size.
struct Measured {
    size_mib: u64,
    samples: Vec<(Contender, Vec<Sample>)>,
}

/// Returns the CRIU that is measured, and that dumps for Permafrost.
fn criu() -> Result<PathBuf> {
    match setup::criu()? {
        Criu::Works(path) => Ok(path),
        Criu::CannotRun(why) => {
            bail!("there is nothing to measure without CRIU, and it cannot run here: {why}")
        }
    }
}

/// Prints the results as JSON or text.
fn show(as_json: bool, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) -> Result<()> {
    if as_json {
        println!("{}", serde_json::to_string_pretty(&json())?);
    } else {
        print!("{}", text());
    }
    Ok(())
}

/// Waits until the daemon is idle: after its start it maps its region's pages in the background, and on two
/// processors that would affect the measurements.
fn settle(daemon: &Daemon) -> Result<()> {
    const QUIET: Duration = Duration::from_millis(500);
    let task = ui::Task::begin("let permafrostd map its region");
    let mut used = process::cpu_time(daemon.pid())?;
    process::wait_for(
        "permafrostd's coming to rest",
        Duration::from_secs(60),
        || {
            std::thread::sleep(QUIET);
            let before = std::mem::replace(&mut used, process::cpu_time(daemon.pid())?);
            Ok((before == used).then_some(()))
        },
    )?;
    task.done("at rest");
    Ok(())
}

/// Runs the benches and prints what they found.
///
/// # Errors
/// Fails where CRIU, or what else a bench needs, cannot be had, and when a dump or restore fails: a restored process
/// that is not sound is no result.
pub(crate) fn run(options: &Options) -> Result<()> {
    match &options.other {
        None => one_machine(options),
        Some(Bench::Replicas(options)) => replicas::run(options),
        Some(Bench::Repair(options)) => replicas::repair::run(options),
        Some(Bench::Predictions(options)) => predictions::run(options),
        Some(Bench::Queues(options)) => queues::run(options),
        Some(Bench::Lazy(options)) => lazy::run(options),
        Some(Bench::Clients(options)) => clients::run(options),
        Some(Bench::Suspension(options)) => suspension::run(options),
    }
}

fn one_machine(options: &Options) -> Result<()> {
    let criu = criu()?;
    rig::build_release()?;
    let interrupt = Interrupt::catch()?;
    let largest = options.sizes.iter().max().copied().unwrap_or(0);
    // A dump with a quarter to spare.
    let region_mib = largest + largest / 4 + 256;
    let programs = Programs {
        criu: &criu,
        image_streamer: options.image_streamer.as_deref(),
    };
    // The region, a new one of that size, and the images of one dump.
    let dir = rig::memory_dir(2 * region_mib + largest + largest / 4 + 256)?;
    let region = daemon::Options {
        region_mib,
        ..daemon::Options::default()
    };
    let daemon = Daemon::start(dir.path(), &region)?;
    settle(&daemon)?;
    let mut measured = Vec::new();
    for &size_mib in &options.sizes {
        let contenders = Contender::ALL.into_iter();
        let contenders = contenders.filter(|contender| contender.can_run(programs));
        let mut samples: Vec<(Contender, Vec<Sample>)> = contenders
            .map(|contender| (contender, Vec::new()))
            .collect();
        for run in 0..options.runs {
            for (contender, samples) in &mut samples {
                interrupt.check()?;
                let task = ui::Task::begin(&format!(
                    "{size_mib} MiB, {contender}, run {} of {}",
                    run + 1,
                    options.runs
                ));
                let work = tempfile::tempdir_in(dir.path()).context("create a work directory")?;
                let wanted = workload::Options {
                    size_mib,
                    contents: options.contents,
                    ..workload::Options::default()
                };
                let mut workload = Workload::start(work.path(), &wanted)?;
                let sample = contender.dump_and_restore(
                    &daemon,
                    &region,
                    programs,
                    work.path(),
                    &mut workload,
                )?;
                if !workload.verify()?.is_sound() {
                    bail!("{contender} restores a process that is not sound");
                }
                task.done(&format!(
                    "frozen {:.0} ms, dump {:.0} ms, restore {:.0} ms",
                    sample.frozen_ms, sample.dump_ms, sample.restore_ms
                ));
                samples.push(sample);
            }
        }
        measured.push(Measured { size_mib, samples });
    }
    daemon.stop()?;
    drop(dir);
    interrupt.check()?;
    let recovery = if options.recovery > 0 {
        Some(recovery::measure(options.recovery, &interrupt)?)
    } else {
        None
    };
    let report = report::Report {
        criu: &criu,
        measured: &measured,
        recovery,
    };
    show(options.json, || report.json(), || report.text())
}
