//! Writes a checkpoint as an ordinary CRIU images directory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control;
use permafrost_protocol::images::{pagemap_name, pages_name};
use permafrost_protocol::pageserver::SpaceId;

use super::{DirectoryError, ImagesDir};
use crate::ProgressReceiver;
use crate::source::{CheckpointSource, PageRun, PagesOut, ReadError};

/// A pages file under construction.
pub struct PagesFile {
    /// Open pages file.
    pub file: File,
    /// Offset of the next page, bytes. There may be pages behind it already.
    pub at: u64,
}

impl PagesFile {
    /// Writes a run of pages; zero pages are left as a hole.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn put(&mut self, run: PageRun<'_>) -> io::Result<()> {
        match run {
            PageRun::Pages { bytes, .. } => {
                self.file.write_all_at(&bytes, self.at)?;
                self.at += bytes.len() as u64;
            }
            PageRun::Zero { pages, .. } => self.at += pages * PAGE_BYTES,
        }
        Ok(())
    }
}

/// Writes a checkpoint into `directory`: the small images byte for byte, the pages in the files that CRIU would
/// have made, zero pages as holes. On failure, the files written so far are removed.
///
/// # Errors
/// A part cannot be read; a file exists already or cannot be written.
pub fn export<S: CheckpointSource<Error: From<DirectoryError>>>(
    source: &S,
    small_images_only: bool,
    directory: OwnedFd,
    progress: ProgressReceiver<'_>,
) -> Result<control::Exported, S::Error> {
    let mut export = Export {
        source,
        directory: ImagesDir::new(directory)?,
        total_bytes: if small_images_only {
            0
        } else {
            source.record().memory_bytes
        },
        done_bytes: 0,
        written_bytes: 0,
        created: Vec::new(),
    };
    if let Err(error) = export.all(small_images_only, progress) {
        export.undo();
        return Err(error);
    }
    Ok(control::Exported {
        checkpoint: Some(source.record().clone()),
        files: export.created.len() as u64,
        bytes: export.written_bytes,
        origin: source.manifest().origin.clone(),
    })
}

struct Export<'a, S> {
    source: &'a S,
    directory: ImagesDir,
    total_bytes: u64,
    done_bytes: u64,
    written_bytes: u64,
    /// Names of the files made so far.
    created: Vec<String>,
}

impl<S: CheckpointSource<Error: From<DirectoryError>>> Export<'_, S> {
    fn all(
        &mut self,
        small_images_only: bool,
        progress: ProgressReceiver<'_>,
    ) -> Result<(), S::Error> {
        // The inventory is written last, because no program takes a directory without it for images.
        let images = &self.source.manifest().images;
        let is_last = |place: &usize| images[*place].name == "inventory.img";
        let (last, first): (Vec<_>, Vec<_>) = (0..images.len()).partition(is_last);
        for place in first {
            self.small(place)?;
        }
        if !small_images_only {
            for place in 0..self.source.manifest().spaces.len() {
                self.space(place, progress)?;
            }
        }
        for place in last {
            self.small(place)?;
        }
        Ok(())
    }

    /// Removes the files made so far: half a checkpoint, or one with holes in place of damage, must not be
    /// taken for a whole one.
    fn undo(&self) {
        for name in &self.created {
            if let Err(error) = self.directory.remove(name) {
                tracing::warn!(name, %error, "image not removed");
            }
        }
    }

    fn create(&mut self, name: &str) -> Result<File, S::Error> {
        let file = self.directory.create(name)?;
        self.created.push(name.to_owned());
        Ok(file)
    }

    fn small(&mut self, place: usize) -> Result<(), S::Error> {
        let image = &self.source.manifest().images[place];
        let file = self.create(&image.name)?;
        let mut at = 0;
        let written = self.source.small(place, &mut |bytes| {
            file.write_all_at(bytes, at)?;
            at += bytes.len() as u64;
            Ok(())
        });
        written.map_err(|error| told(error, &image.name))?;
        self.written_bytes += at;
        Ok(())
    }

    fn space(&mut self, place: usize, progress: ProgressReceiver<'_>) -> Result<(), S::Error> {
        let space = &self.source.manifest().spaces[place];
        let pagemap = self.source.pagemap(place)?;
        let name = pagemap_name(SpaceId {
            space_type: space.space_type(),
            id: space.id,
        });
        let file = self.create(&name)?;
        let written = file.write_all_at(&pagemap, 0);
        written.map_err(DirectoryError::io(format!("write image {name}")))?;

        let name = pages_name(space.pages_id);
        let mut pages = PagesFile {
            file: self.create(&name)?,
            at: 0,
        };
        let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
        let mut done = |bytes| progress(done_bytes + bytes, total_bytes);
        let mut out = PagesOut::File(&mut pages, &mut done);
        let written = self.source.pages(place, &mut out);
        written.map_err(|error| told(error, &name))?;
        // Zero pages at the end are a hole, too.
        let sized = pages.file.set_len(pages.at);
        sized.map_err(DirectoryError::io(format!("write image {name}")))?;
        self.done_bytes += pages.at;
        self.written_bytes += pages.at + pagemap.len() as u64;
        Ok(())
    }
}

fn told<E: From<DirectoryError>>(error: ReadError<E>, name: &str) -> E {
    match error {
        ReadError::Source(error) => error,
        ReadError::Taker(error) => DirectoryError::io(format!("write image {name}"))(error).into(),
    }
}
