//! Retention: which generations of a job stay, and which go.
//!
//! ```text
//! Policies (a document: a policy for each namespace) ─▶ decide(policy, generations, now) ─▶ a verdict for each one
//! ```
//!
//! Pure functions over plain data: nothing here reads a clock, a catalog or a registry, and nothing is removed here.

#![forbid(unsafe_code)]

mod clock;
mod decide;
mod error;
mod glob;
mod newest;
mod policy;
mod usage;

pub use clock::AgeClock;
pub use decide::{Exceeded, Generation, Incoming, Reason, Ruling, Rulings, decide};
pub use error::PolicyError;
pub use glob::JobGlob;
pub use newest::Newest;
pub use policy::{JobPolicy, MAX_RULES, NamespacePolicy, OverQuota, Policies, Settings};
pub use usage::{Charged, charge};
