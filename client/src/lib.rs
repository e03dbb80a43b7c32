//! The CRIU front ends, the control-socket client, and the parts of the `permafrost` command.
#![forbid(unsafe_code)]

pub mod agent;
pub mod api;
pub mod control;
pub mod criu;
pub mod directory;
pub mod framing;
pub mod frontend;
pub mod handover;
pub mod host;
pub mod identity;
pub mod memory;
pub mod origin;
pub mod peer;
pub mod processes;
pub mod remote;
pub mod scratch;
pub mod shares;
pub mod tracking;
pub mod tree;
pub mod verdict;
