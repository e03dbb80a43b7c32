//! What scenarios over real processes share with `cargo xtask`: where the binaries and CRIU are, a
//! workload that can tell whether its memory survived, a `permafrostd` of one's own, and CRIU's figures.

#![forbid(unsafe_code)]

pub mod binaries;
pub mod cluster;
pub mod contents;
pub mod criu;
pub mod daemon;
pub mod etcd;
pub mod faketime;
pub mod net;
pub mod process;
pub mod random;
pub mod runc;
pub mod slurm;
pub mod status;
pub mod workload;
