//! Writes a checkpoint as an ordinary CRIU images directory.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::{self, request};
use permafrost_protocol::images::{
    ImageError, Pagemap, PagemapEntry, PagemapWriter, mm_name, pagemap_name, pages_name,
    read_mappings,
};
use permafrost_protocol::manifest::{AddressSpace, SpaceType};
use permafrost_protocol::pageserver::{PE_LAZY, SpaceId};

use super::{DirectoryError, ImagesDir};
use crate::ProgressReceiver;
use crate::source::{CheckpointSource, PageRun, PagesOut, ReadError, small_image};

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

/// Part of a checkpoint that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportedPart {
    /// The small images, no pagemaps and no pages.
    SmallImages,
    /// Everything but the pages that a lazy restore gets later; the pagemaps list those without `PE_PRESENT`.
    WithoutLazyPages,
    /// All images, pagemaps and pages.
    All,
}

impl ExportedPart {
    /// Returns the part that a request asks for.
    #[must_use]
    pub fn of(export: &request::Export) -> Self {
        if export.small_images_only {
            Self::SmallImages
        } else if export.without_lazy_pages {
            Self::WithoutLazyPages
        } else {
            Self::All
        }
    }
}

/// Writes a checkpoint into `directory`: the small images byte for byte, the pages in the files that CRIU would
/// have made, zero pages as holes. On failure, the files written so far are removed.
///
/// # Errors
/// A part cannot be read; a file exists already or cannot be written.
pub fn export<S: CheckpointSource<Error: From<DirectoryError>>>(
    source: &S,
    part: ExportedPart,
    directory: OwnedFd,
    progress: ProgressReceiver<'_>,
) -> Result<control::Exported, S::Error> {
    let mut export = Export {
        source,
        directory: ImagesDir::new(directory)?,
        total_bytes: match part {
            ExportedPart::All => source.record().memory_bytes,
            ExportedPart::SmallImages | ExportedPart::WithoutLazyPages => 0,
        },
        done_bytes: 0,
        written_bytes: 0,
        created: Vec::new(),
    };
    if let Err(error) = export.all(part, progress) {
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
    fn all(&mut self, part: ExportedPart, progress: ProgressReceiver<'_>) -> Result<(), S::Error> {
        // The inventory is written last, because no program takes a directory without it for images.
        let images = &self.source.manifest().images;
        let is_last = |place: &usize| images[*place].name == "inventory.img";
        let (last, first): (Vec<_>, Vec<_>) = (0..images.len()).partition(is_last);
        for place in first {
            self.small(place)?;
        }
        let spaces = &self.source.manifest().spaces;
        for (place, space) in spaces.iter().enumerate() {
            match part {
                ExportedPart::SmallImages => break,
                // CRIU restores shared memory at once.
                ExportedPart::WithoutLazyPages if space.space_type() == SpaceType::Process => {
                    self.without_lazy_pages(place)?;
                }
                ExportedPart::WithoutLazyPages | ExportedPart::All => {
                    self.space(place, progress)?
                }
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
                tracing::warn!(event = "image-not-removed", name, %error, "image not removed");
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

    /// Writes the pages of an address space that a lazy restore needs at once, and a pagemap that leaves out the others.
    fn without_lazy_pages(&mut self, place: usize) -> Result<(), S::Error> {
        let space = &self.source.manifest().spaces[place];
        let (pagemap_name, pages_name) = names(space);
        let invalid = |name: &str, error: ImageError| DirectoryError::Invalid {
            message: format!("{name}: {error}"),
        };
        let pagemap = Pagemap::read(&self.source.pagemap(place)?);
        let mut pagemap = pagemap.map_err(|error| invalid(&pagemap_name, error))?;
        let pid = u32::try_from(space.id).map_err(|_| DirectoryError::Invalid {
            message: format!("{pagemap_name}: {} is not a pid", space.id),
        })?;
        let mm_name = mm_name(pid);
        let image = small_image(self.source, &mm_name).map_err(|error| told(error, &mm_name))?;
        let mappings = image.as_deref().map(read_mappings).transpose();
        let mappings = mappings.map_err(|error| invalid(&mm_name, error))?;
        pagemap.mark_lazy(&mappings.unwrap_or_default());
        let mut pages = PagesFile {
            file: self.create(&pages_name)?,
            at: 0,
        };
        let mut written = PagemapWriter::new(space.pages_id);
        for entry in pagemap.entries {
            if entry.flags & PE_LAZY != 0 {
                written.push(PagemapEntry {
                    flags: PE_LAZY,
                    ..entry
                });
                continue;
            }
            written.push(entry);
            let first_index = entry.vaddr / PAGE_BYTES;
            let mut next_index = first_index;
            let read = self
                .source
                .range(place, first_index, entry.nr_pages, &mut |run| {
                    let (first_index, pages_of_run) = run.span();
                    if first_index != next_index {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    next_index += pages_of_run;
                    pages.put(run)
                });
            read.map_err(|error| told(error, &pages_name))?;
            if next_index != first_index + entry.nr_pages {
                return Err(DirectoryError::Invalid {
                    message: format!(
                        "{pages_name}: the source lacks the page at {:#x}",
                        next_index * PAGE_BYTES
                    ),
                }
                .into());
            }
        }
        let sized = pages.file.set_len(pages.at);
        sized.map_err(DirectoryError::io(format!("write image {pages_name}")))?;
        let pagemap = written.finish();
        let stored = self.create(&pagemap_name)?.write_all_at(&pagemap, 0);
        stored.map_err(DirectoryError::io(format!("write image {pagemap_name}")))?;
        self.written_bytes += pages.at + pagemap.len() as u64;
        Ok(())
    }

    fn space(&mut self, place: usize, progress: ProgressReceiver<'_>) -> Result<(), S::Error> {
        let space = &self.source.manifest().spaces[place];
        let pagemap = self.source.pagemap(place)?;
        let (pagemap_name, name) = names(space);
        let file = self.create(&pagemap_name)?;
        let written = file.write_all_at(&pagemap, 0);
        written.map_err(DirectoryError::io(format!("write image {pagemap_name}")))?;

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

/// Returns the names of the pagemap and of the pages file of an address space.
fn names(space: &AddressSpace) -> (String, String) {
    let id = SpaceId {
        space_type: space.space_type(),
        id: space.id,
    };
    (pagemap_name(id), pages_name(space.pages_id))
}

fn told<E: From<DirectoryError>>(error: ReadError<E>, name: &str) -> E {
    match error {
        ReadError::Source(error) => error,
        ReadError::Taker(error) => DirectoryError::io(format!("write image {name}"))(error).into(),
    }
}
