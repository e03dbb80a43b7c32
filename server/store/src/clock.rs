//! The wall clock: its time is stored and shown, and decides nothing between nodes.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the wall clock's milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
