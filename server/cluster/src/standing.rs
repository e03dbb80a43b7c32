//! State of the listed checkpoints: holders, number of copies, and what would be lost with each node. A pure
//! function of the listing and the nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use permafrost_clustered::Registered;

use super::nodes::{LiveNode, NodesView};
use super::placement::{has_room, host};
use super::rebuild::name_of;
use super::values::MemberState;

/// State of all listed checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Number of listed checkpoints.
    pub(crate) listed: u64,
    /// Number of checkpoints with fewer good copies on live nodes that stay than there should be.
    pub(crate) under_replicated: u64,
    /// Number of checkpoints without a good copy on a live node.
    pub(crate) stranded: u64,
    /// Number of checkpoints with a copy that is known to be damaged.
    pub(crate) damaged: u64,
    /// State by node; a node without checkpoints is not among them.
    pub(crate) nodes: BTreeMap<String, Holdings>,
}

/// Checkpoints of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    /// Number of checkpoints that it holds.
    pub(crate) held: u64,
    /// Number of those whose copy on it is known to be damaged.
    pub(crate) damaged: u64,
    /// Number of those with too few good copies on other nodes.
    pub(crate) needed: u64,
    /// Memory of the needed ones, bytes.
    pub(crate) needed_bytes: u64,
    /// Number of the needed ones that no other node can take: none has room, or may hold another copy.
    pub(crate) stuck: u64,
    /// Names of checkpoints of which no other live node has a good copy.
    pub(crate) only_here: Vec<String>,
}

/// Returns the nodes whose good copies of a checkpoint are relied on when `without` is gone: those that live
/// and stay, or else those that live.
pub(crate) fn relied_on<'a>(
    entry: &'a Registered,
    view: &NodesView,
    without: &str,
) -> Vec<&'a String> {
    let others = entry.good().filter(|name| *name != without);
    let live = |name: &&String| view.nodes.iter().find(|node| node.facts.name == **name);
    let (staying, living): (Vec<_>, Vec<_>) = others
        .filter_map(|name| Some((name, live(&name)?)))
        .partition(|(_, node)| stays(node));
    let relied_on = if staying.is_empty() { living } else { staying };
    relied_on.into_iter().map(|(name, _)| name).collect()
}

fn stays(node: &LiveNode) -> bool {
    node.state == MemberState::Active && node.facts.counts()
}

/// Computes the state. Nodes that are drained, removed or transient, or whose medium is volatile, do not stay:
/// their copies can be read, but are not relied on.
///
/// A node is *needed* for a checkpoint as long as there are fewer copies on others that stay than there should
/// be, or than there are hosts to have them: a checkpoint that cannot be copied once more does not make it
/// needed, if there is a copy at all. A copy that is known to be damaged does not count.
pub(crate) fn standing(entries: &[Registered], view: &NodesView) -> Standing {
    let live: BTreeMap<&str, &LiveNode> = view
        .nodes
        .iter()
        .map(|node| (node.facts.name.as_str(), node))
        .collect();
    let stays = |name: &str| live.get(name).is_some_and(|node| stays(node));
    let hosts_besides = |name: &str| {
        let staying = live.values().filter(|node| stays(&node.facts.name));
        let others = staying.filter(|node| node.facts.name != name);
        others.map(|node| host(node)).collect::<BTreeSet<_>>().len()
    };
    // Computed once for each node, not for each copy.
    let holders: BTreeSet<&str> = entries
        .iter()
        .flat_map(|entry| entry.nodes.iter().map(String::as_str))
        .collect();
    let hosts: BTreeMap<&str, usize> = holders
        .into_iter()
        .map(|name| (name, hosts_besides(name)))
        .collect();

    let by_number: ByNumber<'_> = entries
        .iter()
        .filter(|entry| entry.checkpoint.generation > 0)
        .map(|entry| {
            let checkpoint = &entry.checkpoint;
            ((checkpoint.job.as_str(), checkpoint.generation), entry)
        })
        .collect();
    let mut all = Standing {
        listed: entries.len() as u64,
        ..Standing::default()
    };
    for entry in entries {
        let wanted = usize::try_from(entry.wanted_copies).unwrap_or(usize::MAX);
        let staying = entry.good().filter(|name| stays(name)).count();
        let living = entry.good().filter(|name| live.contains_key(name.as_str()));
        let living = living.count();
        all.under_replicated += u64::from(staying < wanted);
        all.stranded += u64::from(living == 0);
        all.damaged += u64::from(!entry.damaged.is_empty());
        // Computed once for each checkpoint: it is equal for all holders that go.
        let mut is_stuck = None;
        for name in &entry.nodes {
            let is_good = !entry.is_damaged_on(name);
            let others_staying = staying - usize::from(is_good && stays(name));
            let others_living = living - usize::from(is_good && live.contains_key(name.as_str()));
            let possible = hosts.get(name.as_str()).copied().unwrap_or_default();
            let holdings = all.nodes.entry(name.clone()).or_default();
            holdings.held += 1;
            holdings.damaged += u64::from(!is_good);
            if others_staying < wanted.min(possible).max(1) {
                holdings.needed += 1;
                holdings.needed_bytes += entry.checkpoint.memory_bytes;
                let is_stuck = *is_stuck.get_or_insert_with(|| {
                    !live
                        .values()
                        .any(|node| is_free_for(entry, node, &live, &by_number))
                });
                holdings.stuck += u64::from(is_stuck);
            }
            if others_living == 0 {
                holdings.only_here.push(name_of(&entry.checkpoint));
            }
        }
    }
    all
}

type ByNumber<'a> = HashMap<(&'a str, u64), &'a Registered>;

/// Returns true if a node could be given one more copy: it stays, is on a host of its own, and has room. Where
/// its parent is, a copy takes only the pages that differ.
fn is_free_for(
    entry: &Registered,
    node: &LiveNode,
    live: &BTreeMap<&str, &LiveNode>,
    by_number: &ByNumber<'_>,
) -> bool {
    let checkpoint = &entry.checkpoint;
    let staying = entry
        .nodes
        .iter()
        .filter_map(|name| live.get(name.as_str()));
    let mut staying = staying.filter(|holder| stays(holder));
    if !stays(node) || staying.any(|holder| host(holder) == host(node)) {
        return false;
    }
    let whole = checkpoint
        .memory_bytes
        .saturating_sub(checkpoint.zero_bytes);
    let parent = by_number.get(&(checkpoint.job.as_str(), checkpoint.parent_generation));
    let beside = parent.is_some_and(|parent| parent.nodes.contains(&node.facts.name));
    let size = if beside {
        checkpoint.added_bytes.min(whole)
    } else {
        whole
    };
    has_room(node, size)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use permafrost_protocol::control::Checkpoint;

    use super::*;
    use crate::{NodeClass, NodeFacts};

    /// Returns a view of live nodes: `a` is active, `a-` drained, `a?` transient.
    fn view(nodes: &[&str]) -> NodesView {
        let node = |word: &&str| LiveNode {
            facts: NodeFacts {
                name: word.trim_end_matches(['-', '?']).to_owned(),
                capacity_bytes: 3200,
                free_bytes: 1000,
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

    /// Returns an entry; `a!` is a holder with a damaged copy.
    fn entry(generation: u64, wanted_copies: u32, nodes: &[&str]) -> Registered {
        Registered {
            checkpoint: Checkpoint {
                job: "j".into(),
                generation,
                memory_bytes: 10,
                ..Checkpoint::default()
            },
            content_digest: [0; 32],
            nodes: nodes
                .iter()
                .map(|name| name.trim_end_matches('!').to_owned())
                .collect(),
            wanted_copies,
            damaged: nodes
                .iter()
                .filter_map(|name| name.strip_suffix('!'))
                .map(str::to_owned)
                .collect(),
            cold: Vec::new(),
        }
    }

    /// Returns two facts for a node and one checkpoint with two wanted copies: true if the node is needed, and true
    /// if it has the only copy.
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
        // There is no other node for a second copy.
        assert_eq!(of(&["a", "b"], &["a-", "b"], "a"), (false, false));
        // But there must be one copy.
        assert_eq!(of(&["a"], &["a-"], "a"), (true, true));
        // Copies on nodes that leave, or may leave, do not make this one expendable, although they preserve the
        // checkpoint.
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
    fn a_damaged_copy_is_no_copy() {
        let all = standing(&[entry(1, 2, &["a", "b!"])], &view(&["a", "b", "c"]));
        assert_eq!((all.under_replicated, all.stranded, all.damaged), (1, 0, 1));
        assert_eq!((all.nodes["a"].damaged, all.nodes["b"].damaged), (0, 1));
        // Two nodes, and the good copy's node leaves: it is needed, and no other node can take the copy.
        let all = standing(&[entry(1, 2, &["a", "b!"])], &view(&["a-", "b"]));
        let a = &all.nodes["a"];
        assert_eq!((a.needed, a.stuck), (1, 1));
        assert_eq!(a.only_here, ["j@1"]);
        assert!(all.nodes["b"].only_here.is_empty());
        // With a third node it is copied.
        let all = standing(&[entry(1, 2, &["a", "b!"])], &view(&["a-", "b", "c"]));
        assert_eq!((all.nodes["a"].needed, all.nodes["a"].stuck), (1, 0));
        // The node with the good copy is dead.
        let all = standing(&[entry(1, 2, &["a", "b!"])], &view(&["b", "c"]));
        assert_eq!((all.under_replicated, all.stranded), (1, 1));
        assert_eq!(all.nodes["a"].only_here, ["j@1"]);
        // The remaining copies are all damaged: each may still be of use.
        let all = standing(&[entry(1, 2, &["a!", "b!"])], &view(&["a-", "b"]));
        assert_eq!(all.nodes["a"].only_here, ["j@1"]);
        assert_eq!(all.nodes["b"].only_here, ["j@1"]);
    }

    #[test]
    fn what_no_node_has_room_for_is_stuck() {
        let mut view = view(&["a-", "b", "c"]);
        view.nodes[2].facts.free_bytes = 105;
        let mut held = entry(1, 2, &["a", "b"]);
        let stuck = |held: &Registered| {
            let all = standing(std::slice::from_ref(held), &view);
            (all.nodes["a"].needed, all.nodes["a"].stuck)
        };
        assert_eq!(stuck(&held), (1, 1));
        held.checkpoint.memory_bytes = 5;
        assert_eq!(stuck(&held), (1, 0));
        // The pages that differ from its parent fit beside it.
        let mut parent = entry(1, 2, &["b", "c"]);
        parent.checkpoint.memory_bytes = 1000;
        let mut child = entry(2, 2, &["a", "b"]);
        child.checkpoint.memory_bytes = 1000;
        child.checkpoint.added_bytes = 3;
        child.checkpoint.parent_generation = 1;
        let all = standing(&[parent, child], &view);
        assert_eq!((all.nodes["a"].needed, all.nodes["a"].stuck), (1, 0));
    }

    #[test]
    fn what_is_relied_on_is_good_alive_and_stays() {
        let of = |holders: &[&str], nodes: &[&str]| {
            let entry = entry(1, 2, holders);
            let relied_on = relied_on(&entry, &view(nodes), "a");
            relied_on.into_iter().cloned().collect::<Vec<_>>()
        };
        assert_eq!(of(&["a", "b", "c!", "d"], &["a", "b", "c"]), ["b"]);
        assert_eq!(of(&["a", "b", "c"], &["a", "b-", "c"]), ["c"]);
        assert_eq!(of(&["a", "b"], &["a", "b-"]), ["b"]);
        assert!(of(&["a", "b!"], &["a", "b"]).is_empty());
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
