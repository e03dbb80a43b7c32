//! Licenses and notices of the crates that are linked into the programs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::files;
use crate::sbom::Parts;

/// Beginnings of the names of files that have to be passed on, in capitals.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// Returns the text of all licenses and notices, each once, under the crates that have it.
///
/// # Errors
/// A crate's directory cannot be read.
pub(super) fn collect(parts: &Parts) -> Result<String> {
    let mut by_text: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut text =
        "Crates that are linked into the programs of Permafrost, and their licenses.\n\n"
            .to_owned();
    for part in parts.foreign() {
        text += &format!("{} {}: {}\n", part.name, part.version, part.license);
        let dir = part.manifest.parent().context("a manifest at /")?;
        for path in files(dir)?.iter().filter(|path| is_notice(path)) {
            let notice = fs::read(path).with_context(|| format!("read {}", path.display()))?;
            let notice = String::from_utf8_lossy(&notice).trim_end().to_owned();
            let crates = by_text.entry(notice).or_default();
            crates.push(format!("{} {}", part.name, part.version));
        }
    }
    for (notice, mut crates) in by_text {
        crates.dedup();
        let rule = "=".repeat(78);
        text += &format!("\n{rule}\n{}\n{rule}\n\n{notice}\n", crates.join(", "));
    }
    Ok(text)
}

fn is_notice(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_uppercase();
    path.is_file() && NAMES.iter().any(|begin| name.starts_with(begin))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;

    #[test]
    fn each_text_stands_there_once_under_all_its_crates() {
        let dir = tempfile::tempdir().unwrap();
        let mut packages = vec![];
        let mut on = vec![];
        let mut sums = BTreeMap::new();
        for (name, file, text) in [
            ("one", "LICENSE-MIT", "the text"),
            ("two", "license.md", "the text\n"),
            ("three", "NOTICE", "another"),
            ("three", "README.md", "no notice"),
        ] {
            let of = dir.path().join(name);
            fs::create_dir_all(&of).unwrap();
            fs::write(of.join(file), text).unwrap();
            if sums.contains_key(&(name.to_owned(), "1.0.0".to_owned())) {
                continue;
            }
            sums.insert((name.to_owned(), "1.0.0".to_owned()), "ab".to_owned());
            on.push(json!({ "pkg": name, "dep_kinds": [{ "kind": null }] }));
            packages.push(json!({
                "id": name, "name": name, "version": "1.0.0", "license": "MIT",
                "manifest_path": of.join("Cargo.toml"), "targets": [{ "kind": ["lib"] }],
            }));
        }
        packages.push(json!({
            "id": "own", "name": "permafrost-server", "version": "0.1.0", "license": "Apache-2.0",
            "manifest_path": "/own/Cargo.toml", "targets": [{ "kind": ["bin"] }],
        }));
        let nodes = [json!({ "id": "own", "deps": on })];
        let metadata = json!({ "packages": packages, "resolve": { "nodes": nodes } });
        let text = collect(&Parts::reachable(&metadata, &sums).unwrap()).unwrap();
        assert_eq!(text.matches("the text").count(), 1, "{text}");
        assert!(text.contains("\none 1.0.0, two 1.0.0\n"), "{text}");
        assert!(text.contains("\nthree 1.0.0: MIT\n"), "{text}");
        assert!(text.contains("\n\nanother\n"), "{text}");
        assert!(
            !text.contains("no notice") && !text.contains("permafrost-server"),
            "{text}"
        );
    }
}
