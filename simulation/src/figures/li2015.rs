//! Figures of paper 000.

use permafrost_scheduling::quantity::Seconds;
use permafrost_scheduling::sensitivity::Jobs;

use super::{FigureError, PaperFigure, Row, percent_more, runs};
use crate::engine::{Outcome, Run};
use crate::medium::StorageMedium;
use crate::sweep::SweepProgress;
use crate::workload::{Band, Google, google, two_jobs, yarn};

/// Median time of a task of the YARN experiment, seconds: about that of the largest waste of `kill` with the seed 1. The
/// paper's 28 % are not reached with any (docs/simulation.md).
pub const YARN_TASK_S: f64 = 100.0;

/// A number of an outcome.
type Number = fn(&Outcome) -> f64;

/// The paper's numbers on each medium.
type OnMedia = [Option<f64>; 3];

const NAMES: [&str; 3] = ["HDD", "SSD", "NVM"];

/// Runs `kill` on NVM, where it makes no difference, and each policy on each medium.
fn on_all_media(policies: &[&'static str]) -> Vec<(&'static str, StorageMedium)> {
    let [hdd, ssd, nvm] = StorageMedium::of_the_paper();
    let mut cases = vec![("kill", nvm.clone())];
    for policy in policies {
        for medium in [&hdd, &ssd, &nvm] {
            cases.push((policy, medium.clone()));
        }
    }
    cases
}

fn mean(outcome: &Outcome, band: Band) -> f64 {
    outcome.band(band).map_or(0.0, |of| of.mean_s)
}

/// Returns the waste if the tasks that were dumped had been killed at the same times, per cent of the processor time
/// that they would have held.
fn if_killed(outcome: &Outcome) -> f64 {
    outcome.kept_core_h / (outcome.kept_core_h + outcome.done_core_h) * 100.0
}

/// Splits runs into that of `kill` and three for each policy.
fn split(runs: &[Run]) -> Option<(&Outcome, Vec<[&Outcome; 3]>)> {
    let (kill, rest) = runs.split_first()?;
    let of_policy = rest.chunks_exact(3).map(|media| match media {
        [hdd, ssd, nvm] => Some([&hdd.outcome, &ssd.outcome, &nvm.outcome]),
        _ => None,
    });
    Some((&kill.outcome, of_policy.collect::<Option<_>>()?))
}

/// Google's day: waste, energy and response times of always checkpointing against killing.
pub(super) fn figure_3(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let workload = google(&Google {
        seed,
        ..Google::default()
    });
    let runs = runs(&workload, &on_all_media(&["basic"]), seed, watch)?;
    let mut rows = Vec::new();
    if let Some((kill, policies)) = split(&runs) {
        rows.push(Row::new("waste, kill", "%", Some(35.0), kill.waste * 100.0));
        for media in &policies {
            for (name, basic) in NAMES.iter().zip(media) {
                let what = format!("waste, if the victims of basic on {name} were killed");
                rows.push(Row::new(what, "%", Some(35.0), if_killed(basic)));
            }
            for ((name, basic), paper) in NAMES.iter().zip(media).zip([14.6, 11.1, 8.5]) {
                rows.push(Row::new(
                    format!("waste, {name}"),
                    "%",
                    Some(paper),
                    basic.waste * 100.0,
                ));
            }
            for ((name, basic), paper) in NAMES.iter().zip(media).zip([0.0, 0.0, -5.0]) {
                let more = percent_more(basic.energy_kwh, kill.energy_kwh);
                rows.push(Row::new(
                    format!("energy on kill, {name}"),
                    "%",
                    Some(paper),
                    more,
                ));
            }
            for (name, basic) in NAMES.iter().zip(media) {
                for (band, paper) in Band::ALL.into_iter().zip([-74.0, -23.0, 0.0]) {
                    let what = format!("response on kill, {name}, {}", band.name());
                    let more = percent_more(mean(basic, band), mean(kill, band));
                    rows.push(Row::new(what, "%", (*name == "NVM").then_some(paper), more));
                }
            }
        }
    }
    Ok(PaperFigure {
        id: "000-F3",
        title: "Google's day: always checkpointing against killing",
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}

/// The two jobs: response times by policy and medium. The paper has curves; their model, `scheduling::sensitivity`, is
/// compared with the simulation by a test.
pub(super) fn figures_4_and_6(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let workload = two_jobs(&Jobs::PAPER);
    let mut rows = Vec::new();
    for policy in ["wait", "kill", "basic", "li2015", "adaptive"] {
        let cases = StorageMedium::of_the_paper().map(|medium| (policy, medium));
        for (run, name) in runs(&workload, &cases, seed, watch)?.iter().zip(NAMES) {
            for (band, which) in [(Band::High, "high"), (Band::Low, "low")] {
                let what = format!("response, {which}, {policy}, {name}");
                rows.push(Row::new(what, "s", None, mean(&run.outcome, band)));
            }
            let what = format!("makespan (energy), {policy}, {name}");
            rows.push(Row::new(what, "s", None, run.outcome.makespan_s));
        }
    }
    Ok(PaperFigure {
        id: "000-F4",
        title: "Two jobs on one machine: response times by policy and bandwidth (Figures 4 and 6)",
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}

/// Google's day: the adaptive policy against always checkpointing.
pub(super) fn figure_5(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    const PAPER: [[Option<f64>; 3]; 3] = [
        [Some(-36.0), Some(-12.0), Some(-3.0)],
        [Some(-55.0), Some(-17.0), Some(-8.0)],
        [Some(-29.0), Some(-8.0), None],
    ];
    let workload = google(&Google {
        seed,
        ..Google::default()
    });
    let adaptive = ["li2015", "adaptive"];
    let cases = on_all_media(&["basic", adaptive[0], adaptive[1]]);
    let runs = runs(&workload, &cases, seed, watch)?;
    let mut rows = Vec::new();
    if let Some((_, policies)) = split(&runs)
        && let Some((basic, others)) = policies.split_first()
    {
        for (policy, media) in adaptive.iter().zip(others) {
            for (band, paper) in Band::ALL.into_iter().zip(PAPER) {
                for (((name, ours), basic), paper) in NAMES.iter().zip(media).zip(basic).zip(paper)
                {
                    let what = format!("response on basic, {policy}, {name}, {}", band.name());
                    let more = percent_more(mean(ours, band), mean(basic, band));
                    rows.push(Row::new(what, "%", paper, more));
                }
            }
        }
    }
    Ok(PaperFigure {
        id: "000-F5",
        title: "Google's day: adaptive against always checkpointing",
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}

/// The YARN cluster: waste, energy, response times (Figures 8 to 10) and overheads (Figure 12).
pub(super) fn figures_8_to_12(
    seed: u64,
    watch: &mut dyn FnMut(SweepProgress),
) -> Result<PaperFigure, FigureError> {
    let workload = yarn(seed, Seconds::clamped(YARN_TASK_S));
    let runs = runs(&workload, &on_all_media(&["basic", "li2015"]), seed, watch)?;
    let mut rows = Vec::new();
    if let Some((kill, policies)) = split(&runs)
        && let [basic, adaptive] = policies.as_slice()
    {
        let all = || NAMES.iter().zip(basic.iter().zip(adaptive));
        rows.push(Row::new("waste, kill", "%", Some(28.0), kill.waste * 100.0));
        let on_kill: [(&str, [f64; 3], Number); 3] = [
            ("waste", [-50.0, -65.0, -67.0], |o| {
                o.held_core_h - o.done_core_h
            }),
            ("energy", [-21.0, -29.0, -34.0], |o| o.energy_kwh),
            ("response, low", [-18.0, -53.0, -61.0], |o| {
                mean(o, Band::Low)
            }),
        ];
        for (what, paper, of) in on_kill {
            for ((name, (basic, _)), paper) in all().zip(paper) {
                let more = percent_more(of(basic), of(kill));
                rows.push(Row::new(
                    format!("{what} on kill, {name}"),
                    "%",
                    Some(paper),
                    more,
                ));
            }
        }
        for (band, paper) in [
            (Band::Low, [-28.0, -16.0, -20.0]),
            (Band::High, [-7.0, -8.0, -14.0]),
        ] {
            for ((name, (basic, adaptive)), paper) in all().zip(paper) {
                let what = format!("response on basic, li2015, {name}, {}", band.name());
                let more = percent_more(mean(adaptive, band), mean(basic, band));
                rows.push(Row::new(what, "%", Some(paper), more));
            }
        }
        let overheads: [(&str, OnMedia, OnMedia, Number); 3] = [
            (
                "processor overhead",
                [Some(17.0), Some(4.0), Some(0.4)],
                [Some(5.1), Some(2.3), None],
                |o| o.cpu_overhead,
            ),
            (
                "I/O overhead",
                [Some(37.0), Some(14.0), Some(2.2)],
                [Some(15.7), Some(8.3), None],
                |o| o.io_overhead,
            ),
            ("storage", [Some(5.1), Some(7.6), None], [None; 3], |o| {
                o.storage
            }),
        ];
        for (what, of_basic, of_adaptive, of) in overheads {
            for ((name, (basic, _)), paper) in all().zip(of_basic) {
                rows.push(Row::new(
                    format!("{what}, basic, {name}"),
                    "%",
                    paper,
                    of(basic) * 100.0,
                ));
            }
            for ((name, (_, adaptive)), paper) in all().zip(of_adaptive) {
                let what = format!("{what}, li2015, {name}");
                rows.push(Row::new(what, "%", paper, of(adaptive) * 100.0));
            }
        }
    }
    Ok(PaperFigure {
        id: "000-F8",
        title: "YARN: waste, energy, response times and overheads (Figures 8 to 12)",
        workload: workload.title(),
        remarks: workload.remarks,
        rows,
    })
}
