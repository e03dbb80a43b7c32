//! The ports of the store: what it needs of a cluster, of the cost model and of the queues, as traits. A store on one machine has
//! none of them.

mod elsewhere;
mod observer;
mod registry;
mod replicate;
mod turn;

pub use elsewhere::Elsewhere;
pub use observer::{
    Beginning, DumpDone, Event, Expected, Observer, Ongoing, RestoreDone, Transferred,
};
pub use registry::{JobLock, Registered, Registry};
pub use replicate::{ContentDigest, Copies, CopiesRequest, Durability, Replicate};
pub use turn::Turn;
