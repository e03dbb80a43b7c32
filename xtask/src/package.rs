//! Services that `cargo xtask package` and `release` need: [`permafrost_package`] makes what a release has.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use permafrost_package::BuildHost;
use permafrost_tests::podman::Podman;
use serde_json::Value;

use crate::setup::{self, Criu};
use crate::sources::Mirror;
use crate::{apt, book, ci, deny, paths, tools, ui};

/// The machine that this runs on, and the workspace that it is of.
pub(crate) struct ThisMachine;

impl BuildHost for ThisMachine {
    fn workspace(&self) -> PathBuf {
        paths::workspace()
    }

    fn cargo(&self) -> Command {
        ci::cargo_command()
    }

    fn metadata(&self) -> Result<Value> {
        deny::metadata("Cargo.toml")
    }

    fn criu(&self) -> Result<std::result::Result<PathBuf, String>> {
        Ok(match setup::criu()? {
            Criu::Works(path) => Ok(path),
            Criu::CannotRun(why) => Err(why),
        })
    }

    fn mirror(&self) -> Result<String> {
        Ok(Mirror::of_this_machine()?.uri)
    }

    fn unpack(&self, suite: &str, packages: &[&str], root: &Path) -> Result<()> {
        apt::unpack(suite, packages, root)
    }

    fn run_image(&self, image: &Path, name: &str) -> Result<std::result::Result<String, String>> {
        tools::podman()?;
        let podman = Podman::empty()?;
        podman.load(image)?;
        let version = match podman.run_once(name, &["--version"]) {
            Ok(version) => version,
            Err(error) => return Ok(Err(format!("{error:#}"))),
        };
        let arguments = ["--region-size", "256M", "--listen", "none"];
        podman.start("node", name, &arguments)?;
        let status = podman.exec_until("node", &["/usr/bin/permafrost", "status"])?;
        let first = status.lines().next().unwrap_or_default();
        Ok(Ok(format!("{}; {first}", version.trim())))
    }

    fn book(&self, source: &Path, out: &Path) -> Result<()> {
        book::render(source, out)
    }

    fn begin(&self, step: &str) -> Box<dyn FnOnce(&str)> {
        let task = ui::Task::begin(step);
        Box::new(move |outcome| task.done(outcome))
    }

    fn say_loudly(&self, line: &str) {
        ui::say_loudly(line);
    }
}
