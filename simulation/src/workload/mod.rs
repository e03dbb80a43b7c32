//! Workloads: the nodes of a cluster, and the jobs that come to it.

mod bigc;
mod experiments;
mod fb2009;
mod flow;
mod google;
mod natjam;
mod openb;
mod trace;

use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::place::NodeClass;
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Moment, Seconds};
use serde::{Deserialize, Serialize};

pub use bigc::{Bursts, Phases, google_hours, reclaiming, short_bursts};
pub use experiments::{
    NATJAM_CLEAN_S, Natjam4, Research, SUSPENDED_TASK_S, natjam_deadlines, natjam_margins,
    natjam_techniques, natjam_victims, suspended, two_jobs, yarn,
};
pub use fb2009::{Fb2009, read as fb2009};
pub use flow::{Application, Eviction, FlowSpec, pado};
pub use google::{Google, make as google};
pub use natjam::{ClusterShare, NatjamCluster, with_deadlines};
pub use openb::read as openb;
pub use trace::TraceError;

/// Priorities as paper 000 groups them (Table 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Band {
    /// Priorities 0 and 1, "free".
    Low,
    /// Priorities 2 to 8, "middle".
    Medium,
    /// Priorities 9 to 11, "production".
    High,
}

impl Band {
    /// All bands, the lowest first.
    pub const ALL: [Self; 3] = [Self::Low, Self::Medium, Self::High];

    /// Returns the band of a priority.
    #[must_use]
    pub const fn of(priority: u8) -> Self {
        match priority {
            0..=1 => Self::Low,
            2..=8 => Self::Medium,
            _ => Self::High,
        }
    }

    /// Returns the name of the band.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

/// A node of a cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeSpec {
    /// All its resources.
    pub capacity: TaskResources,
    /// Class: reserved, or one that may be taken away at any time.
    pub class: NodeClass,
    /// Rack that it is in.
    pub rack: u32,
    /// Its swap; 0 where nothing is suspended in memory.
    pub swap: Bytes,
}

impl NodeSpec {
    /// Makes a node with these resources, without swap.
    #[must_use]
    pub const fn new(capacity: TaskResources) -> Self {
        Self {
            capacity,
            class: NodeClass::Reserved,
            rack: 0,
            swap: Bytes::ZERO,
        }
    }
}

/// A task of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TaskSpec {
    /// Time that it takes by itself, with all that it asks for.
    pub work: Seconds,
    /// Resources that it asks for.
    pub asks: TaskResources,
    /// Its memory: what a full dump moves.
    pub memory: Bytes,
    /// Rate at which it dirties memory; none if a scheduler does not know it.
    pub dirty_rate: Option<BytesPerSecond>,
}

/// A job: its tasks in stages, each of which begins when the one before it has ended, or with a dataflow.
#[derive(Clone, Debug, PartialEq)]
pub struct JobSpec {
    /// When it is submitted.
    pub submitted: Moment,
    /// Larger goes first.
    pub priority: u8,
    /// Time by which it is to have ended.
    pub deadline: Option<Moment>,
    /// Dataflow of which the stages are the operators, in the same order; none for stages one after the other.
    pub flow: Option<Box<FlowSpec>>,
    /// Tasks of each stage.
    pub stages: Vec<Vec<TaskSpec>>,
}

/// A change of the nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NodeChange {
    /// The node with this index, counted in the order of their appearance, is gone with all that was on it.
    Lost(u32),
    /// Another node is there.
    Joined(NodeSpec),
}

/// Nodes and jobs, as a simulation replays them.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Name of the workload in tables.
    pub name: String,
    /// True if no trace of a real cluster has these jobs: shown wherever results are.
    pub synthetic: bool,
    /// Assumptions, and parts of a trace that were left out, one sentence each.
    pub remarks: Vec<String>,
    /// Nodes at the beginning.
    pub nodes: Vec<NodeSpec>,
    /// Jobs, the first submitted first.
    pub jobs: Vec<JobSpec>,
    /// Changes of the nodes, the first one first.
    pub changes: Vec<(Moment, NodeChange)>,
    /// Bandwidth of the network between two nodes.
    pub network: BytesPerSecond,
    /// Time between two reports of a node on the progress of its queues.
    pub heartbeat: Seconds,
}

/// Ten gigabits a second, for the papers that do not say.
pub(crate) const TEN_GIGABITS: f64 = 1.25e9;

impl Workload {
    /// Makes a workload without jobs, on these nodes.
    #[must_use]
    pub fn on(name: &str, nodes: Vec<NodeSpec>) -> Self {
        Self {
            name: name.to_owned(),
            synthetic: false,
            remarks: Vec::new(),
            nodes,
            jobs: Vec::new(),
            changes: Vec::new(),
            network: BytesPerSecond::clamped(TEN_GIGABITS),
            heartbeat: Seconds::clamped(1.0),
        }
    }

    /// Gives each node so much swap: tasks can be suspended in memory there.
    #[must_use]
    pub fn with_swap(mut self, swap: Bytes) -> Self {
        for node in &mut self.nodes {
            node.swap = swap;
        }
        for (_, change) in &mut self.changes {
            if let NodeChange::Joined(node) = change {
                node.swap = swap;
            }
        }
        self
    }

    /// Gives all jobs the same priority: first in, first out.
    #[must_use]
    pub fn with_one_priority(mut self) -> Self {
        for job in &mut self.jobs {
            job.priority = 0;
        }
        self
    }

    /// Returns the name, with a mark if the workload is synthetic.
    #[must_use]
    pub fn title(&self) -> String {
        let mark = if self.synthetic { " (synthetic)" } else { "" };
        format!("{}{mark}", self.name)
    }

    /// Returns the tasks of all jobs.
    pub fn tasks(&self) -> impl Iterator<Item = &TaskSpec> {
        self.jobs.iter().flat_map(|job| job.stages.iter().flatten())
    }

    /// Returns the processors of all nodes at the beginning.
    #[must_use]
    pub fn cores(&self) -> f64 {
        let millis = self.nodes.iter().map(|node| node.capacity.cpu_millis);
        millis.sum::<u64>() as f64 / 1e3
    }

    /// Returns the work of all tasks, seconds of a processor.
    #[must_use]
    pub fn core_seconds(&self) -> f64 {
        let work = self
            .tasks()
            .map(|task| task.work.value() * task.asks.cpu_millis as f64 / 1e3);
        work.sum()
    }
}

/// Returns resources of so many thousandths of a processor and so many bytes.
pub(crate) const fn resources(cpu_millis: u64, memory: Bytes) -> TaskResources {
    TaskResources { cpu_millis, memory }
}
