//! The ports of the store, as traits: its interfaces to a cluster, to the cost model and to the queues. A store
//! on one machine uses none of them.

mod elsewhere;
mod observer;
mod registry;
mod replicate;
mod turn;

pub use elsewhere::Elsewhere;
pub use observer::{
    Beginning, DumpDone, Expected, Observer, Ongoing, RestoreDone, StoreEvent, Transferred,
    Unobserved,
};
pub use registry::{JobLock, Registered, Registry};
pub use replicate::{ContentDigest, CopiesRequest, CopyStreams, Durability, Replicate};
pub use turn::TransferSlot;
