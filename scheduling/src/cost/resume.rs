//! Costs of resuming: on a node with the image or on another one, at once or lazily.

use serde::{Deserialize, Serialize};

use super::node::{NodeFigures, moved};
use super::{NoCost, Part, Tally, TaskCost};
use crate::estimator::SizedRates;
use crate::figure::{Estimate, Figure};
use crate::quantity::{Bytes, BytesPerSecond, Seconds};

/// Part of an image that a node lacks, and the link over which the part would be sent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MissingPages<'a> {
    /// Bytes it lacks; less than the image if it has the parent.
    pub bytes: Bytes,
    /// Bandwidth of the link from the nearest holder.
    pub link: &'a SizedRates,
}

/// Part of a copy that is in an object store, and comes back before the copy is read.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Recall<'a> {
    /// Bytes in the object store.
    pub bytes: Bytes,
    /// Bandwidth of the object store, as the node with the copy has measured it.
    pub rates: &'a SizedRates,
}

/// Options of a lazy restore.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LazyRestore {
    /// Bytes that are there before the task runs.
    pub eager: Bytes,
    /// Rate at which the others come while it runs.
    pub rate: Figure<BytesPerSecond>,
}

/// Returns the cost of resuming from an image of `size` on `node` (paper 000, Algorithm 2), of which the node `lacks`
/// a part, from a copy of which a part is in an object store:
///
/// queue_time + recall/bw_store + lacks/bw_net + size/bw_read
///
/// # Errors
///
/// [`NoCost`] if a figure is missing. A node that lacks nothing needs no link.
pub fn full(
    size: Bytes,
    node: &NodeFigures,
    lacks: Option<&MissingPages<'_>>,
    recall: Option<&Recall<'_>>,
) -> Result<TaskCost, NoCost> {
    let queue = node.read_wait()?;
    let cost = resumed((size, size), &node.restore_start, node, lacks, recall)?;
    Ok(cost.with(Part::ReadQueue, queue))
}

/// Returns the cost of resuming when only the eager part is read before the task runs. The rest is counted as page
/// faults that the task waits for, all of it: an upper bound, as pages that the task does not touch cost it nothing.
/// Only the transfer of what nobody waits for is queued, so the queue costs the task nothing.
/// A link is used page by page, so the part that the node `lacks` is transferred at once only as far as it is eager.
/// What is in an object store comes back as a whole first.
///
/// # Errors
///
/// [`NoCost`] if a figure is missing.
pub fn lazy(
    size: Bytes,
    node: &NodeFigures,
    lacks: Option<&MissingPages<'_>>,
    recall: Option<&Recall<'_>>,
    lazy: &LazyRestore,
) -> Result<TaskCost, NoCost> {
    let eager = lazy.eager.min(size);
    let rest = size.less(eager);
    let start = match node.lazy_start {
        Figure::Unknown { .. } => &node.restore_start,
        Figure::Known(_) => &node.lazy_start,
    };
    let cost = resumed((eager, size), start, node, lacks, recall)?;
    if rest == Bytes::ZERO {
        return Ok(cost);
    }
    Ok(cost.with(Part::Faults, Estimate::given(rest).at(&lazy.rate.known()?)))
}

/// Reads `size` of an image of `whole`, after a fixed time.
fn resumed(
    (size, whole): (Bytes, Bytes),
    start: &Figure<Seconds>,
    node: &NodeFigures,
    lacks: Option<&MissingPages<'_>>,
    recall: Option<&Recall<'_>>,
) -> Result<TaskCost, NoCost> {
    let mut cost = TaskCost::nothing().with_fixed(Part::RestoreStart, start.known());
    if let Some(recall) = recall.filter(|recall| recall.bytes > Bytes::ZERO) {
        cost = cost.with(
            Part::Recall,
            moved(&Estimate::given(recall.bytes), recall.rates)?,
        );
    }
    if let Some(lacks) = lacks {
        let bytes = lacks.bytes.min(whole).min(size);
        if bytes > Bytes::ZERO {
            cost = cost.with(Part::Transfer, moved(&Estimate::given(bytes), lacks.link)?);
        }
    }
    if size > Bytes::ZERO {
        cost = cost.with(Part::Read, moved(&Estimate::given(size), &node.read)?);
    }
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeId;
    use crate::figure::What;

    fn gb(n: u64) -> Bytes {
        Bytes::new(n * 1_000_000_000)
    }

    fn rate(gb_per_s: f64) -> Figure<BytesPerSecond> {
        Figure::given(BytesPerSecond::new(gb_per_s * 1e9).unwrap())
    }

    fn node() -> NodeFigures {
        NodeFigures {
            read: SizedRates::uniform(rate(2.0)),
            read_queue: Figure::given(gb(4)),
            ..NodeFigures::unknown(NodeId(1))
        }
    }

    #[test]
    fn a_node_that_has_the_parent_is_sent_the_difference() {
        let link = SizedRates::uniform(rate(0.5));
        let lacks = |bytes| MissingPages { bytes, link: &link };
        let time = |lacks: Option<&MissingPages<'_>>| {
            full(gb(10), &node(), lacks, None).unwrap().until_running()
        };
        assert_eq!(time(None).p50.value(), 2.0 + 5.0);
        assert_eq!(time(Some(&lacks(gb(1)))).p50.value(), 2.0 + 2.0 + 5.0);
        assert_eq!(time(Some(&lacks(gb(10)))).p50.value(), 2.0 + 20.0 + 5.0);
        // A node lacks at most the whole image.
        assert_eq!(time(Some(&lacks(gb(99)))).p50.value(), 2.0 + 20.0 + 5.0);
    }

    #[test]
    fn a_lazy_restore_runs_early_and_pays_by_faults() {
        let how = LazyRestore {
            eager: gb(1),
            rate: rate(1.0),
        };
        let cost = lazy(gb(10), &node(), None, None, &how).unwrap();
        assert_eq!(cost.until_running().p50.value(), 0.5, "it is not queued");
        assert_eq!(cost.overhead().p50.value(), 0.5 + 9.0);
        let all = LazyRestore {
            eager: gb(99),
            rate: Figure::not_given(What::LazyBandwidth),
        };
        let cost = lazy(gb(10), &node(), None, None, &all).unwrap();
        assert_eq!(cost.overhead().p50.value(), 5.0);
    }

    #[test]
    fn what_is_in_an_object_store_comes_back_first() {
        let rates = SizedRates::uniform(rate(0.25));
        let recall = Recall {
            bytes: gb(1),
            rates: &rates,
        };
        let cost = full(gb(10), &node(), None, Some(&recall)).unwrap();
        assert_eq!(cost.until_running().p50.value(), 2.0 + 4.0 + 5.0);
        let how = LazyRestore {
            eager: Bytes::ZERO,
            rate: rate(1.0),
        };
        let cost = lazy(gb(10), &node(), None, Some(&recall), &how).unwrap();
        assert_eq!(cost.until_running().p50.value(), 4.0);
        let unknown = SizedRates::uniform(Figure::not_given(What::RecallBandwidth));
        let recall = |bytes| Recall {
            bytes,
            rates: &unknown,
        };
        assert!(full(gb(10), &node(), None, Some(&recall(Bytes::ZERO))).is_ok());
        assert!(full(gb(10), &node(), None, Some(&recall(gb(1)))).is_err());
    }

    #[test]
    fn a_node_that_lacks_nothing_needs_no_link() {
        let link = SizedRates::uniform(Figure::not_given(What::LinkBandwidth));
        let unknown = MissingPages {
            bytes: Bytes::ZERO,
            link: &link,
        };
        assert!(full(gb(1), &node(), Some(&unknown), None).is_ok());
        let some = MissingPages {
            bytes: gb(1),
            ..unknown
        };
        assert!(full(gb(1), &node(), Some(&some), None).is_err());
    }
}
