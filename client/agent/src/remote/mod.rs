//! Checkpoints that nodes hold, read from one holder after another: by an agent, which holds none, and by a
//! node for checkpoints that it does not hold itself or holds damaged.

mod checkpoint;
mod digest;
#[cfg(test)]
mod hostile_proofs;
mod images;
mod outline;
mod positions;
mod proof;
mod small;

use std::time::{Duration, Instant};

use permafrost_protocol::control::{self, ErrorCode, ReportedError};
use permafrost_protocol::wire::message::{FetchOpened, request};
use permafrost_transport::peer::{self, FetchReader, Network, PeerError, ReceivedFrame};

pub use checkpoint::{PageSelection, RemoteCheckpoint, is_listed_as};
pub use digest::MapDigest;
pub use outline::{Outline, OutlineEncoder, OutlinePages};
pub use positions::{ProofPart, ReceivedProof, announce_proof};
pub use proof::{LAZY_FLAGS, ProofEncoder};

/// Time for which a node counts as reachable after a reply, for requests that another node can answer as well.
const FRESH: Duration = Duration::from_secs(1);

/// Most files that are read from one node at once: a process has two.
const STREAMS: u32 = 512;

/// Bytes in flight to one reader: a gigabyte a second at 2 ms.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;

/// Access to the nodes that hold checkpoints.
pub trait Holders: Send + Sync {
    /// Sends `request` to `node`, and waits until the node has agreed. When there are `others` to turn to, the
    /// call must not wait long for the node. Blocks.
    ///
    /// # Errors
    /// The node refuses, or cannot be reached.
    fn fetch(
        &self,
        node: &str,
        others: bool,
        request: request::Fetch,
    ) -> Result<Arriving, PeerError>;
}

/// A checkpoint that a node is sending.
pub struct Arriving {
    /// Reply of the node.
    pub opened: FetchOpened,
    /// Frames but for the last one, `Prepare`. After an error there are no more.
    pub frames: Box<dyn Iterator<Item = Result<ReceivedFrame, PeerError>>>,
}

/// Implements [`Holders::fetch`] over a network; a node has `deadline` to agree.
///
/// # Errors
/// The same as for [`Holders::fetch`].
pub fn fetch(
    network: &Network,
    node: &str,
    others: bool,
    request: request::Fetch,
    deadline: Duration,
) -> Result<Arriving, PeerError> {
    let until = Instant::now() + deadline;
    let frames = if others {
        // Each page that a restored process waits for would cost two round trips.
        if !network.has_answered(node, FRESH) {
            reach(network, node, until)?;
        }
        // It may die before it has agreed. A new connection to it would be tried for as long as it has.
        FetchReader::open_once(network, node, request, until)?
    } else {
        FetchReader::open(network, node, request, until)?
    };
    Ok(Arriving {
        opened: frames.opened().clone(),
        frames: Box::new(frames),
    })
}

/// Checks that a node can be reached, for use when there are other nodes to turn to until `deadline`. A connection may be
/// dead for a while before that shows, and a request that is under way cannot be taken back.
///
/// # Errors
/// The node does not reply soon.
pub fn reach(network: &Network, node: &str, deadline: Instant) -> Result<(), PeerError> {
    let ping = request::Body::Ping(request::Ping {});
    network
        .call(node, ping, peer::reached_by(deadline))
        .map(drop)
}

/// Returns the transport's limits for a process that restores from other nodes.
///
/// The processes of a tree read their pages when it suits them, each on a stream of its own, and some wait for
/// others to have read theirs. So the data that one of them leaves unread must not use up the connection's
/// window: the windows of all streams together fit the connection's. They are limits; memory is used only where
/// a process does not read.
#[must_use]
pub fn transport() -> peer::PeerOptions {
    peer::PeerOptions {
        streams: STREAMS,
        stream_window_bytes: STREAM_WINDOW_BYTES,
        connection_window_bytes: STREAMS * STREAM_WINDOW_BYTES,
        ..peer::PeerOptions::default()
    }
}

/// A node's answer of another kind than the request.
#[derive(Debug, thiserror::Error)]
#[error("{node} answers something else than it was asked")]
pub struct OtherAnswer {
    /// Name of the node.
    pub node: String,
}

impl ReportedError for OtherAnswer {
    fn code(&self) -> ErrorCode {
        ErrorCode::Internal
    }

    fn hint(&self) -> &str {
        "use the same version of Permafrost everywhere"
    }
}

/// Converts a node's failure into an error of the control protocol; `hint` is for a node that cannot be
/// reached.
#[must_use]
pub fn refusal(error: &PeerError, hint: &str) -> control::Error {
    PeerFailure { error, hint }.into()
}

/// Failure of a request to a node. A refusal of the node is passed on as it is.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub(crate) struct PeerFailure<'a> {
    pub(crate) error: &'a PeerError,
    /// Advice for a node that cannot be reached.
    pub(crate) hint: &'a str,
}

impl ReportedError for PeerFailure<'_> {
    fn code(&self) -> ErrorCode {
        match self.error {
            PeerError::Refused { error, .. } => error.code(),
            PeerError::NoAddress { .. }
            | PeerError::Unreachable { .. }
            | PeerError::Versions { .. }
            | PeerError::Lost { .. }
            | PeerError::Ended { .. }
            | PeerError::Deadline { .. } => ErrorCode::Unavailable,
            PeerError::WrongPeer { .. } | PeerError::Identity { .. } => ErrorCode::Denied,
            _ => ErrorCode::Internal,
        }
    }

    fn hint(&self) -> &str {
        match self.error {
            PeerError::Refused { error, .. } => &error.hint,
            _ if self.code() == ErrorCode::Unavailable => self.hint,
            _ => "",
        }
    }

    fn message(&self) -> String {
        match self.error {
            PeerError::Refused { error, .. } => error.message.clone(),
            error => error.to_string(),
        }
    }
}

/// Reason why no holder gives a checkpoint.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RemoteError {
    #[error("{checkpoint}: {part}: not what the manifest says")]
    Corrupt { checkpoint: String, part: String },
    #[error("no node is known that holds {checkpoint}")]
    NoHolder { checkpoint: String },
}

impl ReportedError for RemoteError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Corrupt { .. } => ErrorCode::Corrupt,
            Self::NoHolder { .. } => ErrorCode::Unavailable,
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Corrupt { .. } => {
                "`permafrost verify` on the nodes lists everything that is damaged"
            }
            Self::NoHolder { .. } => checkpoint::HINT,
        }
    }
}
