//! Costs and queues: what this node measures of itself and predicts by that, and who may dump and restore when.
#![forbid(unsafe_code)]

pub mod costs;
pub mod queues;
