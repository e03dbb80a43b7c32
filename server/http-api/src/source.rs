//! What the API knows of the rest of the daemon. A bench puts ten thousand nodes behind it that are not there.

use std::collections::BTreeMap;
use std::time::Duration;

use permafrost_api_types::events::Event;
use permafrost_api_types::figures::StartFigures;
use permafrost_api_types::nodes::{NodeClass, NodeState};
use permafrost_api_types::reserve::{Reservation, Reserve};
use permafrost_protocol::control::Checkpoint;
use permafrost_scheduling::NodeId;
use permafrost_scheduling::cost::NodeFigures;
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::Missing;
use permafrost_scheduling::size::{DumpKind, Memory, Prediction};
use permafrost_store::StoreError;
use tokio::sync::broadcast;

use crate::caller::Caller;

/// A node as it is now, with what is believed of its report.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeEntry {
    /// Its name, unique.
    pub name: String,
    /// Where other nodes reach it, `host:port`; empty if unknown.
    pub address: String,
    /// What an operator has said of it.
    pub state: NodeState,
    /// It is there.
    pub live: bool,
    /// It is stopping.
    pub stopping: bool,
    /// Whether its copies count.
    pub class: NodeClass,
    /// Zone that it fails with; empty if unknown.
    pub zone: String,
    /// Rack that it fails with; empty if unknown.
    pub rack: String,
    /// Machine that it fails with; empty: its own.
    pub host: String,
    /// Version of its software.
    pub version: String,
    /// Since its last report.
    pub age: Option<Duration>,
    /// Its medium, in a word.
    pub tier: String,
    /// What the medium is slowed down to behave like.
    pub emulated: Option<String>,
    /// Size of its region, bytes.
    pub capacity_bytes: u64,
    /// Free in its region, bytes.
    pub free_bytes: u64,
    /// How fast it is. The number in it is not looked at: the API has its own.
    pub figures: NodeFigures,
    /// Its dumps.
    pub write_queue: Option<QueueLength>,
    /// Its restores.
    pub read_queue: Option<QueueLength>,
    /// Bandwidth to other nodes, by their names.
    pub links: BTreeMap<String, SizedRates>,
    /// What of its report is not believed.
    pub doubts: Vec<String>,
}

impl NodeEntry {
    /// A live node of which nothing else is known.
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
            age: None,
            tier: String::new(),
            emulated: None,
            capacity_bytes: 0,
            free_bytes: 0,
            figures: NodeFigures::unknown(NodeId(0)),
            write_queue: None,
            read_queue: None,
            links: BTreeMap::new(),
            doubts: Vec::new(),
        }
    }
}

/// How many are in a queue; the bytes are among the figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLength {
    /// Under way.
    pub running: u32,
    /// Waiting.
    pub waiting: u32,
    /// Reserved, and not taken yet.
    pub reserved: u32,
    /// How many may run at once.
    pub slots: u32,
}

/// Why the daemon does not do what it is asked.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A field makes no sense, which only the daemon can tell.
    #[error("{detail}")]
    Invalid {
        /// JSON pointer of the field.
        pointer: String,
        /// What is wrong with it.
        detail: String,
    },
    /// There is no such reservation: it was taken, has lapsed, or never was.
    #[error("there is no such reservation")]
    NoReservation,
    /// There is no room, or no way.
    #[error("{message}")]
    Conflict {
        /// What is in the way.
        message: String,
    },
    /// Another node does not answer, or the daemon is stopping.
    #[error("{message}")]
    Unavailable {
        /// What is missing.
        message: String,
    },
    /// The store fails.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The daemon, as the API sees it.
///
/// [`nodes`](Self::nodes), [`own_name`](Self::own_name) and [`checkpoints`](Self::checkpoints) are asked on a thread of
/// their own, and may block or panic: answers then go on with what was seen last. [`predict`](Self::predict) and
/// [`ready`](Self::ready) are asked while an answer is made, and must not wait for anything but short locks. All others
/// are asked on threads that may block.
pub trait Source: Send + Sync + 'static {
    /// Name of this node.
    fn own_name(&self) -> String;

    /// Whether a dump or a restore runs here, to which answers give way. Asked before each batch: must not wait.
    fn is_moving(&self) -> bool {
        false
    }

    /// All nodes, this one included.
    fn nodes(&self) -> Vec<NodeEntry>;

    /// All checkpoints that are listed; parked ones are passed over.
    ///
    /// # Errors
    /// As the store says.
    fn checkpoints(&self) -> Result<Vec<Checkpoint>, StoreError>;

    /// Size of a job's next dump. Job and program are empty if nobody said.
    ///
    /// # Errors
    /// [`Missing`] if nothing can be said.
    fn predict(
        &self,
        job: &str,
        program: &str,
        dump: DumpKind,
        memory: &Memory,
    ) -> Result<Prediction, Missing>;

    /// Books a place in a queue of a node that is there, for `caller`, whose places are counted.
    ///
    /// # Errors
    /// [`Refusal`].
    fn reserve(&self, caller: &Caller, wanted: &Reserve) -> Result<Reservation, Refusal>;

    /// Gives a place back.
    ///
    /// # Errors
    /// [`Refusal::NoReservation`], or what keeps it from being done.
    fn cancel(&self, token: &str) -> Result<(), Refusal>;

    /// Takes starting estimates for this node.
    ///
    /// # Errors
    /// [`Refusal`].
    fn install(&self, figures: &StartFigures) -> Result<(), Refusal>;

    /// Checkpoints that come and go, as it happens. Nodes and queues need not be told: they are seen.
    fn events(&self) -> broadcast::Receiver<Event>;

    /// Whether the daemon does its work.
    ///
    /// # Errors
    /// Why not, in words.
    fn ready(&self) -> Result<(), String> {
        Ok(())
    }
}
