//! Figures of a node that costs are calculated from.

use serde::{Deserialize, Serialize};

use crate::NodeId;
use crate::estimator::SizedRates;
use crate::figure::{Estimate, Figure, Missing, What};
use crate::quantity::{Bytes, BytesPerSecond, Seconds};

/// Figures of one tier of one node, as far as they are known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeFigures {
    /// Id of the node.
    pub node: NodeId,
    /// Bandwidth of full dumps, which store all the bytes that they move.
    pub write: SizedRates,
    /// Bandwidth of incremental dumps, which are compared with stored pages, by the bytes that are *moved*, not by
    /// the few that are stored. Unknown, they are assumed to be no faster than full dumps.
    pub compare: SizedRates,
    /// Bandwidth of restores.
    pub read: SizedRates,
    /// Bandwidth at which pages come back from the node's object store.
    pub recall: SizedRates,
    /// Bandwidth at which pages follow to processes that were restored lazily.
    pub lazy: SizedRates,
    /// Bytes that are written before a dump begins that comes last, the running and the reserved ones counted.
    pub write_queue: Figure<Bytes>,
    /// Bytes that are read before a restore begins that comes last, the running and the reserved ones counted.
    pub read_queue: Figure<Bytes>,
    /// Drain rate of the queue of dumps: the sum of the rates of all active dumps, the time of their starts counted.
    /// If it is unknown, the rate of a single dump is used.
    pub write_drain: Figure<BytesPerSecond>,
    /// Drain rate of the queue of restores, as in `write_drain`.
    pub read_drain: Figure<BytesPerSecond>,
    /// Fixed time of a dump, independent of its size.
    pub dump_start: Figure<Seconds>,
    /// Fixed time of a restore, independent of its size.
    pub restore_start: Figure<Seconds>,
    /// Time until the processes of a lazy restore run. Unknown, it is assumed to be that of other restores.
    pub lazy_start: Figure<Seconds>,
}

/// Room on one tier of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TierRoom {
    /// Name of the tier.
    pub tier: String,
    /// Bytes of the tier.
    pub capacity_bytes: u64,
    /// Free bytes of the tier.
    pub free_bytes: u64,
    /// True if its pages are in an object store: dumps do not go there.
    pub cold: bool,
}

impl TierRoom {
    /// Returns the tier that the next dump goes to, of a node's tiers, the fastest first: the first one with a 64th of
    /// its room free, as the last segments are not what a dump takes; else the first with any.
    #[must_use]
    pub fn of_dumps(tiers: &[Self]) -> Option<&Self> {
        let mut mapped = tiers.iter().filter(|tier| !tier.cold);
        let with = |least: &dyn Fn(&Self) -> u64| {
            let mut mapped = mapped.clone();
            mapped.find(|tier| tier.free_bytes > 0 && tier.free_bytes >= least(tier))
        };
        with(&|tier| tier.capacity_bytes / 64)
            .or_else(|| with(&|_| 0))
            .or_else(|| mapped.next())
    }
}

impl NodeFigures {
    /// Makes the figures of a node of which nothing is known.
    #[must_use]
    pub const fn unknown(node: NodeId) -> Self {
        Self {
            node,
            write: SizedRates::uniform(Figure::not_given(What::WriteBandwidth)),
            compare: SizedRates::uniform(Figure::not_given(What::WriteBandwidth)),
            read: SizedRates::uniform(Figure::not_given(What::ReadBandwidth)),
            recall: SizedRates::uniform(Figure::not_given(What::RecallBandwidth)),
            lazy: SizedRates::uniform(Figure::not_given(What::LazyBandwidth)),
            write_queue: Figure::not_given(What::Queue),
            read_queue: Figure::not_given(What::Queue),
            write_drain: Figure::not_given(What::WriteBandwidth),
            read_drain: Figure::not_given(What::ReadBandwidth),
            dump_start: Figure::not_given(What::Latency),
            restore_start: Figure::not_given(What::Latency),
            lazy_start: Figure::not_given(What::Latency),
        }
    }

    /// Returns the bandwidth of incremental dumps: measured, or that of full ones.
    #[must_use]
    pub fn incremental(&self, size: Bytes) -> Figure<BytesPerSecond> {
        match self.compare.of(size) {
            Figure::Unknown { .. } => self.write.of(size),
            known @ Figure::Known(_) => known,
        }
    }

    /// Returns the time that a dump waits for admission, behind the bytes in the queue and behind `ahead` more.
    ///
    /// # Errors
    ///
    /// [`Missing`] if the length of the queue or its drain rate is not known.
    pub fn write_wait(&self, ahead: Bytes) -> Result<Estimate<Seconds>, Missing> {
        wait(&self.write_queue, ahead, &self.write_drain, &self.write)
    }

    /// Returns the time that a restore waits for admission.
    ///
    /// # Errors
    ///
    /// The errors of [`write_wait`](Self::write_wait).
    pub fn read_wait(&self) -> Result<Estimate<Seconds>, Missing> {
        wait(&self.read_queue, Bytes::ZERO, &self.read_drain, &self.read)
    }
}

/// Returns the time that a queue takes: the bytes that it really holds over the rate that the tier really has. Paper
/// 000, §5.2.2, counts its containers; those differ in size by orders of magnitude.
fn wait(
    queued: &Figure<Bytes>,
    ahead: Bytes,
    drain: &Figure<BytesPerSecond>,
    alone: &SizedRates,
) -> Result<Estimate<Seconds>, Missing> {
    let queued = queued.known()?;
    let (drain, alone) = (drain.known(), alone.sustained().known());
    let held = over(&queued, drain.or(alone))?;
    let more = Estimate {
        p50: ahead,
        p95: ahead,
        ..queued
    };
    // Transfers of the queued size may consist mostly of their starts; several transfers are never slower than one.
    let rate = match (drain, alone) {
        (Ok(drain), Ok(alone)) => Ok(faster(drain, alone)),
        (one, other) => one.or(other),
    };
    let more = over(&more, rate)?;
    Ok(Estimate {
        p50: held.p50.plus(more.p50),
        p95: held.p95.plus(more.p95),
        age: held.age.max(more.age),
        samples: held.samples.min(more.samples),
    })
}

/// Returns the time that `bytes` take at `rate`. No bytes take no time, even if the rate is not known.
fn over(
    bytes: &Estimate<Bytes>,
    rate: Result<Estimate<BytesPerSecond>, Missing>,
) -> Result<Estimate<Seconds>, Missing> {
    if bytes.p50 > Bytes::ZERO || bytes.p95 > Bytes::ZERO {
        return Ok(bytes.at(&rate?));
    }
    Ok(Estimate {
        p50: Seconds::ZERO,
        p95: Seconds::ZERO,
        age: bytes.age,
        samples: bytes.samples,
    })
}

fn faster(a: Estimate<BytesPerSecond>, b: Estimate<BytesPerSecond>) -> Estimate<BytesPerSecond> {
    Estimate {
        p50: a.p50.faster(b.p50),
        p95: a.p95.faster(b.p95),
        age: a.age.max(b.age),
        samples: a.samples.min(b.samples),
    }
}

/// Node that takes another copy while the dump streams.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Replica<'a> {
    /// Bandwidth of the link to it.
    pub link: &'a SizedRates,
    /// Figures of the node.
    pub node: &'a NodeFigures,
}

/// A node's swap.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwapFigures {
    /// Memory that is free without anything being paged out.
    pub free_memory: Bytes,
    /// Free swap, minus the part that suspended tasks may still need.
    pub free_swap: Bytes,
    /// Bandwidth of paging out.
    pub write: Figure<BytesPerSecond>,
    /// Bandwidth of paging in.
    pub read: Figure<BytesPerSecond>,
}

/// Returns the time to move `size` at these rates.
pub(super) fn moved(
    size: &Estimate<Bytes>,
    rates: &SizedRates,
) -> Result<Estimate<Seconds>, Missing> {
    Ok(size.at(&rates.of(size.p50).known()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(value: f64) -> Figure<BytesPerSecond> {
        Figure::given(BytesPerSecond::new(value).unwrap())
    }

    #[test]
    fn a_queue_takes_its_bytes_over_bandwidth() {
        let mut node = NodeFigures {
            write: SizedRates::uniform(rate(500e6)),
            write_queue: Figure::given(Bytes::new(10_000_000_000)),
            ..NodeFigures::unknown(NodeId(1))
        };
        let wait = |node: &NodeFigures, ahead| node.write_wait(Bytes::new(ahead)).unwrap().p50;
        assert_eq!(wait(&node, 0).value(), 20.0);
        assert_eq!(wait(&node, 5_000_000_000).value(), 30.0);
        // Four at once write twice as much together.
        node.write_drain = rate(1e9);
        assert_eq!(wait(&node, 0).value(), 10.0);
        assert_eq!(wait(&node, 5_000_000_000).value(), 15.0);
        // The queued transfers are small, and consist mostly of their starts.
        node.write_drain = rate(100e6);
        assert_eq!(wait(&node, 5_000_000_000).value(), 110.0);
    }

    #[test]
    fn an_unknown_queue_is_not_an_empty_one() {
        let mut node = NodeFigures::unknown(NodeId(1));
        let missing = Err(Missing::NotGiven { what: What::Queue });
        assert_eq!(node.write_wait(Bytes::mib(1)), missing);
        assert_eq!(node.read_wait(), missing);
        node.read_queue = Figure::given(Bytes::ZERO);
        assert_eq!(node.read_wait().unwrap().p95, Seconds::ZERO);
    }
}
