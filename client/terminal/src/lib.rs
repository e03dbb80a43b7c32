//! The shared parts of the subcommands of `permafrost`: the global options, failures and their exit codes, tables,
//! progress, interrupts, names, words for costs, the origins that a restore trusts, and the action script.
#![forbid(unsafe_code)]

pub mod action;
pub mod api;
mod causes;
pub mod context;
pub mod descriptors;
pub mod failure;
pub mod human;
pub mod interrupt;
pub mod names;
pub mod progress;
pub mod table;
pub mod trust;
pub mod visible;
pub mod words;
