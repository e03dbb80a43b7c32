//! Interface between the API and the rest of the daemon. A bench implements it with ten thousand simulated
//! nodes.

use std::collections::BTreeMap;
use std::time::Duration;

use permafrost_api_types::activity::ActivityAnswer;
use permafrost_api_types::events::ApiEvent;
use permafrost_api_types::figures::StartFigures;
use permafrost_api_types::nodes::{InterfaceVersions, NodeClass, NodeState};
use permafrost_api_types::reserve::{Reservation, ReserveRequest};
use permafrost_protocol::control::{Checkpoint, CheckpointContents, request};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::{NodeFigures, SwapFigures, TierRoom};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Missing;
use permafrost_scheduling::size::{DumpKind, Memory, Prediction};
use permafrost_store::StoreError;
use tokio::sync::broadcast;

use crate::caller::Caller;

/// Current state of a node, with the part of its report that is believed.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeEntry {
    /// Unique name of the node.
    pub name: String,
    /// Address at which other nodes reach it, `host:port`; empty if unknown.
    pub address: String,
    /// Membership status set by an operator.
    pub state: NodeState,
    /// True if the node is live.
    pub live: bool,
    /// True if the node is stopping.
    pub stopping: bool,
    /// Class that decides whether its copies count.
    pub class: NodeClass,
    /// Zone of its failure domain; empty if unknown.
    pub zone: String,
    /// Rack of its failure domain; empty if unknown.
    pub rack: String,
    /// Machine of its failure domain; empty: its own.
    pub host: String,
    /// Version of its software.
    pub version: String,
    /// Versions that it speaks; empty if unknown.
    pub speaks: Vec<InterfaceVersions>,
    /// Time since its last report.
    pub age: Option<Duration>,
    /// Kind of its medium, in a word.
    pub tier: String,
    /// Tiers of its region, the fastest first; empty where they are not known.
    pub tiers: Vec<TierRoom>,
    /// Medium that is emulated by slowing this one down.
    pub emulated: Option<String>,
    /// Size of its region, bytes.
    pub capacity_bytes: u64,
    /// Free bytes in its region.
    pub free_bytes: u64,
    /// Bytes that copies may still take there, as replication computes them; 0 where it takes none.
    pub room_bytes: u64,
    /// True if copies there count towards durability.
    pub durable: bool,
    /// Measured figures. The node number in them is ignored: the API has its own.
    pub figures: NodeFigures,
    /// Queue of dumps.
    pub write_queue: Option<QueueLength>,
    /// Queue of restores.
    pub read_queue: Option<QueueLength>,
    /// Bandwidth of the links to other nodes, by name.
    pub links: BTreeMap<String, SizedRates>,
    /// Memory and swap of its machine; missing on one without swap.
    pub swap: Option<SwapFigures>,
    /// Descriptions of the parts of its report that are not believed.
    pub doubts: Vec<String>,
}

impl NodeEntry {
    /// Returns a live node of which nothing else is known.
    #[must_use]
    pub fn unknown(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            address: String::new(),
            state: NodeState::Active,
            live: true,
            stopping: false,
            class: NodeClass::Reserved,
            zone: String::new(),
            rack: String::new(),
            host: String::new(),
            version: String::new(),
            speaks: Vec::new(),
            age: None,
            tier: String::new(),
            tiers: Vec::new(),
            emulated: None,
            capacity_bytes: 0,
            free_bytes: 0,
            room_bytes: 0,
            durable: true,
            figures: NodeFigures::unknown(NodeId(0)),
            write_queue: None,
            read_queue: None,
            links: BTreeMap::new(),
            swap: None,
            doubts: Vec::new(),
        }
    }
}

/// Number of transfers in a queue; the bytes are among the figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLength {
    /// Number of running transfers.
    pub running: u32,
    /// Number of waiting transfers.
    pub waiting: u32,
    /// Number of reservations that are not taken up.
    pub reserved: u32,
    /// Maximum number of transfers that run at once.
    pub slots: u32,
}

/// Activity of a node, with names of all jobs.
#[derive(Clone, Debug)]
pub struct Activity {
    /// The answer, in which names of checkpoints are complete.
    pub told: ActivityAnswer,
}

impl Activity {
    /// Returns the answer for a caller: without the names of checkpoints that it may not see.
    #[must_use]
    pub fn told_to(mut self, caller: &Caller) -> ActivityAnswer {
        let told = &mut self.told;
        let copies = told.copies.iter_mut().map(|copy| &mut copy.checkpoint);
        let ended = told.ended.iter_mut().map(|ended| &mut ended.checkpoint);
        let repair = told.repair.iter_mut().flat_map(|repair| &mut repair.steps);
        let steps = repair.map(|step| &mut step.checkpoint);
        for name in copies.chain(ended).chain(steps) {
            let is_seen = |name: &String| {
                let job = name.rsplit_once('@').map_or(name.as_str(), |(job, _)| job);
                caller.sees(job)
            };
            *name = name.take().filter(is_seen);
        }
        self.told
    }
}

/// Reason why the daemon refuses a request.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A field is invalid, which only the daemon can tell.
    #[error("{detail}")]
    Invalid {
        /// JSON pointer of the field.
        pointer: String,
        /// Description of the defect.
        detail: String,
    },
    /// There is no such reservation: it was taken up, has lapsed, or never existed.
    #[error("there is no such reservation")]
    NoReservation,
    /// There is no room, or the operation is impossible.
    #[error("{message}")]
    Conflict {
        /// Description of the conflict.
        message: String,
    },
    /// Another node does not answer, or the daemon is stopping.
    #[error("{message}")]
    Unavailable {
        /// Description of the missing resource.
        message: String,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The daemon, as the API sees it.
///
/// [`nodes`](Self::nodes), [`own_name`](Self::own_name) and [`checkpoints`](Self::checkpoints) are called on a
/// thread of their own, and may block or panic: answers then go on with the last snapshot.
/// [`predict`](Self::predict) and [`ready`](Self::ready) are called while an answer is made, and must not wait
/// for anything but short locks. All others are called on threads that may block.
pub trait Source: Send + Sync + 'static {
    /// Returns the name of this node.
    fn own_name(&self) -> String;

    /// Returns true if a dump or a restore runs here, to which answers give way. Called before each batch: must not
    /// wait.
    fn is_moving(&self) -> bool {
        false
    }

    /// Returns all nodes, this one included.
    fn nodes(&self) -> Vec<NodeEntry>;

    /// Returns all listed checkpoints, without parked ones.
    ///
    /// # Errors
    /// The store's errors.
    fn checkpoints(&self) -> Result<Vec<Checkpoint>, StoreError>;

    /// Returns what this node is doing now. Waits for short locks only.
    fn activity(&self) -> Activity;

    /// Describes a checkpoint: its processes, their mappings, and its images, as `permafrost show --maps` does. May wait
    /// for another node.
    ///
    /// # Errors
    /// The store's errors, and those of images that do not decode.
    fn contents(&self, of: &request::Describe) -> Result<CheckpointContents, Refusal>;

    /// Predicts the size of a job's next dump. Job and program are empty if unknown.
    ///
    /// # Errors
    /// [`Missing`] if no prediction is possible.
    fn predict(
        &self,
        job: &str,
        program: &str,
        dump: DumpKind,
        memory: &Memory,
    ) -> Result<Prediction, Missing>;

    /// Reserves a place in a queue of a live node, for `caller`, whose reservations are counted.
    ///
    /// # Errors
    /// [`Refusal`].
    fn reserve(&self, caller: &Caller, wanted: &ReserveRequest) -> Result<Reservation, Refusal>;

    /// Cancels a reservation.
    ///
    /// # Errors
    /// [`Refusal::NoReservation`], or the reason why it cannot be cancelled.
    fn cancel(&self, token: &str) -> Result<(), Refusal>;

    /// Installs starting estimates for this node.
    ///
    /// # Errors
    /// [`Refusal`].
    fn install(&self, figures: &StartFigures) -> Result<(), Refusal>;

    /// Subscribes to checkpoints that come and go. Changes of nodes and queues need no event: polling sees them.
    fn events(&self) -> broadcast::Receiver<ApiEvent>;

    /// Checks that the daemon does its work.
    ///
    /// # Errors
    /// The reason why it does not, in words.
    fn ready(&self) -> Result<(), String> {
        Ok(())
    }
}
