//! Opening a region: what a crash left becomes the sealed set again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use crate::alloc::Allocator;
use crate::checkpoint::Checkpoint;
use crate::convert::to_u64;
use crate::error::OpenError;
use crate::ids::CheckpointId;
use crate::journal::{self, Journal};
use crate::layout::RECORD_BYTES;
use crate::medium::Medium;
use crate::root;
use crate::space::Space;
use crate::superblock::{self, SuperblockState};

/// What opening found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryReport {
    /// The region had been closed. If not, it was in use when its host or process died.
    pub clean: bool,
    /// Times that it was not, this one included.
    pub unsafe_shutdowns: u64,
    /// Checkpoints found.
    pub checkpoints: u64,
    /// The last journal write was cut short: that operation did not happen.
    pub torn_record: bool,
    /// One superblock was unusable; the other one served, and it is written anew.
    pub superblock_damaged: bool,
    /// Journal records with one damaged copy, written anew from the other.
    pub records_repaired: u64,
    /// Root pages with one damaged copy. Left as they are: sealed pages are never written to.
    pub root_copies_damaged: u64,
}

/// An open region's parts.
pub(crate) struct Recovered {
    pub(crate) space: Arc<Space>,
    pub(crate) journal: Journal,
    pub(crate) superblock: SuperblockState,
    pub(crate) checkpoints: HashMap<CheckpointId, Arc<Checkpoint>>,
    pub(crate) report: RecoveryReport,
}

/// Reads a region and marks it as open. O(checkpoints) page reads, and the journal.
///
/// Everything is read and checked first, so a refusal has written nothing.
pub(crate) fn recover(medium: Arc<dyn Medium>) -> Result<Recovered, OpenError> {
    // 1. Superblocks; a crash while one was written leaves the other.
    let chosen = superblock::load(&*medium)?;
    let found = chosen.state;
    let (expected, capacity) = (found.geometry.capacity_bytes, medium.capacity_bytes());
    if capacity < expected {
        return Err(OpenError::Truncated {
            expected,
            found: capacity,
        });
    }

    // 2. Journal: the live checkpoints. A crash while a record was written has it there or not there;
    //    a crash in a compaction leaves the half that was active before.
    let replayed = journal::replay(&*medium, &found.geometry, found.uuid)?;
    let space = Arc::new(Space {
        medium,
        geometry: found.geometry,
        uuid: found.uuid,
        allocator: Mutex::new(Allocator::new(found.geometry.segments)),
    });

    // 3. Roots: who holds which segments. Segments of shadows that a crash or a shutdown cut short are
    //    in no root and therefore free, with nothing to undo.
    let mut checkpoints = HashMap::new();
    let mut root_copies_damaged = 0;
    for (&id, live) in replayed.journal.live() {
        let root = root::load(&space, id, live.root, live.root_crc32)?;
        root_copies_damaged += root.damaged_copies;
        let lease = root::hold(&space, &root);
        let manifest = (root.manifest, root.manifest_bytes);
        let place = (live.root, live.root_crc32);
        let (attrs, order) = (live.attrs, live.order);
        let checkpoint = Checkpoint::new(id, &space, lease, place, manifest, attrs, order);
        checkpoints.insert(id, Arc::new(checkpoint));
    }

    // 4. Repair records of which a crash left one copy. The same bytes over an intact copy change no
    //    chunk of it, so a crash here cannot lose it.
    for (at, record) in &replayed.repairs {
        // SAFETY: nobody else has the region yet, and no slice of the journal is ever lent.
        unsafe { space.medium.write(*at, record)? };
        space.medium.flush(*at, to_u64(RECORD_BYTES))?;
    }

    // 5. Zero the first chunk of what crashes left of torn records, so that no later record that is
    //    torn in its turn completes them. A crash here leaves a chunk as it is or zero: still torn.
    for &at in &replayed.remnants {
        // SAFETY: as above.
        unsafe { space.medium.write(at, &[0; journal::REMNANT_BYTES])? };
        space.medium.flush(at, to_u64(journal::REMNANT_BYTES))?;
    }

    // 6. Mark the region as open, in the superblock that was not chosen. A crash while it is written
    //    leaves the chosen one: the next open counts this one as never having happened.
    let unsafe_shutdowns = found.unsafe_shutdowns.saturating_add(u64::from(found.open));
    let superblock = found.next(true, unsafe_shutdowns);
    // Its fence is for steps 4 and 5, too; nothing is appended before it.
    superblock.store(&*space.medium)?;

    let report = RecoveryReport {
        clean: !found.open,
        unsafe_shutdowns,
        checkpoints: to_u64(checkpoints.len()),
        torn_record: replayed.torn,
        superblock_damaged: chosen.other_damaged,
        records_repaired: to_u64(replayed.repairs.len()),
        root_copies_damaged,
    };
    Ok(Recovered {
        space,
        journal: replayed.journal,
        superblock,
        checkpoints,
        report,
    })
}
