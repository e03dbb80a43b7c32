//! The verdict: a file in which the action script reports the result of the seal to `permafrost dump`.
//!
//! CRIU reports only whether a script's exit code was zero, so the script writes one of
//!
//! ```text
//! sealed JOB@GEN ID MICROSECONDS
//! record HEX
//! ```
//! ```text
//! refused CODE
//! MESSAGE
//! hint: HINT
//! ```
//!
//! into the file that [`VARIABLE`] names, before it exits. CODE is an [`ErrorCode`] number, or [`UNREACHABLE`]
//! when no reply came at all. HEX is the reply as received, a [`Checkpoint`]: it cannot be requested again
//! later, because the process is gone by then, and the daemon may be.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use permafrost_protocol::control::{Checkpoint, ErrorCode};
use permafrost_transport::control::ControlError;
use prost::Message as _;
use rustix::time::{ClockId, clock_gettime};

/// Environment variable that names the verdict's file.
pub const VARIABLE: &str = "PERMAFROST_VERDICT";

/// Environment variable that names the session to seal.
pub const SESSION_VARIABLE: &str = "PERMAFROST_SESSION";

/// Environment variable with the time at which the seal is given up, a [`SealBy`].
pub const SEAL_BY_VARIABLE: &str = "PERMAFROST_SEAL_BY";

/// Environment variable with the time after which a script that no other time binds gives the seal up, milliseconds.
pub const SEAL_WITHIN_VARIABLE: &str = "PERMAFROST_SEAL_WITHIN_MS";

/// Environment variable that names the job for which an anonymous session is adopted.
pub const JOB_VARIABLE: &str = "PERMAFROST_JOB";

/// Value of [`JOB_VARIABLE`] for a dump that is not stored: its pages go elsewhere, as in a live migration.
pub const NO_JOB: &str = "none";

/// Environment variable that names the socket at which the receiver of streamed images reports whether it has all.
pub const STREAM_VARIABLE: &str = "PERMAFROST_STREAM";

/// Report of that receiver when all images are there and the session has the pages, or when permafrostd has refused them:
/// its reply to the seal tells which, and why. Anything else is an error.
pub const STREAM_ENDED: &str = "ended";

/// CODE of a verdict if the daemon did not reply: the exit code of `permafrost` for the same failure.
pub const UNREACHABLE: i32 = 10;

/// Time at which a seal without a reply is given up, milliseconds of this machine's monotonic clock: the freeze
/// ends then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealBy {
    ms: u64,
}

impl SealBy {
    /// Returns the time that is `wait` from now.
    pub fn after(wait: Duration) -> Self {
        let at = monotonic().saturating_add(wait);
        Self {
            ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Returns the time that is left; zero once it has passed.
    pub fn remaining(self) -> Duration {
        Duration::from_millis(self.ms).saturating_sub(monotonic())
    }
}

impl fmt::Display for SealBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ms.fmt(f)
    }
}

impl FromStr for SealBy {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self { ms: text.parse()? })
    }
}

fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(
        u64::try_from(now.tv_sec).unwrap_or_default(),
        u32::try_from(now.tv_nsec).unwrap_or_default(),
    )
}

/// Result of the seal.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The checkpoint is sealed.
    Sealed {
        /// Record of the checkpoint, as the daemon replied.
        checkpoint: Box<Checkpoint>,
        /// Time that the daemon took.
        elapsed: Duration,
    },
    /// The seal was refused, and CRIU was told to roll back.
    Refused {
        /// [`ErrorCode`] as a number, or [`UNREACHABLE`].
        code: i32,
        /// Description of the error.
        message: String,
        /// Advice on how to correct it; may be empty.
        hint: String,
    },
}

impl Verdict {
    /// Returns the verdict on a sealed checkpoint.
    pub fn sealed(checkpoint: &Checkpoint, elapsed: Duration) -> Self {
        Self::Sealed {
            checkpoint: Box::new(checkpoint.clone()),
            elapsed,
        }
    }

    /// Returns the contents of the file.
    pub fn encode(&self) -> String {
        let mut text = self.to_string();
        if let Self::Sealed { checkpoint, .. } = self {
            text.push_str("record ");
            for byte in checkpoint.encode_to_vec() {
                text.push_str(&format!("{byte:02x}"));
            }
            text.push('\n');
        }
        text
    }

    /// Returns the verdict on a seal that failed.
    pub fn refused(error: &ControlError) -> Self {
        match error {
            ControlError::Refused {
                code,
                message,
                hint,
            } => Self::Refused {
                code: (*code).into(),
                message: message.clone(),
                hint: hint.clone(),
            },
            ControlError::Unexpected { .. } => Self::Refused {
                code: ErrorCode::Internal.into(),
                message: error.to_string(),
                hint: String::new(),
            },
            error => Self::Refused {
                code: UNREACHABLE,
                message: error.to_string(),
                hint: String::new(),
            },
        }
    }

    /// Returns the verdict on a seal that got no reply by the time at which the freeze ends.
    pub fn too_late() -> Self {
        Self::Refused {
            code: UNREACHABLE,
            message: "permafrostd did not answer before the freeze limit".to_owned(),
            hint: String::new(),
        }
    }

    /// Returns true if it is that of [`Self::too_late`]: the script keeps the freeze limit by itself, and is at times
    /// ahead of the guard.
    #[must_use]
    pub fn is_too_late(&self) -> bool {
        *self == Self::too_late()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sealed {
                checkpoint,
                elapsed,
            } => {
                let Checkpoint {
                    job,
                    generation,
                    id,
                    ..
                } = &**checkpoint;
                writeln!(f, "sealed {job}@{generation} {id} {}", elapsed.as_micros())
            }
            Self::Refused {
                code,
                message,
                hint,
            } => {
                writeln!(f, "refused {code}\n{}", message.replace('\n', " "))?;
                if !hint.is_empty() {
                    writeln!(f, "hint: {}", hint.replace('\n', " "))?;
                }
                Ok(())
            }
        }
    }
}

/// The contents of the file are not a verdict (it is empty, or was cut short).
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a verdict: {0:?}")]
pub struct NotAVerdict(String);

impl FromStr for Verdict {
    type Err = NotAVerdict;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = || NotAVerdict(text.chars().take(80).collect());
        let mut lines = text.lines();
        let mut words = lines.next().unwrap_or_default().split(' ');
        match words.next() {
            Some("sealed") => {
                let (Some(_), Some(_), Some(micros), None) =
                    (words.next(), words.next(), words.next(), words.next())
                else {
                    return Err(malformed());
                };
                let record = lines.next().and_then(|line| line.strip_prefix("record "));
                let record = record.and_then(bytes_of).ok_or_else(malformed)?;
                let checkpoint = Checkpoint::decode(&*record).map_err(|_| malformed())?;
                Ok(Self::Sealed {
                    checkpoint: Box::new(checkpoint),
                    elapsed: Duration::from_micros(micros.parse().map_err(|_| malformed())?),
                })
            }
            Some("refused") => Ok(Self::Refused {
                code: words
                    .next()
                    .and_then(|code| code.parse().ok())
                    .ok_or_else(malformed)?,
                message: lines.next().ok_or_else(malformed)?.to_owned(),
                hint: lines
                    .next()
                    .and_then(|line| line.strip_prefix("hint: "))
                    .unwrap_or_default()
                    .to_owned(),
            }),
            _ => Err(malformed()),
        }
    }
}

/// Parses hex digits, two a byte.
fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    if !hex.is_ascii() || !hex.len().is_multiple_of(2) {
        return None;
    }
    let pairs = (0..hex.len()).step_by(2);
    pairs
        .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_verdicts_round_trip() {
        for verdict in [
            Verdict::sealed(
                &Checkpoint {
                    job: "train".to_owned(),
                    generation: 3,
                    id: "0".repeat(32),
                    nodes: vec!["a".to_owned(), "b".to_owned()],
                    ..Checkpoint::default()
                },
                Duration::from_micros(812),
            ),
            Verdict::Refused {
                code: 6,
                message: "region is full".to_owned(),
                hint: "remove a checkpoint".to_owned(),
            },
            Verdict::Refused {
                code: 10,
                message: "gone".to_owned(),
                hint: String::new(),
            },
        ] {
            assert_eq!(verdict.encode().parse::<Verdict>().unwrap(), verdict);
        }
    }

    #[test]
    fn a_message_of_several_lines_does_not_become_a_hint() {
        let verdict = Verdict::Refused {
            code: 1,
            message: "one\nhint: two".to_owned(),
            hint: String::new(),
        };
        match verdict.encode().parse().unwrap() {
            Verdict::Refused { message, hint, .. } => {
                assert_eq!((message.as_str(), hint.as_str()), ("one hint: two", ""));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "sealed",
            "sealed a@1 id",
            "sealed a@1 id x",
            "sealed a@1 id 5",
            "sealed a@1 id 5\nrecord 0",
            "sealed a@1 id 5\nrecord ffff",
            "sealed a@1 id 5\nrecord äö",
            "refused",
            "refused 6",
            "ok",
        ] {
            assert!(text.parse::<Verdict>().is_err(), "{text:?}");
        }
    }
}
