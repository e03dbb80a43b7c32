//! The index of a cold medium: a file that says which object each block has, and which pages stay in the file.
//!
//! Two copies of an entry, 96 bytes each: number of the object, bitmap of the pages that stay, CRC32 of both with the
//! block's number. Zeros: the block has no object. The second copy is written when the first is durable, so a crash
//! leaves one of them intact; the first counts if it is.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use parking_lot::Mutex;
use permafrost_medium::convert::to_usize;

/// Bytes of a copy of an entry.
const COPY_BYTES: usize = 96;
/// Bytes of both copies, and of the room for each entry.
const ENTRY_BYTES: u64 = 2 * COPY_BYTES as u64;
/// Bytes of a copy that the checksum is over.
const CHECKED_BYTES: usize = 72;

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
}

impl Entry {
    fn encode(self, block: u64) -> [u8; COPY_BYTES] {
        let mut bytes = [0; COPY_BYTES];
        if self == Self::default() {
            return bytes;
        }
        bytes[..8].copy_from_slice(&self.object.to_le_bytes());
        for (at, word) in self.kept.0.iter().enumerate() {
            bytes[8 + 8 * at..16 + 8 * at].copy_from_slice(&word.to_le_bytes());
        }
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
        })
    }
}

fn checksum(block: u64, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&block.to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

/// Entries of all blocks.
pub(crate) struct Index {
    file: File,
    /// Entries that were read or written.
    known: Mutex<HashMap<u64, Entry>>,
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
        Ok(Self {
            file,
            known: Mutex::default(),
        })
    }

    /// Returns the entry of a block.
    pub(crate) fn get(&self, block: u64) -> io::Result<Entry> {
        if let Some(entry) = self.known.lock().get(&block) {
            return Ok(*entry);
        }
        let mut bytes = [0; 2 * COPY_BYTES];
        let mut filled = 0;
        while filled < bytes.len() {
            let at = block * ENTRY_BYTES + permafrost_medium::convert::to_u64(filled);
            match self.file.read_at(&mut bytes[filled..], at) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
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
        self.write_copy(block, 0, entry)?;
        self.known.lock().insert(block, entry);
        self.write_copy(block, 1, entry)
    }

    fn write_copy(&self, block: u64, copy: u64, entry: Entry) -> io::Result<()> {
        let at = block * ENTRY_BYTES + copy * (ENTRY_BYTES / 2);
        self.file.write_all_at(&entry.encode(block), at)?;
        self.file.sync_data()
    }

    /// Returns the number of blocks that the file has entries for.
    pub(crate) fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len().div_ceil(ENTRY_BYTES))
    }
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
        };
        Index::open(&path).err().unwrap();
        Index::create(&path).unwrap();
        let index = Index::open(&path).unwrap();
        assert_eq!(index.get(3).unwrap(), Entry::default());
        index.set(3, entry).unwrap();
        assert_eq!(index.len().unwrap(), 4);
        for copy in 0..2 {
            let file = File::options().write(true).open(&path).unwrap();
            file.write_all_at(&[9], 3 * ENTRY_BYTES + copy * 96 + 4)
                .unwrap();
            let again = Index::open(&path).unwrap();
            assert_eq!(again.get(3).unwrap(), entry);
            again.set(3, entry).unwrap();
        }
        let file = File::options().write(true).open(&path).unwrap();
        for copy in 0..2 {
            file.write_all_at(&[9], 3 * ENTRY_BYTES + copy * 96 + 4)
                .unwrap();
        }
        Index::open(&path).unwrap().get(3).unwrap_err();
        assert_eq!(entry.kept.rank(200), Some(1));
        assert_eq!((entry.kept.rank(1), entry.kept.count()), (None, 2));
    }
}
