//! `cargo xtask`: setting up, testing and measuring, each with one command.

#![forbid(unsafe_code)]

mod apt;
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
}

fn main() -> ExitCode {
    let result = match Task::parse() {
        Task::Setup => setup::criu().map(|path| println!("{}", path.display())),
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
