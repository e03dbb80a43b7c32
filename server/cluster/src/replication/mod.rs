//! Copies of a dump on other nodes, while it streams: [`FanOut`] is the port
//! [`Replicate`](permafrost_clustered::Replicate) of a node in a cluster.

mod fanout;
mod incoming;

pub use fanout::{FanOut, FanOutStats, View};
pub use incoming::apply;
