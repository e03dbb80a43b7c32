//! Decision when a region is cleaned in the background.

use crate::MediumUsage;

/// Least part of what is in use of a medium, as one of so many, that must be reclaimable for a pass in the background.
/// Segments are moved as a whole, so slots that are more than half full are left as they are: 1.4 times the live data is
/// in use under random updates, and this part.
const WORTH: u64 = 48;

/// Fewest segments that must be reclaimable for a pass in the background.
const FEWEST_SEGMENTS: u64 = 2;

/// Part of what is in use, as one of so many, after whose growth live pages are looked for at once, and not only at the
/// next interval: a region that grows so fast would otherwise hold what a whole interval has written.
const GROWN: u64 = 48;

/// Least part of the region, as one of so many, that is reclaimed in the background once the region is half full.
const WORTH_OF_FULL: u64 = 64;

impl MediumUsage {
    /// Returns true if a medium on which cleaning would free so many bytes is cleaned in the background: a 48th of what
    /// is in use and at least two segments, or, on a medium that is half full, a 64th of it.
    #[must_use]
    pub fn is_worth_cleaning(&self, reclaimable_bytes: u64) -> bool {
        let least = (self.used_bytes() / WORTH).max(FEWEST_SEGMENTS * self.segment_bytes);
        let is_half_full = self.free_bytes < self.capacity_bytes / 2;
        let least = if is_half_full {
            least.min(self.capacity_bytes / WORTH_OF_FULL)
        } else {
            least
        };
        reclaimable_bytes >= least
    }
}

/// Returns true if a region of which so many bytes were in use at the last survey is surveyed at once: those in use have
/// grown by a 48th, and at least two segments.
#[must_use]
pub fn has_grown(used_then: u64, used_bytes: u64, segment_bytes: u64) -> bool {
    let least = (used_bytes / GROWN).max(FEWEST_SEGMENTS * segment_bytes);
    used_bytes >= used_then.saturating_add(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 1 << 20;

    #[test]
    fn what_is_worth_cleaning_follows_what_is_in_use() {
        let is_worth = |capacity, used, reclaimable| {
            let usage = MediumUsage {
                number: 0,
                capacity_bytes: capacity * SEGMENT,
                free_bytes: (capacity - used) * SEGMENT,
                segment_bytes: SEGMENT,
            };
            usage.is_worth_cleaning(reclaimable * SEGMENT)
        };
        // However much room there is.
        assert!(is_worth(1_000_000, 800, 17));
        assert!(!is_worth(1_000_000, 800, 16));
        // A few segments are left alone.
        assert!(is_worth(1_000_000, 20, 2));
        assert!(!is_worth(1_000_000, 20, 1));
        // Sooner when room becomes short, in small regions too.
        assert!(is_worth(6400, 6000, 100));
        assert!(!is_worth(6400, 6000, 99));
        assert!(is_worth(64, 40, 1));
        assert!(!is_worth(64, 40, 0));
    }

    #[test]
    fn a_region_is_looked_at_when_it_has_grown() {
        let grown = |then, now| has_grown(then * SEGMENT, now * SEGMENT, SEGMENT);
        assert!(!grown(0, 1));
        assert!(grown(0, 2));
        assert!(!grown(960, 980));
        assert!(grown(960, 981));
        // Less is in use than then.
        assert!(!grown(960, 10));
    }
}
