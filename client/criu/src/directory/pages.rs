//! Pages of a CRIU images directory, one address space after another. Those that an incremental dump left in its
//! `parent` directories are read from there.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::images::{ImageName, Pagemap, pages_name};
use permafrost_protocol::pageserver::{PE_PARENT, PE_PRESENT, SpaceId};

use super::{DirectoryError, ImagesDir};

/// Bytes read at once from a pages file.
const CHUNK_BYTES: u64 = 256 << 10;

/// Longest pagemap read. CRIU writes some 20 bytes for each stretch of pages, so this is the pagemap of a memory
/// of terabytes.
const MAX_PAGEMAP_BYTES: u64 = 256 << 20;

/// Deepest chain of `parent` links followed: each has a pages file and a directory open.
const MAX_PARENTS: usize = 256;

/// Destination of the pages.
pub trait PagesTarget {
    /// Type of the errors of the target and of the directory.
    type Error: From<DirectoryError>;

    /// Begins an address space; `pages_id` is the N of its `pages-N.img`.
    ///
    /// # Errors
    /// Any error; it ends the reading.
    fn space(&mut self, space: SpaceId, pages_id: u32) -> Result<(), Self::Error>;

    /// Takes whole pages at `vaddr` of the space begun last, in ascending order.
    ///
    /// # Errors
    /// Any error; it ends the reading.
    fn pages(&mut self, vaddr: u64, flags: u16, bytes: &[u8]) -> Result<(), Self::Error>;
}

/// Pagemaps of a directory, with the pages files that belong to them.
pub struct PagesReader<'a> {
    directory: &'a ImagesDir,
    spaces: Vec<(SpaceId, Layer, String)>,
}

impl<'a> PagesReader<'a> {
    /// Reads the pagemaps.
    ///
    /// # Errors
    /// A file is missing, damaged or short.
    pub fn open(directory: &'a ImagesDir) -> Result<Self, DirectoryError> {
        let mut spaces = Vec::new();
        for name in directory.files()? {
            if let ImageName::Pagemap(space) = ImageName::parse(&name) {
                spaces.push((space, Layer::open(directory, &name)?, name));
            }
        }
        Ok(Self { directory, spaces })
    }

    /// Returns the size of all pages, bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let entries = self.spaces.iter().flat_map(|(_, layer, _)| &layer.entries);
        entries.fold(0, |sum, entry| {
            sum.saturating_add(entry.nr_pages.saturating_mul(PAGE_BYTES))
        })
    }

    /// Passes all pages to `target`.
    ///
    /// # Errors
    /// An error of the target; a page that no directory has, or that cannot be read.
    pub fn read<T: PagesTarget>(self, target: &mut T) -> Result<(), T::Error> {
        for (space, layer, name) in self.spaces {
            target.space(space, layer.pages_id)?;
            let mut chain = Chain {
                layers: vec![layer],
                directories: Vec::new(),
                name: &name,
            };
            for at in 0..chain.layers[0].entries.len() {
                let entry = chain.layers[0].entries[at];
                chain.read(
                    self.directory,
                    0,
                    entry.vaddr,
                    entry.nr_pages,
                    entry.flags,
                    target,
                )?;
            }
        }
        Ok(())
    }
}

/// One pagemap with its pages file.
struct Layer {
    pages_id: u32,
    entries: Vec<Entry>,
    pages: File,
}

/// A pagemap entry, and the position of its pages.
#[derive(Clone, Copy)]
struct Entry {
    vaddr: u64,
    nr_pages: u64,
    flags: u16,
    /// Offset in the pages file; meaningless unless the pages are present.
    at: u64,
}

impl Layer {
    fn open(directory: &ImagesDir, name: &str) -> Result<Self, DirectoryError> {
        let mut bytes = Vec::new();
        let file = directory.open(name)?;
        file.take(MAX_PAGEMAP_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(DirectoryError::io(format!("read image {name}")))?;
        if bytes.len() as u64 > MAX_PAGEMAP_BYTES {
            return Err(invalid(format!(
                "{name} is longer than {MAX_PAGEMAP_BYTES} bytes"
            )));
        }
        let pagemap = Pagemap::read(&bytes).map_err(|error| invalid(format!("{name}: {error}")))?;
        let pages_name = pages_name(pagemap.pages_id);
        let pages = directory.open(&pages_name)?;
        let mut at = 0_u64;
        let mut entries = Vec::with_capacity(pagemap.entries.len());
        for entry in &pagemap.entries {
            entries.push(Entry {
                vaddr: entry.vaddr,
                nr_pages: entry.nr_pages,
                flags: entry.flags,
                at,
            });
            if entry.flags & PE_PRESENT != 0 {
                at = at.saturating_add(entry.nr_pages * PAGE_BYTES);
            }
        }
        let held = pages
            .metadata()
            .map_err(DirectoryError::io(format!("stat {pages_name}")))?
            .len();
        if held < at {
            return Err(invalid(format!(
                "{pages_name} has {held} bytes, {name} tells of {at}"
            )));
        }
        Ok(Self {
            pages_id: pagemap.pages_id,
            entries,
            pages,
        })
    }

    /// Returns the entry that holds `vaddr`.
    fn find(&self, vaddr: u64) -> Option<Entry> {
        let after = self.entries.partition_point(|entry| entry.vaddr <= vaddr);
        let entry = *self.entries.get(after.checked_sub(1)?)?;
        (vaddr - entry.vaddr < entry.nr_pages * PAGE_BYTES).then_some(entry)
    }
}

/// A pagemap, and the pagemaps of the same name in the parent directories, opened as they are needed.
struct Chain<'a> {
    layers: Vec<Layer>,
    directories: Vec<ImagesDir>,
    name: &'a str,
}

impl Chain<'_> {
    /// Passes on `nr_pages` pages at `vaddr`, as layer `depth` has them.
    fn read<T: PagesTarget>(
        &mut self,
        top: &ImagesDir,
        depth: usize,
        vaddr: u64,
        nr_pages: u64,
        flags: u16,
        target: &mut T,
    ) -> Result<(), T::Error> {
        let mut at = vaddr;
        let end = nr_pages
            .checked_mul(PAGE_BYTES)
            .and_then(|len| vaddr.checked_add(len))
            .ok_or_else(|| invalid(format!("{}: {nr_pages} pages at {vaddr:#x}", self.name)))?;
        while at < end {
            let missing = || {
                invalid(format!(
                    "{}: page {at:#x} is left to a parent that lacks it",
                    self.name
                ))
            };
            let entry = self.layers[depth].find(at).ok_or_else(missing)?;
            let stretch = (entry.nr_pages * PAGE_BYTES - (at - entry.vaddr)).min(end - at);
            if entry.flags & PE_PRESENT != 0 {
                let from = entry.at + (at - entry.vaddr);
                copy(&self.layers[depth].pages, from, stretch, |done, bytes| {
                    target.pages(at + done, flags & !PE_PARENT | PE_PRESENT, bytes)
                })?;
            } else if entry.flags & PE_PARENT != 0 {
                self.open_parent(top, depth)?;
                self.read(top, depth + 1, at, stretch / PAGE_BYTES, flags, target)?;
            } else {
                return Err(T::Error::from(invalid(format!(
                    "{}: pages at {at:#x} are neither here nor in a parent (a lazy dump whose pages never came)",
                    self.name
                ))));
            }
            at += stretch;
        }
        Ok(())
    }

    fn open_parent(&mut self, top: &ImagesDir, depth: usize) -> Result<(), DirectoryError> {
        if self.layers.len() > depth + 1 {
            return Ok(());
        }
        if depth >= MAX_PARENTS {
            return Err(invalid(format!(
                "more than {MAX_PARENTS} parent directories"
            )));
        }
        let directory = self.directories.last().unwrap_or(top);
        let parent = directory.parent()?.ok_or_else(|| {
            let name = self.name;
            invalid(format!(
                "{name}: pages are in a parent directory, and there is no link `parent`"
            ))
        })?;
        let identity = parent.identity()?;
        for earlier in std::iter::once(top).chain(&self.directories) {
            if earlier.identity()? == identity {
                return Err(invalid("the links `parent` lead in a circle".to_owned()));
            }
        }
        self.layers.push(Layer::open(&parent, self.name)?);
        self.directories.push(parent);
        Ok(())
    }
}

/// Passes on `len` bytes of pages at `from`, chunk by chunk.
fn copy<E: From<DirectoryError>>(
    pages: &File,
    from: u64,
    len: u64,
    mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut buffer = vec![0_u8; usize::try_from(CHUNK_BYTES.min(len)).unwrap_or(1 << 12)];
    let mut done = 0;
    while done < len {
        let chunk = buffer
            .len()
            .min(usize::try_from(len - done).unwrap_or(usize::MAX));
        let bytes = &mut buffer[..chunk];
        pages
            .read_exact_at(bytes, from + done)
            .map_err(DirectoryError::io("read pages image"))?;
        take(done, bytes)?;
        done += chunk as u64;
    }
    Ok(())
}

fn invalid(message: String) -> DirectoryError {
    DirectoryError::Invalid { message }
}
