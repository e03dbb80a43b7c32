//! Writing pages into segments.

use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use crate::alloc::{Allocated, Holdings};
use crate::encrypted::{Encryption, WHOLE_PAGE};
use crate::error::ShadowError;
use crate::geometry::Geometry;
use crate::ids::{PageNo, SegmentNo};
use crate::layout::{ROOT_HEAD_BYTES, SEGMENT_MAGIC, SegmentHeader};
use crate::space::Space;
use crate::{PAGE_BYTES, PAGE_SIZE};
use permafrost_cipher::BLOCK_BYTES;
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{Flushed, LostPage, Medium};

/// Writer that appends pages to a shadow's own segments, one segment after the other.
pub(crate) struct SegmentWriter {
    space: Arc<Space>,
    holdings: Holdings,
    /// Key that pages are written with; `None`: in the clear.
    encryption: Option<Encryption>,
    open: Option<OpenSegment>,
    nodes: Option<NodePage>,
    /// Allocated ahead of need, last one first.
    reserved: Vec<Allocated>,
    pages_written: u64,
    /// True if a segment was taken.
    has_begun: bool,
    /// True if a page of nodes was begun.
    has_nodes: bool,
    /// Flushed, and no fence came after it.
    flushed: Flushed,
}

/// A page of map nodes that has room for more. Its place is taken, and blank; it is written before its segment's
/// header is for the last time.
struct NodePage {
    location: PageNo,
    /// Its place in the open segment.
    place: u32,
    used: usize,
    bytes: Box<[u8; PAGE_SIZE]>,
    /// True while the next place is taken for it, too, and blank: for more nodes, or for the second copy if the page
    /// becomes the root. The page then has room for the head of a root.
    has_spare: bool,
}

impl NodePage {
    fn new(location: PageNo, place: u32, has_spare: bool) -> Self {
        Self {
            location,
            place,
            used: if has_spare { ROOT_HEAD_BYTES } else { 0 },
            bytes: Box::new([0; PAGE_SIZE]),
            has_spare,
        }
    }
}

/// A page of map nodes that becomes a root page.
pub(crate) struct NodesOfRoot {
    nodes: NodePage,
    /// Pages of the shadow behind it and its copy, in the same segment.
    pub(crate) pages_behind: u32,
}

impl NodesOfRoot {
    /// Returns the nodes: the beginning of the page's body.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.nodes.bytes[ROOT_HEAD_BYTES..self.nodes.used]
    }
}

/// Bytes of an entry of a header's checksums.
const CRC_BYTES: usize = size_of::<U32>();

/// Segments in which a page of one append was lost before the medium counts as failed.
const MAX_LOST_SEGMENTS: u32 = 16;

/// Segment that pages are appended to. Its header stays in DRAM until it is full or flushed.
struct OpenSegment {
    segment: Allocated,
    /// Place of the shadow's first page in the segment: behind those of others, in a tail.
    first: u32,
    /// Place of the next page in the segment.
    next: u32,
    /// Place up to which pages are flushed, and the header with their checksums.
    flushed: u32,
    header: Box<SegmentHeader>,
}

impl SegmentWriter {
    pub(crate) fn new(space: &Arc<Space>, encryption: Option<Encryption>) -> Self {
        Self {
            encryption,
            space: Arc::clone(space),
            holdings: Holdings::new(space),
            open: None,
            nodes: None,
            reserved: Vec::new(),
            pages_written: 0,
            has_begun: false,
            has_nodes: false,
            flushed: Flushed::new(),
        }
    }

    /// Fails if the key that pages are encrypted with was taken from the keyring.
    pub(crate) fn check_key(&self) -> Result<(), ShadowError> {
        match &self.encryption {
            Some(key) => Encryption::of(&self.space.keys, key.id).map(drop),
            None => Ok(()),
        }
    }

    pub(crate) fn is_encrypted(&self) -> bool {
        self.encryption.is_some()
    }

    pub(crate) fn space(&self) -> &Arc<Space> {
        &self.space
    }

    pub(crate) fn holdings(&mut self) -> &mut Holdings {
        &mut self.holdings
    }

    /// Returns the holdings, and the tail that the last segment has: its number, and the place behind its last page.
    pub(crate) fn into_holdings(self) -> (Holdings, Option<(SegmentNo, u32)>) {
        let tail = self.open.map(|open| (open.segment.segment, open.next));
        (self.holdings, tail)
    }

    /// Pages appended so far.
    pub(crate) fn pages_written(&self) -> u64 {
        self.pages_written
    }

    /// Returns the multiple to which the parts of a root page are filled up.
    pub(crate) fn root_alignment(&self) -> usize {
        self.encryption.as_ref().map_or(1, |_| BLOCK_BYTES)
    }

    /// Writes one page, whose CRC32 is `crc`, to the next place. Not flushed yet.
    pub(crate) fn append(
        &mut self,
        page: &[u8; PAGE_SIZE],
        crc: u32,
    ) -> Result<PageNo, ShadowError> {
        self.append_parts(page, crc, &[WHOLE_PAGE], None)
    }

    /// Writes one page to the next place, with those parts of it encrypted: under its own number, or that of its other
    /// copy.
    fn append_parts(
        &mut self,
        page: &[u8; PAGE_SIZE],
        crc: u32,
        parts: &[Range<usize>],
        copy_of: Option<PageNo>,
    ) -> Result<PageNo, ShadowError> {
        let mut lost_segments = 0;
        loop {
            let (place, at) = self.next_place()?;
            let encrypted;
            let (stored, crc) = match &self.encryption {
                Some(encryption) => {
                    encrypted = encryption.encrypted(copy_of.unwrap_or(place), parts, page);
                    (&encrypted, crc32fast::hash(&encrypted))
                }
                None => (page, crc),
            };
            // Proven by `next_place`, which is the only way here without an open segment.
            let Some(open) = self.open.as_mut() else {
                return Ok(place);
            };
            let medium = &self.space.medium;
            // SAFETY: the page lies in a segment that this shadow alone writes to, behind everything appended
            // so far; it is referred to, and so read, once this call has returned its place.
            match unsafe { medium.write_streaming(at, stored) } {
                Ok(()) => {
                    open.header.crcs[to_usize(u64::from(open.next))] = U32::new(crc);
                    open.next += 1;
                    self.pages_written += 1;
                    return Ok(place);
                }
                // The next segment is tried; the allocator never hands this one out again.
                Err(error)
                    if LostPage::of(&error).is_some() && lost_segments < MAX_LOST_SEGMENTS =>
                {
                    lost_segments += 1;
                    self.close_segment()?;
                }
                Err(error) => {
                    self.space.fail("write pages", &error);
                    return Err(error.into());
                }
            }
        }
    }

    /// Writes a map node of less than a page behind others, and returns its page and its byte offset there.
    pub(crate) fn append_node(&mut self, node: &[u8]) -> Result<(PageNo, u16), ShadowError> {
        let room = |page: &NodePage| page.used + node.len() <= PAGE_SIZE;
        if !self.nodes.as_ref().is_some_and(room) {
            self.begin_nodes()?;
        }
        let Some(page) = self.nodes.as_mut() else {
            return Ok((PageNo(0), 0));
        };
        let offset = page.used;
        page.used += node.len();
        page.bytes[offset..page.used].copy_from_slice(node);
        Ok((page.location, u16::try_from(offset).unwrap_or(u16::MAX)))
    }

    /// Begins a page of nodes. The first takes two places side by side, so that it may become the root; the second is
    /// in the other place then. Later ones take one: behind many nodes a page for the root is little.
    fn begin_nodes(&mut self) -> Result<(), ShadowError> {
        let last = self.nodes.as_ref().filter(|last| last.has_spare);
        let spare = last.map(|last| NodePage::new(last.location.plus(1), last.place + 1, false));
        self.end_nodes()?;
        self.nodes = spare;
        if self.nodes.is_some() {
            return Ok(());
        }
        // A page that the medium cannot take shows now, before anything refers to it.
        let blank = Box::new([0; PAGE_SIZE]);
        let pages = self.space.geometry.segment_pages();
        let is_last = |open: &OpenSegment| open.next + 1 == pages;
        let is_later = std::mem::replace(&mut self.has_nodes, true);
        let is_single = is_later || self.open.as_ref().is_some_and(is_last);
        let mut location = self.append(&blank, 0)?;
        let mut has_spare = false;
        if !is_single {
            let next = self.append(&blank, 0)?;
            has_spare = next == location.plus(1);
            if !has_spare {
                // The medium could not take a page: the next one is in another segment.
                location = next;
            }
        }
        let behind = 1 + u32::from(has_spare);
        let place = self.open.as_ref().map_or(0, |open| open.next - behind);
        self.nodes = Some(NodePage::new(location, place, has_spare));
        Ok(())
    }

    /// Writes the page of nodes.
    pub(crate) fn end_nodes(&mut self) -> io::Result<()> {
        match self.nodes.take() {
            Some(mut page) => {
                if let Some(encryption) = &self.encryption {
                    encryption.apply(page.location, &[WHOLE_PAGE], &mut page.bytes);
                }
                self.write_taken(page.place, 1, &page.bytes)
            }
            None => Ok(()),
        }
    }

    /// Returns the bytes that a root page has behind the nodes, if the page of nodes can become one.
    pub(crate) fn room_behind_nodes(&self) -> Option<usize> {
        let page = self.nodes.as_ref().filter(|page| page.has_spare)?;
        Some(PAGE_SIZE - page.used.next_multiple_of(self.root_alignment()))
    }

    /// Takes the page of nodes, to become a root page with so many more bytes; `None` if it cannot.
    pub(crate) fn take_nodes(&mut self, more_bytes: usize) -> Option<NodesOfRoot> {
        self.room_behind_nodes()
            .filter(|room| more_bytes <= *room)?;
        let (nodes, open) = (self.nodes.take()?, self.open.as_ref()?);
        Some(NodesOfRoot {
            pages_behind: open.next - (nodes.place + 2),
            nodes,
        })
    }

    /// Writes a root page with the nodes that were taken, twice, with those parts of it encrypted; gives the place of
    /// the first copy.
    pub(crate) fn write_root(
        &mut self,
        taken: &NodesOfRoot,
        page: &[u8; PAGE_SIZE],
        parts: &[Range<usize>],
    ) -> io::Result<PageNo> {
        let mut page = *page;
        if let Some(encryption) = &self.encryption {
            encryption.apply(taken.nodes.location, parts, &mut page);
        }
        self.write_taken(taken.nodes.place, 2, &page)?;
        Ok(taken.nodes.location)
    }

    /// Writes a page to places in the open segment that are taken and blank.
    fn write_taken(&mut self, first: u32, copies: u32, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        let Some(open) = self.open.as_mut() else {
            return Ok(());
        };
        // Flushed again, if it was.
        open.flushed = open.flushed.min(first);
        let crc = crc32fast::hash(page);
        for place in first..first + copies {
            open.header.crcs[to_usize(u64::from(place))] = U32::new(crc);
            let at = open.segment.header_at + u64::from(place) * PAGE_BYTES;
            // SAFETY: a page that this shadow has appended, that nothing durable refers to, and that it does not read.
            let written = unsafe { self.space.medium.write_streaming(at, page) };
            written.inspect_err(|error| {
                if LostPage::of(error).is_none() {
                    self.space.fail("write pages", error);
                }
            })?;
        }
        Ok(())
    }

    /// Writes one page twice, side by side in one segment, with those parts of it encrypted; gives the place of the
    /// first.
    pub(crate) fn append_twice(
        &mut self,
        page: &[u8; PAGE_SIZE],
        parts: &[Range<usize>],
    ) -> Result<PageNo, ShadowError> {
        let crc = crc32fast::hash(page);
        let pages = self.space.geometry.segment_pages();
        if self
            .open
            .as_ref()
            .is_some_and(|open| open.next + 1 == pages)
        {
            // One place left: skip it.
            self.close_segment()?;
        }
        let first = self.append_parts(page, crc, parts, None)?;
        self.append_parts(page, crc, parts, Some(first))?;
        Ok(first)
    }

    /// Allocates segments until `pairs` more pages can be appended twice each.
    pub(crate) fn reserve_pairs(&mut self, pairs: usize) -> Result<(), ShadowError> {
        let pages = self.space.geometry.segment_pages();
        let room = |next: u32| to_usize(u64::from((pages - next) / 2));
        loop {
            let here = self.open.as_ref().map_or(0, |open| room(open.next));
            let reserved = self.reserved.iter().map(|taken| room(taken.first_page));
            if here + reserved.sum::<usize>() >= pairs {
                return Ok(());
            }
            let segment = self.allocate()?;
            self.reserved.insert(0, segment);
        }
    }

    /// Begins making everything appended durable, but for a page of nodes that may become the root. To be followed by
    /// a fence.
    fn flush(&mut self) -> io::Result<()> {
        if self.room_behind_nodes().is_none() {
            self.end_nodes()?;
        }
        match self.open.as_mut() {
            Some(open) => open.flush(&self.space, &mut self.flushed),
            None => Ok(()),
        }
    }

    /// Makes everything appended durable; costs a fence if there is anything that is not.
    pub(crate) fn flush_and_fence(&mut self) -> io::Result<()> {
        self.flush()?;
        if self.flushed.is_empty() {
            return Ok(());
        }
        self.space.fence(&mut self.flushed)
    }

    /// Takes a segment; its entry in the segment table is flushed, if it needs one. Only the first may be the tail of
    /// one: the runs of a large dump are to be long.
    fn allocate(&mut self) -> Result<Allocated, ShadowError> {
        let taken = if std::mem::replace(&mut self.has_begun, true) {
            self.holdings.allocate()?
        } else {
            let key = self.encryption.as_ref().map(|encryption| encryption.id);
            self.holdings.begin(key)?
        };
        if taken.needs_entry {
            let (space, flushed) = (&self.space, &mut self.flushed);
            let written = space.table.write(&space.medium, taken.segment, flushed);
            if let Err(error) = written {
                space.fail("write the segment table", &error);
                return Err(error.into());
            }
        }
        Ok(taken)
    }

    /// Returns the place of the next page, and its byte offset.
    fn next_place(&mut self) -> Result<(PageNo, u64), ShadowError> {
        let geometry = &self.space.geometry;
        match &self.open {
            Some(open) if open.next < geometry.segment_pages() => {
                return Ok(open.next_place(geometry));
            }
            _ => self.close_segment()?,
        }
        let segment = match self.reserved.pop() {
            Some(segment) => segment,
            None => self.allocate()?,
        };
        let first = segment.first_page;
        let mut header = Box::new(SegmentHeader::new_zeroed());
        header.magic = SEGMENT_MAGIC;
        header.segment = U32::new(segment.segment.0);
        header.uuid = *self.space.uuid.as_bytes();
        let key = self.encryption.as_ref().map_or(0, |key| key.id.get());
        (header.key, header.key_again) = (U64::new(key), U64::new(key));
        if first == 1 && !self.space.keys.is_unused() {
            // This shadow may read its pages before the header is written.
            for offset in [
                offset_of!(SegmentHeader, key),
                offset_of!(SegmentHeader, key_again),
            ] {
                // SAFETY: the header of a segment that this shadow alone holds.
                unsafe {
                    let at = segment.header_at + to_u64(offset);
                    self.space.medium.write(at, &key.to_le_bytes())?;
                }
            }
        }
        let open = self.open.insert(OpenSegment {
            segment,
            first,
            next: first,
            flushed: first,
            header,
        });
        Ok(open.next_place(&self.space.geometry))
    }

    /// Flushes the open segment, so that the medium has work to do while the next one fills.
    fn close_segment(&mut self) -> io::Result<()> {
        self.end_nodes()?;
        match self.open.take() {
            Some(mut open) => open.flush(&self.space, &mut self.flushed),
            None => Ok(()),
        }
    }
}

impl OpenSegment {
    fn next_place(&self, geometry: &Geometry) -> (PageNo, u64) {
        let page = geometry.page_no(self.segment.segment, self.next);
        (
            page,
            self.segment.header_at + u64::from(self.next) * PAGE_BYTES,
        )
    }

    /// Writes the header and flushes it and the pages since the last time.
    fn flush(&mut self, space: &Space, flushed: &mut Flushed) -> io::Result<()> {
        if self.flushed == self.next {
            return Ok(());
        }
        let (at, medium) = (self.segment.header_at, &space.medium);
        self.header.pages = U32::new(self.next - 1);
        if self.first == 1 {
            // SAFETY: the header of a segment that this shadow alone holds. Its entries for pages that were
            // flushed before are written again as they are; readers of them come after the seal.
            unsafe { medium.write_streaming(at, self.header.as_bytes())? };
        } else {
            self.write_crcs(space, flushed)?;
        }
        // The header page of a tail is flushed apart.
        let from_header = self.flushed == 1;
        if self.first == 1 && !from_header {
            medium.flush_streamed(at, PAGE_BYTES, flushed)?;
        }
        let first = if from_header { 0 } else { self.flushed };
        let len_bytes = u64::from(self.next - first) * PAGE_BYTES;
        medium.flush_streamed(at + u64::from(first) * PAGE_BYTES, len_bytes, flushed)?;
        self.flushed = self.next;
        Ok(())
    }

    /// Writes and flushes the checksums of a tail's pages, and no other byte of the header: those before belong to
    /// sealed pages. Where one of these shares a chunk of eight bytes with the first new one, a crash leaves the
    /// chunk with the old or the new second half, and the same first half.
    fn write_crcs(&self, space: &Space, flushed: &mut Flushed) -> io::Result<()> {
        let entries = to_usize(u64::from(self.flushed))..to_usize(u64::from(self.next));
        let bytes = self.header.crcs[entries].as_bytes();
        let table = offset_of!(SegmentHeader, crcs) + to_usize(u64::from(self.flushed)) * CRC_BYTES;
        let at = self.segment.header_at + to_u64(table);
        // SAFETY: the entries of pages behind everything that is sealed in this segment, whose tail this shadow alone
        // has.
        unsafe { space.medium.write(at, bytes)? };
        space.medium.flush(at, to_u64(bytes.len()), flushed)
    }
}
