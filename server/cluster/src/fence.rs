//! The fence: decides if this node may still act under its registration.
//!
//! etcd counts a lease from when it took the last sign of life; this node counts from before it sent it, and
//! stops a margin earlier. So it ceases to act before another node can take its place, as long as the clocks
//! run at about the same speed. etcd stops changes that were under way at that moment: every transaction
//! compares the registration's create revision, the *fencing token*, which never comes back once it is gone.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use permafrost_store::StoreError;

use crate::error::RegistryError;

/// Time since the machine's start. Goes on while the machine is suspended, as etcd's clock elsewhere does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Tick(Duration);

impl Tick {
    pub(crate) fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Self(Duration::new(
            u64::try_from(time.tv_sec).unwrap_or_default(),
            u32::try_from(time.tv_nsec).unwrap_or_default(),
        ))
    }

    pub(crate) fn plus(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }

    /// Returns the time since `earlier`; zero if `earlier` is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Returns the time by which a node gives its lease up before etcd does: for clocks that drift (a fifth is far
/// more than any does), and for the time between a check and the action based on it.
pub(crate) fn margin(ttl: Duration) -> Duration {
    ttl / 5
}

/// A registration that is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registration {
    /// Create revision of the node's key.
    pub(crate) token: i64,
    pub(crate) lease: i64,
}

#[derive(Debug)]
struct State {
    registration: Option<Registration>,
    until: Tick,
    why: String,
}

/// Permission to act, which is open while the registration is valid.
#[derive(Debug)]
pub struct Fence {
    state: Mutex<State>,
}

impl Default for Fence {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                registration: None,
                until: Tick(Duration::ZERO),
                why: "it has not been registered yet".to_owned(),
            }),
        }
    }
}

impl Fence {
    /// Checks that this node may act. Cheap: makes no call.
    ///
    /// # Errors
    /// Another node may take its place now, or has.
    pub fn check(&self) -> Result<(), StoreError> {
        self.registration().map(|_| ())
    }

    /// Returns the fencing token, which grows with every registration in the cluster; `None` while fenced.
    #[must_use]
    pub fn token(&self) -> Option<u64> {
        let registration = self.registration().ok()?;
        u64::try_from(registration.token).ok()
    }

    pub(crate) fn registration(&self) -> Result<Registration, StoreError> {
        self.registration_at(Tick::now())
    }

    /// Returns true if a closed fence may open again by itself, for the same registration: it is closed only
    /// because etcd has not answered.
    pub(crate) fn may_open(&self) -> bool {
        self.state().registration.is_some()
    }

    fn registration_at(&self, now: Tick) -> Result<Registration, StoreError> {
        let state = self.state();
        let closed = match state.registration {
            Some(registration) if now < state.until => return Ok(registration),
            Some(_) => RegistryError::LeaseLost {
                lost_ms: now.since(state.until).as_millis(),
            },
            None => RegistryError::NotRegistered {
                reason: state.why.clone(),
            },
        };
        Err(closed.into())
    }

    /// Extends the registration after etcd has answered a sign of life that was sent at `sent`.
    pub(crate) fn extend(&self, registration: Registration, sent: Tick, ttl: Duration) {
        let mut state = self.state();
        let until = sent.plus(ttl.saturating_sub(margin(ttl)));
        if state.registration == Some(registration) {
            // Answers may overtake each other.
            state.until = state.until.max(until);
        } else {
            state.registration = Some(registration);
            state.until = until;
        }
    }

    /// Closes the fence: the registration is lost.
    pub(crate) fn lose(&self, why: &str) {
        let mut state = self.state();
        state.registration = None;
        state.why = why.to_owned();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(5);
    const FIRST: Registration = Registration { token: 7, lease: 1 };

    fn at(ms: u64) -> Tick {
        Tick(Duration::from_millis(ms))
    }

    #[test]
    fn it_closes_a_margin_before_the_lease_ends_counted_from_the_sending() {
        let fence = Fence::default();
        assert!(fence.registration_at(at(0)).is_err());
        fence.extend(FIRST, at(1000), TTL);
        assert_eq!(fence.registration_at(at(4999)).unwrap(), FIRST);
        assert!(fence.registration_at(at(5000)).is_err());
        assert!(fence.may_open());
        // The lease was not lost after all: no other node could take the place.
        fence.extend(FIRST, at(5500), TTL);
        assert!(fence.registration_at(at(9000)).is_ok());
    }

    #[test]
    fn a_late_answer_takes_no_time_away() {
        let fence = Fence::default();
        fence.extend(FIRST, at(2000), TTL);
        fence.extend(FIRST, at(1000), TTL);
        assert!(fence.registration_at(at(5900)).is_ok());
    }

    #[test]
    fn what_is_lost_stays_lost_until_registered_anew() {
        let fence = Fence::default();
        fence.extend(FIRST, at(0), TTL);
        fence.lose("gone");
        let error = fence.registration_at(at(1)).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error}");
        assert!(!fence.may_open());
        let second = Registration { token: 9, lease: 2 };
        fence.extend(second, at(10), TTL);
        assert_eq!(fence.registration_at(at(11)).unwrap(), second);
    }

    #[test]
    fn the_clock_runs() {
        let before = Tick::now();
        std::thread::sleep(Duration::from_millis(2));
        assert!(Tick::now().since(before) >= Duration::from_millis(2));
    }
}
