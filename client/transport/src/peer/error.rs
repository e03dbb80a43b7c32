//! What goes wrong between nodes.

use permafrost_protocol::control;
use permafrost_protocol::control::framing::MessageError;

/// A conversation with a peer that did not come to its end. Cloned for everybody who waits for it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PeerError {
    /// Nobody knows where the node is.
    #[error("the address of node {node} is not known")]
    NoAddress {
        /// The node.
        node: String,
    },
    /// No connection could be made in time.
    #[error("node {node} cannot be reached: {reason}")]
    Unreachable {
        /// The node.
        node: String,
        /// The last attempt's end.
        reason: String,
    },
    /// Another than the one that was to be spoken with.
    #[error("{found} answers at the address of node {node}")]
    WrongPeer {
        /// The node.
        node: String,
        /// Who answers.
        found: String,
    },
    /// The connection was lost.
    #[error("connection with {node} was lost: {source}")]
    Lost {
        /// The peer.
        node: String,
        /// quinn's reason.
        #[source]
        source: quinn::ConnectionError,
    },
    /// The peer ended the stream.
    #[error("{node} ended the conversation while {doing} (code {code})")]
    Ended {
        /// The peer.
        node: String,
        /// What was going on.
        doing: &'static str,
        /// Its code, see [`super::code`]; 0 for an end without one.
        code: u64,
    },
    /// It took too long.
    #[error("{node}: no end of {doing} in time")]
    Deadline {
        /// The peer.
        node: String,
        /// What was going on.
        doing: &'static str,
    },
    /// The peer says no.
    #[error("{node} refuses: {}", error.message)]
    Refused {
        /// The peer.
        node: String,
        /// In its words.
        error: control::Error,
    },
    /// The peer says what nobody says at this place.
    #[error("{node} does not keep to the protocol: {what}")]
    Protocol {
        /// The peer.
        node: String,
        /// What it did.
        what: &'static str,
    },
    /// A message of the peer does not decode, or one's own is too long.
    #[error("{node}: {source}")]
    Message {
        /// The peer.
        node: String,
        /// What is wrong with it.
        #[source]
        source: MessageError,
    },
    /// This side gave up.
    #[error("the conversation with {node} was ended on this side")]
    Aborted {
        /// The peer.
        node: String,
    },
    /// The identity at hand cannot be used.
    #[error("identity: {reason}")]
    Identity {
        /// What is wrong with it.
        reason: String,
    },
    /// The socket cannot be had.
    #[error("bind {address}: {kind}")]
    Bind {
        /// Where.
        address: std::net::SocketAddr,
        /// Why not.
        kind: std::io::ErrorKind,
    },
}

impl PeerError {
    pub(crate) fn read(node: &str, doing: &'static str, error: quinn::ReadError) -> Self {
        match error {
            quinn::ReadError::ConnectionLost(source) => Self::lost(node, source),
            quinn::ReadError::Reset(code) => Self::ended(node, doing, code.into_inner()),
            _ => Self::ended(node, doing, 0),
        }
    }

    pub(crate) fn read_exact(
        node: &str,
        doing: &'static str,
        error: quinn::ReadExactError,
    ) -> Self {
        match error {
            quinn::ReadExactError::ReadError(error) => Self::read(node, doing, error),
            quinn::ReadExactError::FinishedEarly(_) => Self::ended(node, doing, 0),
        }
    }

    pub(crate) fn write(node: &str, doing: &'static str, error: quinn::WriteError) -> Self {
        match error {
            quinn::WriteError::ConnectionLost(source) => Self::lost(node, source),
            quinn::WriteError::Stopped(code) => Self::ended(node, doing, code.into_inner()),
            _ => Self::ended(node, doing, 0),
        }
    }

    pub(crate) fn lost(node: &str, source: quinn::ConnectionError) -> Self {
        Self::Lost {
            node: node.to_owned(),
            source,
        }
    }

    pub(crate) fn ended(node: &str, doing: &'static str, code: u64) -> Self {
        Self::Ended {
            node: node.to_owned(),
            doing,
            code,
        }
    }

    pub(crate) fn deadline(node: &str, doing: &'static str) -> Self {
        Self::Deadline {
            node: node.to_owned(),
            doing,
        }
    }

    pub(crate) fn protocol(node: &str, what: &'static str) -> Self {
        Self::Protocol {
            node: node.to_owned(),
            what,
        }
    }

    pub(crate) fn identity(error: &permafrost_identity::IdentityError) -> Self {
        Self::Identity {
            reason: error.to_string(),
        }
    }

    pub(crate) fn aborted(node: &str) -> Self {
        Self::Aborted {
            node: node.to_owned(),
        }
    }

    pub(crate) fn refused(node: &str, error: control::Error) -> Self {
        Self::Refused {
            node: node.to_owned(),
            error,
        }
    }
}
