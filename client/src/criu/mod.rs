//! Running CRIU: its options, its process, its log and its statistics.

mod freeze;
mod guard;
mod log;
pub mod options;
mod run;

pub use freeze::FreezeLimit;
pub use guard::{Guarded, guard};
pub use log::{Digest, digest};
pub use run::{Criu, CriuError, Finished, Run, Running};
