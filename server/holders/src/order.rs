//! Order in which holders are asked: a pure function of what is known of the nodes.

use permafrost_cluster::{FailureDomain, NodesView};

/// Returns `holders` without `node` itself: live nodes before the others, and within each group the same host
/// first, then the same rack, the same zone, and the others; then by name.
#[must_use]
pub fn nearest_first(
    view: &NodesView,
    node: &str,
    domain: &FailureDomain,
    holders: &[String],
) -> Vec<String> {
    let mut names: Vec<_> = holders.iter().filter(|name| *name != node).collect();
    names.sort_by_cached_key(|&name| {
        let live = view.nodes.iter().find(|live| live.facts.name == *name);
        let distance = live.map_or(u8::MAX, |live| distance(domain, &live.facts.domain));
        (live.is_none(), distance, name)
    });
    names.dedup();
    names.into_iter().cloned().collect()
}

/// Returns the distance of two failure domains. Racks are compared within their zone, and hosts within their
/// rack: names may be used twice. Unknown parts are equal everywhere, but for the host.
fn distance(ours: &FailureDomain, theirs: &FailureDomain) -> u8 {
    if ours.zone != theirs.zone {
        3
    } else if ours.rack != theirs.rack {
        2
    } else {
        u8::from(ours.host.is_empty() || ours.host != theirs.host)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use permafrost_cluster::{LiveNode, MemberState, NodeFacts};

    fn domain(zone: &str, rack: &str, host: &str) -> FailureDomain {
        FailureDomain {
            host: host.to_owned(),
            rack: rack.to_owned(),
            zone: zone.to_owned(),
        }
    }

    fn view(nodes: &[(&str, FailureDomain)]) -> NodesView {
        let nodes = nodes.iter().map(|(name, domain)| LiveNode {
            facts: NodeFacts {
                name: (*name).to_owned(),
                domain: domain.clone(),
                ..NodeFacts::default()
            },
            state: MemberState::Active,
            token: 1,
        });
        NodesView {
            nodes: nodes.collect(),
            members: Vec::new(),
            age: Duration::ZERO,
        }
    }

    fn order(view: &NodesView, domain: &FailureDomain, holders: &[&str]) -> Vec<String> {
        let holders: Vec<_> = holders.iter().map(|&name| name.to_owned()).collect();
        nearest_first(view, "me", domain, &holders)
    }

    #[test]
    fn the_nearest_live_one_is_asked_first() {
        let view = view(&[
            ("a-far", domain("z2", "r1", "h1")),
            ("b-zone", domain("z1", "r2", "h1")),
            ("c-rack", domain("z1", "r1", "h2")),
            ("d-host", domain("z1", "r1", "h1")),
            ("e-rack", domain("z1", "r1", "h3")),
        ]);
        let ours = domain("z1", "r1", "h1");
        let holders = [
            "0-gone", "a-far", "b-zone", "me", "e-rack", "c-rack", "d-host", "a-far",
        ];
        let expected = ["d-host", "c-rack", "e-rack", "b-zone", "a-far", "0-gone"];
        assert_eq!(order(&view, &ours, &holders), expected);
    }

    #[test]
    fn unknown_hosts_are_apart_and_unknown_racks_are_one() {
        let view = view(&[
            ("a", domain("z2", "", "")),
            ("b", domain("z1", "", "")),
            ("c", domain("z1", "r1", "")),
        ]);
        assert_eq!(
            order(&view, &domain("z1", "r1", ""), &["a", "b", "c"]),
            ["c", "b", "a"]
        );
        assert_eq!(
            order(&view, &domain("z1", "", ""), &["a", "b", "c"]),
            ["b", "c", "a"]
        );
        assert_eq!(distance(&domain("z", "", ""), &domain("z", "", "")), 1);
    }

    #[test]
    fn nobody_holds_it_but_this_node() {
        assert!(order(&view(&[]), &FailureDomain::default(), &["me"]).is_empty());
    }
}
