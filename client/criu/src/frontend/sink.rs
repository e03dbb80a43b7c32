//! Destination of the pages of a page-server conversation.

use permafrost_protocol::pageserver::SpaceId;

/// Refusal of data that CRIU sends; the dump fails, and the server goes on.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct SinkError {
    /// Reason of the refusal, for the user who dumps.
    pub message: String,
    /// Status with which CRIU's CLOSE is answered: an errno, never 0.
    pub status: i32,
}

/// Takes the pages of one dump, in the order CRIU sends them.
///
/// After any method has failed, only [`PageSink::abort`] is called.
pub trait PageSink: Send {
    /// Begins a new address space, which ends the one before. Returns true if it exists in the parent, so that
    /// CRIU may send holes for clean pages.
    ///
    /// # Errors
    /// A reason why the sink cannot take the space.
    fn open(&mut self, space: SpaceId) -> Result<bool, SinkError>;

    /// Returns true if `space` exists in the parent.
    ///
    /// # Errors
    /// A reason why the sink cannot tell.
    fn has_parent(&mut self, space: SpaceId) -> Result<bool, SinkError>;

    /// Takes whole pages at `vaddr` of the open space; `flags` are CRIU's `PE_*`.
    ///
    /// # Errors
    /// No room, or a failure of the medium.
    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), SinkError>;

    /// Returns true if pages take the sink longer than the socket they come from: it is then called from a second
    /// thread while the next pages are received, one call after the other as before.
    fn is_slow(&self) -> bool {
        false
    }

    /// Takes `nr_pages` pages at `vaddr` from the parent.
    ///
    /// # Errors
    /// The parent lacks one of them.
    fn hole(&mut self, vaddr: u64, nr_pages: u64) -> Result<(), SinkError>;

    /// Completes the dump at CRIU's CLOSE, the commit gate: when this returns `Ok`, CRIU lets the task go, so
    /// the pages must be as durable as the session requires.
    ///
    /// # Errors
    /// The pages are not durable; CRIU rolls the dump back.
    fn close(&mut self) -> Result<(), SinkError>;

    /// Forgets a dump that ended without a successful [`PageSink::close`].
    fn abort(&mut self, reason: &str);
}
