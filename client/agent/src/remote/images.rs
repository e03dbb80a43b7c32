//! Serves a restoring CRIU, or an export, from a checkpoint that nodes hold.

use std::io::{self, Write};

use permafrost_criu::directory::{Exportable, PageRun, PagesFile};
use permafrost_criu::frontend::{ImageSource, Pipe, RequestedImage, ServeImageError};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;

use super::checkpoint::PAGE_BYTES;
use super::{MapDigest, ReadError, RemoteCheckpoint};

impl Exportable for RemoteCheckpoint {
    type Error = control::Error;

    fn record(&self) -> &control::Checkpoint {
        self.record()
    }

    fn manifest(&self) -> &Manifest {
        self.manifest()
    }

    fn small(
        &self,
        place: usize,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ServeImageError<control::Error>> {
        Ok(self.image(place, sink)?)
    }

    fn pagemap(&self, place: usize) -> Result<Vec<u8>, control::Error> {
        self.pagemap(place)
    }

    fn pages(
        &self,
        place: usize,
        file: &mut PagesFile,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ServeImageError<control::Error>> {
        let written = self.pages(place, 0, MapDigest::default(), |run| {
            file.put(run)?;
            progress(file.at);
            Ok(())
        });
        Ok(written?)
    }
}

impl From<ReadError<io::Error>> for ServeImageError<control::Error> {
    fn from(error: ReadError<io::Error>) -> Self {
        match error {
            ReadError::Holders(error) => Self::Source(error),
            ReadError::Taker(error) => Self::Out(error),
        }
    }
}

impl ImageSource for RemoteCheckpoint {
    type Image = RequestedImage;
    type Error = control::Error;

    fn find(&self, name: &str) -> Option<RequestedImage> {
        RequestedImage::find(self.manifest(), name)
    }

    fn write(
        &self,
        wanted: &RequestedImage,
        pipe: &mut Pipe,
    ) -> Result<u64, ServeImageError<control::Error>> {
        match *wanted {
            RequestedImage::Small(place) => {
                self.image(place, |piece| pipe.write_all(piece))?;
                Ok(self.manifest().images[place].len_bytes)
            }
            RequestedImage::Pagemap(place) => {
                let pagemap = self.pagemap(place).map_err(ServeImageError::Source)?;
                pipe.write_all(&pagemap)?;
                Ok(pagemap.len() as u64)
            }
            RequestedImage::Pages(place) => {
                let written = self.pages(place, 0, MapDigest::default(), |run| match run {
                    PageRun::Pages { bytes, .. } => pipe.write_all(bytes),
                    PageRun::Zero { pages, .. } => pipe.write_zeros(pages * PAGE_BYTES),
                });
                written?;
                Ok(self.manifest().spaces[place].pages * PAGE_BYTES)
            }
        }
    }
}
