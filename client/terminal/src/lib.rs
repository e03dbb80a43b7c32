//! The shared parts of the subcommands of `permafrost`: the global options, failures and their exit codes, tables,
//! progress, interrupts.
#![forbid(unsafe_code)]

mod causes;
pub mod context;
pub mod descriptors;
pub mod failure;
pub mod human;
pub mod interrupt;
pub mod progress;
pub mod table;
pub mod visible;
