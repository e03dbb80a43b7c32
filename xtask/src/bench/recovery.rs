//! Measures the time that `permafrostd` takes to get ready on a region full of checkpoints, after a crash.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::workload::{self, Workload};

use crate::rig::{self, Interrupt};
use crate::ui;

/// Times from the start of the process until it is ready.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recovery {
    /// Checkpoints in the region.
    pub(super) checkpoints: u64,
    /// Time after a kill.
    pub(super) after_crash: Duration,
    /// Time after a kill, with the catalog removed, so that it is rebuilt from the region.
    pub(super) without_catalog: Duration,
}

/// Imports a small process's images repeatedly, into ten jobs in turn, and restarts the daemon.
pub(super) fn measure(checkpoints: u64, interrupt: &Interrupt) -> Result<Recovery> {
    /// Largest size of a checkpoint of the small process, MiB: its pages, map and manifest in segments of their own.
    const EACH_MIB: u64 = 5;
    let task = ui::Task::begin(&format!(
        "recovery of a region with {checkpoints} checkpoints"
    ));
    let region_mib = checkpoints * EACH_MIB + 64;
    let dir = rig::memory_dir(region_mib + 64)?;
    let options = daemon::Options {
        region_mib,
        ..daemon::Options::default()
    };
    let daemon = Daemon::start(dir.path(), &options)?;
    let work = tempfile::tempdir_in(dir.path()).context("create a work directory")?;
    let workload = Workload::start(
        work.path(),
        &workload::Options {
            size_mib: 1,
            ..workload::Options::default()
        },
    )?;
    let images = dir.path().join("images");
    daemon.run(&[
        "dump",
        "--pid",
        &workload.pid().to_string(),
        "--job",
        "job0",
        "--leave-running",
    ])?;
    daemon.run(&["get".as_ref(), "job0".as_ref(), images.as_os_str()])?;
    drop(workload);
    for number in 1..checkpoints {
        interrupt.check()?;
        daemon.run(&[
            "put".as_ref(),
            format!("job{}", number % 10).as_ref(),
            images.as_os_str(),
        ])?;
    }
    daemon.kill()?;
    let start = Instant::now();
    let daemon = Daemon::start(dir.path(), &options)?;
    let after_crash = start.elapsed();
    let catalog = rig::field(&daemon.json(&["status"])?, "catalog")
        .map(ToString::to_string)
        .unwrap_or_default();
    daemon.kill()?;
    for entry in std::fs::read_dir(dir.path().join("data"))
        .context("list the data directory")?
        .flatten()
    {
        if entry.path().is_dir() {
            std::fs::remove_dir_all(entry.path()).context("remove the catalog")?;
        }
    }
    let start = Instant::now();
    let daemon = Daemon::start(dir.path(), &options)?;
    let without_catalog = start.elapsed();
    let found = rig::number(&daemon.json(&["status"])?, "checkpoints");
    anyhow::ensure!(
        found == checkpoints,
        "{found} of {checkpoints} checkpoints are there after the recovery"
    );
    daemon.stop()?;
    task.done(&format!(
        "{:.0} ms after a crash (catalog {catalog})",
        after_crash.as_secs_f64() * 1e3
    ));
    Ok(Recovery {
        checkpoints,
        after_crash,
        without_catalog,
    })
}
