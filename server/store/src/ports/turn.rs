//! Admission of a transfer to the medium.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Right of a transfer to run on the medium. Dropping it ends the transfer, and the next one is admitted.
pub trait TransferSlot: Send {
    /// Sets the counter of the bytes that the transfer has moved.
    fn follow(&mut self, counter: Arc<AtomicU64>);
}
