//! Manifest: the contents of a checkpoint.
//!
//! A manifest is a protobuf message stored as an opaque blob by the region (docs/format.md). It names
//! the job and generation, the small images, and the address spaces; each refers to a page map in the
//! region by an opaque 32-byte map root. Unknown fields are skipped, a newer `version` is refused.

mod check;
mod name;
mod options;
mod taken;

use prost::Message;
use serde::Serialize;

pub use check::{
    MAP_ROOT_BYTES, MAX_FILE_NAME_BYTES, MAX_MANIFEST_BYTES, MAX_SMALL_IMAGES, ManifestError,
    is_plain_file_name,
};
pub use name::{
    CheckpointRef, CheckpointRefError, DEFAULT_NAMESPACE, JobName, JobNameError,
    MAX_JOB_NAME_BYTES, check_job_name, namespace_of,
};
pub use options::{MAX_RESTORE_OPTIONS, RestoreOptionError, check_restore_options, is_repeatable};
pub use taken::TakenBy;

/// The manifest version this build writes, and the newest it reads.
pub const VERSION: u32 = 1;

/// Contents and origin of a checkpoint.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct Manifest {
    /// Format version, [`VERSION`].
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Job name; empty while the checkpoint is parked (closed by CRIU, not adopted yet).
    #[prost(string, tag = "2")]
    pub job: String,
    /// Number of the checkpoint in its job, from 1; 0 while parked.
    #[prost(uint64, tag = "3")]
    pub generation: u64,
    /// Generation of the checkpoint of this job that pages were compared with, 0 for none. Informative: page maps are
    /// flat, a restore never reads the parent.
    #[prost(uint64, tag = "4")]
    pub parent_generation: u64,
    /// Wall-clock time of the seal, milliseconds since the Unix epoch.
    #[prost(uint64, tag = "5")]
    pub created_unix_ms: u64,
    /// Kind of the checkpoint, which decides what it can be used for: see [`Kind`].
    #[prost(enumeration = "Kind", tag = "6")]
    pub kind: i32,
    /// Host and process that the dump was taken from.
    #[prost(message, optional, tag = "7")]
    pub origin: Option<Origin>,
    /// CRIU images other than pagemaps and pages, by file name, in no particular order.
    #[prost(message, repeated, tag = "8")]
    pub images: Vec<Image>,
    /// Address spaces, in the order CRIU opened them.
    #[prost(message, repeated, tag = "9")]
    pub spaces: Vec<AddressSpace>,
    /// Session that became this checkpoint (32 hex digits); names the checkpoint while it is parked.
    #[prost(string, tag = "10")]
    pub session: String,
    /// Bytes of pages and metadata this checkpoint added to the region.
    #[prost(uint64, tag = "11")]
    pub added_bytes: u64,
    /// SHA-256 over the contents (docs/format.md, "Content digest"); empty in checkpoints that were sealed before the
    /// digest was introduced.
    #[prost(bytes = "vec", tag = "12")]
    #[serde(skip)]
    pub content_digest: Vec<u8>,
    /// Time within which the node that took the dump must list the checkpoint, milliseconds: until then a copy that
    /// is not listed is not collected. 0 if it was sealed without a cluster.
    #[prost(uint64, tag = "30")]
    #[serde(skip)]
    pub commit_deadline_ms: u64,
    /// Client that the dump came from, as the node that took it in authenticated it: see [`TakenBy`]. Empty where that
    /// was not recorded.
    #[prost(string, tag = "14")]
    pub taken_by: String,
}

impl Manifest {
    /// Copies the manifest without images and spaces, of which there may be a hundred thousand.
    #[must_use]
    pub fn without_lists(&self) -> Self {
        Self {
            version: self.version,
            job: self.job.clone(),
            generation: self.generation,
            parent_generation: self.parent_generation,
            created_unix_ms: self.created_unix_ms,
            kind: self.kind,
            origin: self.origin.clone(),
            images: Vec::new(),
            spaces: Vec::new(),
            session: self.session.clone(),
            added_bytes: self.added_bytes,
            content_digest: self.content_digest.clone(),
            commit_deadline_ms: self.commit_deadline_ms,
            taken_by: self.taken_by.clone(),
        }
    }
}

/// Kind of a checkpoint: decides what it can be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration, Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(i32)]
pub enum Kind {
    /// A whole image: restorable.
    Full = 0,
    /// Pages from `criu pre-dump`: the parent of a later dump.
    PreDump = 1,
    /// Pages that CRIU closed and that are not adopted yet; not restorable before.
    Parked = 2,
    /// Pages of one round of a pre-copy: the parent of the next round, or of the dump. It lasts as long as the control
    /// connection that its session was opened on.
    PreCopy = 3,
}

/// Host and process tree that a dump was taken from.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Origin {
    /// Name of the host.
    #[prost(string, tag = "1")]
    pub host: String,
    /// Contents of `/proc/sys/kernel/random/boot_id`.
    #[prost(string, tag = "2")]
    pub boot_id: String,
    /// Root process of the tree, in the dumping host's pid namespace.
    #[prost(uint32, tag = "3")]
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: start time in clock ticks since boot; distinguishes processes with a reused pid.
    #[prost(uint64, tag = "4")]
    pub start_ticks: u64,
    /// True if the dump ran with `--track-mem`: the next one may leave out clean pages.
    #[prost(bool, tag = "5")]
    pub tracked: bool,
    /// CRIU options of the dump that a restore must repeat (`--shell-job`, `--tcp-established`, …): only options that
    /// [`check_restore_options`] accepts.
    #[prost(string, repeated, tag = "6")]
    pub restore_options: Vec<String>,
    /// Version of the CRIU that took the dump (`criu --version`), for display only.
    #[prost(string, tag = "7")]
    pub criu_version: String,
    /// Memory of the whole tree just before the dump, bytes: anonymous and shared pages that are resident or swapped
    /// out. 0 if it was not measured.
    #[prost(uint64, tag = "20")]
    pub resident_bytes: u64,
    /// Pages of the tree written since the checkpoint that the dump builds on. Absent where the kernel does not count
    /// them, or counts them from another time.
    #[prost(uint64, optional, tag = "21")]
    pub dirty_pages: Option<u64>,
    /// Name of the root process's program (`comm`): dumps of one program are alike.
    #[prost(string, tag = "22")]
    pub program: String,
    /// Work that the tree had done, microseconds, including the work before its last restore. 0 if it was not
    /// measured.
    #[prost(uint64, tag = "23")]
    pub worked_us: u64,
    /// Part of `worked_us` that was done before the restore. The process itself counts only the rest.
    #[prost(uint64, tag = "24")]
    pub carried_us: u64,
    /// Processes of the tree, as far as they were recorded.
    #[prost(message, repeated, tag = "40")]
    pub processes: Vec<DumpedProcess>,
    /// Time at which the pages of a parked dump began to arrive, milliseconds since the Unix epoch by the clock of
    /// the node that took them; 0 if unknown.
    #[prost(uint64, tag = "41")]
    pub pages_begun_unix_ms: u64,
    /// Time of CRIU's CLOSE, by the same clock and in the same unit; 0 if unknown. The images of the dump were
    /// written between the two times.
    #[prost(uint64, tag = "42")]
    pub pages_closed_unix_ms: u64,
}

impl Origin {
    /// Returns a text that distinguishes the process from all others of its job: boot and start time. Without its
    /// pid, which differs between pid namespaces. Empty where neither is known.
    pub fn process(&self) -> String {
        if self.boot_id.is_empty() || self.start_ticks == 0 {
            return String::new();
        }
        format!("{}/{}", self.boot_id, self.start_ticks)
    }
}

/// A process of a dumped tree.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct DumpedProcess {
    /// Pid in its namespace: the id of its address space.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    /// Name of its program (`comm`).
    #[prost(string, tag = "2")]
    pub program: String,
    /// Pid of its parent; 0 of the root's.
    #[prost(uint32, tag = "3")]
    pub parent: u32,
    /// Path of its program; empty if it was not recorded.
    #[prost(string, tag = "4")]
    pub executable: String,
    /// Largest private writable mappings of the process ([`Self::MAX_MAPPINGS`] at most), ascending: first page
    /// number and number of pages, in turn.
    #[prost(uint64, repeated, tag = "5")]
    pub mappings: Vec<u64>,
}

impl DumpedProcess {
    /// Maximum number of mappings recorded for a process: enough to tell whether two have one layout, and few enough
    /// for trees of thousands.
    pub const MAX_MAPPINGS: usize = 12;

    /// Returns the first and last page numbers of the mappings, the latter not included.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let pairs = self.mappings.chunks_exact(2);
        pairs.map(|pair| (pair[0], pair[0].saturating_add(pair[1])))
    }
}

/// CRIU image file other than a pagemap or pages file.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Image {
    /// File name, without a directory.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Length of the file, bytes.
    #[prost(uint64, tag = "2")]
    pub len_bytes: u64,
    /// Root of the map with its pages (the last one zero-padded). Short images are packed one behind the other into the
    /// pages of one map.
    #[prost(bytes = "vec", tag = "3")]
    #[serde(skip)]
    pub map_root: Vec<u8>,
    /// Digest of a map of its pages alone, 32 bytes, or empty.
    #[prost(bytes = "vec", tag = "4")]
    #[serde(skip)]
    pub map_digest: Vec<u8>,
    /// Place of its first byte in the pages of the map.
    #[prost(uint64, tag = "5")]
    #[serde(skip)]
    pub offset_bytes: u64,
}

/// Pagemap and its pages.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct AddressSpace {
    /// Process or shared memory.
    #[prost(enumeration = "SpaceType", tag = "1")]
    pub space_type: i32,
    /// The pid in its namespace, or the shared-memory id.
    #[prost(uint64, tag = "2")]
    pub id: u64,
    /// N of `pages-N.img` in an exported images directory.
    #[prost(uint32, tag = "3")]
    pub pages_id: u32,
    /// Map root of its pages, indexed by virtual page number.
    #[prost(bytes = "vec", tag = "4")]
    #[serde(skip)]
    pub map_root: Vec<u8>,
    /// Pages present, whichever way they are kept.
    #[prost(uint64, tag = "5")]
    pub pages: u64,
    /// Pages among them that this checkpoint stored.
    #[prost(uint64, tag = "6")]
    pub stored_pages: u64,
    /// Pages among them that are all zero: not stored.
    #[prost(uint64, tag = "7")]
    pub zero_pages: u64,
    /// Pages among them that equal the parent's page at the same address (compared, or marked by CRIU).
    #[prost(uint64, tag = "8")]
    pub parent_pages: u64,
    /// Pages among them that equal another process's page at the same address in this checkpoint: stored once, and
    /// counted there.
    #[prost(uint64, tag = "11")]
    pub sibling_pages: u64,
    /// Pages among them that equal a page of another job, which has stored it (`permafrostd --share-pages`).
    #[prost(uint64, tag = "12")]
    pub shared_pages: u64,
    /// Digest of the map, 32 bytes, or empty.
    #[prost(bytes = "vec", tag = "10")]
    #[serde(skip)]
    pub map_digest: Vec<u8>,
}

/// Owner of an address space: a process or a shared-memory segment.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration, Serialize,
)]
#[serde(rename_all = "kebab-case")]
#[repr(i32)]
pub enum SpaceType {
    /// A process's private memory (`pagemap-PID.img`).
    Process = 0,
    /// A shared-memory segment (`pagemap-shmem-ID.img`).
    SharedMemory = 1,
}
