//! Measures dumps and restores, for the cost model and for event subscribers.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use permafrost_protocol::control;
use permafrost_scheduling::quantity::{Bytes, Seconds};
use permafrost_scheduling::size::{DumpKind, Memory};

/// Measures the store's operations. Methods block on nothing but a lock.
pub trait Observer: Send + Sync {
    /// Begins to observe a dump. The dump runs until the returned value is dropped.
    fn dump_begins(&self, beginning: &Beginning<'_>) -> Box<dyn Ongoing>;

    /// Records that a dump became a checkpoint.
    fn dumped(&self, done: &DumpDone<'_>);

    /// Records checkpoints whose dumps were not observed: an adopted one has a job only now.
    fn learn_history(&self, checkpoints: &[control::Checkpoint]);

    /// Begins to observe a restore of `bytes` bytes. It runs until the returned value is dropped.
    fn restore_begins(&self, bytes: u64) -> Box<dyn Ongoing>;

    /// Records a restore that was served to its end.
    fn restored(&self, done: &RestoreDone<'_>);

    /// Records a verification of `bytes`, read without a pause.
    fn scrubbed(&self, bytes: u64, elapsed: Duration);

    /// Records that `bytes` came back from an object store.
    fn recalled(&self, bytes: u64, elapsed: Duration);

    /// Publishes an event; `event` is called only if there is a subscriber.
    fn tell(&self, event: &dyn Fn() -> StoreEvent);
}

/// Observer that records nothing: the store is not measured.
#[derive(Clone, Copy, Debug)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn dump_begins(&self, _: &Beginning<'_>) -> Box<dyn Ongoing> {
        Box::new(Self)
    }

    fn dumped(&self, _: &DumpDone<'_>) {}

    fn learn_history(&self, _: &[control::Checkpoint]) {}

    fn restore_begins(&self, _: u64) -> Box<dyn Ongoing> {
        Box::new(Self)
    }

    fn restored(&self, _: &RestoreDone<'_>) {}

    fn scrubbed(&self, _: u64, _: Duration) {}

    fn recalled(&self, _: u64, _: Duration) {}

    fn tell(&self, _: &dyn Fn() -> StoreEvent) {}
}

impl Ongoing for Unobserved {
    fn expected(&self) -> Option<Expected> {
        None
    }

    fn read_so_far(&self, _: u64) {}

    fn all_read(&self) -> u64 {
        0
    }

    fn tier(&self) -> u16 {
        0
    }
}

/// A dump or a restore under way.
pub trait Ongoing: Send + Sync {
    /// Returns the expected size and duration; `None` where no estimate is possible.
    fn expected(&self) -> Option<Expected>;

    /// Records the total bytes given to the restore so far.
    fn read_so_far(&self, bytes: u64);

    /// Returns the bytes that all restores were given since this one began.
    fn all_read(&self) -> u64;

    /// Returns the observer's number of the tier that dumps went to when this one began.
    fn tier(&self) -> u16;
}

/// A dump that begins.
#[derive(Clone, Debug)]
pub struct Beginning<'a> {
    /// Job; empty if unknown.
    pub job: &'a str,
    /// Program of its root process; empty if unknown.
    pub program: &'a str,
    /// Full, or compared with the checkpoint before it.
    pub kind: DumpKind,
    /// True if copies are made while the dump streams.
    pub copied: bool,
    /// The task's memory, as far as it was measured.
    pub memory: Memory,
    /// Counter of the dump's bytes as they come.
    pub moved: Arc<AtomicU64>,
}

/// Expected size and duration of a dump or a restore, as medians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Bytes that will be stored; of a restore, bytes that will be read.
    pub stored: Bytes,
    /// Bytes that will be moved.
    pub moved: Bytes,
    /// Expected duration of the transfer, with everything else that is running. `None`: the bandwidth was never
    /// measured.
    pub transfer: Option<Seconds>,
    /// Expected duration of the whole: the transfer and the fixed cost. `None`: the fixed cost was never measured.
    pub whole: Option<Seconds>,
}

/// Measured transfer of a dump's bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transferred {
    /// Time from the first byte until CLOSE is answered: everything is durable, here and wherever else it was
    /// requested.
    pub elapsed: Duration,
    /// Part of `elapsed` that was spent waiting for the follower of the dump.
    pub waited: Duration,
    /// Bytes that all dumps and copies brought to this node meanwhile, this dump's included.
    pub all_bytes: u64,
}

/// A dump that has become a checkpoint.
#[derive(Clone, Debug)]
pub struct DumpDone<'a> {
    /// Job; empty for a parked one.
    pub job: &'a str,
    /// Program of its root process; empty if unknown.
    pub program: &'a str,
    /// Generation; 0 for a parked one.
    pub generation: u64,
    /// Id of the checkpoint.
    pub id: &'a str,
    /// Full, or compared with the checkpoint before it.
    pub kind: DumpKind,
    /// Its pages were passed on while it streamed.
    pub copied: bool,
    /// Tier that dumps went to when it began: [`Ongoing::tier`].
    pub tier: u16,
    /// Bytes that came from the task.
    pub moved_bytes: u64,
    /// Bytes that the checkpoint takes of the region.
    pub stored_bytes: u64,
    /// The task's memory just before the dump, as far as it was measured.
    pub memory: Memory,
    /// Measured transfer of its bytes.
    pub transferred: Transferred,
    /// Time from the opening of the session to the seal. `None` if the session was opened by its first byte.
    pub whole: Option<Duration>,
    /// Estimate made when the dump began.
    pub expected: Option<Expected>,
}

/// A restore that was served to its end.
#[derive(Clone, Debug)]
pub struct RestoreDone<'a> {
    /// Checkpoint that was read.
    pub checkpoint: &'a control::Checkpoint,
    /// Bytes of images given.
    pub bytes: u64,
    /// Time from the request to the first byte asked for: CRIU starts. `None` where nothing has to start.
    pub start: Option<Duration>,
    /// Time from then to the end.
    pub elapsed: Duration,
    /// Bytes that all restores were given meanwhile, this one's included.
    pub all_bytes: u64,
    /// True if this node's own copy was read.
    pub here: bool,
    /// Estimate made when the restore began.
    pub expected: Option<Expected>,
}

/// A completed operation. Published after it is durable; a subscriber that is too slow misses the oldest
/// events.
#[derive(Clone, Debug, PartialEq)]
pub enum StoreEvent {
    /// A dump became a checkpoint.
    Dumped {
        /// Job; empty for a parked one.
        job: String,
        /// Generation; 0 for a parked one.
        generation: u64,
        /// Checkpoint id, 32 hex digits.
        id: String,
        /// Bytes that went from the task to this node.
        bytes: u64,
        /// Time from the opening of the session to its seal; for a parked one, from the first byte.
        elapsed: Duration,
    },
    /// A checkpoint was given to a restore.
    Restored {
        /// Job of the checkpoint.
        job: String,
        /// Generation of the checkpoint.
        generation: u64,
        /// Checkpoint id, 32 hex digits.
        id: String,
        /// Bytes of images given.
        bytes: u64,
        /// Time from the request to its end.
        elapsed: Duration,
    },
    /// A dump failed or was discarded.
    Failed {
        /// Job; empty if it had none.
        job: String,
        /// Id of the session.
        session: String,
        /// Reason of the failure.
        reason: String,
    },
    /// A checkpoint was removed from this node.
    Removed {
        /// Job; empty for a parked one.
        job: String,
        /// Generation; 0 for a parked one.
        generation: u64,
        /// Checkpoint id, 32 hex digits.
        id: String,
    },
}
