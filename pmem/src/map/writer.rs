//! Building a map while pages come in.

use zerocopy::IntoBytes;
use zerocopy::little_endian::U32;

use super::digest::MapHasher;
use super::node::{Entry, NodeBuilder};
use super::pieces::{Kept, Piece, PieceLog};
use super::{MapRoot, RunKind, StoredRun};
use crate::error::ShadowError;
use crate::ids::PageNo;
use crate::segment::SegmentWriter;

/// Counts of the pages in a map, and the map's digest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapStats {
    /// Pages, however they are kept.
    pub pages: u64,
    /// Pages that this shadow stored.
    pub stored: u64,
    /// Pages that are all zero.
    pub zero: u64,
    /// Pages that equal the parent's (compared, or referred to by the caller), whether stored there or zero.
    pub parent: u64,
    /// Stored pages that the parent may have as well: the parent is damaged there.
    pub parent_damaged: u64,
    /// Runs they make.
    pub runs: u64,
    /// Digest of the map ([`PageMap::digest`](super::PageMap::digest)), once it is finished.
    pub digest: [u8; 32],
}

/// A page map being written; for the shadow that made it. Holds one node a level and the checksums of
/// one run: a few tens of kilobytes, whatever the number of pages.
pub struct MapWriter {
    run: Option<OpenRun>,
    levels: Vec<NodeBuilder>,
    next_index: u64,
    digest: MapHasher,
    log: Option<PieceLog>,
    pub(crate) stats: MapStats,
}

/// The run that the next page may extend.
struct OpenRun {
    first_index: u64,
    pages: u32,
    flags: u16,
    location: Option<PageNo>,
    crcs: Vec<U32>,
}

impl MapWriter {
    pub(crate) fn new() -> Self {
        Self {
            run: None,
            levels: Vec::new(),
            next_index: 0,
            digest: MapHasher::default(),
            log: None,
            stats: MapStats::default(),
        }
    }

    /// Records from now on the storage of the pages that come in, for [`MapWriter::pieces`].
    pub fn watch(&mut self) {
        self.log.get_or_insert_default();
    }

    /// Returns the storage of the pages since the last call, ascending: after one call of
    /// [`Shadow::append`](crate::Shadow::append) they are exactly its pages. Nothing unless [`MapWriter::watch`] was
    /// called.
    pub fn pieces(&mut self) -> impl Iterator<Item = Piece> + '_ {
        self.log.iter_mut().flat_map(PieceLog::drain)
    }

    pub(crate) fn note(&mut self, first_index: u64, pages: u64, flags: u16, kept: Kept) {
        if let Some(log) = &mut self.log {
            log.push(Piece {
                first_index,
                pages,
                flags,
                kept,
            });
        }
    }

    /// Checks that `pages` pages may come at `index`.
    pub(crate) fn admit(&self, index: u64, pages: u64) -> Result<(), ShadowError> {
        if index < self.next_index {
            return Err(ShadowError::NotAscending {
                index,
                expected: self.next_index,
            });
        }
        match index.checked_add(pages) {
            // The end is an index, too.
            Some(_) => Ok(()),
            None => Err(ShadowError::TooManyPages { index, pages }),
        }
    }

    /// Pages at `location`, consecutive and in one segment.
    pub(crate) fn push_stored(
        &mut self,
        out: &mut SegmentWriter,
        index: u64,
        flags: u16,
        location: PageNo,
        crcs: &[U32],
    ) -> Result<(), ShadowError> {
        self.digest.pages(index, flags, crcs);
        // Never more than a segment's pages.
        let pages = u32::try_from(crcs.len()).unwrap_or(u32::MAX);
        if let Some(run) = self.run.as_mut() {
            // The page after a segment's last is the next one's header, so a page that follows without a gap is in
            // this segment.
            let follows = run
                .location
                .is_some_and(|l| l.plus(u64::from(run.pages)) == location);
            if follows && run.flags == flags && run.first_index + u64::from(run.pages) == index {
                run.pages += pages;
                run.crcs.extend_from_slice(crcs);
                self.next_index = index + u64::from(pages);
                self.stats.pages += u64::from(pages);
                return Ok(());
            }
        }
        self.begin(out, index, flags, Some(location), pages)?;
        if let Some(run) = self.run.as_mut() {
            run.crcs.extend_from_slice(crcs);
        }
        Ok(())
    }

    /// Pages of zeros.
    pub(crate) fn push_zero(
        &mut self,
        out: &mut SegmentWriter,
        mut index: u64,
        flags: u16,
        mut pages: u64,
    ) -> Result<(), ShadowError> {
        self.digest.zeros(index, flags, pages);
        while pages > 0 {
            let mut part = u32::try_from(pages).unwrap_or(u32::MAX);
            match self.run.as_mut() {
                Some(run)
                    if run.location.is_none()
                        && run.flags == flags
                        && run.first_index + u64::from(run.pages) == index
                        && run.pages < u32::MAX =>
                {
                    part = part.min(u32::MAX - run.pages);
                    run.pages += part;
                    self.next_index = index + u64::from(part);
                    self.stats.pages += u64::from(part);
                }
                _ => self.begin(out, index, flags, None, part)?,
            }
            index += u64::from(part);
            pages -= u64::from(part);
        }
        Ok(())
    }

    fn begin(
        &mut self,
        out: &mut SegmentWriter,
        first_index: u64,
        flags: u16,
        location: Option<PageNo>,
        pages: u32,
    ) -> Result<(), ShadowError> {
        let mut crcs = self.end_run(out)?;
        crcs.clear();
        self.run = Some(OpenRun {
            first_index,
            pages,
            flags,
            location,
            crcs,
        });
        self.next_index = first_index + u64::from(pages);
        self.stats.pages += u64::from(pages);
        Ok(())
    }

    /// Passes the open run to the leaf; gives back its buffer.
    fn end_run(&mut self, out: &mut SegmentWriter) -> Result<Vec<U32>, ShadowError> {
        let Some(open) = self.run.take() else {
            return Ok(Vec::new());
        };
        let kind = match open.location {
            None => RunKind::Zero,
            Some(location) => RunKind::Stored {
                location,
                crcs_crc32: crc32fast::hash(open.crcs.as_bytes()),
            },
        };
        let run = StoredRun {
            first_index: open.first_index,
            pages: open.pages,
            flags: open.flags,
            kind,
        };
        self.stats.runs += 1;
        self.push(
            out,
            0,
            &Entry::Run(run.to_entry()),
            run.first_index,
            run.end_index(),
        )?;
        Ok(open.crcs)
    }

    fn push(
        &mut self,
        out: &mut SegmentWriter,
        level: usize,
        entry: &Entry,
        first: u64,
        end: u64,
    ) -> Result<(), ShadowError> {
        if level == self.levels.len() {
            // Far fewer levels than a u16 counts: each multiplies the entries by over a hundred.
            self.levels
                .push(NodeBuilder::new(u16::try_from(level).unwrap_or(u16::MAX)));
        }
        // A full node is written when the next entry comes, not before: so no node is ever empty.
        if self.levels[level].is_full() {
            let (entry, first, end) = self.write_node(out, level)?;
            self.push(out, level + 1, &entry, first, end)?;
        }
        self.levels[level].push(entry, first, end);
        Ok(())
    }

    /// Writes a level's node and clears it; gives the entry for the level above.
    fn write_node(
        &mut self,
        out: &mut SegmentWriter,
        level: usize,
    ) -> Result<(Entry, u64, u64), ShadowError> {
        let node = &mut self.levels[level];
        let (first, end) = node.bounds();
        let page = node.page();
        let crc = crc32fast::hash(page.as_slice());
        let place = out.append(page, crc)?;
        node.clear();
        Ok((Entry::child(first, place, crc), first, end))
    }

    /// Writes the remaining nodes, leaves first.
    pub(crate) fn finish(
        mut self,
        out: &mut SegmentWriter,
    ) -> Result<(MapRoot, MapStats), ShadowError> {
        self.end_run(out)?;
        self.stats.digest = std::mem::take(&mut self.digest).finish();
        let mut level = 0;
        while level < self.levels.len() {
            let (entry, first, end) = self.write_node(out, level)?;
            if level + 1 == self.levels.len() {
                let Entry::Child(root) = entry else { break };
                let root_level = self.levels[level].level();
                let node = PageNo(root.node.get());
                return Ok((
                    MapRoot::new(node, root.crc32.get(), root_level, &self.stats),
                    self.stats,
                ));
            }
            self.push(out, level + 1, &entry, first, end)?;
            level += 1;
        }
        Ok((MapRoot::EMPTY, self.stats))
    }
}
