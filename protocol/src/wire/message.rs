//! Messages of the wire. Field numbers are never used again; unknown fields are skipped.
//!
//! A stream's first message is a [`Hello`], its second a [`Request`]. From version 2 on the node answers the first with
//! a [`Hello`] of its own. What follows depends on the request.

use prost::Message;

use crate::control;
use crate::manifest::{Manifest, Origin};
use crate::versions::SpokenVersions;

/// First message of a stream: names the sender and its version. The peer's certificate decides its permissions; this
/// message gives its identity.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Hello {
    /// Version of the wire that the connection has agreed on; where there is none, the newest one of the sender.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Name of the node or agent: that of its certificate.
    #[prost(string, tag = "2")]
    pub name: String,
    /// UUID of a node's region, so that another node of this name with other data is noticed. Empty from an agent.
    #[prost(string, tag = "3")]
    pub region: String,
    /// Release of the sender and the versions that it speaks; from version 2 on.
    #[prost(message, optional, tag = "4")]
    pub versions: Option<SpokenVersions>,
    /// True in the answer of a node that takes the bulk streams of dumps over TLS, on the TCP port that has the number of
    /// its UDP port.
    #[prost(bool, tag = "5")]
    pub tls_bulk: bool,
}

/// Second message of a stream: the operation that the client requests.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// Operation and its arguments.
    #[prost(oneof = "request::Body", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 30")]
    pub body: Option<request::Body>,
}

/// Parts of [`Request`].
pub mod request {
    use super::*;

    /// Operation that the client requests.
    #[derive(Clone, PartialEq, prost::Oneof)]
    #[allow(missing_docs)]
    pub enum Body {
        #[prost(message, tag = "1")]
        Dump(Dump),
        #[prost(message, tag = "2")]
        Fetch(Fetch),
        #[prost(message, tag = "3")]
        Publish(Publish),
        #[prost(message, tag = "4")]
        Rollback(Rollback),
        #[prost(message, tag = "5")]
        Inventory(Inventory),
        #[prost(message, tag = "6")]
        Ping(Ping),
        #[prost(message, tag = "7")]
        Control(control::Request),
        #[prost(message, tag = "8")]
        Pull(Pull),
        #[prost(message, tag = "9")]
        Verify(Verify),
        #[prost(message, tag = "30")]
        Api(Api),
    }

    /// Take in a dump, or continue one after a lost connection. Answered by [`super::DumpOpened`]; then frames come
    /// on a bulk stream with the session as its preamble, and replies ([`super::Acknowledged`], [`super::Closed`],
    /// [`super::Prepared`]) on this one, [`super::Commit`] being a further message of the sender.
    #[derive(Clone, PartialEq, Message)]
    pub struct Dump {
        /// Session id, 16 bytes, chosen by the node or agent that takes the dump.
        #[prost(bytes = "vec", tag = "1")]
        pub session: Vec<u8>,
        /// Name of the job; empty while it is unknown.
        #[prost(string, tag = "2")]
        pub job: String,
        /// Checkpoint (32 hex digits) that frames may refer to for pages; empty for none.
        #[prost(string, tag = "3")]
        pub parent: String,
        /// True to continue a dump that this node has begun: refused when the node does not know the session.
        #[prost(bool, tag = "4")]
        pub resume: bool,
        /// Adoption of a parked session, sent by an agent: no pages come, only the small images that the session is
        /// adopted with.
        #[prost(message, optional, tag = "6")]
        pub adopt: Option<control::request::Adopt>,
        /// Processes that are compared with a process of another pid in the parent, and that pid: pages that are
        /// marked as the parent's are in that process.
        #[prost(map = "uint64, uint64", tag = "30")]
        pub compared: std::collections::HashMap<u64, u64>,
    }

    /// Send a checkpoint's pages. Answered by [`super::FetchOpened`], then frames on a bulk stream with the answered
    /// id as preamble: [`super::super::frame::Kind::Space`] and its runs, for each space requested, then images, then
    /// `Prepare`.
    #[derive(Clone, PartialEq, Message)]
    pub struct Fetch {
        /// Checkpoint, 32 hex digits.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
        /// Only this address space (its place in the manifest, from 1); 0 for everything, images too.
        #[prost(uint32, tag = "2")]
        pub space: u32,
        /// First virtual page number to send of that address space.
        #[prost(uint64, tag = "3")]
        pub from_index: u64,
        /// Maximum number of pages to send of that address space; 0 for all.
        #[prost(uint64, tag = "4")]
        pub pages: u64,
        /// Checkpoint that the asker has: pages equal to its own are sent as [`super::super::frame::Kind::Parent`].
        /// Empty for none.
        #[prost(string, tag = "5")]
        pub parent: String,
        /// True to send the manifest only.
        #[prost(bool, tag = "6")]
        pub manifest_only: bool,
        /// True to send the positions and checksums of pages without the pages, with `space`, as
        /// [`super::super::frame::Kind::ImageData`] (docs/protocol.md, "A fetch").
        #[prost(bool, tag = "7")]
        pub outline_only: bool,
        /// Only this small image, or some from it on; no address space.
        #[prost(string, tag = "8")]
        pub image: String,
        /// Name of the checkpoint, `JOB@GENERATION`. A node that does not hold it uses the name to find a holder, and
        /// passes on that holder's pages; not for other nodes, which contact holders themselves. Empty: only
        /// checkpoints that the node holds itself.
        #[prost(string, tag = "9")]
        pub listed_as: String,
        /// True for a copy without a waiting client: sent slowly while the holder takes dumps.
        #[prost(bool, tag = "10")]
        pub background: bool,
        /// With `image`: number of small images, counted from that one in the manifest; 0 for that one only.
        #[prost(uint32, tag = "11")]
        pub images: u32,
        /// True if the reader comes back: for 30 s the holder keeps the pages even if the checkpoint is removed.
        #[prost(bool, tag = "12")]
        pub hold: bool,
        /// With `outline_only`: send a proof (docs/protocol.md, "A fetch") of the pages at `pages` indices from
        /// `from_index` on, or of all positions if `pages` is 0. A node of an earlier release sends the outline.
        #[prost(bool, tag = "13")]
        pub proof: bool,
    }

    /// Reports that the cluster lists this checkpoint: it is acknowledged, and is not collected as left over.
    /// Answered by `Done`.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Publish {
        /// Checkpoint, 32 hex digits.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
    }

    /// Drop a commit that did not reach its durability, or a checkpoint that was removed. Answered by `Done`, even if
    /// the node does not hold it.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Rollback {
        /// Checkpoint, 32 hex digits.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
    }

    /// Get a checkpoint from another node and seal it, unless the node holds it. Answered by [`super::Committed`].
    /// Sent by repair, and by an origin whose replica has failed.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Pull {
        /// Checkpoint, 32 hex digits.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
        /// Nodes to get it from, in order.
        #[prost(string, repeated, tag = "2")]
        pub from: Vec<String>,
        /// A checkpoint that may be here already, for its pages not to be sent: its parent. May be empty.
        #[prost(string, tag = "3")]
        pub parent: String,
        /// True if it is listed: the sealed copy is marked as published at once.
        #[prost(bool, tag = "4")]
        pub published: bool,
        /// Content digest that it is listed with: a copy with another digest is refused. Empty while it is unknown.
        #[prost(bytes = "vec", tag = "5")]
        pub content_digest: Vec<u8>,
        /// True if no client waits: taken in slowly while this node takes dumps.
        #[prost(bool, tag = "6")]
        pub background: bool,
    }

    /// Read copies of this node and compare them with their checksums, unless that was done lately. Answered at once
    /// by [`super::Verified`], with the results so far: the sender repeats the request for the rest.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Verify {
        /// Checkpoints, 32 hex digits each; at most [`MAX_VERIFY`].
        #[prost(string, repeated, tag = "1")]
        pub checkpoints: Vec<String>,
        /// A verification that is older, in seconds, does not count.
        #[prost(uint64, tag = "2")]
        pub within_s: u64,
    }

    /// Maximum number of checkpoints in one [`Verify`].
    pub const MAX_VERIFY: usize = 10_000;

    /// Lists the checkpoints that a node holds. Answered by [`super::Held`], a part at a time.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Inventory {
        /// Only checkpoints whose id is greater than this one: the last of the previous part. Empty at first.
        #[prost(string, tag = "1")]
        pub after: String,
    }

    /// Checks that the node is alive. Answered by `Done`, with its state.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Ping {}

    /// Speak HTTP: the API of the node, with the permissions of the peer's certificate. Answered by `Done`; then both
    /// directions of the stream are a connection of HTTP/1.1.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Api {}
}

/// Message with which the sender of a dump seals it as a checkpoint, after `Prepared`. Answered by [`Committed`].
#[derive(Clone, PartialEq, Message)]
pub struct Commit {
    /// Id of the checkpoint, 32 hex digits: equal on every node.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// Content digest of the dump that is to be sealed; refused if it differs from the digest of the received dump.
    #[prost(bytes = "vec", tag = "2")]
    pub content_digest: Vec<u8>,
    /// Name of the job.
    #[prost(string, tag = "3")]
    pub job: String,
    /// Generation of the checkpoint in its job.
    #[prost(uint64, tag = "4")]
    pub generation: u64,
    /// Generation that pages were compared with.
    #[prost(uint64, tag = "5")]
    pub parent_generation: u64,
    /// Wall-clock time of the seal, milliseconds since the Unix epoch, of the sender: one for all copies.
    #[prost(uint64, tag = "6")]
    pub created_unix_ms: u64,
    /// Kind of the checkpoint, a number of [`crate::manifest::Kind`].
    #[prost(enumeration = "crate::manifest::Kind", tag = "7")]
    pub kind: i32,
    /// Host and process that the dump was taken from.
    #[prost(message, optional, tag = "8")]
    pub origin: Option<Origin>,
    /// Session, 32 hex digits.
    #[prost(string, tag = "9")]
    pub session: String,
    /// Time in which the sender must have the checkpoint listed, milliseconds: a copy that is not listed is left over
    /// only after it. 0: the receiver's own.
    #[prost(uint64, tag = "10")]
    pub deadline_ms: u64,
    /// Client that the dump came from, as in the manifest ([`crate::manifest::TakenBy`]); only between nodes.
    #[prost(string, tag = "14")]
    pub taken_by: String,
}

/// Reply to a request.
#[derive(Clone, PartialEq, Message)]
pub struct Reply {
    /// Result of the request, or an error.
    #[prost(oneof = "reply::Body", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12")]
    pub body: Option<reply::Body>,
}

/// Parts of [`Reply`].
pub mod reply {
    use super::*;

    /// Body of a reply.
    #[derive(Clone, PartialEq, prost::Oneof)]
    #[allow(missing_docs)]
    #[expect(clippy::large_enum_variant, reason = "decoded one at a time")]
    pub enum Body {
        #[prost(message, tag = "1")]
        Error(control::Error),
        #[prost(message, tag = "2")]
        DumpOpened(DumpOpened),
        #[prost(message, tag = "3")]
        Acknowledged(Acknowledged),
        #[prost(message, tag = "4")]
        Closed(Closed),
        #[prost(message, tag = "5")]
        Prepared(Prepared),
        #[prost(message, tag = "6")]
        Committed(Committed),
        #[prost(message, tag = "7")]
        FetchOpened(FetchOpened),
        #[prost(message, tag = "8")]
        Held(Held),
        #[prost(message, tag = "9")]
        Done(Done),
        #[prost(message, tag = "10")]
        Control(control::Reply),
        #[prost(message, tag = "11")]
        Verified(Verified),
        #[prost(message, tag = "12")]
        Hello(Hello),
    }
}

/// Reply to a dump: the dump is open, or continues.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DumpOpened {
    /// Sequence of the frame that is expected next; 0 for a new dump.
    #[prost(uint64, tag = "1")]
    pub next_sequence: u64,
    /// True if the node has the requested parent.
    #[prost(bool, tag = "2")]
    pub has_parent: bool,
}

/// Every frame below `next_sequence` was taken in and need not be kept for retransmission.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Acknowledged {
    /// Sequence of the frame that is expected next.
    #[prost(uint64, tag = "1")]
    pub next_sequence: u64,
}

/// All address spaces are durable on this node; nothing refers to them yet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Closed {
    /// SHA-256 over the contents of the address spaces, independent of their storage (docs/format.md, "Content
    /// digest").
    #[prost(bytes = "vec", tag = "1")]
    pub content_digest: Vec<u8>,
    /// Nodes that have the address spaces, this one included.
    #[prost(string, repeated, tag = "2")]
    pub nodes: Vec<String>,
}

/// The whole dump was received, images too; as durable as [`Closed`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Prepared {
    /// Content digest as in [`Closed`], over address spaces and images.
    #[prost(bytes = "vec", tag = "1")]
    pub content_digest: Vec<u8>,
    /// Nodes that have the dump, this one included.
    #[prost(string, repeated, tag = "2")]
    pub nodes: Vec<String>,
}

/// The checkpoint is sealed.
#[derive(Clone, PartialEq, Message)]
pub struct Committed {
    /// Line of the checkpoint in a listing.
    #[prost(message, optional, tag = "1")]
    pub checkpoint: Option<control::Checkpoint>,
    /// Nodes that have sealed it, this one included.
    #[prost(string, repeated, tag = "2")]
    pub nodes: Vec<String>,
}

/// Frames are on their way.
#[derive(Clone, PartialEq, Message)]
pub struct FetchOpened {
    /// Preamble of the bulk stream, 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub id: Vec<u8>,
    /// Manifest of the checkpoint; its map roots are meaningless on other nodes. Without images and spaces for a part
    /// of the checkpoint: a peer that requests parts has the manifest.
    #[prost(message, optional, tag = "2")]
    pub manifest: Option<Manifest>,
    /// Content digest of the checkpoint.
    #[prost(bytes = "vec", tag = "3")]
    pub content_digest: Vec<u8>,
}

/// Checkpoints that a node holds, in the order of their ids.
#[derive(Clone, PartialEq, Message)]
pub struct Held {
    /// Checkpoints, each as in a listing.
    #[prost(message, repeated, tag = "1")]
    pub checkpoints: Vec<control::Checkpoint>,
    /// State of each of these checkpoints' copies, in the same order.
    #[prost(message, repeated, tag = "2")]
    pub copies: Vec<HeldCopy>,
    /// True if there are more, behind the last one here.
    #[prost(bool, tag = "3")]
    pub more: bool,
}

/// State of a checkpoint's copy on a node with regard to the cluster.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct HeldCopy {
    /// SHA-256 over the contents (docs/format.md, "Content digest").
    #[prost(bytes = "vec", tag = "1")]
    pub content_digest: Vec<u8>,
    /// True if the node knows that the cluster lists it.
    #[prost(bool, tag = "2")]
    pub published: bool,
    /// True if it was sealed for the cluster, and the node does not know yet that it is listed.
    #[prost(bool, tag = "3")]
    pub provisional: bool,
    /// True if it is known to be damaged.
    #[prost(bool, tag = "4")]
    pub damaged: bool,
}

/// State of the copies that a [`request::Verify`] names. Copies that are in none of the lists are being read.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Verified {
    /// Read lately, and whole.
    #[prost(string, repeated, tag = "1")]
    pub whole: Vec<String>,
    /// Copies that are damaged.
    #[prost(string, repeated, tag = "2")]
    pub damaged: Vec<String>,
    /// Copies that the node does not hold.
    #[prost(string, repeated, tag = "3")]
    pub missing: Vec<String>,
}

/// Reply to a request that is done, with the state of the node.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Done {
    /// Bytes free in its region.
    #[prost(uint64, tag = "1")]
    pub free_bytes: u64,
    /// Time of its clock, milliseconds since the Unix epoch; 0 if it does not say.
    #[prost(uint64, tag = "2")]
    pub unix_ms: u64,
}
