//! Figures of paper 001.

use permafrost_scheduling::quantity::Bytes;

use super::{FigureError, PaperFigure, Row, percent_more, runs};
use crate::engine::Outcome;
use crate::medium::StorageMedium;
use crate::sweep::SweepProgress;
use crate::workload::{Band, Workload, suspended};

const POLICIES: [&str; 3] = ["wait", "kill", "suspend"];

/// Share of the work at which the second task comes, per cent: the paper's axis, and its middle for Figure 4.
const SHARES: [u32; 5] = [10, 30, 50, 70, 90];
const MIDDLE: f64 = 0.5;

const MIB_256: u64 = 256 << 20;

fn gigabytes(tenths: u64) -> Bytes {
    Bytes::new(tenths * 100_000_000)
}

/// Returns the response time of the task of high priority, and the makespan, seconds.
fn numbers(outcome: &Outcome) -> (f64, f64) {
    let sojourn = outcome.band(Band::High).map_or(0.0, |band| band.mean_s);
    (sojourn, outcome.makespan_s)
}

/// Runs all policies with swap on a medium.
fn all(
    workload: &Workload,
    medium: &StorageMedium,
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<Vec<(f64, f64)>, FigureError> {
    let cases = POLICIES.map(|policy| (policy, medium.clone()));
    let runs = runs(workload, &cases, seed, watch)?;
    Ok(runs.iter().map(|run| numbers(&run.outcome)).collect())
}

/// Sojourn time and makespan by the time at which the second task comes.
fn by_share(
    (id, title): (&'static str, &'static str),
    memory: Bytes,
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let [hdd, ..] = StorageMedium::of_the_paper();
    let mut figure = PaperFigure {
        id,
        title,
        workload: String::new(),
        remarks: Vec::new(),
        rows: Vec::new(),
    };
    for share in SHARES {
        let workload = suspended(memory, memory, f64::from(share) / 100.0);
        let numbers = all(&workload, &hdd, seed, watch)?;
        for (name, (sojourn, makespan)) in POLICIES.iter().zip(numbers) {
            let rows = &mut figure.rows;
            let what = format!("sojourn at {share} %, {name}");
            rows.push(Row::new(what, "s", None, sojourn));
            let what = format!("makespan at {share} %, {name}");
            rows.push(Row::new(what, "s", None, makespan));
        }
        (figure.workload, figure.remarks) = (workload.title(), workload.remarks);
    }
    Ok(figure)
}

/// Tasks with little memory: nothing is paged.
pub(super) fn figure_2(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let title = "Suspension in memory: two light tasks of 256 MiB, by the progress of the first";
    by_share(("001-F2", title), Bytes::new(MIB_256), seed, watch)
}

/// Tasks of 2 GB on a machine of 4.
pub(super) fn figure_3(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let title = "Suspension in memory: two tasks of 2 GB, by the progress of the first";
    by_share(("001-F3", title), gigabytes(20), seed, watch)
}

/// A task of 2.5 GB, and one of more and more memory.
pub(super) fn figure_4(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let mut figure = PaperFigure {
        id: "001-F4",
        title: "Suspension in memory: a task of 2.5 GB, by the memory of the other",
        workload: String::new(),
        remarks: Vec::new(),
        rows: Vec::new(),
    };
    for medium in StorageMedium::of_the_paper() {
        for tenths in [5, 10, 15, 20, 25] {
            let workload = suspended(gigabytes(25), gigabytes(tenths), MIDDLE);
            let numbers = all(&workload, &medium, seed, watch)?;
            if let [wait, kill, suspend] = numbers.as_slice() {
                let name = format!("{} GB, {medium}", tenths as f64 / 10.0);
                let worst = tenths == 25;
                let rows = &mut figure.rows;
                rows.push(Row::new(
                    format!("sojourn on kill, {name}"),
                    "%",
                    worst.then_some(20.0),
                    percent_more(suspend.0, kill.0),
                ));
                rows.push(Row::new(
                    format!("makespan on wait, {name}"),
                    "%",
                    worst.then_some(12.0),
                    percent_more(suspend.1, wait.1),
                ));
            }
            (figure.workload, figure.remarks) = (workload.title(), workload.remarks);
        }
    }
    Ok(figure)
}
