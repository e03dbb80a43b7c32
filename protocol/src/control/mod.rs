//! The control protocol between `permafrost` and `permafrostd` on one host.
//!
//! A connection to the daemon's AF_UNIX control socket carries requests one after another. A message is
//! a little-endian `u32` length and that many bytes of protobuf: a [`Request`] one way, one or more
//! [`Reply`] the other; the last reply to a request is the one that is not [`reply::Body::Progress`].
//! Where a request needs a directory, its file descriptor rides on the request's first byte
//! (SCM_RIGHTS), so that the daemon writes or reads files with nothing but what the caller opened.

pub mod framing;

use prost::Message;
use serde::Serialize;

use crate::manifest::{Manifest, Origin};

/// Version of the control protocol; a daemon refuses any other.
pub const VERSION: u32 = 1;

/// Longest control message either side accepts, bytes.
pub const MAX_MESSAGE_BYTES: u32 = 16 << 20;

/// A request.
#[derive(Clone, PartialEq, Message)]
pub struct Request {
    /// [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// What is asked for.
    #[prost(
        oneof = "request::Body",
        tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 20, 21, 22, 25"
    )]
    pub body: Option<request::Body>,
}

/// Parts of [`Request`].
pub mod request {
    use super::*;

    /// What is asked for.
    #[derive(Clone, PartialEq, prost::Oneof)]
    #[allow(missing_docs)]
    pub enum Body {
        #[prost(message, tag = "2")]
        Open(Open),
        #[prost(message, tag = "3")]
        Seal(Seal),
        #[prost(message, tag = "4")]
        Abort(Abort),
        #[prost(message, tag = "5")]
        Adopt(Adopt),
        #[prost(message, tag = "6")]
        List(List),
        #[prost(message, tag = "7")]
        Show(Show),
        #[prost(message, tag = "8")]
        Remove(Remove),
        #[prost(message, tag = "9")]
        Pin(Pin),
        #[prost(message, tag = "10")]
        Verify(Verify),
        #[prost(message, tag = "11")]
        Export(Export),
        #[prost(message, tag = "12")]
        Import(Import),
        #[prost(message, tag = "13")]
        Status(Status),
        #[prost(message, tag = "14")]
        Stream(Stream),
        #[prost(message, tag = "20")]
        Nodes(Nodes),
        #[prost(message, tag = "21")]
        SetNode(SetNode),
        #[prost(message, tag = "22")]
        Rebuild(Rebuild),
        #[prost(message, tag = "25")]
        Scrub(Scrub),
    }

    /// Open a session. Answered by [`super::SessionOpened`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Open {
        /// Job the dump will belong to.
        #[prost(string, tag = "1")]
        pub job: String,
        /// From `criu pre-dump`.
        #[prost(bool, tag = "2")]
        pub pre_dump: bool,
        /// A Seal follows CLOSE while the task is still frozen (the post-dump action script). Otherwise
        /// CLOSE is CRIU's last word, so the pages are made durable and parked before it is answered.
        #[prost(bool, tag = "3")]
        pub seal_follows: bool,
        /// Where the dump is taken.
        #[prost(message, optional, tag = "4")]
        pub origin: Option<Origin>,
        /// Do not compare with the job's newest checkpoint: a full dump.
        #[prost(bool, tag = "5")]
        pub no_parent: bool,
        /// Abort the session as soon as this control connection ends without a Seal.
        #[prost(bool, tag = "6")]
        pub bound_to_connection: bool,
        /// CRIU is given the parent's inventory (`--prev-images-dir`), so it may be told that there is a
        /// parent, and leave clean pages out. A CRIU without one fails when it is told so. Pages are
        /// compared with the parent's either way.
        #[prost(bool, tag = "7")]
        pub parent_images: bool,
        /// On how many nodes the dump must be durable before it is acknowledged: `local`, `quorum`, `all`, or empty
        /// for the node's default.
        #[prost(string, tag = "8")]
        pub durability: String,
    }

    /// Make a closed session a checkpoint. Carries the images directory's descriptor.
    /// Answered by [`super::Checkpoint`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Seal {
        /// Session id.
        #[prost(string, tag = "1")]
        pub session: String,
    }

    /// Discard a session, or a parked one.
    #[derive(Clone, PartialEq, Message)]
    pub struct Abort {
        /// Session id.
        #[prost(string, tag = "1")]
        pub session: String,
    }

    /// Give a parked session a job and its small images. Carries the images directory's descriptor.
    /// Answered by [`super::Checkpoint`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Adopt {
        /// Session id; empty: the one parked session whose processes match the images directory.
        #[prost(string, tag = "1")]
        pub session: String,
        /// Job.
        #[prost(string, tag = "2")]
        pub job: String,
        /// Where the dump was taken, as far as known.
        #[prost(message, optional, tag = "3")]
        pub origin: Option<Origin>,
    }

    /// List checkpoints (and parked sessions). Answered by [`super::Checkpoints`].
    #[derive(Clone, PartialEq, Message)]
    pub struct List {
        /// Only this job; empty for all.
        #[prost(string, tag = "1")]
        pub job: String,
    }

    /// One checkpoint in full. Answered by [`super::Detail`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Show {
        /// `JOB` or `JOB@GEN`.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
    }

    /// Remove checkpoints. Answered by [`super::Done`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Remove {
        /// `JOB@GEN`, or `JOB` with `all_generations`.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
        /// Every generation of the job.
        #[prost(bool, tag = "2")]
        pub all_generations: bool,
        /// Pinned ones too.
        #[prost(bool, tag = "3")]
        pub force: bool,
    }

    /// Pin or unpin. Answered by [`super::Checkpoint`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Pin {
        /// `JOB` or `JOB@GEN`.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
        /// Wanted state.
        #[prost(bool, tag = "2")]
        pub pinned: bool,
    }

    /// Read and verify every page. Progress, then [`super::Verified`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Verify {
        /// `JOB`, `JOB@GEN`, or empty for everything.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
    }

    /// Write a checkpoint as a CRIU images directory into the directory whose descriptor rides along.
    /// Progress, then [`super::Exported`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Export {
        /// `JOB` or `JOB@GEN`.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
        /// Leave out the pages and pagemaps: the small images only.
        #[prost(bool, tag = "2")]
        pub small_images_only: bool,
    }

    /// Read a CRIU images directory (its descriptor rides along) as a new checkpoint of a job.
    /// Progress, then [`super::Checkpoint`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Import {
        /// Job.
        #[prost(string, tag = "1")]
        pub job: String,
        /// Do not compare with the job's newest checkpoint.
        #[prost(bool, tag = "2")]
        pub no_parent: bool,
        /// As in [`Open`].
        #[prost(string, tag = "3")]
        pub durability: String,
    }

    /// Serve a checkpoint to `criu restore --stream`. The descriptor of a listening AF_UNIX socket rides
    /// along; CRIU connects to it while the request is under way. Progress, then [`super::Exported`] when CRIU
    /// has hung up. A caller whose CRIU never came shuts its sending side down, and is refused.
    #[derive(Clone, PartialEq, Message)]
    pub struct Stream {
        /// `JOB` or `JOB@GEN`.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
    }

    /// State of the daemon. Answered by [`super::ServerStatus`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Status {}

    /// Nodes of the cluster. Answered by [`super::NodeList`].
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Nodes {
        /// Only this one; empty for all.
        #[prost(string, tag = "1")]
        pub name: String,
    }

    /// What an operator wants of a node. Answered by [`super::NodeList`] of that one, as it is afterwards.
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct SetNode {
        /// Its name.
        #[prost(string, tag = "1")]
        pub name: String,
        /// `active`, `drained` or `removed`.
        #[prost(string, tag = "2")]
        pub state: String,
        /// Removed although it lives and is not drained, or what it alone holds is lost with it.
        #[prost(bool, tag = "3")]
        pub force: bool,
    }

    /// List again what the nodes hold and were told is listed: after the registry's data was lost. Answered by
    /// [`super::Rebuilt`].
    #[derive(Clone, PartialEq, Eq, Message)]
    pub struct Rebuild {
        /// Only say what would be done.
        #[prost(bool, tag = "1")]
        pub dry_run: bool,
    }

    /// Read and verify every page that this node holds, have what is damaged mended from another node, and set
    /// aside what cannot be. Progress, then [`super::Scrubbed`].
    #[derive(Clone, PartialEq, Message)]
    pub struct Scrub {
        /// `JOB`, `JOB@GEN`, or empty for everything.
        #[prost(string, tag = "1")]
        pub checkpoint: String,
    }
}

/// A reply.
#[derive(Clone, PartialEq, Message)]
pub struct Reply {
    /// What is said.
    #[prost(
        oneof = "reply::Body",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 21, 25"
    )]
    pub body: Option<reply::Body>,
}

/// Parts of [`Reply`].
pub mod reply {
    use super::*;

    /// What is said.
    #[derive(Clone, PartialEq, prost::Oneof)]
    #[allow(missing_docs)]
    pub enum Body {
        #[prost(message, tag = "1")]
        Error(Error),
        #[prost(message, tag = "2")]
        Progress(Progress),
        #[prost(message, tag = "3")]
        SessionOpened(SessionOpened),
        #[prost(message, tag = "4")]
        Checkpoint(Checkpoint),
        #[prost(message, tag = "5")]
        Checkpoints(Checkpoints),
        #[prost(message, tag = "6")]
        Detail(Detail),
        #[prost(message, tag = "7")]
        Done(Done),
        #[prost(message, tag = "8")]
        Verified(Verified),
        #[prost(message, tag = "9")]
        Exported(Exported),
        #[prost(message, tag = "10")]
        Status(ServerStatus),
        #[prost(message, tag = "20")]
        Nodes(NodeList),
        #[prost(message, tag = "21")]
        Rebuilt(Rebuilt),
        #[prost(message, tag = "25")]
        Scrubbed(Scrubbed),
    }
}

/// Why a request was refused; the exit codes of `permafrost` are these numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(i32)]
pub enum ErrorCode {
    /// Anything that has no number of its own.
    Internal = 1,
    /// The request makes no sense (a bad job name, an images directory without an inventory, …).
    Invalid = 2,
    /// No such job, generation or session.
    NotFound = 3,
    /// In the way: the job's dump is open already, the checkpoint is pinned, the match is ambiguous.
    Conflict = 4,
    /// The region is full.
    NoSpace = 6,
    /// A page or a record failed its checksum.
    Corrupt = 7,
    /// The session failed; the message says when and why.
    SessionFailed = 8,
    /// The peer may not do this.
    Denied = 9,
    /// Not enough nodes, or the registry does not answer: nothing was done, and the same may succeed later.
    Unavailable = 11,
}

/// A refusal.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Error {
    /// [`ErrorCode`].
    #[prost(enumeration = "ErrorCode", tag = "1")]
    pub code: i32,
    /// What is wrong.
    #[prost(string, tag = "2")]
    pub message: String,
    /// What to do about it; may be empty.
    #[prost(string, tag = "3")]
    pub hint: String,
}

/// How far a long request is.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Progress {
    /// Bytes done.
    #[prost(uint64, tag = "1")]
    pub done_bytes: u64,
    /// Bytes in all, 0 when unknown.
    #[prost(uint64, tag = "2")]
    pub total_bytes: u64,
}

/// A session is open and its endpoints listen.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct SessionOpened {
    /// Session id, 32 hex digits.
    #[prost(string, tag = "1")]
    pub session: String,
    /// AF_UNIX endpoint for the page-server protocol.
    #[prost(string, tag = "2")]
    pub socket: String,
    /// TCP endpoint for the page-server protocol, `address:port`.
    #[prost(string, tag = "3")]
    pub address: String,
    /// Generation that pages are compared with; 0 for none.
    #[prost(uint64, tag = "4")]
    pub parent_generation: u64,
    /// Kind and origin of that parent.
    #[prost(message, optional, tag = "5")]
    pub parent_origin: Option<Origin>,
}

/// One line of a listing.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Checkpoint {
    /// Job; empty while parked.
    #[prost(string, tag = "1")]
    pub job: String,
    /// Generation.
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    /// Checkpoint id, 32 hex digits.
    #[prost(string, tag = "3")]
    pub id: String,
    /// `full`, `pre-dump` or `parked`.
    #[prost(string, tag = "4")]
    pub kind: String,
    /// Milliseconds since the Unix epoch.
    #[prost(uint64, tag = "5")]
    pub created_unix_ms: u64,
    /// Size of the memory image, bytes (pages present × page size).
    #[prost(uint64, tag = "6")]
    pub memory_bytes: u64,
    /// Bytes this checkpoint added to the region.
    #[prost(uint64, tag = "7")]
    pub added_bytes: u64,
    /// Pinned.
    #[prost(bool, tag = "8")]
    pub pinned: bool,
    /// Number of processes.
    #[prost(uint32, tag = "9")]
    pub processes: u32,
    /// Session id; what `permafrost adopt` takes while it is parked.
    #[prost(string, tag = "10")]
    pub session: String,
    /// When a parked session is discarded, milliseconds since the Unix epoch; 0 for never.
    #[prost(uint64, tag = "11")]
    pub expires_unix_ms: u64,
    /// Generation compared with, 0 for none.
    #[prost(uint64, tag = "12")]
    pub parent_generation: u64,
    /// Of the memory: pages equal to the parent's, bytes.
    #[prost(uint64, tag = "13")]
    pub parent_bytes: u64,
    /// Of the memory: zero pages, bytes.
    #[prost(uint64, tag = "14")]
    pub zero_bytes: u64,
    /// Nodes that hold a copy; empty on a single machine.
    #[prost(string, repeated, tag = "15")]
    pub nodes: Vec<String>,
    /// How many copies there should be; 0 on a single machine.
    #[prost(uint32, tag = "16")]
    pub copies_wanted: u32,
    /// What is damaged in the copy of the node that was asked, by name and address; empty: nothing known. Told when
    /// it is listed, never stored.
    #[prost(string, tag = "17")]
    pub damaged: String,
}

/// A listing.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Checkpoints {
    /// Sorted by job and generation; parked ones last.
    #[prost(message, repeated, tag = "1")]
    pub checkpoints: Vec<Checkpoint>,
}

/// A checkpoint in full.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Detail {
    /// The line that `ls` prints.
    #[prost(message, optional, tag = "1")]
    pub checkpoint: Option<Checkpoint>,
    /// The manifest.
    #[prost(message, optional, tag = "2")]
    pub manifest: Option<Manifest>,
    /// Segments it references, and of those the ones no other checkpoint does.
    #[prost(uint64, tag = "3")]
    pub segments: u64,
    /// Bytes that would be free if it were removed.
    #[prost(uint64, tag = "4")]
    pub exclusive_bytes: u64,
}

/// Done, with how many.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Done {
    /// Checkpoints concerned.
    #[prost(uint64, tag = "1")]
    pub count: u64,
}

/// Result of a verification.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Verified {
    /// Checkpoints read.
    #[prost(uint64, tag = "1")]
    pub checkpoints: u64,
    /// Pages read.
    #[prost(uint64, tag = "2")]
    pub pages: u64,
    /// What is damaged, one entry each, by name and address.
    #[prost(string, repeated, tag = "3")]
    pub damage: Vec<String>,
}

/// Result of a scrub.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Scrubbed {
    /// Checkpoints read.
    #[prost(uint64, tag = "1")]
    pub checkpoints: u64,
    /// Pages read.
    #[prost(uint64, tag = "2")]
    pub pages: u64,
    /// Checkpoints that were found damaged, mended or not.
    #[prost(message, repeated, tag = "3")]
    pub damaged: Vec<DamagedCheckpoint>,
}

/// A checkpoint that a scrub found damaged.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct DamagedCheckpoint {
    /// `JOB@GEN`, `session SESSION`, or `checkpoint ID` of one that nobody can name.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// Checkpoint id, 32 hex digits.
    #[prost(string, tag = "2")]
    pub id: String,
    /// What is damaged, by name and address; the first 64.
    #[prost(string, repeated, tag = "3")]
    pub damage: Vec<String>,
    /// A fresh copy has taken its place, and verifies.
    #[prost(bool, tag = "4")]
    pub mended: bool,
    /// Why it was not mended.
    #[prost(string, tag = "5")]
    pub reason: String,
    /// Node whose copy it is; empty for the one that was asked.
    #[prost(string, tag = "6")]
    pub node: String,
}

/// State of the scrub.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct ScrubStatus {
    /// Within so many seconds everything is verified; 0: only on request.
    #[prost(uint64, tag = "1")]
    pub period_s: u64,
    /// Seconds since the checkpoint was verified, or sealed, for which that is longest ago; 0 without checkpoints.
    #[prost(uint64, tag = "2")]
    pub oldest_s: u64,
    /// Pages read since the daemon started.
    #[prost(uint64, tag = "3")]
    pub pages: u64,
    /// Checkpoints found damaged since it started.
    #[prost(uint64, tag = "4")]
    pub damaged: u64,
    /// Of those mended.
    #[prost(uint64, tag = "5")]
    pub mended: u64,
    /// Checkpoints that are damaged now.
    #[prost(uint64, tag = "6")]
    pub quarantined: u64,
}

/// Result of an export.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Exported {
    /// The checkpoint exported.
    #[prost(message, optional, tag = "1")]
    pub checkpoint: Option<Checkpoint>,
    /// Files written.
    #[prost(uint64, tag = "2")]
    pub files: u64,
    /// Bytes written.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// Where the dump was taken and what a restore must repeat.
    #[prost(message, optional, tag = "4")]
    pub origin: Option<Origin>,
}

/// State of the daemon.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ServerStatus {
    /// Version of `permafrostd`.
    #[prost(string, tag = "1")]
    pub version: String,
    /// Process id.
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    /// Seconds since it started.
    #[prost(uint64, tag = "3")]
    pub uptime_s: u64,
    /// Well-known page-server endpoint, `address:port`.
    #[prost(string, tag = "4")]
    pub address: String,
    /// Well-known page-server AF_UNIX endpoint.
    #[prost(string, tag = "5")]
    pub socket: String,
    /// Regions.
    #[prost(message, repeated, tag = "6")]
    pub regions: Vec<RegionStatus>,
    /// Sessions that are open.
    #[prost(message, repeated, tag = "7")]
    pub sessions: Vec<SessionStatus>,
    /// Sealed checkpoints.
    #[prost(uint64, tag = "8")]
    pub checkpoints: u64,
    /// Parked sessions.
    #[prost(uint64, tag = "9")]
    pub parked: u64,
    /// How long a parked session is kept, seconds.
    #[prost(uint64, tag = "10")]
    pub park_ttl_s: u64,
    /// Where the catalog came from: `opened`, `rebuilt` and why.
    #[prost(string, tag = "11")]
    pub catalog: String,
    /// It is an agent, which keeps nothing itself.
    #[prost(bool, tag = "12")]
    pub agent: bool,
    /// Where nodes and agents are served, `address:port`; empty if they are not.
    #[prost(string, tag = "13")]
    pub peers: String,
    /// Where Prometheus is answered, `address:port`; empty if it is not.
    #[prost(string, tag = "14")]
    pub metrics: String,
    /// The cluster, if it is a node of one.
    #[prost(message, optional, tag = "15")]
    pub cluster: Option<ClusterStatus>,
    /// The scrub.
    #[prost(message, optional, tag = "20")]
    pub scrub: Option<ScrubStatus>,
}

/// A node's place in its cluster.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct ClusterStatus {
    /// Its name.
    #[prost(string, tag = "1")]
    pub node: String,
    /// Id of the registry's data; empty before the node has registered once.
    #[prost(string, tag = "2")]
    pub id: String,
    /// Why the node may do nothing that has to be listed; empty if it may.
    #[prost(string, tag = "3")]
    pub fenced: String,
    /// The node that works in the background for all; empty while there is none, or nobody knows.
    #[prost(string, tag = "4")]
    pub leader: String,
    /// Copies that there should be of what is dumped here.
    #[prost(uint32, tag = "5")]
    pub copies_wanted: u32,
}

/// State of a region.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct RegionStatus {
    /// Path.
    #[prost(string, tag = "1")]
    pub path: String,
    /// Region uuid.
    #[prost(string, tag = "2")]
    pub uuid: String,
    /// `dax`, `file`.
    #[prost(string, tag = "3")]
    pub medium: String,
    /// What durability the medium gives, in words, with the errno when DAX was refused.
    #[prost(string, tag = "4")]
    pub guarantee: String,
    /// Bytes in the segment area.
    #[prost(uint64, tag = "5")]
    pub capacity_bytes: u64,
    /// Bytes in segments that are free.
    #[prost(uint64, tag = "6")]
    pub free_bytes: u64,
    /// Times the region was opened after an unclean stop.
    #[prost(uint64, tag = "7")]
    pub unsafe_shutdowns: u64,
    /// Records used in the journal half in use, and its capacity.
    #[prost(uint64, tag = "8")]
    pub journal_records: u64,
    /// Capacity of a journal half, records.
    #[prost(uint64, tag = "9")]
    pub journal_capacity: u64,
}

/// State of an open session.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct SessionStatus {
    /// Session id.
    #[prost(string, tag = "1")]
    pub session: String,
    /// Job; empty for an anonymous one.
    #[prost(string, tag = "2")]
    pub job: String,
    /// `open`, `receiving`, `closed`, `sealing`, `failed`.
    #[prost(string, tag = "3")]
    pub state: String,
    /// Bytes received so far.
    #[prost(uint64, tag = "4")]
    pub received_bytes: u64,
    /// Why it failed.
    #[prost(string, tag = "5")]
    pub error: String,
    /// Seconds since it was opened.
    #[prost(uint64, tag = "6")]
    pub age_s: u64,
}

/// Nodes of a cluster, and how its checkpoints stand.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct NodeList {
    /// By name.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NodeStatus>,
    /// The node that answers.
    #[prost(string, tag = "2")]
    pub answered_by: String,
    /// The node that works in the background for all; empty while there is none, or nobody knows.
    #[prost(string, tag = "3")]
    pub leader: String,
    /// The registry's random id, made with its data; empty while nobody knows.
    #[prost(string, tag = "4")]
    pub cluster: String,
    /// How long ago the registry last confirmed which nodes there are, milliseconds; none: it never has.
    #[prost(uint64, optional, tag = "5")]
    pub age_ms: Option<u64>,
    /// Checkpoints that are listed. Like all that is counted, none while the registry does not answer.
    #[prost(uint64, optional, tag = "6")]
    pub checkpoints: Option<u64>,
    /// Of these, with fewer copies on nodes that live and stay than there should be.
    #[prost(uint64, optional, tag = "7")]
    pub under_replicated: Option<u64>,
    /// Of these, without a copy on any node that lives.
    #[prost(uint64, optional, tag = "8")]
    pub stranded: Option<u64>,
}

/// One node of a cluster.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct NodeStatus {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// What an operator has said of it: `active`, `drained` or `removed`.
    #[prost(string, tag = "2")]
    pub state: String,
    /// Its lease lives. What follows is empty of a node that does not, but for the region and what is counted.
    #[prost(bool, tag = "3")]
    pub live: bool,
    /// It is stopping.
    #[prost(bool, tag = "4")]
    pub stopping: bool,
    /// `reserved`, or `transient`: its copies do not count.
    #[prost(string, tag = "5")]
    pub class: String,
    /// `pmem`, `memory` or `file`.
    #[prost(string, tag = "6")]
    pub tier: String,
    /// Zone it fails with.
    #[prost(string, tag = "7")]
    pub zone: String,
    /// Rack it fails with.
    #[prost(string, tag = "8")]
    pub rack: String,
    /// Machine it fails with.
    #[prost(string, tag = "9")]
    pub host: String,
    /// Where it takes QUIC connections, `host:port`.
    #[prost(string, tag = "10")]
    pub address: String,
    /// Its region's uuid.
    #[prost(string, tag = "11")]
    pub region: String,
    /// Size of its region, bytes.
    #[prost(uint64, tag = "12")]
    pub capacity_bytes: u64,
    /// Bytes free in its region.
    #[prost(uint64, tag = "13")]
    pub free_bytes: u64,
    /// Version of its software.
    #[prost(string, tag = "14")]
    pub version: String,
    /// When its region was first there, milliseconds since the Unix epoch, by its own clock.
    #[prost(uint64, tag = "15")]
    pub first_seen_unix_ms: u64,
    /// Listed checkpoints that it holds.
    #[prost(uint64, optional, tag = "16")]
    pub checkpoints: Option<u64>,
    /// Of these, with too few copies on the other nodes that live and stay: it is needed until they are copied.
    #[prost(uint64, optional, tag = "17")]
    pub needed: Option<u64>,
    /// Memory of those, bytes.
    #[prost(uint64, optional, tag = "18")]
    pub needed_bytes: Option<u64>,
    /// Of these, on no other node that lives: lost, if this one is.
    #[prost(uint64, optional, tag = "19")]
    pub only_here: Option<u64>,
    /// Names of some of those that are only here.
    #[prost(string, repeated, tag = "20")]
    pub only_here_names: Vec<String>,
}

/// What a rebuild has done, or would do.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Rebuilt {
    /// Nothing was changed.
    #[prost(bool, tag = "1")]
    pub dry_run: bool,
    /// The registry's id.
    #[prost(string, tag = "2")]
    pub cluster: String,
    /// Nodes whose inventories were taken.
    #[prost(string, repeated, tag = "3")]
    pub nodes: Vec<String>,
    /// Nodes that are not part of it, and why: what only they hold is not listed again.
    #[prost(message, repeated, tag = "4")]
    pub missing: Vec<MissingNode>,
    /// Checkpoints that were listed again.
    #[prost(message, repeated, tag = "5")]
    pub listed: Vec<Checkpoint>,
    /// Copies that were added to checkpoints which were listed.
    #[prost(uint64, tag = "6")]
    pub copies_added: u64,
    /// Copies that were left alone.
    #[prost(message, repeated, tag = "7")]
    pub doubts: Vec<Doubt>,
    /// Checkpoints that were to be listed, and could not: their jobs are being dumped now.
    #[prost(string, repeated, tag = "8")]
    pub busy: Vec<String>,
}

/// A node whose inventory a rebuild does not have.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct MissingNode {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Why not.
    #[prost(string, tag = "2")]
    pub why: String,
}

/// A copy that a rebuild leaves alone.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Doubt {
    /// The node that holds it.
    #[prost(string, tag = "1")]
    pub node: String,
    /// Its name, `JOB@GENERATION`.
    #[prost(string, tag = "2")]
    pub checkpoint: String,
    /// Its id.
    #[prost(string, tag = "3")]
    pub id: String,
    /// What is wrong.
    #[prost(string, tag = "4")]
    pub why: String,
}
