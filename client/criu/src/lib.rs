//! CRIU: its process, options, log and statistics; its front ends (page server, streamer); its images directories;
//! and the process trees that it freezes.

#![forbid(unsafe_code)]

pub mod contents;
pub mod directory;
mod freeze;
pub mod frontend;
mod guard;
pub mod handles;
pub mod handover;
pub mod hooks;
pub mod kin;
mod log;
pub mod memory;
pub mod options;
pub mod origin;
pub mod processes;
pub mod restore_way;
pub mod rounds;
mod run;
pub mod scratch;
pub mod source;
pub mod tracking;
pub mod tree;
pub mod verdict;
pub mod way;

pub use freeze::FreezeLimit;
pub use guard::{Guarded, guard};
pub use log::{Digest, digest};
pub use run::{Criu, CriuError, CriuRun, Finished, Running};

/// Receiver of a long operation's progress: bytes done, bytes in all.
pub type ProgressReceiver<'a> = &'a mut dyn FnMut(u64, u64);
