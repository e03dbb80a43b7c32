//! Definitions of types, read from source files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use syn::punctuated::Punctuated;
use syn::{Attribute, Expr, ExprLit, Lit, LitStr, Meta, Token, Type};

/// Types by name. A name that two files define is kept by file only.
#[derive(Default)]
pub(super) struct Types {
    root: PathBuf,
    by_name: BTreeMap<String, Item>,
}

/// A struct, or an enum without fields.
#[derive(Clone, Default)]
pub(super) struct Item {
    pub(super) doc: String,
    fields: Vec<Field>,
    pub(super) variants: Option<Vec<Variant>>,
}

/// A field of a struct.
#[derive(Clone, Default)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) doc: String,
    /// Name of the type without `Option`, `Vec` and `Box`.
    pub(super) inner: String,
    is_list: bool,
    is_optional: bool,
    /// True if the field is left out when it is empty.
    may_lack: bool,
    /// Arguments of the `arg` attribute, if the field is an argument of a command.
    pub(super) argument: Option<Vec<Meta>>,
}

/// A value of an enum.
#[derive(Clone, Debug, Default)]
pub(super) struct Variant {
    /// Name as it is written in JSON and on a command line.
    pub(super) name: String,
    pub(super) doc: String,
    pub(super) number: Option<u64>,
}

impl Item {
    /// Returns the fields that JSON has.
    pub(super) fn fields(&self) -> impl Iterator<Item = &Field> {
        self.fields.iter()
    }
}

impl Field {
    /// Formats the type in JSON's terms; an object is a link.
    pub(super) fn kind(&self, is_described: bool) -> String {
        let one = match self.inner.as_str() {
            "bool" => "boolean".to_owned(),
            "String" | "str" | "PathBuf" => "string".to_owned(),
            "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" | "f64" => "number".to_owned(),
            name if is_described => format!("[`{name}`](#{})", name.to_lowercase()),
            name => format!("`{name}`"),
        };
        let many = if self.is_list {
            format!("array of {one}")
        } else {
            one
        };
        match (self.may_lack, self.is_optional) {
            (true, _) => format!("{many}, or absent"),
            (false, true) => format!("{many} or `null`"),
            (false, false) => many,
        }
    }
}

impl Types {
    /// Reads the types of source files and of all files in directories.
    pub(super) fn read(root: &Path, sources: &[&str]) -> Result<Self> {
        let mut types = Self {
            root: root.to_owned(),
            by_name: BTreeMap::new(),
        };
        for source in sources {
            let path = root.join(source);
            let mut files = vec![path.clone()];
            if path.is_dir() {
                let entries = fs::read_dir(&path)?.collect::<Result<Vec<_>, _>>()?;
                files = entries.iter().map(std::fs::DirEntry::path).collect();
                files.sort();
            }
            for file in files.iter().filter(|file| file.is_file()) {
                for (name, item) in parse(file)? {
                    if types.by_name.insert(name.clone(), item).is_some() {
                        bail!("{} defines {name} again", file.display());
                    }
                }
            }
        }
        Ok(types)
    }

    pub(super) fn find(&self, name: &str) -> Option<&Item> {
        self.by_name.get(name)
    }

    /// Returns the type of a file, or of the common ones if no file is given.
    pub(super) fn at(&self, file: &str, name: &str) -> Result<Item> {
        let found = if file.is_empty() {
            self.by_name.get(name).cloned()
        } else {
            let items = parse(&self.root.join(file))?;
            let mut items = items.into_iter();
            items.find_map(|(found, item)| (found == name).then_some(item))
        };
        found.with_context(|| format!("there is no type {name} {file}"))
    }

    /// Returns the values of an enum.
    pub(super) fn variants(&self, name: &str) -> Result<&[Variant]> {
        let item = self.find(name);
        let variants = item.and_then(|item| item.variants.as_deref());
        variants.with_context(|| format!("there is no enum {name}"))
    }
}

fn parse(path: &Path) -> Result<Vec<(String, Item)>> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let file = syn::parse_file(&text).with_context(|| format!("parse {}", path.display()))?;
    let mut items = Vec::new();
    for item in file.items {
        match item {
            syn::Item::Struct(item) if is_described(&item.attrs) => {
                let fields = item.fields.iter().filter_map(field).collect();
                let described = Item {
                    doc: doc(&item.attrs),
                    fields,
                    variants: None,
                };
                items.push((item.ident.to_string(), described));
            }
            // An enum with fields is no value of its own in these documents.
            syn::Item::Enum(item)
                if is_described(&item.attrs)
                    && item
                        .variants
                        .iter()
                        .all(|variant| variant.fields.is_empty()) =>
            {
                let variants = item.variants.iter().map(variant).collect();
                let described = Item {
                    doc: doc(&item.attrs),
                    fields: Vec::new(),
                    variants: Some(variants),
                };
                items.push((item.ident.to_string(), described));
            }
            _ => {}
        }
    }
    Ok(items)
}

/// Returns true if a type is printed in JSON or read from a command line.
fn is_described(attributes: &[Attribute]) -> bool {
    let derives = attributes.iter().filter(|a| a.path().is_ident("derive"));
    let mut names = derives.flat_map(arguments).map(|meta| {
        let last = meta.path().segments.last();
        last.map(|segment| segment.ident.to_string())
    });
    names.any(|name| {
        matches!(
            name.as_deref(),
            Some("Serialize" | "Args" | "Parser" | "ValueEnum")
        )
    })
}

fn field(field: &syn::Field) -> Option<Field> {
    let serde: Vec<Meta> = attributes(&field.attrs, "serde");
    let skipped = serde.iter().any(|meta| meta.path().is_ident("skip"));
    if skipped {
        return None;
    }
    let mut described = Field {
        name: field.ident.as_ref()?.to_string(),
        doc: doc(&field.attrs),
        may_lack: (serde.iter()).any(|meta| meta.path().is_ident("skip_serializing_if")),
        ..Field::default()
    };
    if field.attrs.iter().any(|a| a.path().is_ident("arg")) {
        described.argument = Some(attributes(&field.attrs, "arg"));
    }
    let mut of = &field.ty;
    loop {
        match of {
            Type::Reference(reference) => of = &reference.elem,
            Type::Path(path) => {
                let last = path.path.segments.last()?;
                described.inner = last.ident.to_string();
                match described.inner.as_str() {
                    "Option" => described.is_optional = true,
                    "Vec" => described.is_list = true,
                    "Box" => {}
                    _ => break,
                }
                let syn::PathArguments::AngleBracketed(inner) = &last.arguments else {
                    break;
                };
                let Some(syn::GenericArgument::Type(inner)) = inner.args.first() else {
                    break;
                };
                of = inner;
            }
            _ => break,
        }
    }
    Some(described)
}

fn variant(variant: &syn::Variant) -> Variant {
    let number = variant.discriminant.as_ref().and_then(|(_, value)| {
        let Expr::Lit(ExprLit {
            lit: Lit::Int(value),
            ..
        }) = value
        else {
            return None;
        };
        value.base10_parse().ok()
    });
    Variant {
        name: kebab(&variant.ident.to_string()),
        doc: doc(&variant.attrs),
        number,
    }
}

/// Converts `CamelCase` to `kebab-case`, as serde and clap do.
pub(super) fn kebab(name: &str) -> String {
    let mut kebab = String::new();
    for (at, letter) in name.chars().enumerate() {
        if letter.is_uppercase() && at > 0 {
            kebab.push('-');
        }
        kebab.extend(letter.to_lowercase());
    }
    kebab
}

fn attributes(all: &[Attribute], name: &str) -> Vec<Meta> {
    let named = all.iter().filter(|a| a.path().is_ident(name));
    named.flat_map(arguments).collect()
}

fn arguments(attribute: &Attribute) -> Vec<Meta> {
    let parsed = attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
    parsed
        .map(|list| list.into_iter().collect())
        .unwrap_or_default()
}

/// Returns the text of the doc comment on one line, as a table's cell has it, without its cure.
fn doc(attributes: &[Attribute]) -> String {
    doc_and_cure(attributes).0
}

/// Returns the text of the doc comment on one line, and that of its paragraph that begins with `Cure:`.
pub(super) fn doc_and_cure(attributes: &[Attribute]) -> (String, String) {
    let lines = attributes.iter().filter_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else {
            return None;
        };
        if !pair.path.is_ident("doc") {
            return None;
        }
        text_of(&pair.value).map(|line| line.value())
    });
    let lines: Vec<String> = lines.map(|line| line.trim().to_owned()).collect();
    let (cure, rest): (Vec<String>, Vec<String>) = lines
        .join("\n")
        .split("\n\n")
        .map(|paragraph| paragraph.replace('\n', " "))
        .partition(|paragraph| paragraph.starts_with(CURE));
    let cell = |text: String| unlinked(&text).replace('|', "\\|").trim().to_owned();
    let cure = cure.iter().map(|cure| cure[CURE.len()..].trim());
    (
        cell(rest.join("  ")),
        cell(cure.collect::<Vec<_>>().join(" ")),
    )
}

/// Beginning of the paragraph of a doc comment that says what to do about an error.
const CURE: &str = "Cure:";

/// Returns the literal text of an expression, if it is one.
pub(super) fn text_of(value: &Expr) -> Option<&LitStr> {
    match value {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text),
            ..
        }) => Some(text),
        _ => None,
    }
}

/// Removes the brackets of rustdoc's links: ``[`Name`]`` becomes `` `Name` ``.
fn unlinked(text: &str) -> String {
    text.replace("[`", "`").replace("`]", "`")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"
        /// A line of [`Listing`].
        #[derive(Clone, serde::Serialize)]
        pub struct Line {
            /// Name of it,
            /// or `a|b`.
            pub name: String,
            pub work: Option<Box<Work>>,
            #[serde(skip)]
            pub secret: Vec<u8>,
            #[serde(skip_serializing_if = "Vec::is_empty")]
            nodes: Vec<String>,
        }
        #[derive(serde::Serialize)]
        enum Kind {
            /// Of pages only.
            PreDump = 7,
        }
        struct Internal { field: u8 }
    "#;

    #[test]
    fn fields_have_the_types_and_names_of_json() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("lib.rs"), SOURCE).unwrap();
        let types = Types::read(dir.path(), &["lib.rs"]).unwrap();
        assert!(types.find("Internal").is_none());
        let line = types.find("Line").unwrap();
        assert_eq!(line.doc, "A line of `Listing`.");
        let fields: Vec<_> = line
            .fields()
            .map(|field| (field.name.as_str(), field.kind(field.inner == "Work")))
            .collect();
        assert_eq!(
            fields,
            [
                ("name", "string".to_owned()),
                ("work", "[`Work`](#work) or `null`".to_owned()),
                ("nodes", "array of string, or absent".to_owned()),
            ]
        );
        assert_eq!(line.fields().next().unwrap().doc, "Name of it, or `a\\|b`.");
        let kinds = types.variants("Kind").unwrap();
        assert_eq!(
            (kinds[0].name.as_str(), kinds[0].number),
            ("pre-dump", Some(7))
        );
    }
}
