//! Operator commands for the cluster: list, drain, remove and take back nodes, and rebuild the registry.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use permafrost_clustered::{Registered, Registry as _};
use permafrost_protocol::control::{self, MissingNode, NodeList, NodeStatus, Rebuilt, request};
use permafrost_protocol::versions::{Interface, SpokenVersions, VersionRange};
use permafrost_protocol::wire::message::request as request_to_peer;
use permafrost_store::StoreError;

use super::inventory::Inventories;
use super::nodes::{ClusterNodes, LiveNode, NodesView};
use super::probe::LastProbe;
use super::rebuild::{self, NodeInventory, name_of};
use super::registry::EtcdRegistry;
use super::standing::{Holdings, Standing, relied_on, standing};
use super::values::{Member, MemberState};
use crate::error::NodesError;
use crate::repair::VERIFIED_WITHIN;

/// Age from which on a view of the nodes no longer tells which are alive: more than a lease's time, and a
/// working registry confirms it every second.
const STALE: Duration = Duration::from_secs(15);

/// Age of the view from which on the registry probably does not answer: checkpoints are not counted then,
/// because the caller should not wait for the numbers.
const LATE: Duration = Duration::from_secs(5);

/// Maximum number of names listed of checkpoints that one node alone holds.
const NAMES: usize = 20;

/// Maximum number of names listed of checkpoints that a removed node held alone: as many as fit into a reply,
/// at 200 bytes each.
const NAMES_LOST: usize = 50_000;

/// Maximum number of inventories that are requested at once.
const AT_ONCE: usize = 8;

/// Handles `permafrost node …`. All methods block.
pub trait Operate: Send + Sync {
    /// Lists the nodes, or one of them. Without the registry, the last known nodes are returned, without counts.
    ///
    /// # Errors
    /// No such node.
    fn nodes(&self, nodes: &request::Nodes) -> Result<NodeList, StoreError>;

    /// Drains a node, takes it back, or removes it.
    ///
    /// # Errors
    /// No such node or state; the node to be removed is live and not drained, or holds the only undamaged copy of a
    /// checkpoint, or the other copies of its checkpoints are still being read; the registry is unavailable.
    fn set_node(&self, set: &request::SetNode) -> Result<NodeList, StoreError>;

    /// Sets the version of the registry that the cluster uses.
    ///
    /// # Errors
    /// A node that was not removed does not speak the version; the registry is unavailable.
    fn set_level(&self, set: &request::SetLevel) -> Result<NodeList, StoreError>;

    /// Lists the nodes' checkpoints again in the registry.
    ///
    /// # Errors
    /// The registry is unavailable. The rebuild can be repeated.
    fn rebuild(&self, rebuild: &request::Rebuild) -> Result<Rebuilt, StoreError>;
}

/// Returns the error of a node without a cluster.
pub fn no_cluster() -> StoreError {
    NodesError::NoCluster.into()
}

/// Operator commands over etcd; made by [`super::Cluster::operator`].
pub struct Operator {
    registry: EtcdRegistry,
    nodes: ClusterNodes,
    inventories: Arc<dyn Inventories>,
    wanted_copies: u32,
    probe: LastProbe,
}

impl Operator {
    pub(super) fn new(
        registry: EtcdRegistry,
        nodes: ClusterNodes,
        inventories: Arc<dyn Inventories>,
        wanted_copies: u32,
    ) -> Self {
        Self {
            registry,
            nodes,
            inventories,
            wanted_copies,
            probe: LastProbe::default(),
        }
    }

    /// Returns the view of the nodes if it was confirmed a moment ago.
    fn fresh(&self) -> Result<NodesView, StoreError> {
        let view = self.nodes.live();
        if view.age > STALE {
            return Err(NodesError::ViewStale.into());
        }
        Ok(view)
    }

    fn answer(&self, view: &NodesView, only: &str, names: usize) -> Result<NodeList, StoreError> {
        // A request for the nodes while etcd is away must not wait for it.
        let listed = if view.age > LATE {
            None
        } else {
            let listed = self.registry.listed();
            listed
                .inspect_err(|error| tracing::warn!(event = "checkpoints-not-counted", %error, "checkpoints not counted"))
                .ok()
        };
        let leader = match &listed {
            Some(_) => self.registry.leader().ok().flatten(),
            None => None,
        };
        let counted = listed.as_ref().map(|(listed, _)| standing(listed, view));
        let mut list = describe(view, counted.as_ref(), names);
        // An operator who lists one drained node waits until it can be switched off.
        if let Some((listed, _)) = &listed {
            let drained = list
                .nodes
                .iter_mut()
                .filter(|node| node.name == only && node.state == MemberState::Drained.word());
            for node in drained {
                node.unverified = Some(self.unverified(listed, view, only).len() as u64);
            }
        }
        if listed.is_some() {
            list.registry_level = self.registry.level().ok();
        }
        list.answered_by = self.registry.node().to_owned();
        list.leader = leader.unwrap_or_default();
        list.cluster = listed.map_or_else(String::new, |(_, mark)| mark.id);
        if !only.is_empty() {
            list.nodes.retain(|node| node.name == only);
            if list.nodes.is_empty() {
                return Err(unknown(only));
            }
        }
        Ok(list)
    }

    fn check_removable(&self, view: &NodesView, name: &str) -> Result<(), StoreError> {
        let live = view.nodes.iter().find(|node| node.facts.name == name);
        if live.is_some_and(|node| node.state == MemberState::Active) {
            return Err(NodesError::NotDrained {
                node: name.to_owned(),
            }
            .into());
        }
        let listed = self.registry.list("")?;
        let standing = standing(&listed, view);
        let held = standing.nodes.get(name);
        let only_here = held.map_or(&[][..], |held| held.only_here.as_slice());
        if !only_here.is_empty() {
            return Err(NodesError::OnlyCopies {
                checkpoints: enumerate(only_here),
            }
            .into());
        }
        let unverified = self.unverified(&listed, view, name);
        if unverified.is_empty() {
            return Ok(());
        }
        Err(NodesError::Unverified {
            node: name.to_owned(),
            checkpoints: enumerate(&unverified),
            within_h: VERIFIED_WITHIN.as_secs() / 3600,
        }
        .into())
    }

    /// Returns the names of a node's checkpoints whose other copies, those that are relied on when the node goes,
    /// were not all found whole lately. Has the nodes with those copies read them.
    fn unverified(&self, listed: &[Registered], view: &NodesView, name: &str) -> Vec<String> {
        let held: Vec<_> = listed
            .iter()
            .filter(|entry| entry.nodes.iter().any(|holder| holder == name))
            .map(|entry| (entry, relied_on(entry, view, name)))
            .collect();
        let mut by_node: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (entry, relied_on) in &held {
            for node in relied_on {
                by_node.entry(node).or_default().push(&entry.checkpoint.id);
            }
        }
        let mut whole: BTreeSet<(&str, String)> = BTreeSet::new();
        for (node, ids) in by_node {
            for ids in ids.chunks(request_to_peer::MAX_VERIFY) {
                let asked = request_to_peer::Verify {
                    checkpoints: ids.iter().map(|&id| id.to_owned()).collect(),
                    within_s: VERIFIED_WITHIN.as_secs(),
                };
                match self.inventories.verify(node, asked) {
                    Ok(verified) => whole.extend(verified.whole.into_iter().map(|id| (node, id))),
                    Err(error) => {
                        tracing::warn!(event = "copies-not-counted", node, %error, "not known how its copies stand");
                        break;
                    }
                }
            }
        }
        let is_whole = |entry: &Registered, node: &String| {
            whole.contains(&(node.as_str(), entry.checkpoint.id.clone()))
        };
        held.iter()
            .filter(|(entry, relied_on)| !relied_on.iter().all(|node| is_whole(entry, node)))
            .map(|(entry, _)| name_of(&entry.checkpoint))
            .collect()
    }
}

impl Operate for Operator {
    fn nodes(&self, nodes: &request::Nodes) -> Result<NodeList, StoreError> {
        let view = self.nodes.live();
        let mut list = self.answer(&view, &nodes.name, NAMES)?;
        if nodes.probe {
            let probed = (self.probe).get(&view.nodes, &*self.inventories, &self.registry);
            for node in &mut list.nodes {
                let answer = probed.nodes.iter().find(|(name, _)| *name == node.name);
                node.probe = answer.map(|(_, answer)| answer.clone());
            }
            list.registry = probed.registry;
        }
        Ok(list)
    }

    fn set_node(&self, set: &request::SetNode) -> Result<NodeList, StoreError> {
        let state = MemberState::parse(&set.state)?;
        let mut view = self.fresh()?;
        let member = view.members.iter().find(|member| member.name == set.name);
        let was = member.ok_or_else(|| unknown(&set.name))?.state;
        if state == MemberState::Removed && was != MemberState::Removed && !set.force {
            self.check_removable(&view, &set.name)?;
        }
        self.registry.set_member_state(&set.name, state)?;
        tracing::info!(
            event = "node-state-changed",
            node = set.name,
            ?state,
            force = set.force,
            "node is set"
        );
        // The watch will report the change in a moment.
        for member in &mut view.members {
            if member.name == set.name {
                member.state = state;
            }
        }
        for node in &mut view.nodes {
            if node.facts.name == set.name {
                node.state = state;
            }
        }
        if state == MemberState::Removed {
            view.nodes.retain(|node| node.facts.name != set.name);
        }
        // A forced removal lists all checkpoints that it gives up.
        let names = if state == MemberState::Removed {
            NAMES_LOST
        } else {
            NAMES
        };
        self.answer(&view, &set.name, names)
    }

    fn set_level(&self, set: &request::SetLevel) -> Result<NodeList, StoreError> {
        let level = set.registry;
        let view = self.fresh()?;
        check_level(&view, level)?;
        let before = self.registry.level()?;
        let members = self.registry.set_level(level)?;
        // A node may have registered between the check and the write, which its registration did not see.
        let view = NodesView { members, ..view };
        if let Err(error) = check_level(&view, level) {
            self.registry.set_level(before)?;
            return Err(error);
        }
        tracing::warn!(
            event = "registry-level-changed",
            from = before,
            to = level,
            "another version of the registry is used"
        );
        self.answer(&view, "", NAMES)
    }

    fn rebuild(&self, rebuild: &request::Rebuild) -> Result<Rebuilt, StoreError> {
        let view = self.fresh()?;
        let mut missing: Vec<MissingNode> = view
            .members
            .iter()
            .filter(|member| view.nodes.iter().all(|node| node.facts.name != member.name))
            .map(|member| MissingNode {
                name: member.name.clone(),
                why: match member.state {
                    MemberState::Removed => "it was removed".to_owned(),
                    _ => "it is not alive".to_owned(),
                },
            })
            .collect();
        let (inventories, silent) = self.inventories_of(&view.nodes);
        missing.extend(silent);
        // After the inventories: so the list contains later publications, and a checkpoint withdrawn since is not
        // listed again, unless a node has not heard of it yet.
        let (listed, mark) = self.registry.listed()?;
        let plan = rebuild::plan(&listed, &inventories, self.wanted_copies);
        let busy = if rebuild.dry_run {
            Vec::new()
        } else {
            rebuild::apply(&self.registry, &plan)?
        };
        if !rebuild.dry_run {
            for id in &rebuild.discard {
                self.registry.discard(id)?;
                tracing::warn!(
                    event = "unlisted-copies-discarded",
                    id,
                    "copies of an unlisted checkpoint are discarded"
                );
            }
        }
        let put_off: BTreeSet<&str> = busy
            .iter()
            .map(|entry| entry.checkpoint.id.as_str())
            .collect();
        let again = plan
            .list
            .iter()
            .filter(|entry| !put_off.contains(entry.checkpoint.id.as_str()));
        Ok(Rebuilt {
            dry_run: rebuild.dry_run,
            cluster: mark.id,
            nodes: inventories.into_iter().map(|taken| taken.node).collect(),
            missing,
            listed: again.map(|entry| entry.clone().into_record()).collect(),
            copies_added: plan.holders.len() as u64,
            doubts: plan
                .doubts
                .iter()
                .map(|doubt| control::Doubt {
                    node: doubt.node.clone(),
                    checkpoint: doubt.name.clone(),
                    id: doubt.checkpoint.clone(),
                    why: doubt.why.to_owned(),
                })
                .collect(),
            busy: busy
                .iter()
                .map(|entry| name_of(&entry.checkpoint))
                .collect(),
        })
    }
}

impl Operator {
    /// Requests the inventories of all nodes, some at a time; returns also the nodes that gave none.
    fn inventories_of(&self, nodes: &[LiveNode]) -> (Vec<NodeInventory>, Vec<MissingNode>) {
        let (mut taken, mut silent) = (Vec::new(), Vec::new());
        for some in nodes.chunks(AT_ONCE) {
            let asked: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = some
                    .iter()
                    .map(|node| scope.spawn(|| self.inventories.inventory(&node.facts.name)))
                    .collect();
                threads.into_iter().map(|thread| thread.join()).collect()
            });
            for (node, asked) in some.iter().zip(asked) {
                let why = match asked {
                    Ok(Ok(inventory)) => {
                        taken.push(inventory);
                        continue;
                    }
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "asking it failed".to_owned(),
                };
                silent.push(MissingNode {
                    name: node.facts.name.clone(),
                    why,
                });
            }
        }
        (taken, silent)
    }
}

fn unknown(node: &str) -> StoreError {
    NodesError::NoNode {
        node: node.to_owned(),
    }
    .into()
}

/// Formats names as `a@1, a@2 and 7 more`.
fn enumerate(names: &[String]) -> String {
    let (told, rest) = names.split_at(names.len().min(NAMES));
    let mut text = told.join(", ");
    if !rest.is_empty() {
        text += &format!(" and {} more", rest.len());
    }
    text
}

/// Describes the nodes, and their checkpoints as far as those were counted.
/// Returns the versions that a node speaks, or spoke when it was registered last.
fn spoken(view: &NodesView, member: &Member) -> Option<SpokenVersions> {
    let live = view
        .nodes
        .iter()
        .find(|node| node.facts.name == member.name);
    let facts = live.and_then(|node| node.facts.speaks.clone());
    member.speaks.clone().or(facts)
}

/// Returns the versions of the registry that each node which was not removed speaks, with its name.
fn registry_versions(view: &NodesView) -> impl Iterator<Item = (&str, VersionRange)> {
    let staying = (view.members.iter()).filter(|member| member.state != MemberState::Removed);
    staying.map(|member| {
        let speaks = spoken(view, member).unwrap_or_default();
        (member.name.as_str(), speaks.of(Interface::Registry))
    })
}

/// Checks that every node which was not removed speaks a version of the registry.
fn check_level(view: &NodesView, level: u32) -> Result<(), StoreError> {
    let unspoken: Vec<String> = registry_versions(view)
        .filter(|(_, range)| !range.contains(level))
        .map(|(name, range)| format!("{name} ({range})"))
        .collect();
    if unspoken.is_empty() {
        return Ok(());
    }
    Err(NodesError::LevelUnspoken {
        level,
        nodes: enumerate(&unspoken),
    }
    .into())
}

fn describe(view: &NodesView, counted: Option<&Standing>, names: usize) -> NodeList {
    let members: BTreeMap<&str, &Member> = view
        .members
        .iter()
        .map(|member| (member.name.as_str(), member))
        .collect();
    let live: BTreeMap<&str, &LiveNode> = view
        .nodes
        .iter()
        .map(|node| (node.facts.name.as_str(), node))
        .collect();
    let all: BTreeSet<&str> = members.keys().chain(live.keys()).copied().collect();
    let describe = |name: &str| {
        let (member, node) = (members.get(name), live.get(name));
        let mut status = NodeStatus {
            name: name.to_owned(),
            live: node.is_some(),
            ..NodeStatus::default()
        };
        if let Some(member) = member {
            status.region.clone_from(&member.region);
            status.first_seen_unix_ms = member.first_seen_unix_ms;
            status.state = member.state.word().to_owned();
            status.speaks = spoken(view, member);
        }
        if let Some(LiveNode { facts, state, .. }) = node {
            status.state = match state {
                MemberState::Active if !facts.failed.is_empty() => "failed",
                state => state.word(),
            }
            .to_owned();
            status.stopping = facts.draining;
            status.class = facts.class.word().to_owned();
            status.tier = facts.tier.word().to_owned();
            status.volatile = facts.volatile;
            status.copies_count = facts.counts();
            status.zone.clone_from(&facts.domain.zone);
            status.rack.clone_from(&facts.domain.rack);
            status.host.clone_from(&facts.domain.host);
            status.address.clone_from(&facts.address);
            status.region.clone_from(&facts.region);
            status.capacity_bytes = facts.capacity_bytes;
            status.free_bytes = facts.free_bytes;
            status.version.clone_from(&facts.version);
        }
        if let Some(counted) = counted {
            let nothing = Holdings::default();
            let held = counted.nodes.get(name).unwrap_or(&nothing);
            status.checkpoints = Some(held.held);
            status.needed = Some(held.needed);
            status.needed_bytes = Some(held.needed_bytes);
            status.only_here = Some(held.only_here.len() as u64);
            status.only_here_names = held.only_here.iter().take(names).cloned().collect();
            status.damaged = Some(held.damaged);
            status.stuck = Some(held.stuck);
        }
        status
    };
    NodeList {
        nodes: all.into_iter().map(describe).collect(),
        age_ms: (view.age != Duration::MAX)
            .then(|| u64::try_from(view.age.as_millis()).unwrap_or(u64::MAX)),
        checkpoints: counted.map(|counted| counted.listed),
        under_replicated: counted.map(|counted| counted.under_replicated),
        stranded: counted.map(|counted| counted.stranded),
        damaged: counted.map(|counted| counted.damaged),
        highest_registry_level: registry_versions(view).map(|(_, range)| range.newest).min(),
        ..NodeList::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NodeFacts;

    #[test]
    fn dead_members_are_described_as_far_as_known() {
        let member = |name: &str, state| Member {
            name: name.to_owned(),
            region: format!("region-of-{name}"),
            state,
            ..Member::default()
        };
        let view = NodesView {
            nodes: vec![LiveNode {
                facts: NodeFacts {
                    name: "b".to_owned(),
                    address: "b:1".to_owned(),
                    region: "new".to_owned(),
                    ..NodeFacts::default()
                },
                state: MemberState::Drained,
                token: 1,
            }],
            members: vec![
                member("a", MemberState::Removed),
                member("b", MemberState::Drained),
            ],
            age: Duration::MAX,
        };
        let list = describe(&view, None, NAMES);
        let [a, b] = list.nodes.as_slice() else {
            panic!("{list:?}");
        };
        assert_eq!(
            (a.live, a.state.as_str(), a.region.as_str()),
            (false, "removed", "region-of-a")
        );
        assert_eq!(
            (b.live, b.state.as_str(), b.region.as_str()),
            (true, "drained", "new")
        );
        assert_eq!(
            (list.age_ms, list.checkpoints, b.checkpoints),
            (None, None, None)
        );
        let counted = describe(&view, Some(&Standing::default()), NAMES);
        assert_eq!(counted.nodes[0].checkpoints, Some(0));
    }

    #[test]
    fn the_level_is_one_that_every_node_speaks_which_was_not_removed() {
        let speaks = |newest| SpokenVersions {
            registry: Some(VersionRange { oldest: 1, newest }),
            ..SpokenVersions::default()
        };
        let member = |name: &str, speaks, state| Member {
            name: name.to_owned(),
            speaks,
            state,
            ..Member::default()
        };
        let mut view = NodesView {
            // An older node has set its status, and dropped what it speaks.
            nodes: vec![LiveNode {
                facts: NodeFacts {
                    name: "b".to_owned(),
                    speaks: Some(speaks(3)),
                    ..NodeFacts::default()
                },
                state: MemberState::Active,
                token: 1,
            }],
            members: vec![
                member("a", Some(speaks(2)), MemberState::Active),
                member("b", None, MemberState::Drained),
                member("c", None, MemberState::Removed),
            ],
            age: Duration::ZERO,
        };
        assert!(check_level(&view, 1).is_ok() && check_level(&view, 2).is_ok());
        let list = describe(&view, None, NAMES);
        assert_eq!(list.highest_registry_level, Some(2));
        let refused = check_level(&view, 3).unwrap_err().to_string();
        assert!(refused.contains("not spoken by a (1 to 2)"), "{refused}");
        assert!(check_level(&view, 0).is_err());
        // One that did not say what it speaks, speaks version 1.
        view.nodes.clear();
        let refused = check_level(&view, 2).unwrap_err().to_string();
        assert!(refused.contains("not spoken by b (1)"), "{refused}");
    }

    #[test]
    fn long_lists_of_names_are_cut_and_say_so() {
        let names: Vec<_> = (1..=23).map(|number| format!("j@{number}")).collect();
        assert_eq!(enumerate(&names[..2]), "j@1, j@2");
        assert!(enumerate(&names).ends_with("j@20 and 3 more"));
    }
}
