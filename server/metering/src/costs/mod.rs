//! Measures this node, predicts from the measurements, and reports them to other nodes.
//!
//! ```text
//!  dumps, restores, copies, pulls ─┐                    ┌─▶ report ──▶ NodeFacts in the registry ──▶ believe, elsewhere
//!  probes of an idle node ─────────┼─▶ measure (Costs) ─┼─▶ predict: size and time of the next dump
//!  figures.json of the last run ───┘                    └─▶ metrics, events
//! ```
//!
//! Nothing here is on the path of a page: a dump takes a lock when it begins and when it is over.

mod begin;
mod channels;
mod ended;
mod jobs;
mod measure;
mod observer;
mod predict;
mod probe;
mod publish;
mod report;
mod running;
mod start;
mod state;
mod swap;
mod tiers;

pub use begin::MeteredTransfer;
pub use measure::ScrubDone;
pub use observer::Learning;
pub use probe::noise;
pub use probe::{LINK_PROBE_BYTES, Links, PROBE_BYTES, Prober, Probing};
pub use publish::Publication;
pub use report::lenient_report;
pub use report::{Believed, NodeReport, Reports, believe};
pub use start::{InstallError, SavedFigures, StartSample, StartWhat};
pub use state::{Comparisons, CostCounters, Costs, CostsConfig, TransferOutcome};

use std::time::Duration;

use permafrost_scheduling::quantity::Seconds;

/// Converts a duration to the figures' type. A machine's clock always gives a valid one.
fn seconds(time: Duration) -> Seconds {
    Seconds::new(time.as_secs_f64()).unwrap_or(Seconds::MAX)
}

#[cfg(test)]
mod tests;
