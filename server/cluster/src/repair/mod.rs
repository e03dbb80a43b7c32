//! Repair: makes the missing copies of every checkpoint of a cluster.

mod leader;
mod plan;
mod planner;
mod pull;
mod sink;
mod steps;
mod sweep;
mod thread;
mod timing;

#[cfg(test)]
mod tests;

pub use leader::{Leading, RepairBoard};
pub use permafrost_metering::copying::RepairProgress;
pub use permafrost_metering::throttle::{RepairLimits, Throttle};
pub use plan::{RepairAction, RepairNode, copies_that_count, plan, wanted_copies};
pub use pull::Puller;
pub use sink::ThrottledSink;
pub use steps::{ClusterView, CopyHealth, Peers, VERIFIED_WITHIN, View};
pub use sweep::{Standing, Sweep, SweepTiming, Swept};
pub use thread::Worker;
pub use timing::Timing;
