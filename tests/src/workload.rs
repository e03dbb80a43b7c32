//! Starts `permafrost-workload` and sends requests to it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::contents::Contents;
use crate::status::Status;
use crate::{binaries, process};

/// Options of the workload. Each field is one option of the program.
#[derive(Clone, Debug)]
pub struct Options {
    /// Private memory of the root, MiB. Default 16.
    pub size_mib: u64,
    /// Contents of the memory. Default random: neither compression nor zero pages save anything.
    pub contents: Contents,
    /// Number of processes beside the root, each with a sixteenth of its memory and a pipe to it in either
    /// direction. Default 0.
    pub members: u32,
    /// Memory shared by all processes, MiB. Default 0.
    pub shared_mib: u64,
    /// Number of threads beside the main one, in each process. Default 0.
    pub threads: u32,
    /// Keep a file open, half read. Default no.
    pub open_file: bool,
    /// Share of the memory that one modification changes, percent. Default 10.
    pub modify_percent: u64,
    /// Seed of the contents. Default 1.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            size_mib: 16,
            contents: Contents::Random,
            members: 0,
            shared_mib: 0,
            threads: 0,
            open_file: false,
            modify_percent: 10,
            seed: 1,
        }
    }
}

impl Options {
    /// Returns the options of a tree with everything in it: processes, shared memory, threads, pipes, an open file.
    #[must_use]
    pub fn tree(size_mib: u64) -> Self {
        Self {
            size_mib,
            members: 3,
            shared_mib: 4,
            threads: 2,
            open_file: true,
            ..Self::default()
        }
    }
}

/// Shell script that closes inherited descriptors and becomes the given program: CRIU refuses descriptors of files
/// from outside the mount namespace, which are common in a container, and pipes whose other end is outside the tree.
const CLOSE_INHERITED: &str = r#"
for fd in /proc/$$/fd/*; do
    fd=${fd##*/}
    [ "$fd" -le 2 ] || eval "exec $fd>&-"
done
exec "$@"
"#;

/// A running (or dumped) workload. It is killed when dropped, wherever it was restored in between.
#[derive(Debug)]
pub struct Workload {
    status_path: PathBuf,
    root: Child,
    pid: u32,
    members: Vec<u32>,
    limit: Duration,
}

impl Workload {
    /// Starts a workload and waits until its memory is filled. Its status file, and the file it may keep open, go
    /// into `dir`, which must outlive the workload.
    ///
    /// # Errors
    /// Fails when it cannot be started or does not report within a time in proportion to its size.
    pub fn start(dir: &Path, options: &Options) -> Result<Self> {
        process::adopt_orphans()?;
        let status_path = dir.join("workload.status");
        let _ = std::fs::remove_file(&status_path);
        let mut command = Command::new("bash");
        command.args(["-c", CLOSE_INHERITED, "bash"]);
        command.arg(binaries::path("permafrost-workload")?);
        command.arg("--dir").arg(dir);
        command.args(["--size-mib", &options.size_mib.to_string()]);
        command.args(["--contents", &options.contents.to_string()]);
        command.args(["--members", &options.members.to_string()]);
        command.args(["--shared-mib", &options.shared_mib.to_string()]);
        command.args(["--threads", &options.threads.to_string()]);
        command.args(["--modify-percent", &options.modify_percent.to_string()]);
        command.args(["--seed", &options.seed.to_string()]);
        if options.open_file {
            command.arg("--open-file");
        }
        // CRIU refuses a terminal without --shell-job. The workload leaves its standard error once it runs.
        let complaints = dir.join("workload.stderr");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&complaints).context("create the workload's stderr")?)
            .current_dir("/");
        let mut root = command.spawn().context("start permafrost-workload")?;
        let limit = Duration::from_secs(60 + options.size_mib / 16);
        let status = process::wait_for("the workload's first report", limit, || {
            if let Some(status) = root.try_wait().context("wait for the workload")? {
                let said = std::fs::read_to_string(&complaints).unwrap_or_default();
                bail!("permafrost-workload ended at once: {status}\n{said}");
            }
            Status::read(&status_path)
        });
        let status = match status {
            Ok(status) => status,
            Err(error) => {
                let _ = root.kill();
                let _ = root.wait();
                return Err(error);
            }
        };
        Ok(Self {
            status_path,
            pid: root.id(),
            root,
            members: status.members,
            limit,
        })
    }

    /// Returns the pid of the root process, which `criu dump -t` takes.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns true if the root process runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        process::is_alive(self.pid)
    }

    /// Requests a report, without a verification of the memory.
    ///
    /// # Errors
    /// Fails when it does not answer.
    pub fn report(&self) -> Result<Status> {
        self.ask(Signal::HUP)
    }

    /// Makes the workload modify pages.
    ///
    /// # Errors
    /// Fails when it does not answer.
    pub fn modify(&self) -> Result<Status> {
        self.ask(Signal::USR1)
    }

    /// Makes the workload verify everything: see [`Status::is_sound`].
    ///
    /// # Errors
    /// Fails when it does not answer.
    pub fn verify(&self) -> Result<Status> {
        self.ask(Signal::USR2)
    }

    /// Waits until the whole tree is gone and its pids are free, as after a dump that did not leave it running.
    ///
    /// # Errors
    /// Fails when it is still there after some seconds.
    pub fn wait_until_gone(&mut self) -> Result<()> {
        let Self {
            root, members, pid, ..
        } = self;
        process::wait_for(
            "the end of the dumped workload",
            Duration::from_secs(20),
            || {
                let _ = root.try_wait();
                Ok(members
                    .iter()
                    .chain([&*pid])
                    .all(|&pid| process::is_gone(pid))
                    .then_some(()))
            },
        )
    }

    /// Kills the whole tree and waits until it is gone.
    pub fn kill(&mut self) {
        let _ = process::signal(self.pid, Signal::KILL);
        let _ = self.root.wait();
        let pids: Vec<u32> = self.members.iter().copied().chain([self.pid]).collect();
        process::kill(&pids);
    }

    fn ask(&self, signal: Signal) -> Result<Status> {
        // The old report goes first: a restored workload knows nothing of reports made after its dump, so
        // they cannot be told apart by anything inside.
        match std::fs::remove_file(&self.status_path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).context("remove the old report");
            }
            _ => {}
        }
        process::signal(self.pid, signal)?;
        process::wait_for("the workload's report", self.limit, || {
            if !self.is_running() {
                bail!("workload {} has ended", self.pid);
            }
            Status::read(&self.status_path)
        })
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.kill();
    }
}
