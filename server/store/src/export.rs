//! Writes the pages of a checkpoint into a file of an images directory.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use permafrost_criu::directory::PagesFile;
use permafrost_pmem::{PageMap, StoredRun};
use permafrost_protocol::manifest::AddressSpace;

use super::reader::{LocalCheckpoint, ReadError};
use permafrost_protocol::PAGE_BYTES;

/// Approximate bytes of pages written per round. Progress is reported between rounds.
const ROUND_BYTES: u64 = 64 << 20;

/// Maximum number of writer threads. More gain nothing: they share one memory bus.
const MAX_WRITERS: usize = 4;

/// A run, and its offset in the pages file.
type Placed = (u64, StoredRun);

impl LocalCheckpoint {
    /// Writes an address space into a pages file, in rounds. If that fails, all pages before `next_index` are written.
    ///
    /// Cost: one pass over the pages, on as many threads as there are processors (at most four).
    pub(super) fn write_file(
        &self,
        place: usize,
        pages: &mut PagesFile,
        next_index: &mut u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ReadError> {
        let space = &self.manifest.spaces[place];
        let map = self.map(space)?;
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
            write_round(self, space, &map, pages, next_index, &round)?;
            round.clear();
            progress(pages.at);
            match run {
                Ok(Some(_)) => {}
                Ok(None) => return Ok(()),
                Err(source) => return Err(self.corrupt(space, *next_index, source).into()),
            }
        }
    }
}

/// Verifies runs and writes each to its place in the pages file, on several threads that take the next run when they
/// are done with one. All before the first one that fails are then written.
fn write_round(
    reader: &LocalCheckpoint,
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
                let written = file.write_all_at(&bytes, *at);
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
