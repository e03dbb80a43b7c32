//! Background work of the scrub: reads the checkpoints that are due, at its rate.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use permafrost_scrubbing::{NextCheck, ScrubThrottle, Why};
use permafrost_store::clock::unix_ms;
use permafrost_store::{Checked, ColdPages, HeldCheckpoint, PagesRead, StoreError};

use super::{Scrubber, candidate};

/// Longest sleep of the background thread: a checkpoint sealed meanwhile is due only in days.
const NAP: Duration = Duration::from_secs(60);

/// Interval at which the scrub checks if dumps still come in.
const LOOK: Duration = Duration::from_millis(100);

/// Time after which an object store that was away is listed again.
const AWAY: Duration = Duration::from_secs(3600);

/// Share of a processor's time for checks that other nodes wait for while a dump comes in, percent: that of
/// repair. Otherwise they get all of it: a drain of those nodes depends on them.
const ASKED_SHARE_PERCENT: u8 = 25;

/// Limiters for shares of a processor's time.
struct Paces {
    background: ScrubThrottle,
    /// Limiter for checks that other nodes wait for, while a dump comes in.
    asked: ScrubThrottle,
}

impl Scrubber {
    pub(super) fn run(&self) {
        if let Some(period) = self.options.period {
            let period_s = period.as_secs();
            let share_percent = self.options.share_percent;
            tracing::info!(
                event = "scrub-begun",
                period_s,
                share_percent,
                "scrub begins"
            );
        }
        let mut paces = Paces {
            background: ScrubThrottle::new(self.options.share_percent),
            asked: ScrubThrottle::new(ASKED_SHARE_PERCENT),
        };
        while !self.is_stopped() {
            let since = Instant::now();
            self.list_cold();
            let nap = match self.list(self.longest_nap()) {
                Ok(()) => {
                    // Searching for work is work, too.
                    self.nap(paces.background.took(since.elapsed()));
                    self.turn(&mut paces)
                }
                Err(error) => {
                    tracing::error!(event = "scrub-inventory-failed", %error, "scrub: it is not known what there is");
                    self.longest_nap()
                }
            };
            self.save(false);
            self.nap(nap);
        }
        self.save(true);
    }

    /// Lists the object stores once in a period: checkpoints whose objects are missing are suspects. One that is away is
    /// listed again some time later.
    fn list_cold(&self) {
        let now = Instant::now();
        let Some(period) = self.options.period else {
            return;
        };
        if self.state().next_list.is_some_and(|next| now < next) {
            return;
        }
        let (absent, is_away) = self.absent();
        let pause = if is_away { period.min(AWAY) } else { period };
        for id in &absent {
            tracing::error!(
                event = "objects-missing",
                id,
                "objects of it are missing in the cold tier"
            );
            self.suspect_quietly(id);
        }
        self.state().next_list = now.checked_add(pause);
    }

    /// Returns the longest sleep: a checkpoint that is sealed in the meantime must be verified within the period,
    /// too.
    fn longest_nap(&self) -> Duration {
        let period = self.options.period.unwrap_or(NAP);
        NAP.min((period / 4).max(LOOK))
    }

    /// Lists the held checkpoints if the last listing is older than `every`. Locks only to store the result.
    pub(super) fn list(&self, every: Duration) -> Result<(), StoreError> {
        let is_recent = |listed: Instant| listed.elapsed() < every;
        if self.state().listed.is_some_and(is_recent) {
            return Ok(());
        }
        let held = self.store.everything()?;
        let damaged: HashSet<String> = self
            .store
            .set_asides()
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        let candidates = held
            .iter()
            .map(|held| candidate(held, damaged.contains(&held.id)));
        let mut state = self.state();
        state.schedule.sync(candidates, unix_ms());
        state.listed = Some(Instant::now());
        self.counters.listings.add(1);
        Ok(())
    }

    /// Checks one checkpoint, if one is due. Returns the time to wait.
    fn turn(&self, paces: &mut Paces) -> Duration {
        let (id, why, mut read) = {
            let mut state = self.state();
            match state.schedule.next(unix_ms(), self.began.elapsed()) {
                NextCheck::Wait(wait) => {
                    state.suspected_jobs.clear();
                    return wait.unwrap_or(NAP).min(self.longest_nap());
                }
                NextCheck::Check { id, why } => {
                    if why != Why::Suspect {
                        state.suspected_jobs.clear();
                    }
                    let read = state.schedule.begin(&id, why);
                    (id, why, read)
                }
            }
        };
        let began = self.began.elapsed();
        let checked = self.store.held_copy(&id).and_then(|held| {
            let checked = self.check_in_turn(&held, why, read.as_mut(), paces)?;
            Some((held, checked))
        });
        let Some((held, checked)) = checked else {
            let gone = !self.store.holds(&id);
            self.state().schedule.broken_off(&id, why, read, gone);
            return Duration::ZERO;
        };
        let unverified_pages = checked.unverified_pages;
        self.conclude(&held, checked, read.as_mut());
        // The current copy: the checkpoint may have been healed by a fresh one.
        let now = self.store.held_copy(&id);
        let of = now.as_ref().map(|held| self.candidate_now(held));
        let mut state = self.state();
        match of {
            Some(of) => {
                let unverified = unverified_pages;
                state
                    .schedule
                    .checked(&of, why, read, unverified, (began, unix_ms()));
            }
            None => state.schedule.broken_off(&id, why, read, true),
        }
        drop(state);
        self.count_asked();
        Duration::ZERO
    }

    /// Reads one checkpoint at the rate for its reason.
    fn check_in_turn(
        &self,
        held: &HeldCheckpoint,
        why: Why,
        read: Option<&mut PagesRead>,
        paces: &mut Paces,
    ) -> Option<Checked> {
        self.hold_back(why);
        let mut since = Instant::now();
        // In turn only what the node has: a list shows that the rest is there.
        let cold = match why == Why::Turn && self.store.damage(&held.id).is_none() {
            true => ColdPages::Leave,
            false => ColdPages::Fetch,
        };
        self.read(held, read, cold, &mut |_| {
            // Checks that other nodes wait for are throttled only while a dump comes in, and the background checks
            // do not sleep while one of those waits.
            let nap = match why {
                Why::Asked if self.store.is_receiving() => paces.asked.took(since.elapsed()),
                Why::Asked => Duration::ZERO,
                _ => paces.background.took(since.elapsed()),
            };
            if self.asked.load(Ordering::Relaxed) == 0 || why == Why::Asked {
                self.nap(nap);
            }
            self.hold_back(why);
            since = Instant::now();
        })
    }

    pub(super) fn count_asked(&self) {
        let asked = self.state().schedule.asked();
        self.asked.store(asked, Ordering::Relaxed);
    }

    /// Waits while dumps come in, or a request has everything read anyway. Does not wait for checks that other
    /// nodes wait for.
    fn hold_back(&self, why: Why) {
        let others_wait = || why == Why::Asked || self.asked.load(Ordering::Relaxed) > 0;
        while !self.is_stopped()
            && !others_wait()
            && (self.store.is_receiving() || self.requests.load(Ordering::Relaxed) > 0)
        {
            self.paused.store(true, Ordering::Relaxed);
            // A suspect wakes the thread, but does not end this wait.
            std::thread::sleep(LOOK);
        }
        self.paused.store(false, Ordering::Relaxed);
    }
}
