//! The medium: a sparse file, an index, and an object store.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{
    ColdIdentity, ColdStore, FetchedPages, Flushed, Guarantee, Medium, NotRecalled, PAGE_SIZE,
};
use rustix::fs::FallocateFlags;

use crate::error::ColdError;
use crate::index::{Entry, FoundHeader, Header, Index, MAX_PAGES, Pages};
use crate::marker::{self, MARKER};
use crate::object::{BlockPages, ObjectId, decode, encode};
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
            self.index.set(block, Entry::default())?;
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

impl ColdStore for ColdMedium {
    fn address(&self) -> &str {
        self.objects.address()
    }

    fn adopt(
        &self,
        identity: ColdIdentity,
        generation: u32,
        is_listed: &dyn Fn([u8; 16]) -> bool,
    ) -> io::Result<()> {
        self.mark(identity, is_listed)?;
        self.index.set_header(Header {
            identity,
            generation,
        })
    }

    fn attach(&self, identity: ColdIdentity, generation: u32) -> io::Result<()> {
        self.check_header(identity, generation).map_err(|problem| {
            io::Error::other(format!(
                "{problem}. Put the file's own newest index back (FILE.index beside FILE); if it is lost, accept that \
                 with `permafrost region rm MEDIUM --lost --yes`"
            ))
        })?;
        let _ = self.identity.set(identity);
        Ok(())
    }

    fn set_generation(&self, generation: u32) -> io::Result<()> {
        match self.identity.get() {
            Some(&identity) => self.index.set_header(Header {
                identity,
                generation,
            }),
            None => Ok(()),
        }
    }

    fn release(&self) -> io::Result<()> {
        self.check_marker()?;
        let deleted = self.objects.delete(MARKER);
        Ok(deleted.map_err(|source| self.away(source))?)
    }

    fn move_out(&self, at: u64, len_bytes: u64, kept: &[u32], out: &[u32]) -> io::Result<u64> {
        let (block, page) = self.place(at);
        if len_bytes != self.block_bytes || page != 0 || !at.is_multiple_of(PAGE_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let pages = Pages::of(out.iter().copied());
        let mut bytes = vec![0; to_usize(u64::from(pages.count())) * PAGE_SIZE];
        let all = (0..MAX_PAGES).filter(|page| pages.has(*page));
        for (page, into) in all.zip(bytes.chunks_exact_mut(PAGE_SIZE)) {
            self.file.read(at + u64::from(page) * PAGE_BYTES, into)?;
        }
        // Where nothing is mounted, nothing is written.
        self.check_marker_again()?;
        // 1. The object, under a name that was never used. A crash here leaves one that no entry names.
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(io::Error::other)?;
        let id = self.id(block, u64::from_le_bytes(number).max(1));
        let own = (block, id.number);
        self.in_flight.lock().insert(own);
        let _in_flight = InFlight {
            all: &self.in_flight,
            own,
        };
        let object = encode(&id, &BlockPages { pages, bytes });
        let stored_bytes = to_u64(object.len());
        let put = self.objects.put(&self.object_name(&id), object);
        put.map_err(|source| self.away(source))?;
        // It went to this store, and not to where the store was mounted until now.
        self.check_marker_again()?;
        // 2. The entry, which names it. Not before the object is durable. A crash here leaves an entry of a block that
        //    nothing refers to.
        let entry = Entry {
            object: id.number,
            kept: Pages::of(kept.iter().copied()),
            out: pages,
            stored_bytes,
        };
        self.index.set(block, entry)?;
        // 3. The holes. Not before the entry is durable: pages of the file would read as zeros.
        self.punch(block, &entry.kept);
        Ok(stored_bytes)
    }

    fn is_out(&self, at: u64) -> bool {
        let (block, _) = self.place(at);
        // One that cannot be read is not in the file for sure.
        self.index
            .get(block)
            .map_or(true, |entry| entry.object != 0)
    }

    fn blocks_out(&self) -> io::Result<Vec<u64>> {
        let mut out = Vec::new();
        for block in 0..self.index.len()? {
            if self.index.get(block)?.object != 0 {
                out.push(block * self.block_bytes);
            }
        }
        Ok(out)
    }

    fn fetch_block(&self, at: u64) -> io::Result<FetchedPages> {
        let (block, _) = self.place(at);
        let entry = self.index.get(block)?;
        if entry.object == 0 {
            return Ok(Box::new(()));
        }
        Ok(Box::new(self.fetch(block, entry.object)?))
    }

    fn forget(&self, at: u64) -> io::Result<()> {
        let (block, _) = self.place(at);
        self.index.set(block, Entry::default())?;
        self.punch(block, &Pages::default());
        Ok(())
    }

    fn unneeded(&self) -> io::Result<Vec<String>> {
        self.check_marker()?;
        let listed = self.objects.list(&self.directory());
        let mut unneeded = Vec::new();
        for object in listed.map_err(|source| self.away(source))? {
            // Others are not this program's.
            if let Some((block, number)) = self.parse_name(&object.name)
                && !self.is_needed(block, number)?
            {
                unneeded.push(object.name);
            }
        }
        Ok(unneeded)
    }

    fn remove(&self, unneeded: &[String]) -> io::Result<u64> {
        let mut removed = 0;
        for name in unneeded {
            // Numbers are never used twice: what nothing names or writes now, nothing will name.
            if let Some((block, number)) = self.parse_name(name)
                && !self.is_needed(block, number)?
            {
                let deleted = self.objects.delete(name);
                deleted.map_err(|source| self.away(source))?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    fn absent(&self) -> io::Result<Vec<u64>> {
        // The entries before the list, and again after it: objects come and go meanwhile.
        let mut named = Vec::new();
        for at in self.blocks_out()? {
            let (block, _) = self.place(at);
            named.push((block, self.index.get(block)?));
        }
        self.check_marker()?;
        let listed = self.objects.list(&self.directory());
        let listed = listed.map_err(|source| self.away(source))?.into_iter();
        let sizes: HashMap<String, u64> = listed.map(|o| (o.name, o.len_bytes)).collect();
        let mut absent = Vec::new();
        for (block, entry) in named {
            let size = sizes.get(&self.object_name(&self.id(block, entry.object)));
            let is_there = size == Some(&entry.stored_bytes);
            if !is_there && self.index.get(block)?.object == entry.object {
                absent.push(block * self.block_bytes);
            }
        }
        Ok(absent)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::MemoryObjects;
    use permafrost_medium::{OpenOptions, open_sparse_medium};

    const BLOCK: u64 = 64 << 10;

    struct Site {
        dir: tempfile::TempDir,
        objects: Arc<MemoryObjects>,
    }

    impl Site {
        fn new() -> Self {
            Self {
                dir: tempfile::tempdir().unwrap(),
                objects: Arc::default(),
            }
        }

        fn open(&self) -> ColdMedium {
            let path = self.dir.path().join("cold");
            let file = open_sparse_medium(&path, 1 << 20, &OpenOptions::default()).unwrap();
            let objects = Arc::clone(&self.objects) as Arc<dyn Objects>;
            let index = self.dir.path().join("index");
            ColdMedium::create_index(&index).unwrap();
            ColdMedium::open(file, Some(&path), &index, ([7; 16], BLOCK), objects).unwrap()
        }
    }

    fn page(salt: u64) -> [u8; PAGE_SIZE] {
        let mut page = [0; PAGE_SIZE];
        for (at, word) in page.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(salt << 32 | to_u64(at)).to_le_bytes());
        }
        page
    }

    fn fill(medium: &ColdMedium, block: u64) {
        let mut flushed = Flushed::new();
        for n in 0..16 {
            let at = block * BLOCK + n * PAGE_BYTES;
            // SAFETY: no one else has the medium.
            unsafe { medium.write_streaming(at, &page(block * 100 + n)).unwrap() };
        }
        medium
            .flush_streamed(block * BLOCK, BLOCK, &mut flushed)
            .unwrap();
        medium.fence(&mut flushed).unwrap();
    }

    fn read(medium: &ColdMedium, block: u64, n: u64) -> io::Result<[u8; PAGE_SIZE]> {
        let mut bytes = [0; PAGE_SIZE];
        medium.read(block * BLOCK + n * PAGE_BYTES, &mut bytes)?;
        Ok(bytes)
    }

    /// Moves all pages out but 0 and 5; 9 is dead.
    fn move_out(medium: &ColdMedium, block: u64) -> io::Result<u64> {
        let out: Vec<u32> = (1..16).filter(|n| ![5, 9].contains(n)).collect();
        medium.move_out(block * BLOCK, BLOCK, &[0, 5], &out)
    }

    fn sweep(medium: &ColdMedium) -> u64 {
        medium.remove(&medium.unneeded().unwrap()).unwrap()
    }

    #[test]
    fn a_block_is_moved_out_but_for_what_stays_and_read_from_its_object() {
        let site = Site::new();
        let medium = site.open();
        fill(&medium, 2);
        let stored = move_out(&medium, 2).unwrap();
        assert!(stored < BLOCK / 2 && medium.is_out(2 * BLOCK) && !medium.is_out(BLOCK));
        drop(medium);
        // The same after a restart.
        let medium = site.open();
        for n in 0..16 {
            let expected = if n == 9 {
                [0; PAGE_SIZE]
            } else {
                page(200 + n)
            };
            assert!(read(&medium, 2, n).unwrap() == expected, "page {n}");
        }
        let mut across = [0; 100];
        medium
            .read(2 * BLOCK + 6 * PAGE_BYTES - 50, &mut across)
            .unwrap();
        assert_eq!(across[..50], page(205)[PAGE_SIZE - 50..]);
        assert_eq!(across[50..], page(206)[..50]);
        // SAFETY: nobody writes to the medium.
        let (kept, out) = unsafe {
            (
                medium.bytes(2 * BLOCK + 5 * PAGE_BYTES, PAGE_SIZE).is_ok(),
                medium.bytes(2 * BLOCK, 2 * PAGE_SIZE).unwrap_err(),
            )
        };
        assert!(kept && NotRecalled::is(&out));
        assert!(medium.file().is_none(), "holes are not spliced");
    }

    #[test]
    fn a_store_that_is_away_costs_what_is_out_until_it_is_back() {
        let site = Site::new();
        let medium = site.open();
        fill(&medium, 1);
        site.objects.set_away(true);
        let error = move_out(&medium, 1).unwrap_err();
        assert!(matches!(
            ColdError::of(&error),
            Some(ColdError::Away { .. })
        ));
        assert!(!medium.is_out(BLOCK) && read(&medium, 1, 3).unwrap() == page(103));
        site.objects.set_away(false);
        move_out(&medium, 1).unwrap();
        site.objects.set_away(true);
        drop(medium);
        let medium = site.open();
        assert!(read(&medium, 1, 5).unwrap() == page(105));
        let error = read(&medium, 1, 3).unwrap_err();
        assert!(matches!(
            ColdError::of(&error),
            Some(ColdError::Away { .. })
        ));
        site.objects.set_away(false);
        assert!(read(&medium, 1, 3).unwrap() == page(103));
    }

    #[test]
    fn garbage_is_damage_and_a_page_that_is_healed_stays_in_the_file() {
        let site = Site::new();
        let medium = site.open();
        fill(&medium, 1);
        move_out(&medium, 1).unwrap();
        site.objects.change_all(|bytes| bytes[200] ^= 1);
        let error = read(&medium, 1, 3).unwrap_err();
        assert!(matches!(
            ColdError::of(&error),
            Some(ColdError::Damaged { .. })
        ));
        // SAFETY: nobody has borrowed it.
        unsafe {
            medium
                .rewrite_page(BLOCK + 3 * PAGE_BYTES, &page(103))
                .unwrap()
        };
        drop(medium);
        let medium = site.open();
        assert!(read(&medium, 1, 3).unwrap() == page(103));
        read(&medium, 1, 4).unwrap_err();
    }

    #[test]
    fn objects_of_free_blocks_and_objects_that_no_entry_names_are_removed() {
        let site = Site::new();
        let medium = site.open();
        for block in 1..4 {
            fill(&medium, block);
            move_out(&medium, block).unwrap();
        }
        // As a crash leaves one, and another medium's.
        let stray = format!("{}/9-0000000000000001", medium.directory());
        site.objects.put(&stray, vec![1]).unwrap();
        site.objects.put("00/9-1", vec![1]).unwrap();
        // Its name is given up when the block is written to again.
        fill(&medium, 2);
        assert!(read(&medium, 2, 9).unwrap() == page(209));
        medium.forget(3 * BLOCK).unwrap();
        assert_eq!(sweep(&medium), 3);
        let left: Vec<_> = site.objects.all().into_keys().collect();
        assert_eq!(left.len(), 2);
        assert!(read(&medium, 1, 3).unwrap() == page(103));
        assert!(!medium.is_out(3 * BLOCK));
        assert_eq!(sweep(&medium), 0);
    }
}
