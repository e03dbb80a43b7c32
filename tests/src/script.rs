//! Tasks in Perl, which make system calls of their own and tell what they have done by making files.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process;

const LIMIT: Duration = Duration::from_secs(60);

/// A running (or dumped) script, in a session of its own. It is killed when dropped, wherever it was restored in between.
#[derive(Debug)]
pub struct Script {
    child: Child,
    dir: PathBuf,
}

impl Script {
    /// Starts a script and waits until it has made the file `ready`. Its arguments are `dir`, in which it runs, and
    /// `args`. `perl` is the command that runs Perl, with what it needs before the script.
    ///
    /// # Errors
    /// Fails when it cannot be started, or ends before it is ready.
    pub fn start(dir: &Path, text: &str, perl: &mut Command, args: &[u64]) -> Result<Self> {
        let path = dir.join("task.pl");
        fs::write(&path, text).context("write the script")?;
        let said = File::create(dir.join("said")).context("create the script's stderr")?;
        perl.arg(path).arg(dir);
        perl.args(args.iter().map(u64::to_string));
        perl.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        let child = perl.current_dir(dir).spawn().context("start Perl")?;
        let mut script = Self {
            child,
            dir: dir.to_owned(),
        };
        process::wait_for("the script", LIMIT, || {
            if let Some(status) = script.child.try_wait()? {
                bail!("it has ended: {status}\n{}", script.said());
            }
            Ok(dir.join("ready").exists().then_some(()))
        })?;
        Ok(script)
    }

    /// Returns the pid, before and after a restore.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the script is gone and its pid is free, as after a dump.
    ///
    /// # Errors
    /// Its state cannot be read.
    pub fn wait_until_gone(&mut self) -> Result<()> {
        self.child.wait().context("wait for the script").map(drop)
    }

    /// Waits until the script has made a file.
    ///
    /// # Errors
    /// Fails when it does not.
    pub fn wait_for(&self, name: &str) -> Result<()> {
        let is_there = || Ok(self.dir.join(name).exists().then_some(()));
        let waited = process::wait_for(name, LIMIT, is_there);
        waited.with_context(|| format!("the script said: {}", self.said()))
    }

    fn said(&self) -> String {
        fs::read_to_string(self.dir.join("said")).unwrap_or_default()
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        process::kill(&[self.child.id()]);
    }
}
