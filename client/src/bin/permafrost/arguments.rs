//! Arguments that several commands have.

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, ValueEnum};
use permafrost_agent::host::arguments::parse_time;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::names::checkpoint_name;

/// Number of nodes on which a dump must be durable before it is acknowledged.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Durability {
    /// One; repair makes the others later
    Local,
    /// More than half of the copies
    Quorum,
    /// All copies
    All,
}

impl Durability {
    /// Returns the word of the control protocol; empty for the node's default.
    pub(crate) fn word(chosen: Option<Self>) -> String {
        match chosen {
            None => "",
            Some(Self::Local) => "local",
            Some(Self::Quorum) => "quorum",
            Some(Self::All) => "all",
        }
        .to_owned()
    }
}

/// Parses the arguments of a command, behind its name, so that every option not named has its default.
pub(crate) fn parse<A: Args>(line: Vec<OsString>) -> Result<A, Failure> {
    let command = A::augment_args(clap::Command::new("permafrost"));
    command
        .try_get_matches_from(line)
        .and_then(|matches| A::from_arg_matches(&matches))
        .map_err(|error| Failure::new(Code::Internal, error.to_string()))
}

/// Priority and deadline in a queue of dumps or restores.
#[derive(Clone, Debug, Args)]
pub(crate) struct TurnArguments {
    /// From 0, the lowest, to 11: those of a higher one go first.
    #[arg(long, value_name = "0..11", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=11))]
    pub(crate) priority: u32,
    /// It should start within this time, such as 500ms, 30s or 5m: it goes before others of its priority.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub(crate) deadline: Option<Duration>,
    #[command(flatten)]
    pub(crate) reservation: crate::reserve::ReservationArguments,
}

impl TurnArguments {
    /// Returns the deadline in milliseconds, for the control protocol.
    pub(crate) fn deadline_ms(&self) -> Option<u64> {
        let deadline = self.deadline?;
        Some(u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX))
    }
}

#[derive(Debug, Args)]
pub(crate) struct OneCheckpoint {
    /// JOB or JOB@GEN.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    pub(crate) checkpoint: String,
}
