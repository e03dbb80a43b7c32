//! The scrub: reads and verifies everything that this node holds within a period; damaged checkpoints are
//! healed from another node or quarantined.
//!
//! ```text
//!  Schedule: oldest first, in the share of the period that its bytes have ──▶ Store::check ──▶ whole: lifted
//!     ▲ suspects: in front; then what other nodes are to rely on                 │ damaged: set aside and listed so, at once
//!     └──────── ClusteredStore::suspect, others of job ◀─────────────────────────┤
//!                                                                                ▼
//!     set aside until a later look ◀── no ── Mend: its pages in place, else a fresh copy; read again ── good ──▶ lifted
//! ```
//!
//! The scrub works in a thread of its own, for a share of a processor's time, and not at all while a dump comes
//! in. A page that checkpoints share is read once a round, through the first of them; its checksum is compared
//! for each. The held checkpoints are listed periodically, not for each check: a pass is linear in their
//! number.
//!
//! The daemon always makes one scrubber before it listens, and keeps the value that `start` returns until it
//! stops. Readers of the store report suspects to a [`ScrubQueue`], which is made before the store, so that store and
//! scrubber are complete when they are made:
//!
//! ```text
//! let queue = Arc::<ScrubQueue>::default();
//! let store = ClusteredStore::new(local, services, queue.clone());
//! let mend = MendByPull::new(store.clone(), puller);     // in a cluster
//! let scrubber = Scrubber::new(&store, queue, Some(Arc::new(mend)), options);
//! let scrubbing = scrubber.start()?;                     // dropped: stopped
//! ```

mod background;
mod heal;
mod memory;
mod mend;

use permafrost_store::MissingObject;
use permafrost_store::ReadingError;
use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use permafrost_clustered::{ClusteredStore, Suspects};
use permafrost_protocol::control;
use permafrost_protocol::manifest::CheckpointRef;
use permafrost_protocol::wire::message::{Verified, request};
use permafrost_scrubbing::{Schedule, ScrubCandidate};
use permafrost_store::clock::unix_ms;
use permafrost_store::{
    Checked, ColdPages, Counter, HeldCheckpoint, PagesRead, ProgressReceiver, Store, StoreError,
};

use crate::error::CopyingError;

pub use mend::{Mend, MendByPull};

/// Interval at which the times of verifications are saved.
const SAVE_EVERY: Duration = Duration::from_secs(60);

/// Longest time that a stop waits for work under way: an aborted fetch loses nothing.
const PATIENCE: Duration = Duration::from_secs(5);

/// Age of the listing from which on a status lists the held checkpoints again.
const STATUS_AGE: Duration = Duration::from_secs(1);

/// Options of the scrub.
#[derive(Clone, Debug)]
pub struct ScrubOptions {
    /// Time in which everything is verified once. `None`: only requested and suspected checkpoints. Default 7 days.
    pub period: Option<Duration>,
    /// Percent of a processor's time in the background, 1 to 100. Default 10.
    pub share_percent: u8,
    /// File for the times of verifications; created when it is missing. Default none.
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

/// Counters of the scrub since it was created.
#[derive(Debug, Default)]
pub struct ScrubCounters {
    /// Checkpoints that were verified.
    pub checkpoints: Counter,
    /// Pages that were visited; shared ones count each time.
    pub pages: Counter,
    /// Bytes that were read.
    pub read_bytes: Counter,
    /// Checkpoints that were found damaged.
    pub damaged: Counter,
    /// Damaged checkpoints that were healed.
    pub mended: Counter,
    /// Damaged pages that were rewritten in their places.
    pub pages_healed: Counter,
    /// Failed attempts to heal.
    pub mends_failed: Counter,
    /// Listings of everything held.
    pub listings: Counter,
}

/// Verifies a store's checkpoints.
pub struct Scrubber {
    /// The checkpoints that are verified.
    store: Arc<Store>,
    clustered: Arc<ClusteredStore>,
    queue: Arc<ScrubQueue>,
    options: ScrubOptions,
    /// `None`: damaged checkpoints are only quarantined.
    mend: Option<Arc<dyn Mend>>,
    counters: ScrubCounters,
    began: Instant,
    /// Number of requests under way: the background work waits for them.
    requests: AtomicUsize,
    /// Allows one healing at a time.
    mending: Mutex<()>,
    /// True while the scrub waits for dumps to end.
    paused: AtomicBool,
    stopped: AtomicBool,
    /// Number of waiting copies that other nodes are to rely on: the background work is not throttled for them.
    asked: AtomicUsize,
}

/// Order in which checkpoints are verified. Readers report suspects to it.
#[derive(Default)]
pub struct ScrubQueue {
    state: Mutex<State>,
    woken: Condvar,
}

impl ScrubQueue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Suspects for ScrubQueue {
    fn suspect(&self, id: &str) {
        if self.state().schedule.suspect(id) {
            self.woken.notify_all();
        }
    }
}

#[derive(Default)]
struct State {
    schedule: Schedule,
    /// Jobs whose checkpoints all wait as suspects.
    suspected_jobs: HashSet<String>,
    /// Time of the last listing of everything held.
    listed: Option<Instant>,
    /// Time of the last save; `None` before the first.
    saved: Option<Instant>,
    /// Earliest time of the next list of object stores; `None`: at once.
    next_list: Option<Instant>,
}

impl Scrubber {
    /// Creates a scrubber of a store, whose readers report to `queue`. Without `mend` damaged checkpoints are only
    /// quarantined. Nothing is read before [`Scrubber::start`].
    #[must_use]
    pub fn new(
        store: &Arc<ClusteredStore>,
        queue: Arc<ScrubQueue>,
        mend: Option<Arc<dyn Mend>>,
        options: ScrubOptions,
    ) -> Arc<Self> {
        let verified = options.memory.as_deref().map(memory::load);
        {
            let mut state = queue.state();
            let verified = verified.unwrap_or_default();
            state.schedule.begin_with(options.period, verified);
            state.listed = None;
            state.saved = Some(Instant::now());
        }
        Arc::new(Self {
            store: Arc::clone(store.local()),
            clustered: Arc::clone(store),
            queue,
            options,
            mend,
            counters: ScrubCounters::default(),
            began: Instant::now(),
            requests: AtomicUsize::new(0),
            mending: Mutex::new(()),
            paused: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
        })
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> &ScrubCounters {
        &self.counters
    }

    /// Returns true if the scrub waits for dumps to end.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Scrubs in the background until the returned value is dropped.
    ///
    /// # Errors
    /// The thread cannot be started.
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

    /// Reads a whole checkpoint. `None`: it no longer exists, or the scrub stops.
    fn read(
        &self,
        held: &HeldCheckpoint,
        already: Option<&mut PagesRead>,
        cold: ColdPages,
        after_run: &mut dyn FnMut(u64),
    ) -> Option<Checked> {
        let mut pages_done = 0;
        let checked = self
            .store
            .check_with(held, already, cold, &mut |pages, bytes| {
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

    /// Returns the checkpoints whose objects in cold tiers are missing, by a list; and true if a tier is away: then it is
    /// not known of those in it.
    fn absent(&self) -> (Vec<String>, bool) {
        let (absent, away) = self.store.absent_in_cold();
        for error in &away {
            tracing::warn!(event = "objects-unknown", %error, "it is not known which objects of a cold tier are there");
        }
        (absent, !away.is_empty())
    }

    fn suspect_quietly(&self, id: &str) {
        // The damage is known already, and healing is retried at its time.
        if self.store.damage(id).is_none() {
            self.state().schedule.suspect(id);
        }
    }

    /// Returns those of `everything` that a request names, in order.
    fn named(&self, reference: &str) -> Result<Vec<HeldCheckpoint>, StoreError> {
        let mut all = self.store.everything()?;
        if reference.is_empty() {
            return Ok(all);
        }
        let parsed: CheckpointRef = reference
            .parse()
            .map_err(ReadingError::reference(reference))?;
        let listed = self.clustered.list(Some(&parsed.job))?;
        let wanted = listed
            .into_iter()
            .filter(|record| match parsed.generation {
                Some(generation) => record.generation == generation,
                None => record.generation > 0,
            })
            .max_by_key(|record| record.generation)
            .ok_or_else(|| StoreError::NotFound(MissingObject::Checkpoint(reference.to_owned())))?;
        all.retain(|held| held.id == wanted.id);
        if all.is_empty() {
            return Err(StoreError::NotFound(MissingObject::Copy {
                checkpoint: reference.to_owned(),
                holders: Vec::new(),
            }));
        }
        Ok(all)
    }

    /// Sleeps for `time`, or until the scrub is stopped or there is a suspect.
    fn nap(&self, time: Duration) {
        if time.is_zero() {
            return;
        }
        let mut state = self.state();
        if !self.is_stopped() {
            self.queue.woken.wait_for(&mut state, time);
        }
    }

    fn save(&self, now: bool) {
        let Some(path) = &self.options.memory else {
            return;
        };
        let verified = {
            let mut state = self.state();
            if !now && state.saved.is_some_and(|at| at.elapsed() < SAVE_EVERY) {
                return;
            }
            state.saved = Some(Instant::now());
            state.schedule.verified_whole()
        };
        if let Err(error) = memory::save(path, &verified) {
            tracing::warn!(event = "scrub-record-not-written", %error, path = %path.display(), "what was verified is not written down");
        }
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.queue.state()
    }

    /// Verifies a checkpoint, a job's newest, or (empty) everything that this node holds, now; heals or quarantines
    /// damaged ones. Pages in a cold tier are fetched for a named checkpoint, for one that is known to be damaged, and
    /// else if `cold` says so; otherwise they are counted, and a list shows that their objects are there.
    ///
    /// # Errors
    /// No such checkpoint here. Damage is no error.
    pub fn scrub(
        &self,
        reference: &str,
        cold: bool,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Scrubbed, StoreError> {
        let named = self.named(reference)?;
        let fetch_all = cold || !reference.is_empty();
        let absent: HashSet<String> = match fetch_all {
            true => HashSet::new(),
            false => self.absent().0.into_iter().collect(),
        };
        let _request = Request::new(&self.requests);
        let size =
            |held: &HeldCheckpoint| held.record.as_ref().map_or(0, |record| record.memory_bytes);
        let total: u64 = named.iter().map(size).sum();
        let mut scrubbed = control::Scrubbed::default();
        // Shared pages are read once.
        let mut read = PagesRead::default();
        for held in &named {
            let done = scrubbed.pages;
            let since = Instant::now();
            let suspect = absent.contains(&held.id) || self.store.damage(&held.id).is_some();
            let cold = match fetch_all || suspect {
                true => ColdPages::Fetch,
                false => ColdPages::Leave,
            };
            let checked = self.read(held, Some(&mut read), cold, &mut |pages| {
                let bytes = (done + pages) * permafrost_pmem::PAGE_SIZE as u64;
                progress(bytes.min(total), total);
            });
            if self.is_stopped() {
                return Err(CopyingError::ScrubStopped.into());
            }
            // The checkpoint was removed since it was listed.
            let Some(checked) = checked else { continue };
            scrubbed.checkpoints += 1;
            scrubbed.pages += checked.pages;
            scrubbed.unverified_pages += checked.unverified_pages;
            if scrubbed.away.is_empty() {
                scrubbed.away.clone_from(&checked.away);
            }
            let unverified_pages = checked.unverified_pages;
            self.store
                .observer()
                .scrubbed(checked.read_bytes, since.elapsed());
            let damaged = self.conclude(held, checked, Some(&mut read));
            scrubbed.damaged.extend(damaged);
            if let Some(now) = self.store.held_copy(&held.id) {
                let of = self.candidate_now(&now);
                let mut state = self.state();
                state
                    .schedule
                    .verified_now(&of, unverified_pages, unix_ms());
            }
        }
        Ok(scrubbed)
    }

    /// Returns the verification state of copies of this node, for another node that is to rely on them. Those that were
    /// not read lately are the next to be read, after the suspects. Returns at once.
    ///
    /// # Errors
    /// Too many checkpoints in one request.
    pub fn verified(&self, asked: &request::Verify) -> Result<Verified, StoreError> {
        if asked.checkpoints.len() > request::MAX_VERIFY {
            return Err(ReadingError::TooMany {
                requested: asked.checkpoints.len(),
                limit: request::MAX_VERIFY,
            }
            .into());
        }
        let within = Duration::from_secs(asked.within_s);
        let mut verified = Verified::default();
        let now = unix_ms();
        for id in &asked.checkpoints {
            let list = if self.store.damage(id).is_some() {
                &mut verified.damaged
            } else {
                match self.store.copy(id) {
                    None => &mut verified.missing,
                    Some(copy) => {
                        let cold_bytes = self.store.cold_bytes(id);
                        let mut state = self.state();
                        let copy = (id.as_str(), copy, cold_bytes);
                        if !state.schedule.is_verified(copy, within, now) {
                            state.schedule.ask(id, now);
                            continue;
                        }
                        &mut verified.whole
                    }
                }
            };
            list.push(id.clone());
        }
        self.count_asked();
        self.queue.woken.notify_all();
        Ok(verified)
    }

    /// Returns a copy that was verified just now.
    fn candidate_now<'a>(&self, held: &'a HeldCheckpoint) -> ScrubCandidate<'a> {
        ScrubCandidate {
            cold_bytes: self.store.cold_bytes(&held.id),
            ..candidate(held, self.store.damage(&held.id).is_some())
        }
    }

    /// Returns the progress of the scrub.
    #[must_use]
    pub fn status(&self) -> control::ScrubStatus {
        if let Err(error) = self.list(STATUS_AGE) {
            tracing::warn!(event = "scrub-status-stale", %error, "the scrub's status is an old one");
        }
        let (oldest, unverified_pages) = {
            let state = self.state();
            (
                state.schedule.oldest(unix_ms()),
                state.schedule.unverified_pages(),
            )
        };
        control::ScrubStatus {
            period_s: self.options.period.map_or(0, |period| period.as_secs()),
            oldest_s: oldest.as_secs(),
            pages: self.counters.pages.value(),
            damaged: self.counters.damaged.value(),
            mended: self.counters.mended.value(),
            quarantined: self.store.set_asides().len() as u64,
            unverified_pages,
        }
    }
}

/// The background thread. Dropping it ends the thread and saves the times of verifications.
pub struct Scrubbing {
    scrubber: Arc<Scrubber>,
    thread: JoinHandle<()>,
}

impl Drop for Scrubbing {
    fn drop(&mut self) {
        self.scrubber.stopped.store(true, Ordering::Relaxed);
        // Taking the lock ensures that the thread is not between its check and its sleep.
        drop(self.scrubber.state());
        self.scrubber.queue.woken.notify_all();
        let until = Instant::now() + PATIENCE;
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A request under way; counted until dropped.
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

fn candidate(held: &HeldCheckpoint, damaged: bool) -> ScrubCandidate<'_> {
    let record = held.record.as_ref();
    ScrubCandidate {
        id: &held.id,
        bytes: held.bytes,
        sealed_unix_ms: record.map_or(0, |record| record.created_unix_ms),
        damaged,
        copy: held.copy,
        cold_bytes: 0,
    }
}
