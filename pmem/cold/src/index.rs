//! The index of a cold medium: a file that says which object each block has, and which pages stay in the file.
//!
//! ```text
//! 0     header: whose index this is, and its generation     4096  its second copy
//! 8192  entries, 320 bytes each: both copies, 160 bytes each
//! ```
//!
//! An entry has the number of the object, bitmaps of the pages that stay and of those that are read from the object, the
//! size of the object, and a CRC32 of these with the block's number. Zeros: the block has no object. The second copy of a header or an entry is written when the
//! first is durable, so a crash leaves one of them intact; the first counts if it is.
//!
//! The generation is also in the region's list of media. An older copy of the file, or one of another region, is
//! refused: it would name objects that are gone, and have those removed that are in use.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{ColdIdentity, Flushed, Medium};

/// Bytes of a copy of an entry.
const COPY_BYTES: usize = 160;
/// Bytes of both copies, and of the room for each entry.
const ENTRY_BYTES: u64 = 2 * COPY_BYTES as u64;
/// Bytes of a copy that the checksum is over.
const CHECKED_BYTES: usize = 144;
/// First bytes of a header.
const MAGIC: [u8; 8] = *b"PFCOLDIX";
/// Version of the index.
const VERSION: u32 = 1;
/// Bytes between the copies of the header.
const HEADER_STEP: u64 = 4096;
/// Bytes of a header, its checksum included.
const HEADER_BYTES: usize = 52;
/// Offset of the first entry.
const ENTRIES_AT: u64 = 2 * HEADER_STEP;

/// Pages of a block: a bitmap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pages(pub(crate) [u64; 8]);

/// Most pages of a block.
pub(crate) const MAX_PAGES: u32 = 512;

impl Pages {
    pub(crate) fn of(pages: impl Iterator<Item = u32>) -> Self {
        let mut all = Self::default();
        pages.for_each(|page| all.insert(page));
        all
    }

    pub(crate) fn insert(&mut self, page: u32) {
        if let Some(word) = self.0.get_mut(to_usize(u64::from(page / 64))) {
            *word |= 1 << (page % 64);
        }
    }

    pub(crate) fn remove(&mut self, page: u32) {
        if let Some(word) = self.0.get_mut(to_usize(u64::from(page / 64))) {
            *word &= !(1 << (page % 64));
        }
    }

    pub(crate) fn has(&self, page: u32) -> bool {
        let word = self.0.get(to_usize(u64::from(page / 64)));
        word.is_some_and(|word| word >> (page % 64) & 1 == 1)
    }

    pub(crate) fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// Returns the number of pages before one that is among these.
    pub(crate) fn rank(&self, page: u32) -> Option<usize> {
        let before = (0..page).filter(|before| self.has(*before)).count();
        self.has(page).then_some(before)
    }
}

/// Entry of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Number of the object; 0 for none.
    pub(crate) object: u64,
    /// Pages that are in the file.
    pub(crate) kept: Pages,
    /// Pages that are read from the object.
    pub(crate) out: Pages,
    /// Bytes of the object.
    pub(crate) stored_bytes: u64,
}

impl Entry {
    fn encode(self, block: u64) -> [u8; COPY_BYTES] {
        let mut bytes = [0; COPY_BYTES];
        if self == Self::default() {
            return bytes;
        }
        bytes[..8].copy_from_slice(&self.object.to_le_bytes());
        for (at, word) in self.kept.0.iter().chain(&self.out.0).enumerate() {
            bytes[8 + 8 * at..16 + 8 * at].copy_from_slice(&word.to_le_bytes());
        }
        bytes[136..CHECKED_BYTES].copy_from_slice(&self.stored_bytes.to_le_bytes());
        let crc = checksum(block, &bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..CHECKED_BYTES + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(block: u64, bytes: &[u8]) -> Option<Self> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Some(Self::default());
        }
        let (checked, rest) = bytes.split_at_checked(CHECKED_BYTES)?;
        if rest.get(..4)? != checksum(block, checked).to_le_bytes() {
            return None;
        }
        let mut words = checked
            .as_chunks::<8>()
            .0
            .iter()
            .map(|b| u64::from_le_bytes(*b));
        Some(Self {
            object: words.next()?,
            kept: Pages(std::array::from_fn(|_| words.next().unwrap_or(0))),
            out: Pages(std::array::from_fn(|_| words.next().unwrap_or(0))),
            stored_bytes: words.next()?,
        })
    }
}

fn checksum(block: u64, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&block.to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

/// Header of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) identity: ColdIdentity,
    pub(crate) generation: u32,
}

/// Header as it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoundHeader {
    /// Neither copy is intact.
    None,
    /// It is of a newer version.
    Newer,
    Intact(Header),
}

impl Header {
    fn encode(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.generation.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.identity.region);
        bytes[32..48].copy_from_slice(&self.identity.medium);
        let crc = crc32fast::hash(&bytes[..48]);
        bytes[48..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> FoundHeader {
        let word = |at: usize| {
            let four = bytes[at..at + 4].try_into().unwrap_or_default();
            u32::from_le_bytes(four)
        };
        if bytes[..8] != MAGIC || word(48) != crc32fast::hash(&bytes[..48]) {
            return FoundHeader::None;
        }
        if word(8) != VERSION {
            return FoundHeader::Newer;
        }
        let id = |at: usize| bytes[at..at + 16].try_into().unwrap_or_default();
        FoundHeader::Intact(Self {
            identity: ColdIdentity {
                region: id(16),
                medium: id(32),
            },
            generation: word(12),
        })
    }
}

/// Bytes that an index is in.
enum Backing {
    File(File),
    /// A medium of the crash simulator.
    Medium(Arc<dyn Medium>),
}

impl Backing {
    fn len(&self) -> io::Result<u64> {
        match self {
            Self::File(file) => Ok(file.metadata()?.len()),
            Self::Medium(medium) => Ok(medium.capacity_bytes()),
        }
    }

    /// Reads bytes; those behind the end are zeros.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        match self {
            Self::File(file) => {
                let mut filled = 0;
                while filled < into.len() {
                    match file.read_at(&mut into[filled..], at + to_u64(filled)) {
                        Ok(0) => break,
                        Ok(read) => filled += read,
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(())
            }
            Self::Medium(medium) => {
                let there = medium.capacity_bytes().saturating_sub(at);
                let len = into.len().min(to_usize(there));
                medium.read(at, &mut into[..len])
            }
        }
    }

    /// Writes bytes, and waits until they are durable.
    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::File(file) => {
                file.write_all_at(bytes, at)?;
                file.sync_data()
            }
            Self::Medium(medium) => {
                let mut flushed = Flushed::new();
                // SAFETY: the index alone uses the medium, and reads and writes it under its lock.
                unsafe { medium.write(at, bytes)? };
                medium.flush(at, to_u64(bytes.len()), &mut flushed)?;
                medium.fence(&mut flushed)
            }
        }
    }
}

/// Entries of all blocks.
pub(crate) struct Index {
    backing: Backing,
    /// Entries that were read or written.
    known: Mutex<HashMap<u64, Entry>>,
    /// Held while the bytes are read or written: an entry that was read must not take the place of one written since.
    using: Mutex<()>,
}

impl Index {
    /// Makes the file of an index, if it is missing.
    pub(crate) fn create(path: &Path) -> io::Result<()> {
        use std::os::unix::fs::OpenOptionsExt as _;
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)?;
        file.sync_all()
    }

    /// Opens the index in a file. A missing one is not made: an empty index names no object, so all would be removed.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        Ok(Self::of(Backing::File(file)))
    }

    /// Opens the index on a medium.
    pub(crate) fn on(medium: Arc<dyn Medium>) -> Self {
        Self::of(Backing::Medium(medium))
    }

    fn of(backing: Backing) -> Self {
        Self {
            backing,
            known: Mutex::default(),
            using: Mutex::default(),
        }
    }

    /// Returns the header.
    pub(crate) fn header(&self) -> io::Result<FoundHeader> {
        let _using = self.using.lock();
        let mut found = FoundHeader::None;
        for copy in 0..2 {
            let mut bytes = [0; HEADER_BYTES];
            self.backing.read(copy * HEADER_STEP, &mut bytes)?;
            found = Header::decode(&bytes);
            if found != FoundHeader::None {
                break;
            }
        }
        Ok(found)
    }

    /// Writes the header, durably.
    pub(crate) fn set_header(&self, header: Header) -> io::Result<()> {
        let _using = self.using.lock();
        for copy in 0..2 {
            self.backing.write(copy * HEADER_STEP, &header.encode())?;
        }
        Ok(())
    }

    /// Returns the entry of a block.
    pub(crate) fn get(&self, block: u64) -> io::Result<Entry> {
        if let Some(entry) = self.known.lock().get(&block) {
            return Ok(*entry);
        }
        let _using = self.using.lock();
        if let Some(entry) = self.known.lock().get(&block) {
            return Ok(*entry);
        }
        let mut bytes = [0; 2 * COPY_BYTES];
        self.backing.read(entry_at(block), &mut bytes)?;
        let (first, second) = bytes.split_at(COPY_BYTES);
        let entry = Entry::decode(block, first).or_else(|| Entry::decode(block, second));
        let entry = entry.ok_or_else(|| {
            io::Error::other(format!("both copies of index entry {block} are damaged"))
        })?;
        // A crash between the copies: a later one must not find the older.
        if Entry::decode(block, second) != Some(entry) {
            self.write_copy(block, 1, entry)?;
        }
        self.known.lock().insert(block, entry);
        Ok(entry)
    }

    /// Sets the entry of a block, durably.
    pub(crate) fn set(&self, block: u64, entry: Entry) -> io::Result<()> {
        let _using = self.using.lock();
        self.write_copy(block, 0, entry)?;
        self.known.lock().insert(block, entry);
        self.write_copy(block, 1, entry)
    }

    fn write_copy(&self, block: u64, copy: u64, entry: Entry) -> io::Result<()> {
        let at = entry_at(block) + copy * (ENTRY_BYTES / 2);
        self.backing.write(at, &entry.encode(block))
    }

    /// Returns the number of blocks that the file has entries for.
    pub(crate) fn len(&self) -> io::Result<u64> {
        let entries = self.backing.len()?.saturating_sub(ENTRIES_AT);
        Ok(entries.div_ceil(ENTRY_BYTES))
    }
}

fn entry_at(block: u64) -> u64 {
    ENTRIES_AT.saturating_add(block.saturating_mul(ENTRY_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_as_it_was_set_while_one_copy_is_intact() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("index");
        let entry = Entry {
            object: 5,
            kept: Pages::of([0, 200].into_iter()),
            out: Pages::of([1, 511].into_iter()),
            stored_bytes: 77,
        };
        Index::open(&path).err().unwrap();
        Index::create(&path).unwrap();
        let index = Index::open(&path).unwrap();
        assert_eq!(index.get(3).unwrap(), Entry::default());
        index.set(3, entry).unwrap();
        assert_eq!(index.len().unwrap(), 4);
        let damage = |copy: u64| {
            let file = File::options().write(true).open(&path).unwrap();
            file.write_all_at(&[9], entry_at(3) + copy * (ENTRY_BYTES / 2) + 4)
                .unwrap();
        };
        for copy in 0..2 {
            damage(copy);
            let again = Index::open(&path).unwrap();
            assert_eq!(again.get(3).unwrap(), entry);
            again.set(3, entry).unwrap();
        }
        damage(0);
        damage(1);
        Index::open(&path).unwrap().get(3).unwrap_err();
        assert_eq!(entry.kept.rank(200), Some(1));
        assert_eq!((entry.kept.rank(1), entry.kept.count()), (None, 2));
    }

    #[test]
    fn a_header_is_as_it_was_set_while_one_copy_is_intact() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("index");
        Index::create(&path).unwrap();
        let index = Index::open(&path).unwrap();
        assert_eq!(index.header().unwrap(), FoundHeader::None);
        let header = Header {
            identity: ColdIdentity {
                region: [1; 16],
                medium: [2; 16],
            },
            generation: 7,
        };
        index.set_header(header).unwrap();
        assert_eq!(index.len().unwrap(), 0);
        let write = |at: u64, byte: u8| {
            let file = File::options().write(true).open(&path).unwrap();
            file.write_all_at(&[byte], at).unwrap();
        };
        for copy in 0..2 {
            write(copy * HEADER_STEP + 13, 9);
            assert_eq!(index.header().unwrap(), FoundHeader::Intact(header));
            index.set_header(header).unwrap();
        }
        for copy in 0..2 {
            write(copy * HEADER_STEP + 13, 9);
        }
        assert_eq!(index.header().unwrap(), FoundHeader::None);
    }

    #[test]
    fn an_entry_that_is_looked_up_while_it_is_written_is_not_the_one_before() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("index");
        Index::create(&path).unwrap();
        let index = Index::open(&path).unwrap();
        let entry = |block| Entry {
            object: block + 1,
            ..Entry::default()
        };
        // Both threads go through the blocks in the same order, so some look-ups meet a write.
        for first in (0..40_000).step_by(200) {
            std::thread::scope(|scope| {
                scope.spawn(|| (first..first + 200).for_each(|n| drop(index.get(n))));
                (first..first + 200).for_each(|n| index.set(n, entry(n)).unwrap());
            });
        }
        for block in 0..40_000 {
            assert_eq!(index.get(block).unwrap(), entry(block));
        }
    }
}
