//! Maps the scheduler's nodes to the nodes that keep images.

use std::collections::HashMap;

use permafrost_api_types::nodes::{ListedNode, NodeState};

/// Nodes of Permafrost by the names that Kubernetes may have for their machines: their own names, and the host
/// of their failure domains.
pub(super) struct Sites<'a> {
    by_name: HashMap<&'a str, &'a ListedNode>,
    by_host: HashMap<&'a str, &'a ListedNode>,
}

impl<'a> Sites<'a> {
    pub(super) fn new(nodes: &'a [ListedNode]) -> Self {
        let mut by_host: HashMap<&str, &ListedNode> = HashMap::new();
        for node in nodes.iter().filter(|node| !node.host.is_empty()) {
            // Of two nodes on a machine the live one, else the first by name.
            let place = by_host.entry(&node.host).or_insert(node);
            if !is_there(place) && is_there(node) {
                *place = node;
            }
        }
        Self {
            by_name: nodes
                .iter()
                .map(|node| (node.name.as_str(), node))
                .collect(),
            by_host,
        }
    }

    /// Returns the node on the machine with this name in Kubernetes.
    pub(super) fn on(&self, machine: &str) -> Option<&'a ListedNode> {
        let named = self.by_name.get(machine);
        named.or_else(|| self.by_host.get(machine)).copied()
    }

    /// Returns true if a node with this name is live, and can be read from.
    pub(super) fn reads(&self, name: &str) -> bool {
        self.by_name.get(name).is_some_and(|node| is_there(node))
    }
}

fn is_there(node: &ListedNode) -> bool {
    node.live && !node.stopping && node.state != NodeState::Removed
}
