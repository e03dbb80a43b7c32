//! Tiers of this node. Dumps go to the fastest tier with room, and what is measured of them is kept by tier: when a tier
//! fills up, the figures of the next one hold at once.

use permafrost_scheduling::cost::TierRoom;

/// Maximum number of names that are told apart: a region has fewer media.
const MAX_TIERS: usize = 256;

/// The tiers that dumps have gone to.
#[derive(Debug, Default)]
pub(super) struct Tiers {
    names: Vec<String>,
    current: u16,
}

impl Tiers {
    /// Sets the tier that dumps go to. The first one has what was measured before any was known.
    pub(super) fn set(&mut self, rooms: &[TierRoom]) {
        if let Some(next) = TierRoom::of_dumps(rooms) {
            self.current = self.number(&next.tier);
        }
    }

    /// Returns the number of a tier. Beyond the maximum they share one.
    pub(super) fn number(&mut self, name: &str) -> u16 {
        let known = self.names.iter().position(|known| known == name);
        let number = known.unwrap_or(self.names.len()).min(MAX_TIERS - 1);
        if known.is_none() && self.names.len() < MAX_TIERS {
            self.names.push(name.to_owned());
        }
        u16::try_from(number).unwrap_or(u16::MAX)
    }

    /// Returns the numbers of all tiers with their names; of the one that everything is measured of while none is
    /// known, an empty one.
    pub(super) fn named(&self) -> Vec<(u16, String)> {
        if self.names.is_empty() {
            return vec![(0, String::new())];
        }
        (0..).zip(self.names.iter().cloned()).collect()
    }

    /// Returns the number of the tier that dumps go to.
    pub(super) const fn current(&self) -> u16 {
        self.current
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
