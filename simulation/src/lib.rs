//! Simulator of a cluster: replays a workload through a policy of [`permafrost_scheduling::policy`].
//!
//! The simulator decides nothing and has no formula of costs. The [`Policy`](permafrost_scheduling::policy::Policy)
//! that is deployed decides; the cost model gives the durations of dumps and restores; the queues, the estimator and
//! the view of the cluster are those of the daemon and of schedulers. The simulator feeds them timestamps. Spark alone,
//! with which paper 003 compares Pado, has a stand-in among the figures.
//!
//! It is deterministic: events are ordered by their time and then by the order in which they were scheduled, and
//! random numbers come from a generator of its own, so that a seed gives the same bytes with every version of every
//! library. Only [`Decided`](engine::Decided), the time that decisions took on this machine, differs between runs.
//!
//! Paper numbers in the docs: 000 is Li et al., Middleware '15; 001 OS-assisted task preemption; 002 Natjam; 003 Pado;
//! 004 BIG-C.
#![forbid(unsafe_code)]

pub mod engine;
pub mod figures;
pub mod medium;
pub mod random;
pub mod sweep;
pub mod workload;
