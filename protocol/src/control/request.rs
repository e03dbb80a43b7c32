//! Parts of [`Request`](super::Request).

use prost::Message;

use super::RetentionRule;
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
    #[prost(message, tag = "15")]
    Lend(Lend),
    #[prost(message, tag = "16")]
    Thaw(Thaw),
    #[prost(message, tag = "17")]
    TakeSpace(TakeSpace),
    #[prost(message, tag = "18")]
    EndPages(EndPages),
    #[prost(message, tag = "19")]
    Place(Place),
    #[prost(message, tag = "20")]
    Nodes(Nodes),
    #[prost(message, tag = "21")]
    SetNode(SetNode),
    #[prost(message, tag = "22")]
    Rebuild(Rebuild),
    #[prost(message, tag = "23")]
    SetLevel(SetLevel),
    #[prost(message, tag = "25")]
    Scrub(Scrub),
    #[prost(message, tag = "26")]
    Gc(Gc),
    #[prost(message, tag = "27")]
    SetRetention(SetRetention),
    #[prost(message, tag = "28")]
    ShowRetention(ShowRetention),
    #[prost(message, tag = "29")]
    Prune(Prune),
    #[prost(message, tag = "30")]
    Reserve(Reserve),
    #[prost(message, tag = "31")]
    CancelReservation(CancelReservation),
    #[prost(message, tag = "32")]
    Took(Took),
    #[prost(message, tag = "33")]
    Media(Media),
    #[prost(message, tag = "34")]
    Keys(Keys),
    #[prost(message, tag = "40")]
    Deny(Deny),
    #[prost(message, tag = "50")]
    Describe(Describe),
}

/// Open a session. Answered by [`super::SessionOpened`].
#[derive(Clone, PartialEq, Message)]
pub struct Open {
    /// Job the dump will belong to.
    #[prost(string, tag = "1")]
    pub job: String,
    /// True for pages from `criu pre-dump`.
    #[prost(bool, tag = "2")]
    pub pre_dump: bool,
    /// True if a Seal follows CLOSE while the task is still frozen (the post-dump action script). Otherwise CLOSE is
    /// CRIU's last message, so the pages are made durable and parked before the reply.
    #[prost(bool, tag = "3")]
    pub seal_follows: bool,
    /// Host and process that the dump is taken from.
    #[prost(message, optional, tag = "4")]
    pub origin: Option<Origin>,
    /// True for a full dump: skip the comparison with the job's newest checkpoint.
    #[prost(bool, tag = "5")]
    pub no_parent: bool,
    /// True to abort the session as soon as this control connection ends without a Seal.
    #[prost(bool, tag = "6")]
    pub bound_to_connection: bool,
    /// True if CRIU has the parent's inventory (`--prev-images-dir`), and the daemon may say that there is a parent: CRIU
    /// leaves clean pages out then, or fails without the inventory. Pages are compared with the parent's either way.
    #[prost(bool, tag = "7")]
    pub parent_images: bool,
    /// Durability level: the nodes on which the dump must be durable before it is acknowledged. `local`, `quorum`,
    /// `all`, or empty for the node's default.
    #[prost(string, tag = "8")]
    pub durability: String,
    /// True for a round of a pre-copy: a pre-dump whose checkpoint is removed when this control connection ends.
    #[prost(bool, tag = "9")]
    pub pre_copy: bool,
    /// Estimated size of the dump, bytes; 0 if unknown.
    #[prost(uint64, tag = "22")]
    pub expected_bytes: u64,
    /// Priority from 0, the lowest, to 11: decides which request goes first where several wait.
    #[prost(uint32, tag = "23")]
    pub priority: u32,
    /// Time within which it should start, milliseconds.
    #[prost(uint64, optional, tag = "24")]
    pub deadline_ms: Option<u64>,
    /// Token of a place that was reserved for it; may be empty.
    #[prost(string, tag = "25")]
    pub reservation: String,
    /// Bytes of pages for which room in the daemon's pipes is to be reserved; 0 for none. Only if `bound_to_connection`.
    #[prost(uint64, tag = "26")]
    pub pipe_bytes: u64,
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
    /// True if the task was let go because it had been frozen for as long as its freeze limit.
    #[prost(bool, tag = "2")]
    pub freeze_limit_reached: bool,
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
    /// True to accept images that were not written while the pages came: copies, or those of another machine's clock.
    #[prost(bool, tag = "41")]
    pub ignore_times: bool,
}

/// List checkpoints (and parked sessions). Answered by [`super::Checkpoints`].
#[derive(Clone, PartialEq, Message)]
pub struct List {
    /// Only this job; empty for all.
    #[prost(string, tag = "1")]
    pub job: String,
    /// Only jobs of this namespace; empty for all.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// True for parked sessions only.
    #[prost(bool, tag = "3")]
    pub parked: bool,
    /// Largest number of checkpoints in the answer; 0, or more than 10,000, for 10,000.
    #[prost(uint64, tag = "4")]
    pub limit: u64,
    /// Only what is behind this one in the list: [`super::Checkpoints::next`] of the answer before. Empty for the
    /// beginning.
    #[prost(string, tag = "5")]
    pub after: String,
}

/// Requests one checkpoint in full. Answered by [`super::Detail`].
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
    /// True to remove every generation of the job.
    #[prost(bool, tag = "2")]
    pub all_generations: bool,
    /// True to remove pinned checkpoints too.
    #[prost(bool, tag = "3")]
    pub force: bool,
    /// True to remove the checkpoint also if the job has no other one that can be restored.
    #[prost(bool, tag = "4")]
    pub last: bool,
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
    /// True to fetch pages in a cold tier and verify them. Those of a named checkpoint always are.
    #[prost(bool, tag = "2")]
    pub cold: bool,
}

/// Write a checkpoint as a CRIU images directory into the directory whose descriptor rides along.
/// Progress, then [`super::Exported`].
#[derive(Clone, PartialEq, Message)]
pub struct Export {
    /// `JOB` or `JOB@GEN`.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// True to leave out the pages and pagemaps, and to write the small images only.
    #[prost(bool, tag = "2")]
    pub small_images_only: bool,
    /// True to leave out the pages that a lazy restore gets later, from `Thaw`, `Place` or `Lend`.
    #[prost(bool, tag = "3")]
    pub without_lazy_pages: bool,
    /// Priority from 0, the lowest, to 11: decides which request goes first where several wait.
    #[prost(uint32, tag = "23")]
    pub priority: u32,
    /// Time within which it should start, milliseconds.
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
    /// True to skip the comparison with the job's newest checkpoint.
    #[prost(bool, tag = "2")]
    pub no_parent: bool,
    /// Durability level, as in [`Open::durability`].
    #[prost(string, tag = "3")]
    pub durability: String,
}

/// Serve a checkpoint to `criu restore --stream`. The descriptor of a listening AF_UNIX socket rides along; CRIU
/// connects to it while the request is under way. Replies with progress, of which the first without
/// [`Progress::waiting`](super::Progress::waiting) means that the restore has begun; then [`super::Exported`] when
/// CRIU has closed the connection. If CRIU never connects, the caller shuts its sending side down and is refused.
#[derive(Clone, PartialEq, Message)]
pub struct Stream {
    /// `JOB` or `JOB@GEN`.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// Priority from 0, the lowest, to 11: decides which request goes first where several wait.
    #[prost(uint32, tag = "23")]
    pub priority: u32,
    /// Time within which it should start, milliseconds.
    #[prost(uint64, optional, tag = "24")]
    pub deadline_ms: Option<u64>,
    /// Token of a place that was reserved for it; may be empty.
    #[prost(string, tag = "25")]
    pub reservation: String,
}

/// Serve the pages of a checkpoint to every `criu lazy-pages --page-server` that connects to a listening socket, TCP or
/// AF_UNIX, whose descriptor rides along. The first Progress means that connections are accepted. [`super::LazyServed`]
/// follows when the caller has shut its sending side down, and all connections have ended.
#[derive(Clone, PartialEq, Message)]
pub struct Lend {
    /// `JOB` or `JOB@GEN`.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
}

/// Bring the pages of a checkpoint to the processes that `criu restore --lazy-pages` restores. The descriptor of a
/// connected AF_UNIX socket rides along, on which the caller passes on what CRIU says and hands over.
///
/// The first [`Progress`](super::Progress) without [`Progress::waiting`](super::Progress::waiting) means that CRIU may be
/// started. A later one may carry a descriptor for the caller to keep until the last reply: the log of what the daemon has
/// read ([`Progress::is_log`](super::Progress::is_log)), or the userfaultfd of a process that has forked. Should the daemon
/// end before, accesses to missing pages wait, instead of reading zeros, and the caller may have another daemon go on
/// ([`Thaw::takeover`]). [`super::LazyServed`] follows when no page is missing, or the processes have ended. A caller that
/// hangs up does not end the transfer.
#[derive(Clone, PartialEq, Message)]
pub struct Thaw {
    /// `JOB` or `JOB@GEN`.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// True to bring only pages that are accessed.
    #[prost(bool, tag = "2")]
    pub touched_only: bool,
    /// True to bring first the pages that an earlier lazy restore of the checkpoint accessed, in that order.
    #[prost(bool, tag = "3")]
    pub hybrid: bool,
    /// State of a restore that another daemon has begun, and that this one goes on with. `checkpoint` is `JOB@GEN`.
    #[prost(message, optional, tag = "4")]
    pub takeover: Option<Takeover>,
    /// Priority from 0, the lowest, to 11: decides which request goes first where several wait.
    #[prost(uint32, tag = "23")]
    pub priority: u32,
    /// Time within which it should start, milliseconds.
    #[prost(uint64, optional, tag = "24")]
    pub deadline_ms: Option<u64>,
    /// Token of a place that was reserved for it; may be empty.
    #[prost(string, tag = "25")]
    pub reservation: String,
}

/// Processes of a lazy restore whose daemon has ended. They have numbers: first those that CRIU handed over, then those
/// that were forked, each in the order in which they came. The log of events that the first daemon sent rides along behind
/// the socket. On the socket come the number of each process that has not ended (`i32`, native byte order) with its
/// userfaultfd, and CRIU's word for a complete restore.
#[derive(Clone, PartialEq, Message)]
pub struct Takeover {
    /// Pids of the processes that CRIU handed over, as they were dumped.
    #[prost(uint32, repeated, tag = "1")]
    pub pids: Vec<u32>,
    /// Number of forked processes whose userfaultfds the caller was sent.
    #[prost(uint64, tag = "2")]
    pub forks: u64,
}

/// Place the pages of a checkpoint in the processes that `criu restore --lazy-pages` restores, before any of them runs.
/// The descriptor of the listening AF_UNIX socket to which CRIU connects rides along (`lazy-pages.socket` in its work
/// directory). Then `permafrost-action` connects to it, which CRIU runs when all mappings are there: it is answered when
/// all pages are.
///
/// The first [`Progress`](super::Progress) without [`Progress::waiting`](super::Progress::waiting) means that the restore is
/// admitted, and CRIU may be started. [`super::LazyServed`] follows when CRIU lets the processes run. A caller that hangs
/// up before ends the restore: CRIU aborts it.
#[derive(Clone, PartialEq, Message)]
pub struct Place {
    /// `JOB` or `JOB@GEN`.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// Priority from 0, the lowest, to 11: decides which request goes first where several wait.
    #[prost(uint32, tag = "23")]
    pub priority: u32,
    /// Time within which it should start, milliseconds.
    #[prost(uint64, optional, tag = "24")]
    pub deadline_ms: Option<u64>,
    /// Token of a place that was reserved for it; may be empty.
    #[prost(string, tag = "25")]
    pub reservation: String,
}

/// Take an address space of a dump out of two pipes that CRIU writes into (`criu dump --stream`): its pagemap and its
/// pages, whose descriptors ride along in this order. Answered by [`super::Done`] when all of its pages are taken.
///
/// The first such request of a connection begins the dump of the session. The others, and [`EndPages`], must come over
/// the same connection: its end discards the dump.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TakeSpace {
    /// Id of the session.
    #[prost(string, tag = "1")]
    pub session: String,
    /// Type of the address space, a [`crate::manifest::SpaceType`].
    #[prost(int32, tag = "2")]
    pub space_type: i32,
    /// Pid of the process, or id of the shared memory.
    #[prost(uint64, tag = "3")]
    pub space: u64,
    /// N of the `pages-N.img` that the pagemap is to name.
    #[prost(uint32, tag = "4")]
    pub pages_id: u32,
}

/// End the pages of a dump. Answered by [`super::Done`] when they are as durable as the session requires: what CLOSE is in
/// CRIU's page-server protocol.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct EndPages {
    /// Id of the session.
    #[prost(string, tag = "1")]
    pub session: String,
}

/// State of the daemon. Answered by [`super::ServerStatus`].
#[derive(Clone, PartialEq, Message)]
pub struct Status {}

/// Nodes of the cluster. Answered by [`super::NodeList`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Nodes {
    /// Name of the only node to list; empty for all.
    #[prost(string, tag = "1")]
    pub name: String,
    /// True to ask each node that is live for its time, and each member of the registry for its version. The answers
    /// take some seconds where nodes are slow, and may be some seconds old: they serve all who ask at the same time.
    #[prost(bool, tag = "2")]
    pub probe: bool,
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
    /// True to remove the node although it is live and not drained, or although checkpoints that it alone holds are
    /// lost with it.
    #[prost(bool, tag = "3")]
    pub force: bool,
}

/// List again the checkpoints that the nodes hold and know to be listed: after the registry's data was lost. Answered
/// by [`super::Rebuilt`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Rebuild {
    /// True to report only, and to change nothing.
    #[prost(bool, tag = "1")]
    pub dry_run: bool,
    /// Checkpoints by id that are not listed, and whose copies are to go.
    #[prost(string, repeated, tag = "2")]
    pub discard: Vec<String>,
}

/// Sets the version of the registry that the cluster uses. Answered by [`super::NodeList`] of all nodes. Of version 2 of
/// the control protocol.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SetLevel {
    /// Version of the values in the registry, which every node that was not removed must speak.
    #[prost(uint32, tag = "1")]
    pub registry: u32,
}

/// Read and verify every page that this node holds, heal damaged pages from another node, and quarantine checkpoints
/// that cannot be healed. Progress, then [`super::Scrubbed`].
#[derive(Clone, PartialEq, Message)]
pub struct Scrub {
    /// `JOB`, `JOB@GEN`, or empty for everything.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// True to fetch pages in a cold tier and verify them. Those of a named checkpoint always are.
    #[prost(bool, tag = "2")]
    pub cold: bool,
}

/// Pack sparse parts of the region, so that the space that removed checkpoints have left in them becomes free.
/// Progress, then [`super::GcReport`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Gc {
    /// True to measure only, and to move nothing.
    #[prost(bool, tag = "1")]
    pub dry_run: bool,
}

/// Set a rule of retention in the place of the one with the same namespace and pattern, or remove it. Answered by
/// [`super::RetentionRules`] of the namespace.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct SetRetention {
    /// The rule; to remove one, its namespace and pattern suffice.
    #[prost(message, optional, tag = "1")]
    pub rule: Option<RetentionRule>,
    /// True to remove the rule.
    #[prost(bool, tag = "2")]
    pub remove: bool,
}

/// Rules of retention. Answered by [`super::RetentionRules`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ShowRetention {
    /// Only this namespace; empty for all.
    #[prost(string, tag = "1")]
    pub namespace: String,
}

/// Apply the rules of retention now. Answered by [`super::Pruned`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Prune {
    /// Namespace to apply them to; empty for all, or for that of `job`.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// Only this job; empty for all of the namespace.
    #[prost(string, tag = "2")]
    pub job: String,
    /// True to remove nothing, and only say what would be removed.
    #[prost(bool, tag = "3")]
    pub dry_run: bool,
}

/// List the media of the region, or change them. Answered by [`super::Progress`] while segments are moved, then
/// [`super::RegionMedia`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Media {
    /// Change to make: `ls` (none), `add`, `grow`, `drain`, `undrain`, `remove`, `give-up` for the loss of one that
    /// is missing, `cool` to move segments to slower tiers, or `warm` to move them to the fastest one with room.
    #[prost(string, tag = "1")]
    pub action: String,
    /// Medium to change: its number, its UUID, or the absolute path of its file. To add: the path.
    #[prost(string, tag = "2")]
    pub medium: String,
    /// Tier of a medium to add; empty for that of its kind.
    #[prost(string, tag = "3")]
    pub tier: String,
    /// Size of a file to make or to let grow, bytes; 0 for a file that is there.
    #[prost(uint64, tag = "4")]
    pub size_bytes: u64,
    /// Checkpoint to warm, or to cool: `JOB` or `JOB@GEN`. Empty: cool by the rules of the node.
    #[prost(string, tag = "5")]
    pub checkpoint: String,
    /// Only count what `cool` or `warm` would move.
    #[prost(bool, tag = "6")]
    pub dry_run: bool,
    /// Address of the object store of a cold medium to add, such as `file:///mnt/archive`; empty for none.
    #[prost(string, tag = "7")]
    pub store: String,
}

/// List the keys for encryption at rest, or change those of a namespace. Answered by [`super::Progress`] while segments
/// are encrypted anew, then [`super::KeyList`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Keys {
    /// Change to make: `ls` (none), `rotate` for a new key, or `destroy`.
    #[prost(string, tag = "1")]
    pub action: String,
    /// Namespace to change; empty for dumps that have no job yet.
    #[prost(string, tag = "2")]
    pub namespace: String,
}

/// Keep a place in a queue for a dump or a restore to come. Answered by [`super::Reserved`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Reserve {
    /// Name of the node whose queue it is; empty: the node that receives the request.
    #[prost(string, tag = "1")]
    pub node: String,
    /// `write` for a dump, `read` for a restore.
    #[prost(string, tag = "2")]
    pub direction: String,
    /// Estimated size of the transfer, bytes.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// Priority from 0, the lowest, to 11.
    #[prost(uint32, tag = "4")]
    pub priority: u32,
    /// Time within which the transfer should start, milliseconds.
    #[prost(uint64, optional, tag = "5")]
    pub deadline_ms: Option<u64>,
    /// Lifetime of the reservation, milliseconds, at most the limit of the node; 0: that limit.
    #[prost(uint64, tag = "6")]
    pub lifetime_ms: u64,
    /// Namespace whose quota it counts in. Empty: the only namespace of the caller's certificate, or none for a
    /// caller with access to all.
    #[prost(string, tag = "7")]
    pub namespace: String,
}

/// Give a reserved place up. Answered by [`super::Done`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CancelReservation {
    /// Token of the reservation.
    #[prost(string, tag = "1")]
    pub token: String,
    /// Name of the node whose queue it is in; empty: the node that receives the request, or the node on which it made
    /// the reservation.
    #[prost(string, tag = "2")]
    pub node: String,
}

/// Reports the duration of a dump or a restore as its caller measured it: from the first preparation to the last
/// clean-up, without the wait for admission. The daemon sees neither the beginning nor the end of it (CRIU kills the
/// processes after the seal), and predicts by it. Answered by [`super::Done`], with 1 if the daemon measured that one.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Took {
    /// Id of the checkpoint, 32 hex digits.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// True for a restore, false for a dump.
    #[prost(bool, tag = "2")]
    pub restored: bool,
    /// Duration of the dump or restore, microseconds; of a lazy restore the time until the processes ran.
    #[prost(uint64, tag = "3")]
    pub elapsed_us: u64,
    /// True for a lazy restore.
    #[prost(bool, tag = "4")]
    pub lazy: bool,
}

/// Refuse certificates from now on, on every node of the cluster, or withdraw the refusal on this node. Without
/// entries the request only reads the list. Answered by [`super::Denials`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Deny {
    /// `serial HEX`, or `name ROLE NAME`.
    #[prost(string, repeated, tag = "1")]
    pub entries: Vec<String>,
    /// True to withdraw the refusal of the entries.
    #[prost(bool, tag = "2")]
    pub take_back: bool,
}

/// Decode what a checkpoint consists of, and compare its pages with those of another checkpoint of the job, by checksums.
/// Reads no pages of memory. Answered by [`super::CheckpointContents`].
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Describe {
    /// `JOB` or `JOB@GEN`.
    #[prost(string, tag = "1")]
    pub checkpoint: String,
    /// Earlier checkpoint of the same job, `JOB` or `JOB@GEN`, whose contents are returned, too; empty for none.
    #[prost(string, tag = "2")]
    pub before: String,
    /// True to compare with the generation that the checkpoint was dumped against, if that is still there; its contents
    /// are not returned. Only without `before`.
    #[prost(bool, tag = "3")]
    pub with_parent: bool,
    /// Only this process, for checkpoints whose contents are longer than a message; 0 for all.
    #[prost(uint32, tag = "4")]
    pub pid: u32,
}
