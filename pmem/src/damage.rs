//! Damage of a region: lost checkpoints and journal records, and the reason why it takes no more writes.

use std::sync::Arc;
use std::{fmt, io};

use crate::alloc::Lease;
use crate::error::OpenError;
use crate::ids::CheckpointId;
use crate::journal::Live;

/// Checkpoint that the journal lists and whose root cannot be read. It stays listed until it is deleted. Its segments
/// are not known, so no segment that may be one of them is reused until then.
#[derive(Clone)]
#[non_exhaustive]
pub struct UnreadableCheckpoint {
    /// Id of the checkpoint in the region.
    pub id: CheckpointId,
    /// Attribute bits of the checkpoint.
    pub attrs: u32,
    /// The reason for which it cannot be read.
    pub reason: Arc<OpenError>,
    /// Ascends with every seal.
    pub(crate) order: u64,
    /// Segments kept for it, and for the others that are damaged.
    pub(crate) withheld: Option<Arc<Lease>>,
}

impl UnreadableCheckpoint {
    pub(crate) fn new(id: CheckpointId, live: &Live, reason: OpenError) -> Self {
        Self {
            id,
            attrs: live.attrs,
            reason: Arc::new(reason),
            order: live.order,
            withheld: None,
        }
    }
}

impl fmt::Debug for UnreadableCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DamagedCheckpoint")
            .field("id", &self.id)
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

/// Reason why a region takes no more writes until it is opened again. Reading goes on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{action}: {cause}")]
#[non_exhaustive]
pub struct RegionFailure {
    /// The operation that failed, a verb and a noun.
    pub action: &'static str,
    /// The error's own words.
    pub cause: String,
}

impl RegionFailure {
    pub(crate) fn new(action: &'static str, error: &io::Error) -> Self {
        Self {
            action,
            cause: error.to_string(),
        }
    }
}
