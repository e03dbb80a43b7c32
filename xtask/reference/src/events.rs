//! Events of the log: every error, warning and notice that the daemons write, with its id.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Directories of the crates whose code runs in `permafrostd` and `permafrost agent`, or beside them.
const DIRECTORIES: [&str; 6] = [
    "client",
    "criu-plugin",
    "pmem",
    "protocol",
    "scheduling",
    "server",
];

/// Macros whose lines have an id. Those below `info` are for developers, and change with the code.
const LEVELS: [&str; 3] = ["error", "warn", "info"];

/// Fields that every line has in the JSON form, beside `event`.
const OWN_FIELDS: [&str; 6] = ["timestamp", "level", "message", "target", "span", "spans"];

/// A line that a daemon logs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Event {
    level: String,
    /// Format string of the message.
    message: String,
    /// Names of the fields beside `event` and the message.
    fields: Vec<String>,
    /// Crates that log it, without `permafrost-`.
    crates: BTreeSet<String>,
}

/// Returns the table of all events, sorted by id.
///
/// # Errors
/// A call has no id, or two that differ have the same one.
pub(crate) fn table(root: &Path) -> Result<String> {
    let mut text = "| event | level | message | fields | crate |\n".to_owned();
    text.push_str("| --- | --- | --- | --- | --- |\n");
    for (id, event) in &read(root)? {
        let fields: Vec<_> = (event.fields.iter())
            .map(|name| format!("`{name}`"))
            .collect();
        let crates: Vec<_> = event.crates.iter().map(String::as_str).collect();
        writeln!(
            text,
            "| `{id}` | {} | {} | {} | {} |",
            event.level,
            event.message.replace('|', "\\|"),
            fields.join(", "),
            crates.join(", "),
        )?;
    }
    Ok(text)
}

fn read(root: &Path) -> Result<BTreeMap<String, Event>> {
    let mut sources = Vec::new();
    for directory in DIRECTORIES {
        find_sources(&root.join(directory), "", &mut sources)?;
    }
    let (mut events, mut wrong) = (BTreeMap::new(), Vec::new());
    for (of, path) in sources {
        let place = path.strip_prefix(root).unwrap_or(&path).display();
        let text = fs::read_to_string(&path).with_context(|| format!("read {place}"))?;
        if let Err(error) = add(&text, &of, &mut events) {
            wrong.push(format!("{place}: {error}"));
        }
    }
    if !wrong.is_empty() {
        bail!("{}", wrong.join("\n"));
    }
    Ok(events)
}

/// Finds the source files below a directory, without those of tests, each with its crate.
fn find_sources(directory: &Path, of: &str, found: &mut Vec<(String, PathBuf)>) -> Result<()> {
    let manifest = fs::read_to_string(directory.join("Cargo.toml")).unwrap_or_default();
    let name = (manifest.lines()).find_map(|line| line.strip_prefix("name = \"permafrost-"));
    let of = name.map_or(of, |name| name.trim_end_matches('"'));
    let entries =
        fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_of_tests = ["tests", "benches", "examples"].contains(&&*name);
        if path.is_dir() && !is_of_tests {
            find_sources(&path, of, found)?;
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            found.push((of.to_owned(), path));
        }
    }
    Ok(())
}

/// Adds the events of a source file of a crate.
///
/// # Errors
/// A call has no id or no message, or its id is another event's.
fn add(code: &str, of: &str, events: &mut BTreeMap<String, Event>) -> Result<()> {
    let tokens: TokenStream = code
        .parse()
        .map_err(|error| anyhow::anyhow!("cannot be parsed: {error}"))?;
    let mut calls = Vec::new();
    find_calls(tokens, &mut calls)?;
    for (level, arguments) in calls {
        let (id, mut event) = event(&level, arguments)?;
        event.crates.insert(of.to_owned());
        let known = events.entry(id.clone()).or_insert_with(|| event.clone());
        if (&known.level, &known.message) != (&event.level, &event.message) {
            bail!(
                "the event {id} is another line already: {} {:?}",
                known.level,
                known.message
            );
        }
        known.crates.extend(event.crates);
        for field in event.fields {
            if !known.fields.contains(&field) {
                known.fields.push(field);
            }
        }
    }
    Ok(())
}

/// Finds the calls of the macros in [`LEVELS`], in groups and in the arguments of other macros, too. What is only
/// compiled for tests is left out.
///
/// # Errors
/// `tracing::event!` is called: its level may not be a literal.
fn find_calls(tokens: TokenStream, calls: &mut Vec<(String, TokenStream)>) -> Result<()> {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut is_of_tests = false;
    for (at, token) in tokens.iter().enumerate() {
        let before = &tokens[..at];
        let group = match token {
            TokenTree::Punct(end) if end.as_char() == ';' => {
                is_of_tests = false;
                continue;
            }
            TokenTree::Group(group) => group,
            _ => continue,
        };
        if is_of_tests {
            // The body of the item ends it.
            is_of_tests = group.delimiter() != Delimiter::Brace;
            continue;
        }
        if matches!(before, [.., TokenTree::Punct(hash)] if hash.as_char() == '#') {
            is_of_tests = group.stream().to_string().replace(' ', "") == "cfg(test)";
            continue;
        }
        let name = match before {
            [.., TokenTree::Ident(name), TokenTree::Punct(bang)] if bang.as_char() == '!' => {
                name.to_string()
            }
            _ => String::new(),
        };
        if name == "event" {
            bail!("tracing::event!: call error!, warn!, info! or debug! instead");
        } else if LEVELS.contains(&name.as_str()) {
            calls.push((name, group.stream()));
        } else {
            find_calls(group.stream(), calls)?;
        }
    }
    Ok(())
}

/// Reads the arguments of a call.
fn event(level: &str, arguments: TokenStream) -> Result<(String, Event)> {
    let shown = arguments.to_string();
    let arguments: Vec<TokenTree> = arguments.into_iter().collect();
    let parts =
        arguments.split(|token| matches!(token, TokenTree::Punct(comma) if comma.as_char() == ','));
    let (mut id, mut message, mut fields) = (None, None, Vec::new());
    for part in parts {
        match part {
            [] => {}
            [TokenTree::Literal(text)] => {
                message = Some(unquoted(&text.to_string()));
                // The rest are arguments of the message.
                break;
            }
            [TokenTree::Ident(word), TokenTree::Punct(colon), ..]
                if word == "target" && colon.as_char() == ':' => {}
            [
                TokenTree::Ident(word),
                TokenTree::Punct(_),
                TokenTree::Literal(text),
            ] if word == "event" => id = Some(unquoted(&text.to_string())),
            part => fields.push(field(part)),
        }
    }
    let id = id.with_context(|| format!("no event = \"…\" in {level}!({shown})"))?;
    let is_word = |part: &str| {
        let mut chars = part.chars();
        !part.is_empty() && chars.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    if !id.split('-').all(is_word) {
        bail!("the event {id:?} is not of small letters, digits and hyphens");
    }
    if let Some(field) = fields
        .iter()
        .find(|name| OWN_FIELDS.contains(&name.as_str()))
    {
        bail!("the field {field} of {id} has the name of one that every line has");
    }
    let message = message.with_context(|| format!("no message in {level}!({shown})"))?;
    let level = level.to_owned();
    let event = Event {
        level,
        message,
        fields,
        crates: BTreeSet::new(),
    };
    Ok((id, event))
}

/// Returns the name of a field: what stands before `=`, or in `%a.b` the path.
fn field(part: &[TokenTree]) -> String {
    let is_sign = |token: &TokenTree, sign| matches!(token, TokenTree::Punct(punct) if punct.as_char() == sign);
    let end = part.iter().position(|token| is_sign(token, '='));
    let name = &part[..end.unwrap_or(part.len())];
    let words = name
        .iter()
        .filter(|token| !is_sign(token, '%') && !is_sign(token, '?'));
    words.map(ToString::to_string).collect()
}

fn unquoted(literal: &str) -> String {
    syn::parse_str::<syn::LitStr>(literal).map_or_else(|_| literal.to_owned(), |text| text.value())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(code: &str) -> Result<BTreeMap<String, Event>> {
        let mut events = BTreeMap::new();
        add(code, "one", &mut events)?;
        Ok(events)
    }

    #[test]
    fn calls_are_found_with_their_fields() {
        let code = r#"
            fn f() {
                if x { tracing::warn!(event = "disk-slow", %error, job = a.b(1, 2), ?self.c, "disk {}", n) }
                tracing::debug!("not one of them");
                tokio::select! { _ = a => info!(target: "t", event = "started", "started"), }
            }
            #[cfg(test)]
            use a::{b, c};
            #[cfg(test)]
            mod tests { fn f() { tracing::error!("no id") } }
            #[cfg(test)]
            fn of_tests(a: (u8, u8)) -> u8 { tracing::error!("no id") }
            #[derive(Debug)]
            struct A;
            fn g() { tracing::error!(event = "ended", "ended") }"#;
        let events = events(code).unwrap();
        assert_eq!(events.len(), 3, "{events:?}");
        let slow = &events["disk-slow"];
        assert_eq!(
            (slow.level.as_str(), slow.message.as_str()),
            ("warn", "disk {}")
        );
        assert_eq!(slow.fields, ["error", "job", "self.c"]);
        assert!(events["started"].fields.is_empty());
        assert_eq!(events["ended"].level, "error");
    }

    #[test]
    fn an_id_is_one_line_that_several_places_may_log() {
        let mut events = events(r#"fn f() { warn!(event = "a", b, "text") }"#).unwrap();
        let same = r#"fn f() { warn!(event = "a", %c, b, "text") }"#;
        add(same, "two", &mut events).unwrap();
        assert_eq!(events["a"].fields, ["b", "c"]);
        let crates: Vec<_> = events["a"].crates.iter().map(String::as_str).collect();
        assert_eq!(crates, ["one", "two"]);
        for other in [
            r#"fn f() { error!(event = "a", "text") }"#,
            r#"fn f() { warn!(event = "a", "another") }"#,
        ] {
            assert!(add(other, "two", &mut events).is_err(), "{other}");
        }
    }

    #[test]
    fn a_call_without_an_id_or_with_a_bad_one_is_an_error() {
        for code in [
            r#"tracing::warn!("no id")"#,
            r#"tracing::error!(event = "Not Kebab", "text")"#,
            r#"tracing::error!(event = "", "text")"#,
            r#"tracing::error!(event = "a--b", "text")"#,
            r#"tracing::info!(event = "no-message", %error)"#,
            r#"tracing::info!(event = "two-messages", message, "text")"#,
            r#"fn f() { tracing::event!(LEVEL, "text") }"#,
            r#"tokio::select! { _ = a => { tracing::error!("no id") } }"#,
        ] {
            assert!(events(code).is_err(), "{code}");
        }
    }
}
