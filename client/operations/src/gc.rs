//! `permafrost gc`: frees the space that removed checkpoints have left between others.

use clap::Args;
use permafrost_protocol::control::{GcReport, RegionGc, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::progress::ProgressDisplay;

/// Help text behind the options of `permafrost gc`.
pub const GC_EXAMPLES: &str = "\
Checkpoints share segments of the region, and a segment stays in use while one of its pages does. Cleaning moves the \
pages that are in use together; nothing else changes. permafrostd does so by itself when a region is half full \
(--clean-interval); this does it now. Through an agent every node that it knows does it.

Examples:
    permafrost gc --dry-run        what is in use, and what cleaning would free
    permafrost gc
";

/// Arguments of `permafrost gc`.
#[derive(Debug, Args)]
pub struct GcArguments {
    /// Measure only; move nothing.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `permafrost gc`.
///
/// # Errors
/// The failure of the command.
pub fn gc(context: &Context, arguments: &GcArguments) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let mut connection = context.connect()?;
    interrupts.end(&connection)?;
    let mut progress = ProgressDisplay::new(context, "gc");
    let dry_run = arguments.dry_run;
    let report = connection
        .call_with(request::Gc { dry_run }, None, &mut |so_far| {
            progress.update(so_far.done_bytes, so_far.total_bytes);
        })
        .map_err(|error| interrupts.explain(error.into()))?;
    drop(progress);
    context.print(&report, |report| human_report(report, dry_run))
}

fn human_report(report: &GcReport, dry_run: bool) -> String {
    let lines = report.regions.iter().map(|region| line(region, dry_run));
    lines.collect::<Vec<_>>().join("\n")
}

fn line(region: &RegionGc, dry_run: bool) -> String {
    let node = match region.node.as_str() {
        "" => String::new(),
        node => format!("{node}: "),
    };
    let mut text = format!(
        "{node}{} in use for {} of pages",
        human::bytes(region.used_bytes),
        human::bytes(region.live_bytes)
    );
    if region.skipped_bytes > 0 {
        text.push_str(&format!(
            ", {} skipped (dumps under way, readers or damage)",
            human::bytes(region.skipped_bytes)
        ));
    }
    text.push_str(&if dry_run {
        format!(
            "; cleaning would free about {}",
            human::bytes(region.reclaimable_bytes)
        )
    } else {
        format!(
            "; freed {}, for {} moved",
            human::bytes(region.freed_bytes),
            human::bytes(region.written_bytes)
        )
    });
    if region.damaged_segments > 0 {
        text.push_str(&format!(
            "; {} left because of damaged pages: run `permafrost scrub`",
            human::count(region.damaged_segments, "segment", "segments")
        ));
    }
    text
}
