//! Repair: bringing every checkpoint of a cluster to as many copies as it should have.

mod plan;

pub use plan::{Action, NodeState, plan};
