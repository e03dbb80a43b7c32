//! Figures of paper 002.

use super::{FigureError, PaperFigure, Row, percent_more, runs};
use crate::engine::Run;
use crate::medium::StorageMedium;
use crate::sweep::SweepProgress;
use crate::workload::{
    NATJAM_CLEAN_S, Natjam4, Research, Workload, natjam_deadlines, natjam_margins,
    natjam_techniques, natjam_victims,
};

/// Runs that a number is the mean of: the paper's five (§5).
const RUNS: u64 = 5;

/// Returns the response time of the job with this index, seconds.
pub(super) fn response(workload: &Workload, run: &Run, job: usize) -> f64 {
    let ended = run.ends.get(job).copied().flatten();
    let spec = workload.jobs.get(job);
    ended
        .zip(spec)
        .map_or(0.0, |(ended, spec)| ended.since(spec.submitted).value())
}

/// Returns the mean response times of all jobs over the runs of each policy.
fn means(
    research: Research,
    policies: &[&'static str],
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<(Workload, Vec<Vec<f64>>), FigureError> {
    let cases: Vec<_> = policies
        .iter()
        .map(|policy| (*policy, StorageMedium::natjam()))
        .collect();
    let mut sums: Vec<Vec<f64>> = Vec::new();
    for run in 0..RUNS {
        let workload = natjam_victims(research, seed + run);
        let results = runs(&workload, &cases, seed + run, watch)?;
        sums.resize(results.len(), vec![0.0; workload.jobs.len()]);
        for (result, sums) in results.iter().zip(&mut sums) {
            for (job, sum) in sums.iter_mut().enumerate() {
                *sum += response(&workload, result, job) / RUNS as f64;
            }
        }
    }
    Ok((natjam_victims(research, seed), sums))
}

/// Natjam beside caps of queues and beside killing: Research-XL, and Production-S after 50 s.
///
/// With the hard cap each queue has its containers alone: 36 and 12 (§5). With the soft cap a queue takes what is free,
/// and gets its own back as tasks of the other end: what `wait` does. Each is compared with the job alone on all.
pub(super) fn figure_4(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    const NAMES: [&str; 2] = ["research", "production"];
    const HARD: [u64; 2] = [6, 2];
    const ALL: u64 = 8;
    let paper = [
        ("hard cap", [Some(52.0), Some(0.0)]),
        ("soft cap", [Some(0.0), Some(85.0)]),
        ("kill", [Some(23.0), None]),
        ("mr+srt", [Some(2.0), Some(7.0)]),
    ];
    let medium = StorageMedium::natjam;
    let mut sums = [[0.0; 2]; 4];
    let mut figure = PaperFigure {
        id: "002-F4",
        title: "Natjam: beside caps of queues, and beside killing",
        workload: String::new(),
        remarks: Vec::new(),
        rows: Vec::new(),
    };
    for run in 0..RUNS {
        let seed = seed + run;
        let mut alone = |job: usize, containers: u64| {
            let workload = natjam_techniques(Natjam4::Alone { job, containers }, seed);
            let runs = runs(&workload, &[("wait", medium())], seed, watch)?;
            Ok::<_, FigureError>(runs.first().map_or(0.0, |run| response(&workload, run, 0)))
        };
        let ideal = [alone(0, ALL)?, alone(1, ALL)?];
        let hard = [alone(0, HARD[0])?, alone(1, HARD[1])?];
        let workload = natjam_techniques(Natjam4::Both, seed);
        let cases = ["wait", "kill", "mr+srt"].map(|policy| (policy, medium()));
        let others = runs(&workload, &cases, seed, watch)?;
        let others = others
            .iter()
            .map(|run| [response(&workload, run, 0), response(&workload, run, 1)]);
        for (sums, took) in sums.iter_mut().zip(std::iter::once(hard).chain(others)) {
            for ((sum, took), ideal) in sums.iter_mut().zip(took).zip(ideal) {
                *sum += percent_more(took, ideal) / RUNS as f64;
            }
        }
        (figure.workload, figure.remarks) = (workload.title(), workload.remarks);
    }
    for ((technique, paper), sums) in paper.into_iter().zip(sums) {
        for ((name, paper), ours) in NAMES.iter().zip(paper).zip(sums) {
            let what = format!("{name} on alone, {technique}");
            figure.rows.push(Row::new(what, "%", paper, ours));
        }
    }
    let remark =
        "Stand-ins: a hard cap is two clusters of 36 and 12 containers, the soft cap is `wait`.";
    figure.remarks.push(remark.to_owned());
    Ok(figure)
}

/// Choice of the task of the victim job: Research-XL, and Production-S after 50 s.
pub(super) fn figure_5(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let policies = ["mr+srt", "mr+random", "mr+lrt"];
    let (workload, means) = means(Research::ExtraLarge, &policies, seed, watch)?;
    let paper = [[197.0, 75.6], [237.6, 76.6], [247.2, 78.8]];
    let mut rows = Vec::new();
    for (job, name) in ["Research-XL", "Production-S"].iter().enumerate() {
        for ((policy, means), paper) in policies.iter().zip(&means).zip(paper) {
            let ours = means.get(job).copied().unwrap_or(0.0);
            rows.push(Row::new(
                format!("{name}, {policy}"),
                "s",
                paper.get(job).copied(),
                ours,
            ));
        }
    }
    Ok(PaperFigure {
        id: "002-F5",
        title: "Natjam: task eviction policies",
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}

/// Choice of the victim job: two research jobs, and Production-S after 50 s.
pub(super) fn figure_6(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let policies = ["mr+srt", "pr+srt", "lr+srt"];
    let halves = [
        (
            Research::TwoMedium,
            ["Research-M, first", "Research-M, second"],
            [[196.2, 200.6], [195.8, 201.2], [200.6, 228.8]],
        ),
        (
            Research::LargeAndSmall,
            ["Research-L", "Research-S"],
            [[195.8, 204.8], [201.6, 213.8], [195.8, 252.4]],
        ),
    ];
    let mut figure = PaperFigure {
        id: "002-F6",
        title: "Natjam: job eviction policies",
        workload: String::new(),
        remarks: Vec::new(),
        rows: Vec::new(),
    };
    for (research, names, paper) in halves {
        let (workload, means) = means(research, &policies, seed, watch)?;
        for (job, name) in names.iter().enumerate() {
            for ((policy, means), paper) in policies.iter().zip(&means).zip(paper) {
                let ours = means.get(job).copied().unwrap_or(0.0);
                let what = format!("{name}, {policy}");
                figure
                    .rows
                    .push(Row::new(what, "s", paper.get(job).copied(), ours));
            }
        }
        (figure.workload, figure.remarks) = (workload.title(), workload.remarks);
    }
    Ok(figure)
}

/// Deadlines: three equal jobs, the last one with the earliest deadline.
pub(super) fn figure_10(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let workload = natjam_deadlines();
    let cases = ["mdf+edf", "mlf+llf"].map(|policy| (policy, StorageMedium::natjam()));
    let runs = runs(&workload, &cases, seed, watch)?;
    let mut rows = Vec::new();
    for ((run, name), paper) in runs
        .iter()
        .zip(["MDF", "MLF"])
        .zip([(175.0, 3.0), (239.0, 0.0)])
    {
        let makespan = run.outcome.makespan_s;
        rows.push(Row::new(
            format!("all jobs, {name}"),
            "s",
            Some(paper.0),
            makespan,
        ));
        let met = run.ends.iter().zip(&workload.jobs).filter(|(ended, job)| {
            ended
                .zip(job.deadline)
                .is_some_and(|(ended, deadline)| ended <= deadline)
        });
        let met = met.count() as f64;
        rows.push(Row::new(
            format!("deadlines met, {name}"),
            "",
            Some(paper.1),
            met,
        ));
    }
    Ok(PaperFigure {
        id: "002-F10",
        title: "Natjam-R: evicting by deadline (MDF) and by laxity (MLF)",
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}

/// Margins: how much before its deadline each of two equal jobs ends, by the time that it is given.
pub(super) fn figure_11(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let mut figure = PaperFigure {
        id: "002-F11",
        title: "Natjam-R: margins of two jobs by the length of their deadlines",
        workload: String::new(),
        remarks: Vec::new(),
        rows: Vec::new(),
    };
    let epsilons = [
        (0.0, None),
        (0.2, Some(1.0)),
        (0.4, None),
        (0.6, None),
        (0.8, Some(2.0)),
        (1.0, None),
    ];
    for (epsilon, paper) in epsilons {
        let workload = natjam_margins(epsilon);
        let cases = [("mdf+edf", StorageMedium::natjam())];
        let runs = runs(&workload, &cases, seed, watch)?;
        let rows = &mut figure.rows;
        for run in &runs {
            let jobs = run.ends.iter().zip(&workload.jobs);
            let mut met = 0.0;
            for ((ended, job), name) in jobs.zip(["first", "second, with the shorter deadline"]) {
                let (Some(ended), Some(deadline)) = (ended, job.deadline) else {
                    continue;
                };
                let margin = deadline.since(*ended).value() - ended.since(deadline).value();
                met += if margin >= 0.0 { 1.0 } else { 0.0 };
                let what = format!("margin at {epsilon}, {name}");
                rows.push(Row::new(what, "s", None, margin));
            }
            let what = format!("deadlines met at {epsilon}");
            rows.push(Row::new(what, "", paper, met));
        }
        (figure.workload, figure.remarks) = (workload.title(), workload.remarks);
    }
    figure.remarks.push(format!(
        "A job has {NATJAM_CLEAN_S} s × (1 + ε) from its submission."
    ));
    Ok(figure)
}
