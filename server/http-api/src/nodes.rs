//! Nodes of a request: those of the cluster, with the figures and the swap that the caller gives.

use std::collections::{BTreeMap, HashMap};

use permafrost_api_types::figures::StartRate;
use permafrost_api_types::policy::NodeGiven;
use permafrost_api_types::problem::ProblemKind;
use permafrost_api_types::task::{Swap, Task};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::{Copies, NodeFigures, SwapFigures};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Estimate, Figure, What};
use permafrost_scheduling::preempt::Site;
use permafrost_scheduling::quantity::BytesPerSecond;

use crate::body::Asked;
use crate::problem::RequestProblem;
use crate::tasks::{given, no_node};

/// Number of the first node that is not in the cluster; the cluster's are counted from 0.
const FIRST_OUTSIDE: u32 = 1 << 31;

/// Nodes of a request.
pub(super) struct Nodes<'a> {
    asked: &'a Asked<'a>,
    given: Vec<GivenNode<'a>>,
    /// Places of the given nodes, by their numbers.
    places: HashMap<NodeId, usize>,
    /// Names of the given nodes that are not in the cluster.
    outside: HashMap<&'a str, NodeId>,
    swaps: HashMap<NodeId, SwapFigures>,
}

/// A node whose figures the caller gives.
pub(super) struct GivenNode<'a> {
    pub(super) id: NodeId,
    pub(super) of: &'a NodeGiven<'a>,
    figures: NodeFigures,
}

impl<'a> Nodes<'a> {
    /// Returns the nodes of the cluster, with what the caller gives.
    ///
    /// # Errors
    /// Figures or a swap are given twice for a node, or a swap for one that there is not.
    pub(super) fn new(
        asked: &'a Asked<'a>,
        figures: &'a [NodeGiven<'a>],
        swaps: &[Swap<'_>],
    ) -> Result<Self, RequestProblem> {
        let mut nodes = Self {
            asked,
            given: Vec::with_capacity(figures.len()),
            places: HashMap::with_capacity(figures.len()),
            outside: HashMap::new(),
            swaps: HashMap::with_capacity(swaps.len()),
        };
        for (index, of) in figures.iter().enumerate() {
            let id = nodes.id(&of.node).unwrap_or_else(|| {
                let number = u32::try_from(nodes.outside.len()).unwrap_or(u32::MAX >> 1);
                let id = NodeId(FIRST_OUTSIDE.saturating_add(number));
                nodes.outside.insert(&of.node, id);
                id
            });
            if nodes.places.insert(id, index).is_some() {
                return Err(twice(&format!("/figures/{index}/node")));
            }
            let measured = nodes.measured(id).copied();
            let measured = measured.unwrap_or(NodeFigures::unknown(id));
            let figures = with(measured, of);
            nodes.given.push(GivenNode { id, of, figures });
        }
        for (index, swap) in swaps.iter().enumerate() {
            let pointer = format!("/swaps/{index}/node");
            let node = nodes.id(&swap.node);
            let node = node.ok_or_else(|| no_node(&pointer, &swap.node))?;
            let known = SwapFigures {
                free_memory: swap.free_memory_bytes,
                free_swap: swap.free_swap_bytes,
                write: given(swap.write_bytes_per_s, What::SwapBandwidth),
                read: given(swap.read_bytes_per_s, What::SwapBandwidth),
            };
            if nodes.swaps.insert(node, known).is_some() {
                return Err(twice(&pointer));
            }
        }
        Ok(nodes)
    }

    /// Returns the number of a node.
    pub(super) fn id(&self, name: &str) -> Option<NodeId> {
        let outside = self.outside.get(name).copied();
        outside.or_else(|| self.asked.world.names().id(name))
    }

    /// Returns the node of a task: the one that it names, or the only one there is.
    pub(super) fn of_task(&self, task: &Task<'_>) -> Option<NodeId> {
        match (&task.node, self.outside.is_empty()) {
            (Some(name), _) => self.id(name),
            (None, true) => self.asked.world.only_node(),
            (None, false) => None,
        }
    }

    /// Returns the nodes whose figures the caller gives, in the order of the request.
    pub(super) fn given(&self) -> &[GivenNode<'a>] {
        &self.given
    }

    /// Returns the name of a node; empty for an unused number.
    pub(super) fn name(&self, id: NodeId) -> &str {
        match self.given_of(id) {
            Some(given) => &given.of.node,
            None => self.asked.world.name(id),
        }
    }

    pub(super) fn figures(&self, id: NodeId) -> Option<&NodeFigures> {
        match self.given_of(id) {
            Some(given) => Some(&given.figures),
            None => self.measured(id),
        }
    }

    pub(super) fn swap(&self, id: NodeId) -> Option<SwapFigures> {
        // What the caller states goes before what the node has measured.
        let given = self.swaps.get(&id).copied();
        given.or_else(|| self.asked.world.swap(id))
    }

    pub(super) fn given_of(&self, id: NodeId) -> Option<&GivenNode<'a>> {
        self.given.get(*self.places.get(&id)?)
    }

    fn measured(&self, id: NodeId) -> Option<&'a NodeFigures> {
        self.asked.world.figures(id)
    }

    /// Returns a node as a site: with the node that would take its copies, and the swap of the machine.
    pub(super) fn site(&self, id: NodeId, copies: Copies) -> Option<Site<'_>> {
        let replica = match copies {
            Copies::Local => None,
            Copies::Replicated => self.asked.world.replica(id),
        };
        Some(Site {
            node: self.figures(id)?,
            replica,
            swap: self.swap(id),
        })
    }

    /// Returns the sites of these nodes, and of no others.
    pub(super) fn sites(
        &self,
        ids: impl Iterator<Item = NodeId>,
        copies: Copies,
    ) -> BTreeMap<NodeId, Site<'_>> {
        let mut sites = BTreeMap::new();
        for id in ids {
            if let std::collections::btree_map::Entry::Vacant(vacant) = sites.entry(id)
                && let Some(site) = self.site(id, copies)
            {
                vacant.insert(site);
            }
        }
        sites
    }
}

fn twice(pointer: &str) -> RequestProblem {
    let detail = "this node has one already";
    RequestProblem::at(ProblemKind::Invalid, pointer, detail)
}

/// Returns the figures that a node has measured, replaced by those that the caller gives.
fn with(measured: NodeFigures, of: &NodeGiven<'_>) -> NodeFigures {
    let rates = |given: Option<BytesPerSecond>, by_size: &[StartRate], measured: SizedRates| {
        let rates = given.map_or(measured, |rate| SizedRates::uniform(Figure::given(rate)));
        rates.with(by_size.iter().map(|one| {
            let p95 = one.p95_bytes_per_s.unwrap_or(one.p50_bytes_per_s);
            let estimate = Estimate {
                p95,
                ..Estimate::given(one.p50_bytes_per_s)
            };
            (one.size_bytes, Figure::Known(estimate))
        }))
    };
    let is_written = of.write_bytes_per_s.is_some() || !of.write_by_size.is_empty();
    fn one<T: Copy>(given: Option<T>, measured: Figure<T>) -> Figure<T> {
        given.map_or(measured, Figure::given)
    }
    NodeFigures {
        write: rates(of.write_bytes_per_s, &of.write_by_size, measured.write),
        // What was measured of comparing is of the medium that the given rate replaces.
        compare: if is_written {
            NodeFigures::unknown(measured.node).compare
        } else {
            measured.compare
        },
        read: rates(of.read_bytes_per_s, &of.read_by_size, measured.read),
        write_queue: one(of.write_queue_bytes, measured.write_queue),
        read_queue: one(of.read_queue_bytes, measured.read_queue),
        write_drain: one(of.write_bytes_per_s, measured.write_drain),
        read_drain: one(of.read_bytes_per_s, measured.read_drain),
        dump_start: one(of.dump_start_s, measured.dump_start),
        restore_start: one(of.restore_start_s, measured.restore_start),
        ..measured
    }
}
