//! The right to run on the medium.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The right to run. Dropped, it has run, and the next one starts.
pub trait Turn: Send {
    /// `counter` counts the bytes that it has moved.
    fn follow(&mut self, counter: Arc<AtomicU64>);
}
