//! Proofs: parts of a map's digest tree (docs/format.md, "Content digest"). Whoever has the digest of the map verifies
//! with them some of what the map has.

use std::ops::Range;

use super::PageMap;
use super::node::{MapNode, is_zeros, span_pages};
use crate::error::PageError;
use crate::layout::NODE_SLOTS;

/// Blocks that a proof shows down to their pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProofScope {
    /// All blocks but those that have all of their pages, each with these flags: the proof shows where pages are.
    Positions {
        /// Flags of the pages that need not be shown.
        flags: u16,
    },
    /// Slots with these indices: the proof shows flags and checksums of their pages.
    Indices(Range<u64>),
}

/// Record of a proof: a block, or what is in a slot of the block above. Each slot of a [`Block`](Self::Block) follows
/// it, ascending, with all that is below that slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProofRecord {
    /// A block of eight pages.
    Leaf {
        /// First index of the block.
        first_index: u64,
        /// Flags of each page that is there, and its CRC32; no CRC32 if it is zeros.
        pages: [Option<(u16, Option<u32>)>; NODE_SLOTS],
    },
    /// A block of eight blocks of `8^level` pages, at least two of which have pages.
    Block {
        /// Level of the block, at least 1.
        level: u8,
        /// First index of the block.
        first_index: u64,
        /// Bitmap of the slots that have pages.
        slots: u8,
    },
    /// A slot full of zero pages.
    Zeros {
        /// Flags of all pages.
        flags: u16,
    },
    /// A slot that has all of its pages, all with the flags of [`ProofScope::Positions`]. The flags are not verified by
    /// the digest, and the number of pages by that of the whole map only.
    Full {
        /// Digest of the slot's block.
        digest: [u8; 32],
    },
    /// A slot that has pages.
    Hidden {
        /// Digest of the slot's block.
        digest: [u8; 32],
    },
}

impl ProofScope {
    /// Returns true if what is in a slot is shown, down to its pages.
    fn shows(&self, slot: &Range<u64>, child: &MapNode) -> bool {
        match self {
            Self::Positions { flags } => {
                let fills = child.first_index == slot.start && child.end_index() == slot.end;
                !(fills && child.is_full() && child.flags == Some(*flags))
            }
            Self::Indices(range) => slot.start < range.end && range.start < slot.end,
        }
    }

    /// Returns the record of a block that is not shown.
    fn outside(&self, block: &MapNode) -> ProofRecord {
        let digest = block.digest;
        match self {
            Self::Positions { .. } => ProofRecord::Full { digest },
            Self::Indices(_) => ProofRecord::Hidden { digest },
        }
    }
}

impl PageMap {
    /// Passes on the records of a proof: none if the map has no page. Reads the shown blocks' nodes and those beside
    /// their paths, verified, and no page.
    ///
    /// # Errors
    /// [`PageError::MapCorrupt`]; an error of `take`.
    pub fn prove<E: From<PageError>>(
        &self,
        scope: &ProofScope,
        take: &mut impl FnMut(ProofRecord) -> Result<(), E>,
    ) -> Result<(), E> {
        match self.root_node()? {
            Some((_, root)) => self.prove_block(&root, true, scope, take),
            None => Ok(()),
        }
    }

    /// Passes on a block. The digest of a leaf is over its index, and that of a larger block is not. So a block whose
    /// place does not follow from the one above is `unplaced`, and shown down to a leaf in any case.
    fn prove_block<E: From<PageError>>(
        &self,
        node: &MapNode,
        unplaced: bool,
        scope: &ProofScope,
        take: &mut impl FnMut(ProofRecord) -> Result<(), E>,
    ) -> Result<(), E> {
        let first_index = node.first_index;
        if node.level == 0 {
            let mut pages = [None; NODE_SLOTS];
            for (slot, entry) in node.occupied() {
                let crc = (!is_zeros(entry)).then(|| entry.crc32.get());
                pages[slot] = Some((entry.detail.get(), crc));
            }
            return take(ProofRecord::Leaf { first_index, pages });
        }
        take(ProofRecord::Block {
            level: node.level,
            first_index,
            slots: node.slots(),
        })?;
        let mut unplaced = unplaced;
        for (slot, entry) in node.occupied() {
            // The first slot places the block: the digest of zeros is over their index, too.
            let places = std::mem::take(&mut unplaced);
            if is_zeros(entry) {
                let flags = entry.detail.get();
                take(ProofRecord::Zeros { flags })?;
                continue;
            }
            let child = self.child(node, slot, entry)?;
            let slot_first = node.slot_first(slot);
            let indices = slot_first..slot_first.saturating_add(span_pages(node.level));
            if places || scope.shows(&indices, &child) {
                let is_smaller = child.level + 1 < node.level;
                self.prove_block(&child, places || is_smaller, scope, take)?;
            } else {
                take(scope.outside(&child))?;
            }
        }
        Ok(())
    }
}
