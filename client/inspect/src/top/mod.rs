//! `permafrost top`: queues, transfers and nodes, live.

mod look;
mod screen;
mod view;

use std::io::{self, IsTerminal as _};
use std::time::{Duration, Instant};

use clap::Args;
use permafrost_terminal::api::ApiArguments;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;

use look::Looker;
use screen::Screen;
pub use view::{DumpLine, NodeLine, NodeQueue, QueueLine, TopView, TransferLine};

/// Help of `permafrost top`.
pub const TOP_EXAMPLES: &str = "\
Shows, of the node that is asked, the queues of dumps and restores, the transfers that run with their rates and the time \
that they have left, and the dumps by job; of all nodes, their room and what waits there. Rates are averages since the \
transfer began; the time left follows from its rate and the bytes that it said it would move. q, Esc or Ctrl-C ends it.

Over --api a node tells queues and nodes, and not its single transfers: those it tells on its own machine only.

Examples:
    permafrost top
    permafrost top --once                     one frame as text, for scripts
    permafrost top --once --json | jq '.nodes[] | select(.state != \"up\")'
    permafrost top --api https://n1:7119 --api-token-file token --api-ca ca.pem
";

/// Smallest and largest time between two looks at the node.
const INTERVALS: std::ops::RangeInclusive<f64> = 0.2..=3600.0;

/// Columns of a frame that is printed as text, where no terminal has another number.
const TEXT_COLUMNS: u16 = 120;

/// Arguments of `permafrost top`.
#[derive(Debug, Args)]
pub struct TopArguments {
    /// Print one frame as text, and end. With --json, as an object.
    #[arg(long)]
    once: bool,
    /// Time between two looks, seconds.
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    interval: Duration,
    #[command(flatten)]
    api: ApiArguments,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if INTERVALS.contains(&seconds) {
        return Ok(Duration::from_secs_f64(seconds));
    }
    Err(format!(
        "say {} to {} seconds",
        INTERVALS.start(),
        INTERVALS.end()
    ))
}

/// Runs `permafrost top`.
///
/// # Errors
/// The first look fails; standard output is no terminal, and `--once` is not given.
pub fn top(context: &Context, arguments: &TopArguments) -> Result<(), Failure> {
    let looker = Looker::new(context, &arguments.api)?;
    if arguments.once || context.json {
        let view = looker.look()?;
        return context.print(&view, |view| screen::text(view, TEXT_COLUMNS));
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return Err(
            Failure::new(Code::Invalid, "standard input and output are no terminal")
                .hint("--once prints one frame as text"),
        );
    }
    let interrupts = Interrupts::install()?;
    let mut view = looker.look()?;
    let mut screen = Screen::open()?;
    let mut next = Instant::now() + arguments.interval;
    loop {
        screen.draw(&view)?;
        if screen.is_left(next, &interrupts)? {
            return Ok(());
        }
        if Instant::now() >= next {
            match looker.look() {
                Ok(fresh) => view = fresh,
                // The last frame stays, with the reason: a daemon may be restarted under it.
                Err(failure) => view.problem = Some(failure.message),
            }
            // A look that takes longer than the interval leaves time for keys.
            next = Instant::now() + arguments.interval;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_limits() {
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "NaN", "1e9", "soon", ""] {
            assert!(parse_interval(bad).is_err(), "{bad}");
        }
    }
}
