//! Out of the store: a checkpoint as an ordinary CRIU images directory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_pmem::{BlobError, Checkpoint, PAGE_SIZE, PageError, PageMap, Run, RunKind};
use permafrost_protocol::control;
use permafrost_protocol::images::{PagemapEntry, PagemapWriter, pagemap_name, pages_name};
use permafrost_protocol::manifest::{AddressSpace, Image};
use permafrost_protocol::pageserver::SpaceId;

use super::dump::map_root;
use super::error::index_of;
use super::images::ImagesDir;
use super::inspect::{checkpoint_name, space_name};
use super::{Progress, Store, StoreError, manifest_of};

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Pages are written in rounds of about so many bytes, between which progress is told.
const ROUND_BYTES: u64 = 64 << 20;

/// More writers than this gain nothing: they share one memory bus.
const MAX_WRITERS: usize = 4;

impl Store {
    /// Writes a checkpoint into a directory as CRIU images: the small ones byte for byte, the pages in the files
    /// that CRIU would have made, zero pages as holes. Every page is verified before it is written.
    ///
    /// Cost: one pass over the pages, on as many threads as there are processors (at most four).
    ///
    /// # Errors
    /// No such checkpoint; damage, by name and address; a file is there already or cannot be written.
    pub fn export(
        &self,
        reference: &str,
        small_images_only: bool,
        directory: OwnedFd,
        progress: Progress<'_>,
    ) -> Result<control::Exported, StoreError> {
        let record = self.resolve(reference)?;
        let checkpoint = self.checkpoint(&record.id)?;
        let manifest = manifest_of(&checkpoint)?;
        let mut export = Export {
            name: checkpoint_name(&record),
            checkpoint,
            directory: ImagesDir::new(directory)?,
            total_bytes: if small_images_only {
                0
            } else {
                record.memory_bytes
            },
            done_bytes: 0,
            written_bytes: 0,
            files: 0,
        };
        for image in &manifest.images {
            export.small_image(image)?;
        }
        if !small_images_only {
            for space in &manifest.spaces {
                export.space(space, progress)?;
            }
        }
        Ok(control::Exported {
            checkpoint: Some(record),
            files: export.files,
            bytes: export.written_bytes,
            origin: manifest.origin,
        })
    }
}

struct Export {
    name: String,
    checkpoint: Arc<Checkpoint>,
    directory: ImagesDir,
    total_bytes: u64,
    done_bytes: u64,
    written_bytes: u64,
    files: u64,
}

impl Export {
    fn small_image(&mut self, image: &Image) -> Result<(), StoreError> {
        let map = self.checkpoint.map(&map_root(&image.map_root)?);
        let file = self.directory.create(&image.name)?;
        let mut at = 0;
        let written = map.read_blob(image.len_bytes, |bytes| {
            file.write_all_at(bytes, at)?;
            at += bytes.len() as u64;
            Ok(())
        });
        written
            .map_err(|error| blob_error(error, &format!("{}: image {}", self.name, image.name)))?;
        self.files += 1;
        self.written_bytes += image.len_bytes;
        Ok(())
    }

    fn space(&mut self, space: &AddressSpace, progress: Progress<'_>) -> Result<(), StoreError> {
        let map = self.checkpoint.map(&map_root(&space.map_root)?);
        let mut pagemap = PagemapWriter::new(space.pages_id);
        let pages_name = pages_name(space.pages_id);
        let pages = self.directory.create(&pages_name)?;

        let mut round = Vec::new();
        let (mut round_bytes, mut at) = (0, 0);
        for run in map.runs() {
            let run = run.map_err(|source| self.corrupt(space, 0, source))?;
            let bytes = u64::from(run.pages) * PAGE_BYTES;
            pagemap.push(PagemapEntry {
                vaddr: run.first_index * PAGE_BYTES,
                nr_pages: u64::from(run.pages),
                flags: run.flags,
            });
            if !matches!(run.kind, RunKind::Zero) {
                round.push((at, run));
            }
            at += bytes;
            round_bytes += bytes;
            if round_bytes >= ROUND_BYTES {
                self.write_round(space, &map, &pages, &round)?;
                round.clear();
                self.done_bytes += std::mem::take(&mut round_bytes);
                progress(self.done_bytes, self.total_bytes);
            }
        }
        self.write_round(space, &map, &pages, &round)?;
        self.done_bytes += round_bytes;
        // Zero pages at the end are a hole, too.
        pages
            .set_len(at)
            .map_err(StoreError::io(format!("write {pages_name}")))?;

        let pagemap_name = pagemap_name(SpaceId {
            space_type: space.space_type(),
            id: space.id,
        });
        let encoded = pagemap.finish();
        let file = self.directory.create(&pagemap_name)?;
        file.write_all_at(&encoded, 0)
            .map_err(StoreError::io(format!("write {pagemap_name}")))?;
        self.files += 2;
        self.written_bytes += at + encoded.len() as u64;
        Ok(())
    }

    /// Verifies runs and writes each to its place in the pages file, on several threads that take the next
    /// run when they are done with one.
    fn write_round(
        &self,
        space: &AddressSpace,
        map: &PageMap,
        pages: &File,
        round: &[(u64, Run)],
    ) -> Result<(), StoreError> {
        let next = AtomicU64::new(0);
        let work = || -> Result<(), StoreError> {
            loop {
                let taken =
                    usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap_or(usize::MAX);
                let Some((at, run)) = round.get(taken) else {
                    return Ok(());
                };
                let bytes = map
                    .read(run)
                    .map_err(|source| self.corrupt(space, run.first_index, source))?;
                pages
                    .write_all_at(bytes, *at)
                    .map_err(StoreError::io("write pages"))?;
            }
        };
        let writers = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_WRITERS)
            .min(round.len());
        if writers < 2 {
            return work();
        }
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..writers).map(|_| scope.spawn(work)).collect();
            let own = work();
            helpers.into_iter().fold(own, |result, helper| {
                let helped = helper
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                result.and(helped)
            })
        })
    }

    fn corrupt(&self, space: &AddressSpace, index: u64, source: PageError) -> StoreError {
        let address = index_of(&source).unwrap_or(index) * PAGE_BYTES;
        StoreError::Corrupt {
            what: format!("{}: {} address {address:#x}", self.name, space_name(space)),
            source,
        }
    }
}

fn blob_error(error: BlobError, what: &str) -> StoreError {
    match error {
        BlobError::Page(source) => StoreError::Corrupt {
            what: what.to_owned(),
            source,
        },
        BlobError::Sink(source) => StoreError::io(format!("write {what}"))(source),
        other => StoreError::io(format!("write {what}"))(io::Error::other(other)),
    }
}
