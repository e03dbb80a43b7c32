//! Carries out planned steps: makes a copy, or drops one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use permafrost_clustered::Registry;
use permafrost_metering::copying::RepairProgress;
use permafrost_protocol::control::{Checkpoint, ErrorCode};
use permafrost_protocol::wire::message::{Verified, reply, request};
use permafrost_store::{ContentDigest, StoreError};
use permafrost_transport::peer::{Network, PeerError};

use super::planner::{Job, Task};
use crate::{ClusterNodes, Leader, NodesView};

/// Time limit of a small request.
const SOON: Duration = Duration::from_secs(15);

/// Slowest copy that is waited for, bytes per second; [`ON_TOP`] is added to the time limit. A slower copy goes
/// on at its node, and is found there later.
const SLOWEST: u64 = 4 << 20;
const ON_TOP: Duration = Duration::from_secs(300);

/// Maximum age of a verification of a copy, if another copy is to be dropped in reliance on it: damage is as
/// likely before as after it, and a node that reads a TiB a day for this would read it for its scrub anyway.
pub const VERIFIED_WITHIN: Duration = Duration::from_secs(24 * 3600);

/// Interval at which a node that is still reading is polled.
const ASK_AGAIN: Duration = Duration::from_millis(250);

/// Leadership and nodes, as repair sees them.
pub trait View: Send + Sync {
    /// Returns true if this node certainly leads.
    fn leads(&self) -> bool;
    /// Returns the last known nodes.
    fn nodes(&self) -> NodesView;
}

/// View of a node in a cluster.
pub struct ClusterView {
    /// Leadership of this node.
    pub leader: Leader,
    /// View of the nodes.
    pub nodes: ClusterNodes,
}

impl View for ClusterView {
    fn leads(&self) -> bool {
        self.leader.is_mine()
    }

    fn nodes(&self) -> NodesView {
        self.nodes.live()
    }
}

/// All nodes as repair uses them, this one included.
pub trait Peers: Send + Sync {
    /// Has `node` pull a checkpoint; succeeds at once if the node has it.
    ///
    /// # Errors
    /// The node does not answer in time, or fails to pull the checkpoint.
    fn pull(&self, node: &str, pull: request::Pull, patience: Duration) -> Result<(), PeerError>;

    /// Has `node` drop its copy of a checkpoint for which it is no longer listed.
    ///
    /// # Errors
    /// Those of [`Peers::pull`].
    fn drop_copy(&self, node: &str, checkpoint: &str) -> Result<(), PeerError>;

    /// Returns the state of a copy of `node`, which the node reads if it was not read lately.
    ///
    /// # Errors
    /// Those of [`Peers::pull`].
    fn verify(&self, node: &str, checkpoint: &str) -> Result<CopyHealth, PeerError>;
}

/// State of a copy, as its node reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyHealth {
    /// The copy was read lately, and is whole.
    Whole,
    /// The copy is damaged, or missing.
    Bad,
    /// The copy is still being read.
    Unknown,
}

impl CopyHealth {
    /// Returns the state of a checkpoint in an answer.
    #[must_use]
    pub fn of(answer: &Verified, checkpoint: &str) -> Self {
        let names = |ids: &[String]| ids.iter().any(|id| id == checkpoint);
        if names(&answer.damaged) || names(&answer.missing) {
            Self::Bad
        } else if names(&answer.whole) {
            Self::Whole
        } else {
            Self::Unknown
        }
    }
}

impl Peers for Network {
    fn pull(&self, node: &str, pull: request::Pull, patience: Duration) -> Result<(), PeerError> {
        let body = request::Body::Pull(pull);
        match self.call(node, body, Instant::now() + patience)? {
            reply::Body::Committed(_) => Ok(()),
            _ => Err(unexpected(node)),
        }
    }

    fn drop_copy(&self, node: &str, checkpoint: &str) -> Result<(), PeerError> {
        let body = request::Body::Rollback(request::Rollback {
            checkpoint: checkpoint.to_owned(),
        });
        match self.call(node, body, Instant::now() + SOON)? {
            reply::Body::Done(_) => Ok(()),
            _ => Err(unexpected(node)),
        }
    }

    fn verify(&self, node: &str, checkpoint: &str) -> Result<CopyHealth, PeerError> {
        let body = request::Body::Verify(request::Verify {
            checkpoints: vec![checkpoint.to_owned()],
            within_s: VERIFIED_WITHIN.as_secs(),
        });
        match self.call(node, body, Instant::now() + SOON)? {
            reply::Body::Verified(answer) => Ok(CopyHealth::of(&answer, checkpoint)),
            _ => Err(unexpected(node)),
        }
    }
}

fn unexpected(node: &str) -> PeerError {
    PeerError::Protocol {
        node: node.to_owned(),
        what: "another answer than that to the request",
    }
}

/// Reason why a step was not done.
#[derive(Debug)]
pub(super) enum Undone {
    /// This node no longer leads, or is stopping.
    NotOurs,
    /// The peer failed or refused.
    Peer(PeerError),
    /// The registry failed or refused.
    Registry(StoreError),
    /// Too few other nodes have a good copy, whatever is listed.
    TooFew { confirmed: usize },
}

impl std::fmt::Display for Undone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotOurs => f.write_str("this node leads no more"),
            Self::Peer(error) => error.fmt(f),
            Self::Registry(error) => error.fmt(f),
            Self::TooFew { confirmed } => write!(f, "only {confirmed} other copies answer"),
        }
    }
}

impl Undone {
    /// Returns true if the node itself is at fault, not the checkpoint.
    pub(super) fn is_nodes_fault(&self) -> bool {
        match self {
            Self::Peer(PeerError::Refused { error, .. }) => {
                matches!(error.code(), ErrorCode::NoSpace | ErrorCode::Denied)
            }
            Self::Peer(_) => true,
            _ => false,
        }
    }
}

/// Resources with which steps are carried out.
pub(super) struct Steps {
    pub(super) registry: Arc<dyn Registry>,
    pub(super) peers: Arc<dyn Peers>,
    pub(super) view: Arc<dyn View>,
    pub(super) progress: Arc<RepairProgress>,
}

impl Steps {
    pub(super) fn take(&self, job: &Job) -> Result<(), Undone> {
        let (id, node) = (&job.checkpoint.id, &job.node);
        let (done, counter, name) = match &job.task {
            Task::Copy { .. } => (self.copy(job), &self.progress.copies_made, "copy"),
            Task::Drop { .. } => (self.drop(job), &self.progress.copies_dropped, "removal"),
        };
        match &done {
            Ok(()) => {
                tracing::info!(event = "repair-step-done", %id, job = %job.checkpoint.job, %node, "{name} done");
                add(counter, 1);
            }
            Err(Undone::NotOurs) => {}
            Err(why) => {
                tracing::warn!(event = "repair-step-failed", %id, job = %job.checkpoint.job, %node, %why, "{name} not done");
                if matches!(job.task, Task::Copy { .. }) {
                    add(&self.progress.copies_failed, 1);
                }
            }
        }
        done
    }

    fn copy(&self, job: &Job) -> Result<(), Undone> {
        let Task::Copy {
            from,
            parent,
            content_digest,
        } = &job.task
        else {
            return Ok(());
        };
        self.check()?;
        let (checkpoint, node) = (&job.checkpoint, &job.node);
        let pull = request::Pull {
            checkpoint: checkpoint.id.clone(),
            from: from.clone(),
            parent: parent.clone(),
            published: true,
            content_digest: content_digest.to_vec(),
            background: true,
        };
        let patience = ON_TOP + Duration::from_secs(checkpoint.memory_bytes / SLOWEST);
        let pulled = self.peers.pull(node, pull, patience);
        pulled.map_err(Undone::Peer)?;
        self.check()?;
        match self.registry.set_holder(checkpoint, node, true) {
            Ok(()) => {
                add(&self.progress.bytes_copied, checkpoint.memory_bytes);
                Ok(())
            }
            Err(error) => {
                if matches!(error, StoreError::NotFound { .. }) {
                    // The checkpoint was removed meanwhile. If this request is lost, the node's sweep finds the copy.
                    let _ = self.peers.drop_copy(node, &checkpoint.id);
                }
                Err(Undone::Registry(error))
            }
        }
    }

    /// Takes a copy off the list, then drops it: a reader of the list in between finds the others.
    fn drop(&self, job: &Job) -> Result<(), Undone> {
        let Task::Drop {
            live,
            keepers,
            content_digest,
        } = &job.task
        else {
            return Ok(());
        };
        self.check()?;
        let (checkpoint, node) = (&job.checkpoint, &job.node);
        // The list may be wrong: each keeper must confirm that it has the copy, and has read it lately.
        let mut confirmed = 0;
        for keeper in keepers.iter().filter(|keeper| *keeper != node) {
            match self.confirm(checkpoint, keeper, content_digest) {
                Ok(true) => confirmed += 1,
                Ok(false) => {
                    tracing::warn!(event = "repair-keeper-not-verified", id = %checkpoint.id, %keeper, "its copy is not known to be whole");
                }
                Err(Undone::Peer(error)) => {
                    tracing::warn!(event = "repair-keeper-lacks-copy", id = %checkpoint.id, %keeper, %error, "copy not found");
                }
                Err(undone) => return Err(undone),
            }
        }
        if confirmed < keepers.len().max(1) {
            return Err(Undone::TooFew { confirmed });
        }
        self.check()?;
        let unlist = || self.registry.set_holder(checkpoint, node, false);
        unlist().map_err(Undone::Registry)?;
        if *live {
            self.peers
                .drop_copy(node, &checkpoint.id)
                .map_err(Undone::Peer)?;
            // The node itself may have listed itself again while it still had the copy.
            unlist().map_err(Undone::Registry)?;
        }
        Ok(())
    }

    /// Returns true if a holder has a checkpoint with this content, and has verified it lately. Waits while it is
    /// being read.
    fn confirm(
        &self,
        checkpoint: &Checkpoint,
        keeper: &str,
        content_digest: &ContentDigest,
    ) -> Result<bool, Undone> {
        let asks = request::Pull {
            checkpoint: checkpoint.id.clone(),
            published: true,
            content_digest: content_digest.to_vec(),
            ..request::Pull::default()
        };
        let answered = self.peers.pull(keeper, asks, SOON);
        answered.map_err(Undone::Peer)?;
        let until =
            Instant::now() + ON_TOP + Duration::from_secs(checkpoint.memory_bytes / SLOWEST);
        loop {
            self.check()?;
            let health = self.peers.verify(keeper, &checkpoint.id);
            match health.map_err(Undone::Peer)? {
                CopyHealth::Whole => return Ok(true),
                CopyHealth::Bad => return Ok(false),
                CopyHealth::Unknown if Instant::now() >= until => return Ok(false),
                CopyHealth::Unknown => std::thread::sleep(ASK_AGAIN),
            }
        }
    }

    fn check(&self) -> Result<(), Undone> {
        if self.view.leads() {
            return Ok(());
        }
        Err(Undone::NotOurs)
    }
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}
