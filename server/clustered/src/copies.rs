//! Copies of a dump on other nodes, made while it streams.
//!
//! [`Replicate`] begins the copies of a session, [`CopyStreams`] receives the same pages as the session. The
//! implementation drops or replaces a copy that fails; the session only learns if enough nodes hold the dump.

use std::collections::HashMap;
use std::time::Duration;

use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::wire::message::Commit;
use permafrost_store::{ContentDigest, DumpTap, SessionError, StoreError};

/// Number of nodes on which a dump must be durable before it is acknowledged. Copies on transient nodes never
/// count, and those on volatile media (tmpfs) only if the operator allows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// Durable on this node; repair makes the other copies later.
    #[default]
    Local,
    /// Durable on more than half of the requested copies: two of three, two of two.
    Quorum,
    /// Durable on all requested copies.
    All,
}

impl Durability {
    /// Parses the control protocol's word; `None` for the empty word, which selects the node's default.
    ///
    /// # Errors
    /// The word is none of `local`, `quorum` and `all`.
    pub fn parse(word: &str) -> Result<Option<Self>, StoreError> {
        Ok(match word {
            "" => None,
            "local" => Some(Self::Local),
            "quorum" => Some(Self::Quorum),
            "all" => Some(Self::All),
            _ => {
                return Err(SessionError::Durability {
                    word: word.to_owned(),
                }
                .into());
            }
        })
    }
}

/// Request to begin the copies of a session.
pub struct CopiesRequest {
    /// Id of the session, 16 bytes.
    pub session: [u8; 16],
    /// Job; empty while unknown.
    pub job: String,
    /// Checkpoint id (32 hex digits) that the dump is compared with; empty for none.
    pub parent: String,
    /// Processes that are compared with one of another pid in the parent, and that pid.
    pub compared: HashMap<u64, u64>,
    /// Durability that must be reached.
    pub durability: Durability,
    /// Longest time that CLOSE and the seal may wait for it.
    pub deadline: Duration,
}

/// Creates copies of dumps on other nodes.
pub trait Replicate: Send + Sync {
    /// Chooses nodes and begins the copies.
    ///
    /// # Errors
    /// There are not enough nodes for the durability: reported now rather than when the task is frozen.
    fn begin(&self, request: CopiesRequest) -> Result<Box<dyn CopyStreams>, StoreError>;

    /// Notifies nodes that hold a checkpoint that the cluster no longer lists it, so that they drop it. Does not
    /// wait. A node that is not reached finds out when it asks for the listing.
    fn withdrawn(&self, checkpoint: &str, nodes: &[String]) {
        let _ = (checkpoint, nodes);
    }
}

/// Seals the dump of this node.
pub type SealHere<'a> = Box<dyn FnOnce() -> Result<Checkpoint, StoreError> + 'a>;

/// The copies of one session. Methods block while copies are slower than the dump, so that no pages accumulate.
/// Failures appear at [`DumpTap::close`], [`CopyStreams::prepare`] and [`CopyStreams::commit`] as too few copies:
/// durability is waited for until the deadline. Dropping the value frees every copy that is not committed.
pub trait CopyStreams: DumpTap {
    /// Ends the images; the whole has the digest `own` here. Waits as [`DumpTap::close`] does.
    ///
    /// # Errors
    /// The durability was not reached within the deadline.
    fn prepare(&mut self, own: ContentDigest) -> Result<(), StoreError>;

    /// Seals every copy, and the dump of this node by `seal_here` at the same time. Returns the record of the latter,
    /// and the names of the other nodes that hold a copy. Nodes that take the place of failed ones pull what is sealed
    /// here.
    ///
    /// # Errors
    /// That of `seal_here`; the durability was not reached within the deadline. Some nodes may have sealed: the caller
    /// calls [`CopyStreams::roll_back`].
    fn commit(
        &mut self,
        commit: &Commit,
        seal_here: SealHere<'_>,
    ) -> Result<(Checkpoint, Vec<String>), StoreError>;

    /// Notifies the nodes that the cluster lists the checkpoint, without waiting.
    fn published(&mut self, checkpoint: &str);

    /// Notifies the nodes that the cluster does not list the checkpoint after all: they drop their copies.
    fn roll_back(&mut self, checkpoint: &str);
}
