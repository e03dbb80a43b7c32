//! Contents of a checkpoint: processes, mappings with their pages, open files; and what they were in another one.

use prost::Message;
use serde::Serialize;

use super::Checkpoint;

/// Contents of a checkpoint, and of one that it is compared with.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct CheckpointContents {
    /// The checkpoint, as listings show it.
    #[prost(message, optional, tag = "1")]
    pub checkpoint: Option<Checkpoint>,
    /// Its processes, in the order of CRIU's tree.
    #[prost(message, repeated, tag = "2")]
    pub processes: Vec<ProcessContents>,
    /// Its shared memory, which the mappings of processes refer to.
    #[prost(message, repeated, tag = "3")]
    pub shared_memory: Vec<SharedContents>,
    /// The checkpoint that pages were compared with; none if they were not compared.
    #[prost(message, optional, tag = "4")]
    pub compared_with: Option<Checkpoint>,
    /// Processes of the checkpoint that pages were compared with, with what this one has of their pages; empty unless they
    /// were requested.
    #[prost(message, repeated, tag = "5")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes_before: Vec<ProcessContents>,
    /// Shared memory of the checkpoint that pages were compared with, like `processes_before`.
    #[prost(message, repeated, tag = "6")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shared_memory_before: Vec<SharedContents>,
    /// Its small images, the longest first.
    #[prost(message, repeated, tag = "7")]
    pub images: Vec<ContentsImage>,
}

/// Small image of a checkpoint: a file of CRIU's that has no pages of memory.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct ContentsImage {
    /// File name, without a directory.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Length of the file, bytes.
    #[prost(uint64, tag = "2")]
    pub len_bytes: u64,
}

/// Numbers of pages of 4 KiB, which are compared with those at the same address by their CRC32s.
#[derive(Clone, Copy, PartialEq, Eq, Message, Serialize)]
pub struct PageCounts {
    /// Number of pages that are present.
    #[prost(uint64, tag = "1")]
    pub pages: u64,
    /// Pages among them that are all zero: not stored.
    #[prost(uint64, tag = "2")]
    pub zero: u64,
    /// Pages among them that equal the other checkpoint's: also about one of 4 billion that changed. None if nothing was
    /// compared, like the two that follow.
    #[prost(uint64, optional, tag = "3")]
    pub equal: Option<u64>,
    /// Pages among them that differ from the other checkpoint's.
    #[prost(uint64, optional, tag = "4")]
    pub changed: Option<u64>,
    /// Pages among them that the other checkpoint does not have.
    #[prost(uint64, optional, tag = "5")]
    pub only_here: Option<u64>,
}

impl PageCounts {
    /// Returns how many of the pages the checkpoint stored itself: those that are neither zero nor equal to the other
    /// checkpoint's. A page of zeros that was zero before counts as equal, and is stored in neither.
    #[must_use]
    pub fn stored(&self) -> u64 {
        let most = self.pages.saturating_sub(self.zero);
        match (self.changed, self.only_here) {
            (Some(changed), Some(new)) => changed.saturating_add(new).min(most),
            _ => most,
        }
    }
}

/// Process of a checkpoint.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ProcessContents {
    /// Pid in its namespace.
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    /// Pid of its parent; 0 of the root's.
    #[prost(uint32, tag = "2")]
    pub parent: u32,
    /// Name of its program (`comm`); empty if it is not known.
    #[prost(string, tag = "3")]
    pub program: String,
    /// Path of its program; empty if it is not known.
    #[prost(string, tag = "4")]
    pub executable: String,
    /// Number of its threads.
    #[prost(uint32, tag = "5")]
    pub threads: u32,
    /// All pages of the process, those outside of the mappings counted.
    #[prost(message, optional, tag = "6")]
    pub pages: Option<PageCounts>,
    /// Mappings of the process, ascending. None in a pre-dump, which has no images of them.
    #[prost(message, repeated, tag = "7")]
    pub mappings: Vec<MappingContents>,
    /// Open files of the process, by descriptor.
    #[prost(message, repeated, tag = "8")]
    pub files: Vec<OpenFile>,
}

/// Mapping of a process.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct MappingContents {
    /// First address of the mapping.
    #[prost(uint64, tag = "1")]
    pub start: u64,
    /// The address behind it.
    #[prost(uint64, tag = "2")]
    pub end: u64,
    /// Permissions as `/proc/PID/maps` writes them: `rw-p`, with `s` for a shared mapping.
    #[prost(string, tag = "3")]
    pub permissions: String,
    /// Kind of the mapping: `anonymous`, `heap`, `stack`, `file`, `shared`, `memfd`, `sysv`, `aio`, `vdso`, `vvar`,
    /// `vsyscall`, `socket` or `other`.
    #[prost(string, tag = "4")]
    pub kind: String,
    /// Path of the mapped file; empty if there is none, or it is not known.
    #[prost(string, tag = "5")]
    pub path: String,
    /// Place of the first byte in the file or the shared memory, bytes.
    #[prost(uint64, tag = "6")]
    pub offset_bytes: u64,
    /// Id of the shared memory that is mapped; 0 for none.
    #[prost(uint64, tag = "7")]
    pub shared_memory: u64,
    /// Pages that the checkpoint has in the mapping. Those of a file that were not modified are not in the checkpoint.
    #[prost(message, optional, tag = "8")]
    pub pages: Option<PageCounts>,
}

/// Shared memory of a checkpoint.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct SharedContents {
    /// Id of the shared memory.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Pages of the shared memory.
    #[prost(message, optional, tag = "2")]
    pub pages: Option<PageCounts>,
}

/// Open file of a process.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct OpenFile {
    /// Number of the descriptor.
    #[prost(uint32, tag = "1")]
    pub descriptor: u32,
    /// Kind of the file: `file`, `pipe`, `socket`, `tty`, `eventfd` and others.
    #[prost(string, tag = "2")]
    pub kind: String,
    /// Path of the file; empty if it has none, or it is not known.
    #[prost(string, tag = "3")]
    pub path: String,
    /// Place of the next read or write, bytes; none where there is no such place.
    #[prost(uint64, optional, tag = "4")]
    pub position_bytes: Option<u64>,
    /// Number of the open file in the images: descriptors with one number share the place.
    #[prost(uint32, tag = "5")]
    pub number: u32,
}
