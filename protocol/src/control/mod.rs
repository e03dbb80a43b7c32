//! Control protocol between `permafrost` and `permafrostd` on one host.
//!
//! A connection to the daemon's AF_UNIX control socket carries requests one after another. A message is a
//! little-endian `u32` length and that many bytes of protobuf: a [`Request`] one way, one or more [`Reply`] the
//! other; the last reply to a request is the one that is not [`reply::Body::Progress`]. Where a request needs a
//! directory, its file descriptor rides on the request's first byte (SCM_RIGHTS), so that the daemon writes or reads
//! files only through descriptors that the caller opened.

mod certificate;
mod checkpoint;
mod cluster;
mod error;
pub mod framing;
mod gc;
mod keys;
mod media;
mod queue;
pub mod reply;
pub mod request;
mod retention;
mod scrub;
mod status;

use prost::Message;

pub use certificate::{CertificateStatus, Denials};
pub use checkpoint::{
    Checkpoint, Checkpoints, ColdCopy, Detail, Done, Exported, LazyServed, Progress, SessionOpened,
    Verified, Work,
};
pub use cluster::{Doubt, MissingNode, NodeList, NodeStatus, Rebuilt};
pub use error::{Error, ErrorCode, ReportedError};
pub use gc::{GcReport, RegionGc};
pub use keys::{KeyList, KeyStatus};
pub use media::{MediumStatus, RegionMedia};
pub use queue::{QueueStatus, Reserved, Waiting};
pub use retention::{Pruned, PrunedGeneration, RetentionRule, RetentionRules};
pub use scrub::{DamagedCheckpoint, ScrubStatus, Scrubbed};
pub use status::{ClusterStatus, NamespaceUsage, RegionStatus, ServerStatus, SessionStatus};

/// Version of the control protocol; a daemon refuses any other.
pub const VERSION: u32 = 1;

/// Longest control message either side accepts, bytes.
pub const MAX_MESSAGE_BYTES: u32 = 16 << 20;

/// Request to the daemon.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// Protocol version of the sender, [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Operation and its arguments.
    #[prost(
        oneof = "request::Body",
        tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 21, 22, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 40"
    )]
    pub body: Option<request::Body>,
}

/// Reply of the daemon.
#[derive(Clone, PartialEq, Message)]
pub struct Reply {
    /// Result of the request, or its progress.
    #[prost(
        oneof = "reply::Body",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 20, 21, 25, 26, 27, 28, 30, 33, 34, 40"
    )]
    pub body: Option<reply::Body>,
}
