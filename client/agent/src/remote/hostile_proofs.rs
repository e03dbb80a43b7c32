//! Proofs of a node that knows the map and lies about it: whatever is accepted is so.

use std::collections::BTreeMap;
use std::ops::Range;

use super::digest::{Block, MAX_SPAN, MapDigest, Part, SLOTS, span_pages};
use super::proof::{LAZY_FLAGS, ProofEncoder, outline, positions};
use super::{Outline, OutlinePages};

/// Flags of a page, and its CRC32; none if it is zeros.
type Page = (u16, Option<u32>);

/// Random numbers, the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005);
        self.0 = self.0.wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn byte(&mut self) -> u8 {
        u8::try_from(self.below(256)).unwrap()
    }

    fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// Pages of an address space, and its digest.
struct Map {
    pages: BTreeMap<u64, Page>,
    digest: [u8; 32],
}

impl Map {
    /// Returns a map of a few ranges, near to each other and far.
    fn random(random: &mut Random) -> Self {
        let mut pages = BTreeMap::new();
        let mut first = random.below(1 << 20);
        for _ in 0..=random.below(4) {
            let flags = if random.once_in(3) { 4 } else { LAZY_FLAGS };
            let kind = random.below(4);
            for index in first..=first + random.below(200) {
                let is_zero = kind == 0 || (kind == 1 && random.once_in(4));
                let crc = u32::try_from(random.below(1 << 30)).unwrap();
                if !random.once_in(40) {
                    pages.insert(index, (flags, (!is_zero).then_some(crc)));
                }
            }
            let gap = if random.once_in(2) { 1 << 30 } else { 300 };
            first += 1 + random.below(gap);
        }
        let mut digest = MapDigest::default();
        for (index, (flags, crc)) in &pages {
            match crc {
                Some(crc) => digest.checksums(*index, *flags, &[*crc]),
                None => digest.zeros(*index, *flags, 1),
            }
        }
        Self {
            digest: digest.finish(),
            pages,
        }
    }

    fn node(&self, level: u8, first_index: u64) -> Option<Node> {
        let span = span_pages(level + 1);
        self.pages
            .range(first_index..first_index.checked_add(span)?)
            .next()?;
        let mut slots: [Option<Node>; SLOTS as usize] = Default::default();
        for (slot, at) in slots.iter_mut().zip(0..) {
            let first = first_index + at * span_pages(level);
            *slot = match level {
                0 => self.pages.get(&first).map(|page| Node::Page(*page)),
                _ => self.node(level - 1, first),
            };
        }
        // A block of one block is that block.
        if level > 0 && slots.iter().flatten().count() == 1 {
            return slots.into_iter().flatten().next();
        }
        Some(Node::Block {
            level,
            first_index,
            slots: Box::new(slots),
        })
    }

    fn root(&self) -> Node {
        // Blocks above have all of these pages in one slot.
        (0..MAX_SPAN - 1)
            .find_map(|level| {
                let pages = self.pages.len();
                let end = span_pages(level + 1);
                (self.pages.range(..end).count() == pages).then(|| self.node(level, 0))?
            })
            .unwrap()
    }

    fn outline(&self, range: Range<u64>) -> Vec<(u64, Page)> {
        let pages = self.pages.range(range);
        pages.map(|(index, page)| (*index, *page)).collect()
    }
}

/// Block of a map, or a page.
enum Node {
    Page(Page),
    Block {
        level: u8,
        first_index: u64,
        slots: Box<[Option<Node>; SLOTS as usize]>,
    },
}

impl Node {
    /// Returns the node as the part of a slot of a block of this level.
    fn part(&self, level_above: u8) -> Part {
        match self {
            Self::Page((flags, Some(crc))) => Part::Page(*flags, *crc),
            Self::Page((flags, None)) => Part::Zeros(*flags),
            Self::Block {
                level, first_index, ..
            } => match self.own_part() {
                part if level + 1 == level_above => part,
                // It is one of few blocks of its slot.
                part => Part::Digest(part.digest(level + 1, *first_index)),
            },
        }
    }

    /// Returns the level, the first index and the slots of a block.
    fn block(&self) -> (u8, u64, &[Option<Node>; SLOTS as usize]) {
        match self {
            Self::Block {
                level,
                first_index,
                slots,
            } => (*level, *first_index, slots),
            Self::Page(_) => unreachable!("pages are in blocks"),
        }
    }

    fn own_part(&self) -> Part {
        let (level, first_index, slots) = self.block();
        let mut block = Block::at(first_index);
        for (part, slot) in block.slots.iter_mut().zip(slots.iter()) {
            *part = slot.as_ref().map(|node| node.part(level));
        }
        block.part(level).unwrap()
    }
}

/// Liar about a map: `odds` is how seldom.
struct Liar<'a> {
    random: &'a mut Random,
    odds: u64,
    /// Level and first index of the last block that was shown.
    last: (u8, u64),
}

impl Liar<'_> {
    fn lies(&mut self) -> bool {
        self.odds > 0 && self.random.once_in(self.odds)
    }

    fn lie_of_index(&mut self, index: u64, level: u8) -> u64 {
        if !self.lies() {
            return index;
        }
        match self.random.below(4) {
            0 => self.last.1,
            1 => index.wrapping_add(self.random.below(16)),
            2 => index.wrapping_sub(span_pages(level + 1)),
            _ => index.wrapping_add(span_pages(level + 1).wrapping_mul(self.random.below(9))),
        }
    }

    /// Encodes a block. Shows pages of `shown`, the place of an `unplaced` block, and all that is not full if it has
    /// to show where pages are.
    fn encode(
        &mut self,
        node: &Node,
        unplaced: bool,
        shown: Option<&Range<u64>>,
        to: &mut ProofEncoder,
    ) {
        let (level, first_index, slots) = node.block();
        self.last = (level, first_index);
        let first = self.lie_of_index(first_index, level);
        let mut bitmap = slots.iter().zip(0..).fold(0_u8, |bits, (slot, at)| {
            bits | u8::from(slot.is_some()) << at
        });
        if level == 0 {
            let mut pages = std::array::from_fn(|at| match &slots[at] {
                Some(Node::Page(page)) => Some(*page),
                _ => None,
            });
            if self.lies() {
                let at = usize::try_from(self.random.below(8)).unwrap();
                pages[at] = [None, Some((LAZY_FLAGS, None)), Some((4, Some(7)))]
                    [usize::try_from(self.random.below(3)).unwrap()];
            }
            return to.leaf(first, &pages);
        }
        if self.lies() {
            return self.move_away(node, shown.is_none(), to);
        }
        if self.lies() {
            bitmap ^= 1 << self.random.below(8);
        }
        let told = level.wrapping_add(if self.lies() {
            self.random.byte() % 3
        } else {
            0
        });
        to.block(told, first, bitmap);
        let mut unplaced = unplaced;
        for (slot, at) in slots.iter().zip(0..) {
            let Some(child) = slot else { continue };
            let slot_first = first_index + at * span_pages(level);
            let within = slot_first..slot_first + span_pages(level);
            let places = std::mem::take(&mut unplaced);
            self.encode_slot(child, (level, &within), places, shown, to);
        }
    }

    /// Encodes a block of blocks at another place, and shows nothing of it, as its digest is not over its index.
    fn move_away(&mut self, node: &Node, full: bool, to: &mut ProofEncoder) {
        let (level, first_index, slots) = node.block();
        let span = span_pages(level + 1);
        let slots = (0_u8..).zip(slots.iter());
        let slots = slots.filter_map(|(at, slot)| Some((at, slot.as_ref()?)));
        let bitmap = slots.clone().fold(0, |bits, (at, _)| bits | 1 << at);
        // Within the slot of the block above, if it is only a bit larger.
        let moved = first_index ^ span.wrapping_mul(1 + self.random.below(7));
        to.block(level, moved, bitmap);
        for (at, child) in slots {
            let first = first_index + u64::from(at) * span_pages(level);
            let digest = child.part(level).digest(level, first);
            match full {
                true => to.full(&digest),
                false => to.hidden(&digest),
            }
        }
    }

    fn encode_slot(
        &mut self,
        child: &Node,
        (level, within): (u8, &Range<u64>),
        places: bool,
        shown: Option<&Range<u64>>,
        to: &mut ProofEncoder,
    ) {
        let part = child.part(level);
        let digest = part.digest(level, within.start);
        if self.lies() {
            match self.random.below(5) {
                0 => return to.full(&digest),
                1 => return to.hidden(&digest),
                2 => return to.zeros(LAZY_FLAGS),
                3 => return,
                _ => self.encode(child, places, shown, to),
            }
        }
        if let Part::Zeros(flags) = part {
            return to.zeros(flags);
        }
        let is_smaller = matches!(child, Node::Block { level: own, .. } if own + 1 < level);
        let shows = match shown {
            None => !is_full(child),
            Some(range) => within.start < range.end && range.start < within.end,
        };
        match (places || shows || (shown.is_none() && is_smaller), shown) {
            (true, _) => self.encode(child, places || is_smaller, shown, to),
            (false, None) => to.full(&digest),
            (false, Some(_)) => to.hidden(&digest),
        }
    }
}

/// Returns true if a block has all of its pages, all with [`LAZY_FLAGS`].
fn is_full(node: &Node) -> bool {
    match node {
        Node::Page((flags, _)) => *flags == LAZY_FLAGS,
        Node::Block { level, slots, .. } => slots.iter().all(|slot| {
            let fits = |slot: &Node| match slot {
                Node::Page(_) => true,
                Node::Block { level: own, .. } => own + 1 == *level,
            };
            slot.as_ref()
                .is_some_and(|slot| fits(slot) && is_full(slot))
        }),
    }
}

fn pages_of(outline: &Outline) -> Vec<(u64, Page)> {
    let (mut flags, mut pages) = (BTreeMap::new(), Vec::new());
    for (first, own, count) in outline.runs() {
        flags.extend((first..first + count).map(|index| (index, own)));
    }
    outline.each(&mut |first, run| match run {
        OutlinePages::Zero(count) => {
            pages.extend((first..first + count).map(|index| (index, (flags[&index], None))));
        }
        OutlinePages::Stored(crcs) => {
            let crcs = crcs.iter().zip(first..);
            pages.extend(crcs.map(|(crc, index)| (index, (flags[&index], Some(*crc)))));
        }
    });
    pages
}

/// Returns a proof of a map, changed in some bytes now and then.
fn prove(map: &Map, random: &mut Random, odds: u64, shown: Option<&Range<u64>>) -> Vec<u8> {
    let mut proof = ProofEncoder::default();
    let mut liar = Liar {
        random,
        odds,
        last: (0, 0),
    };
    liar.encode(&map.root(), true, shown, &mut proof);
    let mut bytes = Vec::new();
    let sent = proof.send(true, &mut |part| {
        bytes.extend_from_slice(part);
        Ok::<_, ()>(())
    });
    sent.unwrap();
    if odds > 0 && random.once_in(4) {
        let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
        match random.below(3) {
            0 => bytes[at] = random.byte(),
            1 => bytes.truncate(at),
            _ => bytes.insert(at, random.byte()),
        }
    }
    bytes
}

#[test]
fn what_is_accepted_of_a_liar_is_so() {
    let mut random = Random(20_261_124);
    let mut refused = 0;
    for _ in 0..150 {
        let map = Map::random(&mut random);
        if map.pages.is_empty() {
            continue;
        }
        let count = map.pages.len() as u64;
        let all: Vec<u64> = map.pages.keys().copied().collect();
        let ends = (all[0], all[all.len() - 1] + 1);
        for odds in [0, 0, 200, 60, 20, 5].into_iter().cycle().take(60) {
            let proof = prove(&map, &mut random, odds, None);
            let read = positions(&proof, count, &map.digest);
            let read = read.map(|extents| {
                let indices = extents
                    .iter()
                    .flat_map(|(first, _, pages)| *first..first + pages);
                indices.collect::<Vec<_>>()
            });
            assert!(odds > 0 || read.is_some(), "an honest proof of positions");
            refused += u64::from(read.is_none());
            assert!(read.is_none_or(|read| read == all));

            let start = ends.0 + random.below(ends.1 - ends.0);
            let range = start..start + 1 + random.below(100);
            let proof = prove(&map, &mut random, odds, Some(&range));
            let read = outline(&proof, &range, &map.digest).map(|outline| pages_of(&outline));
            assert!(odds > 0 || read.is_some(), "an honest proof of {range:?}");
            refused += u64::from(read.is_none());
            assert!(read.is_none_or(|read| read == map.outline(range)));

            // The proof of another map.
            let mut digest = map.digest;
            digest[usize::try_from(random.below(32)).unwrap()] ^= 1;
            assert_eq!(positions(&proof, count, &digest), None);
        }
    }
    assert!(refused > 3_000, "{refused} lies");
}
