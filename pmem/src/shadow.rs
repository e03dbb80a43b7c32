//! A session's writes: pages go into segments that nothing refers to before the seal.

use std::io;
use std::sync::Arc;

use crate::checkpoint::StoredCheckpoint;
use crate::encrypted::Encryption;
use crate::error::ShadowError;
use crate::ids::PageNo;
use crate::map::{
    FindEqual, Kept, MapCursor, MapRoot, MapStats, MapWriter, ParentPage, WrittenObjects,
};
use crate::region::Region;
use crate::segment::SegmentWriter;
use crate::{PAGE_BYTES, PAGE_SIZE};
use permafrost_cipher::PageCipher;
use permafrost_medium::Medium;
use permafrost_medium::convert::to_u64;

/// Bytes of a blob read at a time.
const BLOB_CHUNK: usize = 64 * PAGE_SIZE;

/// A checkpoint in the making. Dropped without a seal, its segments are free again.
pub struct Shadow {
    pub(crate) region: Arc<Region>,
    pub(crate) out: SegmentWriter,
    /// Objects that are finished, and that the next ones are compared with.
    written: WrittenObjects,
    /// Other checkpoints that have pages in common with this dump, maybe.
    others: Option<Box<dyn FindEqual>>,
}

impl Shadow {
    pub(crate) fn new(region: Arc<Region>, encryption: Option<Encryption>) -> Self {
        let out = SegmentWriter::new(region.space(), encryption);
        Self {
            region,
            out,
            written: WrittenObjects::default(),
            others: None,
        }
    }

    /// Returns true if pages are encrypted, which takes longer than all else that is done with one.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.out.is_encrypted()
    }

    /// Compares pages that are neither the parent's nor another object's with those that `others` finds, too.
    pub fn look_in(&mut self, others: Box<dyn FindEqual>) {
        self.others = Some(others);
    }

    /// Makes a page map, one for every object (an address space, an image file).
    #[must_use]
    pub fn map(&self) -> MapWriter {
        MapWriter::new()
    }

    /// Appends whole pages of an object, ascending: the first has index `first_index`, the others follow. A zero page
    /// is not stored. A page that equals the parent's at this index (checksum first, then every byte) is referred to.
    /// So is, if both objects ask for it ([`MapWriter::share_with_siblings`]), a page that equals another object's at
    /// this index. Any other page is stored, also where the parent is damaged and cannot be compared, which
    /// [`MapStats::parent_damaged`] counts.
    ///
    /// Meant for a buffer that is still in the cache: each page is read for its checksum and then copied around the
    /// cache, in chunks of a page.
    ///
    /// # Errors
    /// [`ShadowError`]; the shadow can then only be dropped.
    pub fn append(
        &mut self,
        w: &mut MapWriter,
        first_index: u64,
        flags: u16,
        pages: &[u8],
        mut parent: Option<&mut MapCursor>,
    ) -> Result<(), ShadowError> {
        let (whole, rest) = pages.as_chunks::<PAGE_SIZE>();
        if !rest.is_empty() {
            return Err(ShadowError::NotPages {
                len_bytes: pages.len(),
            });
        }
        w.admit(first_index, to_u64(whole.len()))?;
        if let Some(parent) = parent.as_deref() {
            self.check_region(parent)?;
        }
        for (page, index) in whole.iter().zip(first_index..) {
            if permafrost_medium::is_zero(page) {
                w.stats.zero += 1;
                w.push_zero(&mut self.out, index, flags, 1)?;
                w.note(index, 1, flags, Kept::Zero);
                continue;
            }
            let crc = crc32fast::hash(page);
            if let Some(parent) = parent.as_deref_mut()
                && self.refer_if_equal(w, (parent, index), index, flags, page, crc)?
            {
                w.stats.parent += 1;
                w.beside(parent);
                w.note(index, 1, flags, Kept::Parent);
                continue;
            }
            if self.refer_to_others(w, index, flags, page, crc)? {
                w.note(index, 1, flags, Kept::Stored);
                continue;
            }
            let place = match self.sibling_page(w, index, page, crc) {
                Some(place) => {
                    w.stats.sibling += 1;
                    place
                }
                None => {
                    w.stats.stored += 1;
                    self.out.append(page, crc)?
                }
            };
            w.push_stored(&mut self.out, index, flags, place, crc)?;
            w.note(index, 1, flags, Kept::Stored);
        }
        Ok(())
    }

    /// Refers to pages that the parent has at these indices, with the flags they have there, without reading them.
    /// The parent must have all of them.
    ///
    /// # Errors
    /// [`ShadowError::MissingInParent`] names the first page that is not there, [`ShadowError::Corrupt`] the damage
    /// in the parent's map: without these pages there is no checkpoint. Others as for [`append`](Self::append).
    pub fn reference(
        &mut self,
        w: &mut MapWriter,
        first_index: u64,
        pages: u64,
        parent: &mut MapCursor,
    ) -> Result<(), ShadowError> {
        self.refer(w, first_index, pages, None, parent)
    }

    /// Refers to pages as [`reference`](Self::reference) does, but the pages get `flags`.
    ///
    /// # Errors
    /// The errors of [`reference`](Self::reference).
    pub fn reference_as(
        &mut self,
        w: &mut MapWriter,
        first_index: u64,
        flags: u16,
        pages: u64,
        parent: &mut MapCursor,
    ) -> Result<(), ShadowError> {
        self.refer(w, first_index, pages, Some(flags), parent)
    }

    /// Appends zero pages without a buffer. The cost hardly depends on their number.
    ///
    /// # Errors
    /// The errors of [`append`](Self::append).
    pub fn append_zeros(
        &mut self,
        w: &mut MapWriter,
        first_index: u64,
        flags: u16,
        pages: u64,
    ) -> Result<(), ShadowError> {
        w.admit(first_index, pages)?;
        w.stats.zero += pages;
        w.push_zero(&mut self.out, first_index, flags, pages)?;
        if pages > 0 {
            w.note(first_index, pages, flags, Kept::Zero);
        }
        Ok(())
    }

    fn refer(
        &mut self,
        w: &mut MapWriter,
        first_index: u64,
        pages: u64,
        new_flags: Option<u16>,
        parent: &mut MapCursor,
    ) -> Result<(), ShadowError> {
        w.admit(first_index, pages)?;
        self.check_region(parent)?;
        let end = first_index + pages;
        let mut index = first_index;
        while index < end {
            let part = if let Some(block) = parent.block(index, end, new_flags)? {
                self.out
                    .holdings()
                    .inherit(parent.map().checkpoint().lease());
                w.push_block(&mut self.out, &block)?;
                w.note(index, block.pages(), block.flags, Kept::Parent);
                block.pages()
            } else {
                let found = parent.find(index)?;
                let found = found.ok_or(ShadowError::MissingInParent { index })?;
                let flags = new_flags.unwrap_or(found.flags);
                let part = found.end_index().min(end) - index;
                if let Some((location, crc)) = found.stored {
                    self.out.holdings().share(parent.place(location)?.segment);
                    w.push_stored(&mut self.out, index, flags, location, crc)?;
                    w.note(index, part, flags, Kept::Parent);
                } else {
                    w.push_zero(&mut self.out, index, flags, part)?;
                    w.note(index, part, flags, Kept::Zero);
                }
                part
            };
            w.beside(parent);
            w.stats.parent += part;
            index += part;
        }
        Ok(())
    }

    /// Ends a map and returns the root that a manifest needs to refer to it, and its statistics.
    ///
    /// # Errors
    /// The errors of [`append`](Self::append).
    pub fn finish(&mut self, mut w: MapWriter) -> Result<(MapRoot, MapStats), ShadowError> {
        if let Some(written) = w.written.take() {
            self.written.add(written);
        }
        w.finish(&mut self.out)
    }

    /// Stores everything that `source` yields; the last page is filled up with zeros. Returns the map, its
    /// statistics, and the length in bytes.
    ///
    /// # Errors
    /// [`ShadowError::Source`] if reading fails; others as for [`append`](Self::append).
    pub fn write_blob(
        &mut self,
        source: &mut dyn io::Read,
    ) -> Result<(MapRoot, MapStats, u64), ShadowError> {
        let mut w = self.map();
        let mut buffer = vec![0; BLOB_CHUNK];
        let mut len_bytes = 0;
        loop {
            let filled = fill(source, &mut buffer).map_err(ShadowError::Source)?;
            let index = len_bytes / PAGE_BYTES;
            len_bytes += to_u64(filled);
            let padded = filled.next_multiple_of(PAGE_SIZE);
            buffer[filled..padded].fill(0);
            self.append(&mut w, index, 0, &buffer[..padded], None)?;
            if filled < buffer.len() {
                let (root, stats) = self.finish(w)?;
                return Ok((root, stats, len_bytes));
            }
        }
    }

    /// Takes hold of all of a checkpoint's segments: its map roots are valid in this shadow's manifest, and its pages
    /// live as long as the checkpoint that this shadow becomes.
    pub fn inherit(&mut self, from: &Arc<StoredCheckpoint>) {
        // Segments of another region mean nothing here; map roots in it would not verify either.
        if !Arc::ptr_eq(from.space(), self.out.space()) {
            return;
        }
        self.out.holdings().inherit(from.lease());
    }

    /// Bytes of pages written so far: data, maps, blobs. The region may have up to a segment less: the next shadow
    /// begins in what is left of the last one.
    #[must_use]
    pub fn added_bytes(&self) -> u64 {
        self.out.pages_written() * PAGE_BYTES
    }

    /// Makes everything appended so far durable, but for a page with nodes that the root may go to, at the cost of a
    /// fence if there is anything. Nothing refers to it yet: a crash still frees it.
    ///
    /// # Errors
    /// [`ShadowError::Io`].
    pub fn flush(&mut self) -> Result<(), ShadowError> {
        Ok(self.out.flush_and_fence()?)
    }

    /// Refers to a page of another checkpoint that equals `page`; returns true if one was found.
    fn refer_to_others(
        &mut self,
        w: &mut MapWriter,
        index: u64,
        flags: u16,
        page: &[u8; PAGE_SIZE],
        crc: u32,
    ) -> Result<bool, ShadowError> {
        let Some(mut others) = self.others.take() else {
            return Ok(false);
        };
        let mut equal = Ok(false);
        let damaged = w.stats.parent_damaged;
        if let Some((cursor, theirs)) = others.find(index, crc) {
            self.check_region(cursor)?;
            equal = self.refer_if_equal(w, (cursor, theirs), index, flags, page, crc);
            if let Ok(true) = equal {
                w.stats.shared += 1;
                w.keep(cursor.map().checkpoint());
            }
        }
        // Damage elsewhere is not the parent's.
        w.stats.parent_damaged = damaged;
        self.others = Some(others);
        equal
    }

    /// Refers to a parent's page, at `their_index`, if it equals `page`; returns true if it does. The comparison only
    /// saves space, so damage in the parent is counted: the page that is stored instead is intact.
    fn refer_if_equal(
        &mut self,
        w: &mut MapWriter,
        (parent, their_index): (&mut MapCursor, u64),
        index: u64,
        flags: u16,
        page: &[u8; PAGE_SIZE],
        crc: u32,
    ) -> Result<bool, ShadowError> {
        let (location, place, theirs) = match parent.page(their_index) {
            Ok(Some(ParentPage::Stored {
                location,
                place,
                crc,
            })) => (location, place, crc),
            Ok(_) => return Ok(false),
            // Tried again at the next page: that costs no more than a node's checksum, and what follows
            // may be under another node.
            Err(_) => {
                w.stats.parent_damaged += 1;
                return Ok(false);
            }
        };
        if theirs != crc {
            return Ok(false);
        }
        let Ok((at, cipher)) = self.out.space().locate_encrypted(place, 1) else {
            w.stats.parent_damaged += 1;
            return Ok(false);
        };
        // SAFETY: the cursor's checkpoint holds the page's segment (the cursor has checked it) and lives as long as
        // the cursor; sealed segments are not written to, and a segment that is moved stays where it was, too, while
        // the checkpoint lives.
        let Ok(old) = (unsafe { self.out.space().medium.bytes(at, PAGE_SIZE) }) else {
            w.stats.parent_damaged += 1;
            return Ok(false);
        };
        let mut decrypted = [0; PAGE_SIZE];
        let old = plain(old, cipher.as_deref(), location, &mut decrypted);
        if old != page {
            // The parent's page differs: a collision of checksums, or far more likely damage.
            w.stats.parent_damaged += u64::from(crc32fast::hash(old) != crc);
            return Ok(false);
        }
        self.out.holdings().share(place.segment);
        w.push_stored(&mut self.out, index, flags, location, crc)?;
        Ok(true)
    }

    /// Returns the location of a page of another object, at the same index, that equals `page`.
    fn sibling_page(
        &mut self,
        w: &MapWriter,
        index: u64,
        page: &[u8; PAGE_SIZE],
        crc: u32,
    ) -> Option<PageNo> {
        w.written.as_ref()?;
        let location = self.written.find(index, crc)?;
        let space = self.out.space();
        let place = space.geometry.place(location, 1).ok()?;
        let (at, cipher) = space.locate_encrypted(place, 1).ok()?;
        // SAFETY: either this shadow has written the page, once, and a segment that a shadow is writing is not moved;
        // or it is a parent's, and the list of written objects keeps a reference to that.
        let theirs = unsafe { space.medium.bytes(at, PAGE_SIZE) }.ok()?;
        let mut decrypted = [0; PAGE_SIZE];
        let theirs = plain(theirs, cipher.as_deref(), location, &mut decrypted);
        (theirs == page).then_some(location)
    }

    fn check_region(&self, parent: &MapCursor) -> Result<(), ShadowError> {
        let same = Arc::ptr_eq(parent.map().checkpoint().space(), self.out.space());
        if same {
            Ok(())
        } else {
            Err(ShadowError::ForeignRegion)
        }
    }
}

/// Returns the content of a stored page, which is decrypted into a buffer if it is encrypted.
fn plain<'p>(
    stored: &'p [u8],
    cipher: Option<&PageCipher>,
    location: PageNo,
    buffer: &'p mut [u8; PAGE_SIZE],
) -> &'p [u8] {
    let Some(cipher) = cipher else {
        return stored;
    };
    buffer.copy_from_slice(stored);
    cipher.decrypt(location.0, buffer);
    buffer
}

/// Reads until the buffer is full or the source ends.
fn fill(source: &mut dyn io::Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match source.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

const _: () = assert!(BLOB_CHUNK.is_multiple_of(PAGE_SIZE));
