//! Out of the store without a copy in between: a checkpoint as the images that `criu restore --stream` asks for.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use permafrost_client::frontend::{self, ImageError, ImageSource, Pipe, StreamError};
use permafrost_pmem::RunKind;
use permafrost_protocol::control;
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::AddressSpace;

use super::reader::{PAGE_BYTES, ReadError, Reader};
use super::{Progress, Store, StoreError};

/// How long CRIU may take to connect once it has been promised its images.
const PATIENCE: Duration = Duration::from_secs(60);

/// What zero pages are written from.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

impl Store {
    /// Serves a checkpoint to the CRIU that connects to `listener`, until it hangs up. Every page is verified
    /// before it is given; a damaged one ends its file early, which makes the restore fail.
    ///
    /// # Errors
    /// No such checkpoint; nobody connects before `caller` hangs up; damage, by name and address.
    pub fn stream(
        &self,
        reference: &str,
        listener: OwnedFd,
        caller: &UnixStream,
        progress: Progress<'_>,
    ) -> Result<control::Exported, StoreError> {
        let reader = Reader::open(self, self.resolve(reference)?)?;
        let total_bytes = reader.record.memory_bytes;
        let served =
            frontend::accept(&UnixListener::from(listener), caller, PATIENCE).and_then(|criu| {
                frontend::stream(&criu, &reader, &mut |bytes| progress(bytes, total_bytes))
            });
        let served = served.map_err(|error| match error {
            StreamError::Source(error) => error,
            StreamError::NobodyCame => StoreError::Conflict {
                message: error.to_string(),
                hint: "",
            },
            other => StoreError::io(format!("stream {}", reader.name))(io::Error::other(
                other.to_string(),
            )),
        })?;
        Ok(control::Exported {
            checkpoint: Some(reader.record),
            files: served.files,
            bytes: served.bytes,
            origin: reader.manifest.origin,
        })
    }
}

/// What CRIU asks for, as places in the manifest.
pub(super) enum Wanted {
    Small(usize),
    Pagemap(usize),
    Pages(usize),
}

impl ImageSource for Reader {
    type Image = Wanted;
    type Error = StoreError;

    fn find(&self, name: &str) -> Option<Wanted> {
        if let Some(at) = self
            .manifest
            .images
            .iter()
            .position(|image| image.name == name)
        {
            return Some(Wanted::Small(at));
        }
        let spaces = &self.manifest.spaces;
        match ImageName::parse(name) {
            ImageName::Pagemap(id) => spaces
                .iter()
                .position(|space| space.space_type() == id.space_type && space.id == id.id)
                .map(Wanted::Pagemap),
            ImageName::Pages(id) => spaces
                .iter()
                .position(|space| space.pages_id == id)
                .map(Wanted::Pages),
            _ => None,
        }
    }

    fn write(&self, wanted: &Wanted, pipe: &mut Pipe) -> Result<u64, ImageError<StoreError>> {
        match *wanted {
            Wanted::Small(at) => {
                let image = &self.manifest.images[at];
                self.small(image, |bytes| pipe.write_all(bytes))
                    .map_err(|error| match error {
                        ReadError::Store(error) => ImageError::Source(error),
                        ReadError::Sink(error) => ImageError::Out(error),
                    })?;
                Ok(image.len_bytes)
            }
            Wanted::Pagemap(at) => {
                let pagemap = self
                    .pagemap(&self.manifest.spaces[at])
                    .map_err(ImageError::Source)?;
                pipe.write_all(&pagemap)?;
                Ok(pagemap.len() as u64)
            }
            Wanted::Pages(at) => write_pages(self, &self.manifest.spaces[at], pipe),
        }
    }
}

fn write_pages(
    reader: &Reader,
    space: &AddressSpace,
    pipe: &mut Pipe,
) -> Result<u64, ImageError<StoreError>> {
    let map = reader.map(space).map_err(ImageError::Source)?;
    let corrupt = |index, source| ImageError::Source(reader.corrupt(space, index, source));
    let total = space.pages * PAGE_BYTES;
    let mut written = 0;
    for run in map.runs() {
        let run = run.map_err(|source| corrupt(0, source))?;
        let bytes = u64::from(run.pages) * PAGE_BYTES;
        written += bytes;
        // Spliced pages are the region's own, which may change hands once the checkpoint is let go. So the last
        // ones, a pipe full, are copied: when they are in, CRIU has read all that were not.
        let spliced = if total.saturating_sub(written) >= pipe.capacity_bytes() {
            map.splice_source(&run)
                .map_err(|source| corrupt(run.first_index, source))?
        } else {
            None
        };
        match (spliced, &run.kind) {
            (Some((file, at)), _) => pipe.splice(file, at, bytes)?,
            (None, RunKind::Zero) => write_zeros(pipe, bytes)?,
            (None, RunKind::Stored { .. }) => {
                pipe.write_all(
                    map.read(&run)
                        .map_err(|source| corrupt(run.first_index, source))?,
                )?;
            }
        }
    }
    Ok(written)
}

fn write_zeros(pipe: &mut Pipe, mut bytes: u64) -> io::Result<()> {
    while bytes > 0 {
        let chunk = usize::try_from(bytes)
            .unwrap_or(usize::MAX)
            .min(ZEROS.len());
        pipe.write_all(&ZEROS[..chunk])?;
        bytes -= chunk as u64;
    }
    Ok(())
}
