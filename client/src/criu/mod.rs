//! Running CRIU: its options, its process, its log and its statistics.

mod log;
pub mod options;
mod run;

pub use log::{Digest, digest};
pub use run::{Criu, CriuError, Finished, Run, Running};
