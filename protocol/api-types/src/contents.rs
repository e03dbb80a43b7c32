//! `GET /v1/contents`: what a checkpoint consists of.

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Checkpoint whose contents are to be told, and the page of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ContentsQuery {
    /// `JOB@GENERATION`; `JOB` stands for the newest that can be resumed.
    pub checkpoint: String,
    /// Only this process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1)]
    pub pid: Option<u32>,
    /// Lists mappings after this one: `next` of the previous reply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Maximum number of mappings, of shared memories and of images: 1 to 10,000; 1,000 if left out. A process without
    /// mappings counts as one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[param(minimum = 1, maximum = 10000)]
    pub limit: Option<u32>,
}

/// Page of the contents of a checkpoint. Pages of memory are compared with those of the generation that it was dumped
/// against, by their checksums; none is read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Contents)]
pub struct ContentsAnswer {
    /// The node that answers.
    pub answered_by: String,
    /// Name of the checkpoint, `JOB@GENERATION`.
    pub checkpoint: String,
    /// Generation that it was dumped against; missing for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_generation: Option<u64>,
    /// Name of the checkpoint that its pages are compared with; missing if there is no parent, or no longer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared_with: Option<String>,
    /// Number of processes.
    pub process_count: u64,
    /// Processes in the order of CRIU's tree. One whose mappings are on several pages of the reply is on each of them.
    pub processes: Vec<StoredProcess>,
    /// Number of shared memories.
    pub shared_memory_count: u64,
    /// Shared memories, the first `limit` of them; empty on later pages of the reply.
    pub shared_memory: Vec<StoredShared>,
    /// Number of small images.
    pub image_count: u64,
    /// Small images, the longest `limit` of them; empty on later pages of the reply.
    pub images: Vec<StoredImage>,
    /// Value of `after` for the next page; missing when there is no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Numbers of pages of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ContentsPages {
    /// Number of pages that are present.
    pub pages: u64,
    /// Pages among them that this checkpoint stored: neither zero nor equal to the parent's.
    pub stored_pages: u64,
    /// Pages among them that are zero.
    pub zero_pages: u64,
    /// Pages among them that equal the parent's, zero ones included; missing if nothing was compared, like the two that
    /// follow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub equal_pages: Option<u64>,
    /// Pages among them that differ from the parent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed_pages: Option<u64>,
    /// Pages among them that the parent does not have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_pages: Option<u64>,
}

/// Process of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredProcess {
    /// Pid in its namespace.
    pub pid: u32,
    /// Pid of its parent; 0 of the root's.
    pub parent_pid: u32,
    /// Name of its program; empty if it is not known.
    pub program: String,
    /// Path of its program; empty if it is not known.
    pub executable: String,
    /// Number of its threads.
    pub threads: u32,
    /// Number of its open files.
    pub open_files: u64,
    /// All its pages, those outside of mappings included.
    pub pages: ContentsPages,
    /// Number of its mappings; 0 in a pre-dump, which has no images of them.
    pub mapping_count: u64,
    /// Its mappings, ascending, as far as they are on this page of the reply.
    pub mappings: Vec<StoredMapping>,
}

/// Mapping of a process. Addresses are hexadecimal, as in `/proc/PID/maps`: JSON's numbers are not exact at this size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredMapping {
    /// First address of the mapping, hexadecimal.
    pub start: String,
    /// The address behind it, hexadecimal.
    pub end: String,
    /// Permissions as `/proc/PID/maps` writes them.
    pub permissions: String,
    /// Kind of the mapping: `anonymous`, `heap`, `stack`, `file`, `shared` and others.
    pub kind: String,
    /// Path of the mapped file; missing if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// Id of the shared memory that is mapped, hexadecimal; missing for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shared_memory: Option<String>,
    /// Pages that the checkpoint has in the mapping.
    pub pages: ContentsPages,
}

/// Shared memory of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredShared {
    /// Id of the shared memory, hexadecimal.
    pub id: String,
    /// Pages of the shared memory.
    pub pages: ContentsPages,
}

/// Small image of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoredImage {
    /// File name, without a directory.
    pub name: String,
    /// Length of the image, bytes.
    pub size_bytes: u64,
}
