//! Into the store: an ordinary CRIU images directory as a checkpoint.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use permafrost_client::directory::ImagesDir;
use permafrost_pmem::PAGE_SIZE;
use permafrost_protocol::control;
use permafrost_protocol::images::{ImageName, Pagemap, pages_name};
use permafrost_protocol::pageserver::{PE_PARENT, PE_PRESENT};

use super::dump::DumpBuilder;
use super::images::store_small;
use super::seal::{Contents, check_images_fit, kind_of};
use super::{Progress, Store, StoreError, check_job};
use crate::replication::Durability;

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Read at once from a pages file.
const CHUNK_BYTES: u64 = 256 << 10;

/// Longest pagemap read. CRIU writes some 20 bytes for each stretch of pages, so this is the pagemap of a memory
/// of terabytes.
const MAX_PAGEMAP_BYTES: u64 = 256 << 20;

/// Deepest chain of `parent` links followed: each has a pages file and a directory open.
const MAX_PARENTS: usize = 256;

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
        directory: OwnedFd,
        progress: Progress<'_>,
    ) -> Result<control::Checkpoint, StoreError> {
        check_job(job)?;
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
        let files = directory.files()?;

        // Nobody waits frozen for an import, and it has no session: it gets an id for its copies alone.
        let session = uuid::Uuid::new_v4();
        let copies = self.begin_copies(*session.as_bytes(), job, parent.as_ref(), durability)?;
        let copied = copies.is_some();
        let mut builder = DumpBuilder::new(&self.region, parent, copies);
        let mut import = Import {
            builder: &mut builder,
            done_bytes: 0,
            total_bytes: 0,
            progress,
        };
        let mut layers = Vec::new();
        for name in &files {
            if let ImageName::Pagemap(space) = ImageName::parse(name) {
                let layer = Layer::open(&directory, name)?;
                import.total_bytes = layer.entries.iter().fold(import.total_bytes, |sum, entry| {
                    sum.saturating_add(entry.nr_pages * PAGE_BYTES)
                });
                layers.push((space, layer, name));
            }
        }
        for (space, layer, name) in layers {
            import.builder.open(space, Some(layer.pages_id))?;
            import.space(&directory, layer, name)?;
        }

        let mut dump = builder.finish()?;
        let images = store_small(
            &directory,
            &mut dump.shadow,
            &dump.spaces,
            dump.copies.as_deref_mut(),
        )?;
        let kind = kind_of(&images);
        check_images_fit(
            kind,
            &images,
            &dump.spaces,
            "name a directory that criu dump wrote with its pages, not by --page-server",
        )?;
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
        };
        self.commit(dump.shadow, contents, dump.copies, None, &|| true)
    }
}

struct Import<'a, 'p> {
    builder: &'a mut DumpBuilder,
    done_bytes: u64,
    total_bytes: u64,
    progress: Progress<'p>,
}

impl Import<'_, '_> {
    fn space(&mut self, directory: &ImagesDir, layer: Layer, name: &str) -> Result<(), StoreError> {
        let mut chain = Chain {
            layers: vec![layer],
            directories: Vec::new(),
            name,
        };
        for at in 0..chain.layers[0].entries.len() {
            let entry = chain.layers[0].entries[at];
            chain.read(
                directory,
                0,
                entry.vaddr,
                entry.nr_pages,
                entry.flags,
                &mut |vaddr, flags, bytes| {
                    self.builder.pages(vaddr, flags, bytes)?;
                    self.done_bytes += bytes.len() as u64;
                    (self.progress)(self.done_bytes, self.total_bytes);
                    Ok(())
                },
            )?;
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

/// A pagemap entry, and where its pages are.
#[derive(Clone, Copy)]
struct Entry {
    vaddr: u64,
    nr_pages: u64,
    flags: u16,
    /// In the pages file; meaningless unless present.
    at: u64,
}

impl Layer {
    fn open(directory: &ImagesDir, name: &str) -> Result<Self, StoreError> {
        let mut bytes = Vec::new();
        let file = directory.open(name)?;
        file.take(MAX_PAGEMAP_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(StoreError::io(format!("read image {name}")))?;
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
            .map_err(StoreError::io(format!("stat {pages_name}")))?
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

    /// The entry that holds `vaddr`.
    fn find(&self, vaddr: u64) -> Option<Entry> {
        let after = self.entries.partition_point(|entry| entry.vaddr <= vaddr);
        let entry = *self.entries.get(after.checked_sub(1)?)?;
        (vaddr - entry.vaddr < entry.nr_pages * PAGE_BYTES).then_some(entry)
    }
}

/// A pagemap and, opened as they are needed, its namesakes in the parent directories.
struct Chain<'a> {
    layers: Vec<Layer>,
    directories: Vec<ImagesDir>,
    name: &'a str,
}

type Take<'t> = &'t mut dyn FnMut(u64, u16, &[u8]) -> Result<(), StoreError>;

impl Chain<'_> {
    /// Hands on `nr_pages` pages at `vaddr`, as layer `depth` has them.
    fn read(
        &mut self,
        top: &ImagesDir,
        depth: usize,
        vaddr: u64,
        nr_pages: u64,
        flags: u16,
        take: Take<'_>,
    ) -> Result<(), StoreError> {
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
                    take(at + done, flags & !PE_PARENT | PE_PRESENT, bytes)
                })?;
            } else if entry.flags & PE_PARENT != 0 {
                self.open_parent(top, depth)?;
                self.read(top, depth + 1, at, stretch / PAGE_BYTES, flags, take)?;
            } else {
                return Err(invalid(format!(
                    "{}: pages at {at:#x} are neither here nor in a parent (a lazy dump whose pages never came)",
                    self.name
                )));
            }
            at += stretch;
        }
        Ok(())
    }

    fn open_parent(&mut self, top: &ImagesDir, depth: usize) -> Result<(), StoreError> {
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

/// Reads `len` bytes of pages at `from`, chunk by chunk.
fn copy(
    pages: &File,
    from: u64,
    len: u64,
    mut take: impl FnMut(u64, &[u8]) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut buffer = vec![0_u8; usize::try_from(CHUNK_BYTES.min(len)).unwrap_or(PAGE_SIZE)];
    let mut done = 0;
    while done < len {
        let chunk = buffer
            .len()
            .min(usize::try_from(len - done).unwrap_or(usize::MAX));
        let bytes = &mut buffer[..chunk];
        pages
            .read_exact_at(bytes, from + done)
            .map_err(StoreError::io("read pages image"))?;
        take(done, bytes)?;
        done += chunk as u64;
    }
    Ok(())
}

fn invalid(message: String) -> StoreError {
    StoreError::Invalid {
        message,
        hint: "check the images directory with `crit`",
    }
}
