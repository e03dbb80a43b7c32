//! Checkpoints that this node does not hold, or holds damaged.

use permafrost_agent::remote::Holders;

/// The other nodes, as a store reads from them. All methods may be called on many threads at once.
pub trait Elsewhere: Holders {
    /// Of `holders`, those to ask, in this order; never this node.
    fn in_order(&self, holders: &[String]) -> Vec<String>;
}
