//! Decisions of the scrub: which checkpoint is verified next, when, and how fast. No I/O and no clock.

#![forbid(unsafe_code)]

mod pace;
mod schedule;

pub use pace::ScrubThrottle;
pub use schedule::{NextCheck, Schedule, ScrubCandidate, Why};
