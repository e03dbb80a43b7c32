//! The verdict: what the action script tells `permafrost dump` about the seal, through a file.
//!
//! CRIU passes nothing of a script's result on but zero or not zero, so the script writes one of
//!
//! ```text
//! sealed JOB@GEN ID MICROSECONDS
//! ```
//! ```text
//! refused CODE
//! MESSAGE
//! hint: HINT
//! ```
//!
//! into the file that [`VARIABLE`] names, before it exits. CODE is an [`ErrorCode`] number, or
//! [`UNREACHABLE`] when no answer came at all.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use permafrost_protocol::control::{Checkpoint, ErrorCode};

use crate::control::ControlError;

/// Environment variable that names the verdict's file.
pub const VARIABLE: &str = "PERMAFROST_VERDICT";

/// Environment variable that names the session to seal.
pub const SESSION_VARIABLE: &str = "PERMAFROST_SESSION";

/// Environment variable that names the job an anonymous session is adopted for.
pub const JOB_VARIABLE: &str = "PERMAFROST_JOB";

/// CODE where the daemon did not answer: the exit code of `permafrost` for the same.
pub const UNREACHABLE: i32 = 10;

/// What became of the seal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The checkpoint is sealed.
    Sealed {
        /// `JOB@GEN`.
        name: String,
        /// Checkpoint id.
        id: String,
        /// How long the daemon took.
        elapsed: Duration,
    },
    /// It is not, and CRIU was told to roll back.
    Refused {
        /// [`ErrorCode`] as a number, or [`UNREACHABLE`].
        code: i32,
        /// What is wrong.
        message: String,
        /// What to do about it; may be empty.
        hint: String,
    },
}

impl Verdict {
    /// The verdict on a sealed checkpoint.
    pub fn sealed(checkpoint: &Checkpoint, elapsed: Duration) -> Self {
        Self::Sealed {
            name: format!("{}@{}", checkpoint.job, checkpoint.generation),
            id: checkpoint.id.clone(),
            elapsed,
        }
    }

    /// The verdict when sealing failed.
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
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sealed { name, id, elapsed } => {
                writeln!(f, "sealed {name} {id} {}", elapsed.as_micros())
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

/// The file is not a verdict (it is empty, or was cut short).
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
                let (Some(name), Some(id), Some(micros), None) =
                    (words.next(), words.next(), words.next(), words.next())
                else {
                    return Err(malformed());
                };
                Ok(Self::Sealed {
                    name: name.to_owned(),
                    id: id.to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_verdicts_round_trip() {
        for verdict in [
            Verdict::Sealed {
                name: "train@3".to_owned(),
                id: "0".repeat(32),
                elapsed: Duration::from_micros(812),
            },
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
            assert_eq!(verdict.to_string().parse::<Verdict>().unwrap(), verdict);
        }
    }

    #[test]
    fn a_message_of_several_lines_does_not_become_a_hint() {
        let verdict = Verdict::Refused {
            code: 1,
            message: "one\nhint: two".to_owned(),
            hint: String::new(),
        };
        match verdict.to_string().parse().unwrap() {
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
            "refused",
            "refused 6",
            "ok",
        ] {
            assert!(text.parse::<Verdict>().is_err(), "{text:?}");
        }
    }
}
