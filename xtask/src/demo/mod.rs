//! `cargo xtask demo`: freezes a real process into `permafrostd`, shows that it is gone, and restores it.

mod lazy;
mod replay;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::status::Status;
use permafrost_tests::workload::{self, Workload};
use serde_json::Value;

use crate::rig::{self, Interrupt};
use crate::setup::{self, Criu};
use crate::{table, ui};

/// Options of the demonstration.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Memory of the process, MiB.
    #[arg(long, default_value_t = 256)]
    size_mib: u64,
    /// Replay a recorded conversation even where CRIU works.
    #[arg(long, conflicts_with = "lazy")]
    replay: bool,
    /// Start many clones of one process lazily, on the two nodes of a cluster.
    #[arg(long)]
    lazy: bool,
    /// Clones that --lazy starts at once. Each comes to have a memory of its own.
    #[arg(long, default_value_t = 8, requires = "lazy")]
    clones: usize,
    /// Bring only what the clones access: for more of them than the machine has memory for.
    #[arg(long, requires = "lazy")]
    touched_only: bool,
}

/// One dump and the restore from it, as the table shows them.
struct Dump {
    name: &'static str,
    /// Output of `permafrost --json dump` and `permafrost --json restore`.
    dumped: Value,
    restored: Value,
}

/// Runs the demo. Everything that it has started is ended afterwards, also on an error or Ctrl-C.
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
    rig::build_programs()?;
    interrupt.check()?;
    if options.lazy {
        if let Some(why) = cannot_run {
            bail!("CRIU cannot run here: {why}");
        }
        lazy::run(options, &interrupt)?;
        println!("nothing is left running");
        return Ok(());
    }
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
            let dumps = with_criu(options, dir.path(), &daemon, &interrupt).inspect_err(|_| {
                eprintln!(
                    "the end of permafrostd's log:\n{}",
                    daemon::tail(&daemon.log())
                )
            })?;
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
    // It counts about once a millisecond.
    std::thread::sleep(Duration::from_millis(500));
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

    let dumped = dump("first dump", daemon, pid)?;
    workload.wait_until_gone()?;
    let proc = format!("/proc/{pid}");
    ensure!(!Path::new(&proc).exists(), "process {pid} is still there");
    println!("  process {pid} is gone: there is no {proc}");
    interrupt.check()?;
    let restored = restore(daemon, pid)?;
    let first = Dump {
        name: "first dump",
        dumped,
        restored,
    };
    let after = workload.verify()?;
    say_sound(&before, &after);
    ensure!(
        after.is_sound() && after.checksum_found == before.checksum_found,
        "the restored process is not sound: {after:?}"
    );
    ensure!(after.counter >= before.counter, "the counter went back");
    interrupt.check()?;

    let modified = workload.modify()?;
    println!(
        "  a tenth of its memory modified: checksum {:016x}",
        modified.checksum_kept
    );
    let dumped = dump("second dump", daemon, pid)?;
    workload.wait_until_gone()?;
    interrupt.check()?;
    let restored = restore(daemon, pid)?;
    let second = Dump {
        name: "second dump",
        dumped,
        restored,
    };
    let last = workload.verify()?;
    say_sound(&modified, &last);
    ensure!(
        last.is_sound() && last.checksum_found == modified.checksum_kept,
        "the process restored again is not sound: {last:?}"
    );
    workload.kill();
    Ok(vec![first, second])
}

fn say_sound(before: &Status, after: &Status) {
    println!(
        "  its counter went on from {} to {}; checksum {:016x}, {} bad pages",
        before.counter, after.counter, after.checksum_found, after.bad_pages
    );
}

fn dump(name: &str, daemon: &Daemon, pid: u32) -> Result<Value> {
    let task = ui::Task::begin(&format!("permafrost dump ({name})"));
    let dumped = daemon.json(&["dump", "--pid", &pid.to_string(), "--job", "demo"])?;
    task.done(&format!(
        "the process was frozen for {}",
        ms(rig::number(&dumped, "frozen_time"))
    ));
    Ok(dumped)
}

fn restore(daemon: &Daemon, pid: u32) -> Result<Value> {
    let task = ui::Task::begin("permafrost restore");
    let restored = daemon.json(&["restore", "demo"])?;
    task.done(&format!("process {pid} is back"));
    Ok(restored)
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
        rig::mib(rig::number(&dump.dumped, "memory_bytes"))
    });
    row("  equal to the dump before", &|dump| {
        rig::mib(rig::number(&dump.dumped, "parent_bytes"))
    });
    row("  zero", &|dump| {
        rig::mib(rig::number(&dump.dumped, "zero_bytes"))
    });
    row("bytes stored", &|dump| {
        rig::mib(rig::number(&dump.dumped, "added_bytes"))
    });
    // CRIU counts writing pages as part of dumping memory, and that as part of the frozen time.
    let us = |dump: &Dump, field: &str| rig::number(&dump.dumped, field);
    let less = |dump: &Dump, all: &str, parts: &[&str]| {
        ms(parts.iter().fold(us(dump, all), |left, part| {
            left.saturating_sub(us(dump, part))
        }))
    };
    row("dump, in all", &|dump| ms(us(dump, "total_us")));
    row("  the process frozen", &|dump| ms(us(dump, "frozen_time")));
    row("    reading its memory", &|dump| {
        less(dump, "memdump_time", &["memwrite_time"])
    });
    row("    sending it", &|dump| ms(us(dump, "memwrite_time")));
    row("    sealing", &|dump| ms(us(dump, "seal_us")));
    row("    the rest of its state", &|dump| {
        less(dump, "frozen_time", &["memdump_time", "seal_us"])
    });
    row("  before and after: starting CRIU, …", &|dump| {
        less(dump, "total_us", &["frozen_time"])
    });
    let us = |dump: &Dump, field: &str| rig::number(&dump.restored, field);
    row("restore, in all", &|dump| ms(us(dump, "total_us")));
    row("  laying out the images", &|dump| ms(us(dump, "fetch_us")));
    row("  CRIU", &|dump| ms(us(dump, "criu_us")));
    table::render(&rows)
}

fn ms(us: u64) -> String {
    format!("{:.0} ms", Duration::from_micros(us).as_secs_f64() * 1e3)
}
