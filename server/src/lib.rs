//! The storage node: the store over a region, its catalog, and what listens for CRIU and for `permafrost`.
#![forbid(unsafe_code)]

pub mod agents;
pub mod config;
pub mod daemon;
pub mod denials;
mod error;
mod members;
pub mod offline;
pub mod peers;
