//! `permafrost bench node`: measures how fast a running permafrostd takes dumps and serves restores.
//!
//! Makes real dumps of a process of the benchmark's own, into a job of its own that is removed afterwards. The
//! results are the figures with which a node starts; they are sent to its API.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use permafrost_api_types::figures::{StartFigures, StartRate, StartTime};
use permafrost_api_types::quantity;
use permafrost_criu::Criu;
use permafrost_protocol::control::{ServerStatus, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::progress::ProgressDisplay;
use permafrost_terminal::table::{Align, Table, facts};
use permafrost_transport::api::{ApiClient, ApiOptions};
use serde::Serialize;

use super::cycle::{self, How, Target};
use super::fit::{Fit, median};
use super::machine;
use super::task::{Task, Work};
use super::tiers::parse_size;
use super::workload::Contents;

pub(crate) const EXAMPLES: &str = "\
Dumps and restores a process of its own, of each size so many times, into a job of its own (bench/node-PID), which it \
removes. The node is not told to stop anything else: run it while the node has nothing to do. What comes of it are \
figures that the node starts from (`PUT /v1/figures` on the API's socket beside the control socket).

In a cluster only the node itself is measured (--durability local). Restores come from what the node has in memory, \
as those of a task do that was preempted just now.

Exit codes: 0 done; 3 no node there; 5 CRIU failed; 6 no room for the smallest size; 9 not root; 10 permafrostd cannot \
be reached; 130 interrupted.

Examples:
    permafrost bench node
    permafrost bench node --sizes 64M,1G --runs 5 --out figures.json
";

/// Memory that is left to other programs, bytes.
const OTHERS_BYTES: u64 = 256 << 20;

#[derive(Debug, Args)]
pub(crate) struct NodeArguments {
    /// Memory of the processes.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "8M,64M,512M,2G", value_parser = parse_size)]
    sizes: Vec<u64>,
    /// How often each is measured.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// What fills the memory.
    #[arg(long, value_enum, default_value = "random")]
    contents: Contents,
    /// Write the figures into this file, as `PUT /v1/figures` takes them.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Only measure: do not have the node start from the figures.
    #[arg(long)]
    no_install: bool,
    /// CRIU program.
    #[arg(long, value_name = "PATH", env = "PERMAFROST_CRIU")]
    criu: Option<PathBuf>,
}

/// Measurement of one suspend and resume.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    /// Number of bytes moved.
    bytes: u64,
    suspend_s: f64,
    resume_s: f64,
}

/// Report that the command prints.
#[derive(Debug, Serialize)]
struct Report {
    /// Guarantee of the medium as the node reports it, including whether it is emulated.
    medium: String,
    emulated: bool,
    /// Sizes that were left out, with the reasons.
    skipped: Vec<String>,
    samples: Vec<Sample>,
    /// Figures in the format of `PUT /v1/figures`.
    figures: StartFigures,
}

pub(super) fn node(context: &Context, arguments: &NodeArguments) -> Result<(), Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new(
            Code::Denied,
            "CRIU freezes and restores processes as root only",
        ));
    }
    let status = context.connect()?.call(request::Status {})?;
    if status.agent {
        return Err(
            Failure::new(Code::Invalid, "this is an agent: it stores nothing itself")
                .hint("run it on a storage node"),
        );
    }
    Criu::new(arguments.criu.clone()).version()?;
    let interrupts = Interrupts::install()?;
    let scratch = tempfile::Builder::new()
        .prefix("permafrost-bench-node-")
        .tempdir()
        .map_err(|error| Failure::io("create", &std::env::temp_dir(), &error))?;
    let bench = Bench {
        context,
        arguments,
        interrupts: &interrupts,
        directory: scratch.path().to_owned(),
        job: format!("bench/node-{}", std::process::id()),
        in_cluster: status.cluster.is_some(),
    };
    let measured = bench.measure(&status);
    // However it ended.
    bench.clear();
    let (samples, skipped) = measured?;
    let guarantee = |status: &ServerStatus| {
        let region = status.regions.first();
        region.map_or_else(String::new, |region| region.guarantee.clone())
    };
    let medium = guarantee(&status);
    let report = Report {
        emulated: medium.starts_with("emulated"),
        medium,
        skipped,
        figures: figures_of(&samples)?,
        samples,
    };
    if let Some(out) = &arguments.out {
        let json = serde_json::to_vec_pretty(&report.figures)
            .map_err(|error| Failure::new(Code::Internal, format!("write JSON: {error}")))?;
        fs::write(out, json).map_err(|error| Failure::io("write", out, &error))?;
    }
    context.print(&report, human_report)?;
    if arguments.no_install {
        return Ok(());
    }
    install(context, &report.figures)
}

/// Sends the figures to the node, which then starts its estimates from them.
fn install(context: &Context, figures: &StartFigures) -> Result<(), Failure> {
    let api = ApiClient::new(&ApiOptions::beside(&context.socket))?;
    api.put("/v1/figures", figures).map_err(|error| {
        Failure::from(error)
            .during("the figures were measured, but the node did not take them")
            .hint("give --no-install to measure only")
    })?;
    context.remark("the node starts from these figures");
    Ok(())
}

struct Bench<'a> {
    context: &'a Context,
    arguments: &'a NodeArguments,
    interrupts: &'a Interrupts,
    directory: PathBuf,
    job: String,
    in_cluster: bool,
}

impl Bench<'_> {
    fn target(&self) -> Target<'_> {
        Target {
            socket: &self.context.socket,
            job: &self.job,
            criu: self.arguments.criu.as_deref(),
        }
    }

    /// Measures all sizes. Returns the samples, and the sizes that were left out.
    fn measure(&self, status: &ServerStatus) -> Result<(Vec<Sample>, Vec<String>), Failure> {
        let free_bytes = status.regions.iter().map(|region| region.free_bytes).sum();
        let mut sizes = self.arguments.sizes.clone();
        sizes.sort_unstable();
        sizes.dedup();
        let (mut fitting, mut skipped) = (Vec::new(), Vec::new());
        for size_bytes in sizes {
            match room(size_bytes, free_bytes) {
                Ok(()) => fitting.push(size_bytes),
                Err(reason) => skipped.push(format!("{}: {reason}", human::bytes(size_bytes))),
            }
        }
        if fitting.is_empty() {
            return Err(Failure::new(Code::NoSpace, skipped.join("; ")));
        }
        let runs = u64::from(self.arguments.runs);
        let total_bytes = fitting.iter().sum::<u64>() * runs;
        let mut progress = ProgressDisplay::new(self.context, "bench node");
        let (mut samples, mut done_bytes) = (Vec::new(), 0);
        for size_bytes in fitting {
            let work = Work::idle(size_bytes, self.arguments.contents, 1);
            let mut task = Task::start(&self.directory, &work)?;
            task.await_report(self.interrupts)?;
            for _ in 0..runs {
                samples.push(self.once(&mut task)?);
                done_bytes += size_bytes;
                progress.update(done_bytes, total_bytes);
            }
        }
        Ok((samples, skipped))
    }

    /// Makes one full dump and the restore after it.
    fn once(&self, task: &mut Task) -> Result<Sample, Failure> {
        let how = How {
            durability: self.in_cluster.then_some("local"),
            ..How::default()
        };
        let suspended = cycle::suspend(&self.target(), task.pid(), how, self.interrupts)?;
        task.await_gone()?;
        let resumed = cycle::resume(&self.target(), self.interrupts)?;
        task.check(self.interrupts)?;
        // Removes the checkpoint, so that the next dump is not compared with it.
        cycle::remove(&self.target(), self.interrupts)?;
        Ok(Sample {
            bytes: suspended.memory_bytes,
            suspend_s: suspended.total.as_secs_f64(),
            resume_s: resumed.as_secs_f64(),
        })
    }

    /// Removes what a failed run has left.
    fn clear(&self) {
        let request = request::Remove {
            checkpoint: self.job.clone(),
            all_generations: true,
            force: true,
            last: true,
        };
        if let Ok(mut connection) = self.context.connect() {
            // Nothing there is what it should be.
            let _ = connection.call(request);
        }
    }
}

fn room(size_bytes: u64, free_bytes: u64) -> Result<(), String> {
    let needed_bytes = size_bytes + size_bytes / 8 + (16 << 20);
    if needed_bytes > free_bytes {
        return Err(format!(
            "needs {} in the region, {} are free",
            human::bytes(needed_bytes),
            human::bytes(free_bytes)
        ));
    }
    let available_bytes = machine::available_memory_bytes();
    if size_bytes + OTHERS_BYTES > available_bytes {
        return Err(format!(
            "needs {} of memory, {} are available",
            human::bytes(size_bytes + OTHERS_BYTES),
            human::bytes(available_bytes)
        ));
    }
    Ok(())
}

/// Computes the figures: fixed times from the line through the sizes' medians, and bandwidths from the
/// remaining time of each sample.
fn figures_of(samples: &[Sample]) -> Result<StartFigures, Failure> {
    let (dump_start, write) = one_way(samples, |sample| sample.suspend_s)?;
    let (restore_start, read) = one_way(samples, |sample| sample.resume_s)?;
    Ok(StartFigures {
        write,
        read,
        dump_start,
        restore_start,
        ..StartFigures::default()
    })
}

fn one_way(
    samples: &[Sample],
    seconds: fn(&Sample) -> f64,
) -> Result<(Option<StartTime>, Vec<StartRate>), Failure> {
    let mut groups: Vec<Vec<&Sample>> = Vec::new();
    for sample in samples {
        // Sizes of one process differ by a page here and there; those of different ones by far more.
        let alike = |other: &Sample| other.bytes.abs_diff(sample.bytes) <= sample.bytes / 50;
        let mut known = groups.iter_mut();
        match known.find(|group| group.first().is_some_and(|first| alike(first))) {
            Some(group) => group.push(sample),
            None => groups.push(vec![sample]),
        }
    }
    let points: Vec<(u64, f64)> = groups
        .iter()
        .filter_map(|group| {
            let bytes = group.first()?.bytes;
            Some((bytes, median(group.iter().map(|sample| seconds(sample)))))
        })
        .collect();
    let line = Fit::through(&points).filter(|line| line.s_per_gb > 0.0);
    // Never all of the smallest one's time: something was moved in it.
    let least_s = points.iter().map(|point| point.1).fold(f64::MAX, f64::min);
    let start_s = line.map(|line| line.fixed_s.clamp(0.0, least_s * 0.9));
    let wrong = |error: &dyn std::fmt::Display| Failure::new(Code::Internal, error.to_string());
    let mut rates = Vec::new();
    for (group, (bytes, median_s)) in groups.iter().zip(&points) {
        let longest_s = group
            .iter()
            .map(|sample| seconds(sample))
            .fold(0.0, f64::max);
        let rate = |seconds: f64| {
            let value = *bytes as f64 / (seconds - start_s.unwrap_or_default());
            quantity::BytesPerSecond::new(value).map_err(|error| wrong(&error))
        };
        rates.push(StartRate {
            size_bytes: quantity::Bytes::try_from(*bytes).map_err(|error| wrong(&error))?,
            p50_bytes_per_s: rate(*median_s)?,
            p95_bytes_per_s: Some(rate(longest_s)?),
        });
    }
    let start = match start_s {
        None => None,
        Some(start_s) => Some(StartTime {
            p50_s: quantity::Seconds::new(start_s).map_err(|error| wrong(&error))?,
            p95_s: None,
        }),
    };
    Ok((start, rates))
}

fn human_report(report: &Report) -> String {
    let mut table = Table::new([
        ("MEMORY", Align::Right),
        ("WRITE", Align::Right),
        ("SLOWEST", Align::Right),
        ("READ", Align::Right),
        ("SLOWEST", Align::Right),
    ]);
    let rate = |rate: Option<quantity::BytesPerSecond>| {
        rate.map_or_else(String::new, |rate| {
            format!("{:.1} MB/s", rate.value() / 1e6)
        })
    };
    let figures = &report.figures;
    for (write, read) in figures.write.iter().zip(&figures.read) {
        table.row([
            human::bytes(write.size_bytes.count()),
            rate(Some(write.p50_bytes_per_s)),
            rate(write.p95_bytes_per_s),
            rate(Some(read.p50_bytes_per_s)),
            rate(read.p95_bytes_per_s),
        ]);
    }
    let time = |time: &Option<StartTime>| match time {
        Some(time) => human::duration(Duration::from_secs_f64(time.p50_s.value())),
        None => "not known: takes two sizes".to_owned(),
    };
    let mut text = table.render();
    text.push_str(&facts(
        "",
        &[
            ("start of a dump", time(&figures.dump_start)),
            ("start of a restore", time(&figures.restore_start)),
            ("medium", report.medium.clone()),
            ("skipped", report.skipped.join("; ")),
        ],
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(mb: u64, suspend_s: f64, resume_s: f64) -> Sample {
        Sample {
            bytes: mb * 1_000_000,
            suspend_s,
            resume_s,
        }
    }

    #[test]
    fn fixed_times_and_bandwidths_are_told_apart() {
        // 0.1 s and 500 MB/s; 0.2 s and 1 GB/s. One run of the large one was slow.
        let samples = [
            sample(100, 0.3, 0.3),
            sample(1000, 2.1, 1.2),
            sample(1000, 2.1, 1.2),
            sample(1001, 4.1, 1.2),
        ];
        let figures = figures_of(&samples).unwrap();
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-3 * b, "{a} is not {b}");
        close(figures.dump_start.unwrap().p50_s.value(), 0.1);
        close(figures.restore_start.unwrap().p50_s.value(), 0.2);
        assert_eq!(figures.write.len(), 2);
        close(figures.write[0].p50_bytes_per_s.value(), 500e6);
        close(figures.write[1].p50_bytes_per_s.value(), 500e6);
        close(figures.write[1].p95_bytes_per_s.unwrap().value(), 250e6);
        close(figures.read[1].p50_bytes_per_s.value(), 1e9);
    }

    #[test]
    fn one_size_says_nothing_of_fixed_times() {
        let figures = figures_of(&[sample(100, 0.5, 0.25)]).unwrap();
        assert_eq!(figures.dump_start, None);
        assert_eq!(figures.write[0].p50_bytes_per_s.value(), 200e6);
        // Checks the figures in the API's format.
        let json = serde_json::to_string(&figures).unwrap();
        assert!(!json.contains("dump_start"), "{json}");
        assert_eq!(
            serde_json::from_str::<StartFigures>(&json).unwrap(),
            figures
        );
    }

    #[test]
    fn a_line_that_falls_gives_no_start_that_takes_it_all() {
        let figures = figures_of(&[sample(100, 0.5, 0.5), sample(1000, 0.4, 0.51)]).unwrap();
        assert_eq!(figures.dump_start, None);
        assert!(figures.restore_start.unwrap().p50_s.value() <= 0.45);
        assert!(
            figures
                .read
                .iter()
                .all(|rate| rate.p50_bytes_per_s.value() > 0.0)
        );
    }
}
