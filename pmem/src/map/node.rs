//! Map nodes in a region: each covers an aligned block of indices, with eight slots of equal length.

use permafrost_medium::convert::to_usize;

pub(super) use crate::layout::node::{
    Below, MAX_LEVEL, MapNode, NODE_BYTES, NodeRef, block_of, is_zeros, page_entry, slot_of,
    span_pages, zeros_entry,
};

use crate::PAGE_SIZE;
use crate::checkpoint::StoredCheckpoint;
use crate::error::{MapFault, PageError, SegmentPlace, outside};
use crate::layout::node::{NODE_ENTRY_BYTES, NODE_HEADER_BYTES};
use crate::space::Space;

/// Copies a node out of the region and verifies it: its checksum, its place in one of the checkpoint's segments,
/// and that it is of a level up to `most`.
pub(super) fn load(
    checkpoint: &StoredCheckpoint,
    at: NodeRef,
    most: u8,
) -> Result<MapNode, PageError> {
    let (space, location) = (checkpoint.space(), at.location);
    let place = space.geometry.place(location, 1);
    let place = place.map_err(|_| outside(location))?;
    if !checkpoint.lease().holds(place.segment) {
        return Err(outside(location));
    }
    let node = read(space, place, at, most);
    // If the page is a root it has a second copy, and the node with it.
    match node.is_err().then(|| space.second_copy(place)).flatten() {
        Some(copy) => read(space, copy, at, most).or(node),
        None => node,
    }
}

/// Reads and verifies a node in the page at `place`.
fn read(space: &Space, place: SegmentPlace, at: NodeRef, most: u8) -> Result<MapNode, PageError> {
    let location = at.location;
    let malformed = |_| PageError::MapCorrupt {
        location,
        fault: MapFault::Malformed,
    };
    let mut bytes = [0; NODE_BYTES];
    let room = PAGE_SIZE.saturating_sub(usize::from(at.offset));
    if room < NODE_HEADER_BYTES {
        return Err(malformed(()));
    }
    let bytes = &mut bytes[..room.min(NODE_BYTES)];
    let read = space.read_part(place, location, usize::from(at.offset), bytes);
    read.map_err(|error| error.at(location))?;
    // Which bytes the checksum is of follows from one of them: if it is wrong, the checksum is, too.
    let slots = bytes[NODE_HEADER_BYTES - 1];
    let len = NODE_HEADER_BYTES + NODE_ENTRY_BYTES * to_usize_of(slots.count_ones());
    let found = crc32fast::hash(&bytes[..len.min(bytes.len())]);
    if found != at.crc32 {
        if let Some(key) = space.locked(place.segment) {
            return Err(PageError::Locked { location, key });
        }
        let fault = MapFault::Checksum {
            expected: at.crc32,
            found,
        };
        return Err(PageError::MapCorrupt { location, fault });
    }
    let node = MapNode::parse(bytes).ok_or_else(|| malformed(()))?;
    if node.level > most {
        return Err(malformed(()));
    }
    Ok(node)
}

fn to_usize_of(count: u32) -> usize {
    to_usize(u64::from(count))
}

/// Converts a run's page count to a length.
pub(super) fn run_len(pages: u32) -> usize {
    to_usize_of(pages) * PAGE_SIZE
}
