//! The CRIU front ends, the control-socket client, and the parts of the `permafrost` command.
#![forbid(unsafe_code)]

pub mod control;
pub mod framing;
pub mod verdict;
