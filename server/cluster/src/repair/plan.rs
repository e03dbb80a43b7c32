//! Plans copies and drops: a pure function of the listing and the nodes.

use std::collections::BTreeMap;

use permafrost_clustered::Registered;
use permafrost_protocol::control::Checkpoint;

/// Facts about a node that repair needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepairNode {
    /// True if its lease is alive.
    pub live: bool,
    /// True if it is not live, but was a moment ago: it may just be restarting. Its copies are not replaced, and
    /// are not counted when others are dropped.
    pub absent: bool,
    /// True if its copies are to be moved to other nodes: it is drained, transient, or its medium is volatile.
    pub leaving: bool,
    /// Free bytes, the tie-breaker for which surplus copy is dropped.
    pub free_bytes: u64,
}

/// One planned step.
#[derive(Clone, Debug, PartialEq)]
pub enum RepairAction {
    /// A node pulls a checkpoint, and is then listed as a holder.
    Copy {
        /// Checkpoint that is copied.
        checkpoint: Checkpoint,
        /// Name of the node that gets it.
        to: String,
        /// Live nodes that have a copy; those that stay come first.
        from: Vec<String>,
    },
    /// A node is taken off the list of holders, and drops its copy if it is live.
    Drop {
        /// Checkpoint whose copy is dropped.
        checkpoint: Checkpoint,
        /// Name of the node that drops its copy.
        node: String,
        /// True if the node can be notified now.
        live: bool,
        /// Live nodes whose copies stay, at least as many as are wanted.
        keepers: Vec<String>,
    },
    /// No live node has it undamaged. Nothing can be done until one comes back, or is healed.
    Stranded {
        /// Checkpoint without a good live copy.
        checkpoint: Checkpoint,
        /// Nodes that hold it.
        holders: Vec<String>,
    },
}

/// Returns the number of copies that are on live nodes that stay, and not known to be damaged.
#[must_use]
pub fn copies_that_count(entry: &Registered, nodes: &BTreeMap<String, RepairNode>) -> usize {
    let counts = |holder: &&String| {
        let state = nodes.get(*holder);
        state.is_some_and(|node| node.live && !node.leaving)
    };
    entry.good().filter(counts).count()
}

/// Returns the number of copies that there should be; never zero.
#[must_use]
pub fn wanted_copies(entry: &Registered) -> usize {
    usize::try_from(entry.wanted_copies.max(1)).unwrap_or(usize::MAX)
}

/// Plans the steps, in the order of the entries. `choose` returns a node for one more copy of a checkpoint,
/// given its holders; `None` when no node fits. `heals` returns true if a holder with a damaged copy still has
/// time to heal it.
///
/// - Fewer copies on live nodes that stay than wanted: copied, once for each that is missing. Copies on nodes that
///   are absent for a moment are not missed, but are not counted when others are dropped either.
/// - Enough of them: copies on nodes that leave go; and so does a surplus, where there is the least room. A dead
///   node's entry stays as long as the node is a member: its copies are good when it comes back.
/// - A damaged copy is no copy. While its holder may be healing it, it is like one on a node that is absent for a moment;
///   after that another node gets a copy, and once there are enough good ones the damaged one goes. As nothing
///   goes before, the last good copy never does, and neither does a damaged one that nothing else is left of.
///
/// Cost: linear in the entries and their holders.
pub fn plan(
    entries: &[Registered],
    nodes: &BTreeMap<String, RepairNode>,
    heals: impl Fn(&str, &str) -> bool,
    mut choose: impl FnMut(&Checkpoint, &[String]) -> Option<String>,
) -> Vec<RepairAction> {
    let mut actions = Vec::new();
    for entry in entries {
        plan_one(entry, nodes, &heals, &mut choose, &mut actions);
    }
    actions
}

fn plan_one(
    entry: &Registered,
    nodes: &BTreeMap<String, RepairNode>,
    heals: &impl Fn(&str, &str) -> bool,
    choose: &mut impl FnMut(&Checkpoint, &[String]) -> Option<String>,
    actions: &mut Vec<RepairAction>,
) {
    let checkpoint = &entry.checkpoint;
    let state = |name: &String| nodes.get(name).copied();
    let (mut staying, mut leaving, mut absent) = (Vec::new(), Vec::new(), 0);
    let mut damaged = Vec::new();
    for holder in &entry.nodes {
        match state(holder) {
            Some(node) if entry.is_damaged_on(holder) => {
                let healing = node.live && heals(&checkpoint.id, holder);
                absent += usize::from(healing && !node.leaving);
                if node.live && !healing {
                    damaged.push(holder.clone());
                }
            }
            Some(node) if node.live && node.leaving => leaving.push(holder.clone()),
            Some(node) if node.live => staying.push(holder.clone()),
            Some(node) if node.absent => absent += usize::from(!node.leaving),
            _ => {}
        }
    }
    let wanted = wanted_copies(entry);
    if staying.len() < wanted {
        let missing = wanted - staying.len();
        if missing <= absent {
            return;
        }
        let mut from = staying;
        if !from.is_empty() {
            // Spreads the copies over several source nodes.
            let sum: usize = checkpoint.id.bytes().map(usize::from).sum();
            let first = sum % from.len();
            from.rotate_left(first);
        }
        from.append(&mut leaving);
        if from.is_empty() && absent > 0 {
            return;
        }
        if from.is_empty() {
            actions.push(RepairAction::Stranded {
                checkpoint: checkpoint.clone(),
                holders: entry.nodes.clone(),
            });
            return;
        }
        let mut taken = entry.nodes.clone();
        for _ in absent..missing {
            let Some(to) = choose(checkpoint, &taken) else {
                break;
            };
            taken.push(to.clone());
            actions.push(RepairAction::Copy {
                checkpoint: checkpoint.clone(),
                to,
                from: from.clone(),
            });
        }
        return;
    }
    let gone = leaving.into_iter().chain(damaged);
    let mut go: Vec<(String, bool)> = gone.map(|node| (node, true)).collect();
    // Members that are gone for good are not in `nodes` at all.
    let removed = entry.nodes.iter().filter(|holder| state(holder).is_none());
    go.extend(removed.map(|node| (node.clone(), false)));
    staying.sort_by_key(|holder| state(holder).map_or(0, |node| node.free_bytes));
    let keepers = staying.split_off(staying.len() - wanted);
    go.extend(staying.into_iter().map(|node| (node, true)));
    actions.extend(go.into_iter().map(|(node, live)| RepairAction::Drop {
        checkpoint: checkpoint.clone(),
        node,
        live,
        keepers: keepers.clone(),
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAYS: RepairNode = RepairNode {
        live: true,
        absent: false,
        leaving: false,
        free_bytes: 100,
    };
    const LEAVES: RepairNode = RepairNode {
        leaving: true,
        ..STAYS
    };
    const DEAD: RepairNode = RepairNode {
        live: false,
        ..STAYS
    };
    const ABSENT: RepairNode = RepairNode {
        absent: true,
        ..DEAD
    };

    /// Returns an entry; `a!` is a holder with a damaged copy.
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
            nodes: holders
                .iter()
                .map(|name| name.trim_end_matches('!').to_owned())
                .collect(),
            wanted_copies: wanted,
            damaged: holders
                .iter()
                .filter_map(|name| name.strip_suffix('!'))
                .map(str::to_owned)
                .collect(),
            cold: Vec::new(),
        }
    }

    /// Returns each action in short; a free live node that is no holder takes a copy.
    fn planned(entry: &Registered, nodes: &[(&str, RepairNode)]) -> Vec<String> {
        planned_while(entry, nodes, false)
    }

    fn planned_while(entry: &Registered, nodes: &[(&str, RepairNode)], heals: bool) -> Vec<String> {
        let nodes: BTreeMap<String, RepairNode> = nodes
            .iter()
            .map(|&(name, state)| (name.to_owned(), state))
            .collect();
        let choose = |_: &Checkpoint, holders: &[String]| {
            nodes
                .iter()
                .find(|(name, node)| node.live && !node.leaving && !holders.contains(name))
                .map(|(name, _)| name.clone())
        };
        plan(std::slice::from_ref(entry), &nodes, |_, _| heals, choose)
            .into_iter()
            .map(|action| match action {
                RepairAction::Copy { to, from, .. } => {
                    format!("copy to {to} from {}", from.join(","))
                }
                RepairAction::Drop {
                    node,
                    live,
                    keepers,
                    ..
                } => {
                    assert!(!keepers.contains(&node));
                    assert!(keepers.len() >= 2, "{keepers:?}");
                    format!("drop {node} {live}")
                }
                RepairAction::Stranded { holders, .. } => format!("stranded {}", holders.join(",")),
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
        let full = RepairNode {
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
        // No node can take it: the copy stays.
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
    fn a_node_that_may_be_restarting_is_neither_missed_nor_relied_on() {
        let nodes = [("a", STAYS), ("b", ABSENT), ("c", STAYS)];
        assert!(planned(&entry(2, &["a", "b"]), &nodes).is_empty());
        assert!(planned(&entry(1, &["b"]), &nodes).is_empty());
        assert_eq!(
            planned(&entry(3, &["a", "b"]), &nodes),
            ["copy to c from a"]
        );
        let nodes = [("a", LEAVES), ("b", ABSENT), ("c", STAYS)];
        assert!(planned(&entry(2, &["a", "b", "c"]), &nodes).is_empty());
        let nodes = [("a", STAYS), ("b", ABSENT), ("c", STAYS)];
        assert!(planned(&entry(2, &["a", "b", "c"]), &nodes).is_empty());
    }

    #[test]
    fn a_damaged_copy_is_replaced_and_goes_after() {
        let nodes = [("a", STAYS), ("b", STAYS), ("c", STAYS)];
        let damaged = entry(2, &["a", "b!"]);
        assert!(planned_while(&damaged, &nodes, true).is_empty());
        assert_eq!(planned(&damaged, &nodes), ["copy to c from a"]);
        let replaced = entry(2, &["a", "b!", "c"]);
        assert_eq!(planned(&replaced, &nodes), ["drop b true"]);
        assert!(planned_while(&replaced, &nodes, true).is_empty());
        // No node can take it: the damaged copy stays, which may still be of use.
        assert!(planned(&damaged, &nodes[..2]).is_empty());
    }

    #[test]
    fn the_last_good_copy_stays_wherever_it_is() {
        // The node that leaves has the good copy, and the one that stays a damaged one.
        let nodes = [("a", LEAVES), ("b", STAYS)];
        assert!(planned(&entry(1, &["a", "b!"]), &nodes).is_empty());
        let nodes = [("a", LEAVES), ("b", STAYS), ("c", STAYS)];
        assert_eq!(
            planned(&entry(2, &["a", "b!"]), &nodes),
            ["copy to c from a"]
        );
        // Of a surplus, the good copy does not go.
        let roomy = RepairNode {
            free_bytes: 1000,
            ..STAYS
        };
        let nodes = [("a", STAYS), ("b", roomy), ("c", STAYS)];
        assert_eq!(
            planned(&entry(2, &["a", "b!", "c"]), &nodes),
            ["drop b true"]
        );
    }

    #[test]
    fn without_a_good_copy_nothing_is_copied_and_nothing_goes() {
        let nodes = [("a", STAYS), ("b", STAYS), ("c", STAYS)];
        assert_eq!(planned(&entry(1, &["a!", "b!"]), &nodes), ["stranded a,b"]);
        let nodes = [("a", STAYS), ("b", DEAD), ("c", STAYS)];
        assert_eq!(planned(&entry(2, &["a!", "b"]), &nodes), ["stranded a,b"]);
    }

    #[test]
    fn without_a_live_holder_nothing_is_invented() {
        let nodes = [("a", DEAD), ("b", STAYS)];
        assert_eq!(planned(&entry(2, &["a"]), &nodes), ["stranded a"]);
    }
}
