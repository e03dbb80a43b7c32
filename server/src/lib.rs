//! The storage node: the store over a region, its catalog, and what listens for CRIU and for `permafrost`.
#![forbid(unsafe_code)]

pub mod agents;
pub mod api;
pub mod audit;
pub mod catalog;
mod clock;
pub mod cluster;
pub mod config;
pub mod costs;
pub mod daemon;
pub mod denials;
pub mod elsewhere;
pub mod metrics;
pub mod offline;
pub mod peers;
mod private;
mod private_file;
pub mod queues;
pub mod quotas;
pub mod repair;
pub mod replication;
pub mod scrub;
pub mod store;
