//! Limits on the resources of the daemon that callers may use.

use std::time::Duration;

/// Limits of the API's listeners.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections at once, for the socket and for the port separately, so that remote callers
    /// leave room for those of this machine. Surplus connections get an answer, and may retry.
    pub connections: usize,
    /// Maximum number of connections to the port of one caller.
    pub caller_connections: usize,
    /// Maximum number of unauthenticated connections to the port, in addition. When one more comes, the oldest is
    /// closed.
    pub strangers: usize,
    /// Time for a TLS handshake.
    pub handshake: Duration,
    /// Time from the connection to the first request of an authenticated caller: a stranger does not keep a
    /// connection.
    pub introduction: Duration,
    /// Time between requests, and for the head of a request.
    pub idle: Duration,
    /// Largest body, bytes.
    pub body_bytes: usize,
    /// Maximum size of all bodies at once, bytes. Further bodies wait until others were answered.
    pub bodies_bytes: usize,
    /// Time for a body to come in.
    pub body: Duration,
    /// Time to read on from a refused sender, so that it reads the reason.
    pub drain: Duration,
    /// Time for an answer to begin. A stream of events goes on.
    pub request: Duration,
    /// Time without progress after which the connection of a reader is closed.
    pub stall: Duration,
    /// Rate limit for the requests of one remote caller.
    pub rate: Rate,
    /// Time for current requests to finish when the server stops.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            caller_connections: 128,
            strangers: 64,
            handshake: Duration::from_secs(10),
            introduction: Duration::from_secs(10),
            idle: Duration::from_secs(90),
            body_bytes: 8 << 20,
            bodies_bytes: 128 << 20,
            body: Duration::from_secs(30),
            drain: Duration::from_secs(5),
            request: Duration::from_secs(30),
            stall: Duration::from_secs(30),
            rate: Rate::default(),
            grace: Duration::from_secs(5),
        }
    }
}

/// Rate of a bucket of tokens: `burst` at once, and `per_s` each second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Requests each second, in the long run; at least 1.
    pub per_s: u32,
    /// Requests at once after a pause; at least 1.
    pub burst: u32,
}

impl Rate {
    /// Returns a rate of `per_s`, with a burst of twice that.
    #[must_use]
    pub const fn of(per_s: u32) -> Self {
        Self {
            per_s,
            burst: per_s.saturating_mul(2),
        }
    }
}

impl Default for Rate {
    fn default() -> Self {
        Self::of(2_000)
    }
}
