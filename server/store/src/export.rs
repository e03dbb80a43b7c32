//! Exports a checkpoint as an ordinary CRIU images directory.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use permafrost_criu::directory::{self, Exportable, PagesFile};
use permafrost_pmem::{PageMap, StoredRun};
use permafrost_protocol::control;
use permafrost_protocol::manifest::{AddressSpace, Manifest};

use super::anywhere::Anywhere;
use super::reader::{PAGE_BYTES, ReadError, Reader};
use super::{ProgressReceiver, Store, StoreError};

/// Approximate bytes of pages written per round. Progress is reported between rounds.
const ROUND_BYTES: u64 = 64 << 20;

/// Maximum number of writer threads. More gain nothing: they share one memory bus.
const MAX_WRITERS: usize = 4;

impl Store {
    /// Writes a checkpoint into a directory as CRIU images: the small ones byte for byte, the pages in the files
    /// that CRIU would have made, zero pages as holes. Every page is verified before it is written; pages that are
    /// not here, or damaged here, come from another node.
    ///
    /// Cost: one pass over the pages, on as many threads as there are processors (at most four).
    ///
    /// # Errors
    /// There is no such checkpoint; a page is damaged, reported by name and address; no node that holds the
    /// checkpoint can be reached; a file exists already or cannot be written.
    pub fn export(
        &self,
        reference: &str,
        small_images_only: bool,
        directory: OwnedFd,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, StoreError> {
        let reader = Anywhere::open(self, self.resolve(reference)?)?;
        if small_images_only {
            // Exported for a dump to be compared with: this is no restore.
            return directory::export(&reader, true, directory, progress);
        }
        let restoring = self.restoring(&reader);
        let exported = directory::export(&reader, false, directory, &mut |bytes, total| {
            restoring.progress(bytes);
            progress(bytes, total);
        })?;
        self.restored(&reader, restoring, exported.bytes);
        Ok(exported)
    }
}

impl Store {
    /// Writes a checkpoint that the region holds into a directory, as [`Store::export`] does, whatever its name.
    ///
    /// # Errors
    /// Those of [`Store::export`].
    pub fn export_record(
        &self,
        record: control::Checkpoint,
        directory: OwnedFd,
    ) -> Result<control::Exported, StoreError> {
        let reader = Anywhere::open(self, record)?;
        directory::export(&reader, false, directory, &mut |_, _| {})
    }
}

impl Exportable for Anywhere<'_> {
    type Error = StoreError;

    fn record(&self) -> &control::Checkpoint {
        &self.record
    }

    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn small(
        &self,
        place: usize,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        self.small(place, sink)
    }

    fn pagemap(&self, place: usize) -> Result<Vec<u8>, StoreError> {
        self.pagemap(place)
    }

    fn pages(
        &self,
        place: usize,
        file: &mut PagesFile,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ReadError> {
        let (mut next_index, mut cause) = (0, None);
        if let Some(here) = &self.here {
            match write_own(here, place, file, &mut next_index, progress) {
                Err(ReadError::Source(error)) => cause = Some(error),
                written => return written,
            }
        }
        self.pages_of_others(place, next_index, cause, |run| {
            file.put(run)?;
            progress(file.at);
            Ok(())
        })
    }
}

/// A run, and its offset in the pages file.
type Placed = (u64, StoredRun);

/// Writes this node's copy of an address space, in rounds. If that fails, all pages before `next_index` are
/// written.
fn write_own(
    reader: &Reader,
    place: usize,
    pages: &mut PagesFile,
    next_index: &mut u64,
    progress: &mut dyn FnMut(u64),
) -> Result<(), ReadError> {
    let space = &reader.manifest.spaces[place];
    let map = reader.map(space)?;
    let mut round: Vec<Placed> = Vec::new();
    let mut at = 0;
    let mut runs = map.runs();
    loop {
        let run = runs.next().transpose();
        if let Ok(Some(run)) = run {
            round.push((at, run));
            at += u64::from(run.pages) * PAGE_BYTES;
            if at - pages.at < ROUND_BYTES {
                continue;
            }
        }
        // The pages before damage in the map are intact.
        write_round(reader, space, &map, pages, next_index, &round)?;
        round.clear();
        progress(pages.at);
        match run {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(()),
            Err(source) => return Err(reader.corrupt(space, *next_index, source).into()),
        }
    }
}

/// Verifies runs and writes each to its place in the pages file, on several threads that take the next run when they
/// are done with one. All before the first one that fails are then written.
fn write_round(
    reader: &Reader,
    space: &AddressSpace,
    map: &PageMap,
    pages: &mut PagesFile,
    next_index: &mut u64,
    round: &[Placed],
) -> Result<(), ReadError> {
    let next = AtomicUsize::new(0);
    let file = &pages.file;
    let work = || -> Option<(usize, ReadError)> {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let (at, run) = round.get(place)?;
            let damaged = |source| ReadError::from(reader.corrupt(space, run.first_index, source));
            let written = map.read(run).map_err(damaged).and_then(|bytes| {
                let written = file.write_all_at(bytes, *at);
                map.confirm(run, run.first_index, run.pages)
                    .map_err(damaged)?;
                Ok(written?)
            });
            if let Err(error) = written {
                return Some((place, error));
            }
        }
    };
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let writers = processors.min(MAX_WRITERS).min(round.len()).max(1);
    let failed = std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..writers).map(|_| scope.spawn(work)).collect();
        let own = work();
        let helped = helpers.into_iter().filter_map(|helper| {
            helper
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        own.into_iter()
            .chain(helped)
            .min_by_key(|(place, _)| *place)
    });
    let whole = failed.as_ref().map_or(round.len(), |(place, _)| *place);
    if let Some((at, run)) = round[..whole].last() {
        pages.at = at + u64::from(run.pages) * PAGE_BYTES;
        *next_index = run.end_index();
    }
    failed.map_or(Ok(()), |(_, error)| Err(error))
}
