//! The compared methods of dumping and restoring. Each takes a running workload and leaves a restored one.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use permafrost_protocol::images::DumpStats;
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::workload::Workload;
use permafrost_tests::{criu, process};

use crate::rig;

/// Compared method of dumping and restoring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    /// `permafrost dump` and `permafrost restore`, region on tmpfs.
    Permafrost,
    /// `permafrost dump --stream` and `permafrost restore`, into the same region.
    Stream,
    /// A first dump into a new region, right after the daemon's start: it has not mapped all of it yet.
    NewRegion,
    /// `criu dump` into tmpfs and `criu restore` from it.
    Local,
    /// `criu dump` to `criu page-server` over TCP, on tmpfs, and `criu restore` from there.
    PageServer,
    /// `criu dump --stream` through `criu-image-streamer` into a file on tmpfs, and `criu restore --stream` from there.
    ImageStreamer,
}

/// The programs that are measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Programs<'a> {
    pub(super) criu: &'a Path,
    /// `criu-image-streamer`, which has to be built by hand.
    pub(super) image_streamer: Option<&'a Path>,
}

impl std::fmt::Display for Contender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Permafrost => "permafrost",
            Self::Stream => "by stream",
            Self::NewRegion => "into a new region",
            Self::Local => "criu dump",
            Self::PageServer => "criu page-server",
            Self::ImageStreamer => "criu-image-streamer",
        })
    }
}

/// Measurements of one dump and restore.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// Time for which the task was frozen, as CRIU counts it, milliseconds.
    pub(super) frozen_ms: f64,
    /// Part of that time for writing pages, including waits for the receiver of the pages.
    pub(super) memwrite_ms: f64,
    /// Duration of the dump command.
    pub(super) dump_ms: f64,
    /// Duration of the restore command.
    pub(super) restore_ms: f64,
    /// Processor time of the receiver of the pages, seconds.
    pub(super) server_cpu_s: f64,
    /// Highest resident memory of `permafrostd` beside its region.
    pub(super) daemon_memory_bytes: u64,
}

impl Contender {
    pub(super) const ALL: [Self; 6] = [
        Self::Permafrost,
        Self::Stream,
        Self::NewRegion,
        Self::Local,
        Self::PageServer,
        Self::ImageStreamer,
    ];

    /// Returns true if there is what it needs.
    pub(super) const fn can_run(self, programs: Programs<'_>) -> bool {
        !matches!(self, Self::ImageStreamer) || programs.image_streamer.is_some()
    }

    /// Dumps and restores a workload. `daemon` has mapped its region; a new one has the options `region`.
    pub(super) fn dump_and_restore(
        self,
        daemon: &Daemon,
        region: &daemon::Options,
        programs: Programs<'_>,
        work: &Path,
        workload: &mut Workload,
    ) -> Result<Sample> {
        match self {
            Self::Permafrost => permafrost(daemon, workload, &["--page-server"]),
            Self::Stream => permafrost(daemon, workload, &["--stream"]),
            Self::NewRegion => {
                let daemon = Daemon::start(work, region)?;
                let sample = permafrost(&daemon, workload, &[])?;
                daemon.stop()?;
                Ok(sample)
            }
            Self::Local => local(programs.criu, work, workload),
            Self::PageServer => page_server(programs.criu, work, workload),
            Self::ImageStreamer => {
                let streamer = programs.image_streamer;
                let streamer = streamer.context("there is no criu-image-streamer")?;
                image_streamer(programs.criu, streamer, work, workload)
            }
        }
    }
}

/// Runs Permafrost with a fresh job each time, so that no page is found in a parent. The job is removed, so that the
/// region never fills.
fn permafrost(daemon: &Daemon, workload: &mut Workload, options: &[&str]) -> Result<Sample> {
    let pid = workload.pid().to_string();
    let memory = MemoryPeak::watch(daemon.pid());
    let cpu = process::cpu_time(daemon.pid())?;
    let start = Instant::now();
    let mut dump = vec!["dump", "--pid", &pid, "--job", "bench"];
    dump.extend(options);
    let dumped = daemon.json(&dump)?;
    let dump_ms = ms(start.elapsed());
    let server_cpu_s = (process::cpu_time(daemon.pid())? - cpu).as_secs_f64();
    workload.wait_until_gone()?;
    let start = Instant::now();
    daemon.run(&["restore", "bench"])?;
    let restore_ms = ms(start.elapsed());
    let daemon_memory_bytes = memory.stop();
    daemon.run(&["rm", "bench", "--all"])?;
    let us = |field| ms(Duration::from_micros(rig::number(&dumped, field)));
    Ok(Sample {
        frozen_ms: us("frozen_time"),
        memwrite_ms: us("memwrite_time"),
        dump_ms,
        restore_ms,
        server_cpu_s,
        daemon_memory_bytes,
    })
}

fn local(criu: &Path, work: &Path, workload: &mut Workload) -> Result<Sample> {
    let images = work.join("images");
    std::fs::create_dir(&images).context("create an images directory")?;
    let start = Instant::now();
    run(
        Command::new(criu)
            .arg("dump")
            .args(["-t", &workload.pid().to_string(), "-o", "dump.log", "-D"])
            .arg(&images),
        &images.join("dump.log"),
    )?;
    let dump_ms = ms(start.elapsed());
    workload.wait_until_gone()?;
    let restore_ms = restore(criu, &images)?;
    Ok(Sample {
        dump_ms,
        restore_ms,
        ..from_stats(&criu::dump_stats(&images)?)
    })
}

fn page_server(criu: &Path, work: &Path, workload: &mut Workload) -> Result<Sample> {
    let images = work.join("images");
    std::fs::create_dir(&images).context("create an images directory")?;
    let (mut server, port) = start_page_server(criu, &images)?;
    let start = Instant::now();
    let dumped = run(
        Command::new(criu)
            .arg("dump")
            .args([
                "-t",
                &workload.pid().to_string(),
                "-o",
                "dump.log",
                "--page-server",
                "--address",
                "127.0.0.1",
                "--port",
            ])
            .arg(port.to_string())
            .arg("-D")
            .arg(&images),
        &images.join("dump.log"),
    );
    let dump_ms = ms(start.elapsed());
    if dumped.is_err() {
        let _ = server.kill();
    }
    // Only children that are waited for between the two measurements count.
    let cpu = process::ended_children_cpu_time()?;
    let status = server.wait().context("wait for the page server")?;
    let server_cpu_s = (process::ended_children_cpu_time()? - cpu).as_secs_f64();
    dumped?;
    if !status.success() {
        bail!(
            "criu page-server fails ({status}):\n{}",
            daemon::tail(&images.join("page-server.log"))
        );
    }
    workload.wait_until_gone()?;
    let restore_ms = restore(criu, &images)?;
    Ok(Sample {
        dump_ms,
        restore_ms,
        server_cpu_s,
        ..from_stats(&criu::dump_stats(&images)?)
    })
}

/// A `criu-image-streamer` takes its images from pipes and gives them to pipes: beside each a thread copies between the
/// pipe and a file, which the kernel splices.
fn image_streamer(
    criu: &Path,
    streamer: &Path,
    work: &Path,
    workload: &mut Workload,
) -> Result<Sample> {
    let images = work.join("images");
    std::fs::create_dir(&images).context("create an images directory")?;
    let stored = work.join("stored");
    let start = Instant::now();
    let mut capture = Streamer::start(streamer, &images, "capture")?;
    capture.listens()?;
    let mut from = capture.0.stdout.take().context("take its stdout")?;
    let mut to = File::create_new(&stored).context("create a file")?;
    let copy = std::thread::spawn(move || std::io::copy(&mut from, &mut to));
    run(
        Command::new(criu)
            .args(["dump", "--stream"])
            .args(["-t", &workload.pid().to_string(), "-o", "dump.log", "-D"])
            .arg(&images),
        &images.join("dump.log"),
    )?;
    let cpu = process::ended_children_cpu_time()?;
    capture.end()?;
    let server_cpu_s = (process::ended_children_cpu_time()? - cpu).as_secs_f64();
    join(copy).context("store the images")?;
    let dump_ms = ms(start.elapsed());
    let sample = from_stats(&criu::dump_stats(&images)?);
    workload.wait_until_gone()?;
    let start = Instant::now();
    let mut serve = Streamer::start(streamer, &images, "serve")?;
    let mut to = serve.0.stdin.take().context("take its stdin")?;
    let mut from = File::open(&stored).context("open the file")?;
    let copy = std::thread::spawn(move || std::io::copy(&mut from, &mut to));
    // It has read everything by then.
    serve.listens()?;
    run(
        Command::new(criu)
            .args(["restore", "-d", "--stream", "-o", "restore.log", "-D"])
            .arg(&images),
        &images.join("restore.log"),
    )?;
    let restore_ms = ms(start.elapsed());
    serve.end()?;
    join(copy).context("read the images")?;
    Ok(Sample {
        dump_ms,
        restore_ms,
        server_cpu_s,
        ..sample
    })
}

fn join(copy: std::thread::JoinHandle<std::io::Result<u64>>) -> Result<()> {
    match copy.join() {
        Ok(copied) => copied.map(drop).context("copy"),
        Err(_) => bail!("the copying thread died"),
    }
}

/// A `criu-image-streamer` that runs. It ends by itself when CRIU has what it wants, and is killed when it is dropped
/// before.
struct Streamer(Child);

impl Streamer {
    fn start(program: &Path, images: &Path, what: &str) -> Result<Self> {
        let child = Command::new(program)
            .arg("--images-dir")
            .arg(images)
            .arg(what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let child = child.with_context(|| format!("start {}", program.display()))?;
        Ok(Self(child))
    }

    /// Waits until CRIU can connect to its socket.
    fn listens(&mut self) -> Result<()> {
        let said = self.0.stderr.as_mut().context("take its stderr")?;
        let mut lines = BufReader::with_capacity(1, said);
        let mut all = String::new();
        while !all.ends_with("socket-init\n") {
            if lines.read_line(&mut all).context("read what it says")? == 0 {
                bail!("criu-image-streamer ends before it has a socket:\n{all}");
            }
        }
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        let status = self.0.wait().context("wait for criu-image-streamer")?;
        if !status.success() {
            bail!("criu-image-streamer fails ({status})");
        }
        Ok(())
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        // One that has ended is not there any more.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a page server in the foreground, as our child, and waits until it listens.
fn start_page_server(criu: &Path, images: &Path) -> Result<(Child, u16)> {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .context("find a free port")?
        .local_addr()
        .context("find a free port")?
        .port();
    let mut server = Command::new(criu)
        // It writes a byte to the status descriptor when it is ready.
        .args([
            "page-server",
            "--status-fd",
            "1",
            "-o",
            "page-server.log",
            "--address",
            "127.0.0.1",
            "--port",
            &port.to_string(),
            "-D",
        ])
        .arg(images)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("start criu page-server")?;
    let mut ready = [0];
    let heard = server
        .stdout
        .take()
        .context("take its stdout")?
        .read(&mut ready)
        .context("hear from criu page-server")?;
    if heard == 0 {
        let status = server.wait().context("wait for the page server")?;
        bail!(
            "criu page-server does not start ({status}):\n{}",
            daemon::tail(&images.join("page-server.log"))
        );
    }
    Ok((server, port))
}

fn restore(criu: &Path, images: &Path) -> Result<f64> {
    let start = Instant::now();
    run(
        Command::new(criu)
            .args(["restore", "-d", "-o", "restore.log", "-D"])
            .arg(images),
        &images.join("restore.log"),
    )?;
    Ok(ms(start.elapsed()))
}

fn run(command: &mut Command, log: &Path) -> Result<()> {
    let output = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("run CRIU")?;
    if !output.success() {
        bail!("CRIU fails ({output}):\n{}", daemon::tail(log));
    }
    Ok(())
}

fn from_stats(stats: &DumpStats) -> Sample {
    let ms = |us: u32| ms(Duration::from_micros(us.into()));
    Sample {
        frozen_ms: ms(stats.frozen_time),
        memwrite_ms: ms(stats.memwrite_time),
        ..Sample::default()
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Highest resident memory of a process, sampled every few milliseconds by a thread.
struct MemoryPeak {
    stop: Arc<AtomicBool>,
    peak: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

impl MemoryPeak {
    fn watch(pid: u32) -> Self {
        let (stop, peak) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (stopped, highest) = (Arc::clone(&stop), Arc::clone(&peak));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                highest.fetch_max(process::own_memory_bytes(pid), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        Self { stop, peak, thread }
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.join();
        self.peak.load(Ordering::Relaxed)
    }
}
