//! Licenses, bans and sources of dependencies, as `cargo deny check licenses bans sources` checks them by `deny.toml`.
//!
//! cargo-deny itself is a program of several hundred crates, which would take CI minutes of processor time to build,
//! and its advisories come from a git repository. What needs neither is checked here: everything that `cargo
//! metadata` lists for the platform that is built, against the fields of `deny.toml` named below. A field that is not
//! known here is refused, so that no rule is written that nobody checks.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;
use serde_json::Value;
use spdx::{Expression, ParseMode};

use crate::{ci, paths};

/// Contents of `deny.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Rules {
    graph: Graph,
    /// Read by cargo-deny alone.
    #[serde(rename = "advisories")]
    _advisories: BTreeMap<String, String>,
    licenses: Licenses,
    bans: Bans,
    sources: Sources,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Bans {
    multiple_versions: Verdict,
    wildcards: Verdict,
    allow_wildcard_paths: bool,
    deny: Vec<Crate>,
    skip: Vec<Crate>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Sources {
    unknown_registry: Verdict,
    unknown_git: Verdict,
    allow_registry: Vec<String>,
}

/// Verdict on a violation. cargo-deny has softer ones, which are not supported here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    Deny,
}

/// A crate in the form `NAME` or `NAME@VERSION`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Crate {
    #[serde(rename = "crate")]
    spec: String,
}

/// A package, as `cargo metadata` lists it.
#[derive(Clone, Debug, Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    source: Option<String>,
    dependencies: Vec<Dependency>,
}

#[derive(Clone, Debug, Deserialize)]
struct Dependency {
    name: String,
    req: String,
    path: Option<String>,
}

/// Returns the output of `cargo metadata` for the packages that are built for the platform of [`Rules`].
///
/// # Errors
/// The command fails: `Cargo.lock` is not up to date, perhaps.
pub(crate) fn metadata(manifest: &str) -> Result<Value> {
    let target = Rules::read()?.graph.targets.join(",");
    let output = ci::cargo_command()
        .args(["metadata", "--locked", "--format-version", "1"])
        .args(["--filter-platform", &target, "--manifest-path", manifest])
        .output()
        .context("run cargo metadata")?;
    if !output.status.success() {
        bail!(
            "cargo metadata of {manifest}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    serde_json::from_slice(&output.stdout).context("read the output of cargo metadata")
}

impl Rules {
    /// Reads and parses `deny.toml`.
    pub(crate) fn read() -> Result<Self> {
        let path = paths::workspace().join("deny.toml");
        let text =
            std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        basic_toml::from_str(&text).with_context(|| format!("read {}", path.display()))
    }

    /// Returns all violations of the rules, a line each.
    pub(crate) fn check(&self, metadata: &Value) -> Result<Vec<String>> {
        let packages = built(metadata)?;
        let mut wrong = Vec::new();
        for package in &packages {
            wrong.extend(self.check_license(package));
            wrong.extend(self.check_source(package));
            wrong.extend(self.check_requirements(package));
            if self.bans.deny.iter().any(|banned| banned.names(package)) {
                wrong.push(format!("{} is banned", package.full_name()));
            }
        }
        wrong.extend(self.check_versions(&packages));
        Ok(wrong)
    }

    fn check_license(&self, package: &Package) -> Option<String> {
        let name = package.full_name();
        let Some(license) = &package.license else {
            return Some(format!("{name} names no license"));
        };
        // Older crates write MIT/Apache-2.0.
        let Ok(expression) = Expression::parse_mode(license, ParseMode::LAX) else {
            return Some(format!("{name} has a license that is none: {license:?}"));
        };
        let allowed = |licensee: &spdx::LicenseReq| {
            let wanted = licensee.to_string();
            self.licenses.allow.contains(&wanted)
        };
        (!expression.evaluate(allowed)).then(|| format!("{name} has the license {license}"))
    }

    fn check_source(&self, package: &Package) -> Option<String> {
        // A path: of this workspace.
        let source = package.source.as_ref()?;
        let (Verdict::Deny, Verdict::Deny) =
            (self.sources.unknown_registry, self.sources.unknown_git);
        let known = source.strip_prefix("registry+").is_some_and(|registry| {
            self.sources
                .allow_registry
                .iter()
                .any(|allowed| allowed == registry)
        });
        (!known).then(|| format!("{} comes from {source}", package.full_name()))
    }

    /// Checks the requirements of this workspace's crates; the requirements of other crates are not checked.
    fn check_requirements(&self, package: &Package) -> Vec<String> {
        let Verdict::Deny = self.bans.wildcards;
        if package.source.is_some() {
            return Vec::new();
        }
        let wildcard = |dependency: &&Dependency| {
            dependency.req == "*" && !(self.bans.allow_wildcard_paths && dependency.path.is_some())
        };
        let wild = package.dependencies.iter().filter(wildcard);
        wild.map(|dependency| {
            format!(
                "{} takes any version of {}",
                package.full_name(),
                dependency.name
            )
        })
        .collect()
    }

    fn check_versions(&self, packages: &[Package]) -> Vec<String> {
        let Verdict::Deny = self.bans.multiple_versions;
        let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for package in packages {
            if !self.bans.skip.iter().any(|skipped| skipped.names(package)) {
                let known = versions.entry(&package.name).or_default();
                known.insert(&package.version);
            }
        }
        let several = versions.into_iter().filter(|(_, known)| known.len() > 1);
        several
            .map(|(name, known)| {
                let known: Vec<_> = known.into_iter().collect();
                format!(
                    "{name} has several versions ({}): use one, or skip the older ones in deny.toml",
                    known.join(", ")
                )
            })
            .collect()
    }
}

impl Crate {
    fn names(&self, package: &Package) -> bool {
        match self.spec.split_once('@') {
            Some((name, version)) => name == package.name && version == package.version,
            None => self.spec == package.name,
        }
    }
}

impl Package {
    fn full_name(&self) -> String {
        format!("{} {}", self.name, self.version)
    }
}

/// Returns the packages of the resolved graph; `packages` lists those of other platforms, too.
fn built(metadata: &Value) -> Result<Vec<Package>> {
    let nodes = metadata["resolve"]["nodes"]
        .as_array()
        .context("no graph of dependencies")?;
    let ids: BTreeSet<&str> = nodes
        .iter()
        .filter_map(|node| node["id"].as_str())
        .collect();
    let all: Vec<Package> = Vec::deserialize(&metadata["packages"]).context("read the packages")?;
    Ok(all
        .into_iter()
        .filter(|package| ids.contains(package.id.as_str()))
        .collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(name: &str, version: &str, license: &str) -> Value {
        json!({
            "id": format!("{name}@{version}"), "name": name, "version": version, "license": license,
            "source": "registry+https://github.com/rust-lang/crates.io-index", "dependencies": [],
        })
    }

    fn graph(packages: &[Value]) -> Value {
        let nodes: Vec<_> = packages
            .iter()
            .map(|package| json!({"id": package["id"]}))
            .collect();
        json!({"packages": packages, "resolve": {"nodes": nodes}})
    }

    fn wrong(packages: &[Value]) -> Vec<String> {
        Rules::read().unwrap().check(&graph(packages)).unwrap()
    }

    #[test]
    fn licenses_are_expressions() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "MIT OR GPL-3.0",
            "(MIT OR GPL-3.0-only) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT",
        ] {
            assert!(wrong(&[package("a", "1.0.0", good)]).is_empty(), "{good}");
        }
        for bad in ["GPL-3.0-only", "MIT AND GPL-3.0-only", "proprietary", ""] {
            assert_eq!(wrong(&[package("a", "1.0.0", bad)]).len(), 1, "{bad}");
        }
        let mut none = package("a", "1.0.0", "MIT");
        none["license"] = Value::Null;
        assert_eq!(wrong(&[none]), ["a 1.0.0 names no license"]);
    }

    #[test]
    fn only_the_named_registry_is_a_source() {
        for source in [
            "registry+https://example.org/index",
            "git+https://github.com/a/b?rev=1#1",
            "sparse+https://example.org/",
        ] {
            let mut foreign = package("a", "1.0.0", "MIT");
            foreign["source"] = source.into();
            assert_eq!(wrong(&[foreign]).len(), 1, "{source}");
        }
    }

    #[test]
    fn banned_crates_and_second_versions_are_found() {
        assert_eq!(
            wrong(&[package("openssl-sys", "0.9.1", "MIT")]),
            ["openssl-sys 0.9.1 is banned"]
        );
        let two = [package("a", "1.0.0", "MIT"), package("a", "2.0.0", "MIT")];
        let found = wrong(&two);
        assert!(
            found[0].contains("several versions (1.0.0, 2.0.0)"),
            "{found:?}"
        );
        // Of another platform.
        let mut elsewhere = graph(&two);
        elsewhere["resolve"]["nodes"] = json!([{"id": "a@1.0.0"}]);
        let found = Rules::read().unwrap().check(&elsewhere).unwrap();
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn a_crate_of_ours_names_the_versions_it_takes() {
        let mut own = package("own", "0.1.0", "Apache-2.0");
        own["source"] = Value::Null;
        own["dependencies"] = json!([
            {"name": "a", "req": "*", "path": null},
            {"name": "b", "req": "*", "path": "../b"},
            {"name": "c", "req": "^1", "path": null},
        ]);
        assert_eq!(wrong(&[own]), ["own 0.1.0 takes any version of a"]);
    }

    #[test]
    fn a_rule_that_is_not_known_is_refused() {
        let path = paths::workspace().join("deny.toml");
        let text = std::fs::read_to_string(path).unwrap();
        assert!(basic_toml::from_str::<Rules>(&text).is_ok());
        let odd = text.replace("wildcards = ", "wildcats = ");
        assert!(basic_toml::from_str::<Rules>(&odd).is_err());
    }
}
