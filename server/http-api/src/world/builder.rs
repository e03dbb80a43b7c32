//! Builds snapshots; each reuses the unchanged parts of the one before.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use permafrost_api_types::nodes::NodeClass;
use permafrost_scheduling::cost::NodeFigures;
use permafrost_scheduling::figure::{Estimate, Figure, Missing};
use permafrost_scheduling::place::{CopyTarget, Domain, DomainNumbers, Places};
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};
use permafrost_scheduling::resume::Readers;
use permafrost_scheduling::{NodeId, estimator::SizedRates};
use permafrost_store::StoreError;

use super::names::{Names, Numbers};
use super::{Jobs, Links, Node, World};
use crate::source::{NodeEntry, Source};

/// Numbers of removed names that are kept, in addition to as many as there are names in use.
const SPARE_NUMBERS: usize = 4096;

/// State that is kept from one snapshot to the next.
#[derive(Debug, Default)]
pub(crate) struct Builder {
    nodes: Numbers<String>,
    domains: DomainNumbers,
    places: Places,
    readers: Readers,
    /// Indexed facts of each node.
    indexed: HashMap<NodeId, Indexed>,
    names: Arc<Names>,
}

/// Facts that a node's place in the indexes depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Indexed {
    write: Option<(f64, f64)>,
    read: Option<(f64, f64)>,
    network: Option<BytesPerSecond>,
    domain: Domain,
    room: u64,
    durable: bool,
    takes_dumps: bool,
    restores: bool,
}

impl Builder {
    /// Lists the checkpoints. Blocks as the source does.
    pub(crate) fn jobs(source: &dyn Source) -> Result<Jobs, StoreError> {
        let taken = Instant::now();
        Ok(Jobs::new(taken, source.checkpoints()?))
    }

    /// Makes a snapshot of all nodes. Blocks as the source does.
    pub(crate) fn world(&mut self, source: &dyn Source, jobs: Option<Arc<Jobs>>) -> World {
        let taken = Instant::now();
        let entries = source.nodes();
        let own = Arc::from(source.own_name());
        self.begin_anew_if_many_are_gone(entries.len());
        let nodes = self.take(entries);
        self.forget_all_but(&nodes);
        World {
            taken,
            own,
            names: Arc::clone(&self.names),
            places: self.places.clone(),
            readers: self.readers.clone(),
            replicas: unknown_replicas(nodes.len()),
            nodes,
            jobs,
        }
    }

    fn begin_anew_if_many_are_gone(&mut self, count: usize) {
        let given = self.nodes.len().max(self.domains.len());
        if given > 2 * count + SPARE_NUMBERS {
            *self = Self::default();
        }
    }

    fn take(&mut self, entries: Vec<NodeEntry>) -> Vec<Option<Node>> {
        let mut nodes: Vec<Option<Node>> = Vec::new();
        nodes.resize_with(self.nodes.len(), || None);
        for mut entry in entries {
            let id = NodeId(self.nodes.number(&entry.name));
            entry.figures = figures(id, &entry);
            let place = id.0 as usize;
            if place >= nodes.len() {
                nodes.resize_with(place + 1, || None);
            }
            let domain = self
                .domains
                .number(&entry.name, &entry.zone, &entry.rack, &entry.host);
            let node = Node {
                entry,
                links: Links::default(),
            };
            self.update(&node, domain);
            if let Some(slot) = nodes.get_mut(place) {
                *slot = Some(node);
            }
        }
        // All nodes have their numbers by now.
        for node in nodes.iter_mut().flatten() {
            let links = std::mem::take(&mut node.entry.links);
            node.links = Links::new(links, |name| self.nodes.get(name).map(NodeId));
        }
        nodes
    }

    /// Updates the indexes for a node that has changed: most have not.
    fn update(&mut self, node: &Node, domain: Domain) {
        let figures = &node.entry.figures;
        type Wait = Result<Estimate<Seconds>, Missing>;
        let line = |wait: Wait, rates: &SizedRates, start: &Figure<Seconds>| {
            let wait = wait.ok()?.p50.value();
            let rate = rates.sustained().known().ok()?.p50.value();
            Some((
                wait + start.known().map_or(0.0, |time| time.p50.value()),
                rate,
            ))
        };
        let write_wait = figures.write_wait(Bytes::ZERO);
        let now = Indexed {
            write: line(write_wait, &figures.write, &figures.dump_start),
            read: line(figures.read_wait(), &figures.read, &figures.restore_start),
            network: node.network(),
            domain,
            room: node.entry.room_bytes,
            durable: node.entry.durable,
            takes_dumps: node.takes_dumps(),
            restores: node.restores(),
        };
        if self.indexed.insert(figures.node, now) != Some(now) {
            index(node, domain, &mut self.places, &mut self.readers);
        }
    }

    fn forget_all_but(&mut self, nodes: &[Option<Node>]) {
        let is_there = |id: NodeId| matches!(nodes.get(id.0 as usize), Some(Some(_)));
        let (places, readers) = (&mut self.places, &mut self.readers);
        self.indexed.retain(|&id, _| {
            if !is_there(id) {
                places.remove(id);
                readers.remove(id);
            }
            is_there(id)
        });
        let all = || nodes.iter().flatten();
        let is_known =
            |node: &Node| self.names.id(&node.entry.name) == Some(node.entry.figures.node);
        if all().count() != self.names.len() || !all().all(is_known) {
            let named = all().map(|node| {
                let name: Arc<str> = Arc::from(node.entry.name.as_str());
                (name, node.entry.figures.node)
            });
            self.names = Arc::new(Names::new(named));
        }
    }
}

/// Returns a node's figures: all unknown if the node is not live.
fn figures(id: NodeId, entry: &NodeEntry) -> NodeFigures {
    if entry.live {
        return NodeFigures {
            node: id,
            ..entry.figures
        };
    }
    let rates = SizedRates::uniform(Missing::NodeGone.into());
    NodeFigures {
        node: id,
        write: rates,
        compare: rates,
        read: rates,
        recall: rates,
        lazy: rates,
        write_queue: Missing::NodeGone.into(),
        read_queue: Missing::NodeGone.into(),
        write_drain: Missing::NodeGone.into(),
        read_drain: Missing::NodeGone.into(),
        dump_start: Missing::NodeGone.into(),
        restore_start: Missing::NodeGone.into(),
        lazy_start: Missing::NodeGone.into(),
    }
}

/// Puts a node into the indexes, or removes it from those in which it has no place.
pub(super) fn index(node: &Node, domain: Domain, places: &mut Places, readers: &mut Readers) {
    let figures = &node.entry.figures;
    let class = if node.entry.durable {
        NodeClass::Reserved
    } else {
        NodeClass::Transient
    };
    if node.takes_dumps() && node.entry.room_bytes > 0 {
        // A node with unknown figures is not chosen, but the index counts it.
        let _ = places.update(&CopyTarget {
            figures,
            network: node.network(),
            ahead: Bytes::ZERO,
            class,
            domain,
            free: Bytes::new(node.entry.room_bytes),
        });
    } else if node.entry.live {
        places.occupy(figures.node, class, domain);
    } else {
        places.remove(figures.node);
    }
    if node.restores() {
        let _ = readers.update(figures);
    } else {
        readers.remove(figures.node);
    }
}

/// Returns a domain for nodes that have no place in an index anyway.
pub(super) const fn domain_of_nothing() -> Domain {
    Domain {
        zone: 0,
        rack: 0,
        host: 0,
    }
}

pub(super) fn unknown_replicas(count: usize) -> Vec<OnceLock<Option<NodeId>>> {
    let mut replicas = Vec::new();
    replicas.resize_with(count, OnceLock::new);
    replicas
}
