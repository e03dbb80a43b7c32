//! Cost model of suspending, resuming, killing and waiting, and the algorithms that decide by the costs.
//!
//! Pure functions and state machines over plain data: no clock, no socket, no file. The caller passes the time in
//! as a [`Moment`](quantity::Moment), and numbers nodes and tasks. Quantities, classes and words that requests name are
//! the types of the HTTP API, so that nothing is converted, and checked once.
//!
//! Paper numbers in the docs: 000 is Li et al., Middleware '15; 001 OS-assisted preemption; 004 BIG-C.
#![forbid(unsafe_code)]

pub mod bigc;
pub mod cost;
pub mod place;
pub mod policy;
pub mod preempt;
pub mod resume;
pub mod sensitivity;

pub use permafrost_api_types::quantity;
pub use permafrost_estimates::{NodeId, estimator, figure, size};
pub use permafrost_queues as queue;
use serde::{Deserialize, Serialize};

/// A task, numbered by the caller.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct TaskId(pub u64);
