//! `permafrost reserve`: places in the queues of nodes.

use std::time::Duration;

use clap::{Args, ValueEnum};
use permafrost_client::host::arguments::parse_size;
use permafrost_protocol::control::{Done, Reserved, request};

use crate::context::Context;
use crate::failure::{Code, Failure};
use crate::human;
use crate::table::facts;

pub(crate) const RESERVE_EXAMPLES: &str = "\
A place keeps nobody waiting: those behind it go on until the dump or restore that presents its token comes. \
One that is not taken up in time lapses. Whoever has the token has the place.

Examples:
    permafrost reserve --bytes 5G                        a dump here
    permafrost reserve --bytes 5G --node n2 --direction read --lifetime 30s
    permafrost dump --pid 4242 --job train --reservation TOKEN
    permafrost reserve --cancel TOKEN
";

/// What is reserved.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Direction {
    /// A dump
    Write,
    /// A restore
    Read,
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
    /// Queue.
    #[arg(long, value_enum, default_value_t = Direction::Write)]
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
    /// Give up the place of this token instead.
    #[arg(long, value_name = "TOKEN", conflicts_with_all = ["bytes", "direction", "priority", "deadline", "lifetime"])]
    pub(crate) cancel: Option<String>,
}

pub(crate) fn reserve(context: &Context, arguments: &ReserveArguments) -> Result<(), Failure> {
    let mut connection = context.connect()?;
    if let Some(token) = &arguments.cancel {
        let done = connection.call(request::CancelReservation {
            token: token.clone(),
            node: arguments.node.clone(),
        })?;
        return context.print(&done, |_: &Done| "the place is given up\n".to_owned());
    }
    let Some(bytes) = arguments.bytes else {
        return Err(Failure::new(Code::Invalid, "say --bytes SIZE"));
    };
    let reserved = connection.call(request::Reserve {
        node: arguments.node.clone(),
        direction: match arguments.direction {
            Direction::Write => "write",
            Direction::Read => "read",
        }
        .to_owned(),
        bytes,
        priority: arguments.priority,
        deadline_ms: arguments.deadline.map(whole_ms),
        lifetime_ms: arguments.lifetime.map_or(0, whole_ms),
    })?;
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
            ("lapses in", about_ms(reserved.lapses_in_ms)),
        ],
    )
}

fn about(ms: u64) -> String {
    format!("about {}", about_ms(ms))
}

/// A time for people, from milliseconds.
pub(crate) fn about_ms(ms: u64) -> String {
    human::micros(ms.saturating_mul(1000))
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `500ms`, `30s`, `5m`, `2h`; seconds without a unit.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let unknown = || format!("{text:?} is no time such as 500ms, 30s, 5m or 2h");
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| unknown())?;
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(unknown()),
    };
    let ms = number.checked_mul(unit_ms);
    ms.map(Duration::from_millis).ok_or_else(unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        assert_eq!(parse_time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_time("2"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_time("0s"), Ok(Duration::ZERO));
        for bad in [
            "",
            "s",
            "-1s",
            "1y",
            "99999999999999999999h",
            "18446744073709551615h",
        ] {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
    }
}
