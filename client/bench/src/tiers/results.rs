//! Results of the measurements: medians, ratios and fitted lines, with the paper's beside them.

use permafrost_terminal::failure::Failure;
use serde::Serialize;
use serde_json::Value;

use super::arguments::Copies;
use super::jobs::JobRun;
use super::journal::Journal;
use super::measure::Measurement;
use super::model::Model;
use super::paper::{self, Table3};
use super::plan::{Plan, Skipped};
use crate::fit::{Fit, median};
use crate::machine::Machine;

/// Contents of results.json, which `--json` prints too.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Results {
    machine: Machine,
    /// Parameters of the benchmark.
    parameters: Value,
    /// True if any tier's speed is emulated.
    pub(super) emulated: bool,
    /// Medians of the runs, for each tier, size and dump.
    pub(super) medians: Vec<Median>,
    /// First and further dumps of the largest size, as in the paper's Table 3.
    pub(super) second_dumps: Vec<SecondDump>,
    /// Suspend and resume of full dumps against the size, as in the paper's Figure 2.
    pub(super) fits: Vec<TierFit>,
    pub(super) skipped: Vec<Skipped>,
    /// Two jobs under each policy, as in the paper's Figures 4 and 6.
    pub(super) jobs: Vec<JobRun>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) model: Option<Model>,
    paper: Paper,
    pub(super) measurements: Vec<Measurement>,
}

/// Measurements of the paper, on its authors' machine.
#[derive(Clone, Copy, Debug, Serialize)]
struct Paper {
    source: &'static str,
    table_3: [Table3; 3],
    figure_2: &'static str,
}

/// Medians of all runs of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Median {
    pub(super) tier: String,
    pub(super) emulated: bool,
    pub(super) size_bytes: u64,
    pub(super) copies: Copies,
    pub(super) dirty_percent: Option<u64>,
    pub(super) runs: usize,
    pub(super) suspend_s: f64,
    pub(super) frozen_s: f64,
    pub(super) resume_s: f64,
    pub(super) stored_bytes: f64,
    /// Largest distance of a run's suspend from the median, seconds.
    pub(super) suspend_spread_s: f64,
}

/// A comparison of first and further dumps, like a line of the paper's Table 3.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct SecondDump {
    pub(super) tier: String,
    pub(super) emulated: bool,
    pub(super) copies: Copies,
    pub(super) size_bytes: u64,
    pub(super) dirty_percent: u64,
    pub(super) first_s: f64,
    pub(super) second_s: f64,
    /// Time of the first dump divided by that of the second.
    pub(super) ratio: f64,
    /// Stored bytes of the first dump divided by those of the second.
    pub(super) stored_ratio: f64,
    /// Line of the paper for a tier of that name: 5 GB with 10 % modified.
    pub(super) paper: Option<Table3>,
}

/// Lines fitted to one tier's times.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct TierFit {
    pub(super) tier: String,
    pub(super) emulated: bool,
    pub(super) copies: Copies,
    /// Line through suspend and resume together; `None` for fewer than two sizes.
    pub(super) suspend_and_resume: Option<Fit>,
    /// Medians as points (bytes, seconds).
    pub(super) points: Vec<(u64, f64)>,
}

impl Results {
    pub(super) fn new(
        plan: &Plan,
        machine: Machine,
        journal: &Journal,
        skipped: Vec<Skipped>,
    ) -> Result<Self, Failure> {
        let runs = journal.runs().iter();
        let measurements: Vec<Measurement> =
            runs.flat_map(|(_, measured)| measured).cloned().collect();
        let medians = medians(&measurements);
        Ok(Self {
            machine,
            parameters: journal.parameters().clone(),
            emulated: plan.tiers.iter().any(|tier| tier.emulate.is_some()),
            second_dumps: second_dumps(&medians),
            fits: fits(&medians),
            medians,
            skipped,
            jobs: journal.jobs().to_vec(),
            model: plan.model.then(|| Model::run(plan)).transpose()?,
            paper: Paper {
                source: "Li et al., Improving Preemptive Scheduling with Application-Transparent Checkpointing in Shared Clusters, Middleware '15; their machine, their numbers",
                table_3: paper::TABLE_3,
                figure_2: paper::FIGURE_2,
            },
            measurements,
        })
    }
}

/// Returns the medians, in the order in which they were measured first.
fn medians(measurements: &[Measurement]) -> Vec<Median> {
    let mut groups: Vec<Vec<&Measurement>> = Vec::new();
    let key = |m: &Measurement| (m.tier.clone(), m.size_bytes, m.copies, m.dirty_percent);
    for measurement in measurements {
        let group = groups.iter_mut().find(|group| {
            group
                .first()
                .is_some_and(|first| key(first) == key(measurement))
        });
        match group {
            Some(group) => group.push(measurement),
            None => groups.push(vec![measurement]),
        }
    }
    groups
        .iter()
        .filter_map(|group| {
            let first = group.first()?;
            let of = |pick: fn(&Measurement) -> f64| median(group.iter().map(|m| pick(m)));
            let suspend_s = of(|m| m.suspend_s);
            Some(Median {
                tier: first.tier.clone(),
                emulated: first.emulated,
                size_bytes: first.size_bytes,
                copies: first.copies,
                dirty_percent: first.dirty_percent,
                runs: group.len(),
                suspend_s,
                frozen_s: of(|m| m.frozen_s),
                resume_s: of(|m| m.resume_s),
                stored_bytes: of(|m| m.stored_bytes as f64),
                suspend_spread_s: group
                    .iter()
                    .map(|m| (m.suspend_s - suspend_s).abs())
                    .fold(0.0, f64::max),
            })
        })
        .collect()
}

fn second_dumps(medians: &[Median]) -> Vec<SecondDump> {
    let largest = |of: &Median| {
        let alike = medians
            .iter()
            .filter(|other| (&other.tier, other.copies) == (&of.tier, of.copies));
        alike.map(|other| other.size_bytes).max()
    };
    medians
        .iter()
        .filter(|second| Some(second.size_bytes) == largest(second))
        .filter_map(|second| {
            let dirty_percent = second.dirty_percent?;
            let first = medians.iter().find(|first| {
                first.dirty_percent.is_none()
                    && (&first.tier, first.copies, first.size_bytes)
                        == (&second.tier, second.copies, second.size_bytes)
            })?;
            Some(SecondDump {
                tier: second.tier.clone(),
                emulated: second.emulated,
                copies: second.copies,
                size_bytes: second.size_bytes,
                dirty_percent,
                first_s: first.suspend_s,
                second_s: second.suspend_s,
                ratio: first.suspend_s / second.suspend_s,
                stored_ratio: first.stored_bytes / second.stored_bytes.max(1.0),
                paper: Table3::of(&second.tier)
                    .filter(|_| dirty_percent == paper::TABLE_3_DIRTY_PERCENT),
            })
        })
        .collect()
}

fn fits(medians: &[Median]) -> Vec<TierFit> {
    let mut fits: Vec<TierFit> = Vec::new();
    for median in medians.iter().filter(|m| m.dirty_percent.is_none()) {
        let point = (median.size_bytes, median.suspend_s + median.resume_s);
        let fit = fits
            .iter_mut()
            .find(|fit| (&fit.tier, fit.copies) == (&median.tier, median.copies));
        match fit {
            Some(fit) => fit.points.push(point),
            None => fits.push(TierFit {
                tier: median.tier.clone(),
                emulated: median.emulated,
                copies: median.copies,
                suspend_and_resume: None,
                points: vec![point],
            }),
        }
    }
    for fit in &mut fits {
        fit.points.sort_by_key(|(bytes, _)| *bytes);
        fit.suspend_and_resume = Fit::through(&fit.points);
    }
    fits
}

/// Returns the tier's name, marked if its speed is emulated.
pub(super) fn label(tier: &str, emulated: bool) -> String {
    if emulated {
        format!("{tier} (emulated)")
    } else {
        tier.to_owned()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns measurements for tests: `suspend_s` for a full dump, a tenth of it for the second; resumes take
    /// half.
    pub(in crate::tiers) fn measured(
        tier: &str,
        gib: u64,
        dirty_percent: Option<u64>,
        run: u32,
        suspend_s: f64,
    ) -> Measurement {
        Measurement {
            tier: tier.to_owned(),
            emulated: tier != "disk",
            medium: format!("emulated {tier} over file"),
            size_bytes: gib << 30,
            copies: Copies::Local,
            dirty_percent,
            run,
            suspend_s,
            frozen_s: suspend_s / 2.0,
            resume_s: suspend_s / 2.0,
            memory_bytes: gib << 30,
            stored_bytes: (gib << 30) * dirty_percent.unwrap_or(100) / 100,
            cold: false,
            soft_dirty: false,
            verified: true,
        }
    }

    #[test]
    fn the_median_counts_and_the_spread_is_told() {
        let runs = [(1, 3.0), (2, 2.0), (3, 7.0)];
        let measurements: Vec<_> = runs
            .iter()
            .map(|&(run, seconds)| measured("hdd", 1, None, run, seconds))
            .collect();
        let medians = medians(&measurements);
        assert_eq!(medians.len(), 1);
        assert_eq!((medians[0].runs, medians[0].suspend_s), (3, 3.0));
        assert_eq!(medians[0].suspend_spread_s, 4.0);
        assert!(medians[0].emulated);
    }

    #[test]
    fn second_dumps_stand_beside_the_papers() {
        let measurements = [
            measured("hdd", 1, None, 1, 30.0),
            measured("hdd", 1, Some(10), 1, 3.0),
            measured("hdd", 5, None, 1, 160.0),
            measured("hdd", 5, Some(10), 1, 16.0),
            measured("hdd", 5, Some(50), 1, 80.0),
            measured("disk", 5, None, 1, 10.0),
            measured("disk", 5, Some(10), 1, 2.0),
        ];
        let dumps = second_dumps(&medians(&measurements));
        let seen: Vec<_> = dumps
            .iter()
            .map(|d| (d.tier.as_str(), d.dirty_percent, d.ratio, d.paper.is_some()))
            .collect();
        assert_eq!(
            seen,
            [
                ("hdd", 10, 10.0, true),
                ("hdd", 50, 2.0, false),
                ("disk", 10, 5.0, false)
            ]
        );
        assert!((dumps[0].paper.unwrap().ratio() - 11.03).abs() < 0.01);
        assert!((dumps[0].stored_ratio - 10.0).abs() < 1e-6);
    }

    #[test]
    fn a_line_goes_through_the_full_dumps_of_a_tier() {
        let measurements = [
            measured("hdd", 4, None, 1, 8.0),
            measured("hdd", 1, None, 1, 2.0),
            measured("hdd", 1, Some(10), 1, 100.0),
            measured("ssd", 1, None, 1, 2.0),
        ];
        let fits = fits(&medians(&measurements));
        assert_eq!(fits.len(), 2);
        assert_eq!(fits[0].points, [(1 << 30, 3.0), (4 << 30, 12.0)]);
        let fit = fits[0].suspend_and_resume.unwrap();
        // 3 s a GiB.
        assert!((fit.s_per_gb - 3.0 / 1.073_741_824).abs() < 1e-9);
        assert_eq!(fits[1].suspend_and_resume, None);
    }
}
