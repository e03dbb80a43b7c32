//! The ports of the store, as traits: its interfaces to what follows a dump, to the cost model and to the queues.

mod follower;
mod keys;
mod observer;
mod turn;

pub use follower::{DumpTap, Follower};
pub use keys::{DataKeys, NamespaceKey};
pub use observer::{
    Beginning, DumpDone, Expected, Observer, Ongoing, RestoreDone, StoreEvent, Transferred,
    Unobserved,
};
pub use turn::TransferSlot;
