//! `permafrost prune`: removes what the rules of retention do not keep.

use clap::Args;
use permafrost_protocol::control::{Pruned, PrunedGeneration, request};
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::names::{job_name, namespace};
use permafrost_terminal::table::{Align, Table};

/// Help text behind the options of `permafrost prune`.
pub const PRUNE_EXAMPLES: &str = "\
Rules come from `permafrost retention`. permafrostd applies them by itself (--retention-interval); this does it now. \
Whatever the rules say, these stay: what is pinned, what is being read, the newest generation of a job, and the newest \
that can be restored.

Exits 4 if something that goes by the rules could not be removed; the table says why.

Examples:
    permafrost prune --dry-run                     what would go, and by which rule each one stays
    permafrost prune --namespace team-a
    permafrost prune --job team-a/train --dry-run
";

/// Arguments of `permafrost prune`.
#[derive(Debug, Args)]
pub struct PruneArguments {
    /// Only this namespace.
    #[arg(long, value_name = "NS", value_parser = namespace)]
    namespace: Option<String>,
    /// Only this job. The quota of its namespace is left out.
    #[arg(long, value_name = "JOB", value_parser = job_name, conflicts_with = "namespace")]
    job: Option<String>,
    /// Remove nothing; only say what would be removed.
    #[arg(long)]
    dry_run: bool,
}

/// Runs `permafrost prune`.
///
/// # Errors
/// The failure of the command.
pub fn prune(context: &Context, arguments: &PruneArguments) -> Result<(), Failure> {
    let dry_run = arguments.dry_run;
    let pruned = context.connect()?.call(request::Prune {
        namespace: arguments.namespace.clone().unwrap_or_default(),
        job: arguments.job.clone().unwrap_or_default(),
        dry_run,
    })?;
    context.print(&pruned, |pruned| human_pruned(pruned, dry_run))?;
    let failed = pruned
        .generations
        .iter()
        .filter(|one| !one.error.is_empty());
    match failed.count() {
        0 => Ok(()),
        failed => Err(Failure::new(
            Code::Conflict,
            format!(
                "{} not removed",
                human::count(failed as u64, "checkpoint was", "checkpoints were")
            ),
        )
        .hint("`permafrost prune --json` says why")),
    }
}

fn human_pruned(pruned: &Pruned, dry_run: bool) -> String {
    let mut table = Table::new([
        ("CHECKPOINT", Align::Left),
        ("CREATED", Align::Left),
        ("COUNTS", Align::Right),
        ("", Align::Left),
        ("RULE", Align::Left),
    ]);
    for one in &pruned.generations {
        table.row([
            format!("{}@{}", one.job, one.generation),
            human::date(one.created_unix_ms),
            human::bytes(one.bytes),
            verdict(one, dry_run).to_owned(),
            match one.error.as_str() {
                "" => one.rule.clone(),
                error => format!("{}: {error}", one.rule),
            },
        ]);
    }
    let removed = human::count(pruned.removed, "checkpoint", "checkpoints");
    let bytes = human::bytes(pruned.removed_bytes);
    let done = match dry_run {
        true => format!("{removed} would be removed, which count {bytes}"),
        false => format!("{removed} removed, which counted {bytes}"),
    };
    format!("{}{done}\n", table.render())
}

fn verdict(one: &PrunedGeneration, dry_run: bool) -> &'static str {
    match (one.goes, one.error.is_empty(), dry_run) {
        (false, ..) => "stays",
        (true, false, _) => "not removed",
        (true, true, true) => "goes",
        (true, true, false) => "removed",
    }
}
