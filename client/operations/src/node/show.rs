//! Formats nodes as text.

use permafrost_protocol::control::{NodeList, NodeStatus, Rebuilt};
use permafrost_protocol::versions::Interface;
use permafrost_terminal::human;
use permafrost_terminal::names::name_of;
use permafrost_terminal::table::{Align, Table, facts};

use crate::status::spoken;

pub(super) fn human_list(list: &NodeList) -> String {
    let mut table = Table::new([
        ("NODE", Align::Left),
        ("STATE", Align::Left),
        ("CLASS", Align::Left),
        ("TIER", Align::Left),
        ("DOMAIN", Align::Left),
        ("RELEASE", Align::Left),
        ("ADDRESS", Align::Left),
        ("SIZE", Align::Right),
        ("FREE", Align::Right),
        ("HOLDS", Align::Right),
        ("ONLY HERE", Align::Right),
        ("DAMAGED", Align::Right),
        ("", Align::Left),
    ]);
    for node in &list.nodes {
        let of_live = |text: String| if node.live { text } else { "-".to_owned() };
        table.row([
            node.name.clone(),
            state(node),
            of_live(node.class.clone()),
            of_live(medium(node)),
            of_live(domain(node)),
            release(node),
            of_live(node.address.clone()),
            of_live(human::bytes(node.capacity_bytes)),
            of_live(human::bytes(node.free_bytes)),
            counted(node.checkpoints),
            counted(node.only_here),
            counted(node.damaged),
            (if node.name == list.leader {
                "leads"
            } else {
                ""
            })
            .to_owned(),
        ]);
    }
    let mut text = table.render();
    text.push('\n');
    text.push_str(&summary(list));
    text
}

/// Formats the release of a node: of one that is not alive that of its last registration.
fn release(node: &NodeStatus) -> String {
    let said = node.speaks.as_ref().map_or("", |speaks| &speaks.release);
    match (node.version.as_str(), said) {
        ("", "") => "-".to_owned(),
        ("", said) => said.to_owned(),
        (version, _) => version.to_owned(),
    }
}

/// Formats what each node speaks, and the version of the registry that the cluster uses.
pub(super) fn human_level(list: &NodeList) -> String {
    let mut table = Table::new([
        ("NODE", Align::Left),
        ("STATE", Align::Left),
        ("RELEASE", Align::Left),
        ("WIRE", Align::Left),
        ("CONTROL", Align::Left),
        ("REGISTRY", Align::Left),
    ]);
    for node in &list.nodes {
        let speaks = node.speaks.clone().unwrap_or_default();
        let [wire, control, registry] =
            Interface::ALL.map(|interface| speaks.of(interface).to_string());
        let release = release(node);
        table.row([
            node.name.clone(),
            state(node),
            release,
            wire,
            control,
            registry,
        ]);
    }
    let highest = list.highest_registry_level;
    let level = match list.registry_level {
        None => "unknown: the registry does not answer".to_owned(),
        Some(level) => match highest.filter(|highest| *highest > level) {
            Some(highest) => format!(
                "version {level} is used; every node speaks {highest}: `permafrost node level {highest}` uses it"
            ),
            None => format!("version {level} is used"),
        },
    };
    format!("{}\n{}", table.render(), facts("", &[("registry", level)]))
}

fn summary(list: &NodeList) -> String {
    let checkpoints = match (list.checkpoints, list.under_replicated, list.stranded) {
        (Some(checkpoints), Some(few), Some(stranded)) => format!(
            "{checkpoints} listed, {few} with too few good copies{}{}",
            match stranded {
                0 => String::new(),
                stranded => format!(", {stranded} without one on a node that is alive"),
            },
            match list.damaged {
                None | Some(0) => String::new(),
                Some(damaged) => format!(", {damaged} with a damaged copy"),
            }
        ),
        _ => "not counted: the registry does not answer".to_owned(),
    };
    let seen = match list.age_ms {
        None => "never confirmed by the registry".to_owned(),
        Some(age_ms) if age_ms < 5_000 => String::new(),
        Some(age_ms) => format!("as of {} ago", human::span(age_ms / 1_000)),
    };
    facts(
        "",
        &[
            ("checkpoints", checkpoints),
            ("seen", seen),
            ("cluster", list.cluster.clone()),
            ("asked", list.answered_by.clone()),
        ],
    )
}

pub(super) fn human_nodes(list: &NodeList) -> String {
    let mut text = String::new();
    for node in &list.nodes {
        text.push_str(&human_node(node, node.name == list.leader));
    }
    text
}

/// Formats the speed of its medium, and whether it is volatile.
fn medium(node: &NodeStatus) -> String {
    if node.volatile {
        format!("{}, volatile", node.tier)
    } else {
        node.tier.clone()
    }
}

fn human_node(node: &NodeStatus, leads: bool) -> String {
    let of = |count: Option<u64>, what: &str| match count {
        None | Some(0) => String::new(),
        Some(count) => format!("{count} {what}"),
    };
    let mut text = facts(
        &format!("node {}", node.name),
        &[
            ("state", state(node)),
            ("leads", (if leads { "yes" } else { "" }).to_owned()),
            ("address", node.address.clone()),
            ("class", node.class.clone()),
            ("tier", medium(node)),
            (
                "copies",
                if node.live && !node.copies_count {
                    "do not count towards quorum and all".to_owned()
                } else {
                    String::new()
                },
            ),
            (
                "domain",
                if node.live {
                    domain(node)
                } else {
                    String::new()
                },
            ),
            ("region", node.region.clone()),
            (
                "first seen",
                match node.first_seen_unix_ms {
                    0 => String::new(),
                    seen => human::date(seen),
                },
            ),
            ("version", release(node)),
            (
                "speaks",
                node.speaks.as_ref().map_or_else(String::new, spoken),
            ),
            (
                "space",
                if node.live {
                    format!(
                        "{} of {} free",
                        human::bytes(node.free_bytes),
                        human::bytes(node.capacity_bytes)
                    )
                } else {
                    String::new()
                },
            ),
            ("holds", counted(node.checkpoints)),
            (
                "needed",
                match node.needed {
                    None | Some(0) => String::new(),
                    Some(needed) => format!(
                        "{needed} ({}) have too few good copies without it",
                        human::bytes(node.needed_bytes.unwrap_or_default())
                    ),
                },
            ),
            (
                "stuck",
                of(node.stuck, "of these, which no other node can take"),
            ),
            (
                "damaged",
                of(node.damaged, "whose copy on it is known to be damaged"),
            ),
            (
                "unverified",
                of(node.unverified, "whose other copies are being read"),
            ),
            (
                "only here",
                of(
                    node.only_here,
                    "without a good copy on another node that is alive",
                ),
            ),
        ],
    );
    text.push_str(&indented(
        &node.only_here_names,
        node.only_here.unwrap_or_default(),
    ));
    text
}

/// Formats names, one a line, and the number of further ones.
pub(super) fn indented(names: &[String], all: u64) -> String {
    let mut text = String::new();
    for name in names {
        text.push_str(&format!("    {name}\n"));
    }
    let told = u64::try_from(names.len()).unwrap_or(u64::MAX);
    if all > told {
        text.push_str(&format!("    and {} more\n", all - told));
    }
    text
}

pub(super) fn human_rebuilt(rebuilt: &Rebuilt) -> String {
    let (listed, added) = if rebuilt.dry_run {
        ("would be listed again", "would be added")
    } else {
        ("listed again", "added")
    };
    let mut text = String::new();
    if !rebuilt.listed.is_empty() {
        let mut table = Table::new([
            ("CHECKPOINT", Align::Left),
            ("AGE", Align::Right),
            ("MEMORY", Align::Right),
            ("ON", Align::Left),
        ]);
        for checkpoint in &rebuilt.listed {
            table.row([
                match checkpoint.generation {
                    0 => format!("parked session {}", checkpoint.session),
                    _ => name_of(checkpoint),
                },
                human::age(human::seconds_since(checkpoint.created_unix_ms)),
                human::bytes(checkpoint.memory_bytes),
                checkpoint.nodes.join(", "),
            ]);
        }
        text.push_str(&table.render());
        text.push('\n');
    }
    text.push_str(&facts(
        "",
        &[
            (listed, rebuilt.listed.len().to_string()),
            (
                "copies of listed ones",
                match rebuilt.copies_added {
                    0 => String::new(),
                    copies => format!("{copies} {added}"),
                },
            ),
            ("asked", rebuilt.nodes.join(", ")),
            ("cluster", rebuilt.cluster.clone()),
        ],
    ));
    for node in &rebuilt.missing {
        text.push_str(&format!("without {}: {}\n", node.name, node.why));
    }
    for name in &rebuilt.busy {
        text.push_str(&format!("put off {name}: its job is being dumped\n"));
    }
    for doubt in &rebuilt.doubts {
        text.push_str(&format!(
            "in doubt {} on {}: {} ({})\n",
            doubt.checkpoint, doubt.node, doubt.why, doubt.id
        ));
    }
    text
}

/// Formats the operator's setting and the actual state of a node, in a word or two.
fn state(node: &NodeStatus) -> String {
    match (node.state.as_str(), node.live) {
        ("active", true) if node.stopping => "stopping".to_owned(),
        ("active", true) => "up".to_owned(),
        ("active", false) => "down".to_owned(),
        ("drained", true) => match node.needed {
            None | Some(0) => "drained".to_owned(),
            Some(needed) => format!("draining, {needed} left"),
        },
        ("drained", false) => "drained, down".to_owned(),
        (state, _) => state.to_owned(),
    }
}

/// Formats `zone/rack/host`; unknown parts are `-`.
fn domain(node: &NodeStatus) -> String {
    let parts = [&node.zone, &node.rack, &node.host];
    if parts.iter().all(|part| part.is_empty()) {
        return "-".to_owned();
    }
    let parts = parts.map(|part| if part.is_empty() { "-" } else { part });
    parts.join("/")
}

fn counted(count: Option<u64>) -> String {
    count.map_or_else(|| "?".to_owned(), |count| count.to_string())
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::{Checkpoint, Doubt};

    use super::*;

    fn status(name: &str, state: &str, live: bool) -> NodeStatus {
        NodeStatus {
            name: name.to_owned(),
            state: state.to_owned(),
            live,
            ..NodeStatus::default()
        }
    }

    #[test]
    fn nodes_are_listed_with_what_is_known_of_them() {
        let list = NodeList {
            nodes: vec![
                NodeStatus {
                    class: "reserved".to_owned(),
                    tier: "pmem".to_owned(),
                    zone: "z1".to_owned(),
                    address: "10.0.0.1:7118".to_owned(),
                    capacity_bytes: 4 << 30,
                    free_bytes: 1 << 30,
                    checkpoints: Some(7),
                    needed: Some(3),
                    only_here: Some(0),
                    damaged: Some(0),
                    ..status("n1", "drained", true)
                },
                status("n2", "active", false),
                NodeStatus {
                    tier: "memory".to_owned(),
                    volatile: true,
                    ..status("n3", "active", true)
                },
            ],
            leader: "n1".to_owned(),
            age_ms: Some(200),
            cluster: "c".to_owned(),
            answered_by: "n1".to_owned(),
            ..NodeList::default()
        };
        let text = human_list(&list);
        let line = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name));
            line.unwrap_or_default()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            line("n1"),
            "n1 draining, 3 left reserved pmem z1/-/- - 10.0.0.1:7118 4.0 GiB 1.0 GiB 7 0 0 leads"
        );
        assert_eq!(line("n2"), "n2 down - - - - - - - ? ? ?");
        assert!(line("n3").starts_with("n3 up memory, volatile"), "{text}");
        assert!(human_nodes(&list).contains("do not count towards quorum and all"));
        assert!(text.contains("not counted"), "{text}");
        assert!(!text.contains("ago"), "{text}");
    }

    #[test]
    fn states_are_words_that_tell_both_what_was_said_and_what_is() {
        for (said, live, word) in [
            ("active", true, "up"),
            ("active", false, "down"),
            ("drained", true, "drained"),
            ("drained", false, "drained, down"),
            ("removed", false, "removed"),
        ] {
            assert_eq!(state(&status("n", said, live)), word);
        }
    }

    #[test]
    fn a_rebuild_tells_what_it_left_alone() {
        let text = human_rebuilt(&Rebuilt {
            listed: vec![Checkpoint {
                job: "j".to_owned(),
                generation: 3,
                nodes: vec!["n1".to_owned(), "n2".to_owned()],
                ..Checkpoint::default()
            }],
            doubts: vec![Doubt {
                node: "n3".to_owned(),
                checkpoint: "j@4".to_owned(),
                id: "x".to_owned(),
                why: "its content is not what is listed".to_owned(),
            }],
            ..Rebuilt::default()
        });
        assert!(text.contains("j@3") && text.contains("n1, n2"), "{text}");
        assert!(text.contains("in doubt j@4 on n3: its content"), "{text}");
    }

    #[test]
    fn long_lists_say_how_many_more_there_are() {
        assert_eq!(
            indented(&["a@1".to_owned()], 3),
            "    a@1\n    and 2 more\n"
        );
    }
}
