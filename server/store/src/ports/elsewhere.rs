//! Remote sources of checkpoints that this node does not hold, or holds damaged.

use permafrost_agent::remote::Holders;

/// The other nodes, as sources that a store reads from. All methods may be called on many threads at once.
pub trait Elsewhere: Holders {
    /// Returns those of `holders` that are to be asked, in this order; never this node.
    fn in_order(&self, holders: &[String]) -> Vec<String>;
}
