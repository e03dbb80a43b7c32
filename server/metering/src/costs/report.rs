//! Report of a node to the others, and its evaluation by them.
//!
//! Reports travel as JSON in the node's facts. A figure that cannot be read (a rate of 0 or 10^18, a negative
//! time) is not believed; the rest of the report, and of the facts, is read all the same.

mod believe;
mod lenient;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use permafrost_scheduling::cost::{SwapFigures, TierRoom};
use permafrost_scheduling::estimator::{Direction, Line, SizedRates};
use permafrost_scheduling::figure::{Figure, Missing, What};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use serde::{Deserialize, Serialize};

use super::channels::Lane;
use super::predict::first_known;
use super::state::{Costs, State};
use super::swap;
use crate::QueueReport;

pub use believe::{Believed, Reports, believe};
pub use lenient::report as lenient_report;

/// Relative change of a figure that is worth publishing: 5 %.
const WORTH_TELLING: f64 = 0.05;

/// Figures that a node reports about itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeReport {
    /// Number that grows with every report of this run of the daemon.
    #[serde(deserialize_with = "lenient::field")]
    pub sequence: u64,
    /// Start of this run, milliseconds since the Unix epoch by the node's clock. Only distinguishes runs.
    #[serde(deserialize_with = "lenient::field")]
    pub started_unix_ms: u64,
    /// Bandwidth of full dumps, bytes moved.
    #[serde(deserialize_with = "lenient::field")]
    pub write: SizedRates,
    /// Bandwidth of dumps that are compared with the checkpoint before, bytes moved.
    #[serde(deserialize_with = "lenient::field")]
    pub compare: SizedRates,
    /// Bandwidth of restores.
    #[serde(deserialize_with = "lenient::field")]
    pub read: SizedRates,
    /// Bandwidth at which pages come back from an object store.
    #[serde(deserialize_with = "lenient::field")]
    pub recall: SizedRates,
    /// Bandwidth at which pages follow to processes that were restored lazily.
    #[serde(deserialize_with = "lenient::field")]
    pub lazy: SizedRates,
    /// Fixed time of a dump, which does not depend on its size.
    #[serde(deserialize_with = "lenient::field")]
    pub dump_start: Figure<Seconds>,
    /// Fixed time of a restore, which does not depend on its size.
    #[serde(deserialize_with = "lenient::field")]
    pub restore_start: Figure<Seconds>,
    /// Time until the processes of a lazy restore run.
    #[serde(deserialize_with = "lenient::field")]
    pub lazy_start: Figure<Seconds>,
    /// Queue of dumps.
    #[serde(deserialize_with = "lenient::field")]
    pub write_queue: QueueReport,
    /// Queue of restores.
    #[serde(deserialize_with = "lenient::field")]
    pub read_queue: QueueReport,
    /// Tiers of the region, the fastest first. The bandwidths of dumps are of the one that they go to.
    #[serde(deserialize_with = "lenient::field")]
    pub tiers: Vec<TierRoom>,
    /// Bandwidth of the links between this node and others, by name.
    #[serde(deserialize_with = "lenient::field")]
    pub links: BTreeMap<String, SizedRates>,
    /// Memory and swap of the machine; missing on one without swap.
    #[serde(deserialize_with = "lenient::field")]
    pub swap: Option<SwapFigures>,
    /// Kind of medium that the node emulates.
    #[serde(deserialize_with = "lenient::field")]
    pub emulated: Option<String>,
    /// True if the report could not be read at all.
    #[serde(skip)]
    pub unreadable: bool,
}

const fn not_measured(what: What) -> SizedRates {
    SizedRates::uniform(Figure::Unknown {
        why: Missing::NotMeasured { what },
    })
}

impl Default for NodeReport {
    /// Returns the report of a node that has measured nothing.
    fn default() -> Self {
        let no_time = Figure::Unknown {
            why: Missing::NotMeasured {
                what: What::Latency,
            },
        };
        Self {
            sequence: 0,
            started_unix_ms: 0,
            write: not_measured(What::WriteBandwidth),
            compare: not_measured(What::WriteBandwidth),
            read: not_measured(What::ReadBandwidth),
            recall: not_measured(What::RecallBandwidth),
            lazy: not_measured(What::LazyBandwidth),
            dump_start: no_time,
            restore_start: no_time,
            lazy_start: no_time,
            write_queue: QueueReport::default(),
            read_queue: QueueReport::default(),
            tiers: Vec::new(),
            links: BTreeMap::new(),
            swap: None,
            emulated: None,
            unreadable: false,
        }
    }
}

impl Costs {
    /// Returns this node's current report. Sorts the samples of its channels: to be called once a second, not for
    /// every request.
    #[must_use]
    pub fn report(&self) -> NodeReport {
        let now = self.now();
        let queues = self.queues.get().map(|ask| ask());
        let tiers = self.look_at_tiers();
        let reading = swap::read();
        let mut state = self.state();
        let swap = state.paging.update(reading, now);
        let state = state;
        let [write_queue, read_queue] = queues.unwrap_or_else(|| {
            [Direction::Write, Direction::Read].map(|direction| under_way(&state, direction))
        });
        let rates = |direction, lane| state.rates(direction, lane, now);
        let best_known = |direction| {
            let lanes = [Lane::Whole, Lane::Together, Lane::Probed];
            let mut all = lanes.map(|lane| rates(direction, lane)).into_iter();
            let is_known = |rates: &SizedRates| rates.sustained().known().is_ok();
            all.find(is_known)
                .unwrap_or_else(|| rates(direction, Lane::Whole))
        };
        let links = state.peers.links();
        let (full, compared) = dump_lines(&state, now);
        let restores = line(&state, Direction::Read, Lane::Whole, now, None);
        let start_of = |line: Option<Line>| line.map(|line| Figure::Known(line.start));
        NodeReport {
            sequence: self.reports.fetch_add(1, Ordering::Relaxed) + 1,
            started_unix_ms: self.started_unix_ms,
            write: full.map_or_else(|| best_known(Direction::Write), |line| line.rates),
            compare: compared.map_or_else(
                || rates(Direction::Write, Lane::Compared),
                |line| line.rates,
            ),
            read: restores.map_or_else(|| best_known(Direction::Read), |line| line.rates),
            recall: rates(Direction::Read, Lane::Recalled),
            lazy: rates(Direction::Read, Lane::Lazy),
            dump_start: start_of(full.or(compared)).unwrap_or_else(|| {
                first_known(
                    state.start(Direction::Write, Lane::Together, now),
                    state.start(Direction::Write, Lane::Whole, now),
                )
            }),
            restore_start: start_of(restores)
                .unwrap_or_else(|| state.start(Direction::Read, Lane::Whole, now)),
            lazy_start: state.start(Direction::Read, Lane::Lazy, now),
            write_queue,
            read_queue,
            tiers,
            links: links
                .map(|(peer, link)| (peer.to_owned(), state.estimator.rates(link, now)))
                .filter(|(_, rates)| rates.sustained().known().is_ok())
                .collect(),
            swap,
            emulated: self
                .config
                .emulated
                .clone()
                .or_else(|| state.starting.emulated.clone()),
            unreadable: false,
        }
    }
}

fn line(
    state: &State,
    direction: Direction,
    lane: Lane,
    now: Moment,
    start: Option<Seconds>,
) -> Option<Line> {
    let seen = first_known(
        state.start(direction, lane, now),
        state.start(direction, Lane::Together, now),
    );
    let unless_told = seen.known().map_or(Seconds::ZERO, |seen| seen.p50);
    let channel = state.channel(direction, lane);
    state.estimator.line(channel, now, start, unless_told)
}

/// Returns the measurements of full dumps and of compared ones. Both have the same fixed time: that of the kind
/// with more samples.
fn dump_lines(state: &State, now: Moment) -> (Option<Line>, Option<Line>) {
    let of = |lane, start| line(state, Direction::Write, lane, now, start);
    let (full, compared) = (of(Lane::Whole, None), of(Lane::Compared, None));
    match (full, compared) {
        (Some(one), Some(other)) if one.start.samples < other.start.samples => {
            (of(Lane::Whole, Some(other.start.p50)), compared)
        }
        (Some(one), Some(_)) => (full, of(Lane::Compared, Some(one.start.p50))),
        one_or_none => one_or_none,
    }
}

/// Returns the queue of a node without waiting transfers: the running ones.
fn under_way(state: &State, direction: Direction) -> QueueReport {
    let running = state.running.iter();
    let mut report = QueueReport::default();
    for one in running.filter(|one| one.direction == direction) {
        report.bytes = report.bytes.saturating_add(one.left());
        report.running = report.running.saturating_add(1);
    }
    report
}

impl NodeReport {
    /// Returns true if the queues differ by enough to be worth publishing.
    #[must_use]
    pub fn queues_differ(&self, other: &Self) -> bool {
        let differ = |one: &QueueReport, other: &QueueReport| {
            let counts =
                |queue: &QueueReport| (queue.running, queue.waiting, queue.reserved, queue.slots);
            counts(one) != counts(other) || is_news(one.bytes as f64, other.bytes as f64)
        };
        differ(&self.write_queue, &other.write_queue) || differ(&self.read_queue, &other.read_queue)
    }

    /// Returns true if the figures differ by enough to be worth publishing; ages and numbers of samples do not
    /// count.
    #[must_use]
    pub fn figures_differ(&self, other: &Self) -> bool {
        let rates = |one: &SizedRates, other: &SizedRates| {
            one.by_class()
                .zip(other.by_class())
                .any(|((_, one), (_, other))| figures_differ(&one, &other, f64::from))
        };
        let times =
            |one: &Figure<Seconds>, other: &Figure<Seconds>| figures_differ(one, other, f64::from);
        rates(&self.write, &other.write)
            || rates(&self.compare, &other.compare)
            || rates(&self.read, &other.read)
            || rates(&self.recall, &other.recall)
            || rates(&self.lazy, &other.lazy)
            || times(&self.dump_start, &other.dump_start)
            || times(&self.restore_start, &other.restore_start)
            || times(&self.lazy_start, &other.lazy_start)
            || self.emulated != other.emulated
            || swaps_differ(self.swap.as_ref(), other.swap.as_ref())
            || !self
                .tiers
                .iter()
                .map(|tier| &tier.tier)
                .eq(other.tiers.iter().map(|tier| &tier.tier))
            || !self.links.keys().eq(other.links.keys())
            || self
                .links
                .values()
                .zip(other.links.values())
                .any(|(one, other)| rates(one, other))
    }

    /// Returns the four numbers that the placement of copies uses, bytes and bytes a second: writing, reading,
    /// network (the median of its links), queued. 0 where a figure is not known.
    #[must_use]
    pub fn in_brief(&self) -> [u64; 4] {
        let rate = |rates: &SizedRates| {
            let known = rates.of(Bytes::mib(1024)).known();
            known.map_or(0, |rate| whole(rate.p50))
        };
        let mut links: Vec<u64> = self.links.values().map(rate).collect();
        links.sort_unstable();
        let median = links.get(links.len() / 2).copied().unwrap_or(0);
        [
            rate(&self.write),
            rate(&self.read),
            median,
            self.write_queue.bytes,
        ]
    }
}

/// Returns the rate in whole bytes per second.
fn whole(rate: BytesPerSecond) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate lies between 1 and 10^15"
    )]
    let whole = rate.value() as u64;
    whole
}

fn figures_differ<T: Copy>(one: &Figure<T>, other: &Figure<T>, number: impl Fn(T) -> f64) -> bool {
    match (one.known(), other.known()) {
        (Ok(one), Ok(other)) => is_news(number(one.p50), number(other.p50)),
        (Err(_), Err(_)) => false,
        _ => true,
    }
}

fn swaps_differ(one: Option<&SwapFigures>, other: Option<&SwapFigures>) -> bool {
    let bytes = |one: Bytes, other: Bytes| is_news(one.count() as f64, other.count() as f64);
    let rates = |one, other| figures_differ(one, other, BytesPerSecond::value);
    match (one, other) {
        (Some(one), Some(other)) => {
            bytes(one.free_memory, other.free_memory)
                || bytes(one.free_swap, other.free_swap)
                || rates(&one.write, &other.write)
                || rates(&one.read, &other.read)
        }
        (None, None) => false,
        _ => true,
    }
}

fn is_news(one: f64, other: f64) -> bool {
    (one - other).abs() > WORTH_TELLING * one.abs().max(other.abs())
}
