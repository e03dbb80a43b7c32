//! Placement of a dump of a given size and its copies: for `POST /v1/place`, and for the copies that replication and
//! repair make.
//!
//! Rules in the order of their strength: never two copies on one host; the node that takes the dump, when it can;
//! nodes whose copies count towards durability before those whose do not (transient ones, paper 003, and volatile
//! media); zones with fewest copies; racks with fewest; then the time until the copy would be there. That time is
//! paper 000's sum of queue, start and size/bandwidth, as measured. The name of a tier is no rule: it says nothing of a
//! queue, or of the network before the medium. It orders only nodes that have measured nothing yet. Nodes are kept by
//! class and zone in trees that find the quickest without visiting all nodes.

mod domain;
pub(crate) mod tree;

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

pub use permafrost_api_types::nodes::NodeClass;

use crate::NodeId;
use crate::cost::NodeFigures;
use crate::estimator::SizedRates;
use crate::figure::Missing;
use crate::quantity::{Bytes, BytesPerSecond, Seconds};
use tree::{Line, Tree};

pub use domain::DomainNumbers;

/// Failure domains of a node. Numbered by the caller; racks and hosts are unique across zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Domain {
    /// Site of the node. There should be few sites: all are searched.
    pub zone: u32,
    /// Rack of the node.
    pub rack: u32,
    /// Machine that the node runs on.
    pub host: u32,
}

/// Number of nodes of a zone that are examined for one in a rack without a copy.
const RACK_ATTEMPTS: usize = 64;

/// Bandwidth that a node is assumed to have before it has measured one: a gigabit link, bytes a second.
const ASSUMED_BYTES_PER_S: f64 = 125e6;

/// Time added for a node that has measured nothing, so that it comes after all that have. Three years.
const UNMEASURED_S: f64 = 1e8;

/// Time added for each step of the speed class of such a node: longer than any queue.
const SLOWER_CLASS_S: f64 = 1e7;

/// Time added for each number of such a node: equal ones come in the order of their numbers.
const NEXT_NUMBER_S: f64 = 1e-6;

/// Node that could take a copy.
#[derive(Clone, Copy, Debug)]
pub struct CopyTarget<'a> {
    /// Figures of the node.
    pub figures: &'a NodeFigures,
    /// Bandwidth over which a copy comes ([`network`]); `None`: only the medium's counts.
    pub network: Option<BytesPerSecond>,
    /// Bytes that are on their way to it, and in no queue yet.
    pub ahead: Bytes,
    /// Class: copies on a reserved node count towards durability.
    pub class: NodeClass,
    /// Failure domains of the node.
    pub domain: Domain,
    /// Bytes that copies may take there.
    pub free: Bytes,
}

/// Returns the bandwidth of a node's network: the median of its links'.
pub fn network<'a>(links: impl Iterator<Item = &'a SizedRates>) -> Option<BytesPerSecond> {
    let known = links.filter_map(|link| Some(link.sustained().known().ok()?.p50));
    let mut known: Vec<BytesPerSecond> = known.collect();
    let middle = known.len() / 2;
    if known.is_empty() {
        return None;
    }
    let (_, median, _) =
        known.select_nth_unstable_by(middle, |a, b| a.value().total_cmp(&b.value()));
    Some(*median)
}

#[derive(Clone, Copy, Debug)]
struct Known {
    class: NodeClass,
    domain: Domain,
    /// Time that its own dump takes, which needs no network; `None` if it takes no copies.
    own: Option<Line>,
}

/// Dump that is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest<'a> {
    /// Size of the dump.
    pub size: Bytes,
    /// Number of copies altogether, those on `holders` counted.
    pub copies: usize,
    /// The node that takes the dump.
    pub local: Option<NodeId>,
    /// Nodes that have a copy already.
    pub holders: &'a [NodeId],
    /// Nodes that must not be chosen.
    pub without: &'a [NodeId],
}

/// Order of preference among nodes, the stronger rule first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    class: NodeClass,
    /// Copies that the zone has.
    in_zone: usize,
    /// Copies that the rack has.
    in_rack: usize,
    time: Seconds,
    node: NodeId,
}

/// A node that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlacedCopy {
    /// Id of the node.
    pub node: NodeId,
    /// Time until the copy would be there, at the median: queue, fixed time, and write or network, whichever is slower.
    pub arrives_in: Seconds,
    /// True if the copy counts towards durability.
    pub durable: bool,
}

/// Chosen nodes, and the number of copies without one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CopyPlacement {
    /// Chosen nodes, the best first; without those that had a copy already.
    pub nodes: Vec<PlacedCopy>,
    /// Copies for which there is no node.
    pub missing: usize,
    /// Nodes left out as too little is known of them.
    pub unranked: usize,
}

/// Index of nodes for placement.
#[derive(Clone, Debug, Default)]
pub struct Places {
    known: HashMap<NodeId, Known>,
    unranked: HashMap<NodeId, Missing>,
    trees: BTreeMap<(NodeClass, u32), Tree>,
}

impl Places {
    /// Replaces the figures of a node. O(log n), on the average over many.
    ///
    /// # Errors
    ///
    /// [`Missing`] if its bandwidth for writing or its queue is not known: it is then not chosen, but counted.
    pub fn update(&mut self, target: &CopyTarget<'_>) -> Result<(), Missing> {
        let node = target.figures.node;
        match line(target) {
            Ok(own) => {
                let network = target.network.map_or(0.0, |rate| 1.0 / rate.value());
                let per_byte = own.per_byte.max(network);
                self.put(target, own, Line { per_byte, ..own });
                Ok(())
            }
            Err(missing) => {
                self.occupy(node, target.class, target.domain);
                self.unranked.insert(node, missing);
                Err(missing)
            }
        }
    }

    /// Lets a node be chosen that has not measured its speed: after those that have, where classes, zones and racks do
    /// not decide. Of several such nodes the one of the lower `speed_class` comes first, then the one that gets fewer
    /// bytes already, then the one of the lower number.
    pub fn assume(&mut self, target: &CopyTarget<'_>, speed_class: u8) {
        let node = target.figures.node;
        let per_byte = 1.0 / ASSUMED_BYTES_PER_S;
        let start = UNMEASURED_S
            + f64::from(speed_class) * SLOWER_CLASS_S
            + target.ahead.count() as f64 * per_byte
            + f64::from(node.0) * NEXT_NUMBER_S;
        let line = Line {
            node,
            start,
            per_byte,
            free: target.free,
        };
        self.put(target, line, line);
    }

    /// Keeps the domain of a node that takes no copies now, but may hold some.
    pub fn occupy(&mut self, node: NodeId, class: NodeClass, domain: Domain) {
        self.remove(node);
        let known = Known {
            class,
            domain,
            own: None,
        };
        self.known.insert(node, known);
    }

    fn put(&mut self, target: &CopyTarget<'_>, own: Line, over_network: Line) {
        let (node, class, domain) = (own.node, target.class, target.domain);
        let key = (class, domain.zone);
        let is_moved = |known: &Known| (known.class, known.domain.zone) != key;
        if self.known.get(&node).is_some_and(is_moved) {
            self.remove(node);
        }
        self.unranked.remove(&node);
        let known = Known {
            class,
            domain,
            own: Some(own),
        };
        self.known.insert(node, known);
        self.trees.entry(key).or_default().put(over_network);
    }

    /// Forgets a node.
    pub fn remove(&mut self, node: NodeId) {
        self.unranked.remove(&node);
        if let Some(known) = self.known.remove(&node) {
            let key = (known.class, known.domain.zone);
            if let Some(tree) = self.trees.get_mut(&key) {
                tree.remove(node);
                if tree.len() == 0 {
                    self.trees.remove(&key);
                }
            }
        }
    }

    /// Chooses nodes. O(copies × zones × log n), and a step for each node that is nearer and must not be chosen.
    #[must_use]
    pub fn place(&self, wanted: &PlacementRequest<'_>) -> CopyPlacement {
        let mut taken = self.taken(wanted);
        let mut placement = CopyPlacement {
            unranked: self.unranked.len(),
            ..CopyPlacement::default()
        };
        let copies = wanted.copies.saturating_sub(wanted.holders.len());
        // Each copy needs a node of its own: no request is worth more rounds.
        for _ in 0..copies.min(self.known.len()) {
            let first = placement.nodes.is_empty();
            let local = wanted.local.filter(|_| first);
            let found = local
                .and_then(|local| self.at(local, wanted.size, &taken))
                .or_else(|| self.best(wanted.size, &taken));
            let Some((node, arrives_in, known)) = found else {
                break;
            };
            taken.nodes.insert(node);
            taken.take(known.domain);
            placement.nodes.push(PlacedCopy {
                node,
                arrives_in,
                durable: known.class == NodeClass::Reserved,
            });
        }
        placement.missing = copies.saturating_sub(placement.nodes.len());
        placement
    }

    /// Returns the nodes and domains that are used before anything is chosen.
    fn taken(&self, wanted: &PlacementRequest<'_>) -> Taken {
        let domains = wanted.holders.iter().filter_map(|holder| {
            let known = self.known.get(holder)?;
            Some(known.domain)
        });
        let mut taken = Taken {
            nodes: wanted
                .holders
                .iter()
                .chain(wanted.without)
                .copied()
                .collect(),
            hosts: domains.clone().map(|domain| domain.host).collect(),
            racks: Counts::default(),
            zones: Counts::default(),
        };
        for domain in domains {
            taken.racks.add(domain.rack);
            taken.zones.add(domain.zone);
        }
        taken
    }

    /// Returns the figure whose absence excludes a node; `None` if the node is ranked.
    #[must_use]
    pub fn why_unranked(&self, node: NodeId) -> Option<Missing> {
        self.unranked.get(&node).copied()
    }

    fn at(&self, node: NodeId, size: Bytes, taken: &Taken) -> Option<(NodeId, Seconds, Known)> {
        let known = *self.known.get(&node)?;
        if !taken.allows(node, known.domain) {
            return None;
        }
        Some((node, known.own?.time(size)?, known))
    }

    fn best(&self, size: Bytes, taken: &Taken) -> Option<(NodeId, Seconds, Known)> {
        let mut best: Option<(Rank, (NodeId, Seconds, Known))> = None;
        for (&(class, zone), tree) in &self.trees {
            let copies = taken.zones.of(zone);
            // Nothing in it comes before what there is.
            let is_late = |(rank, _): &(Rank, _)| (rank.class, rank.in_zone) < (class, copies);
            if best.as_ref().is_some_and(is_late) {
                continue;
            }
            let Some((node, time, known)) = self.best_of(tree, size, taken) else {
                continue;
            };
            let rank = Rank {
                class,
                in_zone: copies,
                in_rack: taken.racks.of(known.domain.rack),
                time,
                node,
            };
            if best.as_ref().is_none_or(|(other, _)| rank < *other) {
                best = Some((rank, (node, time, known)));
            }
        }
        best.map(|(_, found)| found)
    }

    /// Returns the quickest node of a tree, in a rack with fewer copies if there is one among the next.
    fn best_of(&self, tree: &Tree, size: Bytes, taken: &Taken) -> Option<(NodeId, Seconds, Known)> {
        let mut allowed = tree.quickest(size).filter_map(|(node, time)| {
            let known = *self.known.get(&node)?;
            taken
                .allows(node, known.domain)
                .then_some((node, time, known))
        });
        let mut best = allowed.next()?;
        let mut copies = taken.racks.of(best.2.domain.rack);
        let mut others = allowed.take(RACK_ATTEMPTS);
        while copies > 0
            && let Some(other) = others.next()
        {
            let in_rack = taken.racks.of(other.2.domain.rack);
            if in_rack < copies {
                (best, copies) = (other, in_rack);
            }
        }
        Some(best)
    }
}

fn line(target: &CopyTarget<'_>) -> Result<Line, Missing> {
    let figures = target.figures;
    let queue = figures.write_wait(target.ahead)?;
    let rate = figures.write.sustained().known()?;
    // A fixed time that was never measured counts as 0 on every node.
    let fixed = figures.dump_start.known().map_or(0.0, |t| t.p50.value());
    Ok(Line {
        node: figures.node,
        start: queue.p50.value() + fixed,
        per_byte: 1.0 / rate.p50.value(),
        free: target.free,
    })
}

/// A set that is small, or is not changed much: sorted.
#[derive(Debug)]
struct Few<T>(Vec<T>);

impl<T: Ord + Copy> Few<T> {
    fn contains(&self, one: T) -> bool {
        self.0.binary_search(&one).is_ok()
    }

    fn insert(&mut self, one: T) {
        if let Err(place) = self.0.binary_search(&one) {
            self.0.insert(place, one);
        }
    }
}

impl<T: Ord> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Self {
        let mut all: Vec<T> = all.into_iter().collect();
        all.sort_unstable();
        Self(all)
    }
}

/// Number of copies in each rack, or in each zone, that has any.
#[derive(Debug, Default)]
struct Counts(Vec<(u32, usize)>);

impl Counts {
    fn add(&mut self, one: u32) {
        match self.0.iter_mut().find(|(other, _)| *other == one) {
            Some((_, count)) => *count += 1,
            None => self.0.push((one, 1)),
        }
    }

    fn of(&self, one: u32) -> usize {
        let found = self.0.iter().find(|(other, _)| *other == one);
        found.map_or(0, |(_, count)| *count)
    }
}

/// Nodes, hosts, racks and zones that are used already.
#[derive(Debug)]
struct Taken {
    nodes: Few<NodeId>,
    hosts: Few<u32>,
    racks: Counts,
    zones: Counts,
}

impl Taken {
    fn take(&mut self, domain: Domain) {
        self.hosts.insert(domain.host);
        self.racks.add(domain.rack);
        self.zones.add(domain.zone);
    }

    fn allows(&self, node: NodeId, domain: Domain) -> bool {
        !self.nodes.contains(node) && !self.hosts.contains(domain.host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimator::SizedRates;
    use crate::figure::Figure;
    use crate::quantity::BytesPerSecond;

    const GB: u64 = 1_000_000_000;

    struct Node(u32, NodeClass, u32, u32, u64);

    fn target(figures: &NodeFigures, class: NodeClass, domain: Domain) -> CopyTarget<'_> {
        CopyTarget {
            figures,
            network: None,
            ahead: Bytes::ZERO,
            class,
            domain,
            free: Bytes::new(50 * GB),
        }
    }

    /// Makes nodes that write 1 GB/s, each a host of its own; the last number is the size of its queue, GB.
    fn places(nodes: &[Node]) -> Places {
        let mut places = Places::default();
        for &Node(id, class, zone, rack, queued) in nodes {
            let rate = Figure::given(BytesPerSecond::new(1e9).unwrap());
            let figures = NodeFigures {
                write: SizedRates::uniform(rate),
                write_queue: Figure::given(Bytes::new(queued * GB)),
                ..NodeFigures::unknown(NodeId(id))
            };
            let domain = Domain {
                zone,
                rack,
                host: id,
            };
            places.update(&target(&figures, class, domain)).unwrap();
        }
        places
    }

    fn wanted(copies: usize) -> PlacementRequest<'static> {
        PlacementRequest {
            size: Bytes::new(5 * GB),
            copies,
            local: None,
            holders: &[],
            without: &[],
        }
    }

    fn chosen(places: &Places, wanted: &PlacementRequest<'_>) -> Vec<u32> {
        let placement = places.place(wanted);
        placement.nodes.iter().map(|placed| placed.node.0).collect()
    }

    use NodeClass::{Reserved, Transient};

    #[test]
    fn the_quickest_is_chosen_and_says_when() {
        let places = places(&[Node(1, Reserved, 0, 1, 9), Node(2, Reserved, 0, 2, 3)]);
        let placement = places.place(&wanted(1));
        assert_eq!(placement.nodes[0].node, NodeId(2));
        assert!((placement.nodes[0].arrives_in.value() - 8.0).abs() < 1e-6);
    }

    #[test]
    fn copies_go_to_other_zones_then_to_other_racks() {
        let places = places(&[
            Node(1, Reserved, 0, 1, 0),
            Node(2, Reserved, 0, 1, 1),
            Node(3, Reserved, 0, 2, 2),
            Node(4, Reserved, 9, 9, 30),
        ]);
        assert_eq!(chosen(&places, &wanted(4)), [1, 4, 3, 2]);
        let five = places.place(&wanted(5));
        assert_eq!(five.missing, 1);
    }

    #[test]
    fn the_local_node_is_first_and_transient_ones_are_last_and_do_not_count() {
        let places = places(&[
            Node(1, Transient, 1, 1, 0),
            Node(2, Reserved, 0, 2, 30),
            Node(3, Reserved, 0, 2, 20),
        ]);
        let wanted = PlacementRequest {
            local: Some(NodeId(2)),
            ..wanted(3)
        };
        assert_eq!(chosen(&places, &wanted), [2, 3, 1]);
        let placement = places.place(&wanted);
        assert!(placement.nodes[1].durable && !placement.nodes[2].durable);
    }

    #[test]
    fn holders_their_hosts_and_the_excluded_are_left_out() {
        let mut places = places(&[
            Node(1, Reserved, 0, 1, 0),
            Node(2, Reserved, 0, 2, 1),
            Node(3, Reserved, 0, 3, 2),
        ]);
        let wanted = PlacementRequest {
            holders: &[NodeId(1)],
            without: &[NodeId(2)],
            ..wanted(2)
        };
        assert_eq!(chosen(&places, &wanted), [3]);
        places.remove(NodeId(3));
        assert_eq!(places.place(&wanted).missing, 1);
    }

    #[test]
    fn a_holder_that_takes_nothing_keeps_its_host_rack_and_zone() {
        let mut places = places(&[Node(2, Reserved, 0, 1, 0), Node(3, Reserved, 0, 2, 9)]);
        let domain = Domain {
            zone: 0,
            rack: 1,
            host: 1,
        };
        places.occupy(NodeId(1), Reserved, domain);
        let wanted = PlacementRequest {
            holders: &[NodeId(1)],
            ..wanted(2)
        };
        assert_eq!(chosen(&places, &wanted), [3]);
    }

    #[test]
    fn a_rack_with_one_copy_goes_before_a_rack_with_two() {
        let places = places(&[
            Node(1, Reserved, 0, 1, 0),
            Node(2, Reserved, 0, 1, 0),
            Node(3, Reserved, 0, 2, 0),
            Node(4, Reserved, 0, 1, 1),
            Node(5, Reserved, 0, 2, 9),
        ]);
        let wanted = PlacementRequest {
            holders: &[NodeId(1), NodeId(2), NodeId(3)],
            ..wanted(4)
        };
        assert_eq!(chosen(&places, &wanted), [5]);
    }

    #[test]
    fn a_copy_comes_over_the_network_and_the_local_dump_does_not() {
        let mut places = Places::default();
        let figures = NodeFigures {
            write: SizedRates::uniform(Figure::given(BytesPerSecond::new(1e9).unwrap())),
            write_queue: Figure::given(Bytes::ZERO),
            ..NodeFigures::unknown(NodeId(1))
        };
        let domain = Domain {
            zone: 0,
            rack: 0,
            host: 0,
        };
        let slow = CopyTarget {
            network: BytesPerSecond::new(1e8).ok(),
            ..target(&figures, Reserved, domain)
        };
        places.update(&slow).unwrap();
        let arrives = |local| {
            let placement = places.place(&PlacementRequest { local, ..wanted(1) });
            placement.nodes[0].arrives_in.value()
        };
        assert!((arrives(None) - 50.0).abs() < 1e-6);
        assert!((arrives(Some(NodeId(1))) - 5.0).abs() < 1e-6);
    }

    #[test]
    fn unmeasured_nodes_come_last_by_class_of_speed_then_by_what_they_get() {
        let mut places = places(&[Node(9, Reserved, 0, 9, 900)]);
        for (id, speed_class, ahead) in [(1, 1, 0), (2, 0, 1), (3, 0, 0), (4, 0, 0)] {
            let figures = NodeFigures::unknown(NodeId(id));
            let domain = Domain {
                zone: 0,
                rack: id,
                host: id,
            };
            let unmeasured = CopyTarget {
                ahead: Bytes::new(ahead * GB),
                ..target(&figures, Reserved, domain)
            };
            places.assume(&unmeasured, speed_class);
        }
        assert_eq!(chosen(&places, &wanted(5)), [9, 3, 4, 2, 1]);
    }

    #[test]
    fn no_node_without_room_and_none_that_is_unknown() {
        let mut places = places(&[Node(1, Reserved, 0, 1, 0)]);
        let large = PlacementRequest {
            size: Bytes::new(51 * GB),
            ..wanted(1)
        };
        assert_eq!(places.place(&large).missing, 1);
        // It stops reporting: known before, not chosen now, and counted.
        let domain = Domain {
            zone: 0,
            rack: 1,
            host: 1,
        };
        let unknown = NodeFigures::unknown(NodeId(1));
        assert!(places.update(&target(&unknown, Reserved, domain)).is_err());
        let placement = places.place(&wanted(1));
        assert_eq!((placement.missing, placement.unranked), (1, 1));
        assert!(places.why_unranked(NodeId(1)).is_some());
    }

    #[test]
    fn absurd_numbers_of_copies_are_answered() {
        let places = places(&[Node(1, Reserved, 0, 1, 0)]);
        let placement = places.place(&wanted(usize::MAX));
        assert_eq!(placement.nodes.len(), 1);
        assert_eq!(placement.missing, usize::MAX - 1);
    }
}
