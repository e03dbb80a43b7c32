//! Checkpoints that nodes hold, read from one holder after another: by an agent, which holds none, and by a node for
//! what it does not hold itself or holds damaged.

mod checkpoint;
mod digest;
mod images;
mod small;

use std::time::{Duration, Instant};

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_protocol::wire::message::{FetchOpened, request};
use permafrost_transport::peer::{self, FetchReader, Frame, Network, PeerError};

pub use checkpoint::{Part, ReadError, RemoteCheckpoint, is_listed_as};
pub use digest::MapDigest;

/// How long one node may take to be reached, where others are left to ask.
const REACH: Duration = Duration::from_secs(3);

/// Files that are read from one node at once: a process has two.
const STREAMS: u32 = 512;

/// What is under way to one reader, bytes: a gigabyte a second at 2 ms.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;

/// The way to the nodes that hold checkpoints.
pub trait Holders: Send + Sync {
    /// Asks `node` for what `request` says, and waits until it has agreed. When there are `others` to turn to, it
    /// must not be waited for for long. Blocks.
    ///
    /// # Errors
    /// It refuses, or is not there.
    fn fetch(
        &self,
        node: &str,
        others: bool,
        request: request::Fetch,
    ) -> Result<Arriving, PeerError>;
}

/// What a node sends.
pub struct Arriving {
    /// What it has answered.
    pub opened: FetchOpened,
    /// Its frames but for the last one, `Prepare`. After an error there are no more.
    pub frames: Box<dyn Iterator<Item = Result<Frame, PeerError>>>,
}

/// [`Holders::fetch`] over a network; a node has `deadline` to agree.
///
/// # Errors
/// As there.
pub fn fetch(
    network: &Network,
    node: &str,
    others: bool,
    request: request::Fetch,
    deadline: Duration,
) -> Result<Arriving, PeerError> {
    if others {
        reach(network, node, deadline)?;
    }
    let frames = FetchReader::open(network, node, request, Instant::now() + deadline)?;
    Ok(Arriving {
        opened: frames.opened().clone(),
        frames: Box::new(frames),
    })
}

/// Whether a node is there, for when there are others to turn to. A connection may be dead for a while before that
/// shows, and a request that is under way cannot be taken back.
///
/// # Errors
/// It does not answer soon.
pub fn reach(network: &Network, node: &str, deadline: Duration) -> Result<(), PeerError> {
    let ping = request::Body::Ping(request::Ping {});
    let until = Instant::now() + REACH.min(deadline);
    network.call(node, ping, until).map(drop)
}

/// The transport's limits for whoever restores from other nodes.
///
/// The processes of a tree read their pages when it suits them, each on a stream of its own, and some wait for others
/// to have read theirs. So what one of them leaves unread must not use up what the connection may hold: the windows
/// of all streams together fit the connection's. They are limits; memory is used where somebody does not read.
#[must_use]
pub fn transport() -> peer::Options {
    peer::Options {
        streams: STREAMS,
        stream_window_bytes: STREAM_WINDOW_BYTES,
        connection_window_bytes: STREAMS * STREAM_WINDOW_BYTES,
        ..peer::Options::default()
    }
}

/// A node's failure as the control protocol says it; `hint` is for one that is not there.
#[must_use]
pub fn refusal(error: &PeerError, hint: &str) -> control::Error {
    let code = match error {
        PeerError::Refused { error, .. } => return error.clone(),
        PeerError::NoAddress { .. }
        | PeerError::Unreachable { .. }
        | PeerError::Lost { .. }
        | PeerError::Ended { .. }
        | PeerError::Deadline { .. } => ErrorCode::Unavailable,
        PeerError::WrongPeer { .. } | PeerError::Identity { .. } => ErrorCode::Denied,
        _ => ErrorCode::Internal,
    };
    control::Error {
        code: code.into(),
        message: error.to_string(),
        hint: match code {
            ErrorCode::Unavailable => hint.to_owned(),
            _ => String::new(),
        },
    }
}
