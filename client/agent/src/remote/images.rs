//! A checkpoint that nodes hold, as a restoring CRIU or an export reads it.

use std::io;

use permafrost_criu::frontend::ServeImageError;
use permafrost_criu::source::{CheckpointSource, PagesOut};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;

use super::{MapDigest, ReadError, RemoteCheckpoint};

impl CheckpointSource for RemoteCheckpoint {
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
        out: &mut PagesOut<'_>,
    ) -> Result<(), ServeImageError<control::Error>> {
        let before = MapDigest::default();
        Ok(self.pages(place, 0, before, |run| out.put(run))?)
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
