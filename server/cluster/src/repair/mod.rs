//! Repair: makes the missing copies of every checkpoint of a cluster.

mod leader;
mod plan;
mod planner;
mod progress;
mod pull;
mod steps;
mod sweep;
mod thread;
mod throttle;
mod timing;

#[cfg(test)]
mod tests;

pub use leader::Leading;
pub use plan::{RepairAction, RepairNode, copies_that_count, plan, wanted_copies};
pub use progress::RepairProgress;
pub use pull::Puller;
pub use steps::{ClusterView, CopyHealth, Peers, VERIFIED_WITHIN, View};
pub use sweep::{Standing, Sweep, SweepTiming, Swept};
pub use thread::Worker;
pub use throttle::{RepairLimits, RepairThrottle, Throttle, ThrottledSink};
pub use timing::Timing;
