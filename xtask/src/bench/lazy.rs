//! `cargo xtask bench lazy`: lazy restores of real processes, beside plain ones. Measures the time until the process runs,
//! and the rate at which its memory follows.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use permafrost_tests::cluster::pki;
use permafrost_tests::contents::Contents;
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::workload::{self, Workload};
use serde_json::{Value, json};

use crate::rig::{self, Interrupt};
use crate::{table, ui};

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Options {
    /// Sizes of the restored process, MiB.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 512, 1024, 4096])]
    sizes: Vec<u64>,
    /// Restores of each size in each way, in turn.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Restore through an agent, to which the pages come over QUIC.
    #[arg(long)]
    agent: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Durations of one round, milliseconds.
struct Sample {
    /// From the start of a lazy restore until the process runs.
    running: f64,
    /// CRIU's part of that.
    criu: f64,
    /// Until all memory is there, from when the process runs.
    rest: f64,
    /// A plain restore.
    plain: f64,
}

/// Medians at one size.
struct Row {
    size_mib: u64,
    running_ms: f64,
    /// Of the difference to CRIU's own duration.
    above_criu_ms: f64,
    gb_per_s: f64,
    plain_ms: f64,
}

pub(super) fn run(options: &Options) -> Result<()> {
    super::criu()?;
    rig::build_release()?;
    let interrupt = Interrupt::catch()?;
    let mut rows = Vec::new();
    for &size_mib in &options.sizes {
        let task = ui::Task::begin(&format!("{size_mib} MiB, {} restores each", options.runs));
        let row = measure(size_mib, options, &interrupt)?;
        task.done(&format!("runs after {:.0} ms", row.running_ms));
        rows.push(row);
    }
    let json = || json!({ "lazy": rows.iter().map(Row::json).collect::<Vec<_>>() });
    super::show(options.json, json, || text(&rows))
}

fn measure(size_mib: u64, options: &Options, interrupt: &Interrupt) -> Result<Row> {
    let region_mib = size_mib + size_mib / 4 + 256;
    let dir = rig::memory_dir(region_mib + 256)?;
    let mut region = daemon::Options {
        region_mib,
        ..daemon::Options::default()
    };
    if options.agent {
        let identity = issue(dir.path(), "store", &["--role", "node"])?;
        let peers = ["--listen-peers", "127.0.0.1:0", "--identity"].map(str::to_owned);
        region.extra.extend(peers.into_iter().chain([identity]));
    }
    let daemon = Daemon::start(dir.path(), &region)?;
    super::settle(&daemon)?;
    let agent = options.agent.then(|| agent(dir.path(), &daemon));
    let agent = agent.transpose()?;
    let at = dir.path().join("task");
    std::fs::create_dir(&at).context("create the task's directory")?;
    let wanted = workload::Options {
        size_mib,
        contents: Contents::Random,
        ..workload::Options::default()
    };
    let mut task = Workload::start(&at, &wanted)?;
    let pid = task.pid().to_string();
    daemon.run(&["dump", "--job", "lazy", "--pid", &pid])?;
    task.wait_until_gone()?;
    let mut samples = Vec::new();
    let reader = agent.as_ref().unwrap_or(&daemon);
    for _ in 0..options.runs {
        interrupt.check()?;
        let lazy = restore(reader, &mut task, &["restore", "lazy", "--lazy"])?;
        let plain = restore(reader, &mut task, &["restore", "lazy"])?;
        let running = ms(&lazy["lazy"]["running_us"])?;
        samples.push(Sample {
            running,
            criu: ms(&lazy["criu_us"])?,
            rest: ms(&lazy["total_us"])? - running,
            plain: ms(&plain["total_us"])?,
        });
    }
    let bytes = (size_mib << 20) as f64;
    Ok(Row {
        size_mib,
        running_ms: median(&samples, |sample| sample.running),
        above_criu_ms: median(&samples, |sample| sample.running - sample.criu),
        gb_per_s: bytes / 1e6 / median(&samples, |sample| sample.rest).max(0.001),
        plain_ms: median(&samples, |sample| sample.plain),
    })
}

/// Starts an agent of a node.
fn agent(dir: &Path, node: &Daemon) -> Result<Daemon> {
    let rights = ["--role", "agent", "--namespace", "default"];
    let identity = issue(dir, "compute", &rights)?;
    let at = dir.join("agent");
    std::fs::create_dir(&at).context("create the agent's directory")?;
    let node = format!("--node=store={}", node.peers());
    Daemon::agent(&at, &["--identity", &identity, &node])
}

/// Issues a certificate, and returns the path of its directory.
fn issue(dir: &Path, name: &str, rights: &[&str]) -> Result<String> {
    let ca = dir.join("ca").display().to_string();
    if !Path::new(&ca).exists() {
        pki(&["init", "--dir", &ca])?;
    }
    let out = dir.join(name).display().to_string();
    let mut line = vec!["issue", "--dir", &ca, "--name", name, "--out", &out];
    line.extend(rights);
    pki(&line)?;
    Ok(out)
}

/// Restores the task, verifies its memory, and ends it. Returns the command's report.
fn restore(daemon: &Daemon, task: &mut Workload, line: &[&str]) -> Result<Value> {
    let report = daemon.json(line)?;
    let status = task.verify()?;
    ensure!(
        status.is_sound(),
        "the restored process is not sound: {status:?}"
    );
    task.kill();
    task.wait_until_gone()?;
    Ok(report)
}

fn ms(micros: &Value) -> Result<f64> {
    let micros = micros.as_u64().context("a duration in the report")?;
    Ok(Duration::from_micros(micros).as_secs_f64() * 1e3)
}

fn median(samples: &[Sample], of: impl Fn(&Sample) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

impl Row {
    fn json(&self) -> Value {
        json!({
            "size_mib": self.size_mib,
            "running_ms": self.running_ms,
            "above_criu_ms": self.above_criu_ms,
            "gb_per_s": self.gb_per_s,
            "plain_ms": self.plain_ms,
        })
    }
}

fn text(rows: &[Row]) -> String {
    let head = [
        "MiB",
        "runs after, ms",
        "of that above CRIU's own, ms",
        "memory follows at, GB/s",
        "plain restore, ms",
    ];
    let mut cells = vec![head.map(str::to_owned).to_vec()];
    cells.extend(rows.iter().map(|row| {
        vec![
            row.size_mib.to_string(),
            format!("{:.0}", row.running_ms),
            format!("{:.0}", row.above_criu_ms),
            format!("{:.1}", row.gb_per_s),
            format!("{:.0}", row.plain_ms),
        ]
    }));
    table::render(&cells)
}
