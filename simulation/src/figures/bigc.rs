//! Figures of paper 004.

use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::policy::{Name, PolicySettings, UnknownPolicy};
use permafrost_scheduling::quantity::{Bytes, Moment};

use super::{FigureError, PaperFigure, Row, percent_more};
use crate::engine::{EngineConfig, Run};
use crate::medium::StorageMedium;
use crate::sweep::{Case, SweepProgress, sweep};
use crate::workload::{Bursts, Workload, google_hours, reclaiming, short_bursts};

/// Policies as the paper names them; FIFO is `wait` with one queue.
const POLICIES: [(&str, &str); 5] = [
    ("FIFO", "wait"),
    ("reserve", "reserve"),
    ("kill", "kill"),
    ("IP", "ip"),
    ("GP", "gp"),
];

/// Runs a workload under all policies.
fn all(
    workload: &Workload,
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<Vec<Run>, FigureError> {
    let fifo = workload.clone().with_one_priority();
    let settings = PolicySettings {
        seed,
        ..PolicySettings::default()
    };
    let cases = POLICIES.map(|(name, policy)| {
        let workload = if name == "FIFO" { &fifo } else { workload };
        (workload, policy, settings)
    });
    with(&cases, watch)
}

/// Runs policies with their settings; memory is reclaimed as fast as the paper measured.
fn with(
    cases: &[(&Workload, &str, PolicySettings)],
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<Vec<Run>, FigureError> {
    let config = EngineConfig::with(StorageMedium::with_bandwidth(reclaiming()));
    let cases = cases.iter().map(|(workload, policy, settings)| {
        Ok(Case {
            workload,
            policy: policy.parse::<Name>()?,
            config: config.clone(),
            settings: *settings,
        })
    });
    let cases = cases.collect::<Result<Vec<_>, UnknownPolicy>>()?;
    Ok(sweep(&cases, watch).into_iter().collect::<Result<_, _>>()?)
}

/// Returns the times from submission to a moment of the long or the short jobs, sorted, seconds.
fn times(workload: &Workload, moments: &[Option<Moment>], is_long: bool) -> Vec<f64> {
    let jobs = workload.jobs.iter().zip(moments);
    let of = jobs.filter(|(job, _)| (job.priority == 0) == is_long);
    let mut times: Vec<f64> = of
        .filter_map(|(job, moment)| Some((*moment)?.since(job.submitted).value()))
        .collect();
    times.sort_by(f64::total_cmp);
    times
}

/// Returns a percentile by nearest rank; 0 of nothing.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0.0)
}

fn mean(times: &[f64]) -> f64 {
    times.iter().sum::<f64>() / times.len().max(1) as f64
}

/// Returns the share of the long jobs of which a task was killed, per cent.
fn long_killed(workload: &Workload, run: &Run) -> f64 {
    let jobs = workload.jobs.iter().zip(&run.kills);
    let (mut long, mut killed) = (0.0, 0.0);
    for (_, kills) in jobs.filter(|(job, _)| job.priority == 0) {
        long += 1.0;
        killed += if *kills > 0 { 100.0 } else { 0.0 };
    }
    killed / f64::max(long, 1.0)
}

/// Bursts of short jobs over long ones.
pub(super) fn figure_5(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let patterns = [
        (Bursts::Low, "low load", 13.0, 13.0),
        (Bursts::High, "high load", 61.0, 15.0),
        (Bursts::Multiple, "multi load", 17.0, 20.0),
    ];
    let mut figure = PaperFigure {
        id: "004-F5",
        title: "BIG-C: long jobs under bursts of short ones",
        workload: String::new(),
        remarks: Vec::new(),
        rows: Vec::new(),
    };
    let mut of_kill = 0.0;
    for (bursts, name, gp, failed) in patterns {
        let workload = short_bursts(seed, bursts);
        let runs = all(&workload, seed, watch)?;
        let mut fifo = 0.0;
        for (run, (policy, _)) in runs.iter().zip(POLICIES) {
            let rows = &mut figure.rows;
            let short = times(&workload, &run.ends, false);
            let what = format!("{name}: short jobs, mean, {policy}");
            rows.push(Row::new(what, "s", None, mean(&short)));
            let long = times(&workload, &run.ends, true);
            let what = format!("{name}: long jobs, median, {policy}");
            rows.push(Row::new(what, "s", None, percentile(&long, 50)));
            let tail = percentile(&long, 90);
            if policy == "FIFO" {
                fifo = tail;
                let what = format!("{name}: long jobs, p90, FIFO");
                rows.push(Row::new(what, "s", None, tail));
                continue;
            }
            let more = percent_more(tail, fifo);
            let paper = (policy == "GP").then_some(gp);
            let what = format!("{name}: long jobs, p90 on FIFO, {policy}");
            rows.push(Row::new(what, "%", paper, more));
            if policy == "kill" {
                of_kill += more / patterns.len() as f64;
                let what = format!("{name}: long jobs with a kill (paper: that failed)");
                let killed = long_killed(&workload, run);
                rows.push(Row::new(what, "%", Some(failed), killed));
            }
        }
        (figure.workload, figure.remarks) = (workload.title(), workload.remarks);
    }
    let what = "long jobs, p90 on FIFO, kill, mean of the three";
    figure.rows.push(Row::new(what, "%", Some(140.0), of_kill));
    Ok(figure)
}

/// Delay of resumption, and size of a step.
pub(super) fn figure_7(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    /// Processors and gigabytes of the paper's basic unit.
    const UNIT: (u64, u64) = (1000, 2_000_000_000);
    let workload = short_bursts(seed, Bursts::High);
    let settings = PolicySettings {
        seed,
        ..PolicySettings::default()
    };
    let delays = [0, 1, 2, 3, 4, 5];
    let units = [1, 2, 4, 8];
    let delayed = delays.map(|resumption_delay| PolicySettings {
        resumption_delay,
        ..settings
    });
    let stepped = units.map(|count| PolicySettings {
        graceful_step: TaskResources {
            cpu_millis: UNIT.0 * count,
            memory: Bytes::new(UNIT.1 * count),
        },
        ..settings
    });
    let gp = delayed.iter().chain(&stepped);
    let mut cases: Vec<_> = gp.map(|settings| (&workload, "gp", *settings)).collect();
    cases.extend(["ip", "kill"].map(|policy| (&workload, policy, settings)));
    let runs = with(&cases, watch)?;
    let mut rows = Vec::new();
    for (run, delay) in runs.iter().zip(delays) {
        let queued = times(&workload, &run.starts, false);
        let longest = queued.last().copied().unwrap_or(0.0);
        let what = format!("(a) longest queueing delay of short jobs, D = {delay}");
        rows.push(Row::new(what, "s", (delay == 0).then_some(80.0), longest));
        let what = format!("(a) mean queueing delay of short jobs, D = {delay}");
        rows.push(Row::new(what, "s", None, mean(&queued)));
    }
    let names = units.map(|count| format!("GP in {count} units"));
    let names = names.into_iter().chain(["IP", "kill"].map(str::to_owned));
    for (run, name) in runs.iter().skip(delays.len()).zip(names) {
        let long = times(&workload, &run.ends, true);
        let mean = mean(&long);
        let squares = long.iter().map(|time| (time - mean).powi(2)).sum::<f64>();
        let deviation = (squares / long.len().max(1) as f64).sqrt();
        let what = format!("(b) variation of long jobs, {name}");
        rows.push(Row::new(
            what,
            "%",
            None,
            deviation / mean.max(1e-9) * 100.0,
        ));
    }
    Ok(PaperFigure {
        id: "004-F7",
        title: "BIG-C: delay of resumption, size of a step",
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}

/// 3.8 hours of Google's trace, under all policies.
pub(super) fn figure_8(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let workload = google_hours(seed);
    let runs = all(&workload, seed, watch)?;
    let mut rows = Vec::new();
    let short = |run: &Run| times(&workload, &run.ends, false);
    let long = |run: &Run| times(&workload, &run.ends, true);
    if let [fifo, reserve, kill, ip, gp] = runs.as_slice() {
        let what = "short jobs, p90, FIFO";
        let p90 = percentile(&short(fifo), 90);
        rows.push(Row::new(what, "s", Some(335.0), p90));
        let on_median = p90 / percentile(&short(fifo), 50).max(1e-9);
        rows.push(Row::new(
            "short jobs, p90 on median, FIFO",
            "times",
            Some(6.0),
            on_median,
        ));
        let named = [
            ("reserve", reserve, 183.0),
            ("kill", kill, 176.0),
            ("IP", ip, 118.0),
            ("GP", gp, 96.0),
        ];
        for (name, run, paper) in named {
            let p95 = percentile(&short(run), 95);
            let what = format!("short jobs, p95, {name}");
            rows.push(Row::new(what, "s", Some(paper), p95));
        }
        let tail = percentile(&long(gp), 90);
        for (name, run, paper) in [
            ("kill", kill, -67.0),
            ("IP", ip, -37.0),
            ("reserve", reserve, -32.0),
        ] {
            let more = percent_more(tail, percentile(&long(run), 90));
            let what = format!("long jobs, p90 of GP on {name}");
            rows.push(Row::new(what, "%", Some(paper), more));
        }
        let more = percent_more(mean(&long(gp)), mean(&long(fifo)));
        rows.push(Row::new(
            "long jobs, mean of GP on FIFO",
            "%",
            Some(4.0),
            more,
        ));
        for (name, run, paper) in [("kill", kill, 105.0 / 182.0 * 100.0), ("GP", gp, 0.0)] {
            let what = format!("long jobs of which a task was killed, {name}");
            rows.push(Row::new(
                what,
                "%",
                Some(paper),
                long_killed(&workload, run),
            ));
        }
    }
    Ok(PaperFigure {
        id: "004-F8",
        title: "BIG-C: 3.8 hours of Google's trace",
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}
