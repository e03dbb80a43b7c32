//! Imports an ordinary CRIU images directory as a checkpoint.

use std::os::fd::OwnedFd;

use permafrost_criu::directory::{ImagesDir, PagesReader, PagesTarget};
use permafrost_protocol::control;
use permafrost_protocol::pageserver::SpaceId;

use super::dump::{DumpBuilder, tap_of};
use super::images::{DirectoryImages, store_small};
use super::seal::{DumpContents, check_images_fit, kind_of};
use super::{Parent, ProgressReceiver, Store, StoreError};
use crate::Follower;

/// An images directory that is to become the next checkpoint of a job.
pub struct DirectoryImport<'a> {
    /// Job of the checkpoint.
    pub job: &'a str,
    /// Checkpoint that it is compared with; `None` for none.
    pub parent: Option<Parent>,
    /// Follower of the dump, begun with the same parent.
    pub follower: Option<Box<dyn Follower>>,
    /// Session id, 32 hex digits; empty for none.
    pub session: String,
    /// Client that imports it, as it was authenticated.
    pub taken_by: &'a str,
}

impl Store {
    /// Reads a CRIU images directory as the next checkpoint of a job. Pages that an incremental dump left in its
    /// `parent` directories are read from there. The caller holds the lock on the job.
    ///
    /// # Errors
    /// A file is missing, damaged or short; the region is full or fails.
    pub fn import(
        &self,
        import: DirectoryImport<'_>,
        directory: OwnedFd,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Checkpoint, StoreError> {
        let DirectoryImport {
            job,
            parent,
            follower,
            session,
            taken_by,
        } = import;
        let parent_generation = parent.as_ref().map_or(0, Parent::generation);
        let directory = ImagesDir::new(directory)?;
        let pages = PagesReader::open(&directory)?;

        if parent.is_none() {
            self.refresh_shared(job);
        }
        let builder = DumpBuilder::new(self.begin_shadow(job)?, parent, follower);
        let mut builder = builder.sharing(self.page_finder(job));
        let mut reading = Reading {
            builder: &mut builder,
            done_bytes: 0,
            total_bytes: pages.total_bytes(),
            progress,
        };
        pages.read(&mut reading)?;

        let mut dump = builder.finish()?;
        let images = store_small(
            &mut DirectoryImages::new(directory, &dump.spaces)?,
            &mut dump.shadow,
            tap_of(&mut dump.follower),
        )?;
        let kind = kind_of(&images);
        check_images_fit(kind, &images, &dump.spaces).map_err(StoreError::Import)?;
        let contents = DumpContents {
            job: job.to_owned(),
            kind,
            parent_generation,
            origin: None,
            images,
            spaces: dump.spaces,
            session,
            taken_by: taken_by.to_owned(),
        };
        self.commit(dump.shadow, contents, dump.follower, None, &|| true)
    }
}

struct Reading<'a, 'p> {
    builder: &'a mut DumpBuilder,
    done_bytes: u64,
    total_bytes: u64,
    progress: ProgressReceiver<'p>,
}

impl PagesTarget for Reading<'_, '_> {
    type Error = StoreError;

    fn space(&mut self, space: SpaceId, pages_id: u32) -> Result<(), StoreError> {
        self.builder.open(space, Some(pages_id)).map(drop)
    }

    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), StoreError> {
        self.builder.pages(vaddr, flags, bytes)?;
        self.done_bytes += bytes.len() as u64;
        (self.progress)(self.done_bytes, self.total_bytes);
        Ok(())
    }
}
