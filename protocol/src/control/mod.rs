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
mod contents;
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

use crate::versions::{Interface, SpokenVersions, VersionRange};

pub use certificate::{CertificateStatus, Denials};
pub use checkpoint::{
    Checkpoint, Checkpoints, ColdCopy, Detail, Done, Exported, LazyServed, Progress, SessionOpened,
    Verified, Work,
};
pub use cluster::{Doubt, MissingNode, NodeList, NodeProbe, NodeStatus, Rebuilt, RegistryMember};
pub use contents::{
    CheckpointContents, ContentsImage, MappingContents, OpenFile, PageCounts, ProcessContents,
    SharedContents,
};
pub use error::{Error, ErrorCode, ReportedError};
pub use gc::{GcReport, RegionGc};
pub use keys::{KeyList, KeyStatus};
pub use media::{MediumStatus, RegionMedia};
pub use queue::{QueueStatus, Reserved, TransferStatus, Waiting};
pub use retention::{Pruned, PrunedGeneration, RetentionRule, RetentionRules};
pub use scrub::{DamagedCheckpoint, ScrubStatus, Scrubbed};
pub use status::{
    ClusterStatus, DaemonFile, NamespaceUsage, RegionStatus, ServerStatus, SessionStatus,
};

/// Longest control message either side accepts, bytes.
pub const MAX_MESSAGE_BYTES: u32 = 16 << 20;

/// Request to the daemon.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// Version of the protocol that the request belongs to: the first one that has it, so that every daemon that knows
    /// the request takes it.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Operation and its arguments.
    #[prost(
        oneof = "request::Body",
        tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 40, 50"
    )]
    pub body: Option<request::Body>,
}

impl Request {
    /// Returns a request, with the version that it belongs to.
    pub fn new(body: request::Body) -> Self {
        Self {
            version: since(&body),
            body: Some(body),
        }
    }

    /// Returns the operation of a request that came to a process with this name, which speaks `spoken`.
    ///
    /// # Errors
    /// The request is of a version that is not spoken, or asks for nothing that is known in its version.
    pub fn known(
        &self,
        name: &str,
        spoken: &SpokenVersions,
    ) -> Result<&request::Body, UnknownRequest> {
        let range = spoken.of(Interface::Control);
        let is_known = |body: &&request::Body| since(body) <= self.version;
        let body = self.body.as_ref().filter(is_known);
        body.filter(|_| range.contains(self.version))
            .ok_or_else(|| UnknownRequest {
                version: self.version,
                name: name.to_owned(),
                release: spoken.release.clone(),
                range,
            })
    }
}

/// Returns the first version of the control protocol that has the request.
pub const fn since(body: &request::Body) -> u32 {
    match body {
        request::Body::SetLevel(_)
        | request::Body::TakeSpace(_)
        | request::Body::EndPages(_)
        | request::Body::Place(_) => 2,
        _ => 1,
    }
}

/// A request of another version of the control protocol, or one that only a later release has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a request of version {version} of the control protocol that {name} (release {release}) does not know: it speaks {range}"
)]
pub struct UnknownRequest {
    version: u32,
    name: String,
    release: String,
    range: VersionRange,
}

impl ReportedError for UnknownRequest {
    fn code(&self) -> ErrorCode {
        ErrorCode::Invalid
    }

    fn hint(&self) -> &str {
        if self.version < self.range.oldest {
            "upgrade the program that asks, one release at a time (docs/upgrading.md)"
        } else {
            "upgrade the program that was asked (docs/upgrading.md), or ask with a `permafrost` of its release"
        }
    }
}

/// Reply of the daemon.
#[derive(Clone, PartialEq, Message)]
pub struct Reply {
    /// Result of the request, or its progress.
    #[prost(
        oneof = "reply::Body",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 20, 21, 25, 26, 27, 28, 30, 33, 34, 40, 50"
    )]
    pub body: Option<reply::Body>,
}
