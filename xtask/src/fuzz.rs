//! `cargo xtask fuzz`: builds the fuzz targets and runs each for a bounded time.
//!
//! On stable Rust, without cargo-fuzz: the coverage that libFuzzer steers by is a pass of LLVM that stable has
//! (`-Cpasses=sancov-module`); only the sanitizers need nightly, and in code without `unsafe` they find nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use permafrost_tests::binaries;

use crate::ci::{self, Count};
use crate::{paths, ui};

/// Time that each target runs in CI, seconds: enough to reach every branch near the surface from the seeds.
pub(crate) const CI_SECONDS: u64 = 20;

/// Compiler flags for the instrumentation that libFuzzer needs: edges taken, their addresses, and the operands of
/// comparisons.
const COVERAGE: [&str; 6] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Longest time for one input, seconds; a slower input is a finding.
const SLOWEST_INPUT_SECONDS: u64 = 10;
/// Most memory for one input, MiB; more is a finding: a length field alone must not cause an allocation.
const MOST_MEMORY_MIB: u64 = 512;

/// Builds the tests of the seeds.
///
/// # Errors
/// Fails when they do not build.
pub(crate) fn build_tests() -> Result<Count> {
    test_seeds(&["--no-run"])
}

/// Runs the tests of the seeds, which share dependencies with those of the workspace.
fn test_seeds(arguments: &[&str]) -> Result<Count> {
    ci::run_counted(
        ci::cargo_command()
            .arg("test")
            .args(arguments)
            .arg("--manifest-path")
            .arg(paths::workspace().join("fuzz/Cargo.toml"))
            .arg("--target-dir")
            .arg(main_target_dir()?),
    )
}

fn main_target_dir() -> Result<PathBuf> {
    let profiles = binaries::dir()?;
    let target_dir = profiles.parent().context("find the target directory")?;
    Ok(target_dir.to_owned())
}

/// Checks the seeds, builds every target, and runs each for `seconds`.
///
/// # Errors
/// Fails when the targets do not build.
pub(crate) fn run(seconds: u64) -> Result<Count> {
    let fuzz = paths::workspace().join("fuzz");
    let manifest = fuzz.join("Cargo.toml");
    let mut count = test_seeds(&[])?;
    let host = host()?;
    let target_dir = main_target_dir()?.join("fuzz");
    // With --target, build scripts and macros stay without instrumentation.
    ci::run_counted(
        ci::cargo_command()
            .args([
                "build",
                "--release",
                "--bins",
                "--target",
                &host,
                "--manifest-path",
            ])
            .arg(&manifest)
            .arg("--target-dir")
            .arg(&target_dir)
            .env("RUSTFLAGS", COVERAGE.join(" ")),
    )?;
    for name in targets(&fuzz)? {
        let task = ui::Task::begin(&format!("fuzz {name} for {seconds} s"));
        let binary = target_dir.join(&host).join("release").join(&name);
        match one(&fuzz, &name, &binary, seconds)? {
            Ok(runs) => {
                count.passed += 1;
                task.done(&format!("{runs} inputs, nothing found"));
            }
            Err(finding) => {
                count.failed += 1;
                task.done(&format!("FAILED\n{finding}"));
            }
        }
    }
    Ok(count)
}

/// Runs one target. Returns the number of inputs, or the end of its output about its finding.
fn one(fuzz: &Path, name: &str, binary: &Path, seconds: u64) -> Result<Result<String, String>> {
    let (corpus, artifacts) = (
        fuzz.join("corpus").join(name),
        fuzz.join("artifacts").join(name),
    );
    for dir in [&corpus, &artifacts] {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    let output = Command::new(binary)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={SLOWEST_INPUT_SECONDS}"))
        .arg(format!("-rss_limit_mb={MOST_MEMORY_MIB}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        // What is found goes into the first, the seeds stay as they are.
        .args([&corpus, &fuzz.join("seeds").join(name)])
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {}", binary.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let lines: Vec<&str> = said.lines().collect();
        return Ok(Err(lines[lines.len().saturating_sub(30)..].join("\n")));
    }
    // "Done 646120 runs in 6 second(s)"
    let runs = said
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("Done ")?.split(' ').next());
    Ok(Ok(runs.unwrap_or("an unknown number of").to_owned()))
}

/// Returns the names of the targets, which have one file each.
fn targets(fuzz: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(fuzz.join("fuzz_targets")).context("list the fuzz targets")? {
        let path: PathBuf = entry.context("list the fuzz targets")?.path();
        names.extend(
            path.file_stem()
                .map(|stem| stem.to_string_lossy().into_owned()),
        );
    }
    if names.is_empty() {
        bail!("there are no fuzz targets");
    }
    names.sort();
    Ok(names)
}

/// Returns the compiler's own target triple.
fn host() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .arg("-vV")
        .output()
        .context("run rustc")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .context("rustc names no host")
}
