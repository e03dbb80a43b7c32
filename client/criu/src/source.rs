//! A stored checkpoint, as restores and exports read it.

use std::borrow::Cow;
use std::io::{self, Write as _};

use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::{PAGE_BYTES, control};

use crate::directory::PagesFile;
use crate::frontend::Pipe;

/// A checkpoint that can be read: one copy of it, or several of which one continues where another fails. Parts are
/// named by their places in the manifest. Every byte is verified before it is passed on.
pub trait CheckpointSource {
    /// Type of the error when a part cannot be read.
    type Error;

    /// Returns the checkpoint's record, as listings show it.
    fn record(&self) -> &control::Checkpoint;

    /// Returns the checkpoint's manifest.
    fn manifest(&self) -> &Manifest;

    /// Passes a small image on, piece by piece, after all of it was verified.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn small(
        &self,
        place: usize,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError<Self::Error>>;

    /// Returns the pagemap image of an address space.
    ///
    /// # Errors
    /// The pagemap cannot be read.
    fn pagemap(&self, place: usize) -> Result<Vec<u8>, Self::Error>;

    /// Passes on the positions and checksums of an address space's pages, ascending: the first index, and the pages. Reads
    /// no pages.
    ///
    /// # Errors
    /// The map cannot be read. Some of it may have been passed on.
    fn positions(
        &self,
        place: usize,
        take: &mut dyn FnMut(u64, OutlinePages<'_>),
    ) -> Result<(), Self::Error>;

    /// Writes the pages of an address space, ascending. On damage the pages before it are written.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn pages(&self, place: usize, out: &mut PagesOut<'_>) -> Result<(), ReadError<Self::Error>>;

    /// Keeps the pages of the checkpoint for 30 s, even if it is removed. A source whose pages stay anyway does nothing.
    fn hold(&self) {}

    /// Returns true if pages come over a network, so that each request costs a round trip.
    fn is_remote(&self) -> bool {
        false
    }

    /// Passes on some pages of an address space, ascending. The pagemap lists them all; indices that it does not list
    /// are skipped.
    ///
    /// # Errors
    /// See [`ReadError`].
    fn range(
        &self,
        place: usize,
        first_index: u64,
        pages: u64,
        take: &mut dyn FnMut(PageRun<'_>) -> io::Result<()>,
    ) -> Result<(), ReadError<Self::Error>>;
}

/// A checkpoint whose pages are read in any order, by several threads, for restores that have begun without them.
pub trait LazySource: CheckpointSource<Error = control::Error> + Sync {}

impl<S: CheckpointSource<Error = control::Error> + Sync> LazySource for S {}

/// Returns a small image; `None` if the checkpoint has none of the name.
///
/// # Errors
/// See [`ReadError`].
pub fn small_image<S: CheckpointSource + ?Sized>(
    source: &S,
    name: &str,
) -> Result<Option<Vec<u8>>, ReadError<S::Error>> {
    let images = &source.manifest().images;
    let Some(place) = images.iter().position(|image| image.name == name) else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    source.small(place, &mut |part| {
        bytes.extend_from_slice(part);
        Ok(())
    })?;
    Ok(Some(bytes))
}

/// A checkpoint with its errors as the control protocol reports them.
pub struct Reported<'a, S>(pub &'a S);

impl<S: CheckpointSource<Error: Into<control::Error>>> CheckpointSource for Reported<'_, S> {
    type Error = control::Error;

    fn record(&self) -> &control::Checkpoint {
        self.0.record()
    }

    fn manifest(&self) -> &Manifest {
        self.0.manifest()
    }

    fn small(
        &self,
        place: usize,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError<control::Error>> {
        self.0.small(place, sink).map_err(ReadError::reported)
    }

    fn pagemap(&self, place: usize) -> Result<Vec<u8>, control::Error> {
        self.0.pagemap(place).map_err(Into::into)
    }

    fn positions(
        &self,
        place: usize,
        take: &mut dyn FnMut(u64, OutlinePages<'_>),
    ) -> Result<(), control::Error> {
        self.0.positions(place, take).map_err(Into::into)
    }

    fn pages(&self, place: usize, out: &mut PagesOut<'_>) -> Result<(), ReadError<control::Error>> {
        self.0.pages(place, out).map_err(ReadError::reported)
    }

    fn hold(&self) {
        self.0.hold();
    }

    fn is_remote(&self) -> bool {
        self.0.is_remote()
    }

    fn range(
        &self,
        place: usize,
        first_index: u64,
        pages: u64,
        take: &mut dyn FnMut(PageRun<'_>) -> io::Result<()>,
    ) -> Result<(), ReadError<control::Error>> {
        let read = self.0.range(place, first_index, pages, take);
        read.map_err(ReadError::reported)
    }
}

/// A read that failed, at its source or at its taker.
#[derive(Debug)]
pub enum ReadError<S, T = io::Error> {
    /// The part could not be read.
    Source(S),
    /// The taker of the data failed.
    Taker(T),
}

impl<S: Into<control::Error>> ReadError<S> {
    fn reported(self) -> ReadError<control::Error> {
        match self {
            Self::Source(error) => ReadError::Source(error.into()),
            Self::Taker(error) => ReadError::Taker(error),
        }
    }
}

impl<S> From<io::Error> for ReadError<S> {
    fn from(error: io::Error) -> Self {
        Self::Taker(error)
    }
}

/// Pages by their checksums.
#[derive(Clone, Copy, Debug)]
pub enum OutlinePages<'a> {
    /// Number of zero pages.
    Zero(u64),
    /// CRC32s of stored pages.
    Stored(&'a [u32]),
}

impl OutlinePages<'_> {
    /// Returns the number of pages.
    #[must_use]
    pub fn len(&self) -> u64 {
        match self {
            Self::Zero(pages) => *pages,
            Self::Stored(crcs) => crcs.len() as u64,
        }
    }

    /// Returns true if there are no pages.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the pages without the first `count`.
    #[must_use]
    pub fn without(self, count: u64) -> Self {
        match self {
            Self::Zero(pages) => Self::Zero(pages.saturating_sub(count)),
            Self::Stored(crcs) => {
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                Self::Stored(crcs.get(count..).unwrap_or_default())
            }
        }
    }
}

/// Some pages of an address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageRun<'a> {
    /// Pages with their contents.
    Pages {
        /// Index of the first page.
        first_index: u64,
        /// Flags of CRIU.
        flags: u16,
        /// Contents of the pages.
        bytes: Cow<'a, [u8]>,
    },
    /// Pages of zeros.
    Zero {
        /// Index of the first page.
        first_index: u64,
        /// Flags of CRIU.
        flags: u16,
        /// Number of pages.
        pages: u64,
    },
}

impl PageRun<'_> {
    /// Returns the index of the first page, and the number of pages.
    #[must_use]
    pub fn span(&self) -> (u64, u64) {
        match self {
            Self::Pages {
                first_index, bytes, ..
            } => (*first_index, bytes.len() as u64 / PAGE_BYTES),
            Self::Zero {
                first_index, pages, ..
            } => (*first_index, *pages),
        }
    }
}

/// Destination of the pages of an address space.
pub enum PagesOut<'a> {
    /// A file of an images directory; the function receives the number of bytes done.
    File(&'a mut PagesFile, &'a mut dyn FnMut(u64)),
    /// A pipe to a restoring CRIU.
    Pipe(&'a mut Pipe),
}

impl PagesOut<'_> {
    /// Writes the next pages.
    ///
    /// # Errors
    /// An error of the file or of the pipe.
    pub fn put(&mut self, run: PageRun<'_>) -> io::Result<()> {
        match (self, run) {
            (Self::File(file, progress), run) => {
                file.put(run)?;
                progress(file.at);
                Ok(())
            }
            (Self::Pipe(pipe), PageRun::Pages { bytes, .. }) => pipe.write_all(&bytes),
            (Self::Pipe(pipe), PageRun::Zero { pages, .. }) => pipe.write_zeros(pages * PAGE_BYTES),
        }
    }
}
