//! A turn: as long as it is there, it runs.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_protocol::control;
use permafrost_scheduling::queue::Ticket;

use super::lane::Lane;

/// What came of waiting for so long and no longer.
#[derive(Debug)]
pub enum Entered {
    /// It may begin.
    Turn(Turn),
    /// Not yet. Its place is kept under the token for half a minute.
    Later(control::Waiting),
}

/// The right to run. Dropped, it has run, and the next one starts.
pub struct Turn {
    lane: Arc<Lane>,
    ticket: Ticket,
    moved: Arc<AtomicU64>,
}

impl Turn {
    pub(super) fn new(lane: Arc<Lane>, ticket: Ticket, moved: Arc<AtomicU64>) -> Self {
        Self {
            lane,
            ticket,
            moved,
        }
    }

    /// It has moved so many bytes so far. Costs a store; to be called as often as one likes.
    pub fn moved(&self, bytes: u64) {
        self.moved.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Tells what was moved of all on to `progress`, and takes note.
    pub fn tells<'a>(&'a self, progress: &'a mut dyn FnMut(u64, u64)) -> impl FnMut(u64, u64) + 'a {
        move |done_bytes, total_bytes| {
            self.moved(done_bytes);
            progress(done_bytes, total_bytes);
        }
    }

    /// It turned out that there is so much to move, bytes.
    pub fn expect(&self, bytes: u64) {
        self.lane.expect(self.ticket, bytes);
    }
}

impl permafrost_store::Turn for Turn {
    fn follow(&mut self, counter: Arc<AtomicU64>) {
        self.lane.follow(self.ticket, &counter);
        self.moved = counter;
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn")
            .field("ticket", &self.ticket)
            .finish_non_exhaustive()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.lane.finish(self.ticket);
    }
}
