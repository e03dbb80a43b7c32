//! Programs for the packages, without a trace of the directories that they were built in.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::{BuildHost, CRATES};

/// Profile of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BuildProfile {
    /// For packages that are given to others.
    Release,
    /// The programs in `target/debug`, with their paths, for trying the packaging.
    Dev,
}

/// Programs and libraries that are packed, as cargo names them.
const PROGRAMS: [&str; 4] = [
    "permafrost",
    "permafrostd",
    "permafrost-action",
    "libpermafrost_plugin.so",
];

/// Directory that stands for the tree in messages of the programs.
const TREE: &str = "/usr/src/permafrost";

/// Directory that stands for cargo's in messages of the programs.
const CARGO: &str = "/usr/src/cargo";

/// Programs and libraries that were built.
pub(super) struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// Builds the programs of the tree at `source`. A release has a target directory of its own, because its compiler
    /// flags would have everything built anew that others have built in `target`.
    pub(super) fn build(
        source: &Path,
        profile: BuildProfile,
        host: &dyn BuildHost,
    ) -> Result<Self> {
        let mut command = host.cargo();
        command.current_dir(source).args(["build", "--locked"]);
        for name in CRATES {
            command.args(["--package", name]);
        }
        let dir = match profile {
            BuildProfile::Dev => {
                let target = host.workspace().join("target");
                command.arg("--target-dir").arg(&target);
                target.join("debug")
            }
            BuildProfile::Release => {
                let target = source.join("target/package");
                let (rust, c) = flags(source)?;
                command
                    .args(["--release", "--target-dir"])
                    .arg(&target)
                    .env("CARGO_ENCODED_RUSTFLAGS", rust)
                    .env("CARGO_INCREMENTAL", "0")
                    .env("CFLAGS", c);
                target.join("release")
            }
        };
        let status = command.status().context("run cargo build")?;
        if !status.success() {
            bail!("the programs cannot be built ({status})");
        }
        Ok(Self { dir })
    }

    /// Takes the programs in a directory, which were built before.
    ///
    /// # Errors
    /// One is missing.
    pub(super) fn there(dir: &Path) -> Result<Self> {
        for name in PROGRAMS {
            let path = dir.join(name);
            if !path.is_file() {
                bail!("{} is not there: build the workspace first", path.display());
            }
        }
        // Other directories than the caller's run them.
        let dir = dir.canonicalize().context("find the programs")?;
        Ok(Self { dir })
    }

    /// Returns the directory of the programs.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of a program or library.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// Returns the flags of the compilers of Rust, as CARGO_ENCODED_RUSTFLAGS has them, and of C.
fn flags(source: &Path) -> Result<(String, String)> {
    let home = std::env::var_os("HOME").context("HOME is not set")?;
    let cargo = std::env::var_os("CARGO_HOME")
        .map_or_else(|| Path::new(&home).join(".cargo"), PathBuf::from);
    let source = source.canonicalize().context("find the tree")?;
    let pairs = [(source.as_path(), TREE), (cargo.as_path(), CARGO)];
    let map = |flag: &str| pairs.map(|(from, to)| format!("{flag}={}={to}", from.display()));
    Ok((
        map("--remap-path-prefix").join("\x1f"),
        map("-ffile-prefix-map").join(" "),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compilers_replace_the_directory_of_the_tree() {
        let tree = tempfile::tempdir().unwrap();
        let path = tree.path().canonicalize().unwrap();
        // The flags have no `..`, which compilers would not find in the paths that they replace.
        let (rust, c) = flags(&tree.path().join("../").join(path.file_name().unwrap())).unwrap();
        let rust: Vec<_> = rust.split('\x1f').collect();
        assert_eq!(rust.len(), 2, "{rust:?}");
        let path = path.display();
        assert_eq!(rust[0], format!("--remap-path-prefix={path}={TREE}"));
        assert!(rust[1].ends_with(&format!("={CARGO}")), "{rust:?}");
        assert!(
            c.starts_with(&format!("-ffile-prefix-map={path}={TREE} ")),
            "{c}"
        );
    }
}
