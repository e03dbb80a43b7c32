//! The configuration file: TOML, with the names of the options as its keys.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use clap::error::ContextKind;
use clap::{Arg, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{
    LayerValue, Origin, Problem, check, configurable, is_of, is_repeatable, is_secret, name_of,
    strings,
};

/// Largest file, bytes: one with every option has some ten thousand.
const MOST_BYTES: u64 = 1 << 20;

/// Reads the file and checks every value in it.
///
/// # Errors
/// Everything that is wrong in it.
pub(super) fn read(
    path: &Path,
    command: &Command,
) -> Result<BTreeMap<String, LayerValue>, Vec<Problem>> {
    let (text, mode) = load(path).map_err(|problem| vec![problem])?;
    let document = Document { path, text: &text };
    let table = DeTable::parse(&text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        // Its own form would repeat the line, which may have a secret.
        vec![document.problem(at, format!("this is not TOML: {}", error.message()))]
    })?;
    let (mut values, mut problems) = (BTreeMap::new(), Vec::new());
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    for (key, value) in entries {
        match document.option(command, key, value) {
            Ok((arg, _)) if is_secret(arg) && mode & 0o007 != 0 => {
                let message = format!(
                    "{key} may be a secret, and every user can read this file: chmod o-rwx it",
                    key = key.get_ref()
                );
                problems.push(document.problem(key.span().start, message));
            }
            Ok((arg, value)) => {
                values.insert(name_of(arg).to_owned(), value);
            }
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() {
        Ok(values)
    } else {
        Err(problems)
    }
}

/// Returns the text of the file, and the permission bits. A file that others can write is refused: what is in it is
/// executed (`key-command`), or decides which certificates are trusted.
fn load(path: &Path) -> Result<(String, u32), Problem> {
    let place = path.display().to_string();
    let failed = |error: std::io::Error| {
        let message = format!("cannot be read: {error}; --config names another file, or `none`");
        Problem::new(&place, message)
    };
    let file = File::open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() || found.len() > MOST_BYTES {
        let message = format!("is no regular file of at most {MOST_BYTES} bytes");
        return Err(Problem::new(&place, message));
    }
    let (owner, mode) = (found.uid(), found.mode() & 0o7777);
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        let message = format!(
            "belongs to user {owner}: chown it to root, or to the user that permafrostd runs as"
        );
        return Err(Problem::new(&place, message));
    }
    if mode & 0o022 != 0 {
        let message = format!("others can write it (mode {mode:04o}): chmod go-w it");
        return Err(Problem::new(&place, message));
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    match String::from_utf8(bytes) {
        Ok(text) => Ok((text, mode)),
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            let bytes = error.into_bytes();
            let text = String::from_utf8_lossy(bytes.get(..valid).unwrap_or_default());
            let document = Document { path, text: &text };
            Err(document.problem(valid, "this is not UTF-8".to_owned()))
        }
    }
}

/// Text of a file, for the positions in it.
struct Document<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Document<'_> {
    /// Returns line and column of a byte, both from 1; columns are characters.
    fn position(&self, at: usize) -> (usize, usize) {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default();
        (line, column.chars().count() + 1)
    }

    fn place(&self, at: usize) -> String {
        let (line, column) = self.position(at);
        format!("{}:{line}:{column}", self.path.display())
    }

    fn problem(&self, at: usize, message: String) -> Problem {
        Problem::new(self.place(at), message)
    }

    /// Returns the option that a key names, and its value.
    fn option<'c>(
        &self,
        command: &'c Command,
        key: &Spanned<std::borrow::Cow<'_, str>>,
        value: &Spanned<DeValue<'_>>,
    ) -> Result<(&'c Arg, LayerValue), Problem> {
        let name: &str = key.get_ref();
        let at = key.span().start;
        let Some(arg) = configurable(command).find(|arg| name_of(arg) == name) else {
            return Err(self.problem(at, unknown(command, name)));
        };
        let start = value.span().start;
        let values = values_of(arg, value.get_ref());
        let values = values.map_err(|message| self.problem(start, message))?;
        let needs = check(command, arg, &values);
        let needs = needs.map_err(|message| self.problem(start, message))?;
        let layer = LayerValue {
            values,
            origin: Origin::File {
                path: PathBuf::from(self.path),
                line: self.position(at).0,
            },
            place: self.place(at),
            needs,
        };
        Ok((arg, layer))
    }
}

/// Returns the message for a key that is no option.
fn unknown(command: &Command, name: &str) -> String {
    let is_option = |arg: &&Arg| arg.get_long() == Some(name);
    if command.get_arguments().any(|arg| is_option(&arg)) {
        return format!("{name} can only be given on the command line: remove it here");
    }
    let written = [String::new(), format!("--{name}=x")];
    let guess = command.clone().try_get_matches_from(written).err();
    let guess = guess.map_or_else(Vec::new, |error| strings(&error, ContextKind::SuggestedArg));
    match guess.first() {
        Some(guess) => format!(
            "there is no option {name}: did you mean {}?",
            guess.trim_start_matches('-')
        ),
        None => format!(
            "there is no option {name}: remove it, or see `permafrostd --print-default-config` for those there are"
        ),
    }
}

/// Returns a value as on the command line.
fn values_of(arg: &Arg, value: &DeValue<'_>) -> Result<Vec<String>, String> {
    match value {
        DeValue::Array(values) if is_repeatable(arg) => values
            .iter()
            .map(|value| text_of(arg, value.get_ref()))
            .collect(),
        value => text_of(arg, value).map(|value| vec![value]),
    }
}

fn text_of(arg: &Arg, value: &DeValue<'_>) -> Result<String, String> {
    let name = name_of(arg);
    let is_flag = is_of::<bool>(arg);
    let wrong = |found: &str| {
        let expected = if is_flag {
            "true or false"
        } else if is_repeatable(arg) {
            "a list such as [\"…\", \"…\"]"
        } else if is_of::<PathBuf>(arg) || is_of::<String>(arg) {
            "text in quotation marks"
        } else {
            "text in quotation marks, or a number without"
        };
        Err(format!("{name} is {found}: write {expected}"))
    };
    match value {
        DeValue::Boolean(value) if is_flag => Ok(value.to_string()),
        _ if is_flag => wrong("no truth value"),
        DeValue::String(text) => Ok(text.as_ref().to_owned()),
        DeValue::Integer(_) if is_of::<PathBuf>(arg) || is_of::<String>(arg) => wrong("a number"),
        DeValue::Integer(number) => {
            let parsed = i64::from_str_radix(number.as_str(), number.radix());
            let parsed = parsed.map_err(|_| format!("{name}: the number is too large"));
            parsed.map(|number| number.to_string())
        }
        DeValue::Float(_) => wrong("a number with a fraction"),
        DeValue::Boolean(_) => wrong("a truth value"),
        DeValue::Datetime(_) => wrong("a date"),
        DeValue::Array(_) => wrong("a list"),
        DeValue::Table(_) => Err(format!(
            "{name} is a section: options have no sections, write `{name} = …`"
        )),
    }
}
