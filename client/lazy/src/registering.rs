//! Registration of memory with userfaultfds, before the processes run.
//!
//! CRIU registers a mapping after it has moved it to its address (`vma_remap` in `criu/pie/restorer.c`). One whose
//! temporary address happens to be its own is not moved, and not registered either: its missing pages would read as
//! zeros. The kernel registers mappings for whoever has the userfaultfd, and ignores those that are registered already.
//! So all are registered once more while CRIU waits for `permafrost-action`, when no process has run.

use std::fs;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use permafrost_criu::handover::PLACED;
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::images::{Mapping, Pagemap, mm_name, pagemap_name, read_mappings};
use permafrost_protocol::manifest::SpaceType;
use permafrost_protocol::pageserver::{PE_LAZY, SpaceId};
use permafrost_userfault::Userfault;

use super::LazyError;
use super::missing::{MissingRange, MissingRanges};

/// Memory of a process whose pages come later.
#[derive(Default)]
pub(super) struct LazyMemory {
    pub(super) missing: MissingRanges,
    /// Mappings with missing pages, ascending.
    pub(super) mappings: Vec<Range<u64>>,
}

impl LazyMemory {
    /// Returns the pages that a pagemap lists as lazy, and the mappings that they are in. `mappings` are ascending.
    pub(super) fn new(mappings: &[Mapping], pagemap: &Pagemap) -> Self {
        let mut memory = Self::default();
        for entry in &pagemap.entries {
            if entry.flags & PE_LAZY == 0 {
                continue;
            }
            let end = entry.vaddr + entry.nr_pages * PAGE_BYTES;
            for range in within(mappings, entry.vaddr, end) {
                memory.missing.insert(range);
                memory.add_mapping(mappings, range.start..range.end);
            }
        }
        memory
    }

    /// Reads the images of the process that had `pid`, from the directory from which CRIU restores it.
    pub(super) fn read(images: &Path, pid: u32) -> Result<Self, LazyError> {
        let failed = LazyError::io("read where pages are missing");
        let space = SpaceId {
            space_type: SpaceType::Process,
            id: u64::from(pid),
        };
        let pagemap = fs::read(images.join(pagemap_name(space))).map_err(&failed)?;
        let mappings = match fs::read(images.join(mm_name(pid))) {
            Ok(bytes) => read_mappings(&bytes)?,
            // Old releases of CRIU keep the mappings elsewhere.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(failed(error)),
        };
        Ok(Self::new(&mappings, &Pagemap::read(&pagemap)?))
    }

    /// Adds the mapping with these pages; only the pages if no mapping is known. A part of a mapping that were registered
    /// would become a mapping of its own.
    fn add_mapping(&mut self, mappings: &[Mapping], pages: Range<u64>) {
        let at = mappings.partition_point(|mapping| mapping.end <= pages.start);
        let mapping = mappings
            .get(at)
            .filter(|mapping| mapping.start <= pages.start)
            .map_or(pages, |mapping| mapping.start..mapping.end);
        if self.mappings.last() != Some(&mapping) {
            self.mappings.push(mapping);
        }
    }
}

/// Registers the mappings of a process that has not run. All of them are at their addresses.
pub(super) fn register(userfault: &Userfault, mappings: &[Range<u64>]) -> Result<(), LazyError> {
    mappings.iter().try_for_each(|mapping| {
        let registered = userfault.register(mapping.start, mapping.end);
        registered.map_err(LazyError::io("register memory with a userfaultfd"))
    })
}

/// Accepts the connection of `permafrost-action` that is there, if it is still.
pub(super) fn accept(listener: &UnixListener) -> Result<Option<UnixStream>, LazyError> {
    match listener.accept() {
        Ok((script, _)) => Ok(Some(script)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(LazyError::io("listen for permafrost-action")(error)),
    }
}

/// Lets the processes run for which a script waits. If it has gone, CRIU has too, or knows that it failed.
pub(super) fn answer(mut script: UnixStream) {
    if let Err(error) = script.write_all(PLACED) {
        tracing::debug!(%error, "permafrost-action has gone");
    }
}

/// Divides a range of pages at the ends of mappings: `UFFDIO_COPY` works within one.
fn within(mappings: &[Mapping], start: u64, end: u64) -> Vec<MissingRange> {
    let mut ranges = Vec::new();
    let mut at = start;
    let from = mappings.partition_point(|mapping| mapping.end <= start);
    for mapping in &mappings[from..] {
        if at >= end || mapping.start >= end {
            break;
        }
        let until = mapping.end.min(end);
        ranges.push(MissingRange {
            start: at,
            end: until,
            image: at,
        });
        at = until;
    }
    if at < end {
        // Old releases of CRIU keep the mappings elsewhere.
        ranges.push(MissingRange {
            start: at,
            end,
            image: at,
        });
    }
    ranges
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::images::PagemapEntry;
    use permafrost_protocol::pageserver::PE_PRESENT;

    use super::*;

    fn mapping(start: u64, end: u64) -> Mapping {
        Mapping {
            start,
            end,
            ..Mapping::default()
        }
    }

    #[test]
    fn ranges_end_where_mappings_do() {
        let mappings = [
            mapping(0x1000, 0x3000),
            mapping(0x3000, 0x6000),
            mapping(0x8000, 0x9000),
        ];
        let ends = |start, end| {
            let ranges = within(&mappings, start, end);
            assert!(ranges.iter().all(|range| range.start == range.image));
            ranges
                .iter()
                .map(|range| (range.start, range.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(ends(0x1000, 0x3000), [(0x1000, 0x3000)]);
        assert_eq!(ends(0x2000, 0x5000), [(0x2000, 0x3000), (0x3000, 0x5000)]);
        assert_eq!(ends(0x8000, 0x9000), [(0x8000, 0x9000)]);
        assert_eq!(ends(0x8000, 0xA000), [(0x8000, 0x9000), (0x9000, 0xA000)]);
        assert_eq!(within(&[], 0x1000, 0x2000).len(), 1);
    }

    #[test]
    fn mappings_with_missing_pages_are_registered_whole_and_once() {
        let entry = |vaddr, nr_pages, flags| PagemapEntry {
            vaddr,
            nr_pages,
            flags,
        };
        let pagemap = Pagemap {
            entries: vec![
                entry(0x1000, 1, PE_LAZY),
                entry(0x2000, 1, PE_LAZY | PE_PRESENT),
                entry(0x5000, 2, PE_LAZY),
                entry(0x8000, 1, PE_PRESENT),
                entry(0xB000, 1, PE_LAZY),
            ],
            pages_id: 1,
        };
        let mappings = [
            mapping(0x1000, 0x4000),
            mapping(0x4000, 0x6000),
            mapping(0x6000, 0x8000),
            mapping(0x8000, 0x9000),
        ];
        let memory = LazyMemory::new(&mappings, &pagemap);
        let whole = [
            0x1000..0x4000,
            0x4000..0x6000,
            0x6000..0x8000,
            0xB000..0xC000,
        ];
        assert_eq!(memory.mappings, whole);
        assert_eq!(memory.missing.pages(), 5);
    }
}
