//! Tables of a command's options, from the fields of its arguments.

use std::fmt::Write as _;

use anyhow::{Context, Result};
use syn::{Expr, ExprLit, Lit, Meta};

use super::source::{Field, Types, kebab, text_of};

/// Returns the table of the options that a struct of arguments defines.
pub(super) fn table(types: &Types, arguments: &str) -> Result<String> {
    let item = types.find(arguments);
    let item = item.with_context(|| format!("there are no arguments {arguments}"))?;
    let mut text = "| option | meaning |\n| --- | --- |\n".to_owned();
    for field in item.fields() {
        let Some(option) = Described::of(types, field) else {
            continue;
        };
        writeln!(text, "| `{}` | {} |", option.usage, option.meaning)?;
    }
    Ok(text)
}

/// Returns the table of the keys that the configuration file has for the options of a struct of arguments.
pub(super) fn keys(types: &Types, arguments: &str) -> Result<String> {
    let item = types.find(arguments);
    let item = item.with_context(|| format!("there are no arguments {arguments}"))?;
    let mut text = "| key | value | meaning |\n| --- | --- | --- |\n".to_owned();
    for field in item.fields() {
        let Some(option) = Described::of(types, field) else {
            continue;
        };
        let usage = option.usage.trim_start_matches('-');
        let (key, value) = usage.split_once(' ').unwrap_or((usage, ""));
        let value = if value.is_empty() { "BOOL" } else { value };
        writeln!(text, "| `{key}` | {value} | {} |", option.meaning)?;
    }
    Ok(text)
}

/// An option as the table shows it.
struct Described {
    /// The option with the name of its value.
    usage: String,
    meaning: String,
}

impl Described {
    /// Returns the option of a field; `None` for arguments without a name.
    fn of(types: &Types, field: &Field) -> Option<Self> {
        let attributes = field.argument.as_ref()?;
        let find = |name: &str| attributes.iter().find(|meta| meta.path().is_ident(name));
        let value = |name: &str| match find(name)? {
            Meta::NameValue(pair) => Some(&pair.value),
            _ => None,
        };
        let text = |name: &str| Some(text_of(value(name)?)?.value());
        find("long")?;
        if let Some(Expr::Lit(ExprLit {
            lit: Lit::Bool(hidden),
            ..
        })) = value("hide")
            && hidden.value
        {
            return None;
        }
        let long = text("long").unwrap_or_else(|| field.name.replace('_', "-"));
        let choices = find("value_enum")
            .and_then(|_| types.variants(&field.inner).ok())
            .map(|variants| {
                let names = variants.iter().map(|variant| variant.name.as_str());
                names.collect::<Vec<_>>().join("\\|")
            });
        let usage = match text("value_name").or(choices) {
            Some(name) => format!("--{long} {name}"),
            None => format!("--{long}"),
        };
        let mut meaning = field.doc.clone();
        let default = text("default_value").or_else(|| value("default_value_t").and_then(written));
        if let Some(default) = default.filter(|default| !default.is_empty()) {
            meaning.truncate(meaning.trim_end_matches('.').len());
            write!(meaning, " [default: {default}].").ok()?;
        }
        if find("required").is_some() {
            meaning.push_str(" Required.");
        }
        Some(Self { usage, meaning })
    }
}

/// Returns a default value as it is written on a command line: a number, or a variant of an enum.
fn written(value: &Expr) -> Option<String> {
    match value {
        Expr::Lit(ExprLit {
            lit: Lit::Int(number),
            ..
        }) => Some(number.base10_digits().to_owned()),
        Expr::Path(path) => Some(kebab(&path.path.segments.last()?.ident.to_string())),
        _ => None,
    }
}
