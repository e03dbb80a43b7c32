//! Parts of [`Request`](super::Request).

use prost::Message;

use crate::manifest::Origin;

/// Body of a request.
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
    #[prost(message, tag = "30")]
    Reserve(Reserve),
    #[prost(message, tag = "31")]
    CancelReservation(CancelReservation),
    #[prost(message, tag = "32")]
    Took(Took),
    #[prost(message, tag = "40")]
    Deny(Deny),
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
    /// Host and process that the dump is taken from.
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
    /// About how much it will bring, bytes; 0 while nobody knows.
    #[prost(uint64, tag = "22")]
    pub expected_bytes: u64,
    /// From 0, the lowest, to 11: who goes first where several wait.
    #[prost(uint32, tag = "23")]
    pub priority: u32,
    /// It should start within so many milliseconds.
    #[prost(uint64, optional, tag = "24")]
    pub deadline_ms: Option<u64>,
    /// Token of a place that was reserved for it; may be empty.
    #[prost(string, tag = "25")]
    pub reservation: String,
}

/// Make a closed session a checkpoint. Carries the images directory's descriptor.
/// Answered by [`super::Checkpoint`].
#[derive(Clone, PartialEq, Message)]
pub struct Seal {
    /// Id of the session.
    #[prost(string, tag = "1")]
    pub session: String,
}

/// Discard a session, or a parked one.
#[derive(Clone, PartialEq, Message)]
pub struct Abort {
    /// Id of the session.
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
    /// Name of the job that adopts the session.
    #[prost(string, tag = "2")]
    pub job: String,
    /// Host and process that the dump was taken from, as far as known.
    #[prost(message, optional, tag = "3")]
    pub origin: Option<Origin>,
    /// Time since `inventory.img` was written, microseconds, by the clock that wrote it. Agents send it, because they
    /// pass copies of the images on; absent: the daemon takes the time from the file itself.
    #[prost(uint64, optional, tag = "40")]
    pub images_age_us: Option<u64>,
    /// Take images that were not written while the pages came: copies, or those of another machine's clock.
    #[prost(bool, tag = "41")]
    pub ignore_times: bool,
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
    /// True to pin, false to unpin.
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
    /// From 0, the lowest, to 11: who goes first where several wait.
    #[prost(uint32, tag = "23")]
    pub priority: u32,
    /// It should start within so many milliseconds.
    #[prost(uint64, optional, tag = "24")]
    pub deadline_ms: Option<u64>,
    /// Token of a place that was reserved for it; may be empty.
    #[prost(string, tag = "25")]
    pub reservation: String,
}

/// Read a CRIU images directory (its descriptor rides along) as a new checkpoint of a job.
/// Progress, then [`super::Checkpoint`].
#[derive(Clone, PartialEq, Message)]
pub struct Import {
    /// Name of the job that gets the checkpoint.
    #[prost(string, tag = "1")]
    pub job: String,
    /// Do not compare with the job's newest checkpoint.
    #[prost(bool, tag = "2")]
    pub no_parent: bool,
    /// Durability level, as in [`Open::durability`].
    #[prost(string, tag = "3")]
    pub durability: String,
}

/// Serve a checkpoint to `criu restore --stream`. The descriptor of a listening AF_UNIX socket rides
/// along; CRIU connects to it while the request is under way. Progress, of which the first without
/// [`Progress::waiting`](super::Progress::waiting) says that it has begun; then [`super::Exported`] when CRIU
/// has hung up. A caller whose CRIU never came shuts its sending side down, and is refused.
#[derive(Clone, PartialEq, Message)]
pub struct Stream {
    /// `JOB` or `JOB@GEN`.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// From 0, the lowest, to 11: who goes first where several wait.
    #[prost(uint32, tag = "23")]
    pub priority: u32,
    /// It should start within so many milliseconds.
    #[prost(uint64, optional, tag = "24")]
    pub deadline_ms: Option<u64>,
    /// Token of a place that was reserved for it; may be empty.
    #[prost(string, tag = "25")]
    pub reservation: String,
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

/// Sets the administrative state of a node. Answered by [`super::NodeList`] of that node, with its new state.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SetNode {
    /// Name of the node.
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
    /// Checkpoints by id that are not listed, and whose copies are to go.
    #[prost(string, repeated, tag = "2")]
    pub discard: Vec<String>,
}

/// Read and verify every page that this node holds, have what is damaged mended from another node, and set
/// aside what cannot be. Progress, then [`super::Scrubbed`].
#[derive(Clone, PartialEq, Message)]
pub struct Scrub {
    /// `JOB`, `JOB@GEN`, or empty for everything.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
}

/// Keep a place in a queue for a dump or a restore to come. Answered by [`super::Reserved`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Reserve {
    /// The node whose queue it is; empty: the one that is asked.
    #[prost(string, tag = "1")]
    pub node: String,
    /// `write` for a dump, `read` for a restore.
    #[prost(string, tag = "2")]
    pub direction: String,
    /// About how much it will move, bytes.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// From 0, the lowest, to 11.
    #[prost(uint32, tag = "4")]
    pub priority: u32,
    /// It should start within so many milliseconds.
    #[prost(uint64, optional, tag = "5")]
    pub deadline_ms: Option<u64>,
    /// For how long, milliseconds, at most what the node allows; 0: for as long.
    #[prost(uint64, tag = "6")]
    pub lifetime_ms: u64,
    /// Namespace whose quota it counts in. Empty: the only one of the caller's certificate, or none for a caller of all.
    #[prost(string, tag = "7")]
    pub namespace: String,
}

/// Give a reserved place up. Answered by [`super::Done`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CancelReservation {
    /// Token of the reservation.
    #[prost(string, tag = "1")]
    pub token: String,
    /// The node whose queue it is in; empty: the one that is asked, or where it has reserved it.
    #[prost(string, tag = "2")]
    pub node: String,
}

/// Reports the duration of a dump or a restore as its caller measured it: from the first preparation to the last
/// clean-up, without the wait for admission. The daemon sees neither the beginning nor the end of it (CRIU kills the
/// processes after the seal), and predicts by it. Answered by [`super::Done`], with 1 if the daemon has just measured
/// that one, else 0.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Took {
    /// Id of the checkpoint, 32 hex digits.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// It was restored, not dumped.
    #[prost(bool, tag = "2")]
    pub restored: bool,
    /// Duration of the dump or restore, microseconds.
    #[prost(uint64, tag = "3")]
    pub elapsed_us: u64,
}

/// Refuse certificates from now on, on every node of the cluster, or take that back on this one. Without entries only
/// the list is answered. Answered by [`super::Denials`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Deny {
    /// `serial HEX`, or `name ROLE NAME`.
    #[prost(string, repeated, tag = "1")]
    pub entries: Vec<String>,
    /// Take them back.
    #[prost(bool, tag = "2")]
    pub take_back: bool,
}
