//! Figures of paper 002 that used traces of Yahoo, which are confidential: on FB-2009, so that only directions compare.

use std::path::Path;

use super::natjam::response;
use super::{FigureError, PaperFigure, Row, runs};
use crate::engine::Run;
use crate::medium::StorageMedium;
use crate::sweep::SweepProgress;
use crate::workload::{
    Band, ClusterShare, Fb2009, NatjamCluster, Workload, fb2009, with_deadlines,
};

/// Natjam's policies for two priorities (§6), and for deadlines (§7).
const NATJAM: &str = "mr+srt";
const NATJAM_R: &str = "mdf+edf";

/// Stand-in for the Capacity Scheduler's soft cap: nobody is preempted, and what is free goes to production first.
const SOFT_CAP: &str = "wait";

type Watch<'a> = &'a mut dyn FnMut(SweepProgress);

fn trace(path: &Path, seed: u64) -> Result<Workload, FigureError> {
    let missing = Fb2009 {
        seed,
        ..Fb2009::default()
    };
    Ok(fb2009(path, &missing)?)
}

/// Runs a workload under each of the policies.
fn under<const N: usize>(
    workload: &Workload,
    policies: [&str; N],
    seed: u64,
    watch: Watch<'_>,
) -> Result<Vec<Run>, FigureError> {
    let cases = policies.map(|policy| (policy, StorageMedium::natjam()));
    runs(workload, &cases, seed, watch)
}

/// Returns the response times of the jobs of a band, seconds.
fn times(workload: &Workload, band: Band, run: &Run) -> Vec<f64> {
    let jobs = (0..).zip(&workload.jobs);
    let of_band = jobs.filter(|(_, job)| Band::of(job.priority) == band);
    of_band
        .map(|(job, _)| response(workload, run, job))
        .collect()
}

/// Differences of the response times of some jobs, seconds; negative where Natjam is earlier. In order.
struct Differences {
    jobs: &'static str,
    by: Vec<f64>,
}

impl Differences {
    fn between(jobs: &'static str, natjam: &[f64], other: &[f64]) -> Self {
        let mut by: Vec<f64> = (natjam.iter().zip(other))
            .map(|(natjam, other)| natjam - other)
            .collect();
        by.sort_by(f64::total_cmp);
        Self { jobs, by }
    }

    fn of(workload: &Workload, jobs: &'static str, band: Band, runs: &[Run]) -> Self {
        let times: Vec<_> = (runs.iter())
            .map(|run| times(workload, band, run))
            .collect();
        match &times[..] {
            [natjam, other] => Self::between(jobs, natjam, other),
            _ => Self::between(jobs, &[], &[]),
        }
    }

    /// Returns the share of the jobs for which something holds.
    fn share(&self, what: &str, paper: Option<f64>, holds: impl Fn(f64) -> bool) -> Row {
        let count = self.by.iter().filter(|by| holds(**by)).count();
        let ours = 100.0 * count as f64 / self.by.len().max(1) as f64;
        Row::new(format!("{}, {what}", self.jobs), "%", paper, ours)
    }

    fn earlier(&self, seconds: f64, paper: f64) -> Row {
        let what = format!("at least {seconds} s earlier");
        self.share(&what, Some(paper), |by| by <= -seconds)
    }

    fn later(&self, seconds: f64, paper: f64) -> Row {
        let what = format!("at least {seconds} s later");
        self.share(&what, Some(paper), |by| by >= seconds)
    }

    fn any_earlier(&self, paper: Option<f64>) -> Row {
        self.share("earlier", paper, |by| by < 0.0)
    }

    fn percentile(&self, percent: usize) -> f64 {
        let index = self.by.len() * percent / 100;
        let last = self.by.len().saturating_sub(1);
        self.by.get(index.min(last)).copied().unwrap_or(0.0)
    }

    /// Returns a percentile of the differences.
    fn at(&self, percent: usize, paper: Option<f64>) -> Row {
        let what = format!("{}, percentile {percent}", self.jobs);
        Row::new(what, "s", paper, self.percentile(percent))
    }
}

fn figure(
    (id, title): (&'static str, &'static str),
    workload: &Workload,
    rows: Vec<Row>,
) -> PaperFigure {
    let mut remarks = workload.remarks.clone();
    remarks.push("Stand-in: the soft cap, and production alone, are `wait`.".to_owned());
    PaperFigure {
        id,
        title,
        workload: workload.title(),
        remarks,
        rows,
    }
}

/// Compares Natjam with another policy on the jobs of both classes.
fn both(
    cluster: NatjamCluster,
    other: &str,
    (path, seed): (&Path, u64),
    watch: Watch<'_>,
) -> Result<(Workload, Differences, Differences), FigureError> {
    let workload = cluster.jobs(&trace(path, seed)?, ClusterShare::BOTH, seed);
    let runs = under(&workload, [NATJAM, other], seed, watch)?;
    let production = Differences::of(&workload, "production", Band::High, &runs);
    let research = Differences::of(&workload, "research", Band::Low, &runs);
    Ok((workload, production, research))
}

/// Compares the production jobs beside research jobs under Natjam with the same without any. `paper` has the difference
/// of the medians, that of the means, and the largest one.
fn production_only(
    names: (&'static str, &'static str),
    cluster: NatjamCluster,
    paper: [Option<f64>; 3],
    (path, seed): (&Path, u64),
    watch: Watch<'_>,
) -> Result<PaperFigure, FigureError> {
    let trace = trace(path, seed)?;
    let workload = cluster.jobs(&trace, ClusterShare::BOTH, seed);
    let alone = ClusterShare {
        research: 0.0,
        ..ClusterShare::BOTH
    };
    let only = cluster.jobs(&trace, alone, seed);
    let of = |workload: &Workload, runs: &[Run]| {
        let runs = runs.iter();
        runs.flat_map(|run| times(workload, Band::High, run))
            .collect::<Vec<f64>>()
    };
    let beside = of(&workload, &under(&workload, [NATJAM], seed, watch)?);
    let only = of(&only, &under(&only, [SOFT_CAP], seed, watch)?);
    let differences = Differences::between("production", &beside, &only);
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(0.0)
    };
    let by = &differences.by;
    let numbers = [
        (
            "production, median less median alone",
            median(beside) - median(only),
        ),
        (
            "production, mean less mean alone",
            by.iter().sum::<f64>() / by.len().max(1) as f64,
        ),
        (
            "production, largest difference",
            differences.percentile(100),
        ),
    ];
    let rows = numbers.into_iter().zip(paper);
    let rows = rows.map(|((what, ours), paper)| Row::new(what, "s", paper, ours));
    Ok(figure(names, &workload, rows.collect()))
}

pub(super) fn figure_7(
    path: &Path,
    seed: u64,
    watch: Watch<'_>,
) -> Result<PaperFigure, FigureError> {
    let names = ("002-F7", "Natjam beside the soft cap, 72 containers");
    let (workload, production, research) =
        both(NatjamCluster::Small, SOFT_CAP, (path, seed), watch)?;
    let rows = vec![
        production.earlier(5.0, 40.0),
        production.earlier(35.0, 20.0),
        production.earlier(60.0, 10.0),
        production.later(5.0, 3.0),
        research.share("at most 30 s later", Some(60.0), |by| by <= 30.0),
    ];
    Ok(figure(names, &workload, rows))
}

pub(super) fn figure_8(
    path: &Path,
    seed: u64,
    watch: Watch<'_>,
) -> Result<PaperFigure, FigureError> {
    let names = ("002-F8", "Natjam beside killing, 72 containers");
    let (workload, production, research) = both(NatjamCluster::Small, "kill", (path, seed), watch)?;
    let rows = vec![
        research.earlier(1000.0, 36.0),
        research.any_earlier(None),
        production.at(1, None),
        production.at(50, Some(0.0)),
        production.at(99, Some(2.0)),
    ];
    Ok(figure(names, &workload, rows))
}

pub(super) fn figure_9(
    path: &Path,
    seed: u64,
    watch: Watch<'_>,
) -> Result<PaperFigure, FigureError> {
    let names = ("002-F9", "Natjam beside production alone, 72 containers");
    let paper = [Some(3.0), Some(4.5), Some(36.0)];
    production_only(names, NatjamCluster::Small, paper, (path, seed), watch)
}

pub(super) fn figure_12(
    path: &Path,
    seed: u64,
    watch: Watch<'_>,
) -> Result<PaperFigure, FigureError> {
    let names = ("002-F12", "Natjam-R beside the soft cap, margins");
    let trace = trace(path, seed)?;
    let mut workload = NatjamCluster::Small.jobs(&trace, ClusterShare::OVERLOADED, seed);
    with_deadlines(&mut workload, seed);
    let runs = under(&workload, [NATJAM_R, SOFT_CAP], seed, watch)?;
    let by = Differences::of(&workload, "margins", Band::High, &runs);
    let mut rows = vec![
        by.share("better with Natjam-R", Some(69.0), |by| by < 0.0),
        Row::new("largest gain", "s", Some(366.0), -by.percentile(0)),
        Row::new("largest loss", "s", Some(1000.0), by.percentile(100)),
    ];
    for (run, name) in runs.iter().zip(["Natjam-R", "soft cap"]) {
        let ends = run.ends.iter().zip(&workload.jobs);
        let met = ends.filter(|(ended, job)| {
            ended
                .zip(job.deadline)
                .is_some_and(|(ended, deadline)| ended <= deadline)
        });
        let met = 100.0 * met.count() as f64 / workload.jobs.len().max(1) as f64;
        rows.push(Row::new(format!("deadlines met, {name}"), "%", None, met));
    }
    Ok(figure(names, &workload, rows))
}

pub(super) fn figure_13(
    path: &Path,
    seed: u64,
    watch: Watch<'_>,
) -> Result<PaperFigure, FigureError> {
    let names = ("002-F13", "Natjam beside the soft cap, 2,000 containers");
    let (workload, production, research) =
        both(NatjamCluster::Large, SOFT_CAP, (path, seed), watch)?;
    let rows = vec![
        production.any_earlier(Some(53.0)),
        production.earlier(5.0, 12.0),
        production.later(5.0, 3.0),
        production.at(5, Some(-20.0)),
        production.at(1, Some(-80.0)),
        research.any_earlier(Some(63.0)),
    ];
    Ok(figure(names, &workload, rows))
}

pub(super) fn figure_14(
    path: &Path,
    seed: u64,
    watch: Watch<'_>,
) -> Result<PaperFigure, FigureError> {
    let names = ("002-F14", "Natjam beside killing, 2,000 containers");
    let (workload, production, research) = both(NatjamCluster::Large, "kill", (path, seed), watch)?;
    let gain = -research.percentile(0);
    let rows = vec![
        research.share("over 100 s earlier", Some(38.0), |by| by < -100.0),
        research.at(5, Some(-750.0)),
        Row::new("research, largest gain", "s", Some(1880.0), gain),
        production.at(1, Some(-1.0)),
        production.at(99, Some(1.0)),
    ];
    Ok(figure(names, &workload, rows))
}

pub(super) fn figure_15(
    path: &Path,
    seed: u64,
    watch: Watch<'_>,
) -> Result<PaperFigure, FigureError> {
    let names = (
        "002-F15",
        "Natjam beside production alone, 2,000 containers",
    );
    let paper = [Some(0.04), Some(0.2), None];
    production_only(names, NatjamCluster::Large, paper, (path, seed), watch)
}
