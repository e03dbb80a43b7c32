//! Chooses the nodes for the copies of a dump. A pure function of what is known of the nodes.
//!
//! The rules and their order are those of [`permafrost_scheduling::place`], by which the API answers `POST
//! /v1/place`: both name the same nodes in the same order. Only nodes are chosen that are alive, take copies and have
//! room. Of a node that has not measured its speed the API can say no time, and leaves it out; here it comes last in
//! its zone.

use std::time::Duration;

use permafrost_metering::costs::{Believed, believe};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::place::{
    CopyTarget, DomainNumbers, NodeClass, PlacementRequest, Places, network,
};
use permafrost_scheduling::quantity::Bytes;

use super::nodes::LiveNode;
use super::values::{FailureDomain, MemberState};

/// Size by which nodes are compared for a dump of unknown size: it shows which node is faster.
const UNKNOWN_SIZE: Bytes = Bytes::mib(1 << 10);

/// Request for a placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopiesWanted<'a> {
    /// Name of the node that takes the dump; it holds the first copy when it can.
    pub local: &'a str,
    /// Total number of copies, the local one included.
    pub copies: usize,
    /// Expected size, bytes; 0 if unknown.
    pub size_bytes: u64,
    /// Nodes that already hold a copy: they are not chosen again, and their zones, racks and hosts are taken.
    pub holders: &'a [String],
    /// Nodes that must not be chosen: they have just failed.
    pub without: &'a [String],
}

/// Nodes chosen for the copies of a dump.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChosenNodes {
    /// Chosen nodes by name, best first; the local one first of all. Without those that hold a copy already.
    pub nodes: Vec<String>,
    /// Number of copies, chosen or existing, that count towards durability.
    pub durable: usize,
    /// Copies that no node could be found for.
    pub missing: usize,
}

/// Chooses nodes for `wanted.copies` copies.
#[must_use]
pub fn place(nodes: &[LiveNode], wanted: &CopiesWanted<'_>) -> ChosenNodes {
    // Numbered by name, so that the same facts give the same choice.
    let mut by_name: Vec<&LiveNode> = nodes.iter().collect();
    by_name.sort_unstable_by(|a, b| a.facts.name.cmp(&b.facts.name));
    let numbered = || (0..).map(NodeId).zip(&by_name);
    let index = index(numbered(), wanted.size_bytes);
    let ids = |names: &[String]| -> Vec<NodeId> {
        let named = numbered().filter(|(_, node)| names.contains(&node.facts.name));
        named.map(|(id, _)| id).collect()
    };
    // A holder that is not live has a copy that may come back; it is not counted, because that is uncertain.
    let holders = ids(wanted.holders);
    let local = numbered().find(|(_, node)| node.facts.name == wanted.local);
    let chosen = index.place(&PlacementRequest {
        size: match wanted.size_bytes {
            0 => UNKNOWN_SIZE,
            size => Bytes::new(size),
        },
        copies: wanted.copies,
        local: local.map(|(id, _)| id),
        holders: &holders,
        without: &ids(wanted.without),
    });
    let node = |id: NodeId| by_name.get(id.0 as usize);
    let durable = holders.iter().filter_map(|&id| node(id));
    let durable = durable.filter(|node| node.facts.counts()).count();
    let names = chosen.nodes.iter().filter_map(|placed| node(placed.node));
    ChosenNodes {
        nodes: names.map(|node| node.facts.name.clone()).collect(),
        durable: durable + chosen.nodes.iter().filter(|placed| placed.durable).count(),
        missing: chosen.missing,
    }
}

/// Returns an index of the nodes with room for `size_bytes`, and of the domains of the others.
fn index<'a>(nodes: impl Iterator<Item = (NodeId, &'a &'a LiveNode)>, size_bytes: u64) -> Places {
    let mut domains = DomainNumbers::default();
    let mut index = Places::default();
    for (id, node) in nodes {
        let facts = &node.facts;
        let FailureDomain { host, rack, zone } = &facts.domain;
        let domain = domains.number(&facts.name, zone, rack, host);
        let class = if facts.counts() {
            NodeClass::Reserved
        } else {
            NodeClass::Transient
        };
        if !has_room(node, size_bytes) {
            index.occupy(id, class, domain);
            continue;
        }
        let report = facts.figures.as_ref();
        let believed = report.map_or_else(
            || Believed::nothing(id),
            |report| believe(None, report, Duration::ZERO, id),
        );
        // The planner of repair adds the copies that it has just planned.
        let reported = report.map_or(0, |report| report.write_queue.bytes);
        let target = CopyTarget {
            figures: &believed.figures,
            network: network(believed.links.values()),
            ahead: Bytes::new(facts.queued_bytes.saturating_sub(reported)),
            class,
            domain,
            // The room was compared with the size, which may be unknown.
            free: Bytes::MAX,
        };
        if index.update(&target).is_err() {
            index.assume(&target, facts.tier as u8);
        }
    }
    index
}

/// Returns true if a node takes copies, and has room for one of that size.
pub(super) fn has_room(node: &LiveNode, size_bytes: u64) -> bool {
    let facts = &node.facts;
    let room = facts.room_bytes();
    node.state == MemberState::Active && facts.takes_copies() && room > 0 && room >= size_bytes
}

/// Returns the host of a node, the smallest failure domain. Hosts are compared within their rack and zone:
/// names may be used twice.
pub(super) fn host(node: &LiveNode) -> (&str, &str, &str) {
    let domain = &node.facts.domain;
    if domain.host.is_empty() {
        // No machine has this as its zone, rack and name.
        ("\0node", "", &node.facts.name)
    } else {
        (&domain.zone, &domain.rack, &domain.host)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use permafrost_metering::QueueReport;
    use permafrost_metering::costs::NodeReport;
    use permafrost_scheduling::estimator::SizedRates;
    use permafrost_scheduling::figure::Figure;
    use permafrost_scheduling::quantity::BytesPerSecond;

    use super::super::values::{NodeFacts, Tier};
    use super::*;

    fn is_fit(node: &LiveNode, wanted: &CopiesWanted<'_>) -> bool {
        let name = &node.facts.name;
        has_room(node, wanted.size_bytes)
            && !wanted.without.contains(name)
            && !wanted.holders.contains(name)
    }

    fn zone(node: &LiveNode) -> &str {
        &node.facts.domain.zone
    }

    fn node(name: &str, zone: &str, rack: &str, host: &str) -> LiveNode {
        LiveNode {
            facts: NodeFacts {
                name: name.into(),
                domain: FailureDomain {
                    host: host.into(),
                    rack: rack.into(),
                    zone: zone.into(),
                },
                capacity_bytes: 100 << 30,
                free_bytes: 50 << 30,
                ..NodeFacts::default()
            },
            state: MemberState::Active,
            token: 1,
        }
    }

    fn wanted(copies: usize) -> CopiesWanted<'static> {
        CopiesWanted {
            local: "a",
            copies,
            size_bytes: 1 << 30,
            holders: &[],
            without: &[],
        }
    }

    #[test]
    fn the_local_node_first_then_other_zones_then_other_racks() {
        let nodes = [
            node("d", "z1", "r2", "d"),
            node("b", "z1", "r1", "b"),
            node("a", "z1", "r1", "a"),
            node("c", "z2", "r1", "c"),
        ];
        let placement = place(&nodes, &wanted(4));
        assert_eq!(placement.nodes, ["a", "c", "d", "b"]);
        assert_eq!((placement.durable, placement.missing), (4, 0));
    }

    #[test]
    fn transient_nodes_come_last_and_do_not_count() {
        let mut nodes = [
            node("a", "", "", "a"),
            node("b", "z2", "", "b"),
            node("c", "", "", "c"),
        ];
        nodes[1].facts.class = NodeClass::Transient;
        let placement = place(&nodes, &wanted(3));
        assert_eq!(placement.nodes, ["a", "c", "b"]);
        assert_eq!(placement.durable, 2);
    }

    #[test]
    fn nodes_on_volatile_media_come_last_and_count_only_where_the_operator_says_so() {
        let mut nodes = [
            node("a", "", "", "a"),
            node("b", "z2", "", "b"),
            node("c", "", "", "c"),
        ];
        for node in &mut nodes[..2] {
            node.facts.volatile = true;
        }
        let placement = place(&nodes, &wanted(3));
        assert_eq!(placement.nodes, ["a", "c", "b"]);
        assert_eq!(placement.durable, 1);
        nodes[1].facts.counts_although_volatile = true;
        let placement = place(&nodes, &wanted(3));
        assert_eq!(placement.nodes, ["a", "b", "c"]);
        assert_eq!(placement.durable, 2);
    }

    #[test]
    fn full_drained_stopping_and_failed_nodes_are_left_out() {
        let mut nodes = [
            node("a", "", "", "a"),
            node("b", "", "", "b"),
            node("c", "", "", "c"),
            node("d", "", "", "d"),
        ];
        nodes[0].facts.free_bytes = 1 << 30;
        nodes[1].state = MemberState::Drained;
        nodes[2].facts.draining = true;
        let without = ["d".to_owned()];
        let placement = place(
            &nodes,
            &CopiesWanted {
                without: &without,
                ..wanted(2)
            },
        );
        assert_eq!((placement.nodes.len(), placement.missing), (0, 2));
    }

    #[test]
    fn holders_take_their_places() {
        let nodes = [
            node("a", "z1", "", "a"),
            node("b", "z1", "", "b"),
            node("c", "z2", "", "c"),
        ];
        let holders = ["a".to_owned()];
        let placement = place(
            &nodes,
            &CopiesWanted {
                holders: &holders,
                ..wanted(2)
            },
        );
        assert_eq!(placement.nodes, ["c"]);
        assert_eq!(placement.durable, 2);
    }

    fn measured(node: &mut LiveNode, write: f64, link: f64, queued_gib: u64) {
        let rate = |gib_per_s: f64| {
            let rate = BytesPerSecond::new(gib_per_s * (1 << 30) as f64).unwrap();
            SizedRates::uniform(Figure::given(rate))
        };
        node.facts.queued_bytes = queued_gib << 30;
        node.facts.figures = Some(NodeReport {
            write: rate(write),
            write_queue: QueueReport {
                bytes: queued_gib << 30,
                ..QueueReport::default()
            },
            links: [("z".to_owned(), rate(link))].into(),
            ..NodeReport::default()
        });
    }

    #[test]
    fn the_sooner_is_preferred_whatever_the_tier_and_the_unmeasured_come_last() {
        let mut nodes = [
            node("a", "", "", "a"),
            node("b", "", "", "b"),
            node("c", "", "", "c"),
            node("d", "", "", "d"),
            node("e", "", "", "e"),
        ];
        measured(&mut nodes[1], 1.0, 0.01, 0);
        measured(&mut nodes[2], 4.0, 1.0, 8);
        measured(&mut nodes[3], 1.0, 1.0, 0);
        nodes[2].facts.tier = Tier::Pmem;
        assert_eq!(place(&nodes, &wanted(5)).nodes, ["a", "d", "c", "b", "e"]);
        // Nothing is measured: the medium's kind is all that is known.
        for node in &mut nodes {
            node.facts.figures = None;
            node.facts.queued_bytes = 0;
        }
        assert_eq!(place(&nodes, &wanted(3)).nodes, ["a", "c", "b"]);
    }

    prop_compose! {
        fn any_node()(
            name in 0..40u8, zone in 0..4u8, rack in 0..3u8, host in 0..6u8, free_gib in 0..6u64,
            queued_gib in 0..3u64, transient in any::<bool>(), state in 0..6u8, draining in 0..6u8,
            fast in 0..4u64,
        ) -> LiveNode {
            let text = |kind: &str, number: u8| if number == 0 { String::new() } else { format!("{kind}{number}") };
            let mut node = node(&format!("n{name:02}"), &text("z", zone), &text("r", rack), &text("h", host));
            node.facts.capacity_bytes = 8 << 30;
            node.facts.free_bytes = free_gib << 30;
            node.facts.queued_bytes = queued_gib << 30;
            node.facts.network_bytes_per_s = fast << 28;
            if transient { node.facts.class = NodeClass::Transient; }
            if state == 0 { node.state = MemberState::Drained; }
            if state == 1 { node.state = MemberState::Removed; }
            node.facts.draining = draining == 0;
            node
        }
    }

    proptest! {
        #[test]
        fn every_choice_keeps_the_rules(
            mut nodes in prop::collection::vec(any_node(), 0..14), copies in 0..6usize, size_gib in 0..3u64,
            local in 0..40u8, held in prop::collection::vec(0..40u8, 0..3), failed in prop::collection::vec(0..40u8, 0..3),
        ) {
            nodes.sort_by(|a, b| a.facts.name.cmp(&b.facts.name));
            nodes.dedup_by(|a, b| a.facts.name == b.facts.name);
            let names = |numbers: &[u8]| numbers.iter().map(|n| format!("n{n:02}")).collect::<Vec<_>>();
            let (local, held, failed) = (format!("n{local:02}"), names(&held), names(&failed));
            let wanted = CopiesWanted { local: &local, copies, size_bytes: size_gib << 30, holders: &held, without: &failed };
            let placement = place(&nodes, &wanted);
            let by_name = |name: &String| nodes.iter().find(|node| node.facts.name == *name).unwrap();
            let chosen: Vec<_> = placement.nodes.iter().map(by_name).collect();
            let holders: Vec<_> = nodes.iter().filter(|node| held.contains(&node.facts.name)).collect();

            // The numbers add up.
            prop_assert_eq!(chosen.len() + placement.missing, copies.saturating_sub(holders.len()));
            let all = chosen.iter().chain(&holders);
            prop_assert_eq!(placement.durable, all.filter(|node| node.facts.class == NodeClass::Reserved).count());
            // Only fit nodes, none twice, none on a host that has a copy.
            for (index, node) in chosen.iter().enumerate() {
                prop_assert!(node.state == MemberState::Active && !node.facts.draining);
                prop_assert!(node.facts.free_bytes - node.facts.queued_bytes.min(node.facts.free_bytes) >= size_gib << 30);
                prop_assert!(!held.contains(&node.facts.name) && !failed.contains(&node.facts.name));
                for other in chosen[..index].iter().chain(&holders) {
                    prop_assert!(host(node) != host(other));
                }
            }
            // No node was missed: all that were left out are unfit, or on a host that has a copy.
            if placement.missing > 0 {
                for node in &nodes {
                    let is_used = chosen.iter().chain(&holders).any(|other| host(other) == host(node));
                    prop_assert!(is_used || !is_fit(node, &wanted));
                }
            }
            // The local node is the first if it is chosen, and chosen if it is fit.
            if let Some(own) = nodes.iter().find(|node| node.facts.name == local) {
                let is_free = holders.iter().all(|other| host(other) != host(own));
                if is_fit(own, &wanted) && is_free && copies > holders.len() {
                    prop_assert_eq!(&placement.nodes[0], &local);
                }
            }
            // Deterministic, whatever the order of the nodes.
            nodes.reverse();
            prop_assert_eq!(place(&nodes, &wanted), placement);
        }

        #[test]
        fn two_copies_are_in_two_zones_where_there_are_two(
            mut nodes in prop::collection::vec(any_node(), 2..14), size_gib in 0..3u64,
        ) {
            nodes.sort_by(|a, b| a.facts.name.cmp(&b.facts.name));
            nodes.dedup_by(|a, b| a.facts.name == b.facts.name);
            // All of one class, because a reserved node in the same zone goes before a transient one in another.
            for node in &mut nodes { node.facts.class = NodeClass::Reserved; }
            let local = nodes[0].facts.name.clone();
            let wanted = CopiesWanted { local: &local, copies: 2, size_bytes: size_gib << 30, holders: &[], without: &[] };
            let mut zones: Vec<_> = nodes.iter().filter(|node| is_fit(node, &wanted)).map(zone).collect();
            zones.sort_unstable();
            zones.dedup();
            let placement = place(&nodes, &wanted);
            let zone_of = |name: &String| zone(nodes.iter().find(|node| node.facts.name == *name).unwrap());
            if zones.len() >= 2 {
                prop_assert_eq!(placement.nodes.len(), 2);
                prop_assert_ne!(zone_of(&placement.nodes[0]), zone_of(&placement.nodes[1]));
            }
        }
    }
}
