//! Measuring dumps and restores, for the cost model and for whoever listens to events.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use permafrost_protocol::control;
use permafrost_scheduling::quantity::{Bytes, Seconds};
use permafrost_scheduling::size::{DumpKind, Memory};

/// Measures what the store does. No method waits for anything but a lock.
pub trait Observer: Send + Sync {
    /// A dump begins. It runs until what is returned is dropped.
    fn dump_begins(&self, beginning: &Beginning<'_>) -> Box<dyn Ongoing>;

    /// A dump is a checkpoint now.
    fn dumped(&self, done: &DumpDone<'_>);

    /// Checkpoints are known whose dumps were not observed: an adopted one has only now a job.
    fn learn_history(&self, checkpoints: &[control::Checkpoint]);

    /// A restore of so many bytes begins. It runs until what is returned is dropped.
    fn restore_begins(&self, bytes: u64) -> Box<dyn Ongoing>;

    /// A restore was served to its end.
    fn restored(&self, done: &RestoreDone<'_>);

    /// So many bytes were read of another node's copy, as fast as its link goes.
    fn copied(&self, node: &str, bytes: u64, elapsed: Duration);

    /// So many bytes were read in order to be verified, without a pause.
    fn scrubbed(&self, bytes: u64, elapsed: Duration);

    /// Tells an event to whoever listens; `event` is called only where somebody does.
    fn tell(&self, event: &dyn Fn() -> Event);
}

/// A dump or a restore under way.
pub trait Ongoing: Send + Sync {
    /// What is expected of it; `None` where nothing is known to go by.
    fn expected(&self) -> Option<Expected>;

    /// A restore was given so many bytes by now.
    fn read_so_far(&self, bytes: u64);

    /// Bytes that all restores were given since this one began.
    fn all_read(&self) -> u64;
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
    /// Copies are made while it streams.
    pub copied: bool,
    /// The task's memory, as far as anybody looked.
    pub memory: Memory,
    /// Counts its bytes as they come.
    pub moved: Arc<AtomicU64>,
}

/// What is expected of a dump or a restore, medians.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Bytes that will be stored; of a restore those that will be read.
    pub stored: Bytes,
    /// Bytes that will be moved.
    pub moved: Bytes,
    /// How long they will take, with what else is running. `None`: the bandwidth was never measured.
    pub transfer: Option<Seconds>,
    /// The same and what it takes whatever its size. `None`: that was never measured.
    pub whole: Option<Seconds>,
}

/// The bytes of a dump on their way in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transferred {
    /// From the first byte to CLOSE answered: everything durable, here and where else it was asked for.
    pub elapsed: Duration,
    /// Of that, spent waiting for copies on other nodes.
    pub waited: Duration,
    /// Bytes that all dumps and copies brought to this node meanwhile, this dump's included.
    pub all_bytes: u64,
}

/// A dump that is a checkpoint now.
#[derive(Clone, Debug)]
pub struct DumpDone<'a> {
    /// Job; empty for a parked one.
    pub job: &'a str,
    /// Program of its root process; empty if unknown.
    pub program: &'a str,
    /// Generation; 0 for a parked one.
    pub generation: u64,
    /// Checkpoint id.
    pub id: &'a str,
    /// Full, or compared with the checkpoint before it.
    pub kind: DumpKind,
    /// Copies were made while it streamed.
    pub copied: bool,
    /// Bytes that came from the task.
    pub moved_bytes: u64,
    /// Bytes that it takes of the region.
    pub stored_bytes: u64,
    /// The task's memory just before, as far as anybody looked.
    pub memory: Memory,
    /// How its bytes came.
    pub transferred: Transferred,
    /// From the opening of the session to the seal. `None` where nobody opened it before its first byte.
    pub whole: Option<Duration>,
    /// What was expected of it.
    pub expected: Option<Expected>,
}

/// A restore that was served to its end.
#[derive(Clone, Debug)]
pub struct RestoreDone<'a> {
    /// What was read.
    pub checkpoint: &'a control::Checkpoint,
    /// Bytes of images given.
    pub bytes: u64,
    /// From the request to the first byte asked for: CRIU starts. `None` where nothing has to start.
    pub start: Option<Duration>,
    /// From then on to the end.
    pub elapsed: Duration,
    /// Bytes that all restores were given meanwhile, this one's included.
    pub all_bytes: u64,
    /// This node's own copy was read.
    pub here: bool,
    /// What was expected of it.
    pub expected: Option<Expected>,
}

/// Something that is over. Told after it is durable; who does not listen fast enough misses the oldest.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
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
        /// From the opening of the session to its seal; of a parked one from the first byte.
        elapsed: Duration,
    },
    /// A checkpoint was given to a restore.
    Restored {
        /// Job.
        job: String,
        /// Generation.
        generation: u64,
        /// Checkpoint id, 32 hex digits.
        id: String,
        /// Bytes of images given.
        bytes: u64,
        /// From the request to its end.
        elapsed: Duration,
    },
    /// A dump failed or was discarded.
    Failed {
        /// Job; empty if it had none.
        job: String,
        /// Session.
        session: String,
        /// Why.
        reason: String,
    },
    /// A checkpoint is gone from this node.
    Removed {
        /// Job; empty for a parked one.
        job: String,
        /// Generation; 0 for a parked one.
        generation: u64,
        /// Checkpoint id, 32 hex digits.
        id: String,
    },
}
