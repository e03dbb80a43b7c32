//! Preempts process trees without an image: suspends them in memory (paper 001), and shrinks them in steps (paper 004).
//!
//! ```text
//!  target (a tree, or a control group) ─▶ members, read again until nothing new appears
//!     suspend: SIGTSTP, grace ─▶ freezer (v1, v2) ─▶ SIGSTOP        resume: thaw, SIGCONT
//!     shrink:  processor quota ─▶ memory limit, a step at a time    grow: the settings as they were
//!  record: a line in a file before each change, so that a killed command can be undone
//! ```

#![forbid(unsafe_code)]

pub mod cgroup;
mod error;
mod memory;
mod quota;
pub mod record;
mod shrink;
mod suspend;
mod target;

pub use error::PreemptError;
pub use shrink::{Grown, ShrinkEnd, ShrinkOptions, ShrinkOutcome, ShrinkStep, grow, shrink};
pub use suspend::{
    HeldBy, ResumeOutcome, SuspendOptions, SuspendOutcome, SuspendedProcess, resume, suspend,
};
pub use target::Target;

/// Function that returns true once the user has interrupted the command.
pub type Interrupted<'a> = &'a dyn Fn() -> bool;
