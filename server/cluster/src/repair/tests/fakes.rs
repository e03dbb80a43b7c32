//! A simulated cluster: the listing, the real copies, and the nodes that answer.

use permafrost_store::MissingObject;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use permafrost_clustered::{JobLock, Registered, Registry};
use permafrost_protocol::control::{self, Checkpoint, ErrorCode};
use permafrost_protocol::wire::message::request;
use permafrost_store::StoreError;
use permafrost_transport::peer::PeerError;

use super::super::planner::{Planned, Planner};
use super::super::steps::{CopyHealth, Peers, Steps, Undone, View};
use super::super::{RepairProgress, Timing};
use crate::error::CopyingError;
use crate::{LiveNode, Member, MemberState, NodeClass, NodeFacts, NodesView};

#[derive(Clone, Debug)]
pub(super) struct FakeNode {
    pub(super) live: bool,
    pub(super) state: MemberState,
    pub(super) class: NodeClass,
    /// Ids of the checkpoints that it really has.
    pub(super) holds: BTreeSet<String>,
    /// Ids of those whose copy is damaged, known or not.
    pub(super) damaged: BTreeSet<String>,
    /// Ids of the pulls that it was asked for and carried out.
    pub(super) pulled: Vec<String>,
    pub(super) free_bytes: u64,
}

impl FakeNode {
    /// Returns true if the node has an undamaged copy.
    pub(super) fn has_good(&self, id: &str) -> bool {
        self.holds.contains(id) && !self.damaged.contains(id)
    }

    pub(super) fn counts(&self) -> bool {
        self.live && self.state == MemberState::Active && self.class == NodeClass::Reserved
    }
}

/// Hook that is called with a node's name.
pub(super) type Hook = Arc<dyn Fn(&str) + Send + Sync>;

#[derive(Default)]
pub(super) struct World {
    pub(super) nodes: BTreeMap<String, FakeNode>,
    pub(super) entries: Vec<Registered>,
    pub(super) not_leading: bool,
    /// Decides for every call if it fails.
    pub(super) fails: Option<Box<dyn FnMut() -> bool + Send>>,
    /// Short descriptions of the calls.
    pub(super) asked: Vec<String>,
    /// Called at the beginning of every pull.
    pub(super) at_pull: Option<Hook>,
}

#[derive(Clone, Default)]
pub(super) struct Shared(pub(super) Arc<Mutex<World>>);

pub(super) fn id(number: u64) -> String {
    format!("{number:032x}")
}

pub(super) fn name(number: usize) -> String {
    format!("n{number}")
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock()
    }

    /// Returns a cluster of `count` live nodes.
    pub(super) fn with_nodes(count: usize) -> Self {
        let shared = Self::default();
        for number in 0..count {
            shared.lock().nodes.insert(
                name(number),
                FakeNode {
                    live: true,
                    state: MemberState::Active,
                    class: NodeClass::Reserved,
                    holds: BTreeSet::new(),
                    damaged: BTreeSet::new(),
                    pulled: Vec::new(),
                    free_bytes: 50 << 30,
                },
            );
        }
        shared
    }

    /// Lists a checkpoint of a job of its own, which is really present where it is listed.
    pub(super) fn list(&self, number: u64, wanted: u32, holders: &[usize]) {
        self.list_of(number, &format!("job{number}"), 1, wanted, holders);
    }

    pub(super) fn list_of(
        &self,
        number: u64,
        job: &str,
        generation: u64,
        wanted: u32,
        holders: &[usize],
    ) {
        let mut world = self.lock();
        for holder in holders {
            let node = world.nodes.get_mut(&name(*holder)).unwrap();
            node.holds.insert(id(number));
        }
        world.entries.push(Registered {
            checkpoint: Checkpoint {
                job: job.to_owned(),
                generation,
                parent_generation: generation.saturating_sub(1),
                id: id(number),
                memory_bytes: 1 << 30,
                added_bytes: 1 << 20,
                ..Checkpoint::default()
            },
            content_digest: [u8::try_from(number).unwrap(); 32],
            nodes: holders.iter().map(|holder| name(*holder)).collect(),
            wanted_copies: wanted,
            damaged: Vec::new(),
            cold: Vec::new(),
        });
    }

    pub(super) fn steps(&self) -> Steps {
        Steps {
            registry: Arc::new(self.clone()),
            peers: Arc::new(self.clone()),
            view: Arc::new(self.clone()),
            progress: Arc::new(RepairProgress::default()),
        }
    }

    pub(super) fn plan(&self, planner: &mut Planner, now: Duration) -> Planned {
        let view = self.nodes();
        let entries = self.lock().entries.clone();
        planner.plan(now, &entries, &view, &Default::default())
    }

    /// Makes a round of planning and carrying out, one step after the other; calls `after` each.
    pub(super) fn round(
        &self,
        planner: &mut Planner,
        steps: &Steps,
        now: Duration,
        mut after: impl FnMut(),
    ) -> usize {
        let planned = self.plan(planner, now);
        let count = planned.jobs.len();
        for job in planned.jobs {
            let end = steps.take(&job);
            let node_failed = end.as_ref().is_err_and(Undone::is_nodes_fault);
            planner.ended(now, &job, end.is_ok(), node_failed);
            after();
        }
        count
    }

    /// Returns the number of copies of a checkpoint that are really present, on live nodes that stay.
    pub(super) fn good(&self, id: &str) -> usize {
        let world = self.lock();
        let good = world
            .nodes
            .values()
            .filter(|node| node.counts() && node.has_good(id));
        good.count()
    }

    pub(super) fn holders(&self, number: u64) -> Vec<String> {
        let world = self.lock();
        let entry = world
            .entries
            .iter()
            .find(|entry| entry.checkpoint.id == id(number));
        let mut holders = entry.unwrap().nodes.clone();
        holders.sort_unstable();
        holders
    }
}

/// Returns a timing without pauses, so that every round does all it can.
pub(super) fn at_once() -> Timing {
    Timing {
        grace: Duration::ZERO,
        healing: Duration::ZERO,
        patience: Duration::ZERO,
        busy: Duration::from_millis(10),
        idle: Duration::from_millis(10),
        freshness: Duration::from_secs(5),
        pause: Duration::from_millis(100),
    }
}

impl World {
    /// Records a call, and fails if it does not reach the node.
    fn reach(&mut self, node: &str, what: String) -> Result<(), PeerError> {
        self.asked.push(what);
        let fails = self.fails.as_mut().is_some_and(|fails| fails());
        if fails || !self.nodes.get(node).is_some_and(|node| node.live) {
            return Err(PeerError::Unreachable {
                node: node.to_owned(),
                reason: "it is not there".to_owned(),
            });
        }
        Ok(())
    }
}

impl View for Shared {
    fn leads(&self) -> bool {
        !self.lock().not_leading
    }

    fn nodes(&self) -> NodesView {
        let world = self.lock();
        let member = |(name, node): (&String, &FakeNode)| Member {
            name: name.clone(),
            state: node.state,
            ..Member::default()
        };
        let live = world.nodes.iter().filter(|(_, node)| node.live);
        let live = live.map(|(name, node)| LiveNode {
            facts: NodeFacts {
                name: name.clone(),
                class: node.class,
                capacity_bytes: 100 << 30,
                free_bytes: node.free_bytes,
                ..NodeFacts::default()
            },
            state: node.state,
            token: 1,
        });
        NodesView {
            nodes: live.collect(),
            members: world.nodes.iter().map(member).collect(),
            age: Duration::ZERO,
        }
    }
}

impl Peers for Shared {
    fn pull(&self, node: &str, pull: request::Pull, _: Duration) -> Result<(), PeerError> {
        let refused = |code: ErrorCode| PeerError::Refused {
            node: node.to_owned(),
            error: control::Error {
                code: code.into(),
                message: "it says no".to_owned(),
                hint: String::new(),
            },
        };
        let at_pull = self.lock().at_pull.clone();
        if let Some(at_pull) = at_pull {
            at_pull(node);
        }
        let mut world = self.lock();
        let id = pull.checkpoint;
        let from = pull.from.join(",");
        world.reach(node, format!("pull {id} to {node} from {from}"))?;
        assert!(pull.published);
        if world.nodes[node].holds.contains(&id) {
            // The node does not know of all its damage: therefore it has to verify.
            return Ok(());
        }
        let has = |source: &String| {
            let source = world.nodes.get(source);
            source.is_some_and(|source| source.live && source.has_good(&id))
        };
        if !pull.from.iter().any(has) {
            return Err(refused(ErrorCode::Unavailable));
        }
        assert!(pull.background);
        if world.nodes[node].free_bytes == 0 {
            return Err(refused(ErrorCode::NoSpace));
        }
        let node = world.nodes.get_mut(node).unwrap();
        node.holds.insert(id.clone());
        node.pulled.push(id);
        Ok(())
    }

    fn drop_copy(&self, node: &str, checkpoint: &str) -> Result<(), PeerError> {
        let mut world = self.lock();
        world.reach(node, format!("drop {checkpoint} on {node}"))?;
        let node = world.nodes.get_mut(node).unwrap();
        node.holds.remove(checkpoint);
        node.damaged.remove(checkpoint);
        Ok(())
    }

    fn verify(&self, node: &str, checkpoint: &str) -> Result<CopyHealth, PeerError> {
        let mut world = self.lock();
        world.reach(node, format!("verify {checkpoint} on {node}"))?;
        if world.nodes[node].has_good(checkpoint) {
            return Ok(CopyHealth::Whole);
        }
        // The node reports the damage that it finds.
        let mut entries = world.entries.iter_mut();
        if let Some(entry) = entries.find(|entry| entry.checkpoint.id == checkpoint) {
            entry.set_damaged(node, true);
        }
        Ok(CopyHealth::Bad)
    }
}

impl Registry for Shared {
    fn lock_job(&self, _: &str) -> Result<JobLock, StoreError> {
        unreachable!("repair locks no job")
    }

    fn reserve_generation(&self, _: &str) -> Result<u64, StoreError> {
        unreachable!("repair makes no checkpoint")
    }

    fn publish(&self, _: &Registered, _: Option<&str>) -> Result<(), StoreError> {
        unreachable!("repair makes no checkpoint")
    }

    fn withdraw(&self, _: &Checkpoint) -> Result<(), StoreError> {
        unreachable!("repair removes no checkpoint")
    }

    fn is_withdrawn(&self, _: &Checkpoint) -> Result<bool, StoreError> {
        Ok(false)
    }

    fn set_pinned(&self, _: &Checkpoint, _: bool) -> Result<(), StoreError> {
        Ok(())
    }

    fn find(&self, _: &str, _: u64) -> Result<Option<Registered>, StoreError> {
        unreachable!("repair reads the list")
    }

    fn list(&self, job: &str) -> Result<Vec<Registered>, StoreError> {
        assert!(job.is_empty());
        Ok(self.lock().entries.clone())
    }

    fn set_holder(
        &self,
        checkpoint: &Checkpoint,
        node: &str,
        holds: bool,
    ) -> Result<(), StoreError> {
        let mut world = self.lock();
        if world.fails.as_mut().is_some_and(|fails| fails()) {
            return Err(CopyingError::Stopping.into());
        }
        let mut entries = world.entries.iter_mut();
        let entry = entries.find(|entry| entry.checkpoint.id == checkpoint.id);
        let Some(entry) = entry else {
            return Err(StoreError::NotFound(MissingObject::Listed(
                checkpoint.id.clone(),
            )));
        };
        entry.set_holder(node, holds);
        Ok(())
    }

    fn set_damaged(&self, _: &Checkpoint, _: &str, _: bool) -> Result<(), StoreError> {
        unreachable!("a node says it of its own copies")
    }

    fn set_cold(&self, _: &Checkpoint, _: &str, _: u64) -> Result<(), StoreError> {
        unreachable!("a node says it of its own copies")
    }
}
