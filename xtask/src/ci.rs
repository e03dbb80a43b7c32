//! `cargo xtask test`: everything that CI runs, in order.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use permafrost_tests::{binaries, browser, criu, etcd, faketime, podman, promtool, runc};

use crate::setup::{self, Criu};
use crate::{deny, fuzz, guest, paths, schema, tidy, tools, ui};

/// Results of a test run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl std::ops::AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Runs everything; `quick` leaves out what takes minutes: fuzzing and the guest, and most crash cuts.
///
/// The last line of all output is the summary, alone on its line; whether all is well is the answer.
pub(crate) fn run(quick: bool) -> Result<bool> {
    let mut total = Count::default();
    let mut failures = Vec::new();
    let begun = Instant::now();
    for stage in stages(quick) {
        for (name, outcome) in at_once(stage) {
            total += outcome;
            if outcome.failed > 0 {
                failures.push(name);
            }
        }
    }
    println!("\n=== everything: {:.0} s", begun.elapsed().as_secs_f64());
    if !failures.is_empty() {
        println!("=== failed: {}", failures.join(", "));
    }
    let skipped = if total.skipped > 0 {
        format!(", {} skipped", total.skipped)
    } else {
        String::new()
    };
    println!("{} passed, {} failed{skipped}", total.passed, total.failed);
    std::io::stdout().flush().context("write the summary")?;
    Ok(total.failed == 0)
}

/// Name of a step, and the function that runs it.
type Step = (&'static str, Box<dyn FnOnce() -> Result<Count> + Send>);

/// Returns the steps in order, as stages: the steps of a stage run at the same time.
fn stages(quick: bool) -> Vec<Vec<Step>> {
    let mut stages: Vec<Vec<Step>> = vec![
        vec![("format", Box::new(format))],
        vec![("dependencies", Box::new(dependencies))],
        vec![("tidy", Box::new(tidy::run))],
        vec![("lints", Box::new(lints))],
        vec![("build", Box::new(move || build(quick)))],
    ];
    let mut beside_tests: Vec<Step> = vec![("tests", Box::new(move || tests(quick)))];
    if !quick {
        beside_tests.push(("fuzz", Box::new(fuzz_when_idle)));
    }
    stages.push(beside_tests);
    if !quick {
        stages.push(vec![
            (
                "schema",
                Box::new(|| schema::run(schema::CI_EXAMPLES, schema::CI_SEED)),
            ),
            ("guest", Box::new(on_the_guest)),
        ]);
    }
    stages
}

/// Builds what later steps run, so that none of them waits for another's build.
fn build(quick: bool) -> Result<Count> {
    // Not the benchmarks: the lints compile them, and nothing runs them here.
    cargo(&["build", "--workspace", "--lib", "--bins", "--tests"])?;
    match quick {
        true => Ok(Count::default()),
        false => fuzz::build_tests(),
    }
}

/// Fuzzes with the processor time that the tests leave: they mostly wait, and some have time limits.
fn fuzz_when_idle() -> Result<Count> {
    // Of this thread, and what it starts.
    rustix::process::nice(19).context("lower the priority")?;
    fuzz::run(fuzz::CI_SECONDS)
}

/// Runs the steps of a stage at the same time, and returns the outcome of each; an error is one failed test.
fn at_once(stage: Vec<Step>) -> Vec<(&'static str, Count)> {
    std::thread::scope(|scope| {
        let running: Vec<_> = stage
            .into_iter()
            .map(|(name, step)| (name, scope.spawn(move || one(name, step))))
            .collect();
        let failed = Count {
            failed: 1,
            ..Count::default()
        };
        running
            .into_iter()
            .map(|(name, thread)| (name, thread.join().unwrap_or(failed)))
            .collect()
    })
}

fn one(name: &str, step: impl FnOnce() -> Result<Count>) -> Count {
    let start = Instant::now();
    println!("\n=== {name}");
    let outcome = step();
    let took = start.elapsed().as_secs_f64();
    match outcome {
        Ok(count) => {
            let verdict = if count.failed == 0 { "ok" } else { "FAILED" };
            println!("=== {name}: {verdict} ({took:.1} s)");
            count
        }
        Err(error) => {
            println!("=== {name}: FAILED ({took:.1} s): {error:#}");
            Count {
                failed: 1,
                ..Count::default()
            }
        }
    }
}

/// Manifest of the fuzz targets, which are a workspace of their own.
const FUZZ_MANIFEST: &str = "fuzz/Cargo.toml";

fn format() -> Result<Count> {
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["fmt", "--check", "--manifest-path", FUZZ_MANIFEST])
}

/// Checks licenses, bans and sources of all dependencies against `deny.toml`.
fn dependencies() -> Result<Count> {
    let rules = deny::Rules::read()?;
    let mut count = Count::default();
    for manifest in ["Cargo.toml", FUZZ_MANIFEST] {
        let wrong = rules.check(&deny::metadata(manifest)?)?;
        for line in &wrong {
            println!("{manifest}: {line}");
        }
        if wrong.is_empty() {
            count.passed += 1;
        } else {
            count.failed += 1;
        }
    }
    Ok(count)
}

fn lints() -> Result<Count> {
    cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ])?;
    cargo(&[
        "clippy",
        "--all-targets",
        "--manifest-path",
        FUZZ_MANIFEST,
        "--",
        "-D",
        "warnings",
    ])
}

fn on_the_guest() -> Result<Count> {
    let outcome = guest::run(&[])?;
    Ok(Count {
        passed: outcome.passed,
        failed: outcome.failed,
        skipped: 0,
    })
}

fn cargo(arguments: &[&str]) -> Result<Count> {
    run_counted(cargo_command().args(arguments))
}

/// Returns a `cargo` command in the workspace.
pub(crate) fn cargo_command() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(paths::workspace());
    // What `cargo run` tells this program of itself: build scripts that watch it, as ring's does, would have half of
    // the dependencies built anew after each build by hand, and again before the next.
    for (name, _) in std::env::vars_os() {
        if is_of_this_program(&name.to_string_lossy()) {
            command.env_remove(name);
        }
    }
    match tools::protoc() {
        Ok(Some(protoc)) => {
            command.env(tools::PROTOC, protoc);
        }
        Ok(None) => {}
        // The build says what it lacks; another command may not need it.
        Err(error) => ui::say(&format!("no protoc: {error:#}")),
    }
    command
}

/// Returns true if cargo sets the variable for the program that it runs, and for no other.
fn is_of_this_program(variable: &str) -> bool {
    variable.starts_with("CARGO_PKG_") || variable.starts_with("CARGO_MANIFEST_")
}

/// Targets whose tests run at the same time as those of the others, one target after another: the tests of clusters
/// mostly wait. All targets are in one of them, and each takes about half of the time. Without a run of rustdoc for each
/// crate, which find nothing: no example is in the documentation (`tidy`).
const HALVES: [&[&str]; 2] = [
    &["--test", "[a-c]*"],
    &["--lib", "--bins", "--test", "[d-z]*"],
];

/// Runs unit, property, crash and end-to-end tests.
fn tests(quick: bool) -> Result<Count> {
    let setting = setting_of_tests(quick)?;
    let halves = std::thread::scope(|scope| {
        let halves = HALVES.map(|targets| {
            let mut command = cargo_command();
            command
                .args(["test", "--workspace", "--no-fail-fast"])
                .args(targets)
                .envs(setting.iter().map(|(name, value)| (name, value)));
            scope.spawn(move || run_counted(&mut command))
        });
        halves.map(|half| match half.join() {
            Ok(count) => count,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    });
    let mut count = Count::default();
    for half in halves {
        count += half?;
    }
    Ok(count)
}

/// Fetches what tests need, and returns the variables that tell them where it is.
fn setting_of_tests(quick: bool) -> Result<Vec<(&'static str, OsString)>> {
    let mut setting = vec![(binaries::BIN_DIR, binaries::dir()?.into())];
    if quick {
        setting.extend([
            ("PERMAFROST_CRASH_CUTS", "500".into()),
            ("PERMAFROST_KILL_ROUNDS", "3".into()),
            ("PERMAFROST_CHAOS_ROUNDS", "8".into()),
        ]);
    } else {
        // The test itself does 100: five minutes, and as many as the rest of the tests.
        setting.push(("PERMAFROST_CHAOS_ROUNDS", "40".into()));
    }
    match setup::criu()? {
        Criu::Works(path) => {
            // It works, so a test that is skipped for want of it is a failed one.
            setting.extend([(criu::CRIU, path.into()), (criu::REQUIRE_CRIU, "1".into())]);
        }
        Criu::CannotRun(why) => {
            ui::say_loudly(&format!(
                "END-TO-END TESTS ARE SKIPPED: CRIU cannot run here: {why}"
            ));
        }
    }
    match tools::etcd() {
        Ok(path) => {
            setting.extend([(etcd::ETCD, path.into()), (etcd::REQUIRE_ETCD, "1".into())]);
        }
        Err(why) => {
            ui::say_loudly(&format!("CLUSTER TESTS ARE SKIPPED: no etcd: {why:#}"));
        }
    }
    if let Err(why) = tools::etcdctl() {
        // The test that needs it fails without.
        ui::say(&format!("no etcdctl: {why:#}"));
    }
    match tools::faketime() {
        Ok(path) => {
            setting.extend([
                (faketime::FAKETIME, path.into()),
                (faketime::REQUIRE_FAKETIME, "1".into()),
            ]);
        }
        Err(why) => {
            ui::say_loudly(&format!(
                "TESTS WITH WRONG CLOCKS ARE SKIPPED: no libfaketime: {why:#}"
            ));
        }
    }
    match tools::runc() {
        Ok(()) => {
            setting.push((runc::REQUIRE_RUNC, "1".into()));
        }
        Err(why) => ui::say_loudly(&format!(
            "TESTS WITH CONTAINERS ARE SKIPPED: no runc: {why:#}"
        )),
    }
    match tools::podman() {
        Ok(()) => {
            setting.push((podman::REQUIRE_PODMAN, "1".into()));
        }
        Err(why) => ui::say_loudly(&format!(
            "TESTS WITH PODMAN ARE SKIPPED: no podman: {why:#}"
        )),
    }
    match tools::browser() {
        Ok(()) => {
            setting.push((browser::REQUIRE_BROWSER, "1".into()));
        }
        Err(why) => ui::say_loudly(&format!(
            "TESTS WITH A BROWSER ARE SKIPPED: no Chromium: {why:#}"
        )),
    }
    match tools::promtool() {
        Ok(()) => {
            setting.push((promtool::REQUIRE_PROMTOOL, "1".into()));
        }
        Err(why) => ui::say_loudly(&format!(
            "TESTS OF ALERT RULES ARE SKIPPED: no promtool: {why:#}"
        )),
    }
    if let Err(why) = tools::s3() {
        // The tests that need it fail without.
        ui::say(&format!("no S3 server: {why:#}"));
    }
    if let Err(why) = tools::slurm() {
        // They fail without it: nothing else shows that a preempted job survives.
        ui::say(&format!("no Slurm: {why:#}"));
    }
    Ok(setting)
}

/// Runs a command, passes its output on, and counts the tests in it.
///
/// # Errors
/// Fails when the command does without any test having failed.
pub(crate) fn run_counted(command: &mut Command) -> Result<Count> {
    let line: Vec<_> = command.get_args().map(OsStr::to_string_lossy).collect();
    let program = std::path::Path::new(command.get_program())
        .file_name()
        .unwrap_or(command.get_program());
    let line = format!("{} {}", program.to_string_lossy(), line.join(" "));
    let (output, end) = io::pipe().context("make a pipe")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(end.try_clone().context("make a pipe")?)
        .stderr(end)
        .spawn()
        .with_context(|| format!("run `{line}`"))?;
    // The pipe ends when the child has ended.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let count = pass_on(output, |lines| println!("{lines}"));
    let status = child.wait().with_context(|| format!("wait for `{line}`"))?;
    if !status.success() && count.failed == 0 {
        bail!("`{line}` fails ({status})");
    }
    Ok(count)
}

/// Says all lines and counts the tests in them. The lines of a target's tests are said together, at its end: those of
/// another command do not come in between.
fn pass_on(from: impl Read, mut say: impl FnMut(&str)) -> Count {
    let mut count = Count::default();
    let mut together = String::new();
    for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        let is_begin = line.trim_start().starts_with("Running ");
        let is_end = line.starts_with("test result: ");
        count += counted(&line).unwrap_or_default();
        if is_begin && !together.is_empty() {
            say(&std::mem::take(&mut together));
        }
        if !is_begin && together.is_empty() {
            say(&line);
            continue;
        }
        together += &line;
        if is_end {
            say(&std::mem::take(&mut together));
        } else {
            together.push('\n');
        }
    }
    if !together.is_empty() {
        say(&together);
    }
    count
}

/// Returns the counts in a line of a test run: libtest's summary, or the line of a skipped test.
fn counted(line: &str) -> Option<Count> {
    if line.starts_with("SKIPPED: ") {
        // libtest counts it as passed.
        return Some(Count {
            passed: 0,
            failed: 0,
            skipped: 1,
        });
    }
    let (_, numbers) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |what: &str| -> Option<u64> {
        numbers
            .split(';')
            .find_map(|part| part.trim().strip_suffix(what)?.trim().parse().ok())
    };
    Some(Count {
        passed: number("passed")?,
        failed: number("failed")?,
        skipped: number("ignored")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_are_counted_and_skips_seen() {
        let line = "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(
            counted(line),
            Some(Count {
                passed: 12,
                failed: 1,
                skipped: 2
            })
        );
        assert_eq!(counted("SKIPPED: a test: no CRIU").unwrap().skipped, 1);
        assert_eq!(counted("test result"), None);
    }

    #[test]
    fn every_target_with_tests_is_in_one_half() {
        let metadata = deny::metadata("Cargo.toml").unwrap();
        let targets = metadata["packages"].as_array().unwrap().iter();
        let targets = targets.filter(|package| package["source"].is_null());
        let names = targets
            .flat_map(|package| package["targets"].as_array().unwrap())
            .filter(|target| target["kind"][0] == "test")
            .map(|target| target["name"].as_str().unwrap());
        let firsts: Vec<_> = names.filter_map(|name| name.chars().next()).collect();
        assert!(firsts.len() > 50);
        assert!(firsts.iter().all(char::is_ascii_lowercase));
        assert!(HALVES[0].contains(&"[a-c]*") && HALVES[1].contains(&"[d-z]*"));
    }

    #[test]
    fn lines_of_a_target_are_said_together() {
        let output = "  Compiling x\n   Running a\nrunning 1 test\ntest result: ok. 1 passed; 0 failed; 0 ignored\nerror: y\n   Running b\nSKIPPED: c";
        let mut said = Vec::new();
        let count = pass_on(output.as_bytes(), |lines| said.push(lines.lines().count()));
        assert_eq!(said, [1, 3, 1, 2]);
        assert_eq!((count.passed, count.failed, count.skipped), (1, 0, 1));
    }

    #[test]
    fn steps_of_a_stage_run_at_the_same_time_and_an_error_is_a_failed_test() {
        let (to_other, from_other) = std::sync::mpsc::channel();
        let waiting = move || {
            let limit = std::time::Duration::from_secs(60);
            from_other
                .recv_timeout(limit)
                .context("hear of the other step")?;
            Ok(Count {
                passed: 3,
                ..Count::default()
            })
        };
        let failing = move || {
            to_other.send(()).context("tell the other step")?;
            bail!("no reason")
        };
        let outcomes = at_once(vec![
            ("waiting", Box::new(waiting)),
            ("failing", Box::new(failing)),
        ]);
        let counts: Vec<_> = outcomes
            .iter()
            .map(|(name, count)| (*name, count.passed, count.failed))
            .collect();
        assert_eq!(counts, [("waiting", 3, 0), ("failing", 0, 1)]);
    }

    #[test]
    fn a_failing_command_without_tests_is_an_error() {
        assert!(run_counted(Command::new("sh").args(["-c", "exit 3"])).is_err());
        let mut with_tests = Command::new("sh");
        with_tests.args([
            "-c",
            "echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 x'; exit 101",
        ]);
        assert_eq!(
            run_counted(&mut with_tests).unwrap(),
            Count {
                passed: 1,
                failed: 1,
                skipped: 0
            }
        );
    }
}
