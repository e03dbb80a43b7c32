//! Proofs: parts of a page map's digest tree (docs/format.md, "Content digest"), by which some of an address space is
//! compared with the manifest's digest without the rest.
//!
//! On the wire (docs/protocol.md, "A fetch"), a proof is a sequence of records, each block followed by the records of
//! its slots. Frames may divide them anywhere:
//!
//! ```text
//! 0 | u64 first index | u8 slots | u8 stored slots | of each slot u16 flags, u32 CRC32 if stored     block of 8 pages
//! 1 | u8 level | u64 first index | u8 slots                                                          larger block
//! 2 | u16 flags                                                                                      slot of zeros
//! 3 | 32 bytes digest                                                                                full slot
//! 4 | 32 bytes digest                                                                                other slot
//! ```

use std::ops::Range;

use permafrost_protocol::pageserver::{PE_LAZY, PE_PRESENT};
use permafrost_protocol::wire::frame::MAX_PAYLOAD_BYTES;
use sha2::{Digest, Sha256};

use super::Outline;
use super::digest::{Block, MAX_SPAN, Part, SLOTS, block_of, span_pages};

/// Flags of the pages whose blocks a proof of positions need not show. Such pages are not used before they are proven:
/// CRIU does not read them.
pub const LAZY_FLAGS: u16 = PE_LAZY | PE_PRESENT;

/// First byte of each record.
const LEAF: u8 = 0;
const BLOCK: u8 = 1;
const ZEROS: u8 = 2;
const FULL: u8 = 3;
const HIDDEN: u8 = 4;

/// Most bytes of a proof for each of its pages, which may be the only one of its block of eight (17 bytes), and each
/// second of those has a block above (11).
const PAGE_PROOF_BYTES: u64 = 32;

/// Most bytes of a proof besides: the paths to both ends of the pages and to one leaf, 21 blocks with 8 digests each.
const PATHS_BYTES: u64 = 32 << 10;

/// Most bytes of a proof of so many pages.
pub(super) fn most_bytes(pages: u64) -> usize {
    let bytes = pages.saturating_mul(PAGE_PROOF_BYTES);
    usize::try_from(bytes.saturating_add(PATHS_BYTES)).unwrap_or(usize::MAX)
}

/// Encoder of a proof. Its records are added in their order.
#[derive(Default)]
pub struct ProofEncoder(Vec<u8>);

impl ProofEncoder {
    /// Adds a block of eight pages: flags of each, and its CRC32; none if it is zeros.
    pub fn leaf(&mut self, first_index: u64, pages: &[Option<(u16, Option<u32>)>; 8]) {
        let bitmap = |only_stored: bool| {
            (0..).zip(pages).fold(0_u8, |bits, (slot, page)| {
                let is_set = page.is_some_and(|(_, crc)| !only_stored || crc.is_some());
                bits | u8::from(is_set) << slot
            })
        };
        self.0.push(LEAF);
        self.0.extend_from_slice(&first_index.to_le_bytes());
        self.0.push(bitmap(false));
        self.0.push(bitmap(true));
        for (flags, crc) in pages.iter().flatten() {
            self.0.extend_from_slice(&flags.to_le_bytes());
            if let Some(crc) = crc {
                self.0.extend_from_slice(&crc.to_le_bytes());
            }
        }
    }

    /// Adds a larger block; the records of its slots follow.
    pub fn block(&mut self, level: u8, first_index: u64, slots: u8) {
        self.0.extend_from_slice(&[BLOCK, level]);
        self.0.extend_from_slice(&first_index.to_le_bytes());
        self.0.push(slots);
    }

    /// Adds a slot of zeros.
    pub fn zeros(&mut self, flags: u16) {
        self.0.push(ZEROS);
        self.0.extend_from_slice(&flags.to_le_bytes());
    }

    /// Adds a slot that has all of its pages, all with [`LAZY_FLAGS`].
    pub fn full(&mut self, digest: &[u8; 32]) {
        self.0.push(FULL);
        self.0.extend_from_slice(digest);
    }

    /// Adds a slot that is not shown.
    pub fn hidden(&mut self, digest: &[u8; 32]) {
        self.0.push(HIDDEN);
        self.0.extend_from_slice(digest);
    }

    /// Sends whole payloads of frames; `all` also the rest.
    ///
    /// # Errors
    /// Those of `send`.
    pub fn send<E>(
        &mut self,
        all: bool,
        send: &mut impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let most = MAX_PAYLOAD_BYTES as usize;
        while self.0.len() >= most {
            send(&self.0[..most])?;
            self.0.drain(..most);
        }
        if all && !self.0.is_empty() {
            send(&self.0)?;
            self.0.clear();
        }
        Ok(())
    }
}

/// Pages that a proof shows. They count only once all of the proof was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Page(u16, u32),
    Zeros(u16),
    Full,
    Hidden,
}

/// Returns the positions of all pages, ascending: first index, flags and number of pages. `None` if the proof does not
/// show them, or is of another address space.
///
/// A slot that is called full has at most so many pages, and everything else is shown. So where all is as many pages as
/// the manifest says, each of those slots is full. Their flags are not proven.
pub(super) fn positions(
    proof: &[u8],
    pages: u64,
    map_digest: &[u8],
) -> Option<Vec<(u64, u16, u64)>> {
    let mut extents: Vec<(u64, u16, u64)> = Vec::new();
    let (mut counted, mut hides) = (0_u64, false);
    read(proof, map_digest, &mut |index, pages, shown| {
        let flags = match shown {
            Shown::Page(flags, _) | Shown::Zeros(flags) => flags,
            Shown::Full => LAZY_FLAGS,
            Shown::Hidden => {
                hides = true;
                return;
            }
        };
        counted = counted.saturating_add(pages);
        match extents.last_mut() {
            Some(last) if last.0 + last.2 == index && last.1 == flags => last.2 += pages,
            _ => extents.push((index, flags, pages)),
        }
    })?;
    (!hides && counted == pages).then_some(extents)
}

/// Returns positions and checksums of the pages with these indices. `None` if the proof does not show them, or is of
/// another address space.
pub(super) fn outline(proof: &[u8], range: &Range<u64>, map_digest: &[u8]) -> Option<Outline> {
    let (mut outline, mut lacks) = (Outline::default(), false);
    read(proof, map_digest, &mut |index, pages, shown| {
        let first = index.max(range.start);
        let pages = (index + pages).min(range.end).saturating_sub(first);
        match shown {
            _ if pages == 0 => {}
            Shown::Page(flags, crc) => outline.append_stored(first, flags, &[crc]),
            Shown::Zeros(flags) => outline.append_zeros(first, flags, pages),
            Shown::Full | Shown::Hidden => lacks = true,
        }
    })?;
    (!lacks).then_some(outline)
}

/// Verifies a proof. `take` gets what it shows, ascending: first index and number of pages.
fn read(proof: &[u8], map_digest: &[u8], take: &mut dyn FnMut(u64, u64, Shown)) -> Option<()> {
    if proof.is_empty() {
        return (Sha256::digest([])[..] == *map_digest).then_some(());
    }
    let mut reader = Reader { rest: proof, take };
    let root = reader.block(0..u64::MAX, MAX_SPAN)?;
    let is_all = reader.rest.is_empty();
    (is_all && root.is_placed && root.digest[..] == *map_digest).then_some(())
}

struct Reader<'a> {
    rest: &'a [u8],
    take: &'a mut dyn FnMut(u64, u64, Shown),
}

/// A block that was read.
struct ReadBlock {
    level: u8,
    digest: [u8; 32],
    /// True if a digest below it is over an index. Blocks are aligned, so this index places those above it.
    is_placed: bool,
}

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*bytes)
    }

    /// Reads a block that lies in a slot with these indices; its level is below `most`.
    fn block(&mut self, within: Range<u64>, most: u8) -> Option<ReadBlock> {
        match self.bytes()? {
            [LEAF] => self.leaf(&within),
            [BLOCK] => self.larger(&within, most),
            _ => None,
        }
    }

    fn first_index(&mut self, within: &Range<u64>, level: u8) -> Option<u64> {
        let first_index = u64::from_le_bytes(self.bytes()?);
        let is_aligned = block_of(first_index, level + 1) == first_index;
        (is_aligned && within.contains(&first_index)).then_some(first_index)
    }

    fn leaf(&mut self, within: &Range<u64>) -> Option<ReadBlock> {
        let first_index = self.first_index(within, 0)?;
        let [slots, stored] = self.bytes()?;
        if slots == 0 || stored & !slots != 0 {
            return None;
        }
        let mut block = Block::at(first_index);
        for slot in (0..SLOTS).filter(|slot| slots >> slot & 1 == 1) {
            let flags = u16::from_le_bytes(self.bytes()?);
            let (part, shown) = if stored >> slot & 1 == 1 {
                let crc = u32::from_le_bytes(self.bytes()?);
                (Part::Page(flags, crc), Shown::Page(flags, crc))
            } else {
                (Part::Zeros(flags), Shown::Zeros(flags))
            };
            block.slots[usize::from(slot)] = Some(part);
            (self.take)(first_index.checked_add(slot.into())?, 1, shown);
        }
        Some(ReadBlock {
            level: 0,
            digest: block.part(0)?.digest(1, first_index),
            is_placed: true,
        })
    }

    fn larger(&mut self, within: &Range<u64>, most: u8) -> Option<ReadBlock> {
        let [level] = self.bytes()?;
        if level == 0 || level >= most {
            return None;
        }
        let first_index = self.first_index(within, level)?;
        let [slots] = self.bytes()?;
        if slots.count_ones() < 2 {
            return None;
        }
        let mut block = Block::at(first_index);
        let mut is_placed = false;
        for slot in (0..SLOTS).filter(|slot| slots >> slot & 1 == 1) {
            let pages = span_pages(level);
            let first = first_index.checked_add(u64::from(slot).checked_mul(pages)?)?;
            let part = match *self.rest.first()? {
                LEAF | BLOCK => {
                    let end = first.saturating_add(pages);
                    let below = self.block(first..end, level)?;
                    // One that is smaller than its slot may be anywhere in it.
                    if below.level + 1 < level && !below.is_placed {
                        return None;
                    }
                    is_placed |= below.is_placed;
                    Part::Digest(below.digest)
                }
                _ => {
                    let (part, shown) = self.slot()?;
                    is_placed |= matches!(shown, Shown::Zeros(_));
                    first.checked_add(pages)?;
                    (self.take)(first, pages, shown);
                    part
                }
            };
            block.slots[usize::from(slot)] = Some(part);
        }
        Some(ReadBlock {
            level,
            digest: block.part(level)?.digest(level + 1, first_index),
            is_placed,
        })
    }

    /// Reads the record of a slot whose blocks are not shown.
    fn slot(&mut self) -> Option<(Part, Shown)> {
        Some(match self.bytes()? {
            [ZEROS] => {
                let flags = u16::from_le_bytes(self.bytes()?);
                (Part::Zeros(flags), Shown::Zeros(flags))
            }
            [FULL] => (Part::Digest(self.bytes()?), Shown::Full),
            [HIDDEN] => (Part::Digest(self.bytes()?), Shown::Hidden),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::MapDigest;
    use super::*;

    /// First index of a block of 64 pages.
    const FIRST: u64 = 64 * 5;

    fn page(index: u64) -> Option<(u16, Option<u32>)> {
        Some((LAZY_FLAGS, Some(u32::try_from(index * 77).unwrap())))
    }

    /// Pages of the leaf in a slot of the block, the last of which lacks its last page.
    fn leaf(slot: u64) -> [Option<(u16, Option<u32>)>; 8] {
        std::array::from_fn(|at| {
            let index = FIRST + slot * 8 + at as u64;
            page(index).filter(|_| index != FIRST + 63)
        })
    }

    fn leaf_digest(slot: u64) -> [u8; 32] {
        let mut digest = MapDigest::default();
        for (page, index) in leaf(slot).iter().zip(FIRST + slot * 8..) {
            if let Some((flags, Some(crc))) = page {
                digest.checksums(index, *flags, &[*crc]);
            }
        }
        digest.finish()
    }

    fn map_digest() -> [u8; 32] {
        let mut digest = MapDigest::default();
        for index in FIRST..FIRST + 63 {
            let (flags, crc) = page(index).unwrap();
            digest.checksums(index, flags, &[crc.unwrap()]);
        }
        digest.finish()
    }

    /// Returns a proof that shows the leaves in `shown`, and calls the others full or hides them.
    fn proof(first_index: u64, shown: &[u64], full: bool) -> Vec<u8> {
        let mut proof = ProofEncoder::default();
        proof.block(1, first_index, 0xff);
        for slot in 0..8 {
            match (shown.contains(&slot), full) {
                (true, _) => proof.leaf(FIRST + slot * 8, &leaf(slot)),
                (false, true) => proof.full(&leaf_digest(slot)),
                (false, false) => proof.hidden(&leaf_digest(slot)),
            }
        }
        proof.0
    }

    #[test]
    fn positions_are_proven_by_few_of_the_blocks() {
        let positions = |proof: &[u8]| super::positions(proof, 63, &map_digest());
        let all = Some(vec![(FIRST, LAZY_FLAGS, 63)]);
        assert_eq!(positions(&proof(FIRST, &[0, 7], true)), all);
        assert_eq!(
            positions(&proof(FIRST, &[0, 1, 2, 3, 4, 5, 6, 7], true)),
            all
        );
        // The last block is not full: the manifest counts one page less.
        assert_eq!(positions(&proof(FIRST, &[0], true)), None);
        // Hidden blocks may have any pages.
        assert_eq!(positions(&proof(FIRST, &[0, 7], false)), None);
        // No digest says where the block is.
        assert_eq!(positions(&proof(FIRST, &[], true)), None);
        assert_eq!(positions(&[]), None);
        let nothing: [u8; 32] = Sha256::digest([]).into();
        assert_eq!(super::positions(&[], 0, &nothing), Some(Vec::new()));
    }

    #[test]
    fn checksums_of_some_pages_are_proven_by_the_digests_beside_their_path() {
        let outline = |proof: &[u8], range| super::outline(proof, &range, &map_digest());
        let shown = proof(FIRST, &[2, 3], false);
        let part = outline(&shown, FIRST + 17..FIRST + 30).unwrap();
        let runs: Vec<_> = part.runs().collect();
        assert_eq!(runs, [(FIRST + 17, LAZY_FLAGS, 13)]);
        for hidden in [FIRST..FIRST + 30, FIRST + 17..FIRST + 33] {
            assert_eq!(outline(&shown, hidden), None);
        }
        // The last page is not there, which is proven, too.
        let last = outline(&proof(FIRST, &[7], false), FIRST + 62..FIRST + 64).unwrap();
        assert_eq!(last.count(), 1);
        let behind = outline(&shown, FIRST + 64..u64::MAX).unwrap();
        assert_eq!(behind.count(), 0);
    }

    #[test]
    fn no_proof_with_a_flipped_or_missing_byte_is_accepted() {
        let whole = proof(FIRST, &[0, 7], true);
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut other = whole.clone();
                other[at] ^= 1 << bit;
                let read = super::positions(&other, 63, &map_digest());
                assert_eq!(read, None, "bit {bit} of byte {at}");
            }
            assert_eq!(super::positions(&whole[..at], 63, &map_digest()), None);
        }
        let longer = [&whole[..], &[ZEROS, 0, 0]].concat();
        assert_eq!(super::positions(&longer, 63, &map_digest()), None);
    }

    #[test]
    fn a_block_that_is_smaller_than_its_slot_is_where_a_leaf_shows_it() {
        // Pages 0 to 15 of one slot of 64, and 0 to 7 of another.
        let indices = || (FIRST..FIRST + 16).chain(FIRST + 64 * 2..FIRST + 64 * 2 + 8);
        let mut digest = MapDigest::default();
        for index in indices() {
            let (flags, crc) = page(index).unwrap();
            digest.checksums(index, flags, &[crc.unwrap()]);
        }
        let digest = digest.finish();
        let leaf = |first: u64| std::array::from_fn(|at| page(first + at as u64));
        let proof = |first: u64| {
            let mut proof = ProofEncoder::default();
            proof.block(2, 0, 0b1010_0000);
            proof.block(1, FIRST, 0b11);
            proof.leaf(FIRST, &leaf(FIRST));
            proof.leaf(FIRST + 8, &leaf(FIRST + 8));
            proof.leaf(first, &leaf(FIRST + 128));
            proof.0
        };
        let runs = vec![(FIRST, LAZY_FLAGS, 16), (FIRST + 128, LAZY_FLAGS, 8)];
        assert_eq!(positions(&proof(FIRST + 128), 24, &digest), Some(runs));
        for elsewhere in [FIRST + 136, FIRST + 120, FIRST + 129] {
            assert_eq!(positions(&proof(elsewhere), 24, &digest), None);
        }
    }

    #[test]
    fn bytes_that_are_no_proof_do_not_panic() {
        let mut seed = 1_u64;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            seed >> 33
        };
        for _ in 0..20_000 {
            let len = next() % 96;
            let mut bytes: Vec<u8> = (0..len)
                .map(|_| u8::try_from(next() & 7).unwrap())
                .collect();
            if let Some(level) = bytes.get_mut(1) {
                *level = u8::try_from(next() % 24).unwrap();
            }
            assert_eq!(positions(&bytes, next(), &[7; 32]), None);
        }
        // As deep as a proof can be.
        let mut deep = Vec::new();
        for level in (1..MAX_SPAN).rev() {
            deep.extend_from_slice(&[BLOCK, level]);
            deep.extend_from_slice(&0_u64.to_le_bytes());
            deep.push(3);
        }
        assert_eq!(positions(&deep, 1, &[7; 32]), None);
        let again = [&deep[..], &deep].concat();
        assert_eq!(positions(&again, 1, &[7; 32]), None);
    }
}
