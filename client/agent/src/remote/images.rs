//! A checkpoint that nodes hold, as a restoring CRIU or an export reads it.

use std::io;

use permafrost_criu::source::{CheckpointSource, OutlinePages, PageRun, PagesOut, ReadError};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;

use super::{MapDigest, RemoteCheckpoint};

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
    ) -> Result<(), ReadError<control::Error>> {
        self.image(place, sink)
    }

    fn pagemap(&self, place: usize) -> Result<Vec<u8>, control::Error> {
        self.pagemap(place)
    }

    fn positions(
        &self,
        place: usize,
        take: &mut dyn FnMut(u64, OutlinePages<'_>),
    ) -> Result<(), control::Error> {
        self.outline(place)?.each(take);
        Ok(())
    }

    fn pages(&self, place: usize, out: &mut PagesOut<'_>) -> Result<(), ReadError<control::Error>> {
        let before = MapDigest::default();
        self.pages(place, 0, before, |run| out.put(run))
    }

    fn hold(&self) {
        self.hold();
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn range(
        &self,
        place: usize,
        first_index: u64,
        pages: u64,
        take: &mut dyn FnMut(PageRun<'_>) -> io::Result<()>,
    ) -> Result<(), ReadError<control::Error>> {
        let range = first_index..first_index.saturating_add(pages);
        self.verified_part(place, range, take)
    }
}
