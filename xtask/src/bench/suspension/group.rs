//! A control group with a limit of memory, swap behind it, and tasks in it.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use permafrost_tests::{binaries, process};
use rustix::fs::FallocateFlags;

use crate::rig::Interrupt;

/// Hierarchy of memory in version 1 of control groups.
const MEMORY: &str = "/sys/fs/cgroup/memory";

/// Exit code of `permafrost shrink` when it took less than requested.
const LESS_TAKEN: i32 = 12;

/// A swap file that is in use; it is removed when dropped.
pub(super) struct Swap {
    path: PathBuf,
}

impl Swap {
    /// Makes a swap file and lets the kernel use it.
    ///
    /// # Errors
    /// There is no room; swapon(8) refuses: only root may, and not on every file system.
    pub(super) fn make(dir: &Path, mib: u64) -> Result<Self> {
        let path = dir.join(format!("permafrost-bench-{}.swap", std::process::id()));
        let swap = Self { path };
        let file = File::create(&swap.path).context("create the swap file")?;
        file.set_permissions(fs::Permissions::from_mode(0o600))
            .context("protect the swap file")?;
        // Without holes, which swapon refuses.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, mib << 20)
            .context("allocate the swap file")?;
        drop(file);
        for program in ["mkswap", "swapon"] {
            let output = Command::new(program)
                .arg(&swap.path)
                .output()
                .with_context(|| format!("run {program} (Debian: util-linux, mount)"))?;
            ensure!(
                output.status.success(),
                "{program} refuses {}: {}; --swap-dir names another directory, on a disk",
                swap.path.display(),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(swap)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = Command::new("swapoff").arg(&self.path).output();
        let _ = fs::remove_file(&self.path);
    }
}

/// A group of memory with a limit; its tasks are killed, and it is removed, when it is dropped.
pub(super) struct Limited {
    group: PathBuf,
    dir: PathBuf,
}

impl Limited {
    /// Makes the group. Tasks keep their files in `dir`.
    ///
    /// # Errors
    /// There is no hierarchy of memory of version 1, or this user may not make a group.
    pub(super) fn make(mib: u64, dir: &Path) -> Result<Self> {
        let group = Path::new(MEMORY).join(format!("permafrost-bench-{}", std::process::id()));
        fs::create_dir(&group).with_context(|| {
            format!("make a group below {MEMORY}, which root may with version 1 of control groups")
        })?;
        let limited = Self {
            group,
            dir: dir.to_owned(),
        };
        let limit = (mib << 20).to_string();
        fs::write(limited.group.join("memory.limit_in_bytes"), limit)
            .context("limit the group's memory")?;
        // The tasks' own groups count, too.
        let hierarchy = limited.group.join("memory.use_hierarchy");
        let _ = fs::write(&hierarchy, "1");
        let counts = fs::read_to_string(&hierarchy).context("read memory.use_hierarchy")?;
        ensure!(
            counts.trim() == "1",
            "groups below {} would not count against its limit",
            limited.group.display()
        );
        Ok(limited)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.group);
    }
}

/// A running `permafrost-batch`, in a group of its own below the limited one; it is killed when dropped.
pub(super) struct BatchTask {
    child: Child,
    group: PathBuf,
    progress: PathBuf,
}

impl BatchTask {
    /// Starts a task that works for a while.
    pub(super) fn start(
        limited: &Limited,
        name: &str,
        memory_mib: u64,
        work: Duration,
    ) -> Result<Self> {
        let work_ms = work.as_millis().to_string();
        Self::spawn(limited, name, memory_mib, &["--work-ms", &work_ms])
    }

    /// Starts a task that writes to its memory at random until it is killed.
    pub(super) fn touching(limited: &Limited, memory_mib: u64, threads: u64) -> Result<Self> {
        Self::spawn(
            limited,
            "touching",
            memory_mib,
            &["--touch", &threads.to_string()],
        )
    }

    fn spawn(limited: &Limited, name: &str, memory_mib: u64, options: &[&str]) -> Result<Self> {
        let group = limited.group.join(name);
        fs::create_dir(&group).context("make the task's group")?;
        let progress = limited.dir.join(name);
        let _ = fs::remove_file(&progress);
        // The shell joins the group before it becomes the task, so that all of its memory is charged there.
        let script = "echo $$ > \"$0/cgroup.procs\" && exec \"$@\"";
        let child = Command::new("sh")
            .args(["-c", script])
            .arg(&group)
            .arg(binaries::path("permafrost-batch")?)
            .args(["--memory-mib", &memory_mib.to_string()])
            .arg("--progress")
            .arg(&progress)
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start permafrost-batch")?;
        Ok(Self {
            child,
            group,
            progress,
        })
    }

    /// Returns the number of steps or writes that are done.
    fn done(&self) -> u64 {
        let text = fs::read_to_string(&self.progress).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    fn wait_for_number(&self, number: u64, interrupt: &Interrupt) -> Result<()> {
        while self.done() < number || !self.progress.exists() {
            interrupt.check()?;
            ensure!(
                process::is_alive(self.child.id()),
                "the task has ended before it had done enough"
            );
            std::thread::sleep(process::POLL);
        }
        Ok(())
    }

    /// Waits until a part of the work is done.
    pub(super) fn wait_for_work(&self, work: Duration, interrupt: &Interrupt) -> Result<()> {
        // At the very end there is no next step that the task could be seen in.
        let steps = u64::try_from(work.as_millis() / 10)?.saturating_sub(1);
        self.wait_for_number(steps.max(1), interrupt)
    }

    /// Waits until the task has written a number of times.
    pub(super) fn wait_for_writes(&self, writes: u64, interrupt: &Interrupt) -> Result<()> {
        self.wait_for_number(writes, interrupt)
    }

    /// Returns the writes of a second, taken over `time`.
    pub(super) fn rate(&self, time: Duration) -> Result<f64> {
        let (from, begin) = (self.done(), Instant::now());
        std::thread::sleep(time);
        ensure!(process::is_alive(self.child.id()), "the task has ended");
        Ok(self.done().saturating_sub(from) as f64 / begin.elapsed().as_secs_f64())
    }

    fn status_mib(&self, field: &str) -> Result<f64> {
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(path).context("read the task's status")?;
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let kib = line.and_then(|line| line.trim_start_matches(':').split_whitespace().next());
        let kib: f64 = kib.context("a size in the task's status")?.parse()?;
        Ok(kib / 1024.0)
    }

    /// Returns how much of the task's memory is in swap, MiB.
    pub(super) fn swapped_mib(&self) -> Result<f64> {
        self.status_mib("VmSwap")
    }

    /// Returns how much of the task's memory is in memory, MiB.
    pub(super) fn resident_mib(&self) -> Result<f64> {
        self.status_mib("VmRSS")
    }

    /// Runs a command of `permafrost` on the task.
    ///
    /// # Errors
    /// It fails.
    pub(super) fn command(&self, line: &[&str]) -> Result<()> {
        let code = self.permafrost(line)?;
        ensure!(code == 0, "permafrost {} fails ({code})", line.join(" "));
        Ok(())
    }

    /// Runs `permafrost shrink`, which may take less than requested.
    pub(super) fn command_that_may_take_less(&self, line: &[&str]) -> Result<()> {
        let code = self.permafrost(line)?;
        ensure!(
            code == 0 || code == LESS_TAKEN,
            "permafrost {} fails ({code})",
            line.join(" ")
        );
        Ok(())
    }

    fn permafrost(&self, line: &[&str]) -> Result<i32> {
        let status = Command::new(binaries::path("permafrost")?)
            .args(line)
            .args(["--quiet", "--pid", &self.child.id().to_string()])
            .stdout(Stdio::null())
            .status()
            .context("run permafrost")?;
        status.code().context("permafrost was killed")
    }

    /// Waits until the task has ended with its memory as it should be.
    pub(super) fn finish(mut self, interrupt: &Interrupt) -> Result<()> {
        loop {
            if let Some(status) = self.child.try_wait().context("wait for the task")? {
                ensure!(status.success(), "the task fails ({status})");
                return self.leave();
            }
            interrupt.check()?;
            std::thread::sleep(process::POLL);
        }
    }

    /// Kills the task, and waits until its memory is free.
    pub(super) fn kill(mut self) -> Result<()> {
        self.child.kill().context("kill the task")?;
        self.child.wait().context("wait for the task")?;
        self.leave()
    }

    /// Removes the group, which is busy until the kernel has freed all that the task had.
    fn leave(&self) -> Result<()> {
        let begin = Instant::now();
        while let Err(error) = fs::remove_dir(&self.group) {
            if !self.group.exists() {
                break;
            }
            if begin.elapsed() > Duration::from_secs(10) {
                bail!("remove the task's group: {error}");
            }
            std::thread::sleep(process::POLL);
        }
        Ok(())
    }
}

impl Drop for BatchTask {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = self.permafrost(&["resume"]);
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let _ = self.leave();
    }
}
