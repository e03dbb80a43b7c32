//! Measurements of this node, for those that record, predict, report and save them.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use permafrost_scheduling::cost::TierRoom;
use permafrost_scheduling::estimator::{Channel, Direction, Estimator, Refused};
use permafrost_scheduling::quantity::Moment;
use permafrost_scheduling::size::{Accuracy, SizePredictor};
use permafrost_store::StoreEvent;
use permafrost_store::clock::unix_ms;
use tokio::sync::broadcast;

use super::channels::{Lane, Peers};
use super::ended::Ended;
use super::jobs::Jobs;
use super::running::Running;
use super::swap::Paging;
use super::tiers::Tiers;
use crate::QueueReport;

/// Start of the daemon on the figures' time scale, so that figures of earlier runs lie before it. Ten years,
/// microseconds.
const BEGINNING_US: u64 = 315_360_000_000_000;

/// Number of events kept for a slow subscriber.
const EVENTS: usize = 1024;

/// Configuration of the measurements of a node.
#[derive(Clone, Debug)]
pub struct CostsConfig {
    /// File to which figures are saved for the next start. Default: none.
    pub figures: Option<PathBuf>,
    /// Kind of medium that the node emulates; its figures are marked with it. Default: none.
    pub emulated: Option<String>,
    /// Maximum number of jobs whose dumps are remembered; each takes up to 6 KiB. Default 10,000: beyond it, the
    /// jobs with the oldest dumps are predicted by their program.
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

/// Facts about the origin of the figures.
#[derive(Clone, Debug, Default)]
pub(super) struct Starting {
    pub(super) emulated: Option<String>,
}

/// Accuracy of predictions against measurements, over the last 200 of each.
#[derive(Clone, Debug, Default)]
pub struct Comparisons {
    /// Accuracy for bytes that dumps stored.
    pub stored: Accuracy,
    /// Accuracy for bytes that dumps moved.
    pub moved: Accuracy,
    /// Accuracy for the duration of dumps.
    pub dump_time: Accuracy,
    /// Accuracy for the duration of restores.
    pub restore_time: Accuracy,
    /// The newest dumps and restores with their predictions, the newest last.
    pub recent: VecDeque<TransferOutcome>,
}

/// Most dumps and restores that are kept in [`Comparisons::recent`].
pub(super) const OUTCOMES_KEPT: usize = 50;

/// Predicted and measured duration of a dump or a restore.
#[derive(Clone, Debug, PartialEq)]
pub struct TransferOutcome {
    /// Dump or restore.
    pub direction: Direction,
    /// Job; empty for a parked dump.
    pub job: String,
    /// Generation; 0 for a parked dump.
    pub generation: u64,
    /// Bytes that it moved.
    pub bytes: u64,
    /// Predicted duration, seconds; `None` if it was not predicted.
    pub predicted_s: Option<f64>,
    /// Measured duration of what was predicted.
    pub took: Duration,
    /// Time at which it ended.
    pub ended: Instant,
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CostCounters {
    /// Transfers recorded as samples.
    pub samples: u64,
    /// Transfers refused as samples because they cannot be true.
    pub refused: u64,
    /// Probes that this node made of itself or of a link.
    pub probes: u64,
    /// Figures in reports of other nodes that were not believed.
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

pub(super) type AskTiers = Box<dyn Fn() -> Vec<TierRoom> + Send + Sync>;

/// Measurements and predictions of this node. A daemon has one.
pub struct Costs {
    pub(super) config: CostsConfig,
    began: Instant,
    /// Wall-clock time of the start, which distinguishes this run from others.
    pub(super) started_unix_ms: u64,
    pub(super) reports: AtomicU64,
    pub(super) queues: OnceLock<AskQueues>,
    tiers: OnceLock<AskTiers>,
    pub(super) counted: Counted,
    /// Bytes given to restores.
    pub(super) read_bytes: AtomicU64,
    /// Dumps and restores under way.
    pub(super) under_way: AtomicUsize,
    events: broadcast::Sender<StoreEvent>,
    state: Mutex<State>,
}

pub(super) struct State {
    pub(super) estimator: Estimator,
    pub(super) peers: Peers,
    pub(super) tiers: Tiers,
    pub(super) sizes: SizePredictor,
    pub(super) jobs: Jobs,
    pub(super) running: Vec<Running>,
    pub(super) next_ticket: u64,
    pub(super) comparisons: Comparisons,
    pub(super) starting: Starting,
    pub(super) ended: Ended,
    pub(super) paging: Paging,
}

impl std::fmt::Debug for Costs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Costs").finish_non_exhaustive()
    }
}

impl Costs {
    /// Makes the measurements without any figures.
    pub(super) fn empty(config: CostsConfig) -> Self {
        let jobs = config.jobs;
        Self {
            began: Instant::now(),
            started_unix_ms: unix_ms(),
            reports: AtomicU64::new(0),
            queues: OnceLock::new(),
            tiers: OnceLock::new(),
            counted: Counted::default(),
            read_bytes: AtomicU64::new(0),
            under_way: AtomicUsize::new(0),
            events: broadcast::Sender::new(EVENTS),
            state: Mutex::new(State {
                estimator: Estimator::default(),
                peers: Peers::default(),
                tiers: Tiers::default(),
                // One more than the jobs that are remembered, because the oldest goes before the newest comes.
                sizes: SizePredictor::new(jobs.max(1) + 1),
                jobs: Jobs::new(jobs),
                running: Vec::new(),
                next_ticket: 0,
                comparisons: Comparisons::default(),
                starting: Starting::default(),
                ended: Ended::default(),
                paging: Paging::default(),
            }),
            config,
        }
    }

    /// Sets the function that reports the queues' lengths, writes first, once. Without it a report counts the
    /// transfers that are running, as far as this node knows them. Returns false if it is set already.
    pub fn set_queues(&self, ask: impl Fn() -> [QueueReport; 2] + Send + Sync + 'static) -> bool {
        self.queues.set(Box::new(ask)).is_ok()
    }

    /// Sets the function that reports the region's tiers, the fastest first, once. Without it all dumps go to one tier.
    /// Returns false if it is set already.
    pub fn set_tiers(&self, ask: impl Fn() -> Vec<TierRoom> + Send + Sync + 'static) -> bool {
        self.tiers.set(Box::new(ask)).is_ok()
    }

    /// Finds out which tier dumps go to, and returns all.
    pub(super) fn look_at_tiers(&self) -> Vec<TierRoom> {
        let tiers = self.tiers.get().map(|ask| ask()).unwrap_or_default();
        self.state().tiers.set(&tiers);
        tiers
    }

    /// Returns true if a dump or a restore is under way. Costs a load.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > 0
    }

    /// Subscribes to all events from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<StoreEvent> {
        self.events.subscribe()
    }

    /// Returns the accuracy of the predictions so far.
    #[must_use]
    pub fn accuracy(&self) -> Comparisons {
        self.state().comparisons.clone()
    }

    /// Returns the counters.
    #[must_use]
    pub fn numbers(&self) -> CostCounters {
        let value = |number: &AtomicU64| number.load(Ordering::Relaxed);
        CostCounters {
            samples: value(&self.counted.samples),
            refused: value(&self.counted.refused),
            probes: value(&self.counted.probes),
            doubts: value(&self.counted.doubts),
        }
    }

    /// Counts figures in another node's report that were not believed.
    pub(super) fn doubted(&self, doubts: u64) {
        self.counted.doubts.fetch_add(doubts, Ordering::Relaxed);
    }

    /// Publishes an event; it is made only if there is a subscriber.
    pub fn tell(&self, event: impl FnOnce() -> StoreEvent) {
        if self.events.receiver_count() > 0 {
            // The last subscriber has just gone.
            let _ = self.events.send(event());
        }
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
        // Figures are changed one by one; those of half a dump are as valid as those of a whole one.
        self.state.lock()
    }
}

impl State {
    /// Returns the channel of a lane, of dumps that of the tier that they go to.
    pub(super) fn channel(&self, direction: Direction, lane: Lane) -> Channel {
        lane.channel(direction, self.tiers.current())
    }

    /// Returns the number of a tier, without a name of the one that dumps go to.
    pub(super) fn tier_of(&mut self, name: &str) -> u16 {
        match name {
            "" => self.tiers.current(),
            name => self.tiers.number(name),
        }
    }
}
