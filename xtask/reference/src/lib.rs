//! `cargo xtask docs`: the parts of the documents that repeat types: exit codes, objects in JSON, options, events.
//!
//! A part stands between two comments in a document, `<!-- generated: PART -->` and `<!-- end -->`. It is written from
//! the definitions in the source, with their doc comments as explanations, so nothing has to be compiled for it.

#![forbid(unsafe_code)]

mod errors;
mod events;
mod options;
mod source;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use self::source::{Item, Types};

/// Documents with generated parts, below the workspace's root.
const DOCUMENTS: [&str; 6] = [
    "docs/cluster.md",
    "docs/command.md",
    "docs/configuration.md",
    "docs/errors.md",
    "docs/json.md",
    "docs/logs.md",
];

/// Beginning of the comment before a part; its name follows.
const BEGIN: &str = "<!-- generated: ";

/// The comment behind a part.
const END: &str = "<!-- end -->";

/// Directories and files whose types the documents describe. One name means one type in them.
const SOURCES: [&str; 28] = [
    "protocol/src/control",
    "protocol/src/manifest.rs",
    "protocol/src/images/stats.rs",
    "client/criu/src/rounds.rs",
    "client/criu/src/way.rs",
    "client/terminal/src/failure.rs",
    "client/src/bin/permafrost/agent.rs",
    "client/terminal/src/api.rs",
    "client/src/bin/permafrost/arguments.rs",
    "client/src/bin/permafrost/cli.rs",
    "client/src/bin/permafrost/dump/pre_copy.rs",
    "client/inspect/src/contents/compare.rs",
    "client/inspect/src/doctor/report.rs",
    "client/inspect/src/report/mod.rs",
    "client/inspect/src/top/view.rs",
    "client/operations/src/hooks.rs",
    "client/src/bin/permafrost/lazy.rs",
    "client/src/bin/permafrost/lend.rs",
    "client/src/bin/permafrost/preempt/mod.rs",
    "client/src/bin/permafrost/shrinking.rs",
    "client/src/bin/permafrost/suspension.rs",
    "client/preempt/src/shrink.rs",
    "client/preempt/src/suspend.rs",
    "client/credentials/src/pki.rs",
    "client/credentials/src/token.rs",
    "client/agent/src/host/arguments.rs",
    "client/bench/src/playground.rs",
    "server/src/arguments",
];

/// Commands that print an object with `--json`, the file of its type (empty: one of [`SOURCES`]), and the type.
const OBJECTS: [(&str, &str, &str); 38] = [
    ("`ls`", "", "Checkpoints"),
    ("`show`", "", "Detail"),
    ("`show --maps`", "", "CheckpointContents"),
    ("`diff`", "", "ContentsChange"),
    ("`put`, `pin`, `unpin`, `adopt`", "", "Checkpoint"),
    ("`get`", "", "Exported"),
    ("`lend`", "", "Lending"),
    ("`verify`", "", "Verified"),
    ("`scrub`", "", "Scrubbed"),
    ("`gc`", "", "GcReport"),
    ("`playground`", "", "Playground"),
    ("`playground`, when a process ends", "", "PlaygroundEnd"),
    ("`keys ls`, `keys rotate`, `keys destroy`", "", "KeyList"),
    (
        "`region ls`, `region add`, `region grow`, `region drain`, `region rm`",
        "",
        "RegionMedia",
    ),
    ("`retention`", "", "RetentionRules"),
    ("`prune`", "", "Pruned"),
    ("`rm`, `abort`, `reserve --cancel`", "", "Done"),
    ("`reserve`", "", "Reserved"),
    (
        "`node ls`, `node show`, `node drain`, `node undrain`, `node remove`",
        "",
        "NodeList",
    ),
    ("`node rebuild`", "", "Rebuilt"),
    ("`open`", "", "SessionOpened"),
    ("`install-criu-hooks`", "", "HookChanges"),
    ("`status`", "", "ServerStatus"),
    ("`doctor`", "", "DoctorReport"),
    ("`top --once`", "", "TopView"),
    ("`report`", "", "BugReport"),
    (
        "`dump`",
        "client/src/bin/permafrost/dump/report.rs",
        "Report",
    ),
    (
        "`restore`",
        "client/src/bin/permafrost/restore.rs",
        "Report",
    ),
    ("`preempt`", "", "Preemption"),
    ("`suspend`", "", "Suspension"),
    ("`resume`", "", "Resumption"),
    ("`shrink`", "", "Shrinkage"),
    ("`grow`", "", "Growth"),
    ("`pki deny`, `pki undeny`, `pki denied`", "", "Denials"),
    (
        "`pki issue`, `pki rotate --out`, `pki show`",
        "",
        "Certificate",
    ),
    (
        "`pki init`, `pki rotate --ca`, `pki rotate --retire`, `pki show` of a CA",
        "",
        "Authorities",
    ),
    ("`token new`", "", "New"),
    ("a failure of any command, on standard error", "", "Failure"),
];

/// Writes the generated parts of all documents.
///
/// # Errors
/// A document or a source cannot be read, or names a part or a type that there is not.
pub fn write() -> Result<()> {
    for (path, old, new) in generate()? {
        if old != new {
            fs::write(workspace().join(&path), new).with_context(|| format!("write {path}"))?;
            println!("{path}: written");
        }
    }
    Ok(())
}

/// Returns a line for each document that is not as it would be generated.
///
/// # Errors
/// Those of [`write`].
pub fn differences() -> Result<Vec<String>> {
    let stale = generate()?.into_iter().filter(|(_, old, new)| old != new);
    let line = |path| format!("{path}: a generated part is out of date: run `cargo xtask docs`");
    Ok(stale.map(|(path, _, _)| line(path)).collect())
}

/// Returns the root of the workspace, which this crate is two directories below.
fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// Returns each document's path, its text, and its text with the parts generated anew.
fn generate() -> Result<Vec<(String, String, String)>> {
    let types = Types::read(&workspace(), &SOURCES)?;
    let mut generated = Vec::new();
    for path in DOCUMENTS {
        let old =
            fs::read_to_string(workspace().join(path)).with_context(|| format!("read {path}"))?;
        let new = fill(&old, |part| render(&types, part)).with_context(|| path.to_owned())?;
        generated.push((path.to_owned(), old, new));
    }
    Ok(generated)
}

/// Replaces what stands between the comments of each part.
fn fill(document: &str, render: impl Fn(&str) -> Result<String>) -> Result<String> {
    let mut filled = String::new();
    let mut rest = document;
    while let Some(at) = rest.find(BEGIN) {
        let begin = at + BEGIN.len();
        let (part, behind) = rest[begin..]
            .split_once(" -->")
            .context("the comment before a generated part has no end")?;
        let (_, after) = behind
            .split_once(END)
            .with_context(|| format!("no {END} behind the generated part {part:?}"))?;
        let text = render(part)?;
        write!(
            filled,
            "{}{part} -->\n\n{}\n\n{END}",
            &rest[..begin],
            text.trim()
        )?;
        rest = after;
    }
    filled.push_str(rest);
    Ok(filled)
}

fn render(types: &Types, part: &str) -> Result<String> {
    match part {
        "exit codes" => exit_codes(types),
        "exit codes with cures" => errors::exit_codes(),
        "problems" => errors::problems(),
        "messages of CRIU" => errors::criu(),
        "messages" => errors::messages(),
        "events" => events::table(&workspace()),
        "commands" => commands(types),
        "objects" => objects(types),
        part => match part.split_once(" of ") {
            Some(("options", arguments)) => options::table(types, arguments),
            Some(("keys", arguments)) => options::keys(types, arguments),
            _ => bail!("there is no part {part:?} to generate"),
        },
    }
}

fn exit_codes(types: &Types) -> Result<String> {
    let mut text = "| code | `error.code` | meaning |\n| --- | --- | --- |\n".to_owned();
    for variant in types.variants("Code")? {
        let number = variant.number.context("an exit code without a number")?;
        // Code 0 is no failure: nothing prints its name.
        let name = match number {
            0 => String::new(),
            _ => format!("`{}`", variant.name),
        };
        writeln!(text, "| {number} | {name} | {} |", variant.doc)?;
    }
    Ok(text)
}

fn commands(types: &Types) -> Result<String> {
    let mut text = "| command | object |\n| --- | --- |\n".to_owned();
    for (commands, file, name) in OBJECTS {
        let title = title(file, name);
        types.at(file, name)?;
        writeln!(
            text,
            "| {commands} | [`{title}`](json.md#{}) |",
            title.to_lowercase()
        )?;
    }
    Ok(text)
}

/// Returns the name by which the documents call a type: a report has the name of its command.
fn title(file: &str, name: &str) -> String {
    if file.is_empty() {
        return name.to_owned();
    }
    let command = if file.contains("/dump/") {
        "Dump"
    } else {
        "Restore"
    };
    format!("{command}{name}")
}

fn objects(types: &Types) -> Result<String> {
    let mut described: Vec<(String, Item)> = Vec::new();
    let mut pending: Vec<(String, Item)> = Vec::new();
    for (_, file, name) in OBJECTS {
        pending.push((title(file, name), types.at(file, name)?));
    }
    pending.reverse();
    while let Some((title, item)) = pending.pop() {
        if described.iter().any(|(known, _)| *known == title) {
            continue;
        }
        for field in item.fields() {
            if let Some(inner) = types.find(&field.inner) {
                pending.push((field.inner.clone(), inner.clone()));
            }
        }
        described.push((title, item));
    }
    described.sort_by(|a, b| a.0.cmp(&b.0));
    let mut text = String::new();
    for (title, item) in &described {
        writeln!(text, "## {title}\n\n{}\n", item.doc)?;
        match &item.variants {
            Some(variants) => {
                writeln!(text, "| value | meaning |\n| --- | --- |")?;
                // A failure never has the exit code 0.
                for variant in variants.iter().filter(|one| one.number != Some(0)) {
                    writeln!(text, "| `{}` | {} |", variant.name, variant.doc)?;
                }
            }
            None => {
                writeln!(text, "| field | type | meaning |\n| --- | --- | --- |")?;
                for field in item.fields() {
                    if field.doc.is_empty() {
                        bail!("the field {} of {title} has no doc comment", field.name);
                    }
                    let kind = field.kind(types.find(&field.inner).is_some());
                    writeln!(text, "| `{}` | {kind} | {} |", field.name, field.doc)?;
                }
            }
        }
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_replaced_and_the_rest_stays() {
        let document = "a\n<!-- generated: x -->\nold\n<!-- end -->\nb\n";
        let filled = fill(document, |part| Ok(format!("{part}!\n"))).unwrap();
        assert_eq!(
            filled,
            "a\n<!-- generated: x -->\n\nx!\n\n<!-- end -->\nb\n"
        );
        assert_eq!(
            fill(&filled, |part| Ok(format!("{part}!\n"))).unwrap(),
            filled,
            "a second time changes nothing"
        );
    }

    #[test]
    fn a_part_without_an_end_or_a_renderer_is_an_error() {
        assert!(fill("<!-- generated: x -->\n", |_| Ok(String::new())).is_err());
        let types = Types::default();
        assert!(render(&types, "nothing").is_err());
    }
}
