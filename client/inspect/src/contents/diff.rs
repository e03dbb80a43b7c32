//! `permafrost diff`.

use clap::Args;
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::request;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::names::{checkpoint_name, name_of};
use permafrost_terminal::table::{Align, Table};

use super::compare::{ContentsChange, FileChange, PagesChange, ProcessChange};

/// Help of `permafrost diff`.
pub const DIFF_EXAMPLES: &str = "\
Processes are compared by pid, mappings by their first address, pages by their addresses, files by descriptor. Pages are \
compared by the checksums that are stored with them (CRC32: one of four billion changes is missed), so no page is read, \
and nothing comes back from an object store.

Who may see both checkpoints with `permafrost show` may compare them; they have to be of one job.

Examples:
    permafrost diff train@3 train@4
    permafrost diff train@3 train             the newest
    permafrost diff train@3 train@4 --json | jq .pages
";

/// Arguments of `permafrost diff`.
#[derive(Debug, Args)]
pub struct DiffArguments {
    /// Earlier checkpoint, JOB@GEN.
    #[arg(value_name = "A", value_parser = checkpoint_name)]
    before: String,
    /// Later checkpoint of the same job: JOB@GEN, or JOB for its newest.
    #[arg(value_name = "B", value_parser = checkpoint_name)]
    after: String,
    /// Only this process.
    #[arg(long, short, value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
}

/// Runs `permafrost diff`.
///
/// # Errors
/// The failure of the command.
pub fn diff(context: &Context, arguments: &DiffArguments) -> Result<(), Failure> {
    let contents = super::ask(
        context,
        request::Describe {
            checkpoint: arguments.after.clone(),
            before: arguments.before.clone(),
            pid: arguments.pid.unwrap_or(0),
            ..request::Describe::default()
        },
    )?;
    let (Some(after), Some(before)) = (&contents.checkpoint, &contents.compared_with) else {
        return Err(Failure::new(
            Code::Internal,
            "the answer is not about two checkpoints",
        ));
    };
    let change = ContentsChange::of(&contents, name_of(before), name_of(after));
    context.print(&change, human_change)
}

fn human_change(change: &ContentsChange) -> String {
    let mut text = format!(
        "{} to {}: {}\n",
        change.before,
        change.after,
        human_pages(&change.pages)
    );
    if change.is_nothing() {
        text.push_str("nothing differs\n");
    }
    for process in &change.processes {
        text.push('\n');
        text.push_str(&human_process(process));
    }
    if !change.shared_memory.is_empty() {
        let mut table = Table::new([
            ("SHARED MEMORY", Align::Left),
            ("", Align::Left),
            ("CHANGED", Align::Right),
            ("NEW", Align::Right),
            ("GONE", Align::Right),
            ("EQUAL", Align::Right),
        ]);
        for shared in &change.shared_memory {
            let [changed, new, gone, equal] = columns(&shared.pages);
            table.row([
                format!("{:#x}", shared.id),
                shared.change.to_owned(),
                changed,
                new,
                gone,
                equal,
            ]);
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    text
}

fn human_pages(pages: &PagesChange) -> String {
    let part = |pages: u64, what: &str| {
        format!(
            "{} {what} ({})",
            human::count(pages, "page", "pages"),
            human::bytes(pages.saturating_mul(PAGE_BYTES))
        )
    };
    [
        part(pages.changed, "changed"),
        part(pages.new, "new"),
        part(pages.gone, "gone"),
        part(pages.equal, "equal"),
    ]
    .join(", ")
}

/// Formats the numbers of pages that changed, are new, are gone, and are equal.
fn columns(pages: &PagesChange) -> [String; 4] {
    [pages.changed, pages.new, pages.gone, pages.equal].map(|pages| match pages {
        0 => "-".to_owned(),
        pages => pages.to_string(),
    })
}

fn human_process(process: &ProcessChange) -> String {
    let mut text = format!("process {}", process.pid);
    match (&process.program_before, process.program.as_str()) {
        (Some(before), program) => text.push_str(&format!(", {before} before, now {program}")),
        (None, "") => {}
        (None, program) => text.push_str(&format!(", {program}")),
    }
    match process.change {
        "changed" | "other" => {}
        change => text.push_str(&format!(", {change}")),
    }
    text.push_str(&format!(": {}\n", human_pages(&process.pages)));
    if !process.mappings.is_empty() {
        let mut table = Table::new([
            ("  MAPPING", Align::Left),
            ("", Align::Left),
            ("", Align::Left),
            ("CHANGED", Align::Right),
            ("NEW", Align::Right),
            ("GONE", Align::Right),
            ("EQUAL", Align::Right),
            ("WHAT", Align::Left),
        ]);
        for mapping in &process.mappings {
            let [changed, new, gone, equal] = columns(&mapping.pages);
            let was = mapping
                .end_before
                .map_or_else(String::new, |end| format!(" (ended at {end:012x})"));
            table.row([
                format!("  {:012x}-{:012x}", mapping.start, mapping.end),
                mapping.permissions.clone(),
                mapping.change.to_owned(),
                changed,
                new,
                gone,
                equal,
                format!("{}{was}", mapping.what),
            ]);
        }
        text.push_str(&table.render());
    }
    if !process.files.is_empty() {
        let mut table = Table::new([
            ("  FILE", Align::Right),
            ("", Align::Left),
            ("KIND", Align::Left),
            ("", Align::Left),
        ]);
        for file in &process.files {
            table.row([
                format!("  {}", file.descriptor),
                file.change.to_owned(),
                file.kind.clone(),
                human_file(file),
            ]);
        }
        text.push_str(&table.render());
    }
    text
}

fn human_file(file: &FileChange) -> String {
    let mut text = file.path.clone();
    if let Some(before) = &file.path_before {
        text.push_str(&format!(" (before: {before})"));
    }
    if let ("moved", Some(from), Some(to)) =
        (file.change, file.position_before_bytes, file.position_bytes)
    {
        text.push_str(&format!(" from byte {from} to {to}"));
    }
    text
}
