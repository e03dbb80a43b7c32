//! The scrub: everything that this node holds is read and verified within a period, and what is damaged is mended from
//! another node or set aside.
//!
//! ```text
//!  Schedule: oldest first, in the share of the period that its bytes have ──▶ Store::check ──▶ whole: lifted
//!     ▲ suspects: in front                                                       │ damaged: set aside, at once
//!     └───────────── Store::suspect, others of the job ◀─────────────────────────┤
//!                                                                                ▼
//!                      set aside until a later look ◀── no ── Mend: a fresh copy, read again ── good ──▶ lifted
//! ```
//!
//! It works in a thread of its own, for a share of a processor's time, and not at all while a dump comes in. A page that
//! checkpoints share is read once a round, through the first of them; its checksum is compared for each.
//!
//! The daemon makes one, always, before it listens, and keeps what `start` gives until it stops:
//!
//! ```ignore
//! let scrubber = Scrubber::new(&store, ScrubOptions {
//!     period: config.scrub_period,                       // None for `off`
//!     memory: Some(config.data_dir.join("scrub.json")),
//!     ..ScrubOptions::default()
//! });
//! // In a cluster:
//! scrubber.mend_with(Arc::new(MendByPull::new(Arc::clone(&store), puller)));
//! let scrubbing = scrubber.start()?;                     // dropped: stopped
//! ```
//!
//! `permafrost scrub`, `permafrost status` and damage found while reading come to it through the store
//! ([`Store::scrub_now`], [`Store::scrub_status`], [`Store::suspect`]).

mod memory;
mod mend;
mod pace;
mod schedule;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use permafrost_protocol::control;
use permafrost_protocol::manifest::CheckpointRef;

use self::pace::Pace;
use self::schedule::{Candidate, Next, Schedule};
use crate::clock::unix_ms;
use crate::costs::ScrubDone;
use crate::store::{Checked, Count, Held, PagesRead, Progress, Scrub, Store, StoreError};

pub use mend::{Mend, MendByPull};

/// How long nothing is looked for at most: what was sealed meanwhile has its turn in days.
const NAP: Duration = Duration::from_secs(60);

/// How often it is looked whether dumps still come in.
const LOOK: Duration = Duration::from_millis(100);

/// What was verified is written down so often.
const SAVE_EVERY: Duration = Duration::from_secs(60);

/// How long a stop waits for what is under way: a fetch may take its time, and is nobody's loss.
const PATIENCE: Duration = Duration::from_secs(5);

/// How it scrubs.
#[derive(Clone, Debug)]
pub struct ScrubOptions {
    /// Everything is verified once in this time. `None`: only what is asked for, or suspected. Default 7 days.
    pub period: Option<Duration>,
    /// Percent of a processor's time in the background, 1 to 100. Default 10.
    pub share_percent: u8,
    /// File that remembers what was verified when; written anew when it is missing. Default none.
    pub memory: Option<PathBuf>,
}

impl Default for ScrubOptions {
    fn default() -> Self {
        Self {
            period: Some(Duration::from_secs(7 * 86_400)),
            share_percent: 10,
            memory: None,
        }
    }
}

/// What it has done since it was made.
#[derive(Debug, Default)]
pub struct ScrubCounters {
    /// Checkpoints verified.
    pub checkpoints: Count,
    /// Pages gone through, shared ones each time.
    pub pages: Count,
    /// Bytes read for it.
    pub read_bytes: Count,
    /// Checkpoints found damaged.
    pub damaged: Count,
    /// Damaged ones that a fresh copy has taken the place of.
    pub mended: Count,
    /// Times that mending failed.
    pub mends_failed: Count,
}

/// Verifies what a store holds.
pub struct Scrubber {
    store: Arc<Store>,
    options: ScrubOptions,
    mend: OnceLock<Arc<dyn Mend>>,
    counters: ScrubCounters,
    began: Instant,
    state: Mutex<State>,
    woken: Condvar,
    /// Requests under way: the background waits for them.
    requests: AtomicUsize,
    /// One mend at a time.
    mending: Mutex<()>,
    /// It waits for dumps to be in.
    paused: AtomicBool,
}

/// Who has put a fresh copy in the place of a damaged one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    This,
    Another,
}

struct State {
    schedule: Schedule,
    stopped: bool,
    saved: Instant,
}

impl Scrubber {
    /// Over a store, which passes requests on to it from now on. Nothing is read before [`Scrubber::start`].
    #[must_use]
    pub fn new(store: &Arc<Store>, options: ScrubOptions) -> Arc<Self> {
        let verified = options.memory.as_deref().map(memory::load);
        let scrubber = Arc::new(Self {
            store: Arc::clone(store),
            mend: OnceLock::new(),
            counters: ScrubCounters::default(),
            began: Instant::now(),
            state: Mutex::new(State {
                schedule: Schedule::new(options.period, verified.unwrap_or_default()),
                stopped: false,
                saved: Instant::now(),
            }),
            options,
            woken: Condvar::new(),
            requests: AtomicUsize::new(0),
            mending: Mutex::new(()),
            paused: AtomicBool::new(false),
        });
        let weak: Weak<Self> = Arc::downgrade(&scrubber);
        if !store.scrubbed_by(weak) {
            tracing::error!("the store has another scrub, which answers requests");
        }
        scrubber
    }

    /// Says who mends, once and for all; false if it is known already. Without it damage is set aside.
    pub fn mend_with(&self, mend: Arc<dyn Mend>) -> bool {
        self.mend.set(mend).is_ok()
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> &ScrubCounters {
        &self.counters
    }

    /// Whether it waits for dumps to be in.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Works in the background until what comes back is dropped.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(self: &Arc<Self>) -> io::Result<Scrubbing> {
        let scrubber = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("scrub".to_owned())
            .spawn(move || scrubber.run())?;
        Ok(Scrubbing {
            scrubber: Arc::clone(self),
            thread,
        })
    }

    fn run(&self) {
        if let Some(period) = self.options.period {
            let period_s = period.as_secs();
            let share_percent = self.options.share_percent;
            tracing::info!(period_s, share_percent, "scrub begins");
        }
        while !self.is_stopped() {
            let nap = match self.store.everything() {
                Ok(held) => self.turn(&held),
                Err(error) => {
                    tracing::error!(%error, "scrub: it is not known what there is");
                    self.longest_nap()
                }
            };
            self.save(false);
            self.nap(nap);
        }
        self.save(true);
    }

    /// What is sealed in the meantime must have its turn within the period, too.
    fn longest_nap(&self) -> Duration {
        let period = self.options.period.unwrap_or(NAP);
        NAP.min((period / 4).max(LOOK))
    }

    /// Checks one checkpoint, if it is time; how long to wait then.
    fn turn(&self, held: &[Held]) -> Duration {
        let candidates = self.candidates(held);
        let (place, read) = {
            let mut state = self.state();
            let next = state
                .schedule
                .next(&candidates, unix_ms(), self.began.elapsed());
            match next {
                Next::Wait(wait) => return wait.unwrap_or(NAP).min(self.longest_nap()),
                Next::Check { place, suspect } => {
                    let id = candidates[place].id;
                    let read = (!suspect).then(|| state.schedule.begin(id, &candidates));
                    (place, read.flatten())
                }
            }
        };
        let mut read = read;
        let one = &held[place];
        let began = self.began.elapsed();
        self.hold_back();
        let mut pace = Pace::new(self.options.share_percent);
        let mut since = Instant::now();
        let checked = self.read(one, read.as_mut(), &mut |_| {
            let nap = pace.took(since.elapsed());
            self.nap(nap);
            self.hold_back();
            since = Instant::now();
        });
        let mut state = self.state();
        let schedule = &mut state.schedule;
        let Some(checked) = checked else {
            schedule.broken_off(&one.id, read);
            return Duration::ZERO;
        };
        schedule.checked(&one.id, &candidates, read, began, unix_ms());
        drop(state);
        self.conclude(one, checked);
        Duration::ZERO
    }

    fn candidates<'a>(&self, held: &'a [Held]) -> Vec<Candidate<'a>> {
        let damaged: HashMap<_, _> = self.store.set_asides().into_iter().collect();
        let candidate = |held: &'a Held| Candidate {
            id: &held.id,
            bytes: held.bytes,
            sealed_unix_ms: held
                .record
                .as_ref()
                .map_or(0, |record| record.created_unix_ms),
            damaged: damaged.contains_key(&held.id),
            copy: held.copy.clone(),
        };
        held.iter().map(candidate).collect()
    }

    /// Reads one whole. `None`: it is not there any more, or the scrub stops.
    fn read(
        &self,
        held: &Held,
        already: Option<&mut PagesRead>,
        after_run: &mut dyn FnMut(u64),
    ) -> Option<Checked> {
        let mut pages_done = 0;
        let checked = self.store.check(held, already, &mut |pages, bytes| {
            self.counters.pages.add(pages);
            self.counters.read_bytes.add(bytes);
            pages_done += pages;
            after_run(pages_done);
            !self.is_stopped()
        });
        match checked {
            Ok(checked) if !checked.stopped => {
                self.counters.checkpoints.add(1);
                Some(checked)
            }
            Ok(_) => None,
            Err(_) => {
                self.store.lift(&held.id);
                None
            }
        }
    }

    /// What follows from a check.
    fn conclude(&self, held: &Held, checked: Checked) -> Option<control::DamagedCheckpoint> {
        let name = held.name();
        let Some(first) = checked.damage.first() else {
            if self.store.lift(&held.id) {
                tracing::info!(checkpoint = name, "whole: no longer set aside");
            }
            return None;
        };
        // Before it is mended: nothing is to be built upon it meanwhile.
        if self.store.set_aside(&held.id, first) {
            self.counters.damaged.add(1);
            let places = checked.damage.len();
            tracing::error!(checkpoint = name, id = %held.id, places, damage = first, "damaged");
            self.suspect_others_of(held);
        }
        let mended = self.mended(held);
        let reason = match &mended {
            Ok(by_whom) => {
                if *by_whom == By::This {
                    self.counters.mended.add(1);
                }
                self.store.lift(&held.id);
                tracing::info!(checkpoint = name, "mended: a fresh copy has its place");
                String::new()
            }
            Err(reason) => {
                tracing::warn!(checkpoint = name, reason, "not mended: it stays set aside");
                reason.clone()
            }
        };
        Some(control::DamagedCheckpoint {
            checkpoint: name,
            id: held.id.clone(),
            damage: checked.damage,
            mended: mended.is_ok(),
            reason,
            node: String::new(),
        })
    }

    /// Has it mended, and looks whether it is. Why not.
    fn mended(&self, held: &Held) -> Result<By, String> {
        let alone = || "no other node has a copy".to_owned();
        let found = self.store.other_holders(held);
        let (record, holders) = found
            .map_err(|error| format!("other holders are not known: {error}"))?
            .ok_or_else(alone)?;
        if holders.is_empty() {
            return Err(alone());
        }
        let mend = self
            .mend
            .get()
            .ok_or("this node fetches nothing from others")?;
        let _one = self.mending.lock().unwrap_or_else(PoisonError::into_inner);
        // A request and the background may have found the same.
        let now = self.store.everything().map_err(|e| e.to_string())?;
        let is_another = |now: &Held| now.id == held.id && !now.copy.ptr_eq(&held.copy);
        let is_whole = |checked: Checked| checked.damage.is_empty();
        if now.iter().any(is_another) && self.read(held, None, &mut |_| {}).is_some_and(is_whole) {
            return Ok(By::Another);
        }
        let mended = mend.mend(&record, &holders).map_err(|e| e.to_string());
        let mended = mended.and_then(|()| match self.read(held, None, &mut |_| {}) {
            Some(again) => match again.damage.into_iter().next() {
                None => Ok(By::This),
                Some(damage) => Err(format!("the fresh copy is damaged, too: {damage}")),
            },
            None => Err("the fresh copy was not read to its end".to_owned()),
        });
        if mended.is_err() {
            self.counters.mends_failed.add(1);
        }
        mended
    }

    /// Generations of a job share pages.
    fn suspect_others_of(&self, held: &Held) {
        let Ok(all) = self.store.everything() else {
            return;
        };
        let others = all
            .iter()
            .filter(|other| !held.job().is_empty() && other.job() == held.job())
            .filter(|other| other.id != held.id);
        for other in others {
            self.suspect(&other.id);
        }
    }

    /// Those of `everything` that a request names, in order.
    fn named(&self, reference: &str) -> Result<Vec<Held>, StoreError> {
        let mut all = self.store.everything()?;
        if reference.is_empty() {
            return Ok(all);
        }
        let parsed: CheckpointRef = reference.parse().map_err(|error| StoreError::Invalid {
            message: format!("{reference:?} names no checkpoint: {error}"),
            hint: "name one as JOB or JOB@GENERATION",
        })?;
        let listed = self.store.list(Some(&parsed.job))?;
        let wanted = listed
            .into_iter()
            .filter(|record| match parsed.generation {
                Some(generation) => record.generation == generation,
                None => record.generation > 0,
            })
            .max_by_key(|record| record.generation)
            .ok_or_else(|| StoreError::NotFound {
                what: format!("checkpoint {reference}"),
            })?;
        all.retain(|held| held.id == wanted.id);
        if all.is_empty() {
            return Err(StoreError::NotFound {
                what: format!("copy of {reference} on this node"),
            });
        }
        Ok(all)
    }

    /// Waits while dumps come in, or somebody has everything read anyway.
    fn hold_back(&self) {
        while !self.is_stopped()
            && (self.store.is_receiving() || self.requests.load(Ordering::Relaxed) > 0)
        {
            self.paused.store(true, Ordering::Relaxed);
            // Suspects wake it, but do not make it go on.
            std::thread::sleep(LOOK);
        }
        self.paused.store(false, Ordering::Relaxed);
    }

    /// Sleeps, until it is stopped or there is a suspect.
    fn nap(&self, time: Duration) {
        if time.is_zero() {
            return;
        }
        let state = self.state();
        if !state.stopped {
            drop(
                self.woken
                    .wait_timeout(state, time)
                    .unwrap_or_else(PoisonError::into_inner),
            );
        }
    }

    fn save(&self, now: bool) {
        let Some(path) = &self.options.memory else {
            return;
        };
        let verified = {
            let mut state = self.state();
            if !now && state.saved.elapsed() < SAVE_EVERY {
                return;
            }
            state.saved = Instant::now();
            state.schedule.verified().clone()
        };
        if let Err(error) = memory::save(path, &verified) {
            tracing::warn!(%error, path = %path.display(), "what was verified is not written down");
        }
    }

    fn is_stopped(&self) -> bool {
        self.state().stopped
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Scrub for Scrubber {
    fn scrub(
        &self,
        reference: &str,
        progress: Progress<'_>,
    ) -> Result<control::Scrubbed, StoreError> {
        let named = self.named(reference)?;
        let _request = Request::new(&self.requests);
        let size = |held: &Held| held.record.as_ref().map_or(0, |record| record.memory_bytes);
        let total: u64 = named.iter().map(size).sum();
        let mut scrubbed = control::Scrubbed::default();
        // What they share is read once.
        let mut read = PagesRead::default();
        for held in &named {
            let done = scrubbed.pages;
            let since = Instant::now();
            let checked = self.read(held, Some(&mut read), &mut |pages| {
                let bytes = (done + pages) * permafrost_pmem::PAGE_SIZE as u64;
                progress(bytes.min(total), total);
            });
            if self.is_stopped() {
                return Err(StoreError::Unavailable {
                    message: "this node is stopping: the scrub was broken off".to_owned(),
                    hint: "scrub again when it is back",
                });
            }
            // Removed since it was listed.
            let Some(checked) = checked else { continue };
            scrubbed.checkpoints += 1;
            scrubbed.pages += checked.pages;
            if let Some(costs) = self.store.costs() {
                costs.scrubbed(&ScrubDone {
                    bytes: checked.read_bytes,
                    elapsed: since.elapsed(),
                });
            }
            {
                let mut state = self.state();
                state.schedule.verified_now(&held.id, unix_ms());
            }
            scrubbed.damaged.extend(self.conclude(held, checked));
        }
        Ok(scrubbed)
    }

    fn suspect(&self, id: &str) {
        // Known already, and tried again in its time.
        if self.store.damage(id).is_none() && self.state().schedule.suspect(id) {
            self.woken.notify_all();
        }
    }

    fn status(&self) -> control::ScrubStatus {
        let held = self.store.everything().unwrap_or_default();
        let oldest = self
            .state()
            .schedule
            .oldest(&self.candidates(&held), unix_ms());
        control::ScrubStatus {
            period_s: self.options.period.map_or(0, |period| period.as_secs()),
            oldest_s: oldest.as_secs(),
            pages: self.counters.pages.value(),
            damaged: self.counters.damaged.value(),
            mended: self.counters.mended.value(),
            quarantined: self.store.set_asides().len() as u64,
        }
    }
}

/// The background work. Dropped, it ends, and what was verified is written down.
pub struct Scrubbing {
    scrubber: Arc<Scrubber>,
    thread: JoinHandle<()>,
}

impl Drop for Scrubbing {
    fn drop(&mut self) {
        self.scrubber.state().stopped = true;
        self.scrubber.woken.notify_all();
        let until = Instant::now() + PATIENCE;
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A request under way.
struct Request<'a>(&'a AtomicUsize);

impl<'a> Request<'a> {
    fn new(requests: &'a AtomicUsize) -> Self {
        requests.fetch_add(1, Ordering::Relaxed);
        Self(requests)
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
