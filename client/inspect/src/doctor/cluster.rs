//! The cluster: its nodes, their clocks, and the registry.

use permafrost_protocol::control::{
    ClusterStatus, NodeList, NodeStatus, RegistryMember, ServerStatus, request,
};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::human;

use super::report::Findings;

const AREA: &str = "cluster";
const REGISTRY: &str = "registry";

/// Difference of clocks, milliseconds, that shows in dates, and in the order of lists.
const CLOCK_WARNING_MS: u64 = 1_000;

/// Difference of clocks, milliseconds, at which certificates that were just issued are refused as not yet valid.
const CLOCK_ERROR_MS: u64 = 60_000;

/// Round trip to the registry, microseconds, from which on each dump waits noticeably.
const SLOW_US: u64 = 100_000;

/// Time for which a node tells what it has found when it was asked last (server/cluster, `probe`), seconds.
const PROBES_KEPT_S: u64 = 3;

/// Oldest etcd with what is used of it.
const OLDEST_ETCD: (u32, u32) = (3, 4);

pub(super) fn check(findings: &mut Findings, context: &Context, status: &ServerStatus) {
    if let Some(cluster) = &status.cluster {
        standing(findings, cluster);
    } else if !status.agent {
        return findings.skipped((AREA, "nodes"), "permafrostd is in no cluster (--catalog)");
    }
    match ask(context) {
        Ok(list) => check_nodes(findings, &list),
        Err(failure) => findings.error(
            (AREA, "nodes"),
            failure.message,
            if failure.hint.is_empty() {
                "see that the registry answers: `permafrost node ls`".to_owned()
            } else {
                failure.hint
            },
        ),
    }
}

fn ask(context: &Context) -> Result<NodeList, Failure> {
    let nodes = request::Nodes {
        name: String::new(),
        probe: true,
    };
    Ok(context.connect()?.call(nodes)?)
}

fn standing(findings: &mut Findings, cluster: &ClusterStatus) {
    let place = (AREA, "this node");
    if cluster.fenced.is_empty() {
        findings.ok(place, format!("{} takes part", cluster.node));
    } else {
        findings.error(
            place,
            format!("{} is fenced: {}", cluster.node, cluster.fenced),
            "see that etcd answers, and that no other node has this name or region; it takes part again by itself",
        );
    }
    let copies = (AREA, "copies");
    if let Some(stranded @ 1..) = cluster.stranded {
        findings.error(
            copies,
            human::count(
                stranded,
                "checkpoint has no good copy on a node that is alive",
                "checkpoints have no good copy on a node that is alive",
            ),
            "start the nodes that hold them: `permafrost node ls` names those that are down",
        );
    } else if let Some(few @ 1..) = cluster.under_replicated {
        findings.warning(
            copies,
            human::count(few, "checkpoint has too few copies", "checkpoints have too few copies"),
            "repair makes them by itself once there are nodes with room: `permafrost node ls`, docs/cluster.md",
        );
    } else if cluster.stranded.is_none() {
        findings.skipped(copies, "the registry does not answer");
    } else {
        findings.ok(
            copies,
            "every checkpoint has the copies that it should have",
        );
    }
    if let Some(damaged @ 1..) = cluster.damaged {
        findings.error(
            (AREA, "damaged copies"),
            human::count(
                damaged,
                "checkpoint has a damaged copy",
                "checkpoints have damaged copies",
            ),
            "`permafrost node ls` tells where; `permafrost scrub` there heals them",
        );
    }
}

pub(super) fn check_nodes(findings: &mut Findings, list: &NodeList) {
    if list.leader.is_empty() {
        findings.warning(
            (AREA, "leader"),
            "none, or it is not known: nothing is repaired meanwhile",
            "wait a lease's time, then see that etcd answers and that a node is alive",
        );
    } else {
        findings.ok((AREA, "leader"), &*list.leader);
    }
    for node in &list.nodes {
        check_node(findings, node, &list.answered_by);
    }
    if list.nodes.iter().any(|node| node.probe.is_some()) || !list.registry.is_empty() {
        findings.ok(
            (AREA, "age of answers"),
            format!(
                "{} asked the nodes for their clocks, and etcd, within the last {PROBES_KEPT_S} s",
                list.answered_by
            ),
        );
    }
    let versions: std::collections::BTreeSet<&str> = list
        .nodes
        .iter()
        .filter(|node| node.live)
        .map(|node| node.version.as_str())
        .collect();
    if versions.len() > 1 {
        findings.warning(
            (AREA, "versions"),
            versions.into_iter().collect::<Vec<_>>().join(", "),
            "finish the upgrade: nodes of different versions are meant for the time of one",
        );
    }
    for member in &list.registry {
        check_member(findings, member);
    }
}

fn check_node(findings: &mut Findings, node: &NodeStatus, asking: &str) {
    let name = format!("node {}", node.name);
    let place = (AREA, name.as_str());
    if !node.live {
        return match node.state.as_str() {
            "removed" => findings.ok(place, "removed"),
            _ => findings.warning(
                place,
                "down",
                format!(
                    "start it, or `permafrost node drain {0}` and `remove {0}`",
                    node.name
                ),
            ),
        };
    }
    if node.state == "failed" {
        findings.error(
            place,
            "its medium has failed: its checkpoints are copied away",
            format!("replace the medium: `permafrost node show {}`", node.name),
        );
    } else {
        findings.ok(place, format!("up, {}, {}", node.state, node.version));
    }
    if node.name == asking {
        return;
    }
    let name = format!("clock of {}", node.name);
    let place = (AREA, name.as_str());
    let Some(probe) = &node.probe else {
        return findings.skipped(
            place,
            "the node that answers does not ask others (an older version)",
        );
    };
    if !probe.error.is_empty() {
        return findings.error(
            (AREA, &format!("way to {}", node.name)),
            format!("{asking} cannot reach it at {}: {}", node.address, probe.error),
            "see that its UDP port is open between the nodes (--listen-peers, --advertise), and that both certificates are of one CA",
        );
    }
    match probe.clock_ahead_ms {
        None => findings.skipped(place, "it does not say (an older version)"),
        Some(ahead) => check_clock(findings, place, ahead, probe.round_trip_us / 2_000, asking),
    }
}

/// Judges a clock that is ahead of that of `than` by `ahead_ms`, known to `exact_ms`.
pub(super) fn check_clock(
    findings: &mut Findings,
    place: (&'static str, &str),
    ahead_ms: i64,
    exact_ms: u64,
    than: &str,
) {
    let off_ms = ahead_ms.unsigned_abs();
    let found = format!(
        "{} {} that of {than}",
        human::millis(off_ms),
        if ahead_ms < 0 { "behind" } else { "ahead of" }
    );
    let certain_ms = off_ms.saturating_sub(exact_ms);
    let advice = "run a time service (chrony, systemd-timesyncd) on all machines: certificates and dates go by the clock; leases and the order of checkpoints do not";
    if certain_ms >= CLOCK_ERROR_MS {
        findings.error(place, found, advice);
    } else if certain_ms >= CLOCK_WARNING_MS {
        findings.warning(place, found, advice);
    } else {
        findings.ok(
            place,
            format!(
                "within {} of that of {than}",
                human::millis(off_ms.max(exact_ms).max(1))
            ),
        );
    }
}

fn check_member(findings: &mut Findings, member: &RegistryMember) {
    let name = match member.address.as_str() {
        "" => "etcd",
        address => address,
    };
    let place = (REGISTRY, name);
    if !member.error.is_empty() {
        return findings.error(
            place,
            format!("does not answer: {}", member.error),
            "start it, and see that its port is open; the cluster goes on while most members of etcd answer",
        );
    }
    let found = format!(
        "etcd {}, answers in {}",
        member.version,
        human::micros(member.round_trip_us)
    );
    let mut numbers = member
        .version
        .split('.')
        .map(|part| part.parse::<u32>().ok());
    let version = numbers.next().flatten().zip(numbers.next().flatten());
    if version < Some(OLDEST_ETCD) {
        findings.error(
            place,
            found,
            format!("upgrade it to {}.{} or newer", OLDEST_ETCD.0, OLDEST_ETCD.1),
        );
    } else if member.round_trip_us > SLOW_US {
        findings.warning(
            place,
            format!("{found}: each dump waits for several answers"),
            "put etcd near the nodes and on a fast disk: https://etcd.io/docs, \"Hardware recommendations\"",
        );
    } else {
        findings.ok(place, found);
    }
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::NodeProbe;

    use super::super::DoctorStatus;
    use super::*;

    fn node(name: &str, ahead_ms: i64) -> NodeStatus {
        NodeStatus {
            name: name.to_owned(),
            state: "active".to_owned(),
            live: true,
            version: "1".to_owned(),
            probe: Some(NodeProbe {
                clock_ahead_ms: Some(ahead_ms),
                round_trip_us: 800,
                error: String::new(),
            }),
            ..NodeStatus::default()
        }
    }

    #[test]
    fn clocks_nodes_and_members_are_judged() {
        let mut silent = node("silent", 0);
        silent.probe = Some(NodeProbe {
            error: "timed out".to_owned(),
            ..NodeProbe::default()
        });
        let mut down = node("down", 0);
        down.live = false;
        down.probe = None;
        let member = |address: &str, version: &str, round_trip_us, error: &str| RegistryMember {
            address: address.to_owned(),
            version: version.to_owned(),
            round_trip_us,
            error: error.to_owned(),
        };
        let list = NodeList {
            answered_by: "here".to_owned(),
            leader: "here".to_owned(),
            nodes: vec![
                node("here", 0),
                node("exact", 3),
                node("late", -5_000),
                node("wrong", 7_200_000),
                silent,
                down,
            ],
            registry: vec![
                member("a:1", "3.5.9", 900, ""),
                member("b:1", "3.5.9", 900_000, ""),
                member("c:1", "3.3.2", 900, ""),
                member("d:1", "", 0, "connection refused"),
            ],
            ..NodeList::default()
        };
        let mut findings = Findings::default();
        check_nodes(&mut findings, &list);
        for (name, expected) in [
            ("node here", DoctorStatus::Ok),
            ("clock of exact", DoctorStatus::Ok),
            ("clock of late", DoctorStatus::Warning),
            ("clock of wrong", DoctorStatus::Error),
            ("way to silent", DoctorStatus::Error),
            ("node down", DoctorStatus::Warning),
            ("a:1", DoctorStatus::Ok),
            ("b:1", DoctorStatus::Warning),
            ("c:1", DoctorStatus::Error),
            ("d:1", DoctorStatus::Error),
        ] {
            assert_eq!(findings.of(name).status, expected, "{name}");
        }
        let wrong = findings.of("clock of wrong");
        assert!(
            wrong.found.contains("2 h ahead of that of here"),
            "{wrong:?}"
        );
    }

    #[test]
    fn a_slow_way_says_nothing_of_a_clock() {
        let mut findings = Findings::default();
        check_clock(&mut findings, (AREA, "c"), 1_500, 1_000, "n");
        assert_eq!(findings.of("c").status, DoctorStatus::Ok);
    }
}
