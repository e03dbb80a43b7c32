//! `cargo xtask`: setting up, testing and measuring, each with one command.

#![forbid(unsafe_code)]

mod apt;
mod bench;
mod book;
mod ci;
mod demo;
mod deny;
mod fuzz;
mod guest;
mod package;
mod paths;
mod rig;
mod run_dir;
mod schema;
mod setup;
mod soak;
mod sources;
mod table;
mod tidy;
mod tools;
mod ui;
mod upgrade;

use std::process::ExitCode;

use clap::Parser;

/// Tasks of the workspace, run by a person or by CI.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Task {
    /// Find a CRIU that works here, etcd, protoc, libfaketime, Slurm, runc and podman, or fetch them under target/.
    Setup {
        /// Only CRIU and protoc, as lines for a shell: eval "$(cargo xtask setup --env)".
        #[arg(long)]
        env: bool,
    },
    /// Freeze a real process into permafrostd, show that it is gone, and bring it back.
    Demo(demo::Options),
    /// Run everything that CI runs: format, lints, unit, property, crash and end-to-end tests, fuzzing, the guest.
    Test {
        /// Leave out fuzzing and the guest, and most crash cuts.
        #[arg(long)]
        quick: bool,
    },
    /// Measure real dumps and restores beside CRIU's own ways: on one machine, or with a subcommand between two hosts.
    Bench(bench::Options),
    /// Run the crash tests longer than CI does.
    Soak(soak::Options),
    /// Build an earlier release, and roll a cluster of its programs forward to these, back and forward again.
    Upgrade(upgrade::Options),
    /// Make Debian packages, checksums and a bill of materials under target/packages, and check them.
    Package(permafrost_package::PackageOptions),
    /// Make everything that a release has, of a tree without changes, under target/release-files: packages, OCI image,
    /// book, bill of materials and checksums; and check them.
    Release(permafrost_package::PackageOptions),
    /// Write the parts of docs/ that repeat the source: exit codes, objects in JSON, options, events.
    Docs,
    /// Build the book of docs/ as HTML under target/book, with an mdBook that is fetched if it is missing.
    Book,
    /// Check what can be checked of the rules in ARCHITECTURE.md without compiling the workspace.
    Tidy,
    /// Build the fuzz targets and run each for a bounded time.
    Fuzz {
        /// Seconds for each target.
        #[arg(long, default_value_t = fuzz::CI_SECONDS)]
        seconds: u64,
    },
    /// Ask a daemon what its OpenAPI document allows, and what it does not, and compare the answers with it.
    Schema {
        /// Requests for each route.
        #[arg(long, default_value_t = 300)]
        examples: u32,
        /// Repeats a run.
        #[arg(long, default_value_t = u64::from(std::process::id()))]
        seed: u64,
    },
    /// Run the scenarios on an emulated NVDIMM, in QEMU.
    Guest {
        /// Names, or how they begin; all if none is given.
        scenarios: Vec<String>,
    },
}

impl Task {
    /// Returns true if the task shows how long CRIU takes. Tests do not: their processes inherit files of the mount
    /// namespace that tests are started in, and CRIU dumps none with files of another one.
    fn measures_criu(&self) -> bool {
        matches!(self, Self::Demo(_) | Self::Bench(_))
    }
}

fn main() -> ExitCode {
    match run(Task::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        // The tests have said why, and their summary is to stay the last line.
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            let mut line = error.to_string();
            error
                .chain()
                .skip(1)
                .for_each(|cause| line += &format!(": {cause}"));
            eprintln!("xtask: {line}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a task. Returns false if tests failed.
fn run(task: Task) -> anyhow::Result<bool> {
    if task.measures_criu() {
        run_dir::enter()?;
    }
    match task {
        Task::Setup { env: true } => setup::print_environment(),
        Task::Setup { env: false } => setup::print(),
        Task::Demo(options) => demo::run(&options),
        Task::Bench(options) => bench::run(&options),
        Task::Soak(options) => soak::run(&options),
        Task::Upgrade(options) => upgrade::run(&options),
        Task::Test { quick } => return ci::run(quick),
        Task::Fuzz { seconds } => run_fuzz(seconds),
        Task::Package(options) => permafrost_package::run(&options, &package::ThisMachine),
        Task::Release(options) => permafrost_package::release(&options, &package::ThisMachine),
        Task::Docs => permafrost_reference::write(),
        Task::Book => book::build(),
        Task::Tidy => check_tidiness(),
        Task::Schema { examples, seed } => check_schema(examples, seed),
        Task::Guest { scenarios } => guest(&scenarios),
    }?;
    Ok(true)
}

fn check_tidiness() -> anyhow::Result<()> {
    let count = tidy::run()?;
    println!("{} passed, {} failed", count.passed, count.failed);
    if count.failed > 0 {
        anyhow::bail!("a rule is broken");
    }
    Ok(())
}

fn guest(scenarios: &[String]) -> anyhow::Result<()> {
    let outcome = guest::run(scenarios)?;
    println!("{} passed, {} failed", outcome.passed, outcome.failed);
    if outcome.failed > 0 || outcome.passed == 0 {
        anyhow::bail!("guest scenarios failed");
    }
    Ok(())
}

fn check_schema(examples: u32, seed: u64) -> anyhow::Result<()> {
    schema::build()?;
    let count = schema::run(examples, seed)?;
    if count.passed == 0 {
        anyhow::bail!("the OpenAPI document was not found true");
    }
    Ok(())
}

fn run_fuzz(seconds: u64) -> anyhow::Result<()> {
    let count = fuzz::run(seconds)?;
    println!("{} passed, {} failed", count.passed, count.failed);
    if count.failed > 0 {
        anyhow::bail!("fuzzing found something");
    }
    Ok(())
}
