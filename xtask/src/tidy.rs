//! `cargo xtask test`, step "tidy": what can be checked of the rules in ARCHITECTURE.md without compiling anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::ci::{self, Count};
use crate::{book, paths};

/// Line in ARCHITECTURE.md before the drawing of the crates.
const DRAWING: &str = "```text crates";

/// Longest line of a document, characters. Tables and code blocks may be wider.
const LINE_CHARS: usize = 120;

/// Most code in one crate, lines without its tests.
const CRATE_LINES: usize = 10_000;

/// First words of a doc comment that leaves the reader to find the sentence.
const QUESTION_WORDS: [&str; 8] = [
    "What", "How", "Whether", "Who", "Where", "Why", "Which", "When",
];

/// Doc comments that begin with one of those; most are help texts. Lower it when some go; it never grows.
const QUESTIONS: usize = 25;

/// Doc comments of one or two words that are still there. Lower it when some go; it never grows.
const SHORT_COMMENTS: usize = 22;

/// Names of public types that more than one crate has. Lower it when some go; it never grows.
const SHARED_NAMES: usize = 1;

/// Beginning of a literal error of the control protocol; in two parts, as this file is checked, too.
const LITERAL_ERROR: &str = concat!("control::", "Error {");

/// Runs all checks, and prints what breaks a rule.
///
/// # Errors
/// A file or `cargo metadata` cannot be read.
pub(crate) fn run() -> Result<Count> {
    let root = paths::workspace();
    let crates = Crates::read()?;
    let sources = Sources::read(&root, &crates)?;
    let mut count = Count::default();
    let architecture = read(&root.join("ARCHITECTURE.md"))?;
    let checks = [
        crates.differences(&architecture)?,
        sources.large_crates(),
        sources.short_comments(),
        sources.questions(),
        sources.shared_names(),
        sources.literal_errors(),
        sources.examples(),
        long_lines(&root)?,
        permafrost_reference::differences()?,
        book::differences(&root)?,
    ];
    for wrong in checks {
        for line in &wrong {
            println!("{line}");
        }
        if wrong.is_empty() {
            count.passed += 1;
        } else {
            count.failed += 1;
        }
    }
    Ok(count)
}

/// One crate of the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Crate {
    /// Name without `permafrost-`.
    name: String,
    /// Directory below the workspace's root.
    directory: String,
    /// Crates of the workspace that its code uses; those that only its tests use do not count.
    uses: BTreeSet<String>,
}

/// The crates of the workspace.
struct Crates(Vec<Crate>);

impl Crates {
    fn read() -> Result<Self> {
        let output = ci::cargo_command()
            .args(["metadata", "--locked", "--no-deps", "--format-version", "1"])
            .output()
            .context("run cargo metadata")?;
        if !output.status.success() {
            bail!(
                "cargo metadata: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let metadata: Value =
            serde_json::from_slice(&output.stdout).context("read the output of cargo metadata")?;
        Self::of(&metadata, &paths::workspace()).context("cargo metadata has another form")
    }

    fn of(metadata: &Value, root: &Path) -> Option<Self> {
        let packages = metadata["packages"].as_array()?;
        let names: BTreeSet<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
        let short = |name: &str| name.trim_start_matches("permafrost-").to_owned();
        let one = |package: &Value| {
            let manifest = Path::new(package["manifest_path"].as_str()?);
            let directory = manifest.parent()?.strip_prefix(root).ok()?;
            let dependencies = package["dependencies"].as_array()?.iter();
            let uses = dependencies
                .filter(|dependency| dependency["kind"].is_null())
                .filter_map(|dependency| dependency["name"].as_str())
                .filter(|name| names.contains(name))
                .map(short)
                .collect();
            Some(Crate {
                name: short(package["name"].as_str()?),
                directory: directory.to_str()?.to_owned(),
                uses,
            })
        };
        packages.iter().map(one).collect::<Option<_>>().map(Self)
    }

    /// Returns the lines of the drawing that are not as the crates are, and the other way round. Each crate may use
    /// only those that are drawn below it.
    fn differences(&self, architecture: &str) -> Result<Vec<String>> {
        let (_, drawing) = architecture
            .split_once(DRAWING)
            .with_context(|| format!("ARCHITECTURE.md has no block that begins with {DRAWING}"))?;
        let (drawing, _) = drawing
            .split_once("```")
            .context("the drawing of the crates in ARCHITECTURE.md has no end")?;
        let mut drawn = Vec::new();
        for line in drawing.lines().filter(|line| !line.trim().is_empty()) {
            let mut words = line.split_whitespace();
            let (Some(name), Some(directory)) = (words.next(), words.next()) else {
                bail!("ARCHITECTURE.md: {line:?} is not a crate and its directory");
            };
            drawn.push(Crate {
                name: name.to_owned(),
                directory: directory.trim_end_matches('/').to_owned(),
                uses: words.map(str::to_owned).collect(),
            });
        }
        let mut wrong = Vec::new();
        for one in &self.0 {
            if !drawn.contains(one) {
                wrong.push(format!("ARCHITECTURE.md does not draw {one:?}"));
            }
        }
        for (place, one) in drawn.iter().enumerate() {
            if !self.0.contains(one) {
                wrong.push(format!("ARCHITECTURE.md draws {one:?}, which is not so"));
            }
            let below: BTreeSet<&String> = drawn[place + 1..].iter().map(|one| &one.name).collect();
            for used in one.uses.iter().filter(|used| !below.contains(used)) {
                wrong.push(format!(
                    "ARCHITECTURE.md: {} uses {used}, which is not drawn below it",
                    one.name
                ));
            }
        }
        Ok(wrong)
    }
}

/// The code of the workspace without its tests.
struct Sources(Vec<Source>);

struct Source {
    /// Crate that it is of, by its directory.
    directory: String,
    path: PathBuf,
    code: String,
}

impl Sources {
    fn read(root: &Path, crates: &Crates) -> Result<Self> {
        let mut sources = Vec::new();
        for one in &crates.0 {
            for path in files(&root.join(&one.directory).join("src"), "rs")? {
                let of_tests = |part: &str| part == "tests" || part.ends_with("tests.rs");
                if path
                    .components()
                    .filter_map(|part| part.as_os_str().to_str())
                    .any(of_tests)
                {
                    continue;
                }
                let text = read(&path)?;
                let code = text.split("\n#[cfg(test)]\nmod tests {").next();
                sources.push(Source {
                    directory: one.directory.clone(),
                    code: code.unwrap_or_default().to_owned(),
                    path: path.strip_prefix(root).unwrap_or(&path).to_owned(),
                });
            }
        }
        Ok(Self(sources))
    }

    fn large_crates(&self) -> Vec<String> {
        let mut lines: BTreeMap<&str, usize> = BTreeMap::new();
        for source in &self.0 {
            *lines.entry(&source.directory).or_default() += source.code.lines().count();
        }
        let large = lines.into_iter().filter(|(_, lines)| *lines > CRATE_LINES);
        large
            .map(|(directory, lines)| {
                format!("{directory} has {lines} lines without its tests: at most {CRATE_LINES}")
            })
            .collect()
    }

    fn short_comments(&self) -> Vec<String> {
        let mut found = Vec::new();
        for source in &self.0 {
            for (line, text) in doc_comments(&source.code) {
                if text.split_whitespace().count() <= 2 {
                    found.push(format!("{}:{line}: {text:?}", source.path.display()));
                }
            }
        }
        too_many("doc comments of one or two words", found, SHORT_COMMENTS)
    }

    fn questions(&self) -> Vec<String> {
        let mut found = Vec::new();
        for source in &self.0 {
            for (line, text) in doc_comments(&source.code) {
                let first = text.split_whitespace().next().unwrap_or_default();
                if QUESTION_WORDS.contains(&first) || text.starts_with("The same") {
                    found.push(format!("{}:{line}: {text:?}", source.path.display()));
                }
            }
        }
        too_many("doc comments that begin like a question", found, QUESTIONS)
    }

    /// Finds errors of the control protocol that are made outside of `ReportedError`: their code and hint belong to
    /// the type of the error.
    fn literal_errors(&self) -> Vec<String> {
        let mut found = Vec::new();
        for source in &self.0 {
            for (line, code) in (1..).zip(source.code.lines()) {
                if is_literal_error(code) {
                    found.push(format!(
                        "{}:{line}: make it a variant of a typed error",
                        source.path.display()
                    ));
                }
            }
        }
        found
    }

    /// Finds examples in documentation comments: the tests do not run them.
    fn examples(&self) -> Vec<String> {
        let mut found = Vec::new();
        for source in &self.0 {
            for line in examples(&source.code) {
                found.push(format!(
                    "{}:{line}: make the example a test, or its block ```text",
                    source.path.display()
                ));
            }
        }
        found
    }

    fn shared_names(&self) -> Vec<String> {
        let mut crates_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for source in &self.0 {
            for name in source.code.lines().filter_map(public_type) {
                let crates = crates_of.entry(name).or_default();
                crates.insert(&source.directory);
            }
        }
        let shared = crates_of.into_iter().filter(|(_, crates)| crates.len() > 1);
        let found = shared.map(|(name, crates)| format!("{name}: {crates:?}"));
        too_many(
            "names of public types in several crates",
            found.collect(),
            SHARED_NAMES,
        )
    }
}

/// Returns nothing for `most` findings or fewer; else all of them, and their number.
fn too_many(what: &str, mut found: Vec<String>, most: usize) -> Vec<String> {
    if found.len() <= most {
        return Vec::new();
    }
    found.push(format!("{} {what}, at most {most} are left", found.len()));
    found
}

/// Returns the doc comments of a file, each with the number of its first line.
fn doc_comments(code: &str) -> Vec<(usize, String)> {
    let mut comments: Vec<(usize, String)> = Vec::new();
    let mut inside = false;
    for (index, line) in code.lines().enumerate() {
        let Some(text) = line.trim_start().strip_prefix("///") else {
            inside = false;
            continue;
        };
        match comments.last_mut().filter(|_| inside) {
            Some((_, comment)) => {
                comment.push(' ');
                comment.push_str(text.trim());
            }
            None => comments.push((index + 1, text.trim().to_owned())),
        }
        inside = true;
    }
    comments
}

/// Returns the numbers of the lines at which a block that rustdoc may take for code begins in a documentation comment.
fn examples(code: &str) -> Vec<usize> {
    let mut in_block = false;
    let mut found = Vec::new();
    for (number, line) in (1..).zip(code.lines()) {
        let line = line.trim_start();
        let comment = line.strip_prefix("///").or(line.strip_prefix("//!"));
        let Some(fence) = comment.and_then(|text| text.trim_start().strip_prefix("```")) else {
            continue;
        };
        let is_text = ["text", "json", "toml", "sh", "console"].contains(&fence.trim());
        if !in_block && !is_text {
            found.push(number);
        }
        in_block = !in_block;
    }
    found
}

/// Returns true for a line that begins a literal error of the control protocol.
fn is_literal_error(line: &str) -> bool {
    let before = line.split_once(LITERAL_ERROR).map(|(before, _)| before);
    before.is_some_and(|before| !before.ends_with("-> ") && !before.ends_with("for "))
}

/// Returns the name that a line gives to a public type at the top level of a file.
fn public_type(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub ")?;
    let rest = ["struct ", "enum ", "trait ", "type "]
        .iter()
        .find_map(|keyword| rest.strip_prefix(keyword))?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
    Some(&rest[..end.unwrap_or(rest.len())])
}

/// Returns the lines of the documents that are too long.
fn long_lines(root: &Path) -> Result<Vec<String>> {
    let mut documents = files(&root.join("docs"), "md")?;
    documents.extend(["README.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(|name| root.join(name)));
    let mut wrong = Vec::new();
    for path in documents {
        let mut in_block = false;
        for (index, line) in read(&path)?.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_block = !in_block;
            }
            let chars = line.chars().count();
            if chars > LINE_CHARS && !in_block && !line.starts_with('|') {
                let path = path.strip_prefix(root).unwrap_or(&path).display();
                wrong.push(format!("{path}:{}: {chars} characters", index + 1));
            }
        }
    }
    Ok(wrong)
}

/// Returns the files below a directory with an extension, sorted.
fn files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut left = vec![directory.to_owned()];
    while let Some(directory) = left.pop() {
        let entries = std::fs::read_dir(&directory)
            .with_context(|| format!("list {}", directory.display()))?;
        for entry in entries {
            let path = entry
                .with_context(|| format!("list {}", directory.display()))?
                .path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_told_from_text() {
        let code = "//! ```text\n//! a\n//! ```\n\n/// ```\n/// b();\n/// ```\n/// ```rust,no_run\n/// ```\n";
        assert_eq!(examples(code), [5, 8]);
    }

    #[test]
    fn literal_errors_are_told_from_types() {
        assert!(is_literal_error("        return Err(control::Error {"));
        assert!(!is_literal_error("fn gone() -> control::Error {"));
        assert!(!is_literal_error("impl From<Gone> for control::Error {"));
    }

    fn crates() -> Crates {
        let metadata = serde_json::json!({"packages": [
            {"name": "permafrost-low", "manifest_path": "/w/low/Cargo.toml", "dependencies": [
                {"name": "serde", "kind": null}, {"name": "permafrost-high", "kind": "dev"}]},
            {"name": "permafrost-high", "manifest_path": "/w/a/high/Cargo.toml", "dependencies": [
                {"name": "permafrost-low", "kind": null}]},
        ]});
        Crates::of(&metadata, Path::new("/w")).unwrap()
    }

    #[test]
    fn the_drawing_has_every_crate_above_those_that_it_uses() {
        let differences = |drawing: &str| {
            let text = format!("…\n{DRAWING}\n{drawing}```\n…");
            crates().differences(&text).unwrap()
        };
        assert_eq!(differences("high a/high/ low\nlow low/\n"), [""; 0]);
        let upside_down = differences("low low/\nhigh a/high/ low\n");
        assert_eq!(upside_down.len(), 1, "{upside_down:?}");
        // Undrawn, gone, elsewhere, and an arrow that is not there.
        assert_eq!(differences("high a/high/ low\n").len(), 2);
        assert_eq!(
            differences("high a/high/ low\nlow low/\nold old/\n").len(),
            1
        );
        assert_eq!(differences("high high/ low\nlow low/\n").len(), 2);
        assert_eq!(differences("high a/high/\nlow low/\n").len(), 2);
        assert!(crates().differences("nothing").is_err());
    }

    #[test]
    fn comments_and_names_are_found() {
        let code = "/// One.\npub struct A<T>(T);\n\n/// Two\n/// lines of it.\n  /// Not\npub(crate) enum B {}\n\n    /// A field.\n";
        let comments = doc_comments(code);
        assert_eq!(comments[0], (1, "One.".to_owned()));
        assert_eq!(comments[1], (4, "Two lines of it. Not".to_owned()));
        assert_eq!(comments[2], (9, "A field.".to_owned()));
        let names: Vec<_> = code.lines().filter_map(public_type).collect();
        assert_eq!(names, ["A"]);
    }

    #[test]
    fn fewer_findings_than_before_are_no_fault() {
        let found = || vec!["a".to_owned(), "b".to_owned()];
        assert!(too_many("things", found(), 2).is_empty());
        let told = too_many("things", found(), 1);
        assert_eq!(told.len(), 3);
        assert!(told[2].contains("2 things, at most 1"), "{told:?}");
    }
}
