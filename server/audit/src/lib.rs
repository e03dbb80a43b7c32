//! The audit log: actor, action, object and outcome of each request, one JSON object per line
//! (docs/security.md).
//!
//! Every way into the daemon has one place where requests enter and outcomes leave: the control socket and the
//! page-server ports (the `daemon` module of `permafrost-server`, over the host's `Backend`), connections of
//! agents and nodes (its `peers` module), and the HTTP API (`permafrost_http_api::serve`). Each gets the name
//! of the request from [`event`], which names every request there is, and passes the outcome to
//! [`Audit::record`].
//!
//! Recording never waits for the disk: lines go to a thread through a bounded queue. Lines that do not fit, or
//! cannot be written, are counted, reported in the daemon's log and as a metric, and noted in the file once it
//! can be written again.

mod event;
mod file;
mod limit;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use parking_lot::Mutex;
use permafrost_agent::host::Client;
use permafrost_identity::Peer;
use permafrost_protocol::control::{self, ErrorCode};
use serde::Serialize;

pub use event::name_of;
pub use event::{AuditWeight, AuditedRequest};

use permafrost_store::clock::unix_ms;

use file::Writer;
use limit::{Limiter, Verdict};

/// Longest part of a name or message that a line repeats, characters.
const MAX_TEXT_CHARS: usize = 300;

/// Location of the audit file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AuditFile {
    /// `audit.log` in the data directory.
    #[default]
    InDataDir,
    /// A file at another path.
    At(PathBuf),
    /// No file: the daemon's own log alone.
    Off,
}

impl AuditFile {
    /// Returns the path of the file; `None` if there is none.
    #[must_use]
    pub fn path(&self, data_dir: &Path) -> Option<PathBuf> {
        match self {
            Self::InDataDir => Some(data_dir.join("audit.log")),
            Self::At(path) => Some(path.clone()),
            Self::Off => None,
        }
    }
}

/// Client that made a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Who {
    /// Entry point: `control`, `page-server`, `peer`, `api`, `signal`, or `retention` for what no caller has requested.
    via: &'static str,
    /// Name of the client: `uid 0`, `agent c7`, `token slurm`, or an address.
    who: String,
    /// User of a socket's other end.
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    /// Process of a socket's other end, when it connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    /// Serial number of the certificate, hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    serial: Option<String>,
}

impl Who {
    /// Returns the client of a host's socket or port.
    #[must_use]
    pub fn client(via: &'static str, client: &Client) -> Self {
        let named = |who: String| Self {
            via,
            who,
            uid: None,
            pid: None,
            serial: None,
        };
        match client {
            Client::User { uid, pid } => Self {
                uid: Some(*uid),
                pid: Some(*pid),
                ..named(format!("uid {uid}"))
            },
            Client::Tcp { address, uid } => Self {
                uid: *uid,
                ..named(address.to_string())
            },
            Client::Certificate(peer) => Self {
                via,
                ..Self::peer(peer)
            },
        }
    }

    /// Returns the holder of a certificate.
    #[must_use]
    pub fn peer(peer: &Peer) -> Self {
        Self {
            via: "peer",
            who: format!("{} {}", peer.role(), peer.name()),
            uid: None,
            pid: None,
            serial: Some(peer.serial().to_owned()),
        }
    }

    /// Returns the rules of retention, which act by themselves.
    #[must_use]
    pub fn rules() -> Self {
        Self {
            via: "retention",
            who: "rules".to_owned(),
            uid: None,
            pid: None,
            serial: None,
        }
    }

    /// Returns the operator of the machine, who sent the daemon a signal.
    #[must_use]
    pub fn signal(name: &str) -> Self {
        Self {
            via: "signal",
            who: name.to_owned(),
            uid: None,
            pid: None,
            serial: None,
        }
    }

    /// Returns a caller of the HTTP API, under the API's name for it.
    #[must_use]
    pub fn api(caller: &str) -> Self {
        Self {
            via: "api",
            who: shortened(caller),
            uid: None,
            pid: None,
            serial: None,
        }
    }
}

/// One line of the log.
#[derive(Serialize)]
struct Line<'a> {
    time_unix_ms: u64,
    node: &'a str,
    #[serde(flatten)]
    who: &'a Who,
    action: &'a str,
    /// Job, checkpoint, session or node concerned.
    on: &'a str,
    /// `done`, or the code of the refusal.
    outcome: &'a str,
    /// Reason of the refusal.
    #[serde(skip_serializing_if = "str::is_empty")]
    message: &'a str,
    /// Number of similar lines that were left out before this one.
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The audit log of a daemon.
pub struct Audit {
    node: String,
    writer: Option<Writer>,
    limiter: Mutex<Limiter>,
}

impl Audit {
    /// Opens the file, which is made with mode 0600. `node` is written into every line.
    ///
    /// # Errors
    /// The file cannot be made or opened; it is no regular file, another user's, or others may write it.
    pub fn open(file: &AuditFile, data_dir: &Path, node: &str) -> io::Result<Self> {
        let path = file.path(data_dir);
        Ok(Self {
            node: node.to_owned(),
            writer: path.map(Writer::start).transpose()?,
            limiter: Mutex::default(),
        })
    }

    /// Creates an audit log without a file: the daemon's log alone.
    #[must_use]
    pub fn off() -> Self {
        Self {
            node: String::new(),
            writer: None,
            limiter: Mutex::default(),
        }
    }

    /// Records the outcome of a request. Costs some microseconds, and never waits for the disk.
    pub fn record(&self, who: &Who, event: &AuditedRequest, outcome: Result<(), &control::Error>) {
        let left_out = {
            let mut limiter = self.limiter.lock();
            let refused = outcome.map_err(control::Error::code).err();
            match limiter.admit(&who.who, event, refused, Instant::now()) {
                Verdict::Write { left_out } => left_out,
                Verdict::LeaveOut => return,
            }
        };
        let (code, message) = match outcome {
            Ok(()) => ("done", String::new()),
            Err(error) => (code_name(error.code()), shortened(&error.message)),
        };
        let on = shortened(&event.on);
        let line = Line {
            time_unix_ms: unix_ms(),
            node: &self.node,
            who,
            action: event.action,
            on: &on,
            outcome: code,
            message: &message,
            left_out,
        };
        tracing::info!(
            target: "permafrost::audit", event = "audit-line",
            via = who.via,
            who = who.who,
            action = event.action,
            on,
            outcome = code,
            reason = message,
            "audit"
        );
        let Some(writer) = &self.writer else {
            return;
        };
        // Text, numbers and options of these always serialize.
        if let Ok(mut bytes) = serde_json::to_vec(&line) {
            bytes.push(b'\n');
            writer.write(bytes);
        }
    }

    /// Reopens the file after it was moved away. (The writer also notices by itself, with the next line.)
    pub fn reopen(&self) {
        if let Some(writer) = &self.writer {
            writer.reopen();
        }
    }

    /// Returns the number of lines that are not in the file: it could not be written, or the disk was too slow.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.writer.as_ref().map_or(0, Writer::lost)
    }
}

impl std::fmt::Debug for Audit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Audit").finish_non_exhaustive()
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(MAX_TEXT_CHARS).collect()
}

/// Returns a refusal's code, as `--json` of the commands spells it.
fn code_name(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::Internal => "internal",
        ErrorCode::Invalid => "invalid",
        ErrorCode::NotFound => "not-found",
        ErrorCode::Conflict => "conflict",
        ErrorCode::NoSpace => "no-space",
        ErrorCode::Corrupt => "corrupt",
        ErrorCode::SessionFailed => "session-failed",
        ErrorCode::Denied => "denied",
        ErrorCode::Unavailable => "unavailable",
    }
}

#[cfg(test)]
mod tests;
