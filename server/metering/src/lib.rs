//! Costs and queues: measures and predicts the performance of this node, and decides when dumps and restores
//! may run.
#![forbid(unsafe_code)]

pub mod copying;
pub mod costs;
mod queue_report;
pub mod queues;
pub mod throttle;

pub use queue_report::QueueReport;
