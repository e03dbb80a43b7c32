//! Outline of an address space: the positions and checksums of its pages. Compared with the manifest's digest once, it
//! shows of each single page that it is the checkpoint's, whoever sends it.
//!
//! On the wire (docs/protocol.md, "A fetch"), an outline is a sequence of records. A frame has whole ones:
//!
//! ```text
//! u64 first index | u32 pages | u16 flags | u8 1 if the pages are stored, 0 for zeros | u8 0 | u32 CRC32 of each stored page
//! ```

use std::ops::Range;

pub use permafrost_criu::source::OutlinePages;
use permafrost_protocol::PAGE_SIZE;
use permafrost_protocol::wire::frame::{Kind, MAX_PAYLOAD_BYTES};
use permafrost_transport::peer::ReceivedFrame;

use super::MapDigest;

/// Size of a record without its checksums, bytes.
const RECORD_BYTES: usize = 16;

/// Size of a checksum, bytes.
const CRC_BYTES: usize = 4;

/// Most stored pages of a record: a quarter of a frame.
const MAX_STORED: usize = 16_384;

/// Positions and checksums of the pages of an address space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// Ascending; they do not overlap.
    runs: Vec<Run>,
    crcs: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first_index: u64,
    pages: u64,
    flags: u16,
    /// Place of the first page's checksum; `None` for zeros.
    crcs: Option<usize>,
}

impl Run {
    fn end(&self) -> u64 {
        self.first_index + self.pages
    }
}

/// Encoder of an outline.
#[derive(Default)]
pub struct OutlineEncoder(Vec<u8>);

impl OutlineEncoder {
    /// Adds pages with the same flags; `send` takes each frame's payload.
    ///
    /// # Errors
    /// Those of `send`.
    pub fn push<E>(
        &mut self,
        first_index: u64,
        flags: u16,
        pages: OutlinePages<'_>,
        send: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut index = first_index;
        match pages {
            OutlinePages::Zero(mut left) => {
                while left > 0 {
                    let count = u32::try_from(left).unwrap_or(u32::MAX);
                    self.record(index, flags, count, None, send)?;
                    index += u64::from(count);
                    left -= u64::from(count);
                }
            }
            OutlinePages::Stored(crcs) => {
                for crcs in crcs.chunks(MAX_STORED) {
                    let count = u32::try_from(crcs.len()).unwrap_or(u32::MAX);
                    self.record(index, flags, count, Some(crcs), send)?;
                    index += u64::from(count);
                }
            }
        }
        Ok(())
    }

    /// Sends what is left.
    ///
    /// # Errors
    /// Those of `send`.
    pub fn finish<E>(self, send: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        match self.0.is_empty() {
            true => Ok(()),
            false => send(&self.0),
        }
    }

    fn record<E>(
        &mut self,
        index: u64,
        flags: u16,
        pages: u32,
        crcs: Option<&[u32]>,
        send: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let len = RECORD_BYTES + crcs.map_or(0, |crcs| crcs.len() * CRC_BYTES);
        if self.0.len() + len > MAX_PAYLOAD_BYTES as usize {
            send(&self.0)?;
            self.0.clear();
        }
        self.0.extend_from_slice(&index.to_le_bytes());
        self.0.extend_from_slice(&pages.to_le_bytes());
        self.0.extend_from_slice(&flags.to_le_bytes());
        self.0.extend_from_slice(&[u8::from(crcs.is_some()), 0]);
        for crc in crcs.unwrap_or_default() {
            self.0.extend_from_slice(&crc.to_le_bytes());
        }
        Ok(())
    }
}

impl Outline {
    /// Adds the records of a frame; `None` if it has other bytes, or pages that may not follow.
    pub(super) fn extend(&mut self, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() {
            let (index, rest) = bytes.split_first_chunk::<8>()?;
            let (pages, rest) = rest.split_first_chunk::<4>()?;
            let (flags, rest) = rest.split_first_chunk::<2>()?;
            let (&[stored, zero], mut rest) = rest.split_first_chunk::<2>()?;
            let pages = u32::from_le_bytes(*pages);
            let mut run = Run {
                first_index: u64::from_le_bytes(*index),
                pages: pages.into(),
                flags: u16::from_le_bytes(*flags),
                crcs: None,
            };
            run.first_index.checked_add(run.pages)?;
            let follows = self.runs.last().map_or(0, Run::end) <= run.first_index;
            if pages == 0 || zero != 0 || stored > 1 || !follows {
                return None;
            }
            if stored == 1 {
                let len = usize::try_from(pages).ok()?.checked_mul(CRC_BYTES)?;
                let (crcs, left) = rest.split_at_checked(len)?;
                run.crcs = Some(self.crcs.len());
                let (crcs, _) = crcs.as_chunks::<CRC_BYTES>();
                self.crcs
                    .extend(crcs.iter().map(|crc| u32::from_le_bytes(*crc)));
                rest = left;
            }
            self.runs.push(run);
            bytes = rest;
        }
        Some(())
    }

    /// Adds stored pages behind those that are there.
    pub(super) fn append_stored(&mut self, first_index: u64, flags: u16, crcs: &[u32]) {
        let at = self.crcs.len();
        self.crcs.extend_from_slice(crcs);
        self.append(first_index, flags, crcs.len() as u64, Some(at));
    }

    /// Adds zero pages behind those that are there.
    pub(super) fn append_zeros(&mut self, first_index: u64, flags: u16, pages: u64) {
        self.append(first_index, flags, pages, None);
    }

    fn append(&mut self, first_index: u64, flags: u16, pages: u64, crcs: Option<usize>) {
        if let Some(last) = self.runs.last_mut()
            && (last.end(), last.flags) == (first_index, flags)
            && last.crcs.is_some() == crcs.is_some()
        {
            last.pages += pages;
            return;
        }
        self.runs.push(Run {
            first_index,
            pages,
            flags,
            crcs,
        });
    }

    /// Adds the pages of another outline with these indices, behind those that are there.
    pub(super) fn append_from(&mut self, other: &Self, range: &Range<u64>) {
        for run in &other.runs[other.place_of(range.start)..] {
            let first = run.first_index.max(range.start);
            let pages = run.end().min(range.end).saturating_sub(first);
            if pages == 0 {
                break;
            }
            match other.pages_of(run).without(first - run.first_index) {
                OutlinePages::Zero(_) => self.append_zeros(first, run.flags, pages),
                OutlinePages::Stored(crcs) => {
                    let count = usize::try_from(pages).unwrap_or(usize::MAX);
                    let crcs = crcs.get(..count).unwrap_or(crcs);
                    self.append_stored(first, run.flags, crcs);
                }
            }
        }
    }

    /// Returns the number of pages.
    pub(super) fn count(&self) -> u64 {
        self.runs.iter().map(|run| run.pages).sum()
    }

    /// Sends the outline as frames' payloads.
    ///
    /// # Errors
    /// Those of `send`.
    pub fn send<E>(&self, send: &mut impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut encoder = OutlineEncoder::default();
        for run in &self.runs {
            encoder.push(run.first_index, run.flags, self.pages_of(run), send)?;
        }
        encoder.finish(send)
    }

    /// Passes on the runs, ascending: first index and pages.
    pub(super) fn each(&self, take: &mut dyn FnMut(u64, OutlinePages<'_>)) {
        for run in &self.runs {
            take(run.first_index, self.pages_of(run));
        }
    }

    /// Returns the runs, ascending: first index, flags and number of pages.
    pub(super) fn runs(&self) -> impl Iterator<Item = (u64, u16, u64)> {
        let runs = self.runs.iter();
        runs.map(|run| (run.first_index, run.flags, run.pages))
    }

    /// Returns true if the number of pages and the digest match the manifest's.
    pub(super) fn is(&self, pages: u64, map_digest: &[u8]) -> bool {
        let mut digest = MapDigest::default();
        for run in &self.runs {
            match self.pages_of(run) {
                OutlinePages::Zero(pages) => digest.zeros(run.first_index, run.flags, pages),
                OutlinePages::Stored(crcs) => digest.checksums(run.first_index, run.flags, crcs),
            }
        }
        digest.is(pages, map_digest)
    }

    /// Returns the index of the first page at or behind `index`.
    pub(super) fn next_index(&self, index: u64) -> Option<u64> {
        let run = self.runs.get(self.place_of(index))?;
        Some(run.first_index.max(index))
    }

    /// Returns true if a frame has pages of the outline, the first one being at or behind `index`, and no page between is
    /// left out.
    pub(super) fn matches(&self, index: u64, frame: &ReceivedFrame) -> bool {
        let header = &frame.header;
        if self.next_index(index) != Some(header.index) {
            return false;
        }
        let mut pages = frame.payload.chunks_exact(PAGE_SIZE);
        let is_stored = header.kind == Kind::Pages;
        let (mut index, mut left) = (header.index, u64::from(header.pages));
        for run in &self.runs[self.place_of(index)..] {
            if run.first_index > index || run.flags != header.flags {
                return false;
            }
            let count = left.min(run.end() - index);
            let skip = usize::try_from(index - run.first_index).unwrap_or(usize::MAX);
            let is_right = match self.pages_of(run) {
                OutlinePages::Zero(_) => !is_stored,
                OutlinePages::Stored(crcs) => {
                    let count = usize::try_from(count).unwrap_or(usize::MAX);
                    let mut crcs = crcs.iter().skip(skip).take(count);
                    is_stored && crcs.all(|crc| pages.next().map(crc32fast::hash) == Some(*crc))
                }
            };
            if !is_right {
                return false;
            }
            index += count;
            left -= count;
            if left == 0 {
                return true;
            }
        }
        false
    }

    /// Returns the place of the first run that ends behind `index`.
    fn place_of(&self, index: u64) -> usize {
        self.runs.partition_point(|run| run.end() <= index)
    }

    fn pages_of(&self, run: &Run) -> OutlinePages<'_> {
        match run.crcs {
            None => OutlinePages::Zero(run.pages),
            Some(at) => {
                let end = usize::try_from(run.pages).map_or(usize::MAX, |pages| at + pages);
                OutlinePages::Stored(self.crcs.get(at..end).unwrap_or_default())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::wire::frame::{Coding, Header};

    use super::*;

    fn page(byte: u8) -> Vec<u8> {
        vec![byte; PAGE_SIZE]
    }

    /// Pages 3 and 4 are stored, 5 is zeros, 9 is stored with other flags.
    fn frames() -> Vec<Vec<u8>> {
        let crcs = [3, 4, 9].map(|byte| crc32fast::hash(&page(byte)));
        let mut frames = Vec::new();
        let mut send = |bytes: &[u8]| {
            frames.push(bytes.to_vec());
            Ok::<_, ()>(())
        };
        let mut encoder = OutlineEncoder::default();
        let stored = OutlinePages::Stored;
        encoder.push(3, 6, stored(&crcs[..2]), &mut send).unwrap();
        encoder
            .push(5, 6, OutlinePages::Zero(1), &mut send)
            .unwrap();
        encoder.push(9, 4, stored(&crcs[2..]), &mut send).unwrap();
        encoder.finish(&mut send).unwrap();
        frames
    }

    fn outline() -> Outline {
        let mut outline = Outline::default();
        frames()
            .iter()
            .for_each(|frame| outline.extend(frame).unwrap());
        outline
    }

    fn frame(kind: Kind, index: u64, flags: u16, pages: u32, payload: Vec<u8>) -> ReceivedFrame {
        let header = Header {
            kind,
            coding: Coding::Raw,
            flags,
            pages,
            sequence: 0,
            index,
            payload_bytes: u32::try_from(payload.len()).unwrap(),
        };
        let payload = payload.into();
        ReceivedFrame { header, payload }
    }

    #[test]
    fn an_outline_has_the_digest_of_its_pages_and_goes_over_the_wire() {
        let mut digest = MapDigest::default();
        digest.pages(3, 6, &[page(3), page(4), page(0)].concat());
        digest.pages(9, 4, &page(9));
        let outline = outline();
        assert!(outline.is(4, &digest.clone().finish()));
        assert!(!outline.is(5, &digest.finish()) && !outline.is(4, &[7; 32]));
        let mut again = Outline::default();
        let sent = outline.send(&mut |bytes| again.extend(bytes).ok_or(()));
        assert_eq!((sent, &again), (Ok(()), &outline));
        assert_eq!(
            outline.runs().collect::<Vec<_>>(),
            [(3, 6, 2), (5, 6, 1), (9, 4, 1)]
        );
        let next = [0, 4, 6, 10].map(|index| outline.next_index(index));
        assert_eq!(next, [Some(3), Some(4), Some(9), None]);

        // Large runs are divided.
        let mut large = Outline::default();
        let crcs: Vec<u32> = (0..100_000).collect();
        let pages = u64::from(u32::MAX) + 7;
        let mut send = |bytes: &[u8]| {
            assert!(bytes.len() <= MAX_PAYLOAD_BYTES as usize);
            large.extend(bytes).ok_or(())
        };
        let mut encoder = OutlineEncoder::default();
        encoder
            .push(0, 6, OutlinePages::Stored(&crcs), &mut send)
            .unwrap();
        encoder
            .push(1 << 40, 6, OutlinePages::Zero(pages), &mut send)
            .unwrap();
        encoder.finish(&mut send).unwrap();
        let count: u64 = large.runs().map(|(_, _, pages)| pages).sum();
        assert_eq!((count, large.crcs), (100_000 + pages, crcs));
    }

    #[test]
    fn other_pages_than_those_of_the_outline_are_found() {
        let outline = outline();
        let both = [page(3), page(4)].concat();
        let good = |index, frame| assert!(outline.matches(index, &frame));
        good(0, frame(Kind::Pages, 3, 6, 2, both.clone()));
        good(4, frame(Kind::Pages, 4, 6, 1, page(4)));
        good(5, frame(Kind::Zero, 5, 6, 1, Vec::new()));
        good(6, frame(Kind::Pages, 9, 4, 1, page(9)));
        let bad = |index, frame| assert!(!outline.matches(index, &frame));
        bad(0, frame(Kind::Pages, 3, 6, 1, page(4)));
        bad(0, frame(Kind::Pages, 3, 4, 1, page(3)));
        bad(0, frame(Kind::Zero, 3, 6, 1, Vec::new()));
        bad(0, frame(Kind::Pages, 4, 6, 1, page(4)));
        bad(4, frame(Kind::Pages, 3, 6, 2, both.clone()));
        bad(5, frame(Kind::Pages, 5, 6, 1, page(0)));
        bad(5, frame(Kind::Zero, 5, 6, 2, Vec::new()));
        bad(6, frame(Kind::Pages, 9, 4, 2, both));
        bad(10, frame(Kind::Zero, 10, 6, 1, Vec::new()));
    }

    #[test]
    fn bytes_that_are_no_outline_are_refused() {
        let whole = frames().concat();
        for cut in 1..whole.len() {
            let read = Outline::default().extend(&whole[..cut]);
            // Between two records, less pages are left, which the digest shows.
            let ends = [24, 40, 60].contains(&cut);
            assert_eq!(read.is_some(), ends, "cut at {cut}");
        }
        let mut twice = Outline::default();
        twice.extend(&whole).unwrap();
        assert_eq!(twice.extend(&whole), None);
        for (at, byte) in [(8, 0), (14, 2), (15, 1), (7, 0xff)] {
            let mut other = whole.clone();
            other[at] = byte;
            if at == 7 {
                other[..7].fill(0xff);
            }
            assert_eq!(Outline::default().extend(&other), None, "{at}");
        }
    }
}
