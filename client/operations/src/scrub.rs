//! `permafrost scrub`: verifies checkpoints and heals damaged pages.

use clap::Args;
use permafrost_protocol::control::{DamagedCheckpoint, Scrubbed, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::names::checkpoint_name;
use permafrost_terminal::progress::ProgressDisplay;

/// Help text behind the options of `permafrost scrub`.
pub const SCRUB_EXAMPLES: &str = "\
permafrostd does so by itself once in --scrub-period; this does it now, for what the node holds. A damaged \
checkpoint gets a fresh copy from another node that has one. Where none can give it, the checkpoint stays as \
it is, is shown as damaged, is not compared with by the next dump, and is looked at again every hour. \
`permafrost verify` only reads.

Of everything, pages in a cold tier are counted as not verified, and a list of the object store shows that their \
objects are there; --cold fetches and verifies them.

Exit code 7 when something is damaged and was not mended.

Examples:
    permafrost scrub               everything
    permafrost scrub train@3       one checkpoint
    permafrost scrub --cold        everything, and what is in a cold tier
";

/// Arguments of `permafrost scrub`.
#[derive(Debug, Args)]
pub struct ScrubArguments {
    /// JOB or JOB@GEN; everything without it.
    #[arg(value_name = "JOB[@GEN]", value_parser = checkpoint_name)]
    checkpoint: Option<String>,
    /// Fetch pages in a cold tier, too, and verify them. For JOB and JOB@GEN that is always done.
    #[arg(long)]
    cold: bool,
}

/// Runs `permafrost scrub`.
///
/// # Errors
/// The failure of the command.
pub fn scrub(context: &Context, arguments: &ScrubArguments) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let mut progress = ProgressDisplay::new(context, "scrub");
    let scrubbed = connection
        .call_with(
            request::Scrub {
                checkpoint: arguments.checkpoint.clone().unwrap_or_default(),
                cold: arguments.cold,
            },
            None,
            &mut |so_far| progress.update(so_far.done_bytes, so_far.total_bytes),
        )
        .map_err(|error| interrupts.explain(error.into()))?;
    drop(progress);
    context.print(&scrubbed, human_scrubbed)?;
    match scrubbed.damaged.iter().filter(|damaged| !damaged.mended).count() {
        0 => Ok(()),
        left => Err(Failure::new(
            Code::Corrupt,
            format!(
                "{} damaged and not mended",
                human::count(left as u64, "checkpoint is", "checkpoints are")
            ),
        )
        .hint("restore an older generation, or dump the job again if it still runs; the medium may be failing")),
    }
}

fn human_scrubbed(scrubbed: &Scrubbed) -> String {
    let mut text = format!(
        "{} and {} read",
        human::count(scrubbed.checkpoints, "checkpoint", "checkpoints"),
        human::count(scrubbed.pages, "page", "pages"),
    );
    if scrubbed.damaged.is_empty() {
        text.push_str(": every checksum matches");
    }
    text.push_str(&not_verified(scrubbed.unverified_pages, &scrubbed.away));
    for damaged in &scrubbed.damaged {
        text.push('\n');
        text.push_str(&one(damaged));
    }
    text
}

/// Says how many pages in a cold tier were not verified, and why not.
pub fn not_verified(pages: u64, away: &str) -> String {
    if pages == 0 {
        return String::new();
    }
    let pages = human::count(pages, "page", "pages");
    match away {
        "" => format!("\n{pages} in the cold tier not verified (--cold fetches and verifies them)"),
        away => format!("\n{pages} not verified: {away}"),
    }
}

fn one(damaged: &DamagedCheckpoint) -> String {
    let node = match damaged.node.as_str() {
        "" => String::new(),
        node => format!(" on {node}"),
    };
    let outcome = if damaged.mended {
        "mended: a fresh copy has its place".to_owned()
    } else {
        format!("not mended: {}", damaged.reason)
    };
    let mut text = format!("{}{node} is damaged, {outcome}", damaged.checkpoint);
    for place in &damaged.damage {
        text.push_str("\n    ");
        text.push_str(place);
    }
    text
}
