//! Repair: bringing every checkpoint of a cluster to as many copies as it should have.

mod plan;
mod pull;
mod throttle;

pub use plan::{Action, NodeState, plan};
pub use pull::Puller;
pub use throttle::{Limits, Pace, Throttle, ThrottledSink};
