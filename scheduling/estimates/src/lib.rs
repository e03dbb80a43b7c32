//! Estimates from measurements: bandwidths and fixed times of nodes, sizes of checkpoints, and how far they were right.
//!
//! Pure functions and state machines over plain data: no clock, no socket, no file. The caller passes the time in
//! as a [`Moment`](quantity::Moment), and numbers nodes and tasks.
#![forbid(unsafe_code)]

pub mod estimator;
pub mod figure;
pub mod size;

pub use permafrost_api_types::quantity;
use serde::{Deserialize, Serialize};

/// A node, numbered by the caller.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct NodeId(pub u32);
