//! The subcommands of `permafrost` for those who operate nodes and regions: their state, media, keys, retention,
//! scrubs and cleaning, and the hooks for CRIU.

#![forbid(unsafe_code)]

mod gc;
mod hooks;
mod keys;
mod node;
mod prune;
mod region;
mod retention;
mod scrub;
mod status;

pub use gc::{GC_EXAMPLES, GcArguments, gc};
pub use hooks::{HOOKS_EXAMPLES, HooksArguments, install};
pub use keys::{KEYS_EXAMPLES, KeysArguments, keys};
pub use node::{NODE_EXAMPLES, NodeArguments, node};
pub use prune::{PRUNE_EXAMPLES, PruneArguments, prune};
pub use region::{REGION_EXAMPLES, RegionArguments, region};
pub use retention::{RETENTION_EXAMPLES, RetentionArguments, retention};
pub use scrub::{SCRUB_EXAMPLES, ScrubArguments, not_verified, scrub};
pub use status::{StatusArguments, status};
