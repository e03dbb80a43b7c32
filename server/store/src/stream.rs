//! Streams a checkpoint, without a copy in between, as the images that `criu restore --stream` asks for.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use permafrost_criu::directory::PageRun;
use permafrost_criu::frontend::{
    self, ImageSource, Pipe, RequestedImage, ServeImageError, StreamError,
};
use permafrost_pmem::RunKind;
use permafrost_protocol::control;

use super::anywhere::Anywhere;
use super::reader::{PAGE_BYTES, ReadError, Reader};
use super::{ProgressReceiver, Store, StoreError};
use crate::ReadingError;

/// Longest time that CRIU may take to connect once it has been promised its images.
const PATIENCE: Duration = Duration::from_secs(60);

/// Minimum size of a run of pages that is spliced. Shorter runs are copied into the pipe together: a splice of
/// each would cost more, and wake CRIU up each time.
const SPLICED_BYTES: u64 = 64 << 10;

impl Store {
    /// Serves a checkpoint to the CRIU that connects to `listener`, until that CRIU disconnects. Every page is
    /// verified before it is given; one that is not here, or damaged here, comes from another node. If there is
    /// none, the file ends early, which makes the restore fail. `served` counts the bytes as they are given.
    ///
    /// # Errors
    /// There is no such checkpoint; nobody connects before `caller` disconnects; a page is damaged, reported by
    /// name and address; no node that holds the checkpoint can be reached.
    pub fn stream(
        &self,
        reference: &str,
        listener: OwnedFd,
        caller: &UnixStream,
        served: &Arc<AtomicU64>,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, StoreError> {
        let reader = Anywhere::open(self, self.resolve(reference)?)?;
        let total_bytes = reader.record.memory_bytes;
        let mut restoring = self.restoring(&reader);
        let counter = served;
        let served =
            frontend::accept(&UnixListener::from(listener), caller, PATIENCE).and_then(|criu| {
                restoring.begun();
                frontend::stream(&criu, &reader, counter, &mut |bytes| {
                    restoring.progress(bytes);
                    progress(bytes, total_bytes);
                })
            });
        let served = served.map_err(|error| match error {
            StreamError::Source(error) => error,
            StreamError::NobodyCame => ReadingError::NobodyCame.into(),
            other => StoreError::io(format!("stream {}", reader.name))(io::Error::other(
                other.to_string(),
            )),
        })?;
        self.restored(&reader, restoring, served.bytes);
        Ok(control::Exported {
            checkpoint: Some(reader.record),
            files: served.files,
            bytes: served.bytes,
            origin: reader.manifest.origin,
        })
    }
}

impl ImageSource for Anywhere<'_> {
    type Image = RequestedImage;
    type Error = StoreError;

    fn find(&self, name: &str) -> Option<RequestedImage> {
        RequestedImage::find(&self.manifest, name)
    }

    fn write(
        &self,
        wanted: &RequestedImage,
        pipe: &mut Pipe,
    ) -> Result<u64, ServeImageError<StoreError>> {
        match *wanted {
            RequestedImage::Small(place) => {
                self.small(place, |bytes| pipe.write_all(bytes))?;
                Ok(self.manifest.images[place].len_bytes)
            }
            RequestedImage::Pagemap(place) => {
                let pagemap = self.pagemap(place)?;
                pipe.write_all(&pagemap)?;
                Ok(pagemap.len() as u64)
            }
            RequestedImage::Pages(place) => {
                self.write_pages(place, pipe)?;
                Ok(self.manifest.spaces[place].pages * PAGE_BYTES)
            }
        }
    }
}

impl Anywhere<'_> {
    fn write_pages(&self, place: usize, pipe: &mut Pipe) -> Result<(), ReadError> {
        let (mut next_index, mut cause) = (0, None);
        if let Some(here) = &self.here {
            match write_own(here, place, pipe, &mut next_index) {
                Err(ReadError::Source(error)) => cause = Some(error),
                written => return written,
            }
        }
        self.pages_of_others(place, next_index, cause, |run| match run {
            PageRun::Pages { bytes, .. } => pipe.write_all(bytes),
            PageRun::Zero { pages, .. } => pipe.write_zeros(pages * PAGE_BYTES),
        })
    }
}

/// Writes the pages of this node's copy; `next_index` is the index after the last page written, damaged or not.
fn write_own(
    reader: &Reader,
    place: usize,
    pipe: &mut Pipe,
    next_index: &mut u64,
) -> Result<(), ReadError> {
    let space = &reader.manifest.spaces[place];
    let map = reader.map(space)?;
    let total = space.pages * PAGE_BYTES;
    let mut written = 0;
    for run in map.runs() {
        let run = run.map_err(|source| reader.corrupt(space, *next_index, source))?;
        let bytes = u64::from(run.pages) * PAGE_BYTES;
        written += bytes;
        // Spliced pages are the region's own, which may be reused once the checkpoint is released. So the last pages,
        // a pipe full, are copied: when they are in the pipe, CRIU has read all spliced ones.
        let is_last = total.saturating_sub(written) < pipe.capacity_bytes();
        let spliced = if bytes >= SPLICED_BYTES && !is_last {
            map.splice_source(&run)
        } else {
            Ok(None)
        };
        let read = match spliced {
            Ok(Some((file, at))) => {
                let mut next = at;
                if let Err(error) = pipe.splice(file, &mut next, at + bytes) {
                    let given = next - at;
                    *next_index = run.first_index + given / PAGE_BYTES;
                    // A page was lost since it was verified; the ones before it are in the pipe, whole.
                    return Err(match map.read_range(&run, *next_index, 1) {
                        Err(source) if given.is_multiple_of(PAGE_BYTES) => {
                            reader.corrupt(space, *next_index, source).into()
                        }
                        _ => error.into(),
                    });
                }
                *next_index = run.end_index();
                continue;
            }
            Ok(None) => map.read(&run),
            Err(source) => Err(source),
        };
        match read {
            Ok(_) if matches!(run.kind, RunKind::Zero) => pipe.write_zeros(bytes)?,
            Ok(pages) if is_last => {
                // Copied first, because no step after it can fail.
                let pages = pages.to_vec();
                let kept = map.confirm(&run, run.first_index, run.pages);
                kept.map_err(|source| reader.corrupt(space, *next_index, source))?;
                pipe.write_all(&pages)?;
            }
            Ok(pages) => {
                let written = pipe.write_all(pages);
                // The pipe may contain zeros in place of lost pages, so the image ends here, and the restore fails.
                map.confirm(&run, run.first_index, run.pages)
                    .map_err(|source| {
                        io::Error::other(reader.corrupt(space, *next_index, source))
                    })?;
                written?;
            }
            Err(source) => {
                let (damaged_index, intact) = Reader::before_damage(&map, &run, &source);
                pipe.write_all(intact)?;
                *next_index = damaged_index;
                return Err(reader.corrupt(space, damaged_index, source).into());
            }
        }
        *next_index = run.end_index();
    }
    Ok(())
}
