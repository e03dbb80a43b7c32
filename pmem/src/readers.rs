//! References to checkpoints that exist, and the slots that are kept for them.
//!
//! A reference lends pages from the slots that its segments are in. When a segment is moved, the references that
//! exist may have lent from the slot that it leaves, so they keep that slot until they are dropped.

use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crate::alloc::{Lease, SlotHold};
use crate::ids::{SegmentNo, SlotNo};
use crate::space::Space;

/// All references to checkpoints of a region.
#[derive(Default)]
pub(crate) struct Readers(Mutex<Registered>);

#[derive(Default)]
struct Registered {
    next: u64,
    kept: HashMap<u64, Weak<Kept>>,
}

/// Slots that are kept for one reference.
struct Kept {
    lease: Arc<Lease>,
    slots: Mutex<Vec<Arc<SlotHold>>>,
}

/// A registered reference, until it is dropped.
pub(crate) struct Reader {
    space: Arc<Space>,
    number: u64,
    kept: Arc<Kept>,
}

impl Reader {
    pub(crate) fn new(space: &Arc<Space>, lease: &Arc<Lease>) -> Self {
        let kept = Arc::new(Kept {
            lease: Arc::clone(lease),
            slots: Mutex::default(),
        });
        let mut registered = space.readers.registered();
        let number = registered.next;
        registered.next += 1;
        registered.kept.insert(number, Arc::downgrade(&kept));
        drop(registered);
        Self {
            space: Arc::clone(space),
            number,
            kept,
        }
    }

    /// Returns true if `test` does for a slot that is kept for this reference.
    pub(crate) fn any_slot(&self, mut test: impl FnMut(SlotNo) -> bool) -> bool {
        self.kept.slots().iter().any(|hold| test(hold.slot))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.space.readers.registered().kept.remove(&self.number);
    }
}

impl Readers {
    /// Keeps the slots that segments have left for all references whose checkpoints hold those segments. To be called
    /// after the table names the new places: references made since never see the old ones.
    pub(crate) fn keep(&self, left: &[(SegmentNo, Arc<SlotHold>)]) {
        let registered = self.registered();
        // Dropped after the lock, as the last one gives slots back.
        let existing: Vec<_> = registered.kept.values().filter_map(Weak::upgrade).collect();
        drop(registered);
        for kept in existing {
            let holds = left
                .iter()
                .filter(|(segment, _)| kept.lease.holds(*segment));
            kept.slots().extend(holds.map(|(_, hold)| Arc::clone(hold)));
        }
    }

    fn registered(&self) -> MutexGuard<'_, Registered> {
        self.0.lock()
    }
}

impl Kept {
    fn slots(&self) -> MutexGuard<'_, Vec<Arc<SlotHold>>> {
        self.slots.lock()
    }
}
