//! A snapshot of everything that the API knows.

mod builder;
mod jobs;
mod links;
mod names;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use permafrost_api_types::nodes::NodeState;
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::{NodeFigures, Replica, SwapFigures};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Figure, Missing, What};
use permafrost_scheduling::place::{self, PlacementRequest, Places};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_scheduling::resume::Readers;

pub(super) use builder::Builder;
pub(super) use jobs::{Job, Jobs, LastCheckpoint, is_resumable};
pub(super) use names::Names;

use self::links::Links;
use super::source::NodeEntry;

/// Size of the copy for which a node's replica is chosen: a copy goes to the node that would have one of this
/// size soonest, whatever the size of the dump. One choice for each node, made when it is first needed. 1 GiB:
/// where bandwidth dominates, and most tasks lie.
const TYPICAL_COPY: Bytes = Bytes::mib(1024);

/// Bandwidth of a link that no node has reported.
static UNKNOWN_LINK: SizedRates = SizedRates::uniform(Figure::Unknown {
    why: Missing::NotMeasured {
        what: What::LinkBandwidth,
    },
});

/// An immutable snapshot.
#[derive(Debug)]
pub struct World {
    taken: Instant,
    own: Arc<str>,
    names: Arc<Names>,
    /// Nodes, indexed by their numbers.
    nodes: Vec<Option<Node>>,
    places: Places,
    readers: Readers,
    /// For each node, the one that would take copies of its dumps.
    replicas: Vec<OnceLock<Option<NodeId>>>,
    jobs: Option<Arc<Jobs>>,
}

/// A node of a snapshot.
#[derive(Debug)]
pub(super) struct Node {
    /// Reported facts; the figures have this node's number, and are unknown if they are no longer valid.
    pub(super) entry: NodeEntry,
    /// Links, taken out of the entry.
    pub(super) links: Links,
}

impl Node {
    /// Returns true if the node takes new dumps and copies.
    pub(super) fn takes_dumps(&self) -> bool {
        self.entry.live && !self.entry.stopping && self.entry.state == NodeState::Active
    }

    /// Returns the bandwidth over which copies come to the node.
    pub(super) fn network(&self) -> Option<BytesPerSecond> {
        place::network(self.entry.links.values())
    }

    /// Returns true if the node can restore.
    pub(super) fn restores(&self) -> bool {
        self.entry.live && !self.entry.stopping && self.entry.state != NodeState::Removed
    }
}

impl World {
    /// Returns true if a node of that name is alive.
    pub(crate) fn is_live(&self, name: &str) -> bool {
        let node = self.names().id(name).and_then(|id| self.node(id));
        node.is_some_and(|node| node.entry.live)
    }

    /// Returns the time since the snapshot was taken.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.taken.elapsed()
    }

    /// Returns the time since the snapshot was taken, seconds.
    #[must_use]
    pub fn age_s(&self) -> f64 {
        super::say::rounded(self.age().as_secs_f64())
    }

    /// Returns the name of the node that answers.
    #[must_use]
    pub fn own_name(&self) -> &str {
        &self.own
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Returns true if there is no node.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    pub(super) fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn figures(&self, id: NodeId) -> Option<&NodeFigures> {
        Some(&self.node(id)?.entry.figures)
    }

    /// Returns memory and swap of a live node's machine, as the node has measured them.
    pub(super) fn swap(&self, id: NodeId) -> Option<SwapFigures> {
        let node = self.node(id)?;
        node.entry.swap.filter(|_| node.entry.live)
    }

    /// Returns the name of a node; empty for an unused number.
    pub(super) fn name(&self, id: NodeId) -> &str {
        self.node(id).map_or("", |node| &node.entry.name)
    }

    /// Returns the node that takes dumps when a request names none: there is only one.
    pub(super) fn only_node(&self) -> Option<NodeId> {
        let mut all = self.names.in_order();
        match (all.next(), all.next()) {
            (Some((_, id)), None) => Some(id),
            _ => None,
        }
    }

    pub(super) fn places(&self) -> &Places {
        &self.places
    }

    pub(super) fn readers(&self) -> &Readers {
        &self.readers
    }

    /// Returns the checkpoints; `None` before the store has listed them once.
    pub(super) fn jobs(&self) -> Option<&Jobs> {
        self.jobs.as_deref()
    }

    /// Returns the bandwidth from one node to another, by the report of either.
    pub(super) fn link(&self, from: NodeId, to: NodeId) -> &SizedRates {
        let measured = |by: NodeId, other: NodeId| self.node(by)?.links.to(other);
        measured(from, to)
            .or_else(|| measured(to, from))
            .unwrap_or(&UNKNOWN_LINK)
    }

    /// Returns the node that takes copies of dumps on `node`.
    pub(super) fn replica(&self, node: NodeId) -> Option<Replica<'_>> {
        let choose = || {
            let wanted = PlacementRequest {
                size: TYPICAL_COPY,
                copies: 2,
                local: None,
                holders: &[node],
                without: &[],
            };
            let placed = self.places.place(&wanted);
            placed.nodes.first().map(|placed| placed.node)
        };
        let chosen = *self.replicas.get(node.0 as usize)?.get_or_init(choose);
        let other = chosen?;
        Some(Replica {
            link: self.link(node, other),
            node: self.figures(other)?,
        })
    }

    /// Returns the snapshot with unknown lengths of queues: it is older than `limit`, so that they have changed.
    pub(super) fn stale(&self, limit: Duration) -> Self {
        let too_old = |what| Missing::TooOld {
            what,
            age: seconds(self.age()),
            limit: seconds(limit),
        };
        let mut places = Places::default();
        let mut readers = Readers::default();
        let nodes = self.nodes.iter().map(|node| {
            let mut entry = node.as_ref()?.entry.clone();
            for queue in [
                &mut entry.figures.write_queue,
                &mut entry.figures.read_queue,
            ] {
                if matches!(queue, Figure::Known(_)) {
                    *queue = too_old(What::Queue).into();
                }
            }
            entry.swap = None;
            let links = node.as_ref()?.links.clone();
            let node = Node { entry, links };
            builder::index(
                &node,
                builder::domain_of_nothing(),
                &mut places,
                &mut readers,
            );
            Some(node)
        });
        let nodes = nodes.collect::<Vec<_>>();
        Self {
            taken: self.taken,
            own: Arc::clone(&self.own),
            names: Arc::clone(&self.names),
            replicas: builder::unknown_replicas(nodes.len()),
            nodes,
            places,
            readers,
            jobs: self.jobs.clone(),
        }
    }
}

/// Converts a duration to a quantity; the longest one if it is longer.
pub(super) fn seconds(time: Duration) -> Seconds {
    Seconds::new(time.as_secs_f64()).unwrap_or(Seconds::MAX)
}
