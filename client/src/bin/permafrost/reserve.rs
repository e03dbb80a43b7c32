//! `permafrost reserve`: reserves places in the queues of nodes.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use permafrost_agent::host::arguments::{parse_size, parse_time};
use permafrost_api_types::reserve::Direction;
use permafrost_protocol::control::{Done, Reserved, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::table::facts;

pub(crate) const RESERVE_EXAMPLES: &str = "\
A place keeps nobody waiting: those behind it go on until the dump or restore that presents its token comes. \
One that is not taken up in time lapses. Whoever has the token has the place.

Examples:
    permafrost reserve --bytes 5G --reservation-file place       a dump here
    permafrost reserve --bytes 5G --node n2 --direction read --lifetime 30s
    permafrost dump --pid 4242 --job train --reservation-file place
    permafrost reserve --cancel --reservation-file place
";

/// Parser of the queue that a place is reserved in, with the help for its two values.
fn direction_parser() -> impl TypedValueParser<Value = Direction> {
    let help = |direction: Direction| match direction {
        Direction::Write => "A dump",
        Direction::Read => "A restore",
    };
    let possible = Direction::ALL.map(|one| PossibleValue::new(one.name()).help(help(one)));
    PossibleValuesParser::new(possible)
        .try_map(|name| Direction::named(&name).ok_or("neither write nor read"))
}

#[derive(Debug, Args)]
pub(crate) struct ReserveArguments {
    /// About how much it will move, such as 512M or 5G; in bytes without a unit.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, required_unless_present = "cancel")]
    pub(crate) bytes: Option<u64>,
    /// Node of the cluster whose queue it is [default: the one that is asked].
    #[arg(
        long,
        value_name = "NODE",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) node: String,
    /// Namespace of the job that it is for: its quota counts [default: the only one of the agent's certificate].
    #[arg(long, value_name = "NS", default_value = "", hide_default_value = true)]
    pub(crate) namespace: String,
    /// Queue.
    #[arg(long, value_parser = direction_parser(), default_value_t = Direction::Write)]
    pub(crate) direction: Direction,
    /// From 0, the lowest, to 11.
    #[arg(long, value_name = "0..11", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=11))]
    pub(crate) priority: u32,
    /// It should start within this time.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) deadline: Option<Duration>,
    /// How long the place is kept [default and most: 5m].
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) lifetime: Option<Duration>,
    /// Give up the place whose token is in --reservation-file, or in the variable PERMAFROST_RESERVATION, instead.
    #[arg(long, conflicts_with_all = ["bytes", "direction", "priority", "deadline", "lifetime"])]
    pub(crate) cancel: bool,
    /// Write the token into this file, which only its owner can read; with --cancel, read it there (`-`: standard
    /// input).
    #[arg(long, value_name = "FILE")]
    pub(crate) reservation_file: Option<PathBuf>,
}

/// Source of a reservation's token. The token is never an argument: every user of a machine can read those.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ReservationArguments {
    /// Take the place that was reserved under the token in this file, `-` for standard input [default: the token in the
    /// variable PERMAFROST_RESERVATION].
    #[arg(long, value_name = "FILE")]
    pub(crate) reservation_file: Option<PathBuf>,
}

impl ReservationArguments {
    /// Returns the token; empty if no place was reserved.
    ///
    /// # Errors
    /// The file cannot be read, or holds no token.
    pub(crate) fn token(&self) -> Result<String, Failure> {
        match &self.reservation_file {
            Some(path) => read_token(path),
            None => Ok(std::env::var(RESERVATION_VARIABLE).unwrap_or_default()),
        }
    }
}

/// Environment variable with the token of a reserved place.
const RESERVATION_VARIABLE: &str = "PERMAFROST_RESERVATION";

/// Largest token file, bytes. A token has 32 digits; a larger file is not a token.
const MAX_TOKEN_FILE_BYTES: u64 = 4096;

fn read_token(path: &Path) -> Result<String, Failure> {
    let source: io::Result<Box<dyn Read>> = if path == Path::new("-") {
        Ok(Box::new(io::stdin()))
    } else {
        File::open(path).map(|file| Box::new(file) as Box<dyn Read>)
    };
    let mut text = String::new();
    source
        .and_then(|source| source.take(MAX_TOKEN_FILE_BYTES).read_to_string(&mut text))
        .map_err(|error| Failure::io("read", path, &error))?;
    let token = text.trim();
    if token.is_empty() {
        let message = format!("{} holds no token", path.display());
        return Err(Failure::new(Code::Invalid, message)
            .hint("`permafrost reserve --reservation-file FILE` writes it"));
    }
    Ok(token.to_owned())
}

fn write_token(path: &Path, token: &str) -> Result<(), Failure> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path);
    file.and_then(|mut file| {
        // An existing file keeps its mode, so the mode is set.
        file.set_permissions(Permissions::from_mode(0o600))?;
        writeln!(file, "{token}")
    })
    .map_err(|error| Failure::io("write", path, &error))
}

pub(crate) fn reserve(context: &Context, arguments: &ReserveArguments) -> Result<(), Failure> {
    if arguments.cancel {
        let place = ReservationArguments {
            reservation_file: arguments.reservation_file.clone(),
        };
        let token = place.token()?;
        if token.is_empty() {
            return Err(
                Failure::new(Code::Invalid, "no token of a place to give up")
                    .hint("pass --reservation-file FILE, or set PERMAFROST_RESERVATION"),
            );
        }
        let done = context.connect()?.call(request::CancelReservation {
            token,
            node: arguments.node.clone(),
        })?;
        return context.print(&done, |_: &Done| "the place is given up\n".to_owned());
    }
    let Some(bytes) = arguments.bytes else {
        return Err(Failure::new(Code::Invalid, "say --bytes SIZE"));
    };
    let reserved = context.connect()?.call(request::Reserve {
        node: arguments.node.clone(),
        direction: arguments.direction.name().to_owned(),
        bytes,
        priority: arguments.priority,
        deadline_ms: arguments.deadline.map(whole_ms),
        lifetime_ms: arguments.lifetime.map_or(0, whole_ms),
        namespace: arguments.namespace.clone(),
    })?;
    if let Some(path) = &arguments.reservation_file {
        write_token(path, &reserved.token)?;
    }
    context.print(&reserved, human_reserved)
}

fn human_reserved(reserved: &Reserved) -> String {
    let about = reserved
        .starts_in_ms
        .map_or_else(|| "nothing measured yet".to_owned(), about);
    facts(
        &format!("reserved {}", reserved.token),
        &[
            ("node", reserved.node.clone()),
            ("before it", human::bytes(reserved.bytes_before)),
            ("could start in", about),
            ("lapses in", human::millis(reserved.lapses_in_ms)),
        ],
    )
}

fn about(ms: u64) -> String {
    format!("about {}", human::millis(ms))
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_goes_through_a_file_that_only_its_owner_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("place");
        std::fs::write(&path, "old and longer than a token of today").unwrap();
        write_token(&path, "00ff").unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let place = |path: &Path| ReservationArguments {
            reservation_file: Some(path.to_owned()),
        };
        assert_eq!(place(&path).token().unwrap(), "00ff");
        std::fs::write(&path, "\n").unwrap();
        assert_eq!(place(&path).token().unwrap_err().code, Code::Invalid);
        assert!(place(&dir.path().join("none")).token().is_err());
    }
}
