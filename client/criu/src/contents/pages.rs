//! Positions and checksums of an address space's pages, and comparisons of two of them.

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::PageCounts;

use crate::source::{CheckpointSource, OutlinePages};

/// Pages that are neighbours and all zero, or all stored.
#[derive(Clone, Copy, Debug)]
struct Run {
    first_index: u64,
    pages: u64,
    /// Place of the first checksum; `None` for zeros.
    crcs: Option<usize>,
}

impl Run {
    fn end(&self) -> u64 {
        self.first_index.saturating_add(self.pages)
    }
}

/// Pages of an address space by their checksums, ascending.
#[derive(Clone, Debug, Default)]
pub(super) struct Positions {
    runs: Vec<Run>,
    crcs: Vec<u32>,
}

/// Reference of a comparison.
#[derive(Clone, Copy, Debug)]
pub(super) enum Counter<'a> {
    /// No other address space: pages are only counted.
    Alone,
    /// An address space that is known to be the same.
    Same,
    /// Another address space.
    Against(&'a Positions),
}

impl Positions {
    pub(super) fn of<S: CheckpointSource>(source: &S, place: usize) -> Result<Self, S::Error> {
        let mut positions = Self::default();
        source.positions(place, &mut |first_index, pages| {
            positions.push(first_index, pages)
        })?;
        Ok(positions)
    }

    pub(super) fn push(&mut self, first_index: u64, pages: OutlinePages<'_>) {
        let run = Run {
            first_index,
            pages: pages.len(),
            crcs: match pages {
                OutlinePages::Zero(_) => None,
                OutlinePages::Stored(_) => Some(self.crcs.len()),
            },
        };
        if let OutlinePages::Stored(crcs) = pages {
            self.crcs.extend_from_slice(crcs);
        }
        match self.runs.last_mut() {
            Some(last)
                if last.end() == first_index && last.crcs.is_some() == run.crcs.is_some() =>
            {
                last.pages += run.pages;
            }
            _ => self.runs.push(run),
        }
    }

    /// Returns the runs that have pages from `from` to `to`, the latter not included, cut to these.
    fn within(&self, from: u64, to: u64) -> impl Iterator<Item = Run> + '_ {
        let first = self.runs.partition_point(|run| run.end() <= from);
        let runs = self.runs[first..].iter();
        runs.take_while(move |run| run.first_index < to)
            .map(move |run| {
                let start = run.first_index.max(from);
                let skipped = usize::try_from(start - run.first_index).unwrap_or(usize::MAX);
                Run {
                    first_index: start,
                    pages: run.end().min(to) - start,
                    crcs: run.crcs.map(|at| at.saturating_add(skipped)),
                }
            })
    }

    fn crcs_of(&self, run: &Run) -> Option<&[u32]> {
        let at = run.crcs?;
        let end = at.checked_add(usize::try_from(run.pages).ok()?)?;
        self.crcs.get(at..end)
    }

    /// Counts the pages between two addresses.
    pub(super) fn count(&self, start: u64, end: u64, compared: Counter<'_>) -> PageCounts {
        let from = start / PAGE_BYTES;
        let to = if end == u64::MAX {
            end
        } else {
            end / PAGE_BYTES
        };
        let mut counts = PageCounts::default();
        let (mut equal, mut changed) = (0, 0);
        for run in self.within(from, to) {
            counts.pages += run.pages;
            counts.zero += if run.crcs.is_none() { run.pages } else { 0 };
            match compared {
                Counter::Alone => {}
                Counter::Same => equal += run.pages,
                Counter::Against(other) => {
                    let (same, different) = self.compare(&run, other);
                    equal += same;
                    changed += different;
                }
            }
        }
        if !matches!(compared, Counter::Alone) {
            counts.equal = Some(equal);
            counts.changed = Some(changed);
            counts.only_here = Some(counts.pages - equal - changed);
        }
        counts
    }

    /// Returns how many pages of a run equal those of another address space, and how many differ from them.
    fn compare(&self, run: &Run, other: &Self) -> (u64, u64) {
        let (mut equal, mut changed) = (0, 0);
        for theirs in other.within(run.first_index, run.end()) {
            let skipped = theirs.first_index - run.first_index;
            let mine = Run {
                first_index: theirs.first_index,
                pages: theirs.pages,
                crcs: run
                    .crcs
                    .map(|at| at.saturating_add(usize::try_from(skipped).unwrap_or(usize::MAX))),
            };
            let same = match (self.crcs_of(&mine), other.crcs_of(&theirs)) {
                (None, None) => theirs.pages,
                (Some(mine), Some(theirs)) => {
                    let same = mine.iter().zip(theirs).filter(|(one, other)| one == other);
                    same.count() as u64
                }
                // Zero pages are never stored.
                _ => 0,
            };
            equal += same;
            changed += theirs.pages - same;
        }
        (equal, changed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An address space, page by page: absent, zero, or a checksum.
    fn space() -> impl Strategy<Value = Vec<Option<u32>>> {
        proptest::collection::vec(
            prop_oneof![Just(None), Just(Some(0)), (1_u32..4).prop_map(Some)],
            0..64,
        )
    }

    fn positions(pages: &[Option<u32>]) -> Positions {
        let mut positions = Positions::default();
        for (index, page) in (0..).zip(pages) {
            match page {
                None => {}
                Some(0) => positions.push(index, OutlinePages::Zero(1)),
                Some(crc) => positions.push(index, OutlinePages::Stored(&[*crc])),
            }
        }
        positions
    }

    proptest! {
        #[test]
        fn counts_are_those_of_a_count_page_by_page(
            here in space(), there in space(), from in 0_u64..70, len in 0_u64..70,
        ) {
            let to = from + len;
            let counted = positions(&here).count(
                from * PAGE_BYTES, to * PAGE_BYTES, Counter::Against(&positions(&there)),
            );
            let mut expected = PageCounts { equal: Some(0), changed: Some(0), only_here: Some(0), ..PageCounts::default() };
            for index in from..to {
                let at = usize::try_from(index).unwrap();
                let Some(Some(mine)) = here.get(at) else { continue };
                expected.pages += 1;
                expected.zero += u64::from(*mine == 0);
                let place = match there.get(at).copied().flatten() {
                    None => &mut expected.only_here,
                    Some(theirs) if theirs == *mine => &mut expected.equal,
                    Some(_) => &mut expected.changed,
                };
                *place = place.map(|count| count + 1);
            }
            prop_assert_eq!(counted, expected);
            let alone = positions(&here).count(0, u64::MAX, Counter::Alone);
            prop_assert_eq!(alone.pages, here.iter().flatten().count() as u64);
            prop_assert_eq!(alone.equal, None);
        }
    }
}
