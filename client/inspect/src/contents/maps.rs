//! `permafrost show --maps`.

use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control::{
    CheckpointContents, MappingContents, PageCounts, ProcessContents, request,
};
use permafrost_terminal::api::ApiArguments;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::Failure;
use permafrost_terminal::human;
use permafrost_terminal::names::name_of;
use permafrost_terminal::table::{Align, Table};

/// Prints the address spaces of a checkpoint, mapping by mapping. `pid` restricts them to one process, unless it is 0.
/// With an address in `api` a node's API is asked.
///
/// # Errors
/// The failure of the command.
pub fn maps(
    context: &Context,
    checkpoint: &str,
    pid: u32,
    api: &ApiArguments,
) -> Result<(), Failure> {
    if api.api.is_some() {
        let answer = super::elsewhere::whole(&api.client(context)?, checkpoint, pid)?;
        return context.print(&answer, |answer| {
            human_maps(&super::elsewhere::contents(answer))
        });
    }
    let contents = super::ask(
        context,
        request::Describe {
            checkpoint: checkpoint.to_owned(),
            with_parent: true,
            pid,
            ..request::Describe::default()
        },
    )?;
    context.print(&contents, human_maps)
}

pub(super) fn human_maps(contents: &CheckpointContents) -> String {
    let record = contents.checkpoint.clone().unwrap_or_default();
    let mut text = name_of(&record);
    text.push_str(match (&contents.compared_with, record.parent_generation) {
        (Some(_), _) => "",
        (None, 0) => ", dumped without a parent",
        (None, _) => ", whose parent is no longer there: what they share is not known",
    });
    if let Some(parent) = &contents.compared_with {
        text.push_str(&format!(", compared with {}", name_of(parent)));
    }
    text.push('\n');
    for process in &contents.processes {
        text.push('\n');
        text.push_str(&human_process(process));
    }
    if !contents.shared_memory.is_empty() {
        let mut table = Table::new([
            ("SHARED MEMORY", Align::Left),
            ("PAGES", Align::Right),
            ("STORED", Align::Right),
            ("SHARED", Align::Right),
            ("ZERO", Align::Right),
        ]);
        for shared in &contents.shared_memory {
            let [pages, stored, equal, zero] = columns(shared.pages.unwrap_or_default());
            table.row([format!("{:#x}", shared.id), pages, stored, equal, zero]);
        }
        text.push('\n');
        text.push_str(&table.render());
    }
    text
}

fn human_process(process: &ProcessContents) -> String {
    let mut text = format!("process {}", process.pid);
    for (what, value) in [("", &process.program), ("", &process.executable)] {
        if !value.is_empty() {
            text.push_str(&format!("{what}, {value}"));
        }
    }
    text.push('\n');
    let mut table = Table::new([
        ("RANGE", Align::Left),
        ("", Align::Left),
        ("SIZE", Align::Right),
        ("PAGES", Align::Right),
        ("STORED", Align::Right),
        ("SHARED", Align::Right),
        ("ZERO", Align::Right),
        ("WHAT", Align::Left),
    ]);
    let mut listed = 0;
    for mapping in &process.mappings {
        let counts = mapping.pages.unwrap_or_default();
        listed += counts.pages;
        let [pages, stored, equal, zero] = columns(counts);
        table.row([
            format!("{:012x}-{:012x}", mapping.start, mapping.end),
            mapping.permissions.clone(),
            human::bytes(mapping.end.saturating_sub(mapping.start)),
            pages,
            stored,
            equal,
            zero,
            what(mapping),
        ]);
    }
    let all = process.pages.unwrap_or_default();
    if process.mappings.is_empty() || all.pages > listed {
        let [pages, stored, equal, zero] = columns(all);
        let name = if process.mappings.is_empty() {
            "the whole process: a pre-dump has no images of mappings"
        } else {
            "the whole process, with pages outside of these mappings"
        };
        table.row([
            "all".to_owned(),
            String::new(),
            String::new(),
            pages,
            stored,
            equal,
            zero,
            name.to_owned(),
        ]);
    }
    text.push_str(&table.render());
    text
}

/// Formats the numbers of pages: present, stored, equal to the parent's, zero; in bytes.
fn columns(counts: PageCounts) -> [String; 4] {
    let size = |pages: u64| match pages {
        0 => "-".to_owned(),
        pages => human::bytes(pages.saturating_mul(PAGE_BYTES)),
    };
    [
        size(counts.pages),
        size(counts.stored()),
        counts.equal.map_or_else(|| "?".to_owned(), size),
        size(counts.zero),
    ]
}

/// Returns the words for a mapping: its file, or its kind.
pub(super) fn what(mapping: &MappingContents) -> String {
    let kind = mapping.kind.as_str();
    match (kind, mapping.path.as_str(), mapping.shared_memory) {
        ("file", "", _) => "file".to_owned(),
        ("file", path, _) => path.to_owned(),
        (kind, "", 0) => format!("[{kind}]"),
        (kind, "", id) => format!("[{kind} {id:#x}]"),
        (kind, path, _) => format!("[{kind}] {path}"),
    }
}
