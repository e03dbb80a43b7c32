//! Checks that an images directory and parked pages are of one dump.
//!
//! CRIU gives neither of them a name that the other has. Both contain the processes, their mappings, the number
//! of pages written, and the time: all images are written between the first page and CLOSE.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use permafrost_criu::directory::ImagesDir;
use permafrost_pmem::StoredCheckpoint;
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::images::{DumpStats, ImageError, ImageName, mm_name, read_mappings};
use permafrost_protocol::manifest::{AddressSpace, Manifest, Origin, SpaceType};

use super::StoreError;
use super::dump::map_root;
use crate::clock::unix_ms;
use crate::{ImagesError, ReadingError};

/// Longest image read for its mappings. CRIU writes some 40 bytes for each, and Linux allows 65,530 by default.
const MAX_IMAGE_BYTES: u64 = 64 << 20;

/// Tolerance of a timestamp, milliseconds: how much earlier and how much later it may be than the true time.
type Slack = (u64, u64);

/// Tolerance of a file's time: the clock that it is taken from ticks every few milliseconds, so that it is
/// never late.
const OF_FILES: Slack = (20, 0);

/// Tolerance of a file's time where the file system keeps whole seconds.
const OF_WHOLE_SECONDS: Slack = (1_000, 0);

/// Tolerance of an age that an agent has sent, with the latency of the message and the delay of the pages.
const OF_AGES: Slack = (2_000, 500);

/// Page numbers from the first up to, not including, the last.
type Range = (u64, u64);

/// Facts of an images directory that the pages of its dump agree with.
pub(super) struct Evidence {
    /// Processes with a memory of their own, and their mapped pages, ascending; empty where the image does not
    /// tell.
    mapped: BTreeMap<u64, Vec<Range>>,
    /// Number of pages in CRIU's statistics; unknown before CRIU has written them, and of a pre-dump, whose tasks
    /// run.
    counted_pages: Option<u64>,
    /// Time at which the images were complete, milliseconds since the Unix epoch by this node's clock, with its
    /// tolerance; unknown without an inventory.
    written: Option<(u64, Slack)>,
}

impl Evidence {
    /// Reads a directory; `age` is the time since its images were written, used where the files do not tell.
    ///
    /// # Errors
    /// An image is damaged or cannot be read.
    pub(super) fn read(directory: &ImagesDir, age: Option<Duration>) -> Result<Self, StoreError> {
        let mut mapped = BTreeMap::new();
        for name in directory.files()? {
            if let ImageName::Mm(pid) = ImageName::parse(&name) {
                mapped.insert(u64::from(pid), mapped_ranges(directory, pid)?);
            }
        }
        let counted_pages = if mapped.is_empty() || !directory.has_own_stats()? {
            None
        } else {
            Some(counted_pages(directory)?)
        };
        let written = directory.written()?.map(|written| {
            let since = written.duration_since(UNIX_EPOCH).unwrap_or_default();
            match age {
                Some(age) => (unix_ms().saturating_sub(millis(age)), OF_AGES),
                None if since.subsec_nanos() == 0 => (millis(since), OF_WHOLE_SECONDS),
                None => (millis(since), OF_FILES),
            }
        });
        Ok(Self {
            mapped,
            counted_pages,
            written,
        })
    }

    /// Returns the processes with a memory of their own.
    pub(super) fn processes(&self) -> BTreeSet<u64> {
        self.mapped.keys().copied().collect()
    }

    /// Compares processes, mappings and page counts with parked pages.
    ///
    /// # Errors
    /// [`ImagesError`] names the difference; other errors, when the maps cannot be read.
    pub(super) fn check_pages(
        &self,
        parked: &Arc<StoredCheckpoint>,
        manifest: &Manifest,
    ) -> Result<(), StoreError> {
        // A pre-dump has no images of its processes.
        if self.mapped.is_empty() {
            return Ok(());
        }
        let (described, received) = (self.processes(), process_spaces(&manifest.spaces));
        if described != received {
            return Err(ImagesError::OtherProcesses {
                described,
                received,
            }
            .into());
        }
        let received: u64 = manifest.spaces.iter().map(|space| space.pages).sum();
        if let Some(counted) = self.counted_pages.filter(|counted| *counted != received) {
            return Err(ImagesError::OtherPageCount { counted, received }.into());
        }
        for space in &manifest.spaces {
            let mapped = match space.space_type() {
                SpaceType::Process => self.mapped.get(&space.id),
                SpaceType::SharedMemory => None,
            };
            if let Some(mapped) = mapped.filter(|mapped| !mapped.is_empty()) {
                check_mapped(parked, space, mapped)?;
            }
        }
        Ok(())
    }

    /// Compares the time of the images with that of the pages.
    ///
    /// # Errors
    /// [`ImagesError::OtherTime`] says how far they are apart.
    pub(super) fn check_time(&self, origin: Option<&Origin>) -> Result<(), StoreError> {
        let origin = origin.filter(|origin| origin.pages_closed_unix_ms > 0);
        let (Some(origin), Some((written, slack))) = (origin, self.written) else {
            return Ok(());
        };
        let begun = origin.pages_begun_unix_ms.saturating_sub(slack.0);
        let closed = origin.pages_closed_unix_ms.saturating_add(slack.1);
        let is_before = written < begun;
        let apart_ms = if is_before {
            origin.pages_begun_unix_ms.saturating_sub(written)
        } else if written > closed {
            written.saturating_sub(origin.pages_closed_unix_ms)
        } else {
            return Ok(());
        };
        Err(ImagesError::OtherTime {
            apart_ms,
            is_before,
        }
        .into())
    }
}

/// Returns the processes that pages were received for.
pub(super) fn process_spaces(spaces: &[AddressSpace]) -> BTreeSet<u64> {
    let process = i32::from(SpaceType::Process);
    spaces
        .iter()
        .filter(|space| space.space_type == process)
        .map(|space| space.id)
        .collect()
}

fn mapped_ranges(directory: &ImagesDir, pid: u32) -> Result<Vec<Range>, StoreError> {
    let name = mm_name(pid);
    let mut bytes = Vec::new();
    directory
        .open(&name)?
        .take(MAX_IMAGE_BYTES)
        .read_to_end(&mut bytes)
        .map_err(StoreError::io(format!("read image {name}")))?;
    let mappings = read_mappings(&bytes).map_err(unreadable(&name))?;
    let mut ranges: Vec<Range> = mappings
        .iter()
        .map(|mapping| (mapping.start / PAGE_BYTES, mapping.end.div_ceil(PAGE_BYTES)))
        .collect();
    ranges.sort_unstable();
    // Runs of pages do not stop where one mapping borders on the next.
    ranges.dedup_by(|next, range| {
        let touches = next.0 <= range.1;
        if touches {
            range.1 = range.1.max(next.1);
        }
        touches
    });
    Ok(ranges)
}

fn counted_pages(directory: &ImagesDir) -> Result<u64, StoreError> {
    const NAME: &str = "stats-dump";
    let mut bytes = Vec::new();
    directory
        .open(NAME)?
        .take(MAX_IMAGE_BYTES)
        .read_to_end(&mut bytes)
        .map_err(StoreError::io(format!("read {NAME}")))?;
    let stats = DumpStats::read(&bytes).map_err(unreadable(NAME))?;
    let counts = [
        stats.pages_skipped_parent,
        stats.pages_written,
        stats.pages_lazy,
        stats.shpages_skipped_parent.unwrap_or(0),
        stats.shpages_written.unwrap_or(0),
    ];
    Ok(counts
        .iter()
        .fold(0, |sum, count| sum.saturating_add(*count)))
}

fn check_mapped(
    parked: &Arc<StoredCheckpoint>,
    space: &AddressSpace,
    mapped: &[Range],
) -> Result<(), StoreError> {
    for run in parked.map(&map_root(&space.map_root)?).runs() {
        let run = run.map_err(|source| ReadingError::Corrupt {
            part: format!("parked pages of process {}", space.id),
            source,
        })?;
        let after = mapped.partition_point(|range| range.0 <= run.first_index);
        let holds = after
            .checked_sub(1)
            .is_some_and(|at| run.end_index() <= mapped[at].1);
        if !holds {
            return Err(ImagesError::NotMapped {
                process: space.id,
                start: run.first_index.saturating_mul(PAGE_BYTES),
                end: run.end_index().saturating_mul(PAGE_BYTES),
            }
            .into());
        }
    }
    Ok(())
}

fn unreadable(image: &str) -> impl FnOnce(ImageError) -> ImagesError {
    move |source| ImagesError::Unreadable {
        image: image.to_owned(),
        source,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
