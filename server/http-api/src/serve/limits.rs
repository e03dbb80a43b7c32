//! How much of the daemon callers may use.

use std::time::Duration;

/// Limits of what listens for the API.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once, on the socket and on the port apart: callers from elsewhere leave those of this machine
    /// their room. Whoever comes then is told so, and may come again.
    pub connections: usize,
    /// Of those to the port, as many as one caller may have.
    pub caller_connections: usize,
    /// Connections to the port that have not shown who they are, beside those. When one more comes the oldest goes.
    pub strangers: usize,
    /// Time for a TLS handshake.
    pub handshake: Duration,
    /// From the connection to the first request of someone known: a stranger does not keep one of the connections.
    pub introduction: Duration,
    /// Between requests, and for the head of a request.
    pub idle: Duration,
    /// Largest body, bytes.
    pub body_bytes: usize,
    /// All bodies at once, bytes. More waits until others were answered.
    pub bodies_bytes: usize,
    /// For a body to come in.
    pub body: Duration,
    /// For reading on what was refused, so that its sender comes to read why.
    pub drain: Duration,
    /// For an answer to begin. A stream of events goes on.
    pub request: Duration,
    /// For a reader who takes nothing of an answer, before the connection is ended.
    pub stall: Duration,
    /// Requests of one caller from elsewhere.
    pub rate: Rate,
    /// When the server stops, for requests that are being answered.
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

/// A bucket of tokens: `burst` at once, and `per_s` each second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Requests each second, in the long run; at least 1.
    pub per_s: u32,
    /// Requests at once after a pause; at least 1.
    pub burst: u32,
}

impl Rate {
    /// `per_s`, and twice that at once.
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
