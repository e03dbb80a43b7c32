//! `cargo xtask`: setting up, testing and measuring, each with one command.

#![forbid(unsafe_code)]

mod apt;
mod guest;
mod paths;
mod setup;
mod sources;
mod ui;

use std::process::ExitCode;

use clap::Parser;

/// What a person or CI runs.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Task {
    /// Find a CRIU that works here, or fetch one under target/.
    Setup,
    /// Run the scenarios on an emulated NVDIMM, in QEMU.
    Guest {
        /// Names, or how they begin; all if none is given.
        scenarios: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = match Task::parse() {
        Task::Setup => setup::criu().map(|path| println!("{}", path.display())),
        Task::Guest { scenarios } => guest(&scenarios),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
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

fn guest(scenarios: &[String]) -> anyhow::Result<()> {
    let outcome = guest::run(scenarios)?;
    println!("{} passed, {} failed", outcome.passed, outcome.failed);
    if outcome.failed > 0 || outcome.passed == 0 {
        anyhow::bail!("guest scenarios failed");
    }
    Ok(())
}
