//! Cooling: the decision which slots of a region move to slower tiers.
//!
//! Pure functions over plain data. The store gathers the data and moves what is decided.
//!
//! Two rules move a slot to the next slower tier with room:
//!
//! | rule | moves |
//! | --- | --- |
//! | age | what nobody dumped or restored for [`CoolingRules::after`]; twice as long for the step from the second tier to the third, and so on; not what the newest generation of a job needs |
//! | pressure | the coldest slots of a tier that is fuller than [`CoolingRules::above_percent`], until it no longer is; what the newest generation of a job needs comes last |

#![forbid(unsafe_code)]

mod restores;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

pub use restores::Restores;

/// Rules of cooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoolingRules {
    /// Time without a dump or a restore after which a segment moves to the next slower tier. Default 7 days; `None`:
    /// age moves nothing.
    pub after: Option<Duration>,
    /// Percentage of a tier's capacity above which its coldest segments move to a slower tier. Default 80; `None`:
    /// pressure moves nothing.
    pub above_percent: Option<u8>,
}

impl Default for CoolingRules {
    fn default() -> Self {
        Self {
            after: Some(Duration::from_secs(7 * 24 * 3600)),
            above_percent: Some(80),
        }
    }
}

/// A medium that segments can be moved to, and the room on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediumRoom<T> {
    /// Number of the medium.
    pub number: usize,
    /// Key of its tier: the fastest tier has the least.
    pub tier: T,
    /// Bytes of its slots.
    pub capacity_bytes: u64,
    /// Bytes of its free slots.
    pub free_bytes: u64,
}

/// A slot in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotUse {
    /// Number of the medium that the slot is on.
    pub medium: usize,
    /// Time since a checkpoint with pages in the slot was dumped or restored; `None` if the slot is in use now: it
    /// stays.
    pub idle: Option<Duration>,
    /// True if the newest generation of a job has pages in it.
    pub in_newest: bool,
}

/// A slot that is to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Place of the slot among those that were given.
    pub slot: usize,
    /// Number of the medium that it goes to.
    pub to: usize,
}

/// Media by tier, with the room that moves have left on them.
#[derive(Clone, Debug)]
pub struct Tiers {
    /// Tiers, the fastest first.
    tiers: Vec<Vec<Room>>,
    slot_bytes: u64,
}

#[derive(Clone, Debug)]
struct Room {
    number: usize,
    capacity_bytes: u64,
    free_bytes: u64,
}

impl Tiers {
    /// Sorts media by tier; all slots have `slot_bytes`.
    #[must_use]
    pub fn new<T: Ord + Clone>(media: &[MediumRoom<T>], slot_bytes: u64) -> Self {
        let keys: BTreeSet<&T> = media.iter().map(|medium| &medium.tier).collect();
        let rooms = |key: &T| {
            let of_tier = media.iter().filter(|medium| medium.tier == *key);
            of_tier
                .map(|medium| Room {
                    number: medium.number,
                    capacity_bytes: medium.capacity_bytes,
                    free_bytes: medium.free_bytes,
                })
                .collect()
        };
        Self {
            tiers: keys.into_iter().map(rooms).collect(),
            slot_bytes: slot_bytes.max(1),
        }
    }

    /// Returns the number of tiers.
    #[must_use]
    pub fn count(&self) -> usize {
        self.tiers.len()
    }

    /// Returns the place of a medium's tier, 0 for the fastest; `None` if nothing can be moved to the medium.
    #[must_use]
    pub fn tier_of(&self, medium: usize) -> Option<usize> {
        let has = |tier: &Vec<Room>| tier.iter().any(|room| room.number == medium);
        self.tiers.iter().position(has)
    }

    /// Returns the bytes by which a tier is fuller than `percent` of its capacity.
    fn excess_bytes(&self, tier: usize, percent: u8) -> u64 {
        let rooms = self.tiers.get(tier).into_iter().flatten();
        let (capacity, free) = rooms.fold((0_u64, 0_u64), |(capacity, free), room| {
            (capacity + room.capacity_bytes, free + room.free_bytes)
        });
        let allowed = capacity / 100 * u64::from(percent.min(100));
        capacity.saturating_sub(free).saturating_sub(allowed)
    }

    /// Takes room for a slot on a tier; returns the medium. The emptiest of a tier comes first.
    fn take(&mut self, tier: usize) -> Option<usize> {
        let slot_bytes = self.slot_bytes;
        let rooms = self.tiers.get_mut(tier)?.iter_mut();
        let room = rooms.max_by_key(|room| (room.free_bytes, Reverse(room.number)))?;
        room.free_bytes = room.free_bytes.checked_sub(slot_bytes)?;
        Some(room.number)
    }

    /// Takes room for a slot on the next slower tier that has some.
    fn take_below(&mut self, tier: usize) -> Option<usize> {
        (tier + 1..self.tiers.len()).find_map(|slower| self.take(slower))
    }

    /// Takes room for a slot on the fastest tier above `tier` that has some and stays within `above_percent`.
    fn take_above(&mut self, tier: usize, above_percent: Option<u8>) -> Option<usize> {
        (0..tier).find_map(|faster| {
            let before = self.tiers.get(faster)?.clone();
            let taken = self.take(faster)?;
            let fits = above_percent.is_none_or(|percent| self.excess_bytes(faster, percent) == 0);
            if !fits {
                self.tiers[faster] = before;
            }
            fits.then_some(taken)
        })
    }

    fn give_back(&mut self, medium: usize) {
        let mut rooms = self.tiers.iter_mut().flatten();
        if let Some(room) = rooms.find(|room| room.number == medium) {
            room.free_bytes += self.slot_bytes;
        }
    }
}

/// Decides which slots move to slower tiers, the coldest first.
#[must_use]
pub fn plan(rules: &CoolingRules, mut tiers: Tiers, slots: &[SlotUse]) -> Vec<Move> {
    let mut moves = Vec::new();
    // From the slowest on: what moves away there makes room for what comes from a faster one.
    for tier in (0..tiers.count().saturating_sub(1)).rev() {
        let on_tier = |(_, slot): &(usize, &SlotUse)| tiers.tier_of(slot.medium) == Some(tier);
        let candidates = slots.iter().enumerate().filter(on_tier);
        let mut candidates: Vec<_> = candidates
            .filter_map(|(place, slot)| Some((slot.in_newest, Reverse(slot.idle?), place)))
            .collect();
        candidates.sort_unstable();
        let steps = u32::try_from(tier + 1).unwrap_or(u32::MAX);
        let after = rules.after.map(|after| after.saturating_mul(steps));
        for (in_newest, Reverse(idle), place) in candidates {
            let is_old = !in_newest && after.is_some_and(|after| idle >= after);
            let pressed = || {
                let percent = rules.above_percent;
                percent.is_some_and(|percent| tiers.excess_bytes(tier, percent) > 0)
            };
            if !is_old && !pressed() {
                break;
            }
            let Some(to) = tiers.take_below(tier) else {
                break;
            };
            tiers.give_back(slots[place].medium);
            moves.push(Move { slot: place, to });
        }
    }
    moves
}

/// Returns moves of these slots to the next slower tier with room, whatever their age.
#[must_use]
pub fn plan_down(mut tiers: Tiers, slots: &[SlotUse]) -> Vec<Move> {
    let moved = |(place, slot): (usize, &SlotUse)| {
        let tier = tiers.tier_of(slot.medium)?;
        let to = tiers.take_below(tier)?;
        Some(Move { slot: place, to })
    };
    slots.iter().enumerate().filter_map(moved).collect()
}

/// Returns moves of these slots to the fastest tier with room. With a percentage no tier is filled above it. A slot that
/// is on none of the tiers, as its medium is drained, moves to any of them.
#[must_use]
pub fn plan_up(mut tiers: Tiers, slots: &[SlotUse], above_percent: Option<u8>) -> Vec<Move> {
    let moved = |(place, slot): (usize, &SlotUse)| {
        let tier = tiers.tier_of(slot.medium).unwrap_or(tiers.count());
        let to = tiers.take_above(tier, above_percent)?;
        Some(Move { slot: place, to })
    };
    slots.iter().enumerate().filter_map(moved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: u64 = 10;
    const HOUR: Duration = Duration::from_secs(3600);

    /// Media of tiers 0, 1, 2 …, each with its capacity and its free room in slots.
    fn tiers(rooms: &[(u64, u64)]) -> Tiers {
        let media: Vec<_> = rooms
            .iter()
            .enumerate()
            .map(|(number, (capacity, free))| MediumRoom {
                number,
                tier: number,
                capacity_bytes: capacity * SLOT,
                free_bytes: free * SLOT,
            })
            .collect();
        Tiers::new(&media, SLOT)
    }

    fn slot(medium: usize, hours: u32, in_newest: bool) -> SlotUse {
        SlotUse {
            medium,
            idle: Some(HOUR * hours),
            in_newest,
        }
    }

    fn rules(hours: Option<u32>, above_percent: Option<u8>) -> CoolingRules {
        CoolingRules {
            after: hours.map(|hours| HOUR * hours),
            above_percent,
        }
    }

    fn pairs(moves: &[Move]) -> Vec<(usize, usize)> {
        moves.iter().map(|m| (m.slot, m.to)).collect()
    }

    #[test]
    fn age_moves_what_is_idle_and_not_in_a_newest_generation() {
        let slots = [
            slot(0, 5, false),
            slot(0, 9, false),
            slot(0, 99, true),
            slot(0, 1, false),
            SlotUse {
                idle: None,
                ..slot(0, 0, false)
            },
        ];
        let moves = plan(
            &rules(Some(5), Some(90)),
            tiers(&[(10, 5), (10, 10)]),
            &slots,
        );
        assert_eq!(pairs(&moves), [(1, 1), (0, 1)]);
        let off = plan(&rules(None, None), tiers(&[(10, 5), (10, 10)]), &slots);
        assert!(off.is_empty());
    }

    #[test]
    fn each_step_down_takes_longer() {
        let slots = [slot(1, 9, false), slot(1, 10, false), slot(2, 999, false)];
        let moves = plan(
            &rules(Some(5), None),
            tiers(&[(10, 9), (10, 8), (10, 9)]),
            &slots,
        );
        assert_eq!(pairs(&moves), [(1, 2)]);
    }

    #[test]
    fn pressure_moves_the_coldest_and_newest_generations_last() {
        let slots = [
            slot(0, 1, false),
            slot(0, 8, true),
            slot(0, 3, false),
            slot(0, 2, false),
        ];
        // 9 of 10 slots are in use, 2 too many at 70 %.
        let moves = plan(&rules(None, Some(70)), tiers(&[(10, 1), (10, 10)]), &slots);
        assert_eq!(pairs(&moves), [(2, 1), (3, 1)]);
        let all = plan(&rules(None, Some(0)), tiers(&[(10, 1), (10, 10)]), &slots);
        assert_eq!(pairs(&all), [(2, 1), (3, 1), (0, 1), (1, 1)]);
        let enough = plan(&rules(None, Some(90)), tiers(&[(10, 1), (10, 10)]), &slots);
        assert!(enough.is_empty());
    }

    #[test]
    fn a_full_tier_is_passed_over_and_without_room_nothing_moves() {
        let slots = [slot(0, 9, false), slot(0, 8, false), slot(0, 7, false)];
        let rules = rules(Some(1), None);
        let moves = plan(&rules, tiers(&[(3, 0), (5, 1), (5, 1)]), &slots);
        assert_eq!(pairs(&moves), [(0, 1), (1, 2)]);
        assert!(plan(&rules, tiers(&[(3, 0), (5, 0)]), &slots).is_empty());
        assert!(plan(&rules, tiers(&[(3, 0)]), &slots).is_empty());
    }

    #[test]
    fn what_leaves_a_slower_tier_makes_room_there() {
        let slots = [slot(0, 9, false), slot(1, 99, false)];
        let moves = plan(
            &rules(Some(5), None),
            tiers(&[(3, 0), (1, 0), (5, 1)]),
            &slots,
        );
        assert_eq!(pairs(&moves), [(1, 2), (0, 1)]);
    }

    #[test]
    fn media_of_one_tier_are_one_and_a_slot_of_no_tier_stays() {
        let room = |number, tier, free| MediumRoom {
            number,
            tier,
            capacity_bytes: 4 * SLOT,
            free_bytes: free * SLOT,
        };
        let tiers = Tiers::new(
            &[
                room(0, "a", 0),
                room(4, "a", 3),
                room(2, "b", 1),
                room(3, "b", 2),
            ],
            SLOT,
        );
        assert_eq!(
            (tiers.count(), tiers.tier_of(4), tiers.tier_of(9)),
            (2, Some(0), None)
        );
        let slots = [slot(0, 9, false), slot(9, 99, false), slot(4, 8, false)];
        let moves = plan(&rules(Some(1), None), tiers, &slots);
        assert_eq!(pairs(&moves), [(0, 3), (2, 2)]);
    }

    #[test]
    fn on_request_slots_go_one_step_down_or_to_the_fastest_with_room() {
        let slots = [slot(2, 0, false), slot(1, 0, true), slot(0, 0, true)];
        let rooms = [(10, 2), (10, 5), (10, 5)];
        let up = plan_up(tiers(&rooms), &slots, None);
        assert_eq!(pairs(&up), [(0, 0), (1, 0)]);
        // At 90 % there is room for one more.
        let within = plan_up(tiers(&rooms), &slots, Some(90));
        assert_eq!(pairs(&within), [(0, 0)]);
        let down = plan_down(tiers(&rooms), &slots);
        assert_eq!(pairs(&down), [(1, 2), (2, 1)]);
        // From a medium that is drained, also to the slowest.
        let drained = [slot(9, 0, false), slot(9, 0, false), slot(9, 0, false)];
        let away = plan_up(tiers(&[(10, 1), (10, 0), (10, 1)]), &drained, None);
        assert_eq!(pairs(&away), [(0, 0), (1, 2)]);
    }
}
