//! Receiving side of a bulk stream: the order of frames, and the times of acknowledgements.
//!
//! ```text
//!            Space, Pages, Zero, Parent          Image, ImageData
//!                  ┌────┐                            ┌────┐
//!   start ────▶ spaces ─┘ ────────── Close ───────▶ images ─┘ ────────── Prepare ───────▶ over
//! ```
//!
//! A frame counts once [`Receiver::taken`] is called: a frame whose payload was lost half-way with the connection is
//! sent again.

mod error;
mod grammar;

pub use error::ReceiverError;

use super::frame::{HEADER_BYTES, Header, Kind};
use grammar::Grammar;

/// Payload that a receiver takes in before it acknowledges, bytes: a thirtieth of the default window.
pub const ACKNOWLEDGE_BYTES: u64 = 1 << 20;

/// Frames that a receiver takes in before it acknowledges.
pub const ACKNOWLEDGE_FRAMES: u64 = 256;

/// Maximum number of small images of a dump. CRIU writes about ten a process and one a thread. A receiver remembers
/// each name, and a manifest with so many still fits a reply (some 100 bytes each).
/// [`crate::manifest::MAX_SMALL_IMAGES`] is checked before a process is frozen.
pub const MAX_IMAGES: usize = crate::manifest::MAX_SMALL_IMAGES;

/// State of a dump's receiver, over all connections that the dump takes.
///
/// Memory is bounded by the numbers of spaces and images, whatever the peer announces.
#[derive(Debug, Default)]
pub struct Receiver {
    next_sequence: u64,
    /// Announced, and not yet taken.
    pending: Option<Header>,
    grammar: Grammar,
    unacknowledged_bytes: u64,
    unacknowledged_frames: u64,
    acknowledge: bool,
}

impl Receiver {
    /// Makes the receiver of a dump of which no frame has come.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a header. Its payload ([`Header::payload_bytes`]) follows in the stream; then [`Receiver::taken`].
    ///
    /// # Errors
    /// The header is damaged, out of order, or may not come here; then this dump has failed and so has every further
    /// header that is not the one expected. Nothing was changed.
    pub fn header(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<Header, ReceiverError> {
        if self.pending.is_some() {
            return Err(ReceiverError::NotTaken {
                sequence: self.next_sequence,
            });
        }
        let header = Header::decode(bytes)?;
        if header.sequence != self.next_sequence {
            return Err(ReceiverError::OutOfOrder {
                expected: self.next_sequence,
                found: header.sequence,
            });
        }
        self.grammar.check(&header)?;
        self.pending = Some(header);
        Ok(header)
    }

    /// Records that the announced frame has come with its payload, which for [`Kind::Image`] is the image's name.
    /// Returns its header.
    ///
    /// # Errors
    /// The name is not a plain file name, or another image has it; or no frame was announced.
    pub fn taken(&mut self, payload: &[u8]) -> Result<Header, ReceiverError> {
        let header = self.pending.ok_or(ReceiverError::NothingPending)?;
        let name = match header.kind {
            Kind::Image => Some(self.grammar.check_name(payload)?.to_owned()),
            _ => None,
        };
        self.pending = None;
        self.grammar.apply(&header, name);
        self.next_sequence += 1;
        self.unacknowledged_frames += 1;
        self.unacknowledged_bytes += u64::from(header.payload_bytes);
        self.acknowledge |= matches!(header.kind, Kind::Close | Kind::Prepare)
            || self.unacknowledged_frames >= ACKNOWLEDGE_FRAMES
            || self.unacknowledged_bytes >= ACKNOWLEDGE_BYTES;
        Ok(header)
    }

    /// Returns true if [`Receiver::poll_acknowledge`] returns a sequence.
    #[must_use]
    pub fn is_acknowledging(&self) -> bool {
        self.acknowledge
    }

    /// Returns the sequence below which every frame is to be acknowledged now: after each [`ACKNOWLEDGE_BYTES`] or
    /// [`ACKNOWLEDGE_FRAMES`], and at once after `Close` and `Prepare`; otherwise `None`.
    pub fn poll_acknowledge(&mut self) -> Option<u64> {
        if !self.acknowledge {
            return None;
        }
        self.acknowledged();
        Some(self.next_sequence)
    }

    fn acknowledged(&mut self) {
        self.acknowledge = false;
        self.unacknowledged_frames = 0;
        self.unacknowledged_bytes = 0;
    }

    /// Forgets the announced frame that was not taken: the sender sends it again. The reply to a resume carries
    /// [`Receiver::next_sequence`], which acknowledges every frame before.
    pub fn connection_lost(&mut self) {
        self.pending = None;
        self.acknowledged();
    }

    /// Returns the sequence of the frame that is expected next, which is the number of frames taken.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Returns true if `Prepare` was taken: nothing more may come.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.grammar.is_over()
    }
}
