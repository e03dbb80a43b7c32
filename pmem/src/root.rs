//! Root pages of a checkpoint: its id, its segments, and the location of its manifest.
//!
//! Recovery reads the roots, one or a few pages a checkpoint, so each page is written twice: no single damaged page
//! keeps a region from opening.

use std::ops::Range;
use std::sync::Arc;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::PAGE_SIZE;
use crate::alloc::{Extent, Lease};
use crate::error::{MapFault, OpenError, PageError, SegmentError, SegmentPlace, ShadowError};
use crate::ids::{CheckpointId, PageNo, SegmentNo};
use crate::layout::{
    ExtentEntry, ROOT_BODY_BYTES, ROOT_EXTENTS, ROOT_HEAD_BYTES, ROOT_MAGIC, RootPage,
};
use crate::map::MapRoot;
use crate::segment::SegmentWriter;
use crate::space::Space;
use permafrost_cipher::BLOCK_BYTES;
use permafrost_medium::convert::{to_u64, to_usize};
use permafrost_medium::{LostPage, Medium};

/// A manifest to be written: its bytes, or a map of its pages and its length.
#[derive(Clone, Copy)]
pub(crate) enum Manifest<'a> {
    Inline(&'a [u8]),
    Blob(MapRoot, u64),
}

impl Manifest<'_> {
    /// Returns the map, which is empty for one in the root itself, and the length.
    pub(crate) fn place(&self) -> (MapRoot, u64) {
        match self {
            Self::Inline(bytes) => (MapRoot::EMPTY, to_u64(bytes.len())),
            Self::Blob(root, len_bytes) => (*root, *len_bytes),
        }
    }

    /// Returns the bytes that stand in the root itself.
    fn inline(&self) -> &[u8] {
        match self {
            Self::Inline(bytes) => bytes,
            Self::Blob(..) => &[],
        }
    }
}

/// Returns true if a manifest of this length stands in the root page itself, behind the extents.
pub(crate) fn has_room(out: &mut SegmentWriter, len_bytes: usize) -> Result<bool, ShadowError> {
    let alignment = out.root_alignment();
    let before = |extents: &[Extent]| extents_bytes(extents).next_multiple_of(alignment);
    let needed = before(&out.holdings().extents()) + len_bytes;
    if out.room_behind_nodes().is_some_and(|room| needed <= room) {
        return Ok(true);
    }
    out.reserve_pairs(1)?;
    Ok(before(&out.holdings().extents()) + len_bytes <= ROOT_BODY_BYTES)
}

fn extents_bytes(extents: &[Extent]) -> usize {
    size_of::<ExtentEntry>() * extents.len()
}

/// A root as read.
pub(crate) struct Root {
    /// Empty if the manifest stands in the root page itself.
    pub(crate) manifest: MapRoot,
    pub(crate) manifest_bytes: u64,
    pub(crate) extents: Vec<Extent>,
    /// First copies of its pages; each second copy is the page after it.
    pub(crate) pages: Vec<PageNo>,
    /// Pages of the checkpoint behind both copies of the first one, in the same segment.
    pub(crate) pages_behind: u32,
    /// Number of pages of which one copy was damaged.
    pub(crate) damaged_copies: u64,
}

/// Writes the root pages of everything that `out` holds, the last page first, as each has the next
/// one's checksum. Gives the first one's place and checksum. A short root stands in the last page of map nodes.
pub(crate) fn write(
    out: &mut SegmentWriter,
    id: CheckpointId,
    manifest: Manifest<'_>,
) -> Result<(PageNo, u32), ShadowError> {
    let extents = out.holdings().extents();
    let alignment = out.root_alignment();
    let before = extents_bytes(&extents).next_multiple_of(alignment);
    if let Some(nodes) = out.take_nodes(before + manifest.inline().len()) {
        let mut page = Box::new(RootPage::new_zeroed());
        let len = nodes.bytes().len();
        page.body[..len].copy_from_slice(nodes.bytes());
        page.nodes_bytes = count(len.next_multiple_of(alignment));
        page.pages_behind = U32::new(nodes.pages_behind);
        page.extents_left = count(extents.len());
        page.encrypted = count(alignment / BLOCK_BYTES);
        let bytes = fill(&mut page, id, &extents, Some(manifest));
        let parts = encrypted_parts(&page);
        return Ok((out.write_root(&nodes, &bytes, &parts)?, checksum(&page)));
    }
    out.end_nodes()?;
    // The root lists its own segments too: allocate them before writing the list.
    let mut pages = 0;
    let extents = loop {
        let extents = out.holdings().extents();
        let needed = extents.len().div_ceil(ROOT_EXTENTS).max(1);
        if needed <= pages {
            break extents;
        }
        pages = needed;
        out.reserve_pairs(pages)?;
    };
    let mut next = (PageNo(0), 0);
    let mut left = 0;
    let mut chunks: Vec<&[Extent]> = extents.chunks(ROOT_EXTENTS).collect();
    while let Some(chunk) = chunks.pop() {
        left += chunk.len();
        let mut page = Box::new(RootPage::new_zeroed());
        page.place = count(chunks.len());
        page.next = U64::new(next.0.0);
        page.next_crc32 = U32::new(next.1);
        page.extents_left = count(left);
        page.encrypted = count(alignment / BLOCK_BYTES);
        let bytes = fill(&mut page, id, chunk, chunks.is_empty().then_some(manifest));
        let parts = encrypted_parts(&page);
        next = (out.append_twice(&bytes, &parts)?, checksum(&page));
    }
    Ok(next)
}

/// Completes a root page by extents and, in the first one, the manifest: behind its nodes, where there is room.
fn fill(
    page: &mut RootPage,
    id: CheckpointId,
    extents: &[Extent],
    manifest: Option<Manifest<'_>>,
) -> [u8; PAGE_SIZE] {
    page.magic = ROOT_MAGIC;
    page.id = id.to_bytes();
    page.extents_here = count(extents.len());
    let nodes_bytes = to_usize(page.nodes_bytes.get().into());
    let (entries, behind) = page.body[nodes_bytes..].split_at_mut(extents_bytes(extents));
    let entries = entries.chunks_exact_mut(size_of::<ExtentEntry>());
    for (entry, extent) in entries.zip(extents) {
        let stored = ExtentEntry {
            first: U32::new(extent.first),
            segments: U32::new(extent.end - extent.first),
        };
        entry.copy_from_slice(stored.as_bytes());
    }
    if let Some(manifest) = manifest {
        let (map, len_bytes) = manifest.place();
        page.manifest = map.stored();
        page.manifest_bytes = U64::new(len_bytes);
        let skip = match page.encrypted == U32::ZERO {
            true => 0,
            false => extents_bytes(extents).next_multiple_of(BLOCK_BYTES) - extents_bytes(extents),
        };
        behind[skip..skip + manifest.inline().len()].copy_from_slice(manifest.inline());
    }
    page.encrypted_crc32 = U32::new(encrypted_checksum(page));
    let mut bytes = [0; PAGE_SIZE];
    bytes.copy_from_slice(page.as_bytes());
    bytes
}

/// Converts a number of extents or bytes: there are no more extents than segments, and those are counted in 32 bits.
fn count(number: usize) -> U32 {
    U32::new(u32::try_from(number).unwrap_or(u32::MAX))
}

/// Reads and verifies a root. The second copies of its pages are read, too, if `both`, and otherwise only where the
/// first are damaged.
pub(crate) fn load(
    space: &Arc<Space>,
    id: CheckpointId,
    first: PageNo,
    first_crc32: u32,
    both: bool,
) -> Result<Root, OpenError> {
    let mut extents: Vec<Extent> = Vec::new();
    let (mut pages, mut damaged_copies) = (Vec::new(), 0);
    let mut head = None;
    let (mut at, mut crc, mut left) = (first, first_crc32, None);
    loop {
        let corrupt = || OpenError::RootCorrupt { id, page: at };
        let (page, copies) = load_page(space, at, crc, both)?.ok_or_else(corrupt)?;
        pages.push(at);
        damaged_copies += copies;
        let here = page.extents_here.get();
        let in_place = page.magic == ROOT_MAGIC
            && page.id == id.to_bytes()
            && (1..=ROOT_EXTENTS).contains(&to_usize(u64::from(here)))
            && left.is_none_or(|left| left == page.extents_left.get())
            && here <= page.extents_left.get();
        if !in_place {
            return Err(corrupt());
        }
        let entries_bytes = to_usize(u64::from(here)) * size_of::<ExtentEntry>();
        let body = page.body.get(to_usize(page.nodes_bytes.get().into())..);
        let split = body.and_then(|body| body.split_at_checked(entries_bytes));
        let (entries, behind) = split.ok_or_else(corrupt)?;
        for entry in entries.chunks_exact(size_of::<ExtentEntry>()) {
            let entry = ExtentEntry::read_from_bytes(entry).map_err(|_| corrupt())?;
            let extent =
                to_extent(&entry, extents.last(), space.table.len()).ok_or_else(corrupt)?;
            extents.push(extent);
        }
        if head.is_none() {
            let manifest = MapRoot::try_from(page.manifest.as_bytes()).map_err(|_| corrupt())?;
            let len_bytes = page.manifest_bytes.get();
            if manifest.is_empty() && len_bytes > to_u64(behind.len()) {
                return Err(corrupt());
            }
            let segment_pages = space.geometry.segment_pages();
            let place = space.geometry.place(at, 2).map_err(|_| corrupt())?;
            let pages_behind = page.pages_behind.get();
            if pages_behind > segment_pages - (place.page + 2) {
                return Err(corrupt());
            }
            head = Some((manifest, len_bytes, pages_behind));
        }
        // Each page has an extent less to go: the chain ends.
        left = Some(page.extents_left.get() - here);
        if left == Some(0) {
            break;
        }
        (at, crc) = (PageNo(page.next.get()), page.next_crc32.get());
    }
    let (manifest, manifest_bytes, pages_behind) =
        head.ok_or(OpenError::RootCorrupt { id, page: first })?;
    Ok(Root {
        manifest,
        manifest_bytes,
        extents,
        pages,
        pages_behind,
        damaged_copies,
    })
}

/// Reads a manifest that stands in the first root page.
pub(crate) fn manifest(
    space: &Space,
    first: PageNo,
    first_crc32: u32,
) -> Result<Vec<u8>, PageError> {
    let place = space.geometry.place(first, 2);
    let place = place.map_err(|_| crate::error::outside(first))?;
    loop {
        let position = space.table.position(place.segment);
        let read = manifest_at(space, place, (first, first_crc32));
        // Moved in between: its page and its key may not belong together.
        if read.is_ok() || space.table.position(place.segment) == position {
            return read;
        }
    }
}

fn manifest_at(
    space: &Space,
    place: SegmentPlace,
    (first, first_crc32): (PageNo, u32),
) -> Result<Vec<u8>, PageError> {
    let mut fault = PageError::MapCorrupt {
        location: first,
        fault: MapFault::RootPage,
    };
    for page in [place.page, place.page + 1] {
        let mut root = match read_copy(space, SegmentPlace { page, ..place }) {
            Ok(root) => root,
            Err(error) => {
                fault = error.at(first);
                continue;
            }
        };
        if checksum(&root) != first_crc32 {
            continue;
        }
        match decrypt(space, place.segment, first, &mut root) {
            Ok(true) => {}
            Ok(false) => continue,
            Err(error) => return Err(error.at(first)),
        }
        let extents = to_usize(root.extents_here.get().into()) * size_of::<ExtentEntry>();
        let before = to_usize(root.nodes_bytes.get().into()) + extents;
        let at = match root.encrypted == U32::ZERO {
            true => before,
            false => before.next_multiple_of(BLOCK_BYTES),
        };
        let end = at.saturating_add(to_usize(root.manifest_bytes.get()));
        if let Some(bytes) = root.body.get(at..end) {
            return Ok(bytes.to_vec());
        }
    }
    Err(fault)
}

/// Returns the parts of a root page that are encrypted, if it is: the nodes, and what is behind the extents.
pub(crate) fn encrypted_parts(root: &RootPage) -> [Range<usize>; 2] {
    let clamped = |offset: usize| offset.min(PAGE_SIZE);
    if root.encrypted == U32::ZERO {
        return [0..0, 0..0];
    }
    let nodes_end = ROOT_HEAD_BYTES + to_usize(root.nodes_bytes.get().into());
    let extents = to_usize(root.extents_here.get().into()) * size_of::<ExtentEntry>();
    let behind = (nodes_end + extents).next_multiple_of(BLOCK_BYTES);
    [
        ROOT_HEAD_BYTES..clamped(nodes_end),
        clamped(behind)..PAGE_SIZE,
    ]
}

/// Returns the checksum that references to a root page have: of the page, or of what is in the clear.
fn checksum(root: &RootPage) -> u32 {
    let [nodes, behind] = encrypted_parts(root);
    let bytes = root.as_bytes();
    if root.encrypted == U32::ZERO {
        return crc32fast::hash(bytes);
    }
    // What is behind the extents may be nothing.
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..nodes.start]);
    hasher.update(&bytes[nodes.end..behind.start]);
    hasher.finalize()
}

/// Returns the checksum of the parts of a root page that are encrypted, before they are.
fn encrypted_checksum(root: &RootPage) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for part in encrypted_parts(root) {
        hasher.update(&root.as_bytes()[part]);
    }
    hasher.finalize()
}

/// Decrypts a root page, if it is encrypted; returns false if the result does not match its checksum. Both copies are
/// encrypted under the number of the first.
fn decrypt(
    space: &Space,
    segment: SegmentNo,
    first: PageNo,
    root: &mut RootPage,
) -> Result<bool, SegmentError> {
    if root.encrypted == U32::ZERO {
        return Ok(true);
    }
    let Some(key) = space.key_of(segment) else {
        return Ok(false);
    };
    let cipher = space.keys.get(key)?;
    for part in encrypted_parts(root) {
        let offset = part.start;
        cipher.decrypt_part(first.0, offset, &mut root.as_mut_bytes()[part]);
    }
    Ok(encrypted_checksum(root) == root.encrypted_crc32.get())
}

/// Searches the segments for first pages of roots, whether or not a record names them. Returns their ids, places and
/// checksums. Reads the first bytes of each page. Both copies of a page are found.
pub(crate) fn search(space: &Space) -> Vec<(CheckpointId, PageNo, u32)> {
    let segments = (0..space.table.len()).map(SegmentNo);
    // The slot that a segment left may have others in it.
    let written = segments.filter(|&segment| space.is_written(segment));
    let pages = written.flat_map(|segment| {
        let pages = 1..space.geometry.segment_pages();
        pages.map(move |page| SegmentPlace { segment, page })
    });
    pages.filter_map(|place| found_at(space, place)).collect()
}

fn found_at(space: &Space, place: SegmentPlace) -> Option<(CheckpointId, PageNo, u32)> {
    let at = space.geometry.page_no(place.segment, place.page);
    let mut magic = [0; ROOT_MAGIC.len()];
    let offset = space.locate(place, 1).ok()?;
    space.medium.read(offset, &mut magic).ok()?;
    if magic != ROOT_MAGIC {
        return None;
    }
    let bytes = space.read_page(place).ok()?;
    let page = RootPage::read_from_bytes(bytes.as_slice()).ok()?;
    let is_first = page.place.get() == 0 && is_as_written(space, place, &page);
    is_first.then(|| (CheckpointId::from_bytes(page.id), at, checksum(&page)))
}

/// Takes hold of a root's segments, the root's own among them.
pub(crate) fn hold(space: &Arc<Space>, root: &Root) -> Lease {
    Lease::recover(space, root.extents.clone())
}

fn to_extent(entry: &ExtentEntry, before: Option<&Extent>, segments: u32) -> Option<Extent> {
    let first = entry.first.get();
    let end = first.checked_add(entry.segments.get())?;
    let ascends = before.is_none_or(|before| before.end < first);
    (ascends && first < end && end <= segments).then_some(Extent { first, end })
}

/// Reads the page at `at`, or its copy in the next page, or both; returns it with the number of damaged ones.
fn load_page(
    space: &Space,
    at: PageNo,
    crc32: u32,
    both: bool,
) -> Result<Option<(Box<RootPage>, u64)>, OpenError> {
    let Ok(first) = space.geometry.place(at, 2) else {
        return Ok(None);
    };
    let mut found = None;
    let mut damaged = 0;
    for page in [first.page, first.page + 1] {
        if found.is_some() && !both {
            break;
        }
        let place = SegmentPlace { page, ..first };
        match read_copy(space, place) {
            Err(SegmentError::Io(error)) if LostPage::of(&error).is_none() => {
                return Err(error.into());
            }
            Ok(root) if checksum(&root) == crc32 => {
                // The reference does not cover what is encrypted.
                let is_covered = !both || root.encrypted == U32::ZERO;
                damaged += u64::from(!is_covered && !is_as_written(space, place, &root));
                found.get_or_insert(root);
            }
            // A page that cannot be read is as good as damaged: the other copy may do.
            _ => damaged += 1,
        }
    }
    Ok(found.map(|page| (page, damaged)))
}

/// Reads one copy of a root page, as it is stored.
fn read_copy(space: &Space, place: SegmentPlace) -> Result<Box<RootPage>, SegmentError> {
    let at = space.locate(place, 1)?;
    let mut root = Box::new(RootPage::new_zeroed());
    let read = space.medium.read(at, root.as_mut_bytes());
    read.map_err(SegmentError::Io)?;
    Ok(root)
}

/// Compares a stored page with its checksum in its segment's header.
fn is_as_written(space: &Space, place: SegmentPlace, page: &RootPage) -> bool {
    let mut written = Vec::new();
    let read = space.read_crcs(place, 1, &mut written);
    let found = crc32fast::hash(page.as_bytes());
    read.is_ok() && written.first().map(|crc| crc.get()) == Some(found)
}
