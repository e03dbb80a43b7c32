//! What a page-server conversation's pages go into.

use permafrost_protocol::pageserver::SpaceId;

/// Why a sink refuses what CRIU sends; the dump fails, the server goes on.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct SinkError {
    /// The reason in words, for the person who dumps.
    pub message: String,
    /// What CRIU reads as the status of its CLOSE: an errno, never 0.
    pub status: i32,
}

/// Takes the pages of one dump, in the order CRIU sends them.
///
/// After any method has failed none but [`PageSink::abort`] is called.
pub trait PageSink {
    /// A new address space begins (and the one before ends). Answers whether it exists in the parent, so
    /// that CRIU may send holes for clean pages.
    ///
    /// # Errors
    /// Whatever keeps the sink from taking it.
    fn open(&mut self, space: SpaceId) -> Result<bool, SinkError>;

    /// Whether `space` exists in the parent.
    ///
    /// # Errors
    /// Whatever keeps the sink from knowing.
    fn has_parent(&mut self, space: SpaceId) -> Result<bool, SinkError>;

    /// Whole pages at `vaddr` of the open space; `flags` are CRIU's `PE_*`.
    ///
    /// # Errors
    /// No room, a medium that fails.
    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), SinkError>;

    /// `nr_pages` pages at `vaddr` are those of the parent.
    ///
    /// # Errors
    /// The parent lacks one of them.
    fn hole(&mut self, vaddr: u64, nr_pages: u64) -> Result<(), SinkError>;

    /// CRIU's CLOSE, the commit gate: when this returns `Ok`, CRIU lets the task go, so the pages must be as
    /// durable as the session asked.
    ///
    /// # Errors
    /// They are not; CRIU rolls the dump back.
    fn close(&mut self) -> Result<(), SinkError>;

    /// The dump is over without a [`PageSink::close`] that succeeded: forget it.
    fn abort(&mut self, reason: &str);
}
