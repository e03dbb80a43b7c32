//! Digest of a map: 32 bytes that identify its content, independent of the storage of its pages. A tree over aligned
//! blocks of indices, with the shape of the map's nodes: a node keeps the digest of its block, so that a block that did
//! not change is not hashed again.

use super::PageMap;
use super::node::{MapNode, NodeRef, is_zeros};
use crate::error::{MapFault, PageError};
use crate::layout::NODE_SLOTS;
use crate::layout::digest::{of_block, of_nothing, of_zeros};

impl PageMap {
    /// Computes the digest of the map's content anew, from all of its nodes, and compares it with those that they
    /// keep. It does not depend on the storage of the pages (docs/format.md, "Content digest"). Reads the map,
    /// verified, but no page: only a read of the pages compares them with their checksums.
    ///
    /// # Errors
    /// [`PageError::MapCorrupt`].
    pub fn digest(&self) -> Result<[u8; 32], PageError> {
        match self.root_node()? {
            Some((at, node)) => self.digest_of(at, &node),
            None => Ok(of_nothing()),
        }
    }

    fn digest_of(&self, at: NodeRef, node: &MapNode) -> Result<[u8; 32], PageError> {
        let digest = if node.level == 0 {
            node.leaf_digest()
        } else {
            let mut below = [(0, [0; 32]); NODE_SLOTS];
            let mut count = 0;
            for (slot, entry) in node.occupied() {
                let digest = if is_zeros(entry) {
                    of_zeros(node.level, node.slot_first(slot), entry.detail.get())
                } else {
                    let child = self.child(node, slot, entry)?;
                    self.digest_of(NodeRef::of(entry), &child)?
                };
                below[count] = (slot, digest);
                count += 1;
            }
            of_block(node.level, below.into_iter().take(count))
        };
        if digest == node.digest {
            return Ok(digest);
        }
        Err(PageError::MapCorrupt {
            location: at.location,
            fault: MapFault::Malformed,
        })
    }
}
