//! The bill of materials: CycloneDX 1.5, from `cargo metadata` and Cargo.lock.
//!
//! cargo-cyclonedx would write the same from the same source, but takes minutes to build, and puts the time of its run
//! and a random number into the document.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::image::Library;
use crate::{CRATES, timestamp};

/// A crate that is linked into a program.
#[derive(Clone, Debug)]
pub(super) struct Part {
    id: String,
    pub(super) name: String,
    pub(super) version: String,
    /// License, as its manifest gives it.
    pub(super) license: String,
    /// Path of its Cargo.toml.
    pub(super) manifest: PathBuf,
    /// SHA-256 of its archive; `None` for crates of the workspace.
    checksum: Option<String>,
    /// Ids of the crates that it uses.
    uses: Vec<String>,
}

/// All crates that are linked into the programs.
pub(super) struct Parts(Vec<Part>);

#[derive(Deserialize)]
struct Lock {
    package: Vec<LockedPackage>,
}

#[derive(Deserialize)]
struct LockedPackage {
    name: String,
    version: String,
    checksum: Option<String>,
}

impl Parts {
    /// Finds the crates in the output of `cargo metadata` for the tree at `source`: those that the programs use,
    /// without what only builds or tests need.
    ///
    /// # Errors
    /// The output has another form, or Cargo.lock cannot be read.
    pub(super) fn of(metadata: &Value, source: &Path) -> Result<Self> {
        let path = source.join("Cargo.lock");
        let lock = std::fs::read_to_string(&path).context("read Cargo.lock")?;
        let lock: Lock = basic_toml::from_str(&lock).context("read Cargo.lock")?;
        let sums: BTreeMap<_, _> = lock
            .package
            .into_iter()
            .filter_map(|package| Some(((package.name, package.version), package.checksum?)))
            .collect();
        Self::reachable(metadata, &sums).context("cargo metadata has another form")
    }

    pub(super) fn reachable(
        metadata: &Value,
        sums: &BTreeMap<(String, String), String>,
    ) -> Option<Self> {
        let mut uses = BTreeMap::new();
        for node in metadata["resolve"]["nodes"].as_array()? {
            let linked = |dependency: &&Value| {
                let kinds = dependency["dep_kinds"].as_array();
                kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"].is_null()))
            };
            let all = node["deps"].as_array()?.iter().filter(linked);
            let ids: Vec<_> = all
                .filter_map(|one| Some(one["pkg"].as_str()?.to_owned()))
                .collect();
            uses.insert(node["id"].as_str()?.to_owned(), ids);
        }
        let packages = metadata["packages"].as_array()?;
        let named = |package: &&Value| CRATES.iter().any(|root| package["name"] == *root);
        let mut pending: Vec<String> = packages
            .iter()
            .filter(named)
            .filter_map(|package| Some(package["id"].as_str()?.to_owned()))
            .collect();
        let mut found = BTreeSet::new();
        while let Some(id) = pending.pop() {
            if found.insert(id.clone()) {
                pending.extend(uses.get(&id).into_iter().flatten().cloned());
            }
        }
        let mut parts = Vec::new();
        for package in packages {
            let id = package["id"].as_str()?.to_owned();
            // A macro runs in the compiler.
            let is_macro = package["targets"].as_array()?.iter().any(|target| {
                let kinds = target["kind"].as_array();
                kinds.is_some_and(|kinds| kinds.iter().any(|kind| kind == "proc-macro"))
            });
            if !found.contains(&id) || is_macro {
                continue;
            }
            let name = package["name"].as_str()?.to_owned();
            let version = package["version"].as_str()?.to_owned();
            parts.push(Part {
                uses: uses.get(&id).cloned().unwrap_or_default(),
                checksum: sums.get(&(name.clone(), version.clone())).cloned(),
                license: package["license"]
                    .as_str()
                    .unwrap_or("NOASSERTION")
                    .to_owned(),
                manifest: package["manifest_path"].as_str()?.into(),
                id,
                name,
                version,
            });
        }
        parts.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
        Some(Self(parts))
    }

    /// Returns the crates that are not the workspace's.
    pub(super) fn foreign(&self) -> impl Iterator<Item = &Part> {
        self.0.iter().filter(|part| part.checksum.is_some())
    }
}

impl Part {
    /// Returns the package URL, which also identifies the crate in the document.
    fn url(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }
}

/// Returns a license as an SPDX expression: older crates write MIT/Apache-2.0.
fn expression(license: &str) -> String {
    let parts: Vec<_> = license.split('/').map(str::trim).collect();
    parts.join(" OR ")
}

/// Returns the document of the crates and of the packages of Debian that are in the image. It has neither a random
/// number nor the time of the run.
///
/// # Errors
/// date(1) is not there.
pub(super) fn document(
    parts: &Parts,
    libraries: &[Library],
    version: &str,
    epoch: u64,
) -> Result<String> {
    let urls: BTreeMap<_, _> = parts
        .0
        .iter()
        .map(|part| (part.id.as_str(), part.url()))
        .collect();
    let of_debian = libraries.iter().map(|library| {
        let url = format!(
            "pkg:deb/debian/{}@{}?arch=amd64",
            library.name,
            library.version.replace('+', "%2B")
        );
        json!({
            "type": "library",
            "bom-ref": url,
            "name": library.name,
            "version": library.version,
            "purl": url,
        })
    });
    let components: Vec<_> = parts
        .0
        .iter()
        .map(|part| {
            let mut component = json!({
                "type": "library",
                "bom-ref": part.url(),
                "name": part.name,
                "version": part.version,
                "purl": part.url(),
                "licenses": [{ "expression": expression(&part.license) }],
            });
            if let Some(sum) = &part.checksum {
                component["hashes"] = json!([{ "alg": "SHA-256", "content": sum }]);
            }
            component
        })
        .chain(of_debian)
        .collect();
    let dependencies: Vec<_> = parts
        .0
        .iter()
        .map(|part| {
            let mut on: Vec<_> = part
                .uses
                .iter()
                .filter_map(|id| urls.get(id.as_str()))
                .collect();
            on.sort();
            on.dedup();
            json!({ "ref": part.url(), "dependsOn": on })
        })
        .collect();
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": timestamp(epoch)?,
            "component": { "type": "application", "bom-ref": "permafrost", "name": "permafrost", "version": version },
        },
        "components": components,
        "dependencies": dependencies,
    });
    Ok(serde_json::to_string_pretty(&document).context("write JSON")? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licenses_are_expressions() {
        assert_eq!(expression("MIT/Apache-2.0"), "MIT OR Apache-2.0");
        assert_eq!(expression("MIT / Apache-2.0"), "MIT OR Apache-2.0");
        assert_eq!(expression("MIT AND (ISC OR Zlib)"), "MIT AND (ISC OR Zlib)");
    }

    #[test]
    fn another_form_of_the_metadata_is_an_error() {
        let sums = BTreeMap::new();
        for metadata in [
            json!({}),
            json!({ "packages": [], "resolve": null }),
            json!({ "packages": [{ "name": "permafrost-server" }], "resolve": { "nodes": [] } }),
        ] {
            assert!(Parts::reachable(&metadata, &sums).is_none(), "{metadata}");
        }
    }

    #[test]
    fn only_what_is_linked_is_listed() {
        let package = |name: &str, kind: &str| {
            json!({
                "id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0",
                "manifest_path": format!("/{name}/Cargo.toml"), "targets": [{ "kind": [kind] }],
            })
        };
        let on = |name: &str, kind: Value| json!({ "pkg": name, "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [
                package("permafrost-server", "bin"), package("linked", "lib"), package("derive", "proc-macro"),
                package("build", "lib"), package("other", "lib"),
            ],
            "resolve": { "nodes": [
                { "id": "permafrost-server", "deps": [
                    on("linked", Value::Null), on("derive", Value::Null), on("build", json!("build")),
                ] },
                { "id": "linked", "deps": [] }, { "id": "derive", "deps": [] },
                { "id": "build", "deps": [] }, { "id": "other", "deps": [] },
            ] },
        });
        let sums = BTreeMap::from([(("linked".to_owned(), "1.0.0".to_owned()), "ab".to_owned())]);
        let parts = Parts::reachable(&metadata, &sums).unwrap();
        let names: Vec<_> = parts.0.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names, ["linked", "permafrost-server"]);
        assert_eq!(parts.foreign().count(), 1);
        let libraries = [Library {
            name: "libc6".to_owned(),
            version: "2.36-9+deb12u10".to_owned(),
        }];
        let text = document(&parts, &libraries, "0.1.0", 0).unwrap();
        let document: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(document["metadata"]["timestamp"], "1970-01-01T00:00:00Z");
        assert_eq!(
            document["components"][0]["licenses"][0]["expression"],
            "MIT OR Apache-2.0"
        );
        assert_eq!(document["components"][0]["hashes"][0]["content"], "ab");
        assert_eq!(
            document["components"][2]["purl"],
            "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64"
        );
        assert_eq!(
            document["dependencies"][1]["dependsOn"],
            json!(["pkg:cargo/linked@1.0.0"])
        );
    }
}
