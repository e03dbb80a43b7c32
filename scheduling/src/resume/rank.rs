//! Ranking of the nodes that could resume a task, the best first: Algorithm 2 for any number of nodes, each of which
//! may lack a part of the image.

use serde::Serialize;

use super::Preference;
use crate::NodeId;
use crate::cost::{self, LazyRestore, MissingPages, NoCost, NodeFigures, Recall, TaskCost};
use crate::quantity::{Bytes, Seconds};

/// A node that could resume the task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer<'a> {
    /// Figures of the node.
    pub node: &'a NodeFigures,
    /// Part of the image that the node lacks; none if it holds all of the image, and is local.
    pub lacks: Option<MissingPages<'a>>,
    /// Part of the copy that is read which is in an object store.
    pub recall: Option<Recall<'a>>,
    /// Options of a lazy restore; none for reading everything before the task runs.
    pub lazy: Option<LazyRestore>,
}

/// A node in its place.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankedOffer {
    /// Id of the node.
    pub node: NodeId,
    /// True if the node holds all of the image.
    pub local: bool,
    /// Cost of resuming on this node.
    pub cost: TaskCost,
}

/// Nodes that could resume a task, ranked.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Ranking {
    /// Nodes, the best first.
    pub nodes: Vec<RankedOffer>,
    /// Nodes with missing figures, and the reason for each.
    pub unknown: Vec<(NodeId, NoCost)>,
}

/// Ranks nodes by the time until the task runs there, then by the overhead, then local ones, as in Algorithm 2, then
/// by number. A preference takes precedence over everything else: the other nodes follow, for when there is no room
/// on the preferred ones.
#[must_use]
pub fn rank(size: Bytes, offers: &[Offer<'_>], preference: Preference) -> Ranking {
    let mut ranking = Ranking::default();
    for offer in offers {
        let node = offer.node.node;
        let (lacks, recall) = (offer.lacks.as_ref(), offer.recall.as_ref());
        let cost = match &offer.lazy {
            None => cost::resume(size, offer.node, lacks, recall),
            Some(how) => cost::resume_lazily(size, offer.node, lacks, recall, how),
        };
        let local = offer.lacks.is_none_or(|lacks| lacks.bytes == Bytes::ZERO);
        match cost {
            Ok(cost) => ranking.nodes.push(RankedOffer { node, local, cost }),
            Err(why) => ranking.unknown.push((node, why)),
        }
    }
    let key = |ranked: &RankedOffer| -> (bool, Seconds, Seconds, bool, NodeId) {
        let preferred = match preference {
            Preference::Local => ranked.local,
            Preference::Remote => !ranked.local,
            Preference::None => true,
        };
        (
            !preferred,
            ranked.cost.until_running().p50,
            ranked.cost.overhead().p50,
            !ranked.local,
            ranked.node,
        )
    };
    ranking.nodes.sort_by_cached_key(key);
    ranking
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;
    use crate::estimator::SizedRates;
    use crate::figure::Figure;
    use crate::quantity::BytesPerSecond;

    const GB: u64 = 1_000_000_000;

    fn rate(gb_per_s: f64) -> SizedRates {
        SizedRates::uniform(Figure::given(BytesPerSecond::new(gb_per_s * 1e9).unwrap()))
    }

    /// Reads 1 GB/s.
    fn node(id: u32, queued_gb: u64) -> NodeFigures {
        NodeFigures {
            read: rate(1.0),
            read_queue: Figure::given(Bytes::new(queued_gb * GB)),
            ..NodeFigures::unknown(NodeId(id))
        }
    }

    /// A link of 0.5 GB/s.
    static LINK: LazyLock<SizedRates> = LazyLock::new(|| rate(0.5));

    fn offer(node: &NodeFigures, lacks_gb: u64) -> Offer<'_> {
        let lacks = MissingPages {
            bytes: Bytes::new(lacks_gb * GB),
            link: &LINK,
        };
        Offer {
            node,
            lacks: (lacks_gb > 0).then_some(lacks),
            recall: None,
            lazy: None,
        }
    }

    fn order(ranking: &Ranking) -> Vec<u32> {
        ranking.nodes.iter().map(|ranked| ranked.node.0).collect()
    }

    #[test]
    fn nodes_are_ranked_by_queue_transfer_and_read() {
        let (holder, parent, none) = (node(1, 12), node(2, 0), node(3, 0));
        // 12 + 10, 2 + 10, 20 + 10 seconds.
        let offers = [offer(&holder, 0), offer(&parent, 1), offer(&none, 10)];
        let size = Bytes::new(10 * GB);
        let by = |preference| order(&rank(size, &offers, preference));
        assert_eq!(by(Preference::None), [2, 1, 3]);
        assert_eq!(by(Preference::Local), [1, 2, 3]);
        assert_eq!(by(Preference::Remote), [2, 3, 1]);
    }

    #[test]
    fn it_agrees_with_algorithm_2_where_that_applies() {
        for queued in [19, 20, 21] {
            let (here, there) = (node(2, queued), node(1, 0));
            let ranking = rank(
                Bytes::new(10 * GB),
                &[offer(&there, 10), offer(&here, 0)],
                Preference::None,
            );
            let expected = if queued <= 20 { 2 } else { 1 };
            assert_eq!(order(&ranking)[0], expected, "{queued} GB queued");
        }
    }

    #[test]
    fn a_node_of_which_nothing_is_known_is_not_ranked_but_named() {
        let (known, unknown) = (node(1, 0), NodeFigures::unknown(NodeId(2)));
        let ranking = rank(
            Bytes::new(GB),
            &[offer(&unknown, 0), offer(&known, 0)],
            Preference::None,
        );
        assert_eq!(order(&ranking), [1]);
        assert_eq!(ranking.unknown[0].0, NodeId(2));
    }
}
