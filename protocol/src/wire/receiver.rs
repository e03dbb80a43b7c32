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

/// Frame that a header announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// The next frame. Its payload follows; then [`Receiver::taken`].
    New(Header),
    /// A frame that was taken in before. Its payload follows and is to be skipped; no method is called for it.
    Duplicate(Header),
}

/// State of a dump's receiver, over all connections that the dump takes.
///
/// Memory is bounded by the numbers of spaces and images, whatever the peer announces.
#[derive(Debug, Default)]
pub struct Receiver {
    next_sequence: u64,
    /// Announced, and not yet taken.
    pending: Option<Header>,
    /// Name in a pending image's payload, once it was checked.
    pending_name: Option<String>,
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

    /// Takes a header. Its payload ([`Header::payload_bytes`]) follows in the stream.
    ///
    /// # Errors
    /// The header is damaged, out of order, or may not come here; then this dump has failed and so has every further
    /// header that is not the one expected. Nothing was changed.
    pub fn header(&mut self, bytes: &[u8; HEADER_BYTES]) -> Result<Received, ReceiverError> {
        if self.pending.is_some() {
            return Err(ReceiverError::NotTaken {
                sequence: self.next_sequence,
            });
        }
        let header = Header::decode(bytes)?;
        if header.sequence < self.next_sequence {
            return Ok(Received::Duplicate(header));
        }
        if header.sequence > self.next_sequence {
            return Err(ReceiverError::Gap {
                expected: self.next_sequence,
                found: header.sequence,
            });
        }
        self.grammar.check(&header)?;
        self.pending = Some(header);
        Ok(Received::New(header))
    }

    /// Checks the payload of the [`Kind::Image`] that was announced: the image's name.
    ///
    /// # Errors
    /// The name is not a plain file name, or another image has it; or no image was announced.
    pub fn image_name<'a>(&mut self, payload: &'a [u8]) -> Result<&'a str, ReceiverError> {
        if self.pending.is_none_or(|header| header.kind != Kind::Image) {
            return Err(ReceiverError::NothingPending);
        }
        let name = self.grammar.check_name(payload)?;
        self.pending_name = Some(name.to_owned());
        Ok(name)
    }

    /// Records that the announced frame is applied, with its payload.
    ///
    /// # Errors
    /// No frame was announced, or the frame is an image whose name was not checked: a mistake of the caller's.
    pub fn taken(&mut self) -> Result<(), ReceiverError> {
        let header = self.pending.ok_or(ReceiverError::NothingPending)?;
        let name = self.pending_name.take();
        if header.kind == Kind::Image && name.is_none() {
            return Err(ReceiverError::NameNotChecked);
        }
        self.pending = None;
        self.grammar.apply(&header, name);
        self.next_sequence += 1;
        self.unacknowledged_frames += 1;
        self.unacknowledged_bytes += u64::from(header.payload_bytes);
        self.acknowledge |= matches!(header.kind, Kind::Close | Kind::Prepare)
            || self.unacknowledged_frames >= ACKNOWLEDGE_FRAMES
            || self.unacknowledged_bytes >= ACKNOWLEDGE_BYTES;
        Ok(())
    }

    /// Returns the sequence below which every frame is to be acknowledged now: after each [`ACKNOWLEDGE_BYTES`] or
    /// [`ACKNOWLEDGE_FRAMES`], and at once after `Close` and `Prepare`; otherwise `None`.
    pub fn poll_acknowledge(&mut self) -> Option<u64> {
        if !self.acknowledge {
            return None;
        }
        self.acknowledge_now()
    }

    /// Returns the sequence below which every frame is to be acknowledged, because the stream pauses; `None` if every
    /// frame that was taken is acknowledged.
    pub fn acknowledge_now(&mut self) -> Option<u64> {
        let news = self.unacknowledged_frames > 0;
        self.acknowledge = false;
        self.unacknowledged_frames = 0;
        self.unacknowledged_bytes = 0;
        news.then_some(self.next_sequence)
    }

    /// Forgets the announced frame that was not taken: the sender sends it again. The reply to a resume carries
    /// [`Receiver::next_sequence`], which acknowledges every frame before.
    pub fn connection_lost(&mut self) {
        self.pending = None;
        self.pending_name = None;
        self.acknowledge_now();
    }

    /// Returns the sequence of the frame that is expected next, which is the number of frames taken.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }

    /// Returns true if `Close` was taken.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.grammar.is_closed()
    }

    /// Returns true if `Prepare` was taken: nothing more may come.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.grammar.is_over()
    }
}
