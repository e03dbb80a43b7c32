//! What is verified next, and when: a pure function of what is held, what was verified and the time.

use std::collections::{HashMap, VecDeque};
use std::sync::Weak;
use std::time::Duration;

use permafrost_pmem::Checkpoint;

use crate::store::PagesRead;

/// A damaged checkpoint is looked at again after so long: a node that holds it may be back.
const RETRY: Duration = Duration::from_secs(3600);

/// Something that is held.
#[derive(Clone, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) id: &'a str,
    /// What reading it costs, bytes.
    pub(super) bytes: u64,
    /// When it was sealed, milliseconds since the Unix epoch; 0 if unknown.
    pub(super) sealed_unix_ms: u64,
    /// Known to be damaged.
    pub(super) damaged: bool,
    /// The very copy that is held.
    pub(super) copy: Weak<Checkpoint>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Verify the candidate at this place; `suspect`: somebody thinks that it is damaged.
    Check {
        /// Among the candidates.
        place: usize,
        /// It is read whole, whatever was read of it through others.
        suspect: bool,
    },
    /// Nothing for so long; `None`: until something changes.
    Wait(Option<Duration>),
}

/// Where the scrub is. Times of day say what was verified when, across restarts; a time that lies in the future
/// counts as now. The pace within a period is by a clock that is never set.
#[derive(Default)]
pub(super) struct Schedule {
    /// Everything is verified once in this time; `None`: only what is suspected.
    period: Option<Duration>,
    /// By id, milliseconds since the Unix epoch.
    verified: HashMap<String, u64>,
    suspects: VecDeque<String>,
    /// The share of the period that the last one has ends here.
    next_at: Duration,
    round: Round,
}

/// Each checkpoint once. Those that were there when it began read what they share once; others may lie in segments
/// that were free in between, and are read whole.
#[derive(Default)]
struct Round {
    left: HashMap<String, Weak<Checkpoint>>,
    read: PagesRead,
}

impl Schedule {
    pub(super) fn new(period: Option<Duration>, verified: HashMap<String, u64>) -> Self {
        Self {
            period,
            verified,
            ..Self::default()
        }
    }

    pub(super) fn verified(&self) -> &HashMap<String, u64> {
        &self.verified
    }

    /// Puts one at the front; whether it was not there yet.
    pub(super) fn suspect(&mut self, id: &str) -> bool {
        let is_new = !self.suspects.iter().any(|suspect| suspect == id);
        if is_new {
            self.suspects.push_front(id.to_owned());
        }
        is_new
    }

    /// Since when a candidate is not verified.
    fn since(&self, candidate: &Candidate<'_>, unix_ms: u64) -> u64 {
        let verified = self.verified.get(candidate.id).copied();
        verified.unwrap_or(candidate.sealed_unix_ms).min(unix_ms)
    }

    /// The longest time for which a candidate is not verified.
    pub(super) fn oldest(&self, held: &[Candidate<'_>], unix_ms: u64) -> Duration {
        let ages = held
            .iter()
            .map(|candidate| unix_ms - self.since(candidate, unix_ms));
        Duration::from_millis(ages.max().unwrap_or(0))
    }

    /// What to do at `now`, which is `unix_ms` by the clock on the wall: suspects; damaged ones again; else the one
    /// not verified for longest, when the share of the one before is over, or it itself is due.
    pub(super) fn next(&mut self, held: &[Candidate<'_>], unix_ms: u64, now: Duration) -> Next {
        while let Some(suspect) = self.suspects.pop_front() {
            if let Some(place) = held.iter().position(|candidate| candidate.id == suspect) {
                return Next::Check {
                    place,
                    suspect: true,
                };
            }
        }
        let Some(period) = self.period else {
            return Next::Wait(None);
        };
        // Time left until it must be verified.
        let left = |candidate: &Candidate<'_>| {
            let within = if candidate.damaged {
                RETRY.min(period)
            } else {
                period
            };
            let age = Duration::from_millis(unix_ms - self.since(candidate, unix_ms));
            within.saturating_sub(age)
        };
        let due = |(_, candidate): &(usize, &Candidate<'_>)| {
            // Damaged ones again only when their time has come.
            !candidate.damaged || left(candidate).is_zero()
        };
        let oldest = held
            .iter()
            .enumerate()
            .filter(due)
            .min_by_key(|(_, candidate)| (left(candidate), self.since(candidate, unix_ms)));
        let Some((place, candidate)) = oldest else {
            return Next::Wait(held.iter().map(left).min());
        };
        let wait = left(candidate).min(self.next_at.saturating_sub(now));
        if wait.is_zero() {
            return Next::Check {
                place,
                suspect: false,
            };
        }
        let again = held.iter().filter(|candidate| candidate.damaged).map(left);
        Next::Wait(again.chain([wait]).min())
    }

    /// The pages that were read already in this round, for one that may rely on them; to be given back with
    /// [`Schedule::checked`].
    pub(super) fn begin(&mut self, id: &str, held: &[Candidate<'_>]) -> Option<PagesRead> {
        let is_left = |round: &Round, candidate: &Candidate<'_>| {
            let copy = round.left.get(candidate.id);
            copy.is_some_and(|copy| copy.ptr_eq(&candidate.copy))
        };
        if !held.iter().any(|candidate| is_left(&self.round, candidate)) {
            let all = held.iter().map(|c| (c.id.to_owned(), c.copy.clone()));
            self.round = Round {
                left: all.collect(),
                read: PagesRead::default(),
            };
        }
        let candidate = held.iter().find(|candidate| candidate.id == id)?;
        is_left(&self.round, candidate).then(|| std::mem::take(&mut self.round.read))
    }

    /// A check that began at `began` has come to its end at `unix_ms`.
    pub(super) fn checked(
        &mut self,
        id: &str,
        held: &[Candidate<'_>],
        read: Option<PagesRead>,
        began: Duration,
        unix_ms: u64,
    ) {
        if let Some(read) = read {
            self.round.read = read;
        }
        self.round.left.remove(id);
        self.verified.insert(id.to_owned(), unix_ms);
        self.verified
            .retain(|id, _| held.iter().any(|candidate| candidate.id == id));
        let bytes = |c: &Candidate<'_>| u128::from(c.bytes.max(1));
        let total: u128 = held.iter().map(bytes).sum();
        let own = held.iter().find(|c| c.id == id);
        // What is looked at out of turn has no share of the period.
        let in_turn = own.is_some_and(|candidate| !candidate.damaged);
        let own = own.map_or(0, bytes);
        if let Some(period) = self.period.filter(|_| in_turn) {
            let ns = period.as_nanos().saturating_mul(own) / total.max(1);
            self.next_at = began + Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX));
        }
    }

    /// One was verified on request.
    pub(super) fn verified_now(&mut self, id: &str, unix_ms: u64) {
        self.verified.insert(id.to_owned(), unix_ms);
    }

    /// A check was broken off, or found nothing to check.
    pub(super) fn broken_off(&mut self, id: &str, read: Option<PagesRead>) {
        if let Some(read) = read {
            self.round.read = read;
        }
        self.round.left.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const DAY_MS: u64 = 86_400_000;
    const NOW: u64 = 1_000 * DAY_MS;

    fn held(id: &str, bytes: u64, sealed_unix_ms: u64) -> Candidate<'_> {
        Candidate {
            id,
            bytes,
            sealed_unix_ms,
            damaged: false,
            copy: Weak::new(),
        }
    }

    fn place(next: Next) -> usize {
        match next {
            Next::Check { place, .. } => place,
            Next::Wait(wait) => panic!("waits {wait:?}"),
        }
    }

    /// Lets it run for a time, with checks that take none: who was checked on which hour.
    fn run(schedule: &mut Schedule, held: &[Candidate<'_>], hours: u64) -> Vec<(u64, String)> {
        let (mut now, mut seen) = (Duration::ZERO, Vec::new());
        let end = Duration::from_secs(hours * 3600);
        while now < end {
            let unix_ms = NOW + u64::try_from(now.as_millis()).unwrap();
            match schedule.next(held, unix_ms, now) {
                Next::Check { place, suspect } => {
                    assert!(!suspect);
                    let id = held[place].id;
                    seen.push((now.as_secs() / 3600, id.to_owned()));
                    let read = schedule.begin(id, held);
                    schedule.checked(id, held, read, now, unix_ms);
                }
                Next::Wait(wait) => now += wait.unwrap_or(end).max(Duration::from_millis(1)),
            }
        }
        seen
    }

    #[test]
    fn a_period_is_divided_by_bytes_oldest_first() {
        let held = [
            held("new", 60, NOW - 10),
            held("old", 20, NOW - 30),
            held("middle", 20, NOW - 20),
        ];
        let mut schedule = Schedule::new(Some(10 * DAY), HashMap::new());
        let seen = run(&mut schedule, &held, 24 * 20);
        let seen: Vec<_> = seen.iter().map(|(hour, id)| (*hour, &id[..])).collect();
        // 20 % of ten days are two days, and so on; then again.
        assert_eq!(
            seen,
            [
                (0, "old"),
                (48, "middle"),
                (96, "new"),
                (240, "old"),
                (288, "middle"),
                (336, "new")
            ]
        );
    }

    #[test]
    fn what_is_overdue_goes_first_and_at_once_and_then_the_pace_is_even() {
        let verified = HashMap::from([("a".to_owned(), NOW - DAY_MS)]);
        let held = [held("a", 1, 0), held("b", 1, 5), held("c", 1, 6)];
        let mut schedule = Schedule::new(Some(3 * DAY), verified);
        let seen = run(&mut schedule, &held, 24 * 3);
        let seen: Vec<_> = seen.iter().map(|(hour, id)| (*hour, &id[..])).collect();
        assert_eq!(seen, [(0, "b"), (0, "c"), (24, "a"), (48, "b")]);
    }

    #[test]
    fn a_clock_that_was_set_costs_a_reading_and_no_more() {
        // Verified a year in the future, by the clock as it is now: not later than after a period.
        let verified = HashMap::from([("a".to_owned(), NOW + 365 * DAY_MS)]);
        let held = [held("a", 1, 0)];
        let mut schedule = Schedule::new(Some(DAY), verified);
        assert_eq!(run(&mut schedule, &held, 48).len(), 2);
    }

    #[test]
    fn suspects_come_first_and_without_a_period_nothing_else_does() {
        let held = [held("a", 1, 0), held("b", 1, 1)];
        let mut schedule = Schedule::new(None, HashMap::new());
        assert_eq!(schedule.next(&held, NOW, DAY), Next::Wait(None));
        assert!(schedule.suspect("b"));
        assert!(!schedule.suspect("b"));
        schedule.suspect("gone");
        let next = schedule.next(&held, NOW, DAY);
        let suspect = true;
        assert_eq!(next, Next::Check { place: 1, suspect });
        assert_eq!(schedule.next(&held, NOW, DAY), Next::Wait(None));
    }

    #[test]
    fn damaged_ones_are_tried_again_within_the_hour_and_do_not_hold_up_others() {
        let mut held = [held("a", 1, NOW), held("b", 1, NOW)];
        held[0].damaged = true;
        let mut schedule = Schedule::new(Some(4 * DAY), HashMap::new());
        let seen = run(&mut schedule, &held, 4);
        let again = seen.iter().filter(|(_, id)| id == "a").count();
        assert_eq!(again, 3, "{seen:?}");
        assert_eq!(
            seen.iter().filter(|(_, id)| id == "b").count(),
            1,
            "{seen:?}"
        );
    }

    #[test]
    fn in_a_round_only_those_that_were_there_at_its_begin_share_what_was_read() {
        let both = [held("a", 1, 0), held("b", 1, 1)];
        let mut schedule = Schedule::new(Some(DAY), HashMap::new());
        assert_eq!(place(schedule.next(&both, NOW, DAY)), 0);
        let read = schedule.begin("a", &both);
        assert!(read.is_some());
        schedule.checked("a", &both, read, DAY, NOW);
        let three = [both[0].clone(), both[1].clone(), held("late", 1, 2)];
        assert!(schedule.begin("late", &three).is_none());
        // Again in the same round: it is read indeed.
        assert!(schedule.begin("a", &three).is_none());
        let read = schedule.begin("b", &three);
        assert!(read.is_some());
        schedule.checked("b", &three, read, DAY, NOW);
        // All were there: a new round, with everybody.
        assert!(schedule.begin("late", &three).is_some());
    }
}
