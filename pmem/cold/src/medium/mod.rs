//! The medium: a sparse file, an index, and an object store.

mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{
    ColdIdentity, ColdStore, Flushed, Guarantee, Medium, NotRecalled, PAGE_SIZE,
};
use rustix::fs::FallocateFlags;

use crate::error::ColdError;
use crate::index::{Entry, FoundHeader, Index, MAX_PAGES, Pages};
use crate::marker::{self, MARKER};
use crate::object::{BlockPages, ObjectId, decode};
use crate::objects::{ObjectError, Objects};

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Objects that are kept after they were fetched, for the next pages of theirs.
const FETCHED: usize = 4;

/// Time for which an object that is damaged is not fetched again, as its pages are read one after another.
const DAMAGED_FOR: Duration = Duration::from_secs(10);

/// A medium most of whose pages are in an object store.
pub struct ColdMedium {
    /// The file, as a medium of its own.
    file: Arc<dyn Medium>,
    holes: Holes,
    index: Index,
    objects: Arc<dyn Objects>,
    name: [u8; 16],
    block_bytes: u64,
    fetched: Mutex<Fetched>,
    /// Objects that are being written, and that no entry names yet: block and number.
    in_flight: Mutex<HashSet<(u64, u64)>>,
    /// Names of objects that were given up since the medium was opened, and not removed yet.
    given_up: Mutex<BTreeSet<String>>,
    /// Region and medium; not set for a medium that is part of no region.
    identity: OnceLock<ColdIdentity>,
    /// True if the store's marker was read and is this medium's.
    is_marked: AtomicBool,
}

/// Holes in place of pages of the file.
enum Holes {
    /// In the file.
    File(File),
    /// On a medium of the crash simulator, as zeros; or nowhere, if there is no room to save.
    Zeros(bool),
}

/// Objects that were fetched.
#[derive(Default)]
struct Fetched {
    recent: VecDeque<(ObjectId, Arc<BlockPages>)>,
    /// Those that somebody reads from.
    used: HashMap<(u64, u64), Weak<BlockPages>>,
    /// The last one that was damaged.
    damaged: Option<(ObjectId, Instant, &'static str)>,
}

impl Fetched {
    fn find(&self, id: &ObjectId) -> Option<Arc<BlockPages>> {
        let recent = self.recent.iter().find(|(known, _)| known == id);
        recent
            .map(|(_, found)| Arc::clone(found))
            .or_else(|| self.used.get(&(id.block, id.number))?.upgrade())
    }

    fn add(&mut self, id: ObjectId, pages: &Arc<BlockPages>) {
        self.used.retain(|_, pages| pages.strong_count() > 0);
        self.used
            .insert((id.block, id.number), Arc::downgrade(pages));
        self.recent.push_back((id, Arc::clone(pages)));
        if self.recent.len() > FETCHED {
            self.recent.pop_front();
        }
    }
}

/// An object that is being written, until this is dropped.
struct InFlight<'a> {
    all: &'a Mutex<HashSet<(u64, u64)>>,
    own: (u64, u64),
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.own);
    }
}

impl ColdMedium {
    /// Makes an empty index for a new medium, if there is none.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn create_index(path: &Path) -> io::Result<()> {
        Index::create(path)
    }

    /// Puts an object store under a medium whose file is at `path`, with an index at `index`. `name` is part of the
    /// names of its objects, and `block_bytes` the size of its slots.
    ///
    /// # Errors
    /// The index cannot be opened. The store is not asked for anything.
    pub fn open(
        file: Arc<dyn Medium>,
        path: Option<&Path>,
        index: &Path,
        (name, block_bytes): ([u8; 16], u64),
        objects: Arc<dyn Objects>,
    ) -> io::Result<Self> {
        let holes = match path {
            Some(path) => Holes::File(File::options().write(true).open(path)?),
            None => Holes::Zeros(false),
        };
        Self::of(
            file,
            holes,
            Index::open(index)?,
            (name, block_bytes),
            objects,
        )
    }

    /// Puts an object store under a medium of the crash simulator, with the index on another one. Pages that are out
    /// are overwritten with zeros.
    ///
    /// # Errors
    /// The blocks have a size that no slot has.
    pub fn simulated(
        file: Arc<dyn Medium>,
        index: Arc<dyn Medium>,
        (name, block_bytes): ([u8; 16], u64),
        objects: Arc<dyn Objects>,
    ) -> io::Result<Self> {
        let index = Index::on(index);
        Self::of(
            file,
            Holes::Zeros(true),
            index,
            (name, block_bytes),
            objects,
        )
    }

    fn of(
        file: Arc<dyn Medium>,
        holes: Holes,
        index: Index,
        (name, block_bytes): ([u8; 16], u64),
        objects: Arc<dyn Objects>,
    ) -> io::Result<Self> {
        if block_bytes == 0 || block_bytes > u64::from(MAX_PAGES) * PAGE_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self {
            file,
            holes,
            index,
            objects,
            name,
            block_bytes,
            fetched: Mutex::default(),
            in_flight: Mutex::default(),
            given_up: Mutex::default(),
            identity: OnceLock::new(),
            is_marked: AtomicBool::new(false),
        })
    }

    /// Returns the block of an offset, and the page in it.
    fn place(&self, at: u64) -> (u64, u32) {
        let page = at % self.block_bytes / PAGE_BYTES;
        (
            at / self.block_bytes,
            u32::try_from(page).unwrap_or(u32::MAX),
        )
    }

    fn is_kept(&self, at: u64) -> io::Result<bool> {
        let (block, page) = self.place(at);
        let entry = self.index.get(block)?;
        Ok(entry.object == 0 || entry.kept.has(page))
    }

    /// Returns true if all pages of a range are in the file.
    fn are_kept(&self, at: u64, len_bytes: u64) -> io::Result<bool> {
        let first = at / PAGE_BYTES * PAGE_BYTES;
        for page in (first..at.saturating_add(len_bytes)).step_by(PAGE_SIZE) {
            if !self.is_kept(page)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn id(&self, block: u64, number: u64) -> ObjectId {
        ObjectId {
            medium: self.name,
            block,
            number,
        }
    }

    fn directory(&self) -> String {
        marker::hex(&self.name)
    }

    fn object_name(&self, id: &ObjectId) -> String {
        format!("{}/{:x}-{:016x}", self.directory(), id.block, id.number)
    }

    /// Returns block and number in the name of an object of this medium.
    fn parse_name(&self, name: &str) -> Option<(u64, u64)> {
        let (directory, own) = name.split_once('/')?;
        let (block, number) = own.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let parsed = (hex(block)?, hex(number)?);
        (directory == self.directory()).then_some(parsed)
    }

    /// Writes the entry of a block, and gives up the object that it had.
    fn set_entry(&self, block: u64, entry: Entry) -> io::Result<()> {
        let before = self.index.get(block)?.object;
        let object = entry.object;
        self.index.set(block, entry)?;
        if before != 0 && before != object {
            self.give_up(block, before);
        }
        Ok(())
    }

    /// Notes that nothing names an object any more.
    fn give_up(&self, block: u64, number: u64) {
        let name = self.object_name(&self.id(block, number));
        self.given_up.lock().insert(name);
    }

    /// Returns true if an entry names an object, or will.
    fn is_needed(&self, block: u64, number: u64) -> io::Result<bool> {
        // In this order: an object is in flight until its entry is written.
        let in_flight = self.in_flight.lock().contains(&(block, number));
        Ok(in_flight || self.index.get(block)?.object == number)
    }

    /// Returns the pages in the object of a block.
    fn fetch(&self, block: u64, number: u64) -> Result<Arc<BlockPages>, ColdError> {
        let id = self.id(block, number);
        let name = self.object_name(&id);
        let damaged = |reason| ColdError::Damaged {
            store: self.objects.address().to_owned(),
            name: name.clone(),
            reason,
        };
        {
            let fetched = self.fetched.lock();
            if let Some(found) = fetched.find(&id) {
                return Ok(found);
            }
            if let Some((_, since, reason)) = fetched.damaged.filter(|(bad, ..)| *bad == id)
                && since.elapsed() < DAMAGED_FOR
            {
                return Err(damaged(reason));
            }
        }
        let bytes = self.objects.get(&name);
        let decoded = match bytes {
            Ok(bytes) => decode(&id, &bytes),
            Err(ObjectError::Missing) => {
                // Not the object's fault where the whole store is another one.
                self.check_marker()?;
                Err("it is not there")
            }
            Err(source) => return Err(self.away(source)),
        };
        let mut fetched = self.fetched.lock();
        let pages = decoded.map_err(|reason| {
            fetched.damaged = Some((id, Instant::now(), reason));
            damaged(reason)
        })?;
        let pages = Arc::new(pages);
        fetched.add(id, &pages);
        Ok(pages)
    }

    fn away(&self, source: ObjectError) -> ColdError {
        ColdError::Away {
            store: self.objects.address().to_owned(),
            source,
        }
    }

    /// Reads the store's marker; `None` if there is none.
    fn marker(&self) -> Result<Option<Vec<u8>>, ColdError> {
        match self.objects.get(MARKER) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(ObjectError::Missing) => Ok(None),
            Err(source) => Err(self.away(source)),
        }
    }

    /// Fails unless the store's marker is this medium's.
    fn check_marker(&self) -> Result<(), ColdError> {
        let Some(identity) = self.identity.get() else {
            return Ok(());
        };
        let reason = match self.marker()? {
            None => "its marker is missing",
            Some(bytes) if marker::decode(&bytes) == Some(*identity) => {
                self.is_marked.store(true, Ordering::Relaxed);
                return Ok(());
            }
            Some(_) => "its marker is another's",
        };
        Err(ColdError::Unmarked {
            store: self.objects.address().to_owned(),
            reason,
        })
    }

    /// As [`check_marker`](Self::check_marker), where the store may be another one by now.
    fn check_marker_again(&self) -> Result<(), ColdError> {
        if self.is_marked.load(Ordering::Relaxed) && !self.objects.may_be_swapped() {
            return Ok(());
        }
        self.check_marker()
    }

    /// Calls `write` after the object of a block was given up, if the range has pages that are not in the file: the
    /// region writes to them only when nothing refers to the block.
    fn before_write(&self, at: u64, len_bytes: u64) -> io::Result<()> {
        let (block, _) = self.place(at);
        if len_bytes > 0 && !self.are_kept(at, len_bytes)? {
            self.set_entry(block, Entry::default())?;
        }
        Ok(())
    }

    /// Makes holes of all pages of a block but some. It only saves room, so errors are ignored.
    fn punch(&self, block: u64, kept: &Pages) {
        let pages = u32::try_from(self.block_bytes / PAGE_BYTES).unwrap_or(0);
        for page in (0..pages).filter(|page| !kept.has(*page)) {
            let at = block * self.block_bytes + u64::from(page) * PAGE_BYTES;
            match &self.holes {
                Holes::File(file) => {
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    let _ = rustix::fs::fallocate(file, flags, at, PAGE_BYTES);
                }
                Holes::Zeros(false) => return,
                Holes::Zeros(true) => {
                    // SAFETY: nobody reads or writes pages of the file that are out.
                    let _ = unsafe { self.file.write(at, &[0; PAGE_SIZE]) };
                }
            }
        }
    }

    /// Takes a store for this medium; `is_listed` returns true for media of the region.
    fn mark(
        &self,
        identity: ColdIdentity,
        is_listed: &dyn Fn([u8; 16]) -> bool,
    ) -> Result<(), ColdError> {
        if let Some(found) = self.marker()? {
            let taken = |region: String, medium: String| ColdError::Taken {
                store: self.objects.address().to_owned(),
                region,
                medium,
                marker: MARKER,
            };
            let unknown = || taken("unknown".to_owned(), "unknown".to_owned());
            let found = marker::decode(&found).ok_or_else(unknown)?;
            let is_free = found.region == identity.region && !is_listed(found.medium);
            if found != identity && !is_free {
                return Err(taken(
                    marker::hex(&found.region),
                    marker::hex(&found.medium),
                ));
            }
            // Left by an addition that was cut short, or by a medium whose loss was accepted.
            self.objects
                .delete(MARKER)
                .map_err(|source| self.away(source))?;
        }
        let put = self.objects.put(MARKER, marker::encode(&identity));
        put.map_err(|source| self.away(source))?;
        // Two regions that take the store at once see here whose it is.
        let _ = self.identity.set(identity);
        self.check_marker()
    }

    fn check_header(&self, identity: ColdIdentity, generation: u32) -> Result<(), String> {
        let read = self.index.header();
        let found = match read.map_err(|error| format!("its index cannot be read: {error}"))? {
            FoundHeader::Intact(header) => header,
            FoundHeader::Newer => return Err("its index was written by a newer build".to_owned()),
            FoundHeader::None => {
                return Err(
                    "its index is empty, or both copies of its header are damaged".to_owned(),
                );
            }
        };
        if found.identity != identity {
            return Err(format!(
                "its index is that of medium {} of region {}",
                marker::hex(&found.identity.medium),
                marker::hex(&found.identity.region)
            ));
        }
        let expected = [generation, generation.wrapping_add(1)];
        if expected.contains(&found.generation) {
            return Ok(());
        }
        let (own, age) = (
            found.generation,
            match found.generation < generation {
                true => "an older copy of the index",
                false => "an older copy of the region's first file",
            },
        );
        Err(format!(
            "its index has generation {own}, and the region expects {generation}: {age} was put there"
        ))
    }
}

impl Medium for ColdMedium {
    fn capacity_bytes(&self) -> u64 {
        self.file.capacity_bytes()
    }

    fn guarantee(&self) -> &Guarantee {
        self.file.guarantee()
    }

    fn cold(&self) -> Option<&dyn ColdStore> {
        Some(self)
    }

    fn lost_pages(&self) -> u64 {
        self.file.lost_pages()
    }

    fn check(&self, at: u64, len_bytes: u64) -> io::Result<()> {
        self.file.check(at, len_bytes)
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        if self.are_kept(at, to_u64(into.len()))? {
            return self.file.read(at, into);
        }
        let (mut at, mut rest) = (at, into);
        // Kept while its pages are read: others may fetch many objects meanwhile.
        let mut fetched: Option<(u64, Arc<BlockPages>)> = None;
        while !rest.is_empty() {
            let in_page = to_usize(at % PAGE_BYTES);
            let (part, behind) = rest.split_at_mut(rest.len().min(PAGE_SIZE - in_page));
            let (block, page) = self.place(at);
            let entry = self.index.get(block)?;
            if entry.object == 0 || entry.kept.has(page) {
                self.file.read(at, part)?;
            } else if !entry.out.has(page) {
                // It was not live when the block was moved out.
                part.fill(0);
            } else {
                let pages = match fetched.take().filter(|(number, _)| *number == entry.object) {
                    Some((_, pages)) => pages,
                    None => self.fetch(block, entry.object)?,
                };
                match pages.page(page) {
                    Some(bytes) => part.copy_from_slice(&bytes[in_page..in_page + part.len()]),
                    None => part.fill(0),
                }
                fetched = Some((entry.object, pages));
            }
            at += to_u64(part.len());
            rest = behind;
        }
        Ok(())
    }

    unsafe fn bytes(&self, at: u64, len: usize) -> io::Result<&[u8]> {
        if !self.are_kept(at, to_u64(len))? {
            return Err(NotRecalled.into());
        }
        // SAFETY: the caller's promise.
        unsafe { self.file.bytes(at, len) }
    }

    unsafe fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.before_write(at, to_u64(from.len()))?;
        // SAFETY: the caller's promise.
        unsafe { self.file.write(at, from) }
    }

    unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()> {
        self.before_write(at, to_u64(from.len()))?;
        // SAFETY: the caller's promise.
        unsafe { self.file.write_streaming(at, from) }
    }

    fn flush(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        self.file.flush(at, len_bytes, flushed)
    }

    fn flush_streamed(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        self.file.flush_streamed(at, len_bytes, flushed)
    }

    fn fence(&self, flushed: &mut Flushed) -> io::Result<()> {
        self.file.fence(flushed)
    }

    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.file.rewrite_page(at, page)? };
        // Healed: from here on it is in the file.
        let (block, number) = self.place(at);
        let mut entry = self.index.get(block)?;
        if entry.object != 0 && !entry.kept.has(number) {
            entry.kept.insert(number);
            entry.out.remove(number);
            if entry.out == Pages::default() {
                // The object is needed no longer, and may be the one that was damaged.
                entry = Entry::default();
            }
            self.index.set(block, entry)?;
        }
        Ok(())
    }
}
