//! Tables of errors with causes and cures: exit codes, problems of the HTTP API, messages of CRIU, and the messages with
//! which requests are refused.
//!
//! The cure of an error is its hint in the code; where it has none, the paragraph of its doc comment that begins with
//! `Cure:`. An error with neither is a fault.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use syn::{Attribute, Expr, ExprLit, Fields, ImplItem, Item, Lit, LitStr, Meta, Pat, Stmt};

use super::source::{doc_and_cure, kebab, text_of};
use crate::workspace;

/// Directories of the crates whose errors are listed, each with the heading of its table. The first that fits counts.
const AREAS: [(&str, &str); 9] = [
    ("server/store", "Checkpoints and sessions"),
    ("server/catalog", "Checkpoints and sessions"),
    ("server/cluster", "Clusters"),
    ("server/retention", "Retention, quotas, keys and queues"),
    ("server/quotas", "Retention, quotas, keys and queues"),
    ("server/keys", "Retention, quotas, keys and queues"),
    ("server/metering", "Retention, quotas, keys and queues"),
    ("client", "Agents, transport and CRIU's images"),
    ("", "Requests and rights"),
];

/// Crates with such errors.
const ROOTS: [&str; 3] = ["server", "client", "protocol"];

/// Trait of the errors that requests are answered with.
const TRAIT: &str = "ReportedError";

/// Text for an error that has the code or the cure of another one, which it passes on.
const PASSED_ON: &str = "those of its cause";

/// Returns the exit codes with causes and cures.
///
/// # Errors
/// A source cannot be read, or a code has no cure.
pub(super) fn exit_codes() -> Result<String> {
    let code = Source::read(&workspace(), "client/terminal/src/failure.rs")?;
    let mut text = "| code | `error.code` | cause | cure |\n| --- | --- | --- | --- |\n".to_owned();
    for variant in &code.found("Code")?.variants {
        // Code 0 is no failure.
        if let Some(number) = variant.number.filter(|number| *number != 0) {
            let name = kebab(&variant.name);
            let (cause, cure) = (&variant.cause, variant.documented_cure()?);
            writeln!(text, "| {number} | `{name}` | {cause} | {cure} |")?;
        }
    }
    Ok(text)
}

/// Returns the problems of the HTTP API.
///
/// # Errors
/// A source cannot be read, or a problem has no cure.
pub(super) fn problems() -> Result<String> {
    let source = Source::read(&workspace(), "protocol/api-types/src/problem.rs")?;
    let statuses = source.statuses();
    let mut text = "| status | kind | cause | cure |\n| --- | --- | --- | --- |\n".to_owned();
    for variant in &source.found("ProblemKind")?.variants {
        let (word, status) = statuses
            .get(&variant.name)
            .with_context(|| format!("ProblemKind::{} has no parts", variant.name))?;
        let (cause, cure) = (&variant.cause, variant.documented_cure()?);
        writeln!(text, "| {status} | `{word}` | {cause} | {cure} |")?;
    }
    Ok(text)
}

/// Returns the words by which failures of CRIU are known, each with its hint.
///
/// # Errors
/// The source cannot be read, or has another form.
pub(super) fn criu() -> Result<String> {
    let source = Source::read(&workspace(), "client/criu/src/log.rs")?;
    let known = source.file.items.iter().find_map(|item| match item {
        Item::Const(item) if item.ident == "KNOWN" => Some(&*item.expr),
        _ => None,
    });
    let mut text = "| words in CRIU's log | cause and cure |\n| --- | --- |\n".to_owned();
    let mut entries = 0;
    for entry in elements(known.context("client/criu/src/log.rs has no KNOWN")?) {
        let Expr::Struct(entry) = entry else {
            bail!("an entry of KNOWN is no struct");
        };
        let (mut words, mut hint) = (String::new(), String::new());
        for field in &entry.fields {
            let texts: Vec<String> = match &field.member {
                syn::Member::Named(name) if name == "words" => elements(&field.expr)
                    .filter_map(text_of)
                    .map(LitStr::value)
                    .collect(),
                _ => text_of(&field.expr)
                    .map(LitStr::value)
                    .into_iter()
                    .collect(),
            };
            match &field.member {
                syn::Member::Named(name) if name == "words" => words = texts.join(" … "),
                _ => hint = texts.concat(),
            }
        }
        if words.is_empty() || hint.is_empty() {
            bail!("an entry of KNOWN has no words or no hint: {words:?} {hint:?}");
        }
        entries += 1;
        writeln!(text, "| `{}` | {} |", words.trim(), cell(&hint))?;
    }
    if entries == 0 {
        bail!("KNOWN is empty");
    }
    Ok(text)
}

/// Returns the messages of refused requests, a table for each area.
///
/// # Errors
/// A source cannot be read, or errors have no cure; all of them are named.
pub(super) fn messages() -> Result<String> {
    let root = workspace();
    let mut tables: BTreeMap<&str, Vec<(String, String)>> = BTreeMap::new();
    let mut incurable = Vec::new();
    for path in sources(&root)? {
        let source = Source::read(&root, &path)?;
        let area = AREAS.iter().find(|(crates, _)| path.starts_with(crates));
        let (_, heading) = area.context("no area")?;
        for row in source.rows()? {
            match row {
                Ok(row) => tables.entry(heading).or_default().push(row),
                Err(name) => incurable.push(format!("{path}: {name}")),
            }
        }
    }
    if !incurable.is_empty() {
        bail!(
            "errors without a cure: give each a hint, or a paragraph `Cure: …` in its doc comment:\n{}",
            incurable.join("\n")
        );
    }
    let mut text = String::new();
    for (heading, mut rows) in tables {
        rows.sort();
        rows.dedup();
        writeln!(
            text,
            "## {heading}\n\n| message | exit code | cause, if the message does not say it | cure |\n| --- | --- | --- | --- |"
        )?;
        for (message, rest) in rows {
            writeln!(text, "| `{message}` | {rest} |")?;
        }
        text.push('\n');
    }
    Ok(text)
}

/// Returns the files with errors that requests are answered with, below the workspace's root.
fn sources(root: &Path) -> Result<Vec<String>> {
    let needle = format!("impl {TRAIT} for");
    let mut left: Vec<PathBuf> = ROOTS.iter().map(|name| root.join(name)).collect();
    let mut found = Vec::new();
    while let Some(directory) = left.pop() {
        let entries =
            fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))?;
        for entry in entries {
            let path = entry
                .with_context(|| format!("list {}", directory.display()))?
                .path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if path.is_dir() {
                if !matches!(&*name, "tests" | "target" | "benches") {
                    left.push(path);
                }
            } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
                let text = fs::read_to_string(&path)
                    .with_context(|| format!("read {}", path.display()))?;
                if text.contains(&needle) {
                    let path = path.strip_prefix(root).unwrap_or(&path);
                    found.push(path.to_string_lossy().into_owned());
                }
            }
        }
    }
    found.sort();
    Ok(found)
}

/// A type of errors.
struct ErrorType {
    name: String,
    variants: Vec<ErrorVariant>,
}

/// A variant of an enum, or all of a struct.
struct ErrorVariant {
    /// Name; empty for a struct.
    name: String,
    number: Option<u64>,
    /// Template of the message, if it is not that of another error.
    message: Option<String>,
    cause: String,
    cure: String,
}

impl ErrorVariant {
    fn documented_cure(&self) -> Result<&str> {
        if self.cure.is_empty() {
            bail!(
                "{} has no paragraph `Cure: …` in its doc comment",
                self.name
            );
        }
        Ok(&self.cure)
    }
}

/// A parsed file.
struct Source {
    file: syn::File,
    types: Vec<ErrorType>,
    /// Texts of constants of types, such as `JobNameError::HINT`.
    constants: BTreeMap<String, String>,
}

impl Source {
    fn read(root: &Path, path: &str) -> Result<Self> {
        let text = fs::read_to_string(root.join(path)).with_context(|| format!("read {path}"))?;
        Self::parse(&text).with_context(|| format!("parse {path}"))
    }

    fn parse(text: &str) -> Result<Self> {
        let file = syn::parse_file(text)?;
        let mut types = Vec::new();
        let mut constants = BTreeMap::new();
        for item in &file.items {
            match item {
                Item::Enum(item) => types.push(ErrorType {
                    name: item.ident.to_string(),
                    variants: item.variants.iter().map(variant).collect(),
                }),
                Item::Struct(item) => types.push(ErrorType {
                    name: item.ident.to_string(),
                    variants: vec![described(String::new(), &item.attrs, &item.fields)],
                }),
                Item::Const(item) => {
                    if let Some(text) = text_of(&item.expr) {
                        constants.insert(item.ident.to_string(), text.value());
                    }
                }
                _ => {}
            }
        }
        Ok(Self {
            file,
            types,
            constants,
        })
    }

    fn found(&self, name: &str) -> Result<&ErrorType> {
        let found = self.types.iter().find(|one| one.name == name);
        found.with_context(|| format!("there is no enum {name}"))
    }

    /// Returns the word and the status of each variant in the function `parts`.
    fn statuses(&self) -> BTreeMap<String, (String, u64)> {
        let mut statuses = BTreeMap::new();
        let items = self.file.items.iter().filter_map(|item| match item {
            Item::Impl(item) => Some(item),
            _ => None,
        });
        for function in items.flat_map(|item| &item.items) {
            let ImplItem::Fn(function) = function else {
                continue;
            };
            if function.sig.ident != "parts" {
                continue;
            }
            for (names, body) in arms(&function.block.stmts) {
                let Expr::Tuple(tuple) = body else { continue };
                let word = tuple.elems.first().and_then(text_of).map(LitStr::value);
                let status = tuple.elems.last().and_then(number);
                if let (Some(word), Some(status)) = (word, status) {
                    for name in names {
                        statuses.insert(name, (word.clone(), status));
                    }
                }
            }
        }
        statuses
    }

    /// Returns a row, message and rest, for each error with a message of its own; the name of an error without a cure.
    fn rows(&self) -> Result<Vec<std::result::Result<(String, String), String>>> {
        let mut rows = Vec::new();
        for item in &self.file.items {
            let Item::Impl(item) = item else { continue };
            let is_error = item.trait_.as_ref().is_some_and(|(path, _)| {
                path.segments.last().is_some_and(|last| last.ident == TRAIT)
            });
            let syn::Type::Path(of) = &*item.self_ty else {
                continue;
            };
            let Some(name) = of.path.segments.last().filter(|_| is_error) else {
                continue;
            };
            let name = name.ident.to_string();
            let Some(error) = self.types.iter().find(|one| one.name == name) else {
                continue;
            };
            let function = |wanted: &str| {
                item.items.iter().find_map(|item| match item {
                    ImplItem::Fn(function) if function.sig.ident == wanted => {
                        Some(&function.block.stmts)
                    }
                    _ => None,
                })
            };
            let codes = function("code").with_context(|| format!("{name} has no code"))?;
            let hints = function("hint");
            for variant in &error.variants {
                let Some(message) = &variant.message else {
                    continue;
                };
                let code = codes_of(bodies(codes, &variant.name));
                let hint = hints.map(|hints| self.hints_of(bodies(hints, &variant.name)));
                let cure = match (&*variant.cure, hint.unwrap_or_default()) {
                    ("", hint) => hint,
                    (cure, _) => cure.to_owned(),
                };
                rows.push(if cure.is_empty() {
                    Err(format!("{name}::{} ({message})", variant.name))
                } else {
                    Ok((
                        message.clone(),
                        format!("{code} | {} | {cure}", variant.cause),
                    ))
                });
            }
        }
        Ok(rows)
    }

    /// Returns the hints in expressions; empty if there is none.
    fn hints_of(&self, bodies: Vec<&Expr>) -> String {
        let mut hints: Vec<String> = Vec::new();
        for leaf in bodies.into_iter().flat_map(leaves) {
            let hint = match (text_of(leaf), leaf) {
                (Some(text), _) => text.value(),
                (None, Expr::Path(path)) => {
                    let last = path.path.segments.last().map(|last| last.ident.to_string());
                    let known = last.and_then(|last| self.constants.get(&last));
                    known.cloned().unwrap_or_else(|| PASSED_ON.to_owned())
                }
                _ => PASSED_ON.to_owned(),
            };
            if !hint.is_empty() && !hints.contains(&hint) {
                hints.push(hint);
            }
        }
        if hints.len() > 1 {
            hints.retain(|hint| hint != PASSED_ON);
        }
        cell(&hints.join("; or: "))
    }
}

/// Returns the exit codes in expressions.
fn codes_of(bodies: Vec<&Expr>) -> String {
    let mut codes: Vec<String> = Vec::new();
    for leaf in bodies.into_iter().flat_map(leaves) {
        let code = match leaf {
            Expr::Path(path) if path.path.segments.len() == 2 => {
                let last = path.path.segments.last();
                last.and_then(|last| exit_code(&last.ident.to_string()))
            }
            _ => None,
        };
        let code = code.map_or_else(|| PASSED_ON.to_owned(), |code| code.to_string());
        if !codes.contains(&code) {
            codes.push(code);
        }
    }
    if codes.len() > 1 {
        codes.retain(|code| code != PASSED_ON);
    }
    codes.join(", ")
}

/// Returns the number of an `ErrorCode`, which is the exit code.
fn exit_code(name: &str) -> Option<u8> {
    Some(match name {
        "Internal" => 1,
        "Invalid" => 2,
        "NotFound" => 3,
        "Conflict" => 4,
        "NoSpace" => 6,
        "Corrupt" => 7,
        "SessionFailed" => 8,
        "Denied" => 9,
        "Unavailable" => 11,
        _ => return None,
    })
}

/// Returns the expressions that a function of `self` may return for a variant.
fn bodies<'a>(statements: &'a [Stmt], variant: &str) -> Vec<&'a Expr> {
    let arms = arms(statements);
    if arms.is_empty() {
        return statements
            .iter()
            .rev()
            .find_map(expression)
            .into_iter()
            .collect();
    }
    let named: Vec<&Expr> = arms
        .iter()
        .filter(|(names, _)| names.iter().any(|name| name == variant))
        .map(|(_, body)| *body)
        .collect();
    if !named.is_empty() {
        return named;
    }
    let others = arms.iter().filter(|(names, _)| names.is_empty());
    others.map(|(_, body)| *body).collect()
}

/// Returns the arms of the match that a function ends with: variants and body. An arm for all others has no variants.
fn arms(statements: &[Stmt]) -> Vec<(Vec<String>, &Expr)> {
    let Some(Expr::Match(matched)) = statements.last().and_then(expression) else {
        return Vec::new();
    };
    let arm = |arm: &'_ syn::Arm| variants_of(&arm.pat);
    matched
        .arms
        .iter()
        .map(|one| (arm(one), &*one.body))
        .collect()
}

fn expression(statement: &Stmt) -> Option<&Expr> {
    match statement {
        Stmt::Expr(expression, _) => Some(expression),
        _ => None,
    }
}

/// Returns the variants of `Self` that a pattern names.
fn variants_of(pattern: &Pat) -> Vec<String> {
    let path = match pattern {
        Pat::Or(or) => return or.cases.iter().flat_map(variants_of).collect(),
        Pat::Guard(guarded) => return variants_of(&guarded.pat),
        Pat::Path(path) => &path.path,
        Pat::Struct(pattern) => &pattern.path,
        Pat::TupleStruct(pattern) => &pattern.path,
        _ => return Vec::new(),
    };
    let last = path.segments.last().map(|last| last.ident.to_string());
    last.into_iter().collect()
}

/// Returns the expressions that an expression may have as its value.
fn leaves(expression: &Expr) -> Vec<&Expr> {
    match expression {
        Expr::Block(block) => last_leaves(&block.block.stmts),
        Expr::If(branch) => {
            let mut found = last_leaves(&branch.then_branch.stmts);
            let other = branch.else_branch.as_ref().map(|(_, other)| leaves(other));
            found.extend(other.into_iter().flatten());
            found
        }
        Expr::Match(matched) => {
            let bodies = matched.arms.iter().map(|arm| &*arm.body);
            bodies.flat_map(leaves).collect()
        }
        Expr::Paren(inner) => leaves(&inner.expr),
        Expr::Reference(inner) => leaves(&inner.expr),
        other => vec![other],
    }
}

fn last_leaves(statements: &[Stmt]) -> Vec<&Expr> {
    let last = statements.last().and_then(expression);
    last.map(leaves).unwrap_or_default()
}

/// Returns the elements of an array, or of a reference to one.
fn elements(expression: &Expr) -> impl Iterator<Item = &Expr> {
    let inner = match expression {
        Expr::Reference(reference) => &*reference.expr,
        other => other,
    };
    let array = match inner {
        Expr::Array(array) => Some(&array.elems),
        _ => None,
    };
    array.into_iter().flatten()
}

fn number(value: &Expr) -> Option<u64> {
    match value {
        Expr::Lit(ExprLit {
            lit: Lit::Int(value),
            ..
        }) => value.base10_parse().ok(),
        _ => None,
    }
}

fn variant(variant: &syn::Variant) -> ErrorVariant {
    let mut described = described(variant.ident.to_string(), &variant.attrs, &variant.fields);
    described.number = variant
        .discriminant
        .as_ref()
        .and_then(|(_, value)| number(value));
    described
}

fn described(name: String, attributes: &[Attribute], _fields: &Fields) -> ErrorVariant {
    let (cause, cure) = doc_and_cure(attributes);
    let error = attributes.iter().find(|one| one.path().is_ident("error"));
    ErrorVariant {
        name,
        number: None,
        message: error.and_then(template),
        cause,
        cure,
    }
}

/// Returns the message of an `error` attribute, if it has words of its own.
fn template(attribute: &Attribute) -> Option<String> {
    let Meta::List(list) = &attribute.meta else {
        return None;
    };
    // The text may be followed by arguments, which are no attributes of their own.
    let parse = |input: syn::parse::ParseStream<'_>| {
        let text: LitStr = input.parse()?;
        while !input.is_empty() {
            input.step(|cursor| {
                let rest = cursor.token_tree().map(|(_, rest)| rest);
                Ok(((), rest.unwrap_or(*cursor)))
            })?;
        }
        Ok(text.value())
    };
    let text = list.parse_args_with(parse).ok()?;
    let mut message = String::new();
    let mut own_words = false;
    let mut rest = text.as_str();
    while let Some((before, behind)) = rest.split_once('{') {
        own_words |= before.chars().any(char::is_alphabetic);
        message.push_str(before);
        let (name, after) = behind.split_once('}')?;
        let name = name.split(':').next().unwrap_or_default();
        let has_name = name.starts_with(|c: char| c.is_alphabetic());
        message.push_str(&if has_name {
            format!("{{{name}}}")
        } else {
            "…".to_owned()
        });
        rest = after;
    }
    own_words |= rest.chars().any(char::is_alphabetic);
    message.push_str(rest);
    own_words.then(|| cell(&message.replace('`', "'")))
}

/// Escapes what ends a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERRORS: &str = r#"
        pub enum Fault {
            /// The disk is gone.
            ///
            /// Cure: buy another.
            #[error("read {path:?}: {0}", self.x())]
            Disk(u8),
            #[error("job {job} has `{holder}`")]
            Busy { job: String },
            #[error(transparent)]
            Other(u8),
            #[error("{reason}")]
            Said,
            #[error("nobody knows")]
            Unknown,
        }
        impl ReportedError for Fault {
            fn code(&self) -> ErrorCode {
                match self {
                    Self::Busy { .. } => ErrorCode::Conflict,
                    Self::Disk(x) if x => { ErrorCode::Internal }
                    Self::Disk(_) => ErrorCode::Unavailable,
                    Self::Other(error) => error.code(),
                    _ => ErrorCode::Invalid,
                }
            }
            fn hint(&self) -> &str {
                match self {
                    Self::Busy { .. } => if x { "wait" } else { "abort | it" },
                    _ => "",
                }
            }
        }
    "#;

    #[test]
    fn messages_have_codes_causes_and_cures() {
        let rows = Source::parse(ERRORS).unwrap().rows().unwrap();
        let row = |message: &str, rest: &str| Ok((message.to_owned(), rest.to_owned()));
        assert_eq!(
            rows,
            [
                row("read {path}: …", "1, 11 | The disk is gone. | buy another."),
                row("job {job} has '{holder}'", "4 |  | wait; or: abort \\| it"),
                Err("Fault::Unknown (nobody knows)".to_owned()),
            ]
        );
    }

    #[test]
    fn every_error_of_the_workspace_has_a_cure() {
        messages().unwrap();
        exit_codes().unwrap();
        problems().unwrap();
        criu().unwrap();
    }
}
