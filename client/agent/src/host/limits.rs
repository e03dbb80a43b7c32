//! Limits on page-server connections, so that no kind of client can keep another from its dump.
//!
//! | | bound |
//! | --- | --- |
//! | connections to the well-known endpoints that have not shown yet who they are, of this machine | [`ARRIVING`] |
//! | the same, of other machines | [`ARRIVING`] |
//! | anonymous dumps at once | [`ANONYMOUS`] |
//! | connections to the endpoints of one session | [`FOR_SESSION`] |
//!
//! Each has a counter of its own. A connection that is refused by user or by address costs no thread and is
//! counted nowhere.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most connections that have not sent their first byte, or not finished their TLS handshake: each has a
/// thread.
const ARRIVING: usize = 128;

/// Most anonymous dumps at once: each has a thread and a buffer. One machine freezes far fewer processes at a
/// time.
const ANONYMOUS: usize = 256;

/// Most connections to one session. One of them brings its pages; another may have been given up by its client.
const FOR_SESSION: usize = 8;

/// Time limit from an anonymous client's connection to its first byte. CRIU connects before it freezes the
/// tasks, and by default gives that 10 s (`--timeout`).
pub(super) const FIRST_BYTE: Duration = Duration::from_secs(30);

/// Shortest time between two log lines about refusals: a refused client can come again thousands of times a
/// second.
const LOG_PERIOD: Duration = Duration::from_secs(10);

/// Counters of the connections of one host.
pub(super) struct Places {
    local: Arc<Semaphore>,
    remote: Arc<Semaphore>,
    anonymous: Arc<Semaphore>,
    refusals: Mutex<Refusals>,
}

#[derive(Default)]
struct Refusals {
    logged: Option<Instant>,
    since: u64,
}

impl Default for Places {
    fn default() -> Self {
        let places = |count| Arc::new(Semaphore::new(count));
        Self {
            local: places(ARRIVING),
            remote: places(ARRIVING),
            anonymous: places(ANONYMOUS),
            refusals: Mutex::default(),
        }
    }
}

impl Places {
    /// Takes a place for a connection of the well-known endpoints, for the time until its peer has identified
    /// itself.
    pub(super) fn arriving(&self, local: bool) -> Option<OwnedSemaphorePermit> {
        let places = if local { &self.local } else { &self.remote };
        Arc::clone(places).try_acquire_owned().ok()
    }

    /// Takes a place for an anonymous dump.
    pub(super) fn anonymous(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.anonymous).try_acquire_owned().ok()
    }

    /// Logs that a connection was refused.
    pub(super) fn refused(&self, reason: &str) {
        let mut refusals = self.refusals.lock();
        refusals.since += 1;
        if refusals.logged.is_none_or(|at| at.elapsed() >= LOG_PERIOD) {
            tracing::warn!(
                event = "page-server-connections-refused",
                reason,
                count = refusals.since,
                "page-server connections refused"
            );
            *refusals = Refusals {
                logged: Some(Instant::now()),
                since: 0,
            };
        }
    }
}

/// Returns the connection limit of one session.
pub(super) fn of_session() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(FOR_SESSION))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_kind_of_connection_takes_the_places_of_another() {
        let places = Places::default();
        let fill = |take: &dyn Fn() -> Option<OwnedSemaphorePermit>| {
            let taken: Vec<_> = std::iter::from_fn(take).collect();
            assert!(!taken.is_empty());
            taken
        };
        let remote = fill(&|| places.arriving(false));
        let local = fill(&|| places.arriving(true));
        let dumps = fill(&|| places.anonymous());
        assert_eq!((remote.len(), local.len(), dumps.len()), (128, 128, 256));
        drop(local);
        assert!(places.arriving(true).is_some());
        assert!(places.arriving(false).is_none() && places.anonymous().is_none());
    }
}
