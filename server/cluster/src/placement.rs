//! Chooses the nodes for the copies of a dump. A pure function of what is known of the nodes.
//!
//! Rules, the stronger first: never two copies on one host; only nodes that are alive, take copies and have room;
//! nodes whose copies count towards durability before those whose do not (transient ones, volatile media); zones
//! that have no copy yet, then racks; then how soon the copy would be there: tier, bandwidth and queue; then the
//! name, so that the same facts give the same choice.

use super::nodes::LiveNode;
use super::values::{MemberState, NodeFacts, Tier};

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
    let mut taken: Vec<&LiveNode> = nodes
        .iter()
        .filter(|node| wanted.holders.contains(&node.facts.name))
        .collect();
    // A holder that is not live has a copy that may come back; it is not counted, because that is uncertain.
    let mut durable = taken.iter().filter(|node| counts(node)).count();
    let mut placed = taken.len();
    let mut chosen = Vec::new();
    while placed < wanted.copies {
        let candidates = nodes
            .iter()
            .filter(|node| is_fit(node, wanted))
            .filter(|node| taken.iter().all(|other| host(other) != host(node)));
        let Some(best) = candidates.min_by_key(|node| rank(node, wanted, &taken)) else {
            break;
        };
        taken.push(best);
        durable += usize::from(counts(best));
        placed += 1;
        chosen.push(best.facts.name.clone());
    }
    ChosenNodes {
        nodes: chosen,
        durable,
        missing: wanted.copies.saturating_sub(placed),
    }
}

/// Returns true if a copy on the node counts towards durability.
fn counts(node: &LiveNode) -> bool {
    node.facts.counts()
}

/// Returns true if a node takes copies, and has room for one of that size.
pub(super) fn has_room(node: &LiveNode, size_bytes: u64) -> bool {
    let facts = &node.facts;
    let room = facts.room_bytes();
    node.state == MemberState::Active && facts.takes_copies() && room > 0 && room >= size_bytes
}

fn is_fit(node: &LiveNode, wanted: &CopiesWanted<'_>) -> bool {
    let facts = &node.facts;
    has_room(node, wanted.size_bytes)
        && !wanted.without.contains(&facts.name)
        && !wanted.holders.contains(&facts.name)
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

fn rack(node: &LiveNode) -> (&str, &str) {
    (&node.facts.domain.zone, &node.facts.domain.rack)
}

fn zone(node: &LiveNode) -> &str {
    &node.facts.domain.zone
}

/// Rank of a candidate, compared part by part; smaller is better.
type Rank<'a> = (bool, bool, usize, usize, Tier, u64, &'a str);

fn rank<'a>(node: &'a LiveNode, wanted: &CopiesWanted<'_>, taken: &[&LiveNode]) -> Rank<'a> {
    let in_zone = taken.iter().filter(|other| zone(other) == zone(node));
    let in_rack = taken.iter().filter(|other| rack(other) == rack(node));
    (
        node.facts.name != wanted.local,
        !counts(node),
        in_zone.count(),
        in_rack.count(),
        node.facts.tier,
        arrival_ms(&node.facts, wanted.size_bytes),
        &node.facts.name,
    )
}

/// Returns the time in which the copy would arrive if no other transfer came, milliseconds; unknown bandwidth
/// counts as slow.
fn arrival_ms(facts: &NodeFacts, size_bytes: u64) -> u64 {
    /// A gigabit link, bytes a second.
    const UNKNOWN: u64 = 125_000_000;
    let measured = |bytes_per_s: u64| {
        if bytes_per_s == 0 {
            UNKNOWN
        } else {
            bytes_per_s
        }
    };
    let bytes_per_s = measured(facts.write_bytes_per_s).min(measured(facts.network_bytes_per_s));
    // For a dump of unknown size, this still shows which node is faster.
    let bytes = facts.queued_bytes.saturating_add(size_bytes.max(1 << 30));
    let ms = u128::from(bytes) * 1000 / u128::from(bytes_per_s);
    u64::try_from(ms).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::values::{FailureDomain, NodeClass};
    use super::*;

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

    #[test]
    fn the_faster_and_the_less_busy_are_preferred() {
        let mut nodes = [
            node("a", "", "", "a"),
            node("b", "", "", "b"),
            node("c", "", "", "c"),
            node("d", "", "", "d"),
        ];
        for node in &mut nodes {
            node.facts.write_bytes_per_s = 1 << 30;
            node.facts.network_bytes_per_s = 1 << 30;
        }
        nodes[1].facts.network_bytes_per_s = 1 << 20;
        nodes[2].facts.queued_bytes = 8 << 30;
        assert_eq!(place(&nodes, &wanted(4)).nodes, ["a", "d", "c", "b"]);
        nodes[1].facts.tier = Tier::Pmem;
        assert_eq!(place(&nodes, &wanted(2)).nodes, ["a", "b"]);
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
