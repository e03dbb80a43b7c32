//! Errors of conversations between nodes.

use permafrost_protocol::control;
use permafrost_protocol::control::framing::MessageError;
use permafrost_protocol::wire::conversation::{ConversationError, ConversationOutcome};

/// A conversation with a peer that did not come to its end. Cloned for every caller that waits for it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PeerError {
    /// The address of the node is unknown.
    #[error("the address of node {node} is not known")]
    NoAddress {
        /// Name of the node.
        node: String,
    },
    /// No connection could be made in time.
    #[error("node {node} cannot be reached: {reason}")]
    Unreachable {
        /// Name of the node.
        node: String,
        /// Error of the last attempt.
        reason: String,
    },
    /// Another node than the intended one is at the address.
    #[error("{found} answers at the address of node {node}")]
    WrongPeer {
        /// Name of the intended node.
        node: String,
        /// Name of the peer that answered.
        found: String,
    },
    /// The peer speaks no version of the wire that this side does.
    #[error("{node}: {reason}")]
    Versions {
        /// Name of the peer.
        node: String,
        /// Versions of both, and the end that must be upgraded.
        reason: String,
    },
    /// The connection was lost.
    #[error("connection with {node} was lost: {source}")]
    Lost {
        /// Name of the peer.
        node: String,
        /// Error of quinn.
        #[source]
        source: quinn::ConnectionError,
    },
    /// A bulk stream over TLS was lost, although the connection of its conversation may be there.
    #[error("the stream of pages with {node} was lost: {kind}")]
    BulkLost {
        /// Name of the peer.
        node: String,
        /// Kind of the socket's error.
        kind: std::io::ErrorKind,
    },
    /// The peer ended the stream.
    #[error("{node} ended the conversation while {doing} (code {code})")]
    Ended {
        /// Name of the peer.
        node: String,
        /// Operation that was under way.
        doing: &'static str,
        /// Error code of the end, see [`super::code`]; 0 for an end without one.
        code: u64,
    },
    /// The operation exceeded its time limit.
    #[error("{node}: no end of {doing} in time")]
    Deadline {
        /// Name of the peer.
        node: String,
        /// Operation that was under way.
        doing: &'static str,
    },
    /// The peer refused the request.
    #[error("{node} refuses: {}", error.message)]
    Refused {
        /// Name of the peer.
        node: String,
        /// Error that the peer sent.
        error: control::Error,
    },
    /// The peer violated the protocol.
    #[error("{node} does not keep to the protocol: {what}")]
    Protocol {
        /// Name of the peer.
        node: String,
        /// Description of the violation.
        what: &'static str,
    },
    /// A message or a frame of the peer may not come here.
    #[error("{node} does not keep to the protocol: {source}")]
    Conversation {
        /// Name of the peer.
        node: String,
        /// Violation of the protocol.
        #[source]
        source: ConversationError,
    },
    /// A message of the peer cannot be decoded, or a message of this node is too long.
    #[error("{node}: {source}")]
    Message {
        /// Name of the peer.
        node: String,
        /// Error of the decoder or the encoder.
        #[source]
        source: MessageError,
    },
    /// This side ended the conversation.
    #[error("the conversation with {node} was ended on this side")]
    Aborted {
        /// Name of the peer.
        node: String,
    },
    /// The node's own identity cannot be used.
    #[error("identity: {reason}")]
    Identity {
        /// Description of the error.
        reason: String,
    },
    /// The socket cannot be bound.
    #[error("bind {address}: {kind}")]
    Bind {
        /// Address of the socket.
        address: std::net::SocketAddr,
        /// Kind of the system's error.
        kind: std::io::ErrorKind,
    },
}

impl PeerError {
    /// Returns true if the request may have arrived and been carried out, although nothing was answered.
    #[must_use]
    pub const fn may_have_arrived(&self) -> bool {
        matches!(
            self,
            Self::Lost { .. } | Self::BulkLost { .. } | Self::Ended { .. } | Self::Deadline { .. }
        )
    }

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

    pub(crate) fn bulk_lost(node: &str, error: &std::io::Error) -> Self {
        Self::BulkLost {
            node: node.to_owned(),
            kind: error.kind(),
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

    pub(crate) fn conversation(node: &str, source: ConversationError) -> Self {
        let node = node.to_owned();
        match source {
            ConversationError::Refused(error) => Self::Refused { node, error },
            source => Self::Conversation { node, source },
        }
    }

    /// Returns the end of a conversation that this error is.
    pub(crate) fn end(&self) -> ConversationOutcome {
        match self {
            Self::Lost { .. }
            | Self::BulkLost { .. }
            | Self::Unreachable { .. }
            | Self::Deadline { .. } => ConversationOutcome::Lost,
            Self::Ended { code, .. } => ConversationOutcome::Stopped(*code),
            Self::Refused { error, .. } => ConversationOutcome::Refused(error.code()),
            _ => ConversationOutcome::Violated,
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
