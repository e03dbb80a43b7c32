//! Support for scenarios over real processes, shared with `cargo xtask`: paths of the binaries and of CRIU, a
//! workload that can verify its memory, a `permafrostd` for one test, and CRIU's statistics.

#![forbid(unsafe_code)]

pub mod binaries;
pub mod browser;
pub mod cluster;
pub mod contents;
pub mod criu;
pub mod daemon;
pub mod etcd;
pub mod faketime;
pub mod net;
pub mod podman;
pub mod process;
pub mod promtool;
pub mod random;
pub mod runc;
pub mod s3;
pub mod script;
pub mod slurm;
pub mod status;
pub mod workload;
