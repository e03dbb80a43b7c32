//! The experiment of Figures 4 and 6 calculated at the paper's scale: one minute and 5 GB for each job. Nothing
//! is measured.

use permafrost_scheduling::quantity::{BytesPerSecond, Ratio};
use permafrost_scheduling::sensitivity::{
    Jobs, Policy, Power, SimulatedOutcome, Storage, simulate,
};
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::table::{Align, Table};
use serde::Serialize;

use super::paper::{TABLE_3, TABLE_3_GB};
use super::plan::Plan;

/// Decades of the bandwidths: from 10 MB/s to 10 GB/s, eight values a decade.
const DECADES: std::ops::Range<u32> = 1..4;
const A_DECADE: u32 = 8;

/// Result of a policy at a bandwidth. A line of model.csv.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Storage of the paper with that bandwidth; empty for values in between.
    pub(super) storage: &'static str,
    pub(super) bandwidth_bytes_per_s: f64,
    pub(super) policy: Policy,
    pub(super) high_response_s: f64,
    pub(super) low_response_s: f64,
    pub(super) makespan_s: f64,
    /// Joules with --power; otherwise seconds until both jobs have ended.
    pub(super) energy: f64,
}

/// Results of all policies at all bandwidths.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Model {
    /// Remark that nothing was measured.
    note: &'static str,
    pub(super) energy_unit: &'static str,
    pub(super) rows: Vec<Row>,
}

impl Model {
    pub(super) fn run(plan: &Plan) -> Result<Self, Failure> {
        let power = match plan.power {
            None => Power::TIME,
            Some((idle_w, busy_w)) => Power {
                idle_w,
                busy_w,
                checkpointing: Ratio::ONE,
            },
        };
        let mut rows = Vec::new();
        for (storage, bandwidth) in bandwidths() {
            let rate = BytesPerSecond::new(bandwidth)
                .map_err(|error| Failure::new(Code::Internal, error.to_string()))?;
            for policy in Policy::ALL {
                let outcome = simulate(policy, &Jobs::PAPER, &Storage::plain(rate))
                    .map_err(|error| Failure::new(Code::Internal, error.to_string()))?;
                rows.push(row(storage, bandwidth, policy, &outcome, &power));
            }
        }
        Ok(Self {
            note: "calculated by permafrost-scheduling, not measured: two jobs of 60 s and 5 GB, the second after 30 s (Li et al., Figures 4 and 6)",
            energy_unit: match plan.power {
                None => "s until both have ended",
                Some(_) => "J",
            },
            rows,
        })
    }

    /// Formats the results for the paper's devices as text.
    pub(super) fn human(&self) -> String {
        let mut table = Table::new([
            ("STORAGE (THE PAPER'S)", Align::Left),
            ("MB/S", Align::Right),
            ("POLICY", Align::Left),
            ("HIGH PRIORITY", Align::Right),
            ("LOW PRIORITY", Align::Right),
            ("ENERGY", Align::Right),
        ]);
        for row in self.rows.iter().filter(|row| !row.storage.is_empty()) {
            table.row([
                row.storage.to_owned(),
                format!("{:.1}", row.bandwidth_bytes_per_s / 1e6),
                row.policy.to_string(),
                format!("{:.2} s", row.high_response_s),
                format!("{:.2} s", row.low_response_s),
                format!("{:.1}", row.energy),
            ]);
        }
        format!(
            "{}\nEnergy: {}.\n\n{}",
            self.note,
            self.energy_unit,
            table.render()
        )
    }
}

fn row(
    storage: &'static str,
    bandwidth_bytes_per_s: f64,
    policy: Policy,
    outcome: &SimulatedOutcome,
    power: &Power,
) -> Row {
    Row {
        storage,
        bandwidth_bytes_per_s,
        policy,
        high_response_s: outcome.high_response.value(),
        low_response_s: outcome.low_response.value(),
        makespan_s: outcome.makespan.value(),
        energy: outcome.energy_j(power),
    }
}

/// Returns bandwidths that are evenly spread by magnitude, and those of Table 3 among them; slowest first.
fn bandwidths() -> Vec<(&'static str, f64)> {
    let steps = DECADES.start * A_DECADE..=DECADES.end * A_DECADE;
    let mut all: Vec<_> = steps
        .map(|step| ("", 1e6 * 10_f64.powf(f64::from(step) / f64::from(A_DECADE))))
        .collect();
    all.extend(TABLE_3.map(|line| (line.storage, TABLE_3_GB * 1e9 / line.first_s)));
    all.sort_by(|a, b| a.1.total_cmp(&b.1));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bandwidths_span_the_papers_devices() {
        let all = bandwidths();
        assert!((all[0].1 - 10e6).abs() < 1.0);
        assert!((all[all.len() - 1].1 - 10e9).abs() < 1e3);
        let named: Vec<_> = all.iter().filter(|(name, _)| !name.is_empty()).collect();
        assert_eq!(
            named.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            ["HDD", "SSD", "PMFS"]
        );
        assert!((named[0].1 - 29.554e6).abs() < 1e3);
    }
}
