//! A `permafrostd` for one test, and the `permafrost` command pointed at it.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::{binaries, process};

/// Exit code of `permafrost` if the named object does not exist.
pub const NOT_FOUND: i32 = 3;

/// Exit code of `permafrost` if the cluster's registry, or a node, is unavailable.
pub const UNAVAILABLE: i32 = 11;

/// Time for which [`Daemon::run_patiently`] retries: longer than any plausible series of elections.
const PATIENCE: Duration = Duration::from_secs(60);

/// Options for starting `permafrostd`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Path of the region. Default: `permafrostd`'s own default in the data directory.
    pub region: Option<PathBuf>,
    /// Size of a region that is created. Default 256 MiB.
    pub region_mib: u64,
    /// Refuse anything but DAX. Default no.
    pub require_dax: bool,
    /// Address of the well-known page-server port. Default any free port of 127.0.0.1; `none` for none.
    pub listen: String,
    /// Further arguments. Without a `--probe-period` among them there are no probes, because tests query free space
    /// and measurements.
    pub extra: Vec<String>,
    /// Command that starts `permafrostd` and the `permafrost` pointed at it, for example one that enters a network
    /// namespace. It must become the program (`exec`), not be its parent. Default: none.
    pub prefix: Vec<String>,
    /// Directory of the programs. Default: that of [`binaries::dir`].
    pub programs: Option<PathBuf>,
}

impl Options {
    /// Sets an environment variable of `permafrostd` and of the `permafrost` pointed at it.
    pub fn env(&mut self, name: &str, value: &str) {
        self.prefix.push("env".to_owned());
        self.prefix.push(format!("{name}={value}"));
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            region: None,
            region_mib: 256,
            require_dax: false,
            listen: "127.0.0.1:0".to_owned(),
            extra: Vec::new(),
            prefix: Vec::new(),
            programs: None,
        }
    }
}

/// Returns the path of a program in a directory, or of the one under test.
fn program(programs: Option<&Path>, name: &str) -> Result<PathBuf> {
    match programs {
        Some(dir) => Ok(dir.join(name)),
        None => binaries::path(name),
    }
}

/// Returns a command that `prefix` starts.
fn prefixed(prefix: &[String], program: &Path) -> Command {
    let Some((first, rest)) = prefix.split_first() else {
        return Command::new(program);
    };
    let mut command = Command::new(first);
    command.args(rest).arg(program);
    command
}

/// A running daemon; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    dir: PathBuf,
    address: String,
    peers: String,
    metrics: String,
    api: String,
    prefix: Vec<String>,
    programs: Option<PathBuf>,
}

impl Daemon {
    /// Starts a daemon under `dir`: its data in `dir/data`, its sockets in `dir/run`, its log in
    /// `dir/permafrostd.log` (appended to, so that it covers restarts), any free loopback port.
    ///
    /// # Errors
    /// Fails with the end of its log when it does not get ready within 30 s.
    pub fn start(dir: &Path, options: &Options) -> Result<Self> {
        let programs = options.programs.as_deref();
        let mut command = prefixed(&options.prefix, &program(programs, "permafrostd")?);
        command
            .arg("--data-dir")
            .arg(dir.join("data"))
            .arg("--run-dir")
            .arg(dir.join("run"));
        command.args([
            "--listen",
            &options.listen,
            "--region-size",
            &format!("{}M", options.region_mib),
        ]);
        if let Some(region) = &options.region {
            command.arg("--region").arg(region);
        }
        if options.require_dax {
            command.arg("--require-dax");
        }
        if !options
            .extra
            .iter()
            .any(|argument| argument.starts_with("--probe-period"))
        {
            command.arg("--probe-period=off");
        }
        command.args(&options.extra);
        let mut daemon = Self::await_ready(dir, command, &options.prefix, "permafrostd ready:")?;
        daemon.programs.clone_from(&options.programs);
        Ok(daemon)
    }

    /// Starts `permafrost agent` in the same way: its sockets in `dir/run`, its log in `dir/permafrostd.log`.
    /// `permafrost` is pointed at it as at a daemon.
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn agent<A: AsRef<OsStr>>(dir: &Path, arguments: &[A]) -> Result<Self> {
        Self::agent_at(dir, arguments, &[])
    }

    /// Starts `permafrost agent` like [`Self::agent`], through the command `prefix`: see [`Options::prefix`].
    ///
    /// # Errors
    /// As [`Daemon::start`].
    pub fn agent_at<A: AsRef<OsStr>>(
        dir: &Path,
        arguments: &[A],
        prefix: &[String],
    ) -> Result<Self> {
        let mut command = prefixed(prefix, &binaries::path("permafrost")?);
        command
            .args(["agent", "--listen", "127.0.0.1:0", "--run-dir"])
            .arg(dir.join("run"))
            .args(arguments);
        Self::await_ready(dir, command, prefix, "permafrost agent ready:")
    }

    /// Starts `command`, and waits for its ready line.
    fn await_ready(
        dir: &Path,
        mut command: Command,
        prefix: &[String],
        greeting: &str,
    ) -> Result<Self> {
        let log_path = dir.join("permafrostd.log");
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&log_path)
            .context("open permafrostd's log")?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .context("start permafrostd")?;
        let stdout = child.stdout.take().context("take permafrostd's stdout")?;
        let (send, receive) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // The reader lives on to the end, so that the daemon never writes into a closed pipe.
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let mut daemon = Self {
            child,
            dir: dir.to_path_buf(),
            address: String::new(),
            peers: String::new(),
            metrics: String::new(),
            api: String::new(),
            prefix: prefix.to_vec(),
            programs: None,
        };
        loop {
            match receive.recv_timeout(Duration::from_secs(30)) {
                Ok(line) => {
                    if let Some(ready) = line.strip_prefix(greeting) {
                        daemon.address = field(ready, "page-server")
                            .context("permafrostd names no page-server address")?;
                        daemon.peers = field(ready, "peers").unwrap_or_default();
                        daemon.metrics = field(ready, "metrics").unwrap_or_default();
                        daemon.api = field(ready, "api").unwrap_or_default();
                        return Ok(daemon);
                    }
                }
                Err(_) => {
                    let _ = daemon.child.kill();
                    let status = daemon.child.wait().context("wait for permafrostd")?;
                    bail!(
                        "permafrostd did not get ready ({status}):\n{}",
                        tail(&log_path)
                    );
                }
            }
        }
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the path of the control socket.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.dir.join("run/control.sock")
    }

    /// Returns the address of the well-known page-server port, `address:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the address on which the daemon serves peers, `address:port`, or `none`.
    #[must_use]
    pub fn peers(&self) -> &str {
        &self.peers
    }

    /// Returns the address on which the daemon serves Prometheus, `address:port`, or `none`.
    #[must_use]
    pub fn metrics(&self) -> &str {
        &self.metrics
    }

    /// Returns the metrics that the daemon serves, in the text form of Prometheus, behind the head of the answer.
    ///
    /// # Errors
    /// The daemon serves none, or does not answer.
    pub fn scrape(&self) -> Result<String> {
        let mut stream = TcpStream::connect(&self.metrics).context("connect to the metrics")?;
        write!(stream, "GET /metrics HTTP/1.0\r\n\r\n").context("ask for the metrics")?;
        let mut answer = String::new();
        stream
            .read_to_string(&mut answer)
            .context("read the metrics")?;
        Ok(answer)
    }

    /// Returns a counter of the daemon's metrics, by its name and labels.
    ///
    /// # Errors
    /// The errors of [`scrape`](Self::scrape), and there is no such counter.
    pub fn counter(&self, name: &str) -> Result<u64> {
        let answer = self.scrape()?;
        let mut lines = answer.lines();
        let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = value.with_context(|| format!("no {name} in {answer}"))?;
        value.parse().with_context(|| format!("read {name}"))
    }

    /// Returns the TCP address on which the daemon serves the HTTP API, `address:port`, or `none`.
    #[must_use]
    pub fn api(&self) -> &str {
        &self.api
    }

    /// Returns the path of the log.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.dir.join("permafrostd.log")
    }

    /// Returns a `permafrost` command, pointed at this daemon and at the CRIU that was found.
    ///
    /// # Errors
    /// Fails when the binary is not there.
    pub fn command(&self) -> Result<Command> {
        let permafrost = program(self.programs.as_deref(), "permafrost")?;
        let mut command = prefixed(&self.prefix, &permafrost);
        command
            .arg("--socket")
            .arg(self.control())
            .stdin(Stdio::null());
        if let Ok(criu) = crate::criu::find() {
            command.env(crate::criu::CRIU, criu.path);
        }
        Ok(command)
    }

    /// Runs `permafrost` and returns its output, whatever its exit status.
    ///
    /// # Errors
    /// Fails when it does not start.
    pub fn try_run<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<Output> {
        self.command()?
            .args(arguments)
            .output()
            .context("run permafrost")
    }

    /// Runs `permafrost` and returns its standard output.
    ///
    /// # Errors
    /// Fails with what it said when it exits non-zero.
    pub fn run<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<String> {
        outcome(arguments, &self.try_run(arguments)?)
    }

    /// Runs the command like [`Self::run`], and retries while the daemon answers that the cluster's registry is
    /// unavailable: where members of etcd come and go, there is more than one election.
    ///
    /// # Errors
    /// As [`Self::run`], or the registry is not to be had for a minute.
    pub fn run_patiently<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<String> {
        outcome(arguments, &self.try_run_patiently(arguments)?)
    }

    /// Runs the command like [`Self::try_run`], and retries like [`Self::run_patiently`].
    ///
    /// # Errors
    /// Fails when it does not start.
    pub fn try_run_patiently<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<Output> {
        let mut output = self.try_run(arguments)?;
        let began = Instant::now();
        while output.status.code() == Some(UNAVAILABLE) && began.elapsed() < PATIENCE {
            std::thread::sleep(process::POLL);
            output = self.try_run(arguments)?;
        }
        Ok(output)
    }

    /// Runs `permafrost --json` and parses its standard output.
    ///
    /// # Errors
    /// Fails when it exits non-zero or prints something else.
    pub fn json<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<serde_json::Value> {
        parse(&self.run(&for_scripts(arguments))?)
    }

    /// Runs the command like [`Self::json`], and retries like [`Self::run_patiently`].
    ///
    /// # Errors
    /// Fails when it exits non-zero or prints something else.
    pub fn json_patiently<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<serde_json::Value> {
        parse(&self.run_patiently(&for_scripts(arguments))?)
    }

    /// Returns true if the daemon still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Stops the daemon as an init system does, and waits.
    ///
    /// # Errors
    /// Fails when it does not end within 30 s.
    pub fn stop(mut self) -> Result<ExitStatus> {
        process::signal(self.child.id(), Signal::TERM)?;
        process::wait_for("the end of permafrostd", Duration::from_secs(30), || {
            self.child.try_wait().context("wait for permafrostd")
        })
    }

    /// Kills the daemon at once, like a crash, and waits.
    ///
    /// # Errors
    /// Fails when it has been waited for already.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill().context("kill permafrostd")?;
        self.child.wait().context("wait for permafrostd")?;
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.is_running() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn for_scripts<A: AsRef<OsStr>>(arguments: &[A]) -> Vec<&OsStr> {
    let json = std::iter::once(OsStr::new("--json"));
    json.chain(arguments.iter().map(AsRef::as_ref)).collect()
}

fn parse(said: &str) -> Result<serde_json::Value> {
    serde_json::from_str(said).with_context(|| format!("parse the output of `permafrost`: {said}"))
}

/// Returns the standard output of a run that succeeded; otherwise an error with all of its output.
fn outcome<A: AsRef<OsStr>>(arguments: &[A], output: &Output) -> Result<String> {
    let line: Vec<_> = arguments
        .iter()
        .map(|argument| argument.as_ref().to_string_lossy())
        .collect();
    if !output.status.success() {
        bail!(
            "`permafrost {}` failed ({}):\n{}{}",
            line.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the value of `key=value` in a line of such words.
fn field(line: &str, key: &str) -> Option<String> {
    line.split_whitespace()
        .find_map(|word| Some(word.strip_prefix(key)?.strip_prefix('=')?.to_owned()))
}

/// Returns the last lines of a log.
#[must_use]
pub fn tail(path: &Path) -> String {
    let log = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
