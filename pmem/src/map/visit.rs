//! Visiting all pages that a map consists of and refers to.

use std::collections::HashSet;

use super::PageMap;
use super::node::{Node, NodeRef, is_zeros};
use crate::error::PageError;
use crate::ids::PageNo;

/// Level from which nodes are remembered as visited: a hundredth of all nodes.
const REMEMBERED: u8 = 2;

/// Nodes that were visited with everything below them: maps share them.
#[derive(Default)]
pub(crate) struct Visited(HashSet<(PageNo, u16)>);

impl PageMap {
    /// Calls `visit` for the page of each node of the map (true) and for each stored page (false), but not for what is below a node
    /// that was visited before. Reads the nodes, verified, and no other page.
    pub(crate) fn visit(
        &self,
        visited: &mut Visited,
        visit: &mut dyn FnMut(PageNo, bool),
    ) -> Result<(), PageError> {
        match self.root_node()? {
            Some((at, node)) => self.visit_node(at, &node, visited, visit),
            None => Ok(()),
        }
    }

    fn visit_node(
        &self,
        at: NodeRef,
        node: &Node,
        visited: &mut Visited,
        visit: &mut dyn FnMut(PageNo, bool),
    ) -> Result<(), PageError> {
        visit(at.location, true);
        for (slot, entry) in node.occupied().filter(|(_, entry)| !is_zeros(entry)) {
            let below = NodeRef::of(entry);
            if node.level == 0 {
                visit(below.location, false);
            } else if !visited.0.contains(&(below.location, below.offset)) {
                let child = self.child(node, slot, entry)?;
                self.visit_node(below, &child, visited, visit)?;
            }
        }
        // Not before: another map would otherwise skip what is damaged here.
        if node.level >= REMEMBERED {
            visited.0.insert((at.location, at.offset));
        }
        Ok(())
    }
}
