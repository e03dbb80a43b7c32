//! Rebuilds the registry from the nodes' checkpoints, after etcd's data was lost or damaged.
//!
//! Only checkpoints that were once listed come back: each node keeps that mark in its region. A checkpoint that
//! was sealed and never listed is ignored, because its dump was reported as failed. Existing entries are not
//! changed, but for missing holders.

use permafrost_protocol::control::ErrorCode;
use permafrost_protocol::control::ReportedError as _;
use std::collections::BTreeMap;

use permafrost_clustered::{Registered, Registry as _};
use permafrost_protocol::control::Checkpoint;
use permafrost_store::{ContentDigest, StoreError};

use super::EtcdRegistry;

/// A checkpoint in a node's region.
#[derive(Clone, Debug, PartialEq)]
pub struct Copy {
    /// Line of the listing.
    pub checkpoint: Checkpoint,
    /// Digest of the contents, independent of where they are stored.
    pub content_digest: ContentDigest,
    /// True if the node was notified that the cluster lists the checkpoint.
    pub is_published: bool,
    /// True if the node knows that its copy is damaged.
    pub is_damaged: bool,
}

/// Inventory of a node: the checkpoints that it holds.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeInventory {
    /// Name of the node.
    pub node: String,
    /// Checkpoints in the node's region.
    pub copies: Vec<Copy>,
}

/// A copy that is left alone, with the reason for the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoubtfulCopy {
    /// Name of the node that holds the copy.
    pub node: String,
    /// Id of the checkpoint.
    pub checkpoint: String,
    /// Name that the checkpoint would have.
    pub name: String,
    /// Reason why the copy is left alone.
    pub why: &'static str,
}

/// Changes that a rebuild makes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RebuildPlan {
    /// Entries to be listed.
    pub list: Vec<Registered>,
    /// Holders to be added to entries: the checkpoint and the node.
    pub holders: Vec<(Checkpoint, String)>,
    /// Generations that must never be handed out again: each job and its highest, published or not.
    pub generations: BTreeMap<String, u64>,
    /// Copies that are left alone.
    pub doubts: Vec<DoubtfulCopy>,
}

/// Compares the listing with the inventories. `wanted_copies` is for entries that are listed again.
#[must_use]
pub fn plan(
    listed: &[Registered],
    inventories: &[NodeInventory],
    wanted_copies: u32,
) -> RebuildPlan {
    let mut plan = RebuildPlan::default();
    // By place in the listing: job and generation, or id for a parked one.
    let place = |checkpoint: &Checkpoint| {
        let id = match checkpoint.generation {
            0 => checkpoint.id.clone(),
            _ => String::new(),
        };
        (checkpoint.job.clone(), checkpoint.generation, id)
    };
    let known: BTreeMap<_, _> = listed
        .iter()
        .map(|entry| (place(&entry.checkpoint), entry))
        .collect();
    let mut missing: BTreeMap<_, Vec<Registered>> = BTreeMap::new();
    for inventory in inventories {
        for copy in &inventory.copies {
            let checkpoint = &copy.checkpoint;
            if checkpoint.generation != 0 {
                let highest = plan.generations.entry(checkpoint.job.clone()).or_default();
                *highest = (*highest).max(checkpoint.generation);
            }
            let mut doubt = |why| {
                plan.doubts.push(DoubtfulCopy {
                    node: inventory.node.clone(),
                    checkpoint: checkpoint.id.clone(),
                    name: name_of(checkpoint),
                    why,
                });
            };
            match known.get(&place(checkpoint)) {
                Some(entry) if entry.checkpoint.id != checkpoint.id => {
                    doubt("another checkpoint is listed under its number");
                }
                Some(entry) if entry.content_digest != copy.content_digest => {
                    doubt("its content is not what is listed");
                }
                Some(entry) => {
                    if !entry.nodes.contains(&inventory.node) {
                        plan.holders
                            .push((checkpoint.clone(), inventory.node.clone()));
                    }
                }
                None if !copy.is_published => {}
                None => add(
                    missing.entry(place(checkpoint)).or_default(),
                    copy,
                    &inventory.node,
                    wanted_copies,
                ),
            }
        }
    }
    for versions in missing.into_values() {
        if let [entry] = versions.as_slice() {
            plan.list.push(entry.clone());
            continue;
        }
        // Two contents under one number: no rule can decide which is right.
        for entry in versions {
            for node in &entry.nodes {
                plan.doubts.push(DoubtfulCopy {
                    node: node.clone(),
                    checkpoint: entry.checkpoint.id.clone(),
                    name: name_of(&entry.checkpoint),
                    why: "nodes disagree about what has its number",
                });
            }
        }
    }
    // A parent before its children, so that a reader of the list never sees a chain without a beginning.
    plan.list
        .sort_by_key(|entry| (entry.checkpoint.generation, entry.checkpoint.id.clone()));
    plan
}

fn add(versions: &mut Vec<Registered>, copy: &Copy, node: &str, wanted_copies: u32) {
    let same = versions.iter_mut().find(|entry| {
        entry.checkpoint.id == copy.checkpoint.id && entry.content_digest == copy.content_digest
    });
    match same {
        Some(entry) => {
            entry.set_holder(node, true);
            entry.set_damaged(node, copy.is_damaged);
        }
        None => versions.push(Registered {
            checkpoint: copy.checkpoint.clone(),
            content_digest: copy.content_digest,
            nodes: vec![node.to_owned()],
            wanted_copies,
            damaged: copy
                .is_damaged
                .then(|| node.to_owned())
                .into_iter()
                .collect(),
            // Each node says it of its copies at its next sweep.
            cold: Vec::new(),
        }),
    }
}

/// Carries out a plan; can be repeated after a failure. The counters come first: a number must be recorded as
/// used before it could be handed out. Returns the entries that were not listed, because their job is being
/// dumped now or another node was quicker: they must be planned and applied again.
///
/// # Errors
/// The registry is unavailable.
pub fn apply(registry: &EtcdRegistry, plan: &RebuildPlan) -> Result<Vec<Registered>, StoreError> {
    for (job, generation) in &plan.generations {
        registry.raise_generation(job, *generation)?;
    }
    let mut busy = Vec::new();
    for entry in &plan.list {
        if registry.is_withdrawn(&entry.checkpoint)? {
            // A node has not heard of the removal yet.
            continue;
        }
        match registry.publish(entry, None) {
            Err(error) if error.code() == ErrorCode::Conflict => {
                tracing::warn!(event = "rebuild-entry-failed", %error, "not listed again yet");
                busy.push(entry.clone());
            }
            other => other?,
        }
    }
    for (checkpoint, node) in &plan.holders {
        match registry.set_holder(checkpoint, node, true) {
            // The checkpoint was removed since.
            Err(StoreError::NotFound { .. }) => {}
            other => other?,
        }
    }
    Ok(busy)
}

/// Raises the registry's counters above the numbers that a node holds, so that they are never handed out again.
/// Each node does this by itself as soon as it finds that etcd's data is new, so that dumps before the rebuild
/// do not take the numbers of older ones.
///
/// # Errors
/// The registry is unavailable.
pub fn keep_numbers(
    registry: &EtcdRegistry,
    holdings: &[permafrost_store::Holding],
) -> Result<(), StoreError> {
    let mut highest: BTreeMap<&str, u64> = BTreeMap::new();
    for holding in holdings {
        let checkpoint = &holding.checkpoint;
        if checkpoint.generation != 0 {
            let generation = highest.entry(&checkpoint.job).or_default();
            *generation = (*generation).max(checkpoint.generation);
        }
    }
    for (job, generation) in highest {
        registry.raise_generation(job, generation)?;
    }
    Ok(())
}

/// Returns a checkpoint's name as people write it.
pub(super) fn name_of(checkpoint: &Checkpoint) -> String {
    match checkpoint.generation {
        0 => format!("parked session {}", checkpoint.session),
        generation => format!("{}@{generation}", checkpoint.job),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(generation: u64, id: &str, content: u8, is_published: bool) -> Copy {
        Copy {
            checkpoint: Checkpoint {
                job: "j".into(),
                generation,
                id: id.into(),
                ..Checkpoint::default()
            },
            content_digest: [content; 32],
            is_published,
            is_damaged: false,
        }
    }

    fn holds(node: &str, copies: &[Copy]) -> NodeInventory {
        NodeInventory {
            node: node.into(),
            copies: copies.to_vec(),
        }
    }

    #[test]
    fn published_copies_come_back_with_all_their_holders() {
        let inventories = [
            holds("b", &[copy(2, "y", 2, true), copy(1, "x", 1, true)]),
            holds("a", &[copy(1, "x", 1, true), copy(3, "z", 3, false)]),
        ];
        let plan = plan(&[], &inventories, 2);
        let listed: Vec<_> = plan
            .list
            .iter()
            .map(|entry| (entry.checkpoint.generation, entry.nodes.join(",")))
            .collect();
        assert_eq!(listed, [(1, "b,a".to_owned()), (2, "b".to_owned())]);
        assert_eq!(
            plan.generations["j"], 3,
            "an unpublished number is used, too"
        );
        assert!(plan.holders.is_empty() && plan.doubts.is_empty());
    }

    #[test]
    fn listed_entries_only_gain_holders_with_the_same_content() {
        let listed = [Registered {
            checkpoint: copy(1, "x", 1, true).checkpoint,
            content_digest: [1; 32],
            nodes: vec!["a".into()],
            wanted_copies: 2,
            damaged: Vec::new(),
            cold: Vec::new(),
        }];
        let inventories = [
            holds("a", &[copy(1, "x", 1, true)]),
            // The request to publish it here was lost, but the cluster lists it.
            holds("b", &[copy(1, "x", 1, false)]),
            holds("c", &[copy(1, "x", 9, true)]),
            holds("d", &[copy(1, "other", 1, true)]),
        ];
        let plan = plan(&listed, &inventories, 2);
        assert!(plan.list.is_empty());
        assert_eq!(plan.holders.len(), 1);
        assert_eq!(plan.holders[0].1, "b");
        let doubted: Vec<_> = plan
            .doubts
            .iter()
            .map(|doubt| doubt.node.as_str())
            .collect();
        assert_eq!(doubted, ["c", "d"]);
    }

    #[test]
    fn what_nodes_know_to_be_damaged_is_listed_as_such() {
        let damaged = Copy {
            is_damaged: true,
            ..copy(1, "x", 1, true)
        };
        for inventories in [
            [
                holds("b", std::slice::from_ref(&damaged)),
                holds("a", &[copy(1, "x", 1, true)]),
            ],
            [
                holds("a", &[copy(1, "x", 1, true)]),
                holds("b", std::slice::from_ref(&damaged)),
            ],
        ] {
            let plan = plan(&[], &inventories, 2);
            assert_eq!(plan.list[0].nodes.len(), 2);
            assert_eq!(plan.list[0].damaged, ["b"]);
        }
    }

    #[test]
    fn nodes_that_disagree_are_not_believed() {
        let inventories = [
            holds("a", &[copy(1, "x", 1, true)]),
            holds("b", &[copy(1, "x", 2, true)]),
        ];
        let plan = plan(&[], &inventories, 2);
        assert!(plan.list.is_empty());
        assert_eq!(plan.doubts.len(), 2);
    }

    #[test]
    fn parked_ones_do_not_collide() {
        let inventories = [holds("a", &[copy(0, "x", 1, true), copy(0, "y", 2, true)])];
        let plan = plan(&[], &inventories, 1);
        assert_eq!(plan.list.len(), 2);
        assert!(plan.generations.is_empty());
    }
}
