//! How the listed checkpoints stand: who holds how many, and what would be lost with whom. A pure function of what
//! is listed and which nodes there are.

use std::collections::{BTreeMap, BTreeSet};

use super::Registered;
use super::nodes::{LiveNode, NodesView};
use super::placement::host;
use super::rebuild::name_of;
use super::values::MemberState;

/// All of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    /// How many are listed.
    pub(crate) listed: u64,
    /// Fewer copies on nodes that live and stay than there should be.
    pub(crate) under_replicated: u64,
    /// No copy on a node that lives.
    pub(crate) stranded: u64,
    /// By node; one that holds nothing is not among them.
    pub(crate) nodes: BTreeMap<String, Holdings>,
}

/// Those of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    /// How many it holds.
    pub(crate) held: u64,
    /// Those with too few copies on other nodes.
    pub(crate) needed: u64,
    /// Memory of those, bytes.
    pub(crate) needed_bytes: u64,
    /// Names of those that no other node has which lives.
    pub(crate) only_here: Vec<String>,
}

/// Counts. Nodes that are drained, removed or transient, or whose medium is volatile, do not stay: their copies serve, and are not relied on.
///
/// A node is *needed* for a checkpoint as long as there are fewer copies on others that stay than there should be, or
/// than there are hosts to have them: what cannot be copied once more is not waited for, if there is a copy at all.
pub(crate) fn standing(entries: &[Registered], view: &NodesView) -> Standing {
    let live: BTreeMap<&str, &LiveNode> = view
        .nodes
        .iter()
        .map(|node| (node.facts.name.as_str(), node))
        .collect();
    let stays = |name: &str| {
        live.get(name)
            .is_some_and(|node| node.state == MemberState::Active && node.facts.counts())
    };
    let hosts_besides = |name: &str| {
        let staying = live.values().filter(|node| stays(&node.facts.name));
        let others = staying.filter(|node| node.facts.name != name);
        others.map(|node| host(node)).collect::<BTreeSet<_>>().len()
    };
    // Once a node, not once a copy.
    let holders: BTreeSet<&str> = entries
        .iter()
        .flat_map(|entry| entry.nodes.iter().map(String::as_str))
        .collect();
    let hosts: BTreeMap<&str, usize> = holders
        .into_iter()
        .map(|name| (name, hosts_besides(name)))
        .collect();

    let mut all = Standing {
        listed: entries.len() as u64,
        ..Standing::default()
    };
    for entry in entries {
        let wanted = usize::try_from(entry.wanted_copies).unwrap_or(usize::MAX);
        let staying = entry.nodes.iter().filter(|name| stays(name)).count();
        let living = entry
            .nodes
            .iter()
            .filter(|name| live.contains_key(name.as_str()));
        let living = living.count();
        all.under_replicated += u64::from(staying < wanted);
        all.stranded += u64::from(living == 0);
        for name in &entry.nodes {
            let others_staying = staying - usize::from(stays(name));
            let others_living = living - usize::from(live.contains_key(name.as_str()));
            let possible = hosts.get(name.as_str()).copied().unwrap_or_default();
            let holdings = all.nodes.entry(name.clone()).or_default();
            holdings.held += 1;
            if others_staying < wanted.min(possible).max(1) {
                holdings.needed += 1;
                holdings.needed_bytes += entry.checkpoint.memory_bytes;
            }
            if others_living == 0 {
                holdings.only_here.push(name_of(&entry.checkpoint));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use permafrost_protocol::control::Checkpoint;

    use super::*;
    use crate::cluster::{NodeClass, NodeFacts};

    /// Live nodes: `a` is active, `a-` drained, `a?` transient.
    fn view(nodes: &[&str]) -> NodesView {
        let node = |word: &&str| LiveNode {
            facts: NodeFacts {
                name: word.trim_end_matches(['-', '?']).to_owned(),
                class: if word.ends_with('?') {
                    NodeClass::Transient
                } else {
                    NodeClass::Reserved
                },
                ..NodeFacts::default()
            },
            state: if word.ends_with('-') {
                MemberState::Drained
            } else {
                MemberState::Active
            },
            token: 1,
        };
        NodesView {
            nodes: nodes.iter().map(node).collect(),
            members: Vec::new(),
            age: Duration::ZERO,
        }
    }

    fn entry(generation: u64, wanted_copies: u32, nodes: &[&str]) -> Registered {
        Registered {
            checkpoint: Checkpoint {
                job: "j".into(),
                generation,
                memory_bytes: 10,
                ..Checkpoint::default()
            },
            content_digest: [0; 32],
            nodes: nodes.iter().map(|&name| name.to_owned()).collect(),
            wanted_copies,
        }
    }

    /// Of one checkpoint with two wanted copies: the node needed, and the only one.
    fn of(holders: &[&str], nodes: &[&str], name: &str) -> (bool, bool) {
        let all = standing(&[entry(1, 2, holders)], &view(nodes));
        let holdings = &all.nodes[name];
        assert_eq!(holdings.needed * 10, holdings.needed_bytes);
        (holdings.needed == 1, !holdings.only_here.is_empty())
    }

    #[test]
    fn a_node_is_needed_until_its_copies_are_elsewhere() {
        assert_eq!(of(&["a", "b"], &["a-", "b", "c"], "a"), (true, false));
        assert_eq!(of(&["a", "b", "c"], &["a-", "b", "c"], "a"), (false, false));
        // There is nowhere else for a second copy.
        assert_eq!(of(&["a", "b"], &["a-", "b"], "a"), (false, false));
        // But one there must be.
        assert_eq!(of(&["a"], &["a-"], "a"), (true, true));
        // Copies on nodes that go, or may, are no reason to let this one go; they save what it holds, though.
        assert_eq!(of(&["a", "b"], &["a-", "b-", "c"], "a"), (true, false));
        assert_eq!(of(&["a", "b"], &["a-", "b?", "c"], "a"), (true, false));
    }

    #[test]
    fn what_only_the_dead_have_is_stranded_and_each_of_them_may_be_the_last() {
        let all = standing(
            &[
                entry(1, 2, &["a", "b"]),
                entry(2, 1, &["c"]),
                entry(3, 2, &["a", "c"]),
            ],
            &view(&["c"]),
        );
        assert_eq!((all.listed, all.under_replicated, all.stranded), (3, 2, 1));
        assert_eq!(all.nodes["a"].only_here, ["j@1"]);
        assert_eq!(all.nodes["b"].only_here, ["j@1"]);
        assert_eq!(all.nodes["c"].only_here, ["j@2", "j@3"]);
        assert_eq!((all.nodes["a"].held, all.nodes["c"].held), (2, 2));
    }

    #[test]
    fn two_nodes_of_one_machine_are_room_for_one_copy() {
        let mut view = view(&["a-", "b", "c"]);
        for node in &mut view.nodes[1..] {
            node.facts.domain.host = "machine".to_owned();
        }
        let all = standing(&[entry(1, 2, &["a", "b"])], &view);
        assert_eq!(all.nodes["a"].needed, 0);
    }
}
