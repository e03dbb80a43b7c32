//! What is known of a node when a cost is asked for.

use serde::{Deserialize, Serialize};

use crate::NodeId;
use crate::estimator::SizedRates;
use crate::figure::{Estimate, Figure, Missing, What};
use crate::quantity::{Bytes, BytesPerSecond, Seconds};

/// One tier of one node, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeFigures {
    /// Node.
    pub node: NodeId,
    /// Bandwidth of dumps that store what they move: full ones.
    pub write: SizedRates,
    /// Bandwidth of dumps that are compared with what is there, by the bytes that are *moved*, not by the few that are
    /// stored: incremental ones. Unknown, they are taken to be no faster than full ones.
    pub compare: SizedRates,
    /// Bandwidth of restores.
    pub read: SizedRates,
    /// Bytes that wait to be written, what is running and what is reserved counted.
    pub write_queue: Figure<Bytes>,
    /// Bytes that wait to be read.
    pub read_queue: Figure<Bytes>,
    /// What a dump takes whatever its size.
    pub dump_start: Figure<Seconds>,
    /// What a restore takes whatever its size.
    pub restore_start: Figure<Seconds>,
}

impl NodeFigures {
    /// One of which nothing is known.
    #[must_use]
    pub const fn unknown(node: NodeId) -> Self {
        Self {
            node,
            write: SizedRates::uniform(Figure::not_given(What::WriteBandwidth)),
            compare: SizedRates::uniform(Figure::not_given(What::WriteBandwidth)),
            read: SizedRates::uniform(Figure::not_given(What::ReadBandwidth)),
            write_queue: Figure::not_given(What::Queue),
            read_queue: Figure::not_given(What::Queue),
            dump_start: Figure::not_given(What::Latency),
            restore_start: Figure::not_given(What::Latency),
        }
    }

    /// Bandwidth of incremental dumps: measured, or that of full ones.
    #[must_use]
    pub fn incremental(&self, size: Bytes) -> Figure<BytesPerSecond> {
        match self.compare.of(size) {
            Figure::Unknown { .. } => self.write.of(size),
            known @ Figure::Known(_) => known,
        }
    }

    /// The same with `bytes` more in the queue of dumps; an unknown queue stays unknown.
    #[must_use]
    pub fn with_queued(mut self, bytes: Bytes) -> Self {
        self.write_queue = longer(self.write_queue, bytes);
        self
    }
}

/// Another node that takes a copy while the dump streams.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Replica<'a> {
    /// Bandwidth of the link to it.
    pub link: &'a SizedRates,
    /// What is known of it.
    pub node: &'a NodeFigures,
}

/// A node's swap.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Swap {
    /// Memory that is free without anything being paged out.
    pub free_memory: Bytes,
    /// Swap that is free, less what suspended tasks may still need of it.
    pub free_swap: Bytes,
    /// Bandwidth of paging out.
    pub write: Figure<BytesPerSecond>,
    /// Bandwidth of paging in.
    pub read: Figure<BytesPerSecond>,
}

/// How long a queue takes: what it really holds in bytes over what the tier really does. Paper 000, §5.2.2, counts its
/// containers; those differ in size by orders of magnitude.
///
/// # Errors
///
/// [`Missing`] if either is not known; an empty queue takes no time at any rate.
pub fn queue_time(
    queued: &Figure<Bytes>,
    rates: &SizedRates,
) -> Result<Estimate<Seconds>, Missing> {
    let queued = queued.known()?;
    if queued.p50 == Bytes::ZERO && queued.p95 == Bytes::ZERO {
        return Ok(Estimate {
            p50: Seconds::ZERO,
            p95: Seconds::ZERO,
            age: queued.age,
            samples: queued.samples,
        });
    }
    Ok(queued.at(&rates.sustained().known()?))
}

/// A queue with `bytes` more in it; an unknown one stays unknown.
pub(super) fn longer(mut queue: Figure<Bytes>, bytes: Bytes) -> Figure<Bytes> {
    if let Figure::Known(queue) = &mut queue {
        queue.p50 = queue.p50.plus(bytes);
        queue.p95 = queue.p95.plus(bytes);
    }
    queue
}

/// Time to move `size` by these rates.
pub(super) fn moved(
    size: &Estimate<Bytes>,
    rates: &SizedRates,
) -> Result<Estimate<Seconds>, Missing> {
    Ok(size.at(&rates.of(size.p50).known()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_time_is_bytes_over_bandwidth() {
        let rates = SizedRates::uniform(Figure::given(BytesPerSecond::new(500e6).unwrap()));
        let queued = Figure::given(Bytes::new(10_000_000_000));
        assert_eq!(queue_time(&queued, &rates).unwrap().p50.value(), 20.0);
    }

    #[test]
    fn an_unknown_queue_is_not_an_empty_one() {
        let unknown = NodeFigures::unknown(NodeId(1));
        let missing = queue_time(&unknown.write_queue, &unknown.write);
        assert_eq!(missing, Err(Missing::NotGiven { what: What::Queue }));
        let none = Figure::given(Bytes::ZERO);
        assert_eq!(
            queue_time(&none, &unknown.write).unwrap().p95,
            Seconds::ZERO
        );
        assert_eq!(unknown.with_queued(Bytes::mib(1)), unknown);
    }
}
