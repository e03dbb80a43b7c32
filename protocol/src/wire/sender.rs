//! Sending side of a bulk stream: the frames that are kept until the receiver has taken them in.
//!
//! ```text
//!     acknowledged        sent on this connection        not sent yet
//!   ─────────────────┬──────────────────────────────┬─────────────────┬──▶ sequence
//!   dropped          │ kept: a resume may go back   │ kept            │ next to be pushed
//!                    ▼ to any of these              ▼                 ▼
//!               acknowledged                     transmit           end
//! ```
//!
//! A lost connection moves `transmit` back to the sequence that the receiver reports, which lies between
//! `acknowledged` and the furthest frame that was ever sent: acknowledgements may have been lost with the connection.

use std::collections::VecDeque;

use super::frame::{Coding, FrameError, Header, Kind, MAX_PAYLOAD_BYTES};
use super::receiver::{ACKNOWLEDGE_BYTES, ACKNOWLEDGE_FRAMES};

/// Cost of a frame in the window besides its payload, bytes: its place in the queue, which grows by doubling. So
/// frames without a payload fill the window too, and memory is bounded whatever the dump consists of.
pub const FRAME_COST_BYTES: u64 = 128;

/// Usual window of [`Sender::new`], bytes: at 1 GB/s, 32 ms of silence before a dump has to wait.
pub const DEFAULT_WINDOW_BYTES: u64 = 32 << 20;

/// Smallest window, bytes. A receiver may hold back an acknowledgement for [`ACKNOWLEDGE_BYTES`] or
/// [`ACKNOWLEDGE_FRAMES`]; a window that holds these and one frame more cannot dead-lock.
pub const MIN_WINDOW_BYTES: u64 = 2 << 20;

/// Limit on the bytes that a pusher runs ahead of the connection: enough that the connection need not wait for it, and
/// not so much that pages leave the caches before they are sent. At the limit, the pusher waits until half of that is
/// left. While there is no connection it may fill the window.
pub const AHEAD_BYTES: u64 = 2 << 20;

const _: () = assert!(
    ACKNOWLEDGE_BYTES
        + ACKNOWLEDGE_FRAMES * FRAME_COST_BYTES
        + MAX_PAYLOAD_BYTES as u64
        + FRAME_COST_BYTES
        <= MIN_WINDOW_BYTES
);

/// A frame that cannot be pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// Wait for an acknowledgement, and push it again.
    #[error("the window has {left_bytes} bytes left, the frame needs {needed_bytes}")]
    WindowFull {
        /// Bytes that are free.
        left_bytes: u64,
        /// Bytes that the frame takes.
        needed_bytes: u64,
    },
    /// The receiver would refuse it.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Error in a receiver's acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SenderError {
    /// The receiver takes back an acknowledgement: the frames are not kept any more.
    #[error(
        "the receiver expects frame {next_sequence}, and has acknowledged all below {acknowledged}"
    )]
    Backwards {
        /// Sequence that the receiver says it expects.
        next_sequence: u64,
        /// Sequence that it acknowledged before.
        acknowledged: u64,
    },
    /// The receiver acknowledges frames that were not sent.
    #[error("the receiver expects frame {next_sequence}, and only those below {sent} were sent")]
    BeyondSent {
        /// Sequence that the receiver says it expects.
        next_sequence: u64,
        /// The first frame that was not sent.
        sent: u64,
    },
}

/// The frames of one dump that the receiver has not acknowledged, over all connections that it takes.
///
/// `P` is cloned for each transmission: something counted, such as `bytes::Bytes`.
#[derive(Debug)]
pub struct Sender<P> {
    window_bytes: u64,
    used_bytes: u64,
    /// Bytes of the window that were not sent on this connection.
    unsent_bytes: u64,
    /// Sequence of the first of `kept`.
    acknowledged: u64,
    /// Sequence of the next frame to send on this connection.
    transmit: u64,
    /// First sequence that was never sent on any connection.
    sent_ever: u64,
    connected: bool,
    kept: VecDeque<(Header, P)>,
    /// Payload, bytes, of the frame that [`Sender::may_push`] refused last.
    refused_bytes: Option<usize>,
}

impl<P: AsRef<[u8]> + Clone> Sender<P> {
    /// Makes the sender of a dump of which no frame was pushed, without a connection. `window_bytes` (at least
    /// [`MIN_WINDOW_BYTES`]) bounds the kept frames: a larger window bridges longer pauses of the receiver and takes
    /// more memory.
    #[must_use]
    pub fn new(window_bytes: u64) -> Self {
        Self {
            window_bytes: window_bytes.max(MIN_WINDOW_BYTES),
            used_bytes: 0,
            unsent_bytes: 0,
            acknowledged: 0,
            transmit: 0,
            sent_ever: 0,
            connected: false,
            kept: VecDeque::new(),
            refused_bytes: None,
        }
    }

    /// Takes a frame, connected or not. The sequence that it was given.
    ///
    /// # Errors
    /// There is no room for the frame now ([`PushError::WindowFull`]), or the frame is not valid.
    pub fn push(
        &mut self,
        kind: Kind,
        coding: Coding,
        flags: u16,
        pages: u32,
        index: u64,
        payload: P,
    ) -> Result<u64, PushError> {
        let sequence = self.next_sequence();
        let header = Header {
            kind,
            coding,
            flags,
            pages,
            sequence,
            index,
            payload_bytes: u32::try_from(payload.as_ref().len()).unwrap_or(u32::MAX),
        };
        header.check()?;
        let needed_bytes = cost_bytes(&header);
        let left_bytes = self.window_left();
        if needed_bytes > left_bytes {
            return Err(PushError::WindowFull {
                left_bytes,
                needed_bytes,
            });
        }
        self.used_bytes += needed_bytes;
        self.unsent_bytes += needed_bytes;
        self.kept.push_back((header, payload));
        Ok(sequence)
    }

    /// Bytes of the window that are free. A frame takes its payload and [`FRAME_COST_BYTES`].
    #[must_use]
    pub fn window_left(&self) -> u64 {
        self.window_bytes - self.used_bytes
    }

    /// Size of the window, bytes.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        self.window_bytes
    }

    /// Bytes of the window that are in use: the memory that the dump takes.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes of the window that wait to be sent on this connection: nothing on the way explains them.
    #[must_use]
    pub fn unsent_bytes(&self) -> u64 {
        self.unsent_bytes
    }

    /// Returns true if a frame with a payload of `payload_bytes` may be pushed now: the window has room for it, and
    /// the connection is not far behind. After a refusal the pusher waits for [`Sender::poll_room`].
    pub fn may_push(&mut self, payload_bytes: usize) -> bool {
        let may_push = self.has_room(payload_bytes);
        self.refused_bytes = (!may_push).then_some(payload_bytes);
        may_push
    }

    /// Returns true once the frame that [`Sender::may_push`] refused may be pushed: the pusher need not wait longer.
    /// To be asked after every other call.
    pub fn poll_room(&mut self) -> bool {
        let has_room = self.refused_bytes.is_some_and(|bytes| self.has_room(bytes));
        if has_room {
            self.refused_bytes = None;
        }
        has_room
    }

    fn has_room(&self, payload_bytes: usize) -> bool {
        let ahead_bytes = match self.refused_bytes {
            None => AHEAD_BYTES,
            Some(_) => AHEAD_BYTES / 2,
        };
        let is_ahead = self.connected && self.unsent_bytes >= ahead_bytes;
        let cost_bytes = count(payload_bytes).saturating_add(FRAME_COST_BYTES);
        !is_ahead && cost_bytes <= self.window_left()
    }

    /// Returns the sequence of the frame that is pushed next, which is the number of frames pushed.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.acknowledged + count(self.kept.len())
    }

    /// Returns the sequence below which the receiver has acknowledged every frame.
    #[must_use]
    pub fn acknowledged_below(&self) -> u64 {
        self.acknowledged
    }

    /// Returns the next frame to send on this connection; `None` when all were sent, or there is no connection.
    pub fn poll_transmit(&mut self) -> Option<(Header, P)> {
        if !self.connected {
            return None;
        }
        let at = usize::try_from(self.transmit.checked_sub(self.acknowledged)?).ok()?;
        let (header, payload) = self.kept.get(at)?;
        self.unsent_bytes -= cost_bytes(header);
        self.transmit += 1;
        self.sent_ever = self.sent_ever.max(self.transmit);
        Some((*header, payload.clone()))
    }

    /// Records that the receiver has every frame below `next_sequence`. Returns the number of window bytes freed.
    ///
    /// # Errors
    /// The sequence goes back, or beyond the frames sent on this connection: the peer is not to be trusted.
    pub fn acknowledged(&mut self, next_sequence: u64) -> Result<u64, SenderError> {
        self.drop_below(next_sequence, self.transmit)
    }

    /// Records that the connection was lost: nothing is transmitted until [`Sender::resumed`]. Frames may still be
    /// pushed while the window has room.
    pub fn connection_lost(&mut self) {
        self.connected = false;
    }

    /// Records a new connection on which the receiver expects `next_sequence`: transmission continues there. Returns
    /// the number of window bytes that become free.
    ///
    /// # Errors
    /// The sequence is wrong as for [`Sender::acknowledged`], counting frames sent on any connection. The sender
    /// stays unconnected: the receiver has lost frames that it acknowledged, or is another one.
    pub fn resumed(&mut self, next_sequence: u64) -> Result<u64, SenderError> {
        let freed_bytes = self.drop_below(next_sequence, self.sent_ever)?;
        self.transmit = next_sequence;
        self.unsent_bytes = self.used_bytes;
        self.connected = true;
        Ok(freed_bytes)
    }

    /// Returns true if there is a connection.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// Returns true if every pushed frame is acknowledged.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.kept.is_empty()
    }

    fn drop_below(&mut self, next_sequence: u64, sent: u64) -> Result<u64, SenderError> {
        if next_sequence > sent {
            return Err(SenderError::BeyondSent {
                next_sequence,
                sent,
            });
        }
        if next_sequence < self.acknowledged {
            return Err(SenderError::Backwards {
                next_sequence,
                acknowledged: self.acknowledged,
            });
        }
        let mut freed_bytes = 0;
        while self.acknowledged < next_sequence
            && let Some((header, _)) = self.kept.pop_front()
        {
            freed_bytes += cost_bytes(&header);
            self.acknowledged += 1;
        }
        self.used_bytes -= freed_bytes;
        Ok(freed_bytes)
    }
}

fn cost_bytes(header: &Header) -> u64 {
    u64::from(header.payload_bytes) + FRAME_COST_BYTES
}

fn count(len: usize) -> u64 {
    // No queue has 2^64 entries.
    u64::try_from(len).unwrap_or(u64::MAX)
}
