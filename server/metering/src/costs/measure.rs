//! What transfers took, kept as figures.
//!
//! A dump's time, as its client sees it, is taken apart: from the first byte to CLOSE answered is its *transfer*, which
//! goes by the bytes moved; the rest, from the opening of the session (CRIU starts, finds and stops the task) to the
//! first byte and from CLOSE to the seal (small images, the seal), is what a dump takes whatever its size. So
//!
//! dump_start + moved / bandwidth
//!
//! is what the next one will take. Bytes *moved*, not stored: an incremental dump without dirty pages brings the whole
//! memory and stores little of it. Its bandwidth is that of comparing, and has figures of its own.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use permafrost_protocol::control;
use permafrost_scheduling::estimator::{Channel, Direction, Estimator, Refused, Transfer};
use permafrost_scheduling::quantity::{Bytes, Moment, Seconds};
use permafrost_scheduling::size::{Accuracy, DumpKind, Dumped, Memory, SizePredictor};
use permafrost_store::clock::unix_ms;
use permafrost_store::{DumpDone, Event, Expected, RestoreDone};
use tokio::sync::broadcast;

use super::begin::Running;
use super::channels::{Lane, Peers};
use super::ended::{Ended, Whole};
use super::jobs::Jobs;
use super::report::QueueReport;
use super::start::Starting;

/// The daemon's beginning, as the figures count time: figures of earlier runs lie before it. Ten years, microseconds.
const BEGINNING_US: u64 = 315_360_000_000_000;

/// Events kept for a listener that is behind.
const EVENTS: usize = 1024;

/// A transfer that brought this part of all bytes of its time, or more, had the node to itself: 4/5.
const ALONE: (u64, u64) = (4, 5);

/// Fewest bytes from which anything follows for a link: below, its latency is measured.
const LINK_LEAST_BYTES: u64 = 1 << 20;

/// How a node's figures are kept.
#[derive(Clone, Debug)]
pub struct CostsConfig {
    /// Where figures are written down for the next start. Default: nowhere.
    pub figures: Option<PathBuf>,
    /// What kind of medium the node pretends to have; its figures are marked with it. Default: none.
    pub emulated: Option<String>,
    /// Jobs whose dumps are remembered; each takes up to 6 KiB. Default 10,000: with more, those that were not dumped
    /// for longest are predicted by their program.
    pub jobs: usize,
}

impl Default for CostsConfig {
    fn default() -> Self {
        Self {
            figures: None,
            emulated: None,
            jobs: 10_000,
        }
    }
}

/// Something read in order to be verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubDone {
    /// Bytes read.
    pub bytes: u64,
    /// How long that took, without a pause.
    pub elapsed: Duration,
}

/// Predictions against what then happened, the last 200 of each.
#[derive(Clone, Debug, Default)]
pub struct Comparisons {
    /// Bytes that dumps stored.
    pub stored: Accuracy,
    /// Bytes that dumps moved.
    pub moved: Accuracy,
    /// Time that dumps took.
    pub dump_time: Accuracy,
    /// Time that restores took.
    pub restore_time: Accuracy,
}

/// Things counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Transfers taken in as samples.
    pub samples: u64,
    /// Transfers that cannot be true, and were not taken in.
    pub refused: u64,
    /// Times that this node probed itself or a link.
    pub probes: u64,
    /// Reports of other nodes that were not believed as they were.
    pub doubts: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counted {
    pub(super) samples: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) probes: AtomicU64,
    pub(super) doubts: AtomicU64,
}

pub(super) type AskQueues = Box<dyn Fn() -> [QueueReport; 2] + Send + Sync>;

/// What this node measures of itself. One for a daemon.
pub struct Costs {
    pub(super) config: CostsConfig,
    began: Instant,
    /// The wall clock's word for the start: tells this run from others.
    pub(super) started_unix_ms: u64,
    pub(super) reports: AtomicU64,
    pub(super) queues: OnceLock<AskQueues>,
    pub(super) counted: Counted,
    /// Bytes given to restores.
    pub(super) read_bytes: AtomicU64,
    /// Dumps and restores under way.
    pub(super) under_way: AtomicUsize,
    events: broadcast::Sender<Event>,
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) estimator: Estimator,
    pub(super) peers: Peers,
    pub(super) sizes: SizePredictor,
    pub(super) jobs: Jobs,
    pub(super) running: Vec<Running>,
    pub(super) next_ticket: u64,
    pub(super) comparisons: Comparisons,
    pub(super) starting: Starting,
    pub(super) ended: Ended,
}

impl std::fmt::Debug for Costs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Costs").finish_non_exhaustive()
    }
}

impl Costs {
    /// With the figures of the last run, if they can be read; what cannot is logged and left where it is.
    #[must_use]
    pub fn new(config: CostsConfig) -> Arc<Self> {
        let jobs = config.jobs;
        let costs = Self {
            began: Instant::now(),
            started_unix_ms: unix_ms(),
            reports: AtomicU64::new(0),
            queues: OnceLock::new(),
            counted: Counted::default(),
            read_bytes: AtomicU64::new(0),
            under_way: AtomicUsize::new(0),
            events: broadcast::Sender::new(EVENTS),
            state: Mutex::new(State {
                estimator: Estimator::default(),
                peers: Peers::default(),
                // One more than jobs are remembered, as the oldest goes before the newest comes.
                sizes: SizePredictor::new(jobs.max(1) + 1),
                jobs: Jobs::new(jobs),
                running: Vec::new(),
                next_ticket: 0,
                comparisons: Comparisons::default(),
                starting: Starting::default(),
                ended: Ended::default(),
            }),
            config,
        };
        costs.load();
        Arc::new(costs)
    }

    /// Takes in a dump that was made.
    pub fn dumped(&self, done: &DumpDone<'_>) {
        let elapsed = done.whole.unwrap_or(done.transferred.elapsed);
        let now = self.now();
        let mut state = self.state();
        self.learn_size(&mut state, done, now);
        self.learn_time(&mut state, done, now);
        if let Some(expected) = &done.expected {
            state.comparisons.dumped(expected, done);
        }
        drop(state);
        self.tell(|| Event::Dumped {
            job: done.job.to_owned(),
            generation: done.generation,
            id: done.id.to_owned(),
            bytes: done.moved_bytes,
            elapsed,
        });
    }

    fn learn_size(&self, state: &mut State, done: &DumpDone<'_>, now: Moment) {
        if done.job.is_empty() {
            return;
        }
        let moved = Bytes::new(done.moved_bytes);
        // Without a look at the task, what came of it in full is the next best measure of it.
        let resident = done.memory.resident.unwrap_or(moved);
        let State { jobs, sizes, .. } = state;
        let (job, kind) = jobs.dumped(done.job, done.program, now, resident, sizes);
        let dumped = Dumped {
            at: now,
            kind: done.kind,
            memory: Memory {
                resident: Some(resident),
                ..done.memory
            },
            moved,
            stored: Bytes::new(done.stored_bytes),
        };
        if let Err(error) = sizes.dumped(job, kind, &dumped) {
            tracing::debug!(job = done.job, %error, "nothing learnt of the size of a dump");
        }
    }

    fn learn_time(&self, state: &mut State, done: &DumpDone<'_>, now: Moment) {
        let way = done.transferred;
        let (moved, all) = (done.moved_bytes, way.all_bytes.max(done.moved_bytes));
        let compared = done.kind == DumpKind::Incremental;
        let here = way.elapsed.saturating_sub(way.waited);
        let mut sample = |lane: Lane, elapsed: Duration| {
            let channel = lane.channel(Direction::Write);
            self.sample(&mut state.estimator, channel, now, moved, elapsed);
        };
        if is_alone(moved, all) {
            sample(Lane::of_dump(compared, false), here);
            if done.copied {
                sample(Lane::of_dump(compared, true), way.elapsed);
            }
        } else {
            sample(Lane::Together, share(here, moved, all));
        }
        if let Some(whole) = done.whole {
            let start = seconds(whole.saturating_sub(way.elapsed));
            for lane in [Lane::of_dump(compared, done.copied), Lane::Together] {
                let channel = lane.channel(Direction::Write);
                self.judged(state.estimator.answered(channel, now, now, start));
            }
            // The copies have figures of their own.
            self.learn_whole(
                state,
                Lane::of_dump(compared, false),
                now,
                &Whole {
                    id: done.id,
                    restored: false,
                    bytes: moved,
                    elapsed: whole,
                    apart: way.waited,
                },
            );
        }
    }

    fn learn_whole(&self, state: &mut State, lane: Lane, now: Moment, whole: &Whole<'_>) {
        if whole.bytes == 0 {
            return;
        }
        let direction = if whole.restored {
            Direction::Read
        } else {
            Direction::Write
        };
        let channel = lane.channel(direction);
        let transfer = Transfer {
            at: now,
            bytes: Bytes::new(whole.bytes),
            elapsed: seconds(whole.elapsed.saturating_sub(whole.apart)),
        };
        self.judged(state.estimator.took(channel, now, transfer));
        state.ended.remember(channel, transfer, whole);
    }

    /// Takes in how long a dump or a restore took whoever ran it. Whether it was measured here, a moment ago, and can have
    /// taken so long.
    pub fn took(&self, id: &str, restored: bool, elapsed: Duration) -> bool {
        let mut state = self.state();
        let Some((channel, corrected)) = state.ended.corrected(id, restored, elapsed) else {
            return false;
        };
        state.estimator.correct(channel, corrected)
    }

    /// Takes in a restore that was served.
    pub fn restored(&self, done: &RestoreDone<'_>) {
        let now = self.now();
        let mut state = self.state();
        let all = done.all_bytes.max(done.bytes);
        if done.here {
            let (lane, elapsed) = if is_alone(done.bytes, all) {
                (Lane::Whole, done.elapsed)
            } else {
                (Lane::Together, share(done.elapsed, done.bytes, all))
            };
            let channel = lane.channel(Direction::Read);
            self.sample(&mut state.estimator, channel, now, done.bytes, elapsed);
            if let Some(start) = done.start {
                let channel = Lane::Whole.channel(Direction::Read);
                let answered = state.estimator.answered(channel, now, now, seconds(start));
                self.judged(answered);
                self.learn_whole(
                    &mut state,
                    Lane::Whole,
                    now,
                    &Whole {
                        id: &done.checkpoint.id,
                        restored: true,
                        bytes: done.bytes,
                        elapsed: start + done.elapsed,
                        apart: Duration::ZERO,
                    },
                );
            }
        }
        let whole = done.start.unwrap_or_default() + done.elapsed;
        if let Some(expected) = done.expected.and_then(|expected| expected.whole) {
            let accuracy = &mut state.comparisons.restore_time;
            accuracy.compare(expected.value(), whole.as_secs_f64());
        }
        drop(state);
        self.tell(|| Event::Restored {
            job: done.checkpoint.job.clone(),
            generation: done.checkpoint.generation,
            id: done.checkpoint.id.clone(),
            bytes: done.bytes,
            elapsed: whole,
        });
    }

    /// Takes in that `bytes` of pages went over the link between this node and `peer` as fast as it took them.
    pub fn copied(&self, peer: &str, bytes: u64, elapsed: Duration) {
        if bytes < LINK_LEAST_BYTES {
            return;
        }
        let now = self.now();
        let mut state = self.state();
        if let Some(link) = state.peers.link(peer) {
            self.sample(&mut state.estimator, link, now, bytes, elapsed);
        }
    }

    /// Takes in that they went over it as fast as they came, which it may well be faster than: counts where nothing
    /// better is known.
    pub fn copied_at_least(&self, peer: &str, bytes: u64, elapsed: Duration) {
        let now = self.now();
        let size = Bytes::new(bytes);
        let known = {
            let state = self.state();
            let link = state.peers.known(peer);
            link.and_then(|link| state.estimator.rates(link, now).of(size).known().ok())
        };
        let is_news = known.is_none_or(|known| size.at(known.p50).value() > elapsed.as_secs_f64());
        if is_news {
            self.copied(peer, bytes, elapsed);
        }
    }

    /// Takes in what was read to verify it, at full speed. That is the medium alone, with one thread: it counts only
    /// where no restore does.
    pub fn scrubbed(&self, done: &ScrubDone) {
        let now = self.now();
        let mut state = self.state();
        let channel = Lane::Probed.channel(Direction::Read);
        self.sample(&mut state.estimator, channel, now, done.bytes, done.elapsed);
    }

    /// Learns the sizes of dumps that were made before the start, from their lines of the listing. The memory of their
    /// tasks is not known any more: what came of each stands for it.
    pub fn learn_history(&self, records: &[control::Checkpoint]) {
        let (now, today) = (self.now(), unix_ms());
        let mut state = self.state();
        let State { jobs, sizes, .. } = &mut *state;
        let mut records: Vec<_> = records
            .iter()
            .filter(|record| record.generation > 0 && record.memory_bytes > 0)
            .collect();
        records.sort_by_key(|record| record.created_unix_ms);
        for record in records {
            let age = Seconds::from_millis(today.saturating_sub(record.created_unix_ms));
            let (at, memory) = (now.before(age), Bytes::new(record.memory_bytes));
            let (job, kind) = jobs.dumped(&record.job, "", at, memory, sizes);
            let kind_of_dump = match record.parent_generation {
                0 => DumpKind::Full,
                _ => DumpKind::Incremental,
            };
            let dumped = Dumped {
                at,
                kind: kind_of_dump,
                memory: Memory {
                    resident: Some(memory),
                    dirty_pages: None,
                },
                moved: memory,
                stored: Bytes::new(record.added_bytes),
            };
            if let Err(error) = sizes.dumped(job, kind, &dumped) {
                tracing::debug!(job = record.job, %error, "nothing learnt of an earlier dump");
            }
        }
    }

    /// Who says how long the queues are, writing first. Without it a report counts what is running, as far as this node
    /// knows it. False if it is known already.
    pub fn set_queues(&self, ask: impl Fn() -> [QueueReport; 2] + Send + Sync + 'static) -> bool {
        self.queues.set(Box::new(ask)).is_ok()
    }

    /// Whether a dump or a restore is under way. Costs a load.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    /// Everything that happens from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// How far predictions were off so far.
    #[must_use]
    pub fn accuracy(&self) -> Comparisons {
        self.state().comparisons.clone()
    }

    /// What was counted.
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        let value = |number: &AtomicU64| number.load(Ordering::Relaxed);
        Numbers {
            samples: value(&self.counted.samples),
            refused: value(&self.counted.refused),
            probes: value(&self.counted.probes),
            doubts: value(&self.counted.doubts),
        }
    }

    /// So many things in another node's report were not believed.
    pub(super) fn doubted(&self, doubts: u64) {
        self.counted.doubts.fetch_add(doubts, Ordering::Relaxed);
    }

    /// Tells whoever listens; made only where somebody does.
    pub fn tell(&self, event: impl FnOnce() -> Event) {
        if self.events.receiver_count() > 0 {
            // The last one has just gone.
            let _ = self.events.send(event());
        }
    }

    pub(super) fn sample(
        &self,
        estimator: &mut Estimator,
        channel: Channel,
        now: Moment,
        bytes: u64,
        elapsed: Duration,
    ) {
        if bytes == 0 {
            // A dump of which nothing moved says nothing of a bandwidth.
            return;
        }
        let transfer = Transfer {
            at: now,
            bytes: Bytes::new(bytes),
            elapsed: seconds(elapsed),
        };
        self.judged(estimator.transferred(channel, now, transfer));
    }

    pub(super) fn judged(&self, taken: Result<(), Refused>) {
        match taken {
            Ok(()) => self.counted.samples.fetch_add(1, Ordering::Relaxed),
            Err(error) => {
                tracing::debug!(%error, "a measurement was not taken in");
                self.counted.refused.fetch_add(1, Ordering::Relaxed)
            }
        };
    }

    pub(super) fn now(&self) -> Moment {
        let since = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        Moment::from_micros(BEGINNING_US.saturating_add(since))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // Figures are changed one by one; half a dump's are as good as a whole one's.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Comparisons {
    fn dumped(&mut self, expected: &Expected, done: &DumpDone<'_>) {
        let (stored, moved) = (done.stored_bytes as f64, done.moved_bytes as f64);
        self.stored.compare(expected.stored.count() as f64, stored);
        self.moved.compare(expected.moved.count() as f64, moved);
        let (predicted, took) = match done.whole {
            Some(whole) => (expected.whole, whole),
            None => (expected.transfer, done.transferred.elapsed),
        };
        if let Some(predicted) = predicted {
            self.dump_time
                .compare(predicted.value(), took.as_secs_f64());
        }
    }
}

/// Whether a transfer had the node to itself, or nearly so.
fn is_alone(own_bytes: u64, all_bytes: u64) -> bool {
    let (part, whole) = ALONE;
    u128::from(own_bytes) * u128::from(whole) >= u128::from(all_bytes) * u128::from(part)
}

/// The part of `elapsed` that is `own` of `all` bytes: at the rate of all.
fn share(elapsed: Duration, own: u64, all: u64) -> Duration {
    if all == 0 {
        return elapsed;
    }
    elapsed.mul_f64((own as f64 / all as f64).min(1.0))
}

/// A time as the figures have it. What the clock of a machine says is always one.
pub(super) fn seconds(time: Duration) -> Seconds {
    Seconds::new(time.as_secs_f64()).unwrap_or(Seconds::MAX)
}
