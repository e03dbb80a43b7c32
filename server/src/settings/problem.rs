//! Errors in the options, each with its place and with what to do.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;

use clap::Arg;
use clap::error::{ContextKind, ErrorKind};
use permafrost_protocol::control::{ErrorCode, ReportedError};

use super::{LayerValue, is_secret, name_of, strings};

/// Something wrong in the environment or in the configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Position: `FILE:LINE:COLUMN`, a file or a variable.
    place: String,
    /// Description, and what to do.
    message: String,
}

impl Problem {
    pub(super) fn new(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            place: place.into(),
            message: message.into(),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Reason why there are no options to start with.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SettingsError {
    /// The command line is wrong, or asks for its help.
    #[error(transparent)]
    CommandLine(#[from] clap::Error),
    /// The environment or the configuration file is wrong.
    #[error("{}", in_lines(.0))]
    Wrong(Vec<Problem>),
}

impl ReportedError for SettingsError {
    fn code(&self) -> ErrorCode {
        ErrorCode::Invalid
    }
}

fn in_lines(problems: &[Problem]) -> String {
    let lines: Vec<_> = problems.iter().map(Problem::to_string).collect();
    lines.join("\n")
}

/// Returns the message for a value that clap refuses. It repeats no secret.
pub(super) fn of_value(arg: &Arg, error: &clap::Error) -> String {
    let name = name_of(arg);
    let value = match strings(error, ContextKind::InvalidValue).first() {
        // There may be a password before an `@`.
        Some(value) if !is_secret(arg) && !value.contains('@') => format!("{value:?}"),
        _ => "the value".to_owned(),
    };
    let valid = strings(error, ContextKind::ValidValue);
    let why = match (error.source(), valid.as_slice()) {
        (Some(source), _) => source.to_string(),
        (None, [_, ..]) => format!("use {}", valid.join(" or ")),
        (None, []) => match error.kind() {
            ErrorKind::InvalidValue | ErrorKind::NoEquals => "a value is missing".to_owned(),
            kind => kind.as_str().unwrap_or("it is refused").to_owned(),
        },
    };
    if why.contains(value.trim_matches('"')) {
        return format!("{name}: {why}");
    }
    format!("{name}: {value} cannot be used: {why}")
}

/// Returns the name of an option in the way in which clap writes it, `--name <VALUE>`.
fn bare(written: &str) -> &str {
    let name = written.split([' ', '=', '[']).next().unwrap_or(written);
    name.trim_start_matches('-')
}

/// Returns the problem if an option of the environment or the file needs another one, or excludes it. `None` if the
/// command line alone is wrong.
pub(super) fn of_relation(
    error: &clap::Error,
    layers: &BTreeMap<String, LayerValue>,
) -> Option<Problem> {
    let named = strings(error, ContextKind::InvalidArg);
    match error.kind() {
        ErrorKind::MissingRequiredArgument => {
            let lacks = |layer: &&LayerValue| layer.needs.iter().any(|need| named.contains(need));
            let (name, layer) = layers.iter().find(|(_, layer)| lacks(layer))?;
            let missing: Vec<_> = named.iter().map(|name| bare(name)).collect();
            let missing = missing.join(" and ");
            let message =
                format!("{name} needs {missing}, too: set that as well, or remove {name}");
            Some(Problem::new(&layer.place, message))
        }
        ErrorKind::ArgumentConflict => {
            let others = strings(error, ContextKind::PriorArg);
            let pair: Vec<_> = named.iter().chain(&others).map(|name| bare(name)).collect();
            let name = *pair.iter().find(|name| layers.contains_key(**name))?;
            let layer = layers.get(name)?;
            let other: Vec<_> = pair.iter().filter(|one| **one != name).copied().collect();
            let other = other.join(", ");
            let message =
                format!("{name} excludes {other}, which is set as well: keep one of them");
            Some(Problem::new(&layer.place, message))
        }
        _ => None,
    }
}
