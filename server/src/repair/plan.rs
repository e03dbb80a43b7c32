//! What must be copied where, and what may go: a pure function of what the registry lists and which nodes there are.

use std::collections::BTreeMap;

use permafrost_protocol::control::Checkpoint;

use crate::cluster::Registered;

/// What repair needs to know of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeState {
    /// Its lease lives.
    pub live: bool,
    /// Its copies are to go elsewhere: it is drained, or of class transient.
    pub leaving: bool,
    /// Bytes free, the tie-breaker for which surplus copy goes.
    pub free_bytes: u64,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Have a node pull a checkpoint, then list it as a holder.
    Copy {
        /// What.
        checkpoint: Checkpoint,
        /// Who gets it.
        to: String,
        /// Live nodes that have it; the ones that stay first.
        from: Vec<String>,
    },
    /// Take a node off the list of holders, and its copy away if it is live.
    Drop {
        /// What.
        checkpoint: Checkpoint,
        /// Whose copy.
        node: String,
        /// Whether it can be told now.
        live: bool,
    },
    /// No live node has it. Nothing can be done until one comes back.
    Stranded {
        /// What.
        checkpoint: Checkpoint,
        /// Who has it.
        holders: Vec<String>,
    },
}

/// Works out what is to be done, in the order of the entries. `choose` names a node for one more copy of so many
/// bytes, given who has one already; `None` when no node fits.
///
/// - Fewer copies on live nodes that stay than wanted: copied, once for each that is missing.
/// - Enough of them: copies on nodes that leave go; and so does a surplus, where there is the least room. A dead
///   node's entry stays as long as the node is a member: what it holds is good when it comes back.
///
/// Cost: linear in the entries and their holders.
pub fn plan(
    entries: &[Registered],
    nodes: &BTreeMap<String, NodeState>,
    mut choose: impl FnMut(&[String], u64) -> Option<String>,
) -> Vec<Action> {
    let mut actions = Vec::new();
    for entry in entries {
        plan_one(entry, nodes, &mut choose, &mut actions);
    }
    actions
}

fn plan_one(
    entry: &Registered,
    nodes: &BTreeMap<String, NodeState>,
    choose: &mut impl FnMut(&[String], u64) -> Option<String>,
    actions: &mut Vec<Action>,
) {
    let checkpoint = &entry.checkpoint;
    let state = |name: &String| nodes.get(name).copied();
    let (mut staying, mut leaving) = (Vec::new(), Vec::new());
    for holder in &entry.nodes {
        match state(holder) {
            Some(node) if node.live && node.leaving => leaving.push(holder.clone()),
            Some(node) if node.live => staying.push(holder.clone()),
            _ => {}
        }
    }
    let wanted = usize::try_from(entry.wanted_copies).unwrap_or(usize::MAX);
    if staying.len() < wanted {
        let mut from = staying.clone();
        from.extend(leaving.iter().cloned());
        if from.is_empty() {
            actions.push(Action::Stranded {
                checkpoint: checkpoint.clone(),
                holders: entry.nodes.clone(),
            });
            return;
        }
        let mut taken = entry.nodes.clone();
        for _ in staying.len()..wanted {
            let Some(to) = choose(&taken, checkpoint.memory_bytes) else {
                break;
            };
            taken.push(to.clone());
            actions.push(Action::Copy {
                checkpoint: checkpoint.clone(),
                to,
                from: from.clone(),
            });
        }
        return;
    }
    let mut go: Vec<(String, bool)> = leaving.into_iter().map(|node| (node, true)).collect();
    // Members that are gone for good are not among the nodes at all.
    let removed = entry.nodes.iter().filter(|holder| state(holder).is_none());
    go.extend(removed.map(|node| (node.clone(), false)));
    staying.sort_by_key(|holder| state(holder).map_or(0, |node| node.free_bytes));
    let surplus = staying.len() - wanted;
    go.extend(staying.into_iter().take(surplus).map(|node| (node, true)));
    actions.extend(go.into_iter().map(|(node, live)| Action::Drop {
        checkpoint: checkpoint.clone(),
        node,
        live,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAYS: NodeState = NodeState {
        live: true,
        leaving: false,
        free_bytes: 100,
    };
    const LEAVES: NodeState = NodeState {
        leaving: true,
        ..STAYS
    };
    const DEAD: NodeState = NodeState {
        live: false,
        ..STAYS
    };

    fn entry(wanted: u32, holders: &[&str]) -> Registered {
        Registered {
            checkpoint: Checkpoint {
                job: "j".to_owned(),
                generation: 1,
                id: "a".repeat(32),
                memory_bytes: 10,
                ..Checkpoint::default()
            },
            content_digest: [0; 32],
            nodes: holders.iter().map(|&name| name.to_owned()).collect(),
            wanted_copies: wanted,
        }
    }

    /// Each action in short; a free live node that is no holder takes a copy.
    fn planned(entry: &Registered, nodes: &[(&str, NodeState)]) -> Vec<String> {
        let nodes: BTreeMap<String, NodeState> = nodes
            .iter()
            .map(|&(name, state)| (name.to_owned(), state))
            .collect();
        let choose = |holders: &[String], _: u64| {
            nodes
                .iter()
                .find(|(name, node)| node.live && !node.leaving && !holders.contains(name))
                .map(|(name, _)| name.clone())
        };
        plan(std::slice::from_ref(entry), &nodes, choose)
            .into_iter()
            .map(|action| match action {
                Action::Copy { to, from, .. } => format!("copy to {to} from {}", from.join(",")),
                Action::Drop { node, live, .. } => format!("drop {node} {live}"),
                Action::Stranded { holders, .. } => format!("stranded {}", holders.join(",")),
            })
            .collect()
    }

    #[test]
    fn a_whole_set_is_left_alone() {
        let nodes = [("a", STAYS), ("b", STAYS), ("c", STAYS)];
        assert!(planned(&entry(2, &["a", "b"]), &nodes).is_empty());
    }

    #[test]
    fn what_is_missing_is_copied_and_the_dead_holder_kept() {
        let nodes = [("a", STAYS), ("b", DEAD), ("c", STAYS)];
        assert_eq!(
            planned(&entry(2, &["a", "b"]), &nodes),
            ["copy to c from a"]
        );
        assert_eq!(
            planned(
                &entry(3, &["a"]),
                &[("a", STAYS), ("b", STAYS), ("c", STAYS)]
            ),
            ["copy to b from a", "copy to c from a"]
        );
    }

    #[test]
    fn a_node_that_comes_back_makes_a_surplus_that_goes_where_room_is_short() {
        let full = NodeState {
            free_bytes: 1,
            ..STAYS
        };
        let nodes = [("a", STAYS), ("b", full), ("c", STAYS)];
        assert_eq!(
            planned(&entry(2, &["a", "b", "c"]), &nodes),
            ["drop b true"]
        );
    }

    #[test]
    fn draining_moves_first_and_removes_after() {
        let nodes = [("a", LEAVES), ("b", STAYS), ("c", STAYS)];
        assert_eq!(
            planned(&entry(2, &["a", "b"]), &nodes),
            ["copy to c from b,a"]
        );
        assert_eq!(
            planned(&entry(2, &["a", "b", "c"]), &nodes),
            ["drop a true"]
        );
        // Nowhere to go: it stays where it is.
        let nodes = [("a", LEAVES), ("b", STAYS)];
        assert!(planned(&entry(2, &["a", "b"]), &nodes).is_empty());
    }

    #[test]
    fn a_removed_node_is_forgotten_once_there_are_enough_copies() {
        let nodes = [("b", STAYS), ("c", STAYS)];
        assert_eq!(
            planned(&entry(2, &["a", "b"]), &nodes),
            ["copy to c from b"]
        );
        assert_eq!(
            planned(&entry(2, &["a", "b", "c"]), &nodes),
            ["drop a false"]
        );
    }

    #[test]
    fn without_a_live_holder_nothing_is_invented() {
        let nodes = [("a", DEAD), ("b", STAYS)];
        assert_eq!(planned(&entry(2, &["a"]), &nodes), ["stranded a"]);
    }
}
