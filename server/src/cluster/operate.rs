//! What people do with the cluster: look at its nodes, drain, remove and take back, rebuild the registry.

use permafrost_protocol::control::{NodeList, Rebuilt, request};

use crate::store::StoreError;

/// Answers `permafrost node …`. Everything blocks.
pub trait Operate: Send + Sync {
    /// The nodes, or one of them. Without the registry they are told as last seen, and nothing is counted.
    ///
    /// # Errors
    /// No such node.
    fn nodes(&self, nodes: &request::Nodes) -> Result<NodeList, StoreError>;

    /// Drains a node, takes it back, or removes it.
    ///
    /// # Errors
    /// No such node or state; it lives and is not drained; it alone holds something; unavailable.
    fn set_node(&self, set: &request::SetNode) -> Result<NodeList, StoreError>;

    /// Lists again what the nodes hold.
    ///
    /// # Errors
    /// Unavailable. It can be repeated.
    fn rebuild(&self, rebuild: &request::Rebuild) -> Result<Rebuilt, StoreError>;
}

/// What a node without a cluster answers.
pub(crate) fn no_cluster() -> StoreError {
    StoreError::Invalid {
        message: "this node is in no cluster".to_owned(),
        hint: "permafrostd --catalog etcd://… joins one; without it there is one machine, and `permafrost status` shows it",
    }
}
