//! Out of the store: a checkpoint as an ordinary CRIU images directory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use permafrost_client::remote;
use permafrost_pmem::{PageMap, Run};
use permafrost_protocol::control;
use permafrost_protocol::images::{pagemap_name, pages_name};
use permafrost_protocol::manifest::AddressSpace;
use permafrost_protocol::pageserver::SpaceId;

use super::anywhere::Anywhere;
use super::images::ImagesDir;
use super::reader::{PAGE_BYTES, ReadError, Reader};
use super::{Progress, Store, StoreError};

/// Pages are written in rounds of about so many bytes, between which progress is told.
const ROUND_BYTES: u64 = 64 << 20;

/// More writers than this gain nothing: they share one memory bus.
const MAX_WRITERS: usize = 4;

impl Store {
    /// Writes a checkpoint into a directory as CRIU images: the small ones byte for byte, the pages in the files
    /// that CRIU would have made, zero pages as holes. Every page is verified before it is written; what is not here,
    /// or damaged here, comes from another node.
    ///
    /// Cost: one pass over the pages, on as many threads as there are processors (at most four).
    ///
    /// # Errors
    /// No such checkpoint; damage, by name and address; no node that holds it is there; a file is there already or
    /// cannot be written.
    pub fn export(
        &self,
        reference: &str,
        small_images_only: bool,
        directory: OwnedFd,
        progress: Progress<'_>,
    ) -> Result<control::Exported, StoreError> {
        let reader = Anywhere::open(self, self.resolve(reference)?)?;
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
    reader: &'a Anywhere<'a>,
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
        let images = &self.reader.manifest.images;
        let is_last = |place: &usize| images[*place].name == "inventory.img";
        let (last, first): (Vec<_>, Vec<_>) = (0..images.len()).partition(is_last);
        for place in first {
            self.small_image(place)?;
        }
        if !small_images_only {
            for place in 0..self.reader.manifest.spaces.len() {
                self.space(place, progress)?;
            }
        }
        for place in last {
            self.small_image(place)?;
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

    fn small_image(&mut self, place: usize) -> Result<(), StoreError> {
        let image = &self.reader.manifest.images[place];
        let file = self.create(&image.name)?;
        let mut at = 0;
        let written = self.reader.small(place, |bytes| {
            file.write_all_at(bytes, at)?;
            at += bytes.len() as u64;
            Ok(())
        });
        written.map_err(|error| told(error, &image.name))?;
        self.written_bytes += image.len_bytes;
        Ok(())
    }

    fn space(&mut self, place: usize, progress: Progress<'_>) -> Result<(), StoreError> {
        let reader = self.reader;
        let space = &reader.manifest.spaces[place];
        let pagemap = reader.pagemap(place)?;
        let name = pagemap_name(SpaceId {
            space_type: space.space_type(),
            id: space.id,
        });
        let file = self.create(&name)?;
        file.write_all_at(&pagemap, 0)
            .map_err(StoreError::io(format!("write image {name}")))?;

        let name = pages_name(space.pages_id);
        let mut pages = Pages {
            file: self.create(&name)?,
            at: 0,
            next_index: 0,
        };
        let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
        let mut progress = |at| progress(done_bytes + at, total_bytes);
        let own = reader.here.as_ref();
        let own = own.map(|here| write_own(here, place, &mut pages, &mut progress));
        let cause = match own {
            Some(Ok(())) => None,
            Some(Err(ReadError::Store(error))) => Some(Some(error)),
            Some(Err(error @ ReadError::Sink(_))) => return Err(told(error, &name)),
            None => Some(None),
        };
        if let Some(cause) = cause {
            let from_index = pages.next_index;
            let written = reader.pages_of_others(place, from_index, cause, |run| {
                pages.put(run)?;
                progress(pages.at);
                Ok(())
            });
            written.map_err(|error| told(error, &name))?;
        }
        // Zero pages at the end are a hole, too.
        pages
            .file
            .set_len(pages.at)
            .map_err(StoreError::io(format!("write image {name}")))?;
        self.done_bytes += pages.at;
        self.written_bytes += pages.at + pagemap.len() as u64;
        Ok(())
    }
}

fn told(error: ReadError, name: &str) -> StoreError {
    match error {
        ReadError::Store(error) => error,
        ReadError::Sink(error) => StoreError::io(format!("write image {name}"))(error),
    }
}

/// A pages file in the making.
struct Pages {
    file: File,
    /// Where the next page goes, bytes.
    at: u64,
    /// Behind the last page that is in it.
    next_index: u64,
}

impl Pages {
    fn put(&mut self, run: remote::Run<'_>) -> io::Result<()> {
        match run {
            remote::Run::Pages { bytes, .. } => {
                self.file.write_all_at(bytes, self.at)?;
                self.at += bytes.len() as u64;
            }
            remote::Run::Zero { pages, .. } => self.at += pages * PAGE_BYTES,
        }
        Ok(())
    }
}

/// A run, and where it goes in the pages file.
type Placed = (u64, Run);

/// Writes this node's copy of an address space, in rounds. When that fails, all pages up to where `pages` says are
/// written.
fn write_own(
    reader: &Reader,
    place: usize,
    pages: &mut Pages,
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
        // What came before damage in the map is as good as any.
        write_round(reader, space, &map, pages, &round)?;
        round.clear();
        progress(pages.at);
        match run {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(()),
            Err(source) => return Err(reader.corrupt(space, pages.next_index, source).into()),
        }
    }
}

/// Verifies runs and writes each to its place in the pages file, on several threads that take the next run when they
/// are done with one. All before the first one that fails are then written.
fn write_round(
    reader: &Reader,
    space: &AddressSpace,
    map: &PageMap,
    pages: &mut Pages,
    round: &[Placed],
) -> Result<(), ReadError> {
    let next = AtomicUsize::new(0);
    let file = &pages.file;
    let work = || -> Option<(usize, ReadError)> {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let (at, run) = round.get(place)?;
            let written = map
                .read(run)
                .map_err(|source| ReadError::from(reader.corrupt(space, run.first_index, source)))
                .and_then(|bytes| Ok(file.write_all_at(bytes, *at)?));
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
        pages.next_index = run.end_index();
    }
    failed.map_or(Ok(()), |(_, error)| Err(error))
}
