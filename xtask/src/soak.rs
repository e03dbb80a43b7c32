//! `cargo xtask soak`: the crash tests, for as long as one likes.

use anyhow::{Result, bail};
use permafrost_tests::{binaries, criu};

use crate::ci;
use crate::setup::{self, Criu};

/// Amount of work of each soak test; CI does less of each.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Options {
    /// Power cuts in the crash simulator.
    #[arg(long, default_value_t = 200_000)]
    cuts: u64,
    /// Kills of the real `permafrostd` in mid-dump.
    #[arg(long, default_value_t = 1000)]
    kills: u64,
    /// Rounds of killing and cutting off the nodes of a cluster and of its etcd.
    #[arg(long, default_value_t = 500)]
    chaos: u64,
}

/// Runs the tests whose length is bounded by these environment variables: the same tests as in CI, longer.
///
/// # Errors
/// Fails when a test does.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut count = ci::Count::default();
    count += ci::run_counted(ci::cargo_command().args(["build", "--workspace", "--bins"]))?;
    let mut command = ci::cargo_command();
    command
        .args(["test", "--workspace", "--no-fail-fast"])
        .env(binaries::BIN_DIR, binaries::dir()?);
    command
        .env("PERMAFROST_CRASH_CUTS", options.cuts.to_string())
        .env("PERMAFROST_KILL_ROUNDS", options.kills.to_string())
        .env("PERMAFROST_CHAOS_ROUNDS", options.chaos.to_string());
    match setup::criu()? {
        Criu::Works(path) => {
            command.env(criu::CRIU, path).env(criu::REQUIRE_CRIU, "1");
        }
        Criu::CannotRun(why) => bail!("the kill rounds need CRIU, and it cannot run here: {why}"),
    }
    count += ci::run_counted(&mut command)?;
    println!("{} passed, {} failed", count.passed, count.failed);
    if count.failed > 0 {
        bail!("the soak found something");
    }
    Ok(())
}
