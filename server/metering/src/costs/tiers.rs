//! Tiers of this node. Dumps go to the fastest tier with room, and what is measured of them is kept by tier: when a tier
//! fills up, the figures of the next one hold at once.

use permafrost_scheduling::cost::TierRoom;

/// Maximum number of names that are told apart: a region has fewer media.
const MAX_TIERS: usize = 256;

/// The tiers that dumps have gone to.
#[derive(Debug, Default)]
pub(super) struct Tiers {
    names: Vec<String>,
    current: usize,
}

impl Tiers {
    /// Sets the tier that dumps go to. The first one has what was measured before any was known.
    pub(super) fn set(&mut self, rooms: &[TierRoom]) {
        let Some(next) = TierRoom::of_dumps(rooms) else {
            return;
        };
        let known = self.names.iter().position(|name| *name == next.tier);
        self.current = known.unwrap_or(self.names.len()).min(MAX_TIERS - 1);
        if known.is_none() && self.names.len() < MAX_TIERS {
            self.names.push(next.tier.clone());
        }
    }

    /// Returns the number of the tier that dumps go to.
    pub(super) fn current(&self) -> u16 {
        u16::try_from(self.current).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(tier: &str, free_bytes: u64, cold: bool) -> TierRoom {
        TierRoom {
            tier: tier.to_owned(),
            capacity_bytes: 100,
            free_bytes,
            cold,
        }
    }

    #[test]
    fn dumps_go_to_the_fastest_tier_with_room() {
        let mut tiers = Tiers::default();
        let mut at = |nvm, ssd| {
            tiers.set(&[
                room("nvm", nvm, false),
                room("ssd", ssd, false),
                room("cold", 9, true),
            ]);
            tiers.current()
        };
        assert_eq!(at(5, 5), 0);
        assert_eq!(at(0, 5), 1);
        assert_eq!(at(5, 5), 0);
        assert_eq!(at(0, 0), 0, "where it is refused");
        tiers.set(&[]);
        assert_eq!(tiers.current(), 0);
    }

    #[test]
    fn the_number_of_tiers_is_bounded() {
        let mut tiers = Tiers::default();
        for number in 0..2 * MAX_TIERS {
            tiers.set(&[room(&number.to_string(), 1, false)]);
        }
        assert_eq!(usize::from(tiers.current()), MAX_TIERS - 1);
        assert_eq!(tiers.names.len(), MAX_TIERS);
    }
}
