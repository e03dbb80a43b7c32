//! What a frame shows, as numbers.

use permafrost_api_types::nodes::{ListedNode, NodeState, NodesAnswer, Queue};
use permafrost_protocol::control::{QueueStatus, ServerStatus, SessionStatus};
use serde::Serialize;

/// Contents of a frame of `permafrost top`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TopView {
    /// Node that was asked.
    pub answered_by: String,
    /// Time of the look, milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// Queues of the node that was asked; empty over `--api`, where those of the nodes are shown.
    pub queues: Vec<QueueLine>,
    /// Transfers that run on the node that was asked; empty over `--api`.
    pub transfers: Vec<TransferLine>,
    /// Dumps that are open on the node that was asked; empty over `--api`.
    pub dumps: Vec<DumpLine>,
    /// Nodes by name.
    pub nodes: Vec<NodeLine>,
    /// Reason why the frame is older than it should be, or lacks something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// A queue of dumps or restores.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct QueueLine {
    /// `dumps` or `restores`.
    pub what: &'static str,
    /// Number of transfers that run.
    pub running: u32,
    /// Number of transfers that may run at once.
    pub slots: u32,
    /// Number of transfers that wait.
    pub waiting: u32,
    /// Number of places that are reserved.
    pub reserved: u32,
    /// Bytes that are still to be moved.
    pub bytes: u64,
    /// Bytes a second of all transfers together; none before anything was measured.
    pub bytes_per_s: Option<f64>,
    /// Time until the queue is empty, seconds.
    pub left_s: Option<f64>,
}

/// A dump or a restore that runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TransferLine {
    /// `dump` or `restore`.
    pub what: &'static str,
    /// Bytes that it has moved.
    pub moved_bytes: u64,
    /// Bytes that it is expected to move in all.
    pub expected_bytes: u64,
    /// Average rate since it began, bytes a second; none while nothing was moved.
    pub bytes_per_s: Option<f64>,
    /// Time that it has left at this rate, seconds.
    pub left_s: Option<f64>,
    /// Time since it began, seconds.
    pub age_s: f64,
    /// True if it has stopped moving, and gave its slot to another one.
    pub idle: bool,
}

/// A dump that is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DumpLine {
    /// Job; empty while it is not known.
    pub job: String,
    /// State of its session.
    pub state: String,
    /// Bytes received so far.
    pub received_bytes: u64,
    /// Seconds since it was opened.
    pub age_s: u64,
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeLine {
    /// Name of the node.
    pub name: String,
    /// `up`, `down`, `stopping`, `drained` or `removed`.
    pub state: &'static str,
    /// Size of all tiers, bytes.
    pub capacity_bytes: u64,
    /// Free space of all tiers, bytes.
    pub free_bytes: u64,
    /// Measured bandwidth of dumps to the first tier, bytes a second.
    pub write_bytes_per_s: Option<f64>,
    /// Measured bandwidth of restores from the first tier, bytes a second.
    pub read_bytes_per_s: Option<f64>,
    /// Queue of dumps.
    pub dumps: Option<NodeQueue>,
    /// Queue of restores.
    pub restores: Option<NodeQueue>,
}

/// A queue of a node, as far as the node tells others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeQueue {
    /// Number of transfers that run.
    pub running: u32,
    /// Number of transfers that wait.
    pub waiting: u32,
    /// Bytes that are moved before a request that comes last.
    pub bytes: Option<u64>,
    /// Time until a request that comes last begins, seconds.
    pub left_s: Option<f64>,
}

impl TopView {
    /// Adds what the daemon of this machine tells.
    pub(super) fn add_status(&mut self, status: &ServerStatus) {
        self.queues = status.queues.iter().map(queue).collect();
        self.transfers = status.queues.iter().flat_map(transfers).collect();
        self.dumps = status.sessions.iter().map(dump).collect();
    }

    /// Adds what a node tells over the API.
    pub(super) fn add_nodes(&mut self, answer: &NodesAnswer) {
        self.answered_by.clone_from(&answer.answered_by);
        self.nodes.extend(answer.nodes.iter().map(node));
    }
}

const fn float(number: u64) -> f64 {
    number as f64
}

/// Returns the time that bytes take at a rate, seconds.
fn time_of(bytes: u64, bytes_per_s: Option<f64>) -> Option<f64> {
    let rate = bytes_per_s.filter(|rate| *rate > 0.0)?;
    Some(float(bytes) / rate)
}

fn queue(status: &QueueStatus) -> QueueLine {
    QueueLine {
        what: match status.direction.as_str() {
            "write" => "dumps",
            _ => "restores",
        },
        running: status.running,
        slots: status.slots,
        waiting: status.waiting,
        reserved: status.reserved,
        bytes: status.bytes,
        bytes_per_s: status.bytes_per_s,
        left_s: time_of(status.bytes, status.bytes_per_s),
    }
}

fn transfers(status: &QueueStatus) -> impl Iterator<Item = TransferLine> + '_ {
    let what = match status.direction.as_str() {
        "write" => "dump",
        _ => "restore",
    };
    status.transfers.iter().map(move |transfer| {
        let age_s = float(transfer.age_ms) / 1_000.0;
        let rate = float(transfer.moved_bytes) / age_s;
        let rate = Some(rate).filter(|rate| rate.is_finite() && *rate > 0.0);
        let left = transfer.expected_bytes.saturating_sub(transfer.moved_bytes);
        TransferLine {
            what,
            moved_bytes: transfer.moved_bytes,
            expected_bytes: transfer.expected_bytes,
            bytes_per_s: rate,
            // What has moved more than it said ends nobody knows when.
            left_s: time_of(left, rate).filter(|_| left > 0),
            age_s,
            idle: transfer.idle,
        }
    })
}

fn dump(session: &SessionStatus) -> DumpLine {
    DumpLine {
        job: session.job.clone(),
        state: session.state.clone(),
        received_bytes: session.received_bytes,
        age_s: session.age_s,
    }
}

fn node(node: &ListedNode) -> NodeLine {
    let first = node.tiers.first();
    let sum = |of: fn(&permafrost_api_types::nodes::NodeTier) -> u64| {
        node.tiers.iter().map(of).fold(0, u64::saturating_add)
    };
    let rate =
        |figure: &permafrost_api_types::figure::Figure<f64>| figure.known().map(|known| known.p50);
    NodeLine {
        name: node.name.clone(),
        state: match (node.state, node.live) {
            (NodeState::Removed, _) => "removed",
            (_, false) => "down",
            (_, true) if node.stopping => "stopping",
            (NodeState::Drained, true) => "drained",
            (NodeState::Active, true) => "up",
        },
        capacity_bytes: sum(|tier| tier.capacity_bytes),
        free_bytes: sum(|tier| tier.free_bytes),
        write_bytes_per_s: first.and_then(|tier| rate(&tier.write_bytes_per_s)),
        read_bytes_per_s: first.and_then(|tier| rate(&tier.read_bytes_per_s)),
        dumps: first.map(|tier| node_queue(&tier.write_queue)),
        restores: first.map(|tier| node_queue(&tier.read_queue)),
    }
}

fn node_queue(queue: &Queue) -> NodeQueue {
    NodeQueue {
        running: queue.running.unwrap_or(0),
        waiting: queue.waiting.unwrap_or(0),
        bytes: queue.bytes.known().map(|known| known.p50),
        left_s: queue.time_s.known().map(|known| known.p50),
    }
}

#[cfg(test)]
mod tests {
    use permafrost_protocol::control::TransferStatus;

    use super::*;

    #[test]
    fn rates_and_times_left_follow_from_what_was_moved() {
        let transfer = |age_ms, moved_bytes, expected_bytes| TransferStatus {
            age_ms,
            moved_bytes,
            expected_bytes,
            idle: false,
        };
        let status = ServerStatus {
            queues: vec![QueueStatus {
                direction: "write".to_owned(),
                bytes: 3_000,
                bytes_per_s: Some(1_000.0),
                transfers: vec![
                    transfer(2_000, 500, 1_500),
                    transfer(0, 0, 100),
                    transfer(1_000, 200, 100),
                ],
                ..QueueStatus::default()
            }],
            ..ServerStatus::default()
        };
        let mut view = TopView::default();
        view.add_status(&status);
        assert_eq!(view.queues[0].left_s, Some(3.0));
        let lines: Vec<_> = (view.transfers.iter())
            .map(|line| (line.bytes_per_s, line.left_s))
            .collect();
        assert_eq!(
            lines,
            [(Some(250.0), Some(4.0)), (None, None), (Some(200.0), None)]
        );
    }
}
