//! Errors that a peer can make in a conversation.

use super::ID_DIGITS;
use crate::access::RequestError;
use crate::control;
use crate::versions::VersionsError;
use crate::wire::receiver::ReceiverError;
use crate::wire::sender::SenderError;

/// Message that may not come, or that has an impossible value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ConversationError {
    /// A peer that speaks another version than the connection.
    #[error("the peer says version {found} of the wire on a connection of version {version}")]
    Version {
        /// Version that the peer says.
        found: u32,
        /// Version that both have agreed on.
        version: u32,
    },
    /// Versions that cannot be, or none in common.
    #[error(transparent)]
    Versions(#[from] VersionsError),
    /// The request is missing, or this version does not know it.
    #[error("the peer asks for something that this version does not know")]
    UnknownRequest,
    /// A field that breaks its rule: an id has [`ID_DIGITS`] lower-case hex digits, a name is a plain one.
    #[error("{value:?} is no {field}")]
    BadField {
        /// Name of the field.
        field: &'static str,
        /// First characters of its value.
        value: String,
    },
    /// A field of another length than it always has.
    #[error("a {field} of {len_bytes} bytes")]
    BadLength {
        /// Name of the field.
        field: &'static str,
        /// Length of the field, bytes.
        len_bytes: usize,
    },
    /// A name that is not valid.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The peer refuses; the error gives its reason.
    #[error("refused: {}", .0.message)]
    Refused(control::Error),
    /// A reply that may not come here.
    #[error("{reply} came during {during}")]
    Unexpected {
        /// Name of the reply that came.
        reply: &'static str,
        /// Phase of the conversation in which it came.
        during: &'static str,
    },
    /// A frame that may not come here.
    #[error(transparent)]
    Frame(#[from] ReceiverError),
    /// An acknowledgement, or a place in the dump, that cannot be.
    #[error(transparent)]
    Acknowledgement(#[from] SenderError),
    /// The peer has begun a newer conversation about the dump: this one counts no more.
    #[error("a newer conversation continues the dump")]
    Displaced,
    /// A repeated digest differs from the first one, or from the digest to be sealed.
    #[error("the content digest of {of} is not what it was")]
    DigestChanged {
        /// Name of the message with the digest.
        of: &'static str,
    },
    /// A session is begun once.
    #[error("this session is here already")]
    BegunTwice,
    /// A commit before everything is in.
    #[error("a commit before Prepared")]
    CommitTooEarly,
    /// A second commit that is not the first one again.
    #[error("a second commit says something else")]
    CommitChanged,
}

const _: () = assert!(ID_DIGITS == 32);
