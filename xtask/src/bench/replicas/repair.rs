//! `cargo xtask bench repair`: how fast the copies of a node that leaves are made anew on another, with nothing else
//! going on and while dumps come in, and what that does to the dumps.
//!
//! Three nodes, two copies: the first has one of everything and takes the dumps, the other two drain in turn.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use permafrost_tests::contents::Contents;
use permafrost_tests::process;
use permafrost_tests::workload::{self, Workload};
use serde_json::{Value, json};

use super::contenders;
use super::site::{self, Nodes, Site, Size};
use crate::bench::figures::{as_f64, median, spread};
use crate::rig::{self, Interrupt};
use crate::{table, ui};

/// Growth of a region that shows that copies have begun to arrive, bytes.
const BEGUN: u64 = 8 << 20;
/// Time limit of a round: only one that hangs takes longer.
const LIMIT: Duration = Duration::from_secs(600);
/// Period at which the list of checkpoints is polled.
const LOOK: Duration = Duration::from_millis(100);

/// Options of the bench.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Amount of data that is copied, MiB.
    #[arg(long, default_value_t = 2048)]
    size: u64,
    /// Size of each of these checkpoints, and of the process that is dumped meanwhile, MiB.
    #[arg(long, default_value_t = 128)]
    each: u64,
    /// MTU of the link, bytes.
    #[arg(long, default_value_t = 1500, value_parser = clap::value_parser!(u32).range(1280..=9000))]
    mtu: u32,
    /// Rounds of each kind, in turn.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Measurements, one value for each round or dump.
#[derive(Clone, Debug, Default)]
struct Found {
    /// Speed of the bare quinn pair, MB/s.
    bare: Vec<f64>,
    /// Speed of repair with nothing else going on, MB/s.
    alone: Vec<f64>,
    /// Processor time of all nodes meanwhile, s/GB.
    alone_cpu: Vec<f64>,
    /// Speed of repair while dumps come in, MB/s.
    beside: Vec<f64>,
    /// Freeze times of dumps with nothing else going on, ms.
    dumps_alone: Vec<f64>,
    /// Freeze times of dumps during repair, ms.
    dumps_beside: Vec<f64>,
    /// Time from the drain to the first byte, s.
    begun_after: Vec<f64>,
}

/// Runs the bench and prints what it found.
///
/// # Errors
/// As `bench replicas`, and when the copies are not made.
pub(crate) fn run(options: &Options) -> Result<()> {
    let criu = crate::bench::criu()?;
    ensure!(
        options.runs > 0 && options.each > 0 && options.size >= options.each,
        "nothing to measure"
    );
    rig::build_release()?;
    let interrupt = Interrupt::catch()?;
    let size = Size {
        hosts: 3,
        mtu: options.mtu,
        mbit: None,
        // Dumps of a round are removed after it.
        node_mib: Some(options.size + 8 * options.each),
        images_mib: 0,
    };
    let site = Site::new(&criu, &size)?;
    let cluster = Cluster {
        site: &site,
        nodes: site.nodes()?,
        interrupt: &interrupt,
        options,
    };
    let found = cluster.measure().with_context(|| cluster.nodes.logs())?;
    site.stop()?;
    crate::bench::show(options.json, || found.json(options), || found.text(options))
}

struct Cluster<'a> {
    site: &'a Site,
    nodes: &'a Nodes,
    interrupt: &'a Interrupt,
    options: &'a Options,
}

impl Cluster<'_> {
    fn measure(&self) -> Result<Found> {
        let mut found = Found::default();
        // Out of the way while nodes 0 and 1 are filled.
        self.set(2, "drain")?;
        self.fill()?;
        let work = self.site.work_dir()?;
        let wanted = workload::Options {
            size_mib: self.options.each,
            ..workload::Options::default()
        };
        let task = self
            .site
            .here()
            .run(|| Workload::start(work.path(), &wanted))
            .context("start a process to dump")?;
        let (mut leaving, mut target) = (1, 2);
        for run in 1..=self.options.runs {
            let of = format!("run {run} of {}", self.options.runs);
            let doing = ui::Task::begin(&format!("bare QUIC, {of}"));
            let bare = contenders::bare_quic(self.site, self.options.size, self.interrupt)?;
            found.bare.push(self.speed(bare.wall_ms / 1e3));
            doing.done(&bare.to_string());

            let doing = ui::Task::begin(&format!("dumps alone, {of}"));
            for _ in 0..3 {
                found.dumps_alone.push(self.dump(&task)?);
            }
            self.forget_dumps()?;
            doing.done("done");

            let doing = ui::Task::begin(&format!("repair alone, {of}"));
            let round = self.round(leaving, target, None)?;
            found.alone.push(self.speed(round.seconds));
            found.alone_cpu.push(round.cpu_s * 1e9 / self.bytes());
            found.begun_after.push(round.begun_after_s);
            std::mem::swap(&mut leaving, &mut target);
            doing.done(&format!("{:.1} s", round.seconds));

            let doing = ui::Task::begin(&format!("repair and dumps, {of}"));
            let round = self.round(leaving, target, Some(&task))?;
            found.beside.push(self.speed(round.seconds));
            found.dumps_beside.extend(round.frozen_ms);
            std::mem::swap(&mut leaving, &mut target);
            doing.done(&format!("{:.1} s", round.seconds));
        }
        Ok(found)
    }

    /// Makes checkpoints of processes that share no pages, on the two nodes that are not drained.
    fn fill(&self) -> Result<()> {
        for number in 0..self.count() {
            let task = ui::Task::begin(&format!("fill, {} of {}", number + 1, self.count()));
            self.interrupt.check()?;
            let work = self.site.work_dir()?;
            let wanted = workload::Options {
                size_mib: self.options.each,
                contents: Contents::Random,
                seed: number + 2,
                ..workload::Options::default()
            };
            let process = self
                .site
                .here()
                .run(|| Workload::start(work.path(), &wanted))
                .context("start a process to dump")?;
            let pid = process.pid().to_string();
            let job = format!("fill-{number}");
            self.nodes.daemons[0].run(&["dump", "--pid", &pid, "--job", &job])?;
            task.done("dumped");
        }
        ensure!(
            self.held_by(1)? == self.count(),
            "not everything is on nodes 0 and 1"
        );
        Ok(())
    }

    /// Drains `leaving`, and waits until `target` holds everything. With `task`, dumps it repeatedly meanwhile.
    fn round(&self, leaving: usize, target: usize, task: Option<&Workload>) -> Result<Round> {
        // What it had before goes first, and is gone when the rest of its region is as it was.
        process::wait_for("an empty target", LIMIT, || {
            self.interrupt.check()?;
            std::thread::sleep(LOOK);
            let held = self.nodes.used_by(target)?;
            Ok(
                (self.held_by(target)? == 0 && held < self.nodes.empty(target) + BEGUN)
                    .then_some(()),
            )
        })?;
        self.nodes.settle()?;
        self.set(target, "undrain")?;
        let empty = self.nodes.used_by(target)?;
        let cpu = self.cpu()?;
        self.set(leaving, "drain")?;
        let drained = Instant::now();
        process::wait_for("the first copied byte", LIMIT, || {
            self.interrupt.check()?;
            Ok((self.nodes.used_by(target)? > empty + BEGUN).then_some(()))
        })?;
        let begun = Instant::now();
        let mut frozen_ms = Vec::new();
        process::wait_for("the copies", LIMIT, || {
            self.interrupt.check()?;
            match task {
                Some(task) => frozen_ms.push(self.dump(task)?),
                None => std::thread::sleep(LOOK),
            }
            Ok((self.held_by(target)? == self.count()).then_some(()))
        })?;
        let seconds = begun.elapsed().as_secs_f64();
        let cpu_s = self.cpu()? - cpu;
        self.forget_dumps()?;
        Ok(Round {
            begun_after_s: (begun - drained).as_secs_f64(),
            seconds,
            cpu_s,
            frozen_ms,
        })
    }

    /// Dumps `task` and returns the time for which it was frozen, ms.
    fn dump(&self, task: &Workload) -> Result<f64> {
        let dumped = self.nodes.daemons[0].json(&[
            "dump",
            "--pid",
            &task.pid().to_string(),
            "--job",
            "meanwhile",
            "--full",
            "--leave-running",
        ])?;
        // One at a time is kept, so that no region fills.
        let frozen = Duration::from_micros(rig::number(&dumped, "frozen_time"));
        self.nodes.daemons[0].run(&["rm", "meanwhile", "--all"])?;
        Ok(frozen.as_secs_f64() * 1e3)
    }

    fn forget_dumps(&self) -> Result<()> {
        let _ = self.nodes.daemons[0].try_run(&["rm", "meanwhile", "--all"])?;
        self.nodes.settle()
    }

    fn set(&self, node: usize, what: &str) -> Result<()> {
        self.nodes.daemons[0]
            .run(&["node", what, &site::name(node)])
            .map(drop)
    }

    /// Returns the number of checkpoints that are listed with this node.
    fn held_by(&self, node: usize) -> Result<u64> {
        let listed = self.nodes.daemons[0].json(&["ls"])?;
        Ok(copies_on(&listed, &site::name(node)))
    }

    fn cpu(&self) -> Result<f64> {
        let times = self.nodes.cpu_time()?;
        Ok(times.iter().map(Duration::as_secs_f64).sum())
    }

    fn count(&self) -> u64 {
        self.options.size / self.options.each
    }

    fn bytes(&self) -> f64 {
        as_f64((self.count() * self.options.each) << 20)
    }

    /// Returns the speed of a repair that took so many seconds, MB/s.
    fn speed(&self, seconds: f64) -> f64 {
        self.bytes() / seconds / 1e6
    }
}

struct Round {
    begun_after_s: f64,
    seconds: f64,
    cpu_s: f64,
    frozen_ms: Vec<f64>,
}

/// Counts the checkpoints copied by repair that are on `node`, in the output of `permafrost --json ls`.
fn copies_on(listed: &Value, node: &str) -> u64 {
    let checkpoints = listed["checkpoints"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let is_there = |checkpoint: &&Value| {
        checkpoint["job"]
            .as_str()
            .is_some_and(|job| job.starts_with("fill-"))
            && checkpoint["nodes"]
                .as_array()
                .is_some_and(|nodes| nodes.iter().any(|name| name == node))
    };
    u64::try_from(checkpoints.iter().filter(is_there).count()).unwrap_or(u64::MAX)
}

impl Found {
    fn rows(&self) -> Vec<(&'static str, &'static str, Vec<f64>, Option<f64>)> {
        let sorted = |values: &[f64]| {
            let mut values = values.to_vec();
            values.sort_by(f64::total_cmp);
            values
        };
        let ratio = |values: &[f64], base: &[f64]| {
            let base = median(&sorted(base)).filter(|&base| base > 0.0)?;
            Some(median(&sorted(values))? / base)
        };
        vec![
            ("bare QUIC", "MB/s", sorted(&self.bare), None),
            (
                "repair alone, of that",
                "MB/s",
                sorted(&self.alone),
                ratio(&self.alone, &self.bare),
            ),
            (
                "repair beside dumps, of alone",
                "MB/s",
                sorted(&self.beside),
                ratio(&self.beside, &self.alone),
            ),
            ("frozen, dumps alone", "ms", sorted(&self.dumps_alone), None),
            (
                "frozen, dumps beside repair, of that",
                "ms",
                sorted(&self.dumps_beside),
                ratio(&self.dumps_beside, &self.dumps_alone),
            ),
            (
                "CPU of all nodes, repair alone",
                "s/GB",
                sorted(&self.alone_cpu),
                None,
            ),
            (
                "from the drain to the first byte",
                "s",
                sorted(&self.begun_after),
                None,
            ),
        ]
    }

    fn text(&self, options: &Options) -> String {
        let mut rows = vec![
            ["", "median (least–most)", "ratio"]
                .map(str::to_owned)
                .to_vec(),
        ];
        for (name, unit, values, ratio) in self.rows() {
            rows.push(vec![
                format!("{name} ({unit})"),
                spread(&values),
                ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}")),
            ]);
        }
        format!(
            "\n{} MiB in checkpoints of {} MiB, MTU {}\n{}",
            options.size,
            options.each,
            options.mtu,
            table::render(&rows)
        )
    }

    fn json(&self, options: &Options) -> Value {
        let figures: serde_json::Map<String, Value> = self
            .rows()
            .into_iter()
            .map(|(name, unit, values, ratio)| {
                let figure = json!({"median": median(&values), "values": values, "ratio": ratio});
                (format!("{name} ({unit})"), figure)
            })
            .collect();
        json!({"size_mib": options.size, "each_mib": options.each, "mtu": options.mtu, "figures": figures})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_copies_of_what_was_filled_count() {
        let listed = json!({"checkpoints": [
            {"job": "fill-1", "nodes": ["n0", "n2"]},
            {"job": "fill-2", "nodes": ["n0", "n1"]},
            {"job": "meanwhile", "nodes": ["n0", "n2"]},
            {"job": "fill-3"},
        ]});
        assert_eq!(copies_on(&listed, "n0"), 2);
        assert_eq!(copies_on(&listed, "n2"), 1);
        assert_eq!(copies_on(&json!({}), "n2"), 0);
    }

    #[test]
    fn ratios_are_of_medians() {
        let found = Found {
            bare: vec![100.0, 400.0, 200.0],
            alone: vec![50.0],
            beside: vec![10.0],
            ..Found::default()
        };
        let rows = found.rows();
        assert_eq!(rows[1].3, Some(0.25));
        assert_eq!(rows[2].3, Some(0.2));
        assert_eq!(rows[4].3, None);
    }
}
