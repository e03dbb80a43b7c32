//! Messages about sessions and checkpoints.

use prost::Message;
use serde::Serialize;

use super::Waiting;
use crate::manifest::{DumpedProcess, Manifest, Origin};

/// Progress of a long request.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Progress {
    /// Bytes processed so far.
    #[prost(uint64, tag = "1")]
    pub done_bytes: u64,
    /// Bytes in all, 0 when unknown.
    #[prost(uint64, tag = "2")]
    pub total_bytes: u64,
    /// Position in the queue, if the request has not begun.
    #[prost(message, optional, tag = "3")]
    pub waiting: Option<Waiting>,
    /// True if the descriptor of a log of events rides along, which [`Thaw`](super::request::Thaw) explains.
    #[prost(bool, tag = "4")]
    pub is_log: bool,
    /// True if a lazy restore waits for its daemon, which has ended, to come back.
    #[prost(bool, tag = "5")]
    pub daemon_ended: bool,
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
    /// Endpoints that the daemon needs to take the dump, `host:port`: members of etcd, or storage nodes. A tree that
    /// serves one of these endpoints must not be frozen.
    #[prost(string, repeated, tag = "6")]
    pub depends_on: Vec<String>,
    /// Bytes of pages that can wait in the daemon's pipes ([`super::request::TakeSpace`]) without a copy, reserved or else
    /// free; 2^64 - 1 without a limit, 0 where the daemon takes no pipes.
    #[prost(uint64, tag = "7")]
    pub pipe_bytes: u64,
}

/// A copy with a part in an object store.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct ColdCopy {
    /// Node with the copy; empty on a single machine.
    #[prost(string, tag = "1")]
    pub node: String,
    /// Bytes of the region that come back before a restore.
    #[prost(uint64, tag = "2")]
    pub bytes: u64,
}

/// Line of a listing.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Checkpoint {
    /// Job; empty while parked.
    #[prost(string, tag = "1")]
    pub job: String,
    /// Generation of the checkpoint in its job; 0 while parked.
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    /// Checkpoint id, 32 hex digits.
    #[prost(string, tag = "3")]
    pub id: String,
    /// `full`, `pre-dump`, `pre-copy` (a round of a dump that is under way) or `parked`.
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
    /// True if the checkpoint is pinned: retention keeps it.
    #[prost(bool, tag = "8")]
    pub pinned: bool,
    /// Number of processes.
    #[prost(uint32, tag = "9")]
    pub processes: u32,
    /// Session id, which `permafrost adopt` takes while it is parked.
    #[prost(string, tag = "10")]
    pub session: String,
    /// Time at which a parked session is discarded, milliseconds since the Unix epoch; 0 for never.
    #[prost(uint64, tag = "11")]
    pub expires_unix_ms: u64,
    /// Generation compared with, 0 for none.
    #[prost(uint64, tag = "12")]
    pub parent_generation: u64,
    /// Part of the memory that equals the parent's pages, bytes.
    #[prost(uint64, tag = "13")]
    pub parent_bytes: u64,
    /// Part of the memory that is zero pages, bytes.
    #[prost(uint64, tag = "14")]
    pub zero_bytes: u64,
    /// Nodes that hold a copy; empty on a single machine.
    #[prost(string, repeated, tag = "15")]
    pub nodes: Vec<String>,
    /// Number of copies that there should be; 0 on a single machine.
    #[prost(uint32, tag = "16")]
    pub copies_wanted: u32,
    /// Description of the damage in the copy of the node that answers, by name and address; empty: no damage is
    /// known. It is determined when the checkpoint is listed, and never stored.
    #[prost(string, tag = "17")]
    pub damaged: String,
    /// Work that the task had done. Absent if it was not measured.
    #[prost(message, optional, boxed, tag = "18")]
    pub work: Option<Box<Work>>,
    /// Those of `nodes` whose copy is known to be damaged. Determined when the checkpoint is listed, and never stored.
    #[prost(string, repeated, tag = "19")]
    pub damaged_nodes: Vec<String>,
    /// Copies with a part in an object store, which comes back before a restore. Determined when the checkpoint is
    /// listed, and never stored.
    #[prost(message, repeated, tag = "20")]
    pub cold: Vec<ColdCopy>,
    /// Processes of a parked session (16 at most), and their programs as far as they are known.
    #[prost(message, repeated, tag = "40")]
    pub parked_processes: Vec<DumpedProcess>,
}

/// Work that a task had done when it was dumped.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Work {
    /// Over all restores, microseconds.
    #[prost(uint64, tag = "1")]
    pub worked_us: u64,
    /// Part of `worked_us` that was done before the dumped process was restored.
    #[prost(uint64, tag = "2")]
    pub carried_us: u64,
    /// The dumped process, as `Origin::process` names it; empty if it is not known.
    #[prost(string, tag = "3")]
    pub process: String,
}

impl Work {
    /// Returns the work that an origin records; `None` if it was not measured.
    pub fn of(origin: &Origin) -> Option<Box<Self>> {
        (origin.worked_us > 0).then(|| {
            Box::new(Self {
                worked_us: origin.worked_us,
                carried_us: origin.carried_us,
                process: origin.process(),
            })
        })
    }

    /// Returns the work that the task of `process` had done before that process was started or restored,
    /// microseconds. The dumped process itself continues after a dump that leaves it running. Any other process was
    /// restored from here, or is treated as if it was: its job can return to this checkpoint.
    pub fn before(&self, process: &str) -> u64 {
        if !process.is_empty() && process == self.process {
            self.carried_us
        } else {
            self.worked_us
        }
    }
}

/// List of checkpoints.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Checkpoints {
    /// Checkpoints sorted by job and generation; parked ones last.
    #[prost(message, repeated, tag = "1")]
    pub checkpoints: Vec<Checkpoint>,
    /// Last one of these, if the list goes on behind it: `JOB@GEN`, or the id of a parked session. Empty at the end.
    #[prost(string, tag = "2")]
    #[serde(skip_serializing_if = "String::is_empty")]
    pub next: String,
}

/// A checkpoint in full.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Detail {
    /// The line that `ls` prints.
    #[prost(message, optional, tag = "1")]
    pub checkpoint: Option<Checkpoint>,
    /// Manifest of the checkpoint.
    #[prost(message, optional, tag = "2")]
    pub manifest: Option<Manifest>,
    /// Segments that it references, shared ones included.
    #[prost(uint64, tag = "3")]
    pub segments: u64,
    /// Bytes that would be free if it were removed.
    #[prost(uint64, tag = "4")]
    pub exclusive_bytes: u64,
    /// Name of the agent that passed the reply on: it reads only checkpoints that its certificate permits. Empty from
    /// a storage node.
    #[prost(string, tag = "10")]
    pub agent: String,
    /// True if whoever replied on the control socket takes [`Place`](super::request::Place).
    #[prost(bool, tag = "11")]
    #[serde(skip)]
    pub places: bool,
}

/// Reply to a request that is done, with a count.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Done {
    /// Number of checkpoints that the request has changed.
    #[prost(uint64, tag = "1")]
    pub count: u64,
}

/// Result of a verification.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Verified {
    /// Number of checkpoints that were read.
    #[prost(uint64, tag = "1")]
    pub checkpoints: u64,
    /// Number of pages that were read.
    #[prost(uint64, tag = "2")]
    pub pages: u64,
    /// Damaged parts, one entry each, by name and address.
    #[prost(string, repeated, tag = "3")]
    pub damage: Vec<String>,
    /// Number of pages in a cold tier that were not verified: it was not asked for them, or is away.
    #[prost(uint64, tag = "4")]
    pub unverified_pages: u64,
    /// Reason why the cold tier gave none of those that it was asked for; empty for none.
    #[prost(string, tag = "5")]
    pub away: String,
}

/// Result of an export.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Exported {
    /// The checkpoint exported.
    #[prost(message, optional, tag = "1")]
    pub checkpoint: Option<Checkpoint>,
    /// Number of files written.
    #[prost(uint64, tag = "2")]
    pub files: u64,
    /// Number of bytes written.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// Origin of the dump, with the options that a restore must repeat.
    #[prost(message, optional, tag = "4")]
    pub origin: Option<Origin>,
}

/// Result of serving the pages of a checkpoint to lazy restores.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct LazyServed {
    /// The checkpoint served.
    #[prost(message, optional, tag = "1")]
    pub checkpoint: Option<Checkpoint>,
    /// Number of requests: page faults, or GETs of `criu lazy-pages`.
    #[prost(uint64, tag = "2")]
    pub requests: u64,
    /// Number of bytes served, zero pages included.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// Number of them that came since the background transfer began, if all pages were brought; else 0.
    #[prost(uint64, tag = "4")]
    pub rest_bytes: u64,
    /// Time in which those came, microseconds.
    #[prost(uint64, tag = "5")]
    pub rest_us: u64,
}
