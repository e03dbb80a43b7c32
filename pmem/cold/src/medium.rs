//! The medium: a sparse file, an index, and an object store.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{ColdStore, Flushed, Guarantee, Medium, NotRecalled, PAGE_SIZE};
use rustix::fs::FallocateFlags;

use crate::error::ColdError;
use crate::index::{Entry, Index, MAX_PAGES, Pages};
use crate::object::{BlockPages, ObjectId, decode, encode};
use crate::objects::{ObjectError, Objects};

const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Objects that are kept after they were fetched, for the next pages of theirs.
const FETCHED: usize = 4;

/// A medium most of whose pages are in an object store.
pub struct ColdMedium {
    /// The file, as a medium of its own.
    file: Arc<dyn Medium>,
    /// The file, to make holes in; `None` for a medium that is not a file.
    holes: Option<File>,
    index: Index,
    objects: Arc<dyn Objects>,
    name: [u8; 16],
    block_bytes: u64,
    fetched: Mutex<VecDeque<(ObjectId, Arc<BlockPages>)>>,
    /// Held while a block is moved out, and while objects that no entry names are removed.
    moving: Mutex<()>,
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
        if block_bytes == 0 || block_bytes > u64::from(MAX_PAGES) * PAGE_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let holes = path.map(|path| File::options().write(true).open(path));
        Ok(Self {
            file,
            holes: holes.transpose()?,
            index: Index::open(index)?,
            objects,
            name,
            block_bytes,
            fetched: Mutex::default(),
            moving: Mutex::default(),
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
        self.name.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn object_name(&self, id: &ObjectId) -> String {
        format!("{}/{:x}-{:016x}", self.directory(), id.block, id.number)
    }

    /// Returns the pages in the object of a block.
    fn fetch(&self, block: u64, number: u64) -> Result<Arc<BlockPages>, ColdError> {
        let id = self.id(block, number);
        if let Some((_, found)) = self.fetched.lock().iter().find(|(known, _)| *known == id) {
            return Ok(Arc::clone(found));
        }
        let name = self.object_name(&id);
        let damaged = |reason| ColdError::Damaged {
            store: self.objects.address().to_owned(),
            name: name.clone(),
            reason,
        };
        let bytes = self.objects.get(&name).map_err(|source| match source {
            ObjectError::Missing => damaged("it is not there"),
            source => self.away(source),
        })?;
        let pages = Arc::new(decode(&id, &bytes).map_err(damaged)?);
        let mut fetched = self.fetched.lock();
        fetched.push_back((id, Arc::clone(&pages)));
        if fetched.len() > FETCHED {
            fetched.pop_front();
        }
        Ok(pages)
    }

    fn away(&self, source: ObjectError) -> ColdError {
        ColdError::Away {
            store: self.objects.address().to_owned(),
            source,
        }
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
        let Some(file) = &self.holes else { return };
        let pages = u32::try_from(self.block_bytes / PAGE_BYTES).unwrap_or(0);
        for page in (0..pages).filter(|page| !kept.has(*page)) {
            let at = block * self.block_bytes + u64::from(page) * PAGE_BYTES;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = rustix::fs::fallocate(file, flags, at, PAGE_BYTES);
        }
    }
}

impl ColdStore for ColdMedium {
    fn address(&self) -> &str {
        self.objects.address()
    }

    fn move_out(&self, at: u64, len_bytes: u64, kept: &[u32], out: &[u32]) -> io::Result<u64> {
        let (block, page) = self.place(at);
        if len_bytes != self.block_bytes || page != 0 || !at.is_multiple_of(PAGE_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let _moving = self.moving.lock();
        let pages = Pages::of(out.iter().copied());
        let mut bytes = vec![0; to_usize(u64::from(pages.count())) * PAGE_SIZE];
        let all = (0..MAX_PAGES).filter(|page| pages.has(*page));
        for (page, into) in all.zip(bytes.chunks_exact_mut(PAGE_SIZE)) {
            self.file.read(at + u64::from(page) * PAGE_BYTES, into)?;
        }
        // 1. The object, under a name that was never used. A crash here leaves one that no entry names.
        let mut number = [0; 8];
        getrandom::fill(&mut number).map_err(io::Error::other)?;
        let id = self.id(block, u64::from_le_bytes(number).max(1));
        let object = encode(&id, &BlockPages { pages, bytes });
        let stored = to_u64(object.len());
        let put = self.objects.put(&self.object_name(&id), object);
        put.map_err(|source| self.away(source))?;
        // 2. The entry, which names it. Not before the object is durable. A crash here leaves an entry of a block that
        //    nothing refers to.
        let entry = Entry {
            object: id.number,
            kept: Pages::of(kept.iter().copied()),
        };
        self.index.set(block, entry)?;
        // 3. The holes. Not before the entry is durable: pages of the file would read as zeros.
        self.punch(block, &entry.kept);
        Ok(stored)
    }

    fn is_out(&self, at: u64) -> bool {
        let (block, _) = self.place(at);
        // One that cannot be read is not in the file for sure.
        self.index
            .get(block)
            .map_or(true, |entry| entry.object != 0)
    }

    fn sweep(&self, is_free: &dyn Fn(u64) -> bool) -> io::Result<u64> {
        let _moving = self.moving.lock();
        let mut named = std::collections::HashSet::new();
        for block in 0..self.index.len()? {
            let entry = self.index.get(block)?;
            if entry.object == 0 {
                continue;
            }
            if is_free(block * self.block_bytes) {
                self.index.set(block, Entry::default())?;
                self.punch(block, &Pages::default());
            } else {
                named.insert(self.object_name(&self.id(block, entry.object)));
            }
        }
        let away = |source| io::Error::from(self.away(source));
        let mut removed = 0;
        for name in self.objects.list(&self.directory()).map_err(away)? {
            if !named.contains(&name) {
                self.objects.delete(&name).map_err(away)?;
                removed += 1;
            }
        }
        Ok(removed)
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
        while !rest.is_empty() {
            let in_page = to_usize(at % PAGE_BYTES);
            let (part, behind) = rest.split_at_mut(rest.len().min(PAGE_SIZE - in_page));
            let (block, page) = self.place(at);
            let entry = self.index.get(block)?;
            if entry.object == 0 || entry.kept.has(page) {
                self.file.read(at, part)?;
            } else {
                // A page that is in neither was not live when the block was moved out.
                match self.fetch(block, entry.object)?.page(page) {
                    Some(bytes) => part.copy_from_slice(&bytes[in_page..in_page + part.len()]),
                    None => part.fill(0),
                }
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
        let removed = medium.sweep(&|at| at == 3 * BLOCK).unwrap();
        assert_eq!(removed, 3);
        let left: Vec<_> = site.objects.all().into_keys().collect();
        assert_eq!(left.len(), 2);
        assert!(read(&medium, 1, 3).unwrap() == page(103));
        assert!(!medium.is_out(3 * BLOCK));
        assert_eq!(medium.sweep(&|_| false).unwrap(), 0);
    }
}
