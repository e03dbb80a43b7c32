//! `pstree.img`: the processes (`images/pstree.proto`).

use prost::Message;

use super::magic::PSTREE_MAGIC;
use super::{Head, ImageError, ImageReader, ImageWriter};

/// Process of the tree; pids are those of its own namespace.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Process {
    /// Pid: the N of `mm-N.img` and `pagemap-N.img`.
    #[prost(uint32, required, tag = "1")]
    pub pid: u32,
    /// Pid of its parent, 0 for the root.
    #[prost(uint32, required, tag = "2")]
    pub ppid: u32,
    /// Id of the process group.
    #[prost(uint32, required, tag = "3")]
    pub pgid: u32,
    /// Id of the session (in the sense of `setsid`).
    #[prost(uint32, required, tag = "4")]
    pub sid: u32,
    /// Pids of its threads, its own among them; empty for a dead process.
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub threads: Vec<u32>,
}

/// Reads `pstree.img`; the root comes first.
///
/// # Errors
/// The image is damaged, or has no processes.
pub fn read_pstree(bytes: &[u8]) -> Result<Vec<Process>, ImageError> {
    let records = ImageReader::new(bytes, Head::Common(PSTREE_MAGIC))?;
    let processes: Vec<Process> = records
        .map(|record| record?.decode())
        .collect::<Result<_, _>>()?;
    if processes.is_empty() {
        return Err(ImageError::MissingRecord { record: "process" });
    }
    Ok(processes)
}

/// Writes a `pstree.img`.
#[must_use]
pub fn write_pstree(processes: &[Process]) -> Vec<u8> {
    let mut image = ImageWriter::new(Head::Common(PSTREE_MAGIC));
    for process in processes {
        image.message(process);
    }
    image.finish()
}
