//! An admitted transfer: it runs as long as its value lives.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_protocol::control;
use permafrost_scheduling::queue::QueueTicket;

use super::lane::Lane;

/// Result of a wait that is limited in time.
#[derive(Debug)]
pub enum Entered {
    /// The transfer is admitted.
    Turn(AdmittedTransfer),
    /// The transfer is not admitted yet. Its place is kept under the token for half a minute.
    Later(control::Waiting),
}

/// Right of a transfer to run. Dropping it ends the transfer, and the next one is admitted.
pub struct AdmittedTransfer {
    lane: Arc<Lane>,
    ticket: QueueTicket,
    moved: Arc<AtomicU64>,
}

impl AdmittedTransfer {
    pub(super) fn new(lane: Arc<Lane>, ticket: QueueTicket, moved: Arc<AtomicU64>) -> Self {
        Self {
            lane,
            ticket,
            moved,
        }
    }

    /// Records the total bytes moved so far. Costs a store; may be called at any rate.
    pub fn moved(&self, bytes: u64) {
        self.moved.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Returns a callback that records the bytes moved, and passes the progress on to `progress`.
    pub fn tells<'a>(&'a self, progress: &'a mut dyn FnMut(u64, u64)) -> impl FnMut(u64, u64) + 'a {
        move |done_bytes, total_bytes| {
            self.moved(done_bytes);
            progress(done_bytes, total_bytes);
        }
    }

    /// Sets the total bytes to move, once they are known.
    pub fn expect(&self, bytes: u64) {
        self.lane.expect(self.ticket, bytes);
    }
}

impl permafrost_store::TransferSlot for AdmittedTransfer {
    fn follow(&mut self, counter: Arc<AtomicU64>) {
        self.lane.follow(self.ticket, &counter);
        self.moved = counter;
    }
}

impl fmt::Debug for AdmittedTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn")
            .field("ticket", &self.ticket)
            .finish_non_exhaustive()
    }
}

impl Drop for AdmittedTransfer {
    fn drop(&mut self) {
        self.lane.finish(self.ticket);
    }
}
