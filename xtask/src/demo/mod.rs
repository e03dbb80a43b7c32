//! `cargo xtask demo`: a real process is frozen into `permafrostd`, gone, and back.

mod replay;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use permafrost_tests::criu::{self, DumpStats};
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::workload::{self, Workload};

use crate::rig::{self, Interrupt};
use crate::setup::{self, Criu};
use crate::{table, ui};

/// What is shown.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Memory of the process, MiB.
    #[arg(long, default_value_t = 256)]
    size_mib: u64,
    /// Replay a recorded conversation even where CRIU works.
    #[arg(long)]
    replay: bool,
}

/// One dump, as the table shows it.
struct Dump {
    name: &'static str,
    wall: Duration,
    stats: DumpStats,
    checkpoint: serde_json::Value,
    restore: Option<Restore>,
}

struct Restore {
    wall: Duration,
    /// CRIU's own part, microseconds; the rest is building its images directory and starting it.
    criu_us: Option<u64>,
}

/// Runs the demo. Whatever it started is gone afterwards, on an error or Ctrl-C too.
///
/// # Errors
/// Fails at the first step that does not do what it should.
pub(crate) fn run(options: &Options) -> Result<()> {
    let interrupt = Interrupt::catch()?;
    let cannot_run = match setup::criu()? {
        Criu::Works(path) => {
            ui::say(&format!("CRIU: {}", path.display()));
            None
        }
        Criu::CannotRun(why) => Some(why),
    };
    interrupt.check()?;
    rig::build_release()?;
    interrupt.check()?;
    // Two dumps, the first in full, and the images of a restore, which lie on tmpfs too.
    let region_mib = options.size_mib * 3 / 2 + 128;
    let dir = rig::memory_dir(region_mib + options.size_mib + 128)?;
    let task = ui::Task::begin("start permafrostd");
    let daemon = Daemon::start(
        dir.path(),
        &daemon::Options {
            region_mib,
            ..daemon::Options::default()
        },
    )?;
    task.done(&format!(
        "pid {}, region of {region_mib} MiB in {}",
        daemon.pid(),
        dir.path().display()
    ));
    match cannot_run {
        None if !options.replay => {
            let dumps = with_criu(options, dir.path(), &daemon, &interrupt)?;
            println!("\n{}", summary(&dumps));
        }
        why => {
            if let Some(why) = why {
                ui::say(&format!("CRIU cannot run here: {why}"));
            }
            ui::say(
                "taking the same path with a recorded conversation of CRIU 4.2.1; its process is not ours to restore",
            );
            replay::run(dir.path(), &daemon, &interrupt)?;
        }
    }
    daemon.stop()?;
    dir.close().context("remove the temporary directory")?;
    println!("nothing is left running");
    Ok(())
}

fn with_criu(
    options: &Options,
    dir: &Path,
    daemon: &Daemon,
    interrupt: &Interrupt,
) -> Result<Vec<Dump>> {
    let task = ui::Task::begin("start a process that fills its memory and counts");
    let wanted = workload::Options {
        size_mib: options.size_mib,
        ..workload::Options::default()
    };
    let mut workload = Workload::start(dir, &wanted)?;
    let pid = workload.pid();
    task.done(&format!(
        "pid {pid}, {} MiB of random pages",
        options.size_mib
    ));
    let before = workload.verify()?;
    ensure!(
        before.is_sound(),
        "the process is not sound to begin with: {before:?}"
    );
    println!(
        "  counter {}, checksum {:016x}",
        before.counter, before.checksum_found
    );
    interrupt.check()?;

    let mut first = dump("first dump", dir, daemon, pid, interrupt)?;
    workload.wait_until_gone()?;
    println!(
        "  process {pid} is gone: {}",
        if Path::new(&format!("/proc/{pid}")).exists() {
            "NO"
        } else {
            "no /proc entry"
        }
    );
    interrupt.check()?;

    first.restore = Some(restore(dir, daemon, pid)?);
    let after = workload.verify()?;
    println!(
        "  counter {} → {}, checksum {:016x}, {} bad pages",
        before.counter, after.counter, after.checksum_found, after.bad_pages
    );
    ensure!(
        after.is_sound() && after.checksum_found == before.checksum_found,
        "the restored process is not sound: {after:?}"
    );
    ensure!(after.counter >= before.counter, "the counter went back");
    interrupt.check()?;

    let modified = workload.modify()?;
    println!(
        "  a tenth of its memory modified, checksum {:016x} now",
        modified.checksum_kept
    );
    let mut second = dump("second dump", dir, daemon, pid, interrupt)?;
    workload.wait_until_gone()?;
    second.restore = Some(restore(dir, daemon, pid)?);
    let last = workload.verify()?;
    println!(
        "  counter {} → {}, checksum {:016x}, {} bad pages",
        after.counter, last.counter, last.checksum_found, last.bad_pages
    );
    ensure!(
        last.is_sound() && last.checksum_found == modified.checksum_kept,
        "the process restored again is not sound: {last:?}"
    );
    workload.kill();
    Ok(vec![first, second])
}

fn dump(
    name: &'static str,
    dir: &Path,
    daemon: &Daemon,
    pid: u32,
    interrupt: &Interrupt,
) -> Result<Dump> {
    let work = tempfile::tempdir_in(dir).context("create a work directory")?;
    let task = ui::Task::begin(&format!("permafrost dump ({name})"));
    let start = Instant::now();
    daemon.run(&[
        "dump".as_ref(),
        "--pid".as_ref(),
        pid.to_string().as_ref(),
        "--job".as_ref(),
        "demo".as_ref(),
        "--work-dir".as_ref(),
        work.path().as_os_str(),
    ])?;
    let wall = start.elapsed();
    interrupt.check()?;
    let stats = crate::bench::find_dump_stats(work.path())?;
    let checkpoint = daemon.json(&["show", "demo"])?;
    task.done(&format!("frozen for {}", ms(stats.frozen_us)));
    Ok(Dump {
        name,
        wall,
        stats,
        checkpoint,
        restore: None,
    })
}

fn restore(dir: &Path, daemon: &Daemon, pid: u32) -> Result<Restore> {
    let work = tempfile::tempdir_in(dir).context("create a work directory")?;
    let task = ui::Task::begin("permafrost restore");
    let start = Instant::now();
    daemon.run(&[
        "restore".as_ref(),
        "demo".as_ref(),
        "--keep-images".as_ref(),
        "--work-dir".as_ref(),
        work.path().as_os_str(),
    ])?;
    let wall = start.elapsed();
    task.done(&format!("process {pid} is back"));
    let criu_us = find(work.path(), "stats-restore")
        .and_then(|dir| criu::restore_stats(&dir).ok())
        .map(|stats| stats.restore_us);
    Ok(Restore { wall, criu_us })
}

/// The directory at or directly below `at` that holds `name`.
fn find(at: &Path, name: &str) -> Option<std::path::PathBuf> {
    let below = std::fs::read_dir(at)
        .ok()?
        .flatten()
        .map(|entry| entry.path());
    [at.to_path_buf()]
        .into_iter()
        .chain(below)
        .find(|dir| dir.join(name).exists())
}

fn summary(dumps: &[Dump]) -> String {
    let mut rows = vec![vec![String::new()]];
    rows[0].extend(dumps.iter().map(|dump| dump.name.to_owned()));
    let mut row = |name: &str, cell: &dyn Fn(&Dump) -> String| {
        let mut row = vec![name.to_owned()];
        row.extend(dumps.iter().map(cell));
        rows.push(row);
    };
    row("memory image", &|dump| {
        rig::mib(rig::number(&dump.checkpoint, "memory_bytes"))
    });
    row("  equal to the first dump's", &|dump| {
        rig::mib(rig::number(&dump.checkpoint, "parent_bytes"))
    });
    row("  zero", &|dump| {
        rig::mib(rig::number(&dump.checkpoint, "zero_bytes"))
    });
    row("bytes stored", &|dump| {
        rig::mib(rig::number(&dump.checkpoint, "added_bytes"))
    });
    row("dump, in all", &|dump| {
        format!("{:.0} ms", dump.wall.as_secs_f64() * 1e3)
    });
    row("  the process frozen", &|dump| ms(dump.stats.frozen_us));
    row("    reading its memory", &|dump| {
        ms(dump.stats.memdump_us.saturating_sub(dump.stats.memwrite_us))
    });
    row("    sending it", &|dump| ms(dump.stats.memwrite_us));
    row("    the rest of its state, the seal", &|dump| {
        ms(dump
            .stats
            .frozen_us
            .saturating_sub(dump.stats.memdump_us.max(dump.stats.memwrite_us)))
    });
    row("  stopping it, starting CRIU, …", &|dump| {
        format!(
            "{:.0} ms",
            dump.wall
                .saturating_sub(Duration::from_micros(dump.stats.frozen_us))
                .as_secs_f64()
                * 1e3
        )
    });
    row("restore, in all", &|dump| {
        dump.restore.as_ref().map_or("–".to_owned(), |restore| {
            format!("{:.0} ms", restore.wall.as_secs_f64() * 1e3)
        })
    });
    row("  CRIU's own part", &|dump| {
        dump.restore
            .as_ref()
            .and_then(|restore| restore.criu_us)
            .map_or("–".to_owned(), ms)
    });
    table::render(&rows)
}

fn ms(us: u64) -> String {
    format!("{:.0} ms", Duration::from_micros(us).as_secs_f64() * 1e3)
}
