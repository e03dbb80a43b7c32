//! Copies of a dump on other nodes, while it streams.
//!
//! [`Replicate`] begins the copies of a session, [`Copies`] takes what the session takes. A copy that fails is dropped or replaced
//! behind them; what the session is told is only whether enough nodes hold the dump.

use std::collections::HashMap;
use std::io::Read;
use std::time::Duration;

use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::message::Commit;

use crate::StoreError;

/// SHA-256 over what a dump holds, wherever and however it is stored.
pub type ContentDigest = [u8; 32];

/// On how many nodes a dump must be durable before it is acknowledged. Copies on transient nodes never count, and
/// those on volatile media (tmpfs) only where the operator says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// On this node; repair makes the other copies later.
    #[default]
    Local,
    /// On more than half of the copies asked for: two of three, two of two.
    Quorum,
    /// On all copies asked for.
    All,
}

impl Durability {
    /// As the control protocol says it; `None` for the empty word, which leaves it to the node.
    ///
    /// # Errors
    /// Another word.
    pub fn parse(word: &str) -> Result<Option<Self>, StoreError> {
        Ok(match word {
            "" => None,
            "local" => Some(Self::Local),
            "quorum" => Some(Self::Quorum),
            "all" => Some(Self::All),
            _ => {
                return Err(StoreError::Invalid {
                    message: format!("{word:?} is no durability"),
                    hint: "say local, quorum or all",
                });
            }
        })
    }
}

/// What copies are begun for.
pub struct CopiesRequest {
    /// Session, 16 bytes.
    pub session: [u8; 16],
    /// Job; empty while nobody knows.
    pub job: String,
    /// Checkpoint id (32 hex digits) that the dump is compared with; empty for none.
    pub parent: String,
    /// Processes that are compared with one of another pid there, and that pid.
    pub compared: HashMap<u64, u64>,
    /// What must be reached.
    pub durability: Durability,
    /// How long CLOSE and the seal may wait for it.
    pub deadline: Duration,
}

/// Begins copies.
pub trait Replicate: Send + Sync {
    /// Chooses nodes and begins.
    ///
    /// # Errors
    /// There are not enough nodes for the durability: better now than when the task is frozen.
    fn begin(&self, request: CopiesRequest) -> Result<Box<dyn Copies>, StoreError>;

    /// The cluster no longer lists a checkpoint that these nodes hold: tells them to drop it, without waiting. A
    /// node that is not reached finds out when it asks for what is listed.
    fn withdrawn(&self, checkpoint: &str, nodes: &[String]) {
        let _ = (checkpoint, nodes);
    }
}

/// The copies of one session. Methods block while copies are slower than the dump, so that nothing piles up; what
/// fails shows at [`Copies::close`], [`Copies::prepare`] and [`Copies::commit`] as too few copies. Dropped, every
/// copy that is not committed is free again.
pub trait Copies: Send {
    /// Whether every copy that is under way has the parent asked for. If not, pages in the parent are passed on as
    /// pages, and [`Copies::parent`] is not called.
    fn takes_parent(&self) -> bool {
        true
    }

    /// Whether there are any. There are none of a dump that need not outlast its node.
    fn any(&self) -> bool {
        true
    }

    /// How long the dump has waited for them so far, before [`Copies::close`].
    fn waited(&self) -> Duration {
        Duration::ZERO
    }

    /// An address space begins.
    fn space(&mut self, space: SpaceId, pages_id: u32);

    /// Whole pages, neither zero nor in the parent.
    fn pages(&mut self, first_index: u64, flags: u16, bytes: &[u8]);

    /// Pages that are all zero.
    fn zero(&mut self, first_index: u64, flags: u16, pages: u64);

    /// Pages that are in the parent at the same place.
    fn parent(&mut self, first_index: u64, flags: u16, pages: u64);

    /// All address spaces are in, and durable here with this digest. Waits until enough copies are durable and of
    /// the same digest.
    ///
    /// # Errors
    /// The durability was not reached within the deadline.
    fn close(&mut self, own: ContentDigest) -> Result<(), StoreError>;

    /// A small image.
    ///
    /// # Errors
    /// It cannot be read.
    fn image(
        &mut self,
        name: &str,
        len_bytes: u64,
        contents: &mut dyn Read,
    ) -> Result<(), StoreError>;

    /// All images are in, and the whole has this digest here. Waits as [`Copies::close`] does.
    ///
    /// # Errors
    /// The durability was not reached within the deadline.
    fn prepare(&mut self, own: ContentDigest) -> Result<(), StoreError>;

    /// Seals every copy. The names of the nodes that hold one, without this node.
    ///
    /// # Errors
    /// The durability was not reached within the deadline; those that had sealed were told to roll back.
    fn commit(&mut self, commit: &Commit) -> Result<Vec<String>, StoreError>;

    /// The cluster lists the checkpoint: tells the nodes, without waiting.
    fn published(&mut self, checkpoint: &str);

    /// The cluster does not list it after all: the copies are to be dropped.
    fn roll_back(&mut self, checkpoint: &str);
}
