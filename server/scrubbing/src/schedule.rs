//! Decides which checkpoint is verified next, and when: sans-I/O, from the held checkpoints, their
//! verifications and the time.
//!
//! All held checkpoints are visited in [`Schedule::sync`] alone, which is called periodically; each step in
//! between costs a look-up. So a pass over all checkpoints is linear in their number, but for the depth of a
//! tree.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use permafrost_pmem::CopyId;
use permafrost_store::PagesRead;

/// Time after which a damaged checkpoint is tried again: a node that holds it may be back.
const RETRY: Duration = Duration::from_secs(3600);

/// Time for which a copy whose cold tier was away is not read again for another node: all that is on this node would be
/// read each time that the other one asks, which it does about once a second.
const AWAY: Duration = Duration::from_secs(300);

/// A held checkpoint.
#[derive(Clone, Debug)]
pub struct ScrubCandidate<'a> {
    /// Id of the checkpoint.
    pub id: &'a str,
    /// Bytes that have to be read to verify it.
    pub bytes: u64,
    /// Time of its seal, milliseconds since the Unix epoch; 0 if unknown.
    pub sealed_unix_ms: u64,
    /// True if it is known to be damaged.
    pub damaged: bool,
    /// The copy itself that is held.
    pub copy: CopyId,
    /// Bytes of the region with it that are in an object store; of one that is only listed, 0.
    pub cold_bytes: u64,
}

/// Reason why a checkpoint is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// It is suspected to be damaged.
    Suspect,
    /// Another node is to rely on it.
    Asked,
    /// It has gone unverified for the longest time.
    Turn,
}

/// NextCheck step of the scrub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextCheck {
    /// Verify the checkpoint with this id.
    Check {
        /// Id of the checkpoint.
        id: String,
        /// Reason for it.
        why: Why,
    },
    /// Wait for this time; `None`: until something changes.
    Wait(Option<Duration>),
}

struct Tracked {
    /// Time since which it is not verified, milliseconds since the Unix epoch.
    since: u64,
    bytes: u64,
    damaged: bool,
    copy: CopyId,
    /// Number of the sync that found this copy.
    found_by: u64,
}

/// State of the scrub. Wall-clock times record when each copy was verified, across restarts; a time in the
/// future counts as now. The rate within a period uses a monotonic clock.
#[derive(Default)]
pub struct Schedule {
    /// Time in which everything is verified once; `None`: only suspected and requested checkpoints.
    period: Option<Duration>,
    /// Time of the last verification by id, milliseconds since the Unix epoch.
    verified: HashMap<String, u64>,
    /// Pages in a cold tier that this verification left out, by id.
    unverified: HashMap<String, u64>,
    /// Bytes that were in an object store at the last verification, by id. What moves there later was not verified
    /// there.
    cold: HashMap<String, u64>,
    /// Times of checks for which the cold tier was away, by id, milliseconds since the Unix epoch.
    away: HashMap<String, u64>,
    copies: HashMap<String, Tracked>,
    /// Copies that are not known to be damaged, and in `damaged` those that are: time since which each is not
    /// verified, and its id.
    whole: BTreeSet<(u64, String)>,
    damaged: BTreeSet<(u64, String)>,
    /// Total bytes of all copies.
    bytes: u128,
    suspects: Queue,
    asked: Queue,
    /// Time at which the share of the period for the last copy ends.
    next_at: Duration,
    syncs: u64,
    /// Round of the regular checks, and in `aside` that of suspects and requests.
    round: Round,
    aside: Round,
    /// Number of copies visited.
    #[cfg(test)]
    steps: u64,
}

/// Ids in the order in which they came, each once.
#[derive(Default)]
struct Queue {
    order: VecDeque<String>,
    waiting: HashSet<String>,
}

impl Queue {
    fn push(&mut self, id: &str) -> bool {
        let is_new = self.waiting.insert(id.to_owned());
        if is_new {
            self.order.push_back(id.to_owned());
        }
        is_new
    }

    fn pop(&mut self) -> Option<String> {
        let id = self.order.pop_front()?;
        self.waiting.remove(&id);
        Some(id)
    }
}

/// A round over many checkpoints in which each page that they share is read once: through the first of them.
/// Copies that were not known when it began may lie in segments that were free in between, and are read whole.
#[derive(Default)]
struct Round {
    /// Number of syncs before it began.
    began: u64,
    left: HashSet<String>,
    done: HashSet<String>,
    read: PagesRead,
}

impl Schedule {
    /// Begins anew with a period and the verifications before the start. Suspects that are waiting stay.
    pub fn begin_with(&mut self, period: Option<Duration>, verified: HashMap<String, u64>) {
        *self = Self {
            period,
            verified,
            suspects: std::mem::take(&mut self.suspects),
            ..Self::default()
        };
    }

    /// Returns the times of the last verifications, of those that left nothing out.
    pub fn verified_whole(&self) -> HashMap<String, u64> {
        let mut verified = self.verified.clone();
        verified.retain(|id, _| !self.unverified.contains_key(id));
        verified
    }

    /// Returns the number of pages in a cold tier that the last verifications left out.
    pub fn unverified_pages(&self) -> u64 {
        self.unverified.values().sum()
    }

    /// Adds the currently held checkpoints, and forgets all others. Linear in their number.
    pub fn sync<'a>(&mut self, held: impl Iterator<Item = ScrubCandidate<'a>>, unix_ms: u64) {
        self.syncs += 1;
        let mut before = std::mem::take(&mut self.copies);
        self.whole.clear();
        self.damaged.clear();
        self.bytes = 0;
        for candidate in held {
            self.step();
            let id = candidate.id;
            let old = before.remove(id);
            let same = old.filter(|old| old.copy == candidate.copy);
            // The verification was of another copy; one remembered from before the start was of this copy.
            if same.is_none() && self.syncs > 1 {
                self.verified.remove(id);
                self.cold.remove(id);
            }
            let verified = self.verified.get(id).copied();
            let tracked = Tracked {
                since: verified.unwrap_or(candidate.sealed_unix_ms).min(unix_ms),
                bytes: candidate.bytes,
                damaged: candidate.damaged,
                copy: candidate.copy,
                found_by: same.map_or(self.syncs, |same| same.found_by),
            };
            self.insert(id, tracked);
        }
        let copies = &self.copies;
        self.verified.retain(|id, _| copies.contains_key(id));
        self.unverified.retain(|id, _| copies.contains_key(id));
        self.cold.retain(|id, _| copies.contains_key(id));
        self.away.retain(|id, _| copies.contains_key(id));
        self.round.left.retain(|id| copies.contains_key(id));
    }

    fn insert(&mut self, id: &str, tracked: Tracked) {
        self.remove(id);
        self.bytes += u128::from(tracked.bytes.max(1));
        let order = if tracked.damaged {
            &mut self.damaged
        } else {
            &mut self.whole
        };
        order.insert((tracked.since, id.to_owned()));
        self.copies.insert(id.to_owned(), tracked);
    }

    fn remove(&mut self, id: &str) -> Option<Tracked> {
        let tracked = self.copies.remove(id)?;
        self.cold.remove(id);
        self.bytes -= u128::from(tracked.bytes.max(1));
        let key = (tracked.since, id.to_owned());
        self.whole.remove(&key);
        self.damaged.remove(&key);
        Some(tracked)
    }

    /// Makes a checkpoint the next to be read. Returns true if it was not waiting yet.
    pub fn suspect(&mut self, id: &str) -> bool {
        self.suspects.push(id)
    }

    /// Queues a checkpoint after the suspects, unless its cold tier was away just before `unix_ms`.
    pub fn ask(&mut self, id: &str, unix_ms: u64) {
        let age = self.away.get(id).and_then(|at| unix_ms.checked_sub(*at));
        if age.is_none_or(|age| Duration::from_millis(age) >= AWAY) {
            self.asked.push(id);
        }
    }

    /// Returns the number of waiting requests.
    pub fn asked(&self) -> usize {
        self.asked.order.len()
    }

    /// Returns true if this very copy, of which `cold_bytes` are in an object store now, was verified with all its pages
    /// in the time `within` before `unix_ms`, and no more of it was in the store then.
    pub fn is_verified(
        &self,
        (id, copy, cold_bytes): (&str, CopyId, u64),
        within: Duration,
        unix_ms: u64,
    ) -> bool {
        let tracked = self.copies.get(id);
        let is_same = tracked.is_some_and(|tracked| tracked.copy == copy);
        let age = self
            .verified
            .get(id)
            .and_then(|at| unix_ms.checked_sub(*at));
        let cold_then = self.cold.get(id).copied().unwrap_or(0);
        is_same
            && cold_bytes <= cold_then
            && !self.unverified.contains_key(id)
            && age.is_some_and(|age| Duration::from_millis(age) <= within)
    }

    /// Returns the longest time for which a copy has not been verified.
    pub fn oldest(&self, unix_ms: u64) -> Duration {
        let firsts = [self.whole.first(), self.damaged.first()];
        let oldest = firsts.into_iter().flatten().map(|(since, _)| *since).min();
        Duration::from_millis(oldest.map_or(0, |oldest| unix_ms.saturating_sub(oldest)))
    }

    /// Returns the next step at `now`, which is `unix_ms` by the wall clock: suspects; requested checkpoints;
    /// damaged ones again; else the one not verified for longest, when the share of the one before is over, or it
    /// is due itself.
    pub fn next(&mut self, unix_ms: u64, now: Duration) -> NextCheck {
        self.step();
        for (why, queue) in [
            (Why::Suspect, &mut self.suspects),
            (Why::Asked, &mut self.asked),
        ] {
            if let Some(id) = queue.pop() {
                return NextCheck::Check { id, why };
            }
        }
        self.aside = Round::default();
        let Some(period) = self.period else {
            return NextCheck::Wait(None);
        };
        // Time left until a copy must be verified that was last verified at `since`.
        let left = |since: u64, within: Duration| {
            let age = Duration::from_millis(unix_ms.saturating_sub(since));
            within.saturating_sub(age)
        };
        let first = |order: &BTreeSet<(u64, String)>, within: Duration| {
            let (since, id) = order.first()?;
            Some((left(*since, within), *since, id.clone()))
        };
        let damaged = first(&self.damaged, RETRY.min(period));
        let again = damaged.as_ref().map(|(left, ..)| *left);
        // Damaged copies are tried again only when their time has come.
        let due = damaged.filter(|(left, ..)| left.is_zero());
        let oldest = first(&self.whole, period).into_iter().chain(due).min();
        let Some((left, _, id)) = oldest else {
            return NextCheck::Wait(again);
        };
        let wait = left.min(self.next_at.saturating_sub(now));
        if wait.is_zero() {
            return NextCheck::Check { id, why: Why::Turn };
        }
        NextCheck::Wait(again.into_iter().chain([wait]).min())
    }

    /// Returns the pages that were already read in this round, for a checkpoint that may rely on them;
    /// [`Schedule::checked`] must be given them back.
    pub fn begin(&mut self, id: &str, why: Why) -> Option<PagesRead> {
        self.step();
        if why == Why::Turn && self.round.left.is_empty() {
            self.round = Round {
                left: self.copies.keys().cloned().collect(),
                ..Round::default()
            };
            #[cfg(test)]
            {
                self.steps += self.copies.len() as u64;
            }
        }
        let (found_by, syncs) = (self.copies.get(id)?.found_by, self.syncs);
        let round = self.round_of(why);
        if round.began == 0 {
            round.began = syncs;
        }
        // A checkpoint that comes again in the same round is really read again.
        let may_rely = found_by <= round.began && !round.done.contains(id);
        may_rely.then(|| std::mem::take(&mut round.read))
    }

    fn round_of(&mut self, why: Why) -> &mut Round {
        match why {
            Why::Turn => &mut self.round,
            Why::Suspect | Why::Asked => &mut self.aside,
        }
    }

    /// Records the end, at `unix_ms`, of a check that began at `began` and left pages in a cold tier out.
    pub fn checked(
        &mut self,
        of: &ScrubCandidate<'_>,
        why: Why,
        read: Option<PagesRead>,
        unverified_pages: u64,
        (began, unix_ms): (Duration, u64),
    ) {
        self.ended(of.id, why, read);
        // Out of turn everything is fetched.
        if why != Why::Turn && unverified_pages > 0 {
            self.away.insert(of.id.to_owned(), unix_ms);
        } else {
            self.away.remove(of.id);
        }
        let total = self.bytes.max(1);
        let in_turn = self.copies.get(of.id);
        // A check out of turn uses no share of the period.
        let in_turn = in_turn.filter(|tracked| why == Why::Turn && !tracked.damaged);
        if let (Some(period), Some(tracked)) = (self.period, in_turn) {
            let own = u128::from(tracked.bytes.max(1));
            let ns = period.as_nanos().saturating_mul(own) / total;
            self.next_at = began + Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX));
        }
        self.verified_now(of, unverified_pages, unix_ms);
    }

    /// Records that a copy was verified but for pages in a cold tier, or found damaged, at `unix_ms`.
    pub fn verified_now(&mut self, of: &ScrubCandidate<'_>, unverified_pages: u64, unix_ms: u64) {
        self.step();
        match unverified_pages {
            0 => self.unverified.remove(of.id),
            pages => self.unverified.insert(of.id.to_owned(), pages),
        };
        self.verified.insert(of.id.to_owned(), unix_ms);
        let before = self.remove(of.id);
        let same = before.filter(|before| before.copy == of.copy);
        let tracked = Tracked {
            since: unix_ms,
            bytes: of.bytes,
            damaged: of.damaged,
            copy: of.copy,
            // A copy that no sync has found yet counts as found by the next.
            found_by: same.map_or(self.syncs + 1, |same| same.found_by),
        };
        self.insert(of.id, tracked);
        if of.cold_bytes > 0 {
            self.cold.insert(of.id.to_owned(), of.cold_bytes);
        }
    }

    /// Records a check that was aborted, or found nothing to check.
    pub fn broken_off(&mut self, id: &str, why: Why, read: Option<PagesRead>, gone: bool) {
        self.ended(id, why, read);
        if gone {
            self.remove(id);
            self.verified.remove(id);
        }
    }

    fn ended(&mut self, id: &str, why: Why, read: Option<PagesRead>) {
        self.step();
        let round = self.round_of(why);
        if let Some(read) = read {
            round.read = read;
        }
        round.left.remove(id);
        round.done.insert(id.to_owned());
    }

    /// Counts a visited copy, for the test that a pass is linear.
    fn step(&mut self) {
        #[cfg(test)]
        {
            self.steps += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);
    const DAY_MS: u64 = 86_400_000;
    const NOW: u64 = 1_000 * DAY_MS;

    fn held(id: &str, bytes: u64, sealed_unix_ms: u64) -> ScrubCandidate<'_> {
        ScrubCandidate {
            id,
            bytes,
            sealed_unix_ms,
            damaged: false,
            copy: CopyId::new(1),
            cold_bytes: 0,
        }
    }

    fn scheduled(
        period: Option<Duration>,
        verified: HashMap<String, u64>,
        held: &[ScrubCandidate<'_>],
    ) -> Schedule {
        let mut schedule = Schedule::default();
        schedule.begin_with(period, verified);
        schedule.sync(held.iter().cloned(), NOW);
        schedule
    }

    fn id(next: NextCheck) -> String {
        match next {
            NextCheck::Check { id, .. } => id,
            NextCheck::Wait(wait) => panic!("waits {wait:?}"),
        }
    }

    /// Runs the schedule for `hours`, with checks that take no time; returns the hour and id of each check.
    fn run(schedule: &mut Schedule, held: &[ScrubCandidate<'_>], hours: u64) -> Vec<(u64, String)> {
        let by_id: HashMap<_, _> = held.iter().map(|one| (one.id, one)).collect();
        let (mut now, mut seen) = (Duration::ZERO, Vec::new());
        let end = Duration::from_secs(hours * 3600);
        while now < end {
            let unix_ms = NOW + u64::try_from(now.as_millis()).unwrap();
            match schedule.next(unix_ms, now) {
                NextCheck::Check { id, why } => {
                    assert_eq!(why, Why::Turn);
                    seen.push((now.as_secs() / 3600, id.clone()));
                    let read = schedule.begin(&id, why);
                    schedule.checked(by_id[&*id], why, read, 0, (now, unix_ms));
                }
                NextCheck::Wait(wait) => now += wait.unwrap_or(end).max(Duration::from_millis(1)),
            }
        }
        seen
    }

    #[test]
    fn a_copy_whose_tier_is_away_is_not_read_again_and_again() {
        let mut schedule = Schedule::default();
        schedule.sync([held("a", 1, NOW)].into_iter(), NOW);
        let mut check = |unix_ms: u64, unverified_pages: u64| {
            schedule.ask("a", unix_ms);
            let next = schedule.next(unix_ms, Duration::ZERO);
            let NextCheck::Check { id, why } = next else {
                return false;
            };
            let read = schedule.begin(&id, why);
            let of = held("a", 1, NOW);
            schedule.checked(&of, why, read, unverified_pages, (Duration::ZERO, unix_ms));
            true
        };
        let later = u64::try_from(AWAY.as_millis()).unwrap();
        assert!(check(NOW, 3));
        assert!(!check(NOW + 1, 3));
        assert!(check(NOW + later, 3));
        assert!(!check(NOW + later + 1, 0));
        assert!(check(NOW + 2 * later, 0));
        // It is there again.
        assert!(check(NOW + 2 * later + 1, 0));
        // A clock that was set back keeps nobody waiting.
        assert!(check(NOW + 2 * later + 2, 1));
        assert!(check(NOW, 1));
    }

    #[test]
    fn a_period_is_divided_by_bytes_oldest_first() {
        let held = [
            held("new", 60, NOW - 10),
            held("old", 20, NOW - 30),
            held("middle", 20, NOW - 20),
        ];
        let mut schedule = scheduled(Some(10 * DAY), HashMap::new(), &held);
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
        let mut schedule = scheduled(Some(3 * DAY), verified, &held);
        let seen = run(&mut schedule, &held, 24 * 3);
        let seen: Vec<_> = seen.iter().map(|(hour, id)| (*hour, &id[..])).collect();
        assert_eq!(seen, [(0, "b"), (0, "c"), (24, "a"), (48, "b")]);
    }

    #[test]
    fn a_clock_that_was_set_costs_a_reading_and_no_more() {
        // Verified a year in the future by the present clock: due after a period at the latest.
        let verified = HashMap::from([("a".to_owned(), NOW + 365 * DAY_MS)]);
        let held = [held("a", 1, 0)];
        let mut schedule = scheduled(Some(DAY), verified, &held);
        assert_eq!(run(&mut schedule, &held, 48).len(), 2);
    }

    #[test]
    fn suspects_come_first_then_what_is_asked_for_and_without_a_period_nothing_else_does() {
        let held = [held("a", 1, 0), held("b", 1, 1)];
        let mut schedule = scheduled(None, HashMap::new(), &held);
        assert_eq!(schedule.next(NOW, DAY), NextCheck::Wait(None));
        schedule.ask("a", NOW);
        assert!(schedule.suspect("b"));
        assert!(!schedule.suspect("b"));
        let check = |id: &str, why| {
            let id = id.to_owned();
            NextCheck::Check { id, why }
        };
        assert_eq!(schedule.next(NOW, DAY), check("b", Why::Suspect));
        assert_eq!(schedule.next(NOW, DAY), check("a", Why::Asked));
        assert_eq!(schedule.next(NOW, DAY), NextCheck::Wait(None));
    }

    #[test]
    fn damaged_ones_are_tried_again_within_the_hour_and_do_not_hold_up_others() {
        let mut held = [held("a", 1, NOW), held("b", 1, NOW)];
        held[0].damaged = true;
        let mut schedule = scheduled(Some(4 * DAY), HashMap::new(), &held);
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
        let mut schedule = scheduled(Some(DAY), HashMap::new(), &both);
        assert_eq!(id(schedule.next(NOW, DAY)), "a");
        let read = schedule.begin("a", Why::Turn);
        assert!(read.is_some());
        schedule.checked(&both[0], Why::Turn, read, 0, (DAY, NOW));
        let three = [both[0].clone(), both[1].clone(), held("late", 1, 2)];
        // The copies are equal in this test: they are distinguished by the sync that found them.
        schedule.sync(three.iter().cloned(), NOW);
        assert!(schedule.begin("late", Why::Turn).is_none());
        // Again in the same round: really read again.
        assert!(schedule.begin("a", Why::Turn).is_none());
        let read = schedule.begin("b", Why::Turn);
        assert!(read.is_some());
        schedule.checked(&both[1], Why::Turn, read, 0, (DAY, NOW));
        // All copies were read: a new round with all of them.
        assert!(schedule.begin("late", Why::Turn).is_some());
    }

    #[test]
    fn what_is_suspected_together_is_read_once_together() {
        let three = [held("a", 1, 0), held("b", 1, 1), held("c", 1, 2)];
        let mut schedule = scheduled(None, HashMap::new(), &three);
        for one in ["a", "b"] {
            schedule.suspect(one);
        }
        schedule.ask("c", NOW);
        for one in &three {
            let NextCheck::Check { id, why } = schedule.next(NOW, DAY) else {
                panic!("{} is not read", one.id)
            };
            let read = schedule.begin(&id, why);
            assert!(read.is_some(), "{id}");
            schedule.checked(one, why, read, 0, (DAY, NOW));
        }
        // The pages read for them do not serve a later suspicion.
        schedule.suspect("a");
        assert_eq!(id(schedule.next(NOW, DAY)), "a");
        assert!(schedule.begin("a", Why::Suspect).is_none());
    }

    #[test]
    fn what_was_verified_was_this_copy_and_lately() {
        let hour = Duration::from_secs(3600);
        let mut schedule = scheduled(None, HashMap::new(), &[held("a", 1, NOW)]);
        let copy = CopyId::new(1);
        assert!(!schedule.is_verified(("a", copy, 0), hour, NOW));
        schedule.verified_now(&held("a", 1, NOW), 0, NOW);
        assert!(schedule.is_verified(("a", copy, 0), hour, NOW + 3_600_000));
        assert!(!schedule.is_verified(("a", copy, 0), hour, NOW + 3_600_001));
        // A part of it has moved to an object store since.
        assert!(!schedule.is_verified(("a", copy, 7), hour, NOW));
        let cooled = ScrubCandidate {
            cold_bytes: 7,
            ..held("a", 1, NOW)
        };
        schedule.verified_now(&cooled, 0, NOW);
        assert!(schedule.is_verified(("a", copy, 7), hour, NOW));
        // The clock was set back: nothing is known.
        assert!(!schedule.is_verified(("a", copy, 0), hour, NOW - 1));
        // The checkpoint is gone, and another with the same id has come.
        schedule.sync(std::iter::empty(), NOW);
        schedule.sync([held("a", 1, NOW)].into_iter(), NOW);
        assert!(!schedule.is_verified(("a", copy, 0), hour, NOW));
    }

    /// Returns the number of copies visited in `passes` passes over `count` copies.
    fn steps(count: usize, passes: usize) -> u64 {
        let ids: Vec<_> = (0..count).map(|number| format!("{number:032x}")).collect();
        let held: Vec<_> = ids.iter().map(|id| held(id, 1, 0)).collect();
        let by_id: HashMap<_, _> = held.iter().map(|one| (one.id, one)).collect();
        let mut schedule = scheduled(Some(DAY), HashMap::new(), &held);
        for pass in 0..passes {
            let unix_ms = NOW + DAY_MS * u64::try_from(pass).unwrap();
            for _ in 0..count {
                let id = id(schedule.next(unix_ms, DAY * 1000));
                let read = schedule.begin(&id, Why::Turn);
                assert!(read.is_some());
                schedule.checked(by_id[&*id], Why::Turn, read, 0, (Duration::ZERO, unix_ms));
            }
            assert_eq!(schedule.verified.len(), count);
        }
        schedule.steps
    }

    #[test]
    fn a_pass_is_linear_in_the_number_of_checkpoints() {
        for count in [100, 1_000, 10_000] {
            // Five steps for each copy, and one for its sync.
            let most = u64::try_from(count).unwrap() * 6 * 2;
            let steps = steps(count, 2);
            assert!(steps <= most, "{steps} for {count}");
        }
    }
}
