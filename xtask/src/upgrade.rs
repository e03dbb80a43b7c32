//! `cargo xtask upgrade`: a cluster of the programs of an earlier release and of these, rolled forward and back.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use permafrost_tests::{binaries, criu, etcd};

use crate::setup::{self, Criu};
use crate::{ci, paths, tools};

/// Programs that a node and who uses it consist of.
const PROGRAMS: [&str; 4] = [
    "permafrostd",
    "permafrost",
    "permafrost-action",
    "permafrost-workload",
];

/// The earlier release.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Options {
    /// Commit or tag of the earlier release [default: the newest tag].
    #[arg(long, value_name = "REV")]
    from: Option<String>,
}

/// Builds the earlier release under target/upgrade, in the profile of this program, and runs the test of upgrades
/// between its programs and the present ones.
///
/// # Errors
/// There is no tag and no revision was named; something does not build; the test fails.
pub(crate) fn run(options: &Options) -> Result<()> {
    let from = match &options.from {
        Some(from) => from.clone(),
        None => newest_tag()?,
    };
    let commit = git(&["rev-parse", "--verify", &format!("{from}^{{commit}}")])?;
    println!("from {from} ({commit})");
    let directory = paths::target().join("upgrade");
    let old = build(&directory, &commit)?;
    // The build of the earlier release has put its programs in the place of these, and its plugin, whose file has the
    // same name in each release: cargo takes that for the present one.
    let mut count = ci::Count::default();
    for line in [
        &["clean", "--package", "permafrost-criu-plugin"],
        &["build", "--workspace", "--bins"],
    ] {
        let mut cargo = ci::cargo_command();
        cargo.args(line);
        if binaries::dir()?.ends_with("release") {
            cargo.arg("--release");
        }
        count += ci::run_counted(&mut cargo)?;
    }
    let mut command = ci::cargo_command();
    command
        .args(["test", "-p", "permafrost-tests", "--test", "upgrade"])
        .args(["--", "--nocapture"])
        .env(binaries::BIN_DIR, binaries::dir()?)
        .env("PERMAFROST_OLD_BIN_DIR", old);
    match setup::criu()? {
        Criu::Works(path) => {
            command.env(criu::CRIU, path).env(criu::REQUIRE_CRIU, "1");
        }
        Criu::CannotRun(why) => bail!("an upgrade needs CRIU, and it cannot run here: {why}"),
    }
    let path = tools::etcd().context("an upgrade needs etcd")?;
    command.env(etcd::ETCD, path).env(etcd::REQUIRE_ETCD, "1");
    count += ci::run_counted(&mut command)?;
    println!("{} passed, {} failed", count.passed, count.failed);
    if count.failed > 0 || count.passed == 0 {
        bail!("these programs and those of {from} do not make one cluster");
    }
    Ok(())
}

fn newest_tag() -> Result<String> {
    let tags = git(&["tag", "--list", "--sort=-version:refname"])?;
    match tags.lines().next() {
        Some(tag) => Ok(tag.to_owned()),
        None => bail!("there is no tag, so no earlier release: name a commit with --from REV"),
    }
}

/// Builds a commit and returns the directory with copies of its programs.
///
/// It shares the dependencies of this build: both have one target directory, in which only what differs is built.
fn build(directory: &Path, commit: &str) -> Result<PathBuf> {
    let programs = directory.join(commit);
    if PROGRAMS.iter().all(|name| programs.join(name).exists()) {
        println!("built before: {}", programs.display());
        return Ok(programs);
    }
    let source = directory.join("source");
    if source.exists() {
        git(&["worktree", "remove", "--force", text(&source)?])?;
    }
    git(&["worktree", "prune"])?;
    git(&["worktree", "add", "--detach", text(&source)?, commit])?;
    let mut cargo = ci::cargo_command();
    let own = binaries::dir()?;
    cargo
        .args(["build", "--workspace"])
        .args(PROGRAMS.iter().flat_map(|name| ["--bin", name]))
        .current_dir(&source)
        .env("CARGO_TARGET_DIR", paths::target());
    if own.ends_with("release") {
        cargo.arg("--release");
    }
    let count = ci::run_counted(&mut cargo)?;
    if count.failed > 0 {
        bail!("the earlier release does not build");
    }
    std::fs::create_dir_all(&programs).context("make a directory for the programs")?;
    for name in PROGRAMS {
        std::fs::copy(own.join(name), programs.join(name))
            .with_context(|| format!("copy {name} of the earlier release"))?;
    }
    git(&["worktree", "remove", "--force", text(&source)?])?;
    Ok(programs)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}

/// Runs git in the workspace and returns what it prints.
fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .current_dir(paths::workspace())
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("run git")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("git {}: {}", arguments.join(" "), said.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
