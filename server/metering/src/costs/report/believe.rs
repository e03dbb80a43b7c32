//! Evaluates another node's report, which may be false.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::{NodeFigures, SwapFigures, TierRoom};
use permafrost_scheduling::estimator::{EstimatorConfig, OBJECT_STORE_STALE_AFTER, SizedRates};
use permafrost_scheduling::figure::{Estimate, Figure, Missing, What};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_scheduling::queue::Ahead;

use super::super::seconds;
use super::super::state::Costs;
use super::NodeReport;
use crate::QueueReport;
use permafrost_scheduling::estimator::LAZY_STALE_AFTER;

/// Longest fixed time of a dump or restore that is believed: an hour.
const LONGEST_START_S: f64 = 3600.0;

/// Longest queue that is believed: a pebibyte, days for any node.
const LONGEST_QUEUE_BYTES: u64 = 1 << 50;

/// Largest memory or swap that is believed to be free: a pebibyte.
const LARGEST_MEMORY: Bytes = Bytes::new(1 << 50);

/// Maximum number of transfers that are believed to run, wait or be reserved.
const MOST_TRANSFERS: u32 = 1_000_000;

/// Age up to which the reported length of a queue is used: reports come at least every half minute.
const QUEUE_HOLDS: Duration = Duration::from_secs(120);

/// Maximum number of tiers of one node that are read.
const MOST_TIERS: usize = 16;

/// Longest name of a tier, bytes.
const LONGEST_TIER: usize = 64;

/// Maximum number of links of one node that are read.
const MOST_LINKS: usize = 4096;

/// Maximum number of doubts that are described in words; more of them add no information.
const MOST_DOUBTS: usize = 8;

/// Part of a node's report that is believed.
#[derive(Clone, Debug, PartialEq)]
pub struct Believed {
    /// Figures of the node; one that is not believed is unknown, with that reason.
    pub figures: NodeFigures,
    /// Tiers of the node, the fastest first; at most 16.
    pub tiers: Vec<TierRoom>,
    /// Links of the node to others, by name.
    pub links: BTreeMap<String, SizedRates>,
    /// Memory and swap of the machine; missing on one without swap, and where the report is too old.
    pub swap: Option<SwapFigures>,
    /// Queue of dumps, as reported; empty where the report is not believed.
    pub write_queue: QueueReport,
    /// Queue of restores, as reported; empty where the report is not believed.
    pub read_queue: QueueReport,
    /// Kind of medium that the node emulates.
    pub emulated: Option<String>,
    /// Descriptions of the figures that are not believed; at most eight.
    pub doubts: Vec<String>,
}

impl Believed {
    /// Returns the result for a node that reports nothing.
    #[must_use]
    pub fn nothing(id: NodeId) -> Self {
        Self {
            figures: NodeFigures::unknown(id),
            tiers: Vec::new(),
            links: BTreeMap::new(),
            swap: None,
            write_queue: QueueReport::default(),
            read_queue: QueueReport::default(),
            emulated: None,
            doubts: Vec::new(),
        }
    }
}

/// Evaluates `report`, which came `age` ago, after `previous`. Costs a check of each figure.
///
/// A report that is older than the previous one of the same run of the daemon is not believed at all, and the
/// previous one stays in use.
#[must_use]
pub fn believe(
    previous: Option<&NodeReport>,
    report: &NodeReport,
    age: Duration,
    id: NodeId,
) -> Believed {
    let mut judge = Judge {
        age: seconds(age),
        doubts: Vec::new(),
    };
    let mut report = report;
    if report.unreadable {
        judge.doubt("its report cannot be read".to_owned());
    }
    if let Some(previous) = previous.filter(|previous| is_backwards(previous, report)) {
        let (last, now) = (previous.sequence, report.sequence);
        judge.doubt(format!("its report {now} came after report {last}"));
        report = previous;
    }
    let (write, read) = (What::WriteBandwidth, What::ReadBandwidth);
    let (dumps, restores) = ("queue of dumps", "queue of restores");
    let usual = EstimatorConfig::default().stale_after;
    let figures = NodeFigures {
        node: id,
        write: judge.rates("bandwidth for writing", write, &report.write),
        compare: judge.rates("bandwidth for comparing", write, &report.compare),
        read: judge.rates("bandwidth for reading", read, &report.read),
        recall: judge.rates(
            "bandwidth of the object store",
            What::RecallBandwidth,
            &report.recall,
        ),
        lazy: judge.rates(
            "bandwidth of lazy restores",
            What::LazyBandwidth,
            &report.lazy,
        ),
        write_queue: judge.queue(dumps, &report.write_queue),
        read_queue: judge.queue(restores, &report.read_queue),
        write_drain: judge.drain(dumps, write, &report.write_queue, &report.write),
        read_drain: judge.drain(restores, read, &report.read_queue, &report.read),
        dump_start: judge.start("time before a dump", &report.dump_start, usual),
        restore_start: judge.start("time before a restore", &report.restore_start, usual),
        lazy_start: judge.start(
            "time before a lazy restore",
            &report.lazy_start,
            LAZY_STALE_AFTER,
        ),
    };
    let links = judge.links(&report.links);
    let known = |figure: &Figure<Bytes>, queue: QueueReport| match figure {
        Figure::Known(_) => queue,
        Figure::Unknown { .. } => QueueReport::default(),
    };
    Believed {
        tiers: judge.tiers(&report.tiers),
        swap: judge.swap(report.swap),
        links,
        write_queue: known(&figures.write_queue, report.write_queue),
        read_queue: known(&figures.read_queue, report.read_queue),
        emulated: report.emulated.clone(),
        figures,
        doubts: judge.doubts,
    }
}

fn is_backwards(previous: &NodeReport, report: &NodeReport) -> bool {
    previous.started_unix_ms == report.started_unix_ms
        && report.sequence < previous.sequence
        && !report.unreadable
}

struct Judge {
    /// Age of the report.
    age: Seconds,
    doubts: Vec<String>,
}

impl Judge {
    fn doubt(&mut self, words: String) {
        if self.doubts.len() < MOST_DOUBTS {
            self.doubts.push(words);
        }
    }

    fn refuse<T>(&mut self, what: What, words: String) -> Figure<T> {
        self.doubt(words);
        Figure::Unknown {
            why: Missing::NotBelieved { what, refused: 1 },
        }
    }

    fn rates(&mut self, name: &str, what: What, rates: &SizedRates) -> SizedRates {
        rates.map(|figure| self.rate(name, what, figure))
    }

    fn rate(
        &mut self,
        name: &str,
        what: What,
        figure: Figure<BytesPerSecond>,
    ) -> Figure<BytesPerSecond> {
        match figure {
            Figure::Known(known) if !is_plausible(known.p50) => {
                self.refuse(what, format!("its {name} cannot be {}", known.p50))
            }
            // The p95 may be anything: lanes that were never measured have a wide spread.
            Figure::Known(known) if known.p95 > known.p50 => self.refuse(
                what,
                format!(
                    "its {name} is {} in bad cases, and {} in half of all",
                    known.p95, known.p50
                ),
            ),
            Figure::Known(known) => self.aged(what, known),
            Figure::Unknown { why } => self.unknown(name, what, why),
        }
    }

    /// Judges a fixed time, which holds for `limit`.
    fn start(&mut self, name: &str, figure: &Figure<Seconds>, limit: Seconds) -> Figure<Seconds> {
        let what = What::Latency;
        match *figure {
            Figure::Known(known) if known.p50.value() > LONGEST_START_S => {
                self.refuse(what, format!("its {name} cannot be {}", known.p50))
            }
            Figure::Known(known) if known.p95 < known.p50 => self.refuse(
                what,
                format!(
                    "its {name} is {} in bad cases, and {} in half of all",
                    known.p95, known.p50
                ),
            ),
            Figure::Known(known) => self.within(what, known, limit),
            Figure::Unknown { why } => self.unknown(name, what, why),
        }
    }

    fn queue(&mut self, name: &str, queue: &QueueReport) -> Figure<Bytes> {
        let what = What::Queue;
        let most = queue.running.max(queue.waiting).max(queue.reserved);
        if queue.bytes > LONGEST_QUEUE_BYTES || most > MOST_TRANSFERS {
            let bytes = Bytes::new(queue.bytes);
            return self.refuse(
                what,
                format!("its {name} cannot hold {bytes} in {most} transfers"),
            );
        }
        let limit = seconds(QUEUE_HOLDS);
        if self.age > limit {
            let age = self.age;
            return Missing::TooOld { what, age, limit }.into();
        }
        Figure::Known(Estimate {
            age: self.age,
            ..Estimate::given(before_a_newcomer(queue))
        })
    }

    /// Returns the drain rate of a queue: one number, with the relative spread of what one transfer `alone`
    /// achieves.
    fn drain(
        &mut self,
        name: &str,
        what: What,
        queue: &QueueReport,
        alone: &SizedRates,
    ) -> Figure<BytesPerSecond> {
        let Some(told) = queue.bytes_per_s else {
            return Missing::NotMeasured { what }.into();
        };
        let rate = BytesPerSecond::new(told).ok();
        let Some(p50) = rate.filter(|rate| is_plausible(*rate)) else {
            return self.refuse(what, format!("its {name} cannot move {told} B/s"));
        };
        let slow = alone.sustained().known().map_or(1.0, |alone| {
            (alone.p95.value() / alone.p50.value()).min(1.0)
        });
        let p95 = BytesPerSecond::new(told * slow).unwrap_or(p50);
        self.aged(
            what,
            Estimate {
                p95,
                ..Estimate::given(p50)
            },
        )
    }

    fn tiers(&mut self, tiers: &[TierRoom]) -> Vec<TierRoom> {
        let is_plausible = |tier: &TierRoom| {
            tier.tier.len() <= LONGEST_TIER && tier.free_bytes <= tier.capacity_bytes
        };
        if tiers.len() > MOST_TIERS || !tiers.iter().all(is_plausible) {
            self.doubt("its tiers make no sense".to_owned());
            return Vec::new();
        }
        tiers.to_vec()
    }

    /// Returns memory and swap, which change as fast as queues do.
    fn swap(&mut self, swap: Option<SwapFigures>) -> Option<SwapFigures> {
        let swap = swap.filter(|_| self.age <= seconds(QUEUE_HOLDS))?;
        if swap.free_memory.max(swap.free_swap) > LARGEST_MEMORY {
            let largest = swap.free_memory.max(swap.free_swap);
            self.doubt(format!("its memory and swap cannot have {largest} free"));
            return None;
        }
        let what = What::SwapBandwidth;
        Some(SwapFigures {
            write: self.rate("bandwidth of paging out", what, swap.write),
            read: self.rate("bandwidth of paging in", what, swap.read),
            ..swap
        })
    }

    fn links(&mut self, links: &BTreeMap<String, SizedRates>) -> BTreeMap<String, SizedRates> {
        if links.len() > MOST_LINKS {
            self.doubt(format!("it has {} links", links.len()));
        }
        let links = links.iter().take(MOST_LINKS);
        links
            .map(|(peer, rates)| {
                let short: String = peer.chars().take(64).collect();
                let name = format!("link to {short}");
                (peer.clone(), self.rates(&name, What::LinkBandwidth, rates))
            })
            .collect()
    }

    /// Returns a figure with the age of the report added to its own; unknown if that is too old.
    fn aged<T: Copy>(&self, what: What, known: Estimate<T>) -> Figure<T> {
        let limit = match what {
            What::RecallBandwidth => OBJECT_STORE_STALE_AFTER,
            What::LazyBandwidth => LAZY_STALE_AFTER,
            _ => EstimatorConfig::default().stale_after,
        };
        self.within(what, known, limit)
    }

    fn within<T: Copy>(&self, what: What, known: Estimate<T>, limit: Seconds) -> Figure<T> {
        let age = known.age.plus(self.age);
        if age > limit {
            return Missing::TooOld { what, age, limit }.into();
        }
        Figure::Known(Estimate { age, ..known })
    }

    /// Keeps the node's own reason for an unknown figure. A figure that could not be read is recorded as a doubt.
    fn unknown<T>(&mut self, name: &str, what: What, why: Missing) -> Figure<T> {
        if let Missing::NotBelieved { .. } = why {
            return self.refuse(what, format!("its {name} makes no sense"));
        }
        Figure::Unknown { why }
    }
}

/// Returns the bytes that are moved before a newcomer begins.
fn before_a_newcomer(queue: &QueueReport) -> Bytes {
    let bytes = Bytes::new(queue.bytes);
    let [running, waiting, reserved, slots] =
        [queue.running, queue.waiting, queue.reserved, queue.slots].map(|count| count as usize);
    let ahead = Ahead {
        running,
        waiting: waiting + reserved,
        bytes,
    };
    if slots == 0 || ahead.running + ahead.waiting == 0 {
        // The maximum number of transfers is unknown, or the transfers have not been counted.
        return bytes;
    }
    bytes.times(ahead.share_before(slots))
}

/// Returns true if the rate is one that a medium or link can have.
fn is_plausible(rate: BytesPerSecond) -> bool {
    let limits = EstimatorConfig::default();
    rate >= limits.slowest && rate <= limits.fastest
}

/// The last report of each node, and the time at which it came.
#[derive(Debug, Default)]
pub struct Reports {
    nodes: HashMap<String, Last>,
    /// Counter of reports that are doubted.
    costs: Option<Arc<Costs>>,
}

#[derive(Debug)]
struct Last {
    /// Last report that was used.
    report: NodeReport,
    /// Last report that was evaluated.
    judged: NodeReport,
    came: Instant,
}

impl Reports {
    /// Creates an empty collection; `costs` counts the doubts, once for each report.
    #[must_use]
    pub fn counted_by(costs: Arc<Costs>) -> Self {
        Self {
            costs: Some(costs),
            ..Self::default()
        }
    }

    /// Evaluates the report in the facts of the node `name` at `now`. An unchanged report has aged by the time
    /// since it was first seen.
    pub fn take(
        &mut self,
        name: &str,
        report: Option<&NodeReport>,
        id: NodeId,
        now: Instant,
    ) -> Believed {
        let Some(report) = report else {
            self.nodes.remove(name);
            return Believed::nothing(id);
        };
        let last = self.nodes.entry(name.to_owned()).or_insert_with(|| Last {
            report: NodeReport::default(),
            // Evaluated as the last report: the regression is counted once, too.
            judged: NodeReport::default(),
            came: now,
        });
        if last.report != *report && !is_backwards(&last.report, report) {
            last.report.clone_from(report);
            last.came = now;
        }
        let age = now.saturating_duration_since(last.came);
        let believed = believe(Some(&last.report), report, age, id);
        if last.judged != *report {
            last.judged.clone_from(report);
            if let Some(costs) = &self.costs {
                costs.doubted(believed.doubts.len() as u64);
            }
        }
        believed
    }

    /// Forgets the nodes that are not among `names`.
    pub fn keep(&mut self, names: &[&str]) {
        self.nodes.retain(|name, _| names.contains(&name.as_str()));
    }
}
