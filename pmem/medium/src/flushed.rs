//! Ranges on their way to the medium.

use std::time::Duration;

/// Ranges that one writer has flushed and not fenced yet. Each writer has its own, so that a fence waits for no other
/// writer's ranges.
#[derive(Debug, Default)]
pub struct Flushed {
    /// (start, end) in bytes, in the order of the flushes; neighbours are one.
    ranges: Vec<(u64, u64)>,
    /// Time at which an emulated device will have written the ranges, by its clock.
    pub(crate) done_at: Duration,
    /// Those of the further media of a set, by their number.
    others: Vec<(usize, Flushed)>,
}

impl Flushed {
    /// Returns a set without ranges.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns true if there is nothing to wait for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.others.iter().all(|(_, other)| other.is_empty())
    }

    /// Returns the ranges of a further medium of a set.
    pub(crate) fn of(&mut self, medium: usize) -> &mut Self {
        let found = self.others.iter().position(|(number, _)| *number == medium);
        let index = found.unwrap_or_else(|| {
            self.others.push((medium, Self::default()));
            self.others.len() - 1
        });
        &mut self.others[index].1
    }

    /// Takes the ranges of the further media out.
    pub(crate) fn take_others(&mut self) -> Vec<(usize, Self)> {
        std::mem::take(&mut self.others)
    }

    /// Puts the ranges of a further medium back, which are not durable.
    pub(crate) fn put_back(&mut self, medium: usize, other: Self) {
        self.others.push((medium, other));
    }

    pub(crate) fn add(&mut self, at: u64, len_bytes: u64) {
        if len_bytes == 0 {
            return;
        }
        let end = at + len_bytes;
        match self.ranges.last_mut() {
            Some(last) if last.1 == at => last.1 = end,
            _ => self.ranges.push((at, end)),
        }
    }

    pub(crate) fn ranges(&self) -> &[(u64, u64)] {
        &self.ranges
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Returns the least ranges that cover the given ones: whole units of `grain`, joined where they touch. Beyond `most`
/// ranges the closest ones are joined, with the gaps between them.
pub(crate) fn cover(ranges: &[(u64, u64)], grain: u64, most: usize) -> Vec<(u64, u64)> {
    let mut rounded: Vec<_> = ranges
        .iter()
        .map(|&(start, end)| (start / grain * grain, end.next_multiple_of(grain)))
        .collect();
    rounded.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (start, end) in rounded {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    if joined.len() <= most {
        return joined;
    }
    // The widest gaps stay.
    let mut gaps: Vec<(u64, usize)> = joined
        .windows(2)
        .zip(1..)
        .map(|(pair, at)| (pair[1].0 - pair[0].1, at))
        .collect();
    gaps.sort_unstable_by(|a, b| b.cmp(a));
    gaps.truncate(most.saturating_sub(1));
    let mut kept: Vec<usize> = gaps.into_iter().map(|(_, at)| at).collect();
    kept.sort_unstable();
    let mut covered = Vec::with_capacity(most);
    let mut from = 0;
    for to in kept.into_iter().chain([joined.len()]) {
        covered.push((joined[from].0, joined[to - 1].1));
        from = to;
    }
    covered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_ranges_are_joined() {
        assert_eq!(
            cover(&[(8, 12), (0, 3), (4, 8), (20, 24), (9, 10)], 4, 16),
            [(0, 12), (20, 24)]
        );
        assert!(cover(&[], 4, 16).is_empty());
    }

    #[test]
    fn past_a_number_the_closest_are_joined() {
        let ranges = [
            (0, 4),
            (8, 12),
            (100, 104),
            (108, 112),
            (116, 120),
            (1000, 1004),
        ];
        assert_eq!(cover(&ranges, 4, 3), [(0, 12), (100, 120), (1000, 1004)]);
        assert_eq!(cover(&ranges, 4, 1), [(0, 1004)]);
    }
}
