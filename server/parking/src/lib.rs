//! Parked dumps: the time that each has been kept, and the limit on the space that all of them take.
//!
//! A parked dump may be the only copy of a task, so the wall clock does not decide when it is deleted. The
//! retention counts the time that daemons have run with the dump, by the monotonic clock. That time is saved,
//! so that a restart continues it. A crash loses at most a minute of it, and the dump is kept for that
//! much longer.

#![forbid(unsafe_code)]

mod quota;
mod times;

pub use quota::{ParkedQuota, ParkedShare};
pub use times::ParkedTimes;
