//! `stats-dump` and `stats-restore`: CRIU's own measurements (`images/stats.proto`, `criu/stats.c`).

use prost::Message;
use serde::Serialize;

use super::magic::STATS_MAGIC;
use super::{Head, ImageError, ImageReader, ImageWriter};

/// Only record of either file: `dump` or `restore` is present.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct Stats {
    /// Statistics of a dump or pre-dump.
    #[prost(message, optional, tag = "1")]
    pub dump: Option<DumpStats>,
    /// Statistics of a restore.
    #[prost(message, optional, tag = "2")]
    pub restore: Option<RestoreStats>,
}

/// Statistics of a dump. Times are microseconds.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct DumpStats {
    /// Until every thread had stopped.
    #[prost(uint32, required, tag = "1")]
    pub freezing_time: u32,
    /// Time for which the processes were frozen.
    #[prost(uint32, required, tag = "2")]
    pub frozen_time: u32,
    /// Draining their memory into pipes.
    #[prost(uint32, required, tag = "3")]
    pub memdump_time: u32,
    /// Writing it out: to files, or to the page server.
    #[prost(uint32, required, tag = "4")]
    pub memwrite_time: u32,
    /// Number of pages scanned.
    #[prost(uint64, required, tag = "5")]
    pub pages_scanned: u64,
    /// Pages left out because the parent has them.
    #[prost(uint64, required, tag = "6")]
    pub pages_skipped_parent: u64,
    /// Number of pages written.
    #[prost(uint64, required, tag = "7")]
    pub pages_written: u64,
    /// Time spent looking up paths of inotify watches.
    #[prost(uint32, optional, tag = "8")]
    pub irmap_resolve: Option<u32>,
    /// Pages that may be restored lazily.
    #[prost(uint64, required, tag = "9")]
    pub pages_lazy: u64,
    /// Number of pipes used.
    #[prost(uint64, optional, tag = "10")]
    pub page_pipes: Option<u64>,
    /// Number of buffers that these pipes used.
    #[prost(uint64, optional, tag = "11")]
    pub page_pipe_bufs: Option<u64>,
    /// Number of shared-memory pages scanned.
    #[prost(uint64, optional, tag = "12")]
    pub shpages_scanned: Option<u64>,
    /// Shared-memory pages left out because the parent has them.
    #[prost(uint64, optional, tag = "13")]
    pub shpages_skipped_parent: Option<u64>,
    /// Shared-memory pages written.
    #[prost(uint64, optional, tag = "14")]
    pub shpages_written: Option<u64>,
}

/// Statistics of a restore. Times are microseconds.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct RestoreStats {
    /// Pages compared with the parent process's.
    #[prost(uint64, required, tag = "1")]
    pub pages_compared: u64,
    /// Pages among them that were equal, and left shared.
    #[prost(uint64, required, tag = "2")]
    pub pages_skipped_cow: u64,
    /// Creating the processes.
    #[prost(uint32, required, tag = "3")]
    pub forking_time: u32,
    /// The whole restore.
    #[prost(uint32, required, tag = "4")]
    pub restore_time: u32,
    /// Number of pages restored.
    #[prost(uint64, optional, tag = "5")]
    pub pages_restored: Option<u64>,
}

impl Stats {
    /// Reads either file.
    ///
    /// # Errors
    /// The file is damaged.
    pub fn read(bytes: &[u8]) -> Result<Self, ImageError> {
        ImageReader::new(bytes, Head::Service(STATS_MAGIC))?
            .only_record("stats entry")?
            .decode()
    }

    /// Writes either file.
    #[must_use]
    pub fn write(&self) -> Vec<u8> {
        let mut image = ImageWriter::new(Head::Service(STATS_MAGIC));
        image.message(self);
        image.finish()
    }
}

impl DumpStats {
    /// Reads `stats-dump`.
    ///
    /// # Errors
    /// The file is damaged, or of a restore.
    pub fn read(bytes: &[u8]) -> Result<Self, ImageError> {
        Stats::read(bytes)?.dump.ok_or(ImageError::MissingRecord {
            record: "dump statistics",
        })
    }
}

impl RestoreStats {
    /// Reads `stats-restore`.
    ///
    /// # Errors
    /// The file is damaged, or of a dump.
    pub fn read(bytes: &[u8]) -> Result<Self, ImageError> {
        Stats::read(bytes)?
            .restore
            .ok_or(ImageError::MissingRecord {
                record: "restore statistics",
            })
    }
}
