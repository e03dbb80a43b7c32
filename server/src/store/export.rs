//! Out of the store: a checkpoint as an ordinary CRIU images directory.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use permafrost_pmem::{PageMap, Run, RunKind};
use permafrost_protocol::control;
use permafrost_protocol::images::{pagemap_name, pages_name};
use permafrost_protocol::manifest::{AddressSpace, Image};
use permafrost_protocol::pageserver::SpaceId;

use super::images::ImagesDir;
use super::reader::{PAGE_BYTES, ReadError, Reader};
use super::{Progress, Store, StoreError};

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
        let reader = Reader::open(self, self.resolve(reference)?)?;
        let mut export = Export {
            directory: ImagesDir::new(directory)?,
            total_bytes: if small_images_only {
                0
            } else {
                reader.record.memory_bytes
            },
            done_bytes: 0,
            written_bytes: 0,
            created: Vec::new(),
            reader: &reader,
        };
        if let Err(error) = export.all(small_images_only, progress) {
            export.undo();
            return Err(error);
        }
        let (files, bytes) = (export.created.len() as u64, export.written_bytes);
        Ok(control::Exported {
            checkpoint: Some(reader.record),
            files,
            bytes,
            origin: reader.manifest.origin,
        })
    }
}

struct Export<'a> {
    reader: &'a Reader,
    directory: ImagesDir,
    total_bytes: u64,
    done_bytes: u64,
    written_bytes: u64,
    /// Names of the files made.
    created: Vec<String>,
}

impl Export<'_> {
    fn all(&mut self, small_images_only: bool, progress: Progress<'_>) -> Result<(), StoreError> {
        // Nothing takes a directory without an inventory for images, so it comes when all else is there.
        let is_last = |image: &&Image| image.name == "inventory.img";
        let (last, first): (Vec<_>, Vec<_>) = self.reader.manifest.images.iter().partition(is_last);
        for image in first {
            self.small_image(image)?;
        }
        if !small_images_only {
            for space in &self.reader.manifest.spaces {
                self.space(space, progress)?;
            }
        }
        for image in last {
            self.small_image(image)?;
        }
        Ok(())
    }

    /// Removes what was made: half a checkpoint, or one with holes where the damage is, must not be taken for
    /// a whole one.
    fn undo(&self) {
        for name in &self.created {
            if let Err(error) = self.directory.remove(name) {
                tracing::warn!(name, %error, "image not removed");
            }
        }
    }

    fn create(&mut self, name: &str) -> Result<File, StoreError> {
        let file = self.directory.create(name)?;
        self.created.push(name.to_owned());
        Ok(file)
    }

    fn small_image(&mut self, image: &Image) -> Result<(), StoreError> {
        let file = self.create(&image.name)?;
        let mut at = 0;
        let written = self.reader.small(image, |bytes| {
            file.write_all_at(bytes, at)?;
            at += bytes.len() as u64;
            Ok(())
        });
        written.map_err(|error| match error {
            ReadError::Store(error) => error,
            ReadError::Sink(error) => StoreError::io(format!("write image {}", image.name))(error),
        })?;
        self.written_bytes += image.len_bytes;
        Ok(())
    }

    fn space(&mut self, space: &AddressSpace, progress: Progress<'_>) -> Result<(), StoreError> {
        let pagemap = self.reader.pagemap(space)?;
        let name = pagemap_name(SpaceId {
            space_type: space.space_type(),
            id: space.id,
        });
        let file = self.create(&name)?;
        file.write_all_at(&pagemap, 0)
            .map_err(StoreError::io(format!("write image {name}")))?;

        let name = pages_name(space.pages_id);
        let pages = self.create(&name)?;
        let map = self.reader.map(space)?;
        let mut round = Vec::new();
        let (mut round_bytes, mut at) = (0, 0);
        for run in map.runs() {
            let run = run.map_err(|source| self.reader.corrupt(space, 0, source))?;
            let bytes = u64::from(run.pages) * PAGE_BYTES;
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
            .map_err(StoreError::io(format!("write image {name}")))?;
        self.written_bytes += at + pagemap.len() as u64;
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
        let next = AtomicUsize::new(0);
        let work = || -> Result<(), StoreError> {
            while let Some((at, run)) = round.get(next.fetch_add(1, Ordering::Relaxed)) {
                let bytes = map
                    .read(run)
                    .map_err(|source| self.reader.corrupt(space, run.first_index, source))?;
                pages
                    .write_all_at(bytes, *at)
                    .map_err(StoreError::io("write pages image"))?;
            }
            Ok(())
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let writers = processors.min(MAX_WRITERS).min(round.len());
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
}
