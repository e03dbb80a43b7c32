//! Imports an ordinary CRIU images directory as a checkpoint.

use std::os::fd::OwnedFd;

use permafrost_criu::directory::{ImagesDir, PagesReader, PagesTarget};
use permafrost_protocol::control;
use permafrost_protocol::pageserver::SpaceId;

use super::dump::DumpBuilder;
use super::images::{DirectoryImages, store_small};
use super::seal::{Contents, check_images_fit, kind_of};
use super::{ProgressReceiver, Store, StoreError, check_job};
use crate::Durability;

impl Store {
    /// Reads a CRIU images directory as the next checkpoint of a job. Pages that an incremental dump left in its
    /// `parent` directories are read from there.
    ///
    /// # Errors
    /// A file is missing, damaged or short; the job has a dump under way; the region is full or fails.
    pub fn import(
        &self,
        job: &str,
        no_parent: bool,
        durability: Option<Durability>,
        taken_by: &str,
        directory: OwnedFd,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Checkpoint, StoreError> {
        check_job(job)?;
        self.check_may_store(job, 1, 1)?;
        let _guard = self.lock_job(job, "an import")?;
        let parent = if no_parent {
            None
        } else {
            self.parent_of(job)?
        };
        let parent_generation = parent
            .as_ref()
            .map_or(0, |parent| parent.manifest.generation);
        let directory = ImagesDir::new(directory)?;
        let pages = PagesReader::open(&directory)?;

        // No frozen task waits for an import, and it has no session: it gets an id for its copies alone.
        let session = uuid::Uuid::new_v4();
        let copies = self.begin_copies(*session.as_bytes(), job, parent.as_ref(), durability)?;
        let copied = copies.is_some();
        let mut builder = DumpBuilder::new(&self.region, parent, copies);
        let mut import = Import {
            builder: &mut builder,
            done_bytes: 0,
            total_bytes: pages.total_bytes(),
            progress,
        };
        pages.read(&mut import)?;

        let mut dump = builder.finish()?;
        let images = store_small(
            &mut DirectoryImages::new(directory, &dump.spaces)?,
            &mut dump.shadow,
            dump.copies.as_deref_mut(),
        )?;
        let kind = kind_of(&images);
        check_images_fit(kind, &images, &dump.spaces).map_err(StoreError::Import)?;
        let contents = Contents {
            commit_deadline: self.commit_deadline(),
            job: job.to_owned(),
            kind,
            parent_generation,
            origin: None,
            images,
            spaces: dump.spaces,
            session: if copied {
                session.simple().to_string()
            } else {
                String::new()
            },
            taken_by: taken_by.to_owned(),
        };
        self.commit(dump.shadow, contents, dump.copies, None, &|| true)
    }
}

struct Import<'a, 'p> {
    builder: &'a mut DumpBuilder,
    done_bytes: u64,
    total_bytes: u64,
    progress: ProgressReceiver<'p>,
}

impl PagesTarget for Import<'_, '_> {
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
