//! Address ranges of a process whose pages are still missing, with their addresses in the image. Forks, moves and
//! removals change them as `criu/uffd.c` does.

use std::collections::BTreeMap;

use permafrost_protocol::PAGE_BYTES;
use permafrost_userfault::SpaceChange;

/// Ranges of missing pages, by first address; they do not overlap, and each lies in one mapping.
#[derive(Clone, Debug, Default)]
pub(super) struct MissingRanges(BTreeMap<u64, Rest>);

/// The rest of a range, besides its first address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rest {
    end: u64,
    /// Address of the first page when it was dumped.
    image: u64,
}

/// A range of missing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MissingRange {
    /// Address of the first page.
    pub(super) start: u64,
    /// The address behind the last page.
    pub(super) end: u64,
    /// Address of the first page when it was dumped.
    pub(super) image: u64,
}

impl MissingRange {
    fn new((start, rest): (&u64, &Rest)) -> Self {
        Self {
            start: *start,
            end: rest.end,
            image: rest.image,
        }
    }

    /// Returns the range without what is before `address`, which lies in it or at its end.
    pub(super) fn from(self, address: u64) -> Self {
        Self {
            start: address,
            image: self.image + (address - self.start),
            ..self
        }
    }

    /// Returns the number of pages.
    pub(super) fn pages(&self) -> u64 {
        (self.end - self.start) / PAGE_BYTES
    }
}

impl MissingRanges {
    /// Adds a range; nothing of it may be here yet.
    pub(super) fn insert(&mut self, range: MissingRange) {
        if range.start < range.end {
            let MissingRange { start, end, image } = range;
            self.0.insert(start, Rest { end, image });
        }
    }

    /// Returns the rest of the range with the page at `address`, from that page on.
    pub(super) fn at(&self, address: u64) -> Option<MissingRange> {
        let (start, rest) = self.0.range(..=address).next_back()?;
        (address < rest.end).then(|| MissingRange::new((start, rest)).from(address))
    }

    /// Returns the first missing pages at or behind `address`.
    pub(super) fn from(&self, address: u64) -> Option<MissingRange> {
        let behind = || self.0.range(address..).next().map(MissingRange::new);
        self.at(address).or_else(behind)
    }

    /// Returns the first missing pages at or behind `address`, or else the first of all.
    pub(super) fn next_from(&self, address: u64) -> Option<MissingRange> {
        let first = || self.0.iter().next().map(MissingRange::new);
        self.from(address).or_else(first)
    }

    /// Returns true if nothing is missing.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of missing pages.
    pub(super) fn pages(&self) -> u64 {
        self.0
            .iter()
            .map(|range| MissingRange::new(range).pages())
            .sum()
    }

    /// Removes a range of addresses.
    pub(super) fn remove(&mut self, start: u64, end: u64) {
        drop(self.take(start, end));
    }

    /// Returns the number of ranges.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Records a change of the mappings. Returns the number of ranges that were moved.
    pub(super) fn change(&mut self, change: SpaceChange) -> usize {
        match change {
            SpaceChange::Remap { from, to, len } => self.remap(from, to, len),
            SpaceChange::Remove { start, end } | SpaceChange::Unmap { start, end } => {
                self.remove(start, end);
                0
            }
        }
    }

    /// Records that a mapping was moved.
    fn remap(&mut self, from: u64, to: u64, len: u64) -> usize {
        let moved = self.take(from, from.saturating_add(len));
        let count = moved.len();
        self.remove(to, to.saturating_add(len));
        for range in moved {
            self.insert(MissingRange {
                start: range.start - from + to,
                end: range.end - from + to,
                image: range.image,
            });
        }
        count
    }

    fn take(&mut self, start: u64, end: u64) -> Vec<MissingRange> {
        if start >= end {
            return Vec::new();
        }
        self.split(start);
        self.split(end);
        let taken: Vec<_> = self.0.range(start..end).map(MissingRange::new).collect();
        for range in &taken {
            self.0.remove(&range.start);
        }
        taken
    }

    /// Divides the range that goes on both before and behind `address`.
    fn split(&mut self, address: u64) {
        let Some(behind) = self.at(address) else {
            return;
        };
        let before = self.0.range_mut(..address).next_back();
        if let Some((_, rest)) = before.filter(|(_, rest)| rest.end > address) {
            rest.end = address;
            self.insert(behind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(ranges: &[(u64, u64, u64)]) -> MissingRanges {
        let mut missing = MissingRanges::default();
        for (start, end, image) in ranges {
            missing.insert(MissingRange {
                start: *start,
                end: *end,
                image: *image,
            });
        }
        missing
    }

    fn all(missing: &MissingRanges) -> Vec<(u64, u64, u64)> {
        let ranges = missing.0.iter();
        ranges
            .map(|(start, rest)| (*start, rest.end, rest.image))
            .collect()
    }

    #[test]
    fn pages_are_found_from_their_place_on_and_removed_anywhere() {
        let mut ranges = missing(&[(0x1000, 0x5000, 0x1000), (0x8000, 0x9000, 0x8000)]);
        assert_eq!(ranges.pages(), 5);
        let found = ranges.at(0x3000).unwrap();
        assert_eq!(
            (found.start, found.end, found.image),
            (0x3000, 0x5000, 0x3000)
        );
        assert_eq!(ranges.at(0x5000), None);
        assert_eq!(
            ranges.next_from(0x5000).map(|range| range.start),
            Some(0x8000)
        );
        assert_eq!(
            ranges.next_from(0x9000).map(|range| range.start),
            Some(0x1000)
        );
        ranges.remove(0x2000, 0x3000);
        assert_eq!(
            all(&ranges),
            [
                (0x1000, 0x2000, 0x1000),
                (0x3000, 0x5000, 0x3000),
                (0x8000, 0x9000, 0x8000)
            ]
        );
        ranges.remove(0, 0x4000);
        assert_eq!(
            all(&ranges),
            [(0x4000, 0x5000, 0x4000), (0x8000, 0x9000, 0x8000)]
        );
        ranges.remove(0x4800, 0x4800);
        ranges.remove(0, u64::MAX);
        assert!(ranges.is_empty());
    }

    #[test]
    fn a_moved_mapping_keeps_its_pages_and_covers_those_that_were_there() {
        let mut ranges = missing(&[
            (0x1000, 0x5000, 0x1000),
            (0x6000, 0x7000, 0x6000),
            (0x1_0000, 0x1_3000, 0x1_0000),
        ]);
        assert_eq!(ranges.remap(0x2000, 0x1_1000, 0x2000), 1);
        assert_eq!(
            all(&ranges),
            [
                (0x1000, 0x2000, 0x1000),
                (0x4000, 0x5000, 0x4000),
                (0x6000, 0x7000, 0x6000),
                (0x1_0000, 0x1_1000, 0x1_0000),
                (0x1_1000, 0x1_3000, 0x2000)
            ]
        );
        assert_eq!(ranges.at(0x1_2000).unwrap().image, 0x3000);
        assert_eq!(ranges.remap(u64::MAX - 1, 0, u64::MAX), 0);
    }

    /// Pages by their numbers, with the numbers that they had when they were dumped.
    type Model = BTreeMap<u64, u64>;

    fn change(model: &mut Model, change: SpaceChange) {
        let mut take = |start: u64, end: u64| {
            let mut rest = model.split_off(&(start / PAGE_BYTES));
            model.append(&mut rest.split_off(&(end / PAGE_BYTES)));
            rest
        };
        match change {
            SpaceChange::Remap { from, to, len } => {
                let moved = take(from, from + len);
                take(to, to + len);
                let place = |page: u64| page - from / PAGE_BYTES + to / PAGE_BYTES;
                model.extend(moved.iter().map(|(page, image)| (place(*page), *image)));
            }
            SpaceChange::Remove { start, end } | SpaceChange::Unmap { start, end } => {
                take(start, end);
            }
        }
    }

    #[test]
    fn random_changes_leave_the_pages_that_a_simple_model_has() {
        const PAGES: u64 = 64;
        let seed = u64::from(std::process::id());
        println!("seed {seed}");
        let mut state = seed;
        let mut random = move |below: u64| {
            // Knuth's generator (MMIX).
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..300 {
            let mut ranges = missing(&[(0, PAGES / 2 * PAGE_BYTES, 0)]);
            let mut model: Model = (0..PAGES / 2).map(|page| (page, page)).collect();
            for _ in 0..40 {
                let len = random(PAGES / 4) * PAGE_BYTES;
                let [start, to] = [random(PAGES), random(PAGES)].map(|page| page * PAGE_BYTES);
                let next = match random(3) {
                    0 => SpaceChange::Remove {
                        start,
                        end: start + random(3) * PAGE_BYTES,
                    },
                    _ => SpaceChange::Remap {
                        from: start,
                        to,
                        len,
                    },
                };
                ranges.change(next);
                change(&mut model, next);
                let found = all(&ranges).into_iter().flat_map(|(start, end, image)| {
                    let pages = (start / PAGE_BYTES)..(end / PAGE_BYTES);
                    pages.zip(image / PAGE_BYTES..)
                });
                assert_eq!(found.collect::<Model>(), model, "after {next:?}");
            }
        }
    }
}
