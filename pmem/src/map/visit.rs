//! Visiting all pages that a map consists of and refers to.

use permafrost_liveness::{Found, Liveness};

use super::PageMap;
use super::node::{MapNode, NodeRef, is_zeros};
use crate::error::PageError;

/// Level from which nodes are remembered with the pages below them: one for 64 pages.
const REMEMBERED: u8 = 1;

impl PageMap {
    /// Adds the page of each node of the map and each stored page to what was found. Reads the nodes that are not
    /// remembered, verified, and no other page. After an error the caller gives back what was found.
    /// The pages of a manifest count as nodes.
    pub(crate) fn visit(
        &self,
        known: &mut Liveness,
        found: &mut Found,
        is_manifest: bool,
    ) -> Result<(), PageError> {
        if self.root().is_empty() || share(known, self.root().node(), found) {
            return Ok(());
        }
        match self.root_node()? {
            Some((at, node)) => self.visit_node((at, &node), known, found, is_manifest),
            None => Ok(()),
        }
    }

    /// Visits a node that is not remembered.
    fn visit_node(
        &self,
        (at, node): (NodeRef, &MapNode),
        known: &mut Liveness,
        found: &mut Found,
        is_manifest: bool,
    ) -> Result<(), PageError> {
        if node.level < REMEMBERED {
            return self.visit_slots((at, node), known, found, is_manifest);
        }
        let mut below = Found::default();
        if let Err(error) = self.visit_slots((at, node), known, &mut below, is_manifest) {
            known.give_back(below);
            return Err(error);
        }
        known.add_node((at.location, at.offset), below);
        found.add_node((at.location, at.offset));
        Ok(())
    }

    fn visit_slots(
        &self,
        (at, node): (NodeRef, &MapNode),
        known: &mut Liveness,
        found: &mut Found,
        is_manifest: bool,
    ) -> Result<(), PageError> {
        self.place(at.location, 1)?;
        found.add_node_page(at.location);
        for (slot, entry) in node.occupied().filter(|(_, entry)| !is_zeros(entry)) {
            let below = NodeRef::of(entry);
            if node.level == 0 {
                self.place(below.location, 1)?;
                match is_manifest {
                    true => found.add_node_page(below.location),
                    false => found.add_page(below.location),
                }
            } else if !share(known, below, found) {
                let child = self.child(node, slot, entry)?;
                self.visit_node((below, &child), known, found, is_manifest)?;
            }
        }
        Ok(())
    }
}

/// Adds a node that is remembered; returns false if it is not.
fn share(known: &mut Liveness, at: NodeRef, found: &mut Found) -> bool {
    let key = (at.location, at.offset);
    let is_known = known.share(key);
    if is_known {
        found.add_node(key);
    }
    is_known
}
