//! Bytes that a generation counts in a quota.

use permafrost_protocol::control::Checkpoint;

/// Sizes of a generation that its charge is computed from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charged {
    /// Number of the generation.
    pub generation: u64,
    /// Generation that its pages were compared with; 0: none.
    pub parent_generation: u64,
    /// Bytes that it added to the region.
    pub own_bytes: u64,
    /// Bytes of the pages that it shares with that parent.
    pub shared_bytes: u64,
}

impl From<&Checkpoint> for Charged {
    fn from(record: &Checkpoint) -> Self {
        Self {
            generation: record.generation,
            parent_generation: record.parent_generation,
            own_bytes: record.added_bytes,
            shared_bytes: record.parent_bytes,
        }
    }
}

/// Returns the bytes that a generation counts, `before` being the number of the next older one that is still there.
///
/// Generations share pages. Shared pages count once: with the oldest generation that has them, which is therefore
/// counted whole, and each later one with what it added. If generations between it and the next older one were
/// removed, pages of theirs live on in it; how many is not known any more. They are estimated to have added as much
/// each as it did itself, at most the whole generation.
#[must_use]
pub fn charge(of: &Charged, before: Option<u64>) -> u64 {
    let whole = of.own_bytes.saturating_add(of.shared_bytes);
    match before {
        _ if of.parent_generation == 0 => of.own_bytes,
        None => whole,
        Some(before) if before >= of.parent_generation => of.own_bytes,
        Some(before) => {
            let steps = of.generation.saturating_sub(before).max(1);
            of.own_bytes.saturating_mul(steps).min(whole)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_pages_count_once_and_pass_on_to_the_next_generation() {
        let full = Charged {
            generation: 1,
            own_bytes: 100,
            ..Charged::default()
        };
        let delta = Charged {
            generation: 4,
            parent_generation: 3,
            own_bytes: 5,
            shared_bytes: 95,
        };
        assert_eq!(charge(&full, None), 100);
        assert_eq!(charge(&delta, Some(3)), 5);
        assert_eq!(
            charge(&delta, None),
            100,
            "the pages of the removed ones are its own now"
        );
        assert_eq!(charge(&delta, Some(1)), 15);
        let late = Charged {
            generation: u64::MAX,
            parent_generation: 3,
            ..delta
        };
        assert_eq!(charge(&late, Some(1)), 100);
    }
}
