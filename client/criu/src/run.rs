//! Runs CRIU as a process.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::guard::{Guarded, Report};
use super::log::{Digest, digest};

/// Verbosity of CRIU: warnings and errors. CRIU writes its log while the task is frozen, and the output of
/// `-v4` costs a 64 MiB process one fifteenth of its freeze; a user who wants it passes `-- -v4`.
const VERBOSITY: &str = "-v2";

/// Longest tail of CRIU's log that is read, bytes: errors come last.
const LOG_TAIL_BYTES: u64 = 4 << 20;

/// CRIU could not be run.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// The program does not exist.
    #[error("CRIU not found: {} ({source})", program.display())]
    NotFound {
        /// Program that was tried.
        program: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The guard that started CRIU was ended.
    #[error("the process that keeps the freeze limit was ended ({status}); CRIU may still run")]
    Unguarded {
        /// Exit status of the guard.
        status: ExitStatus,
    },
    /// The program starts, but is not CRIU.
    #[error("{} is not CRIU: `--version` names no version", program.display())]
    NotCriu {
        /// Program that was started.
        program: PathBuf,
    },
    /// CRIU could not be started or waited for.
    #[error("{what}: {source}")]
    Io {
        /// Operation that failed.
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

/// A CRIU program.
#[derive(Clone, Debug)]
pub struct Criu {
    program: PathBuf,
}

impl Criu {
    /// Returns the program at `path`, or `criu` on PATH.
    pub fn new(path: Option<PathBuf>) -> Self {
        Self {
            program: path.unwrap_or_else(|| PathBuf::from("criu")),
        }
    }

    /// Returns CRIU's version, `4.2.1`. Costs one start of CRIU.
    ///
    /// # Errors
    /// See [`CriuError`].
    pub fn version(&self) -> Result<String, CriuError> {
        let output = Command::new(&self.program)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .map_err(|source| self.not_started(source))?;
        let text = String::from_utf8_lossy(&output.stdout);
        text.lines()
            .find_map(|line| line.strip_prefix("Version:"))
            .map(|version| version.trim().to_owned())
            .ok_or_else(|| CriuError::NotCriu {
                program: self.program.clone(),
            })
    }

    /// Returns true if this kernel has the feature that `criu check --feature FEATURE` looks for.
    ///
    /// # Errors
    /// See [`CriuError`].
    pub fn has_feature(&self, feature: &str) -> Result<bool, CriuError> {
        Command::new(&self.program)
            .args(["check", "--feature", feature])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .map(|status| status.success())
            .map_err(|source| self.not_started(source))
    }

    /// Runs `criu check`, which tries what CRIU needs of the kernel. Returns the errors that it reports; none if it
    /// succeeds.
    ///
    /// # Errors
    /// See [`CriuError`].
    pub fn check(&self) -> Result<Vec<String>, CriuError> {
        let output = Command::new(&self.program)
            .arg("check")
            .stdin(Stdio::null())
            .output()
            .map_err(|source| self.not_started(source))?;
        if output.status.success() {
            return Ok(Vec::new());
        }
        let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        let lines = err.lines().chain(out.lines());
        let mut errors: Vec<_> = lines
            .filter(|line| line.contains("Error"))
            .map(|line| line.trim().to_owned())
            .collect();
        if errors.is_empty() {
            errors.push(output.status.to_string());
        }
        Ok(errors)
    }

    fn not_started(&self, source: io::Error) -> CriuError {
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => CriuError::NotFound {
                program: self.program.clone(),
                source,
            },
            _ => CriuError::Io {
                what: "start CRIU",
                source,
            },
        }
    }
}

/// A run of CRIU that is not started yet.
#[derive(Debug)]
pub struct CriuRun {
    command: Command,
    log: PathBuf,
    console: PathBuf,
    work_dir: PathBuf,
    /// Path of the guard's report, if a guard starts CRIU.
    report: Option<PathBuf>,
}

impl CriuRun {
    /// Prepares `criu COMMAND`, with its images in `images_dir`, and its log `COMMAND.log`, statistics and
    /// console output in `work_dir`.
    pub fn new(criu: &Criu, command: &str, images_dir: &Path, work_dir: &Path) -> Self {
        Self::started_by(Command::new(&criu.program), command, images_dir, work_dir)
    }

    /// Prepares a run like [`Self::new`] that is started by a guard, which keeps the freeze limit. `guard`
    /// becomes the guard's command when CRIU's command line is added.
    pub fn guarded(
        mut guard: Command,
        guarded: &Guarded,
        criu: &Criu,
        command: &str,
        (images_dir, work_dir): (&Path, &Path),
    ) -> Self {
        guard.arg(&criu.program);
        let mut run = Self::started_by(guard, command, images_dir, work_dir);
        run.report = Some(guarded.report.clone());
        run
    }

    fn started_by(mut process: Command, command: &str, images_dir: &Path, work_dir: &Path) -> Self {
        let log = work_dir.join(format!("{command}.log"));
        process
            .arg(command)
            .arg("--images-dir")
            .arg(images_dir)
            .arg("--work-dir")
            .arg(work_dir)
            .args([VERBOSITY, "--log-file"])
            .arg(&log);
        Self {
            command: process,
            log,
            console: work_dir.join("criu.out"),
            work_dir: work_dir.to_owned(),
            report: None,
        }
    }

    /// Adds one argument to CRIU's command line.
    pub fn arg(&mut self, argument: impl AsRef<OsStr>) -> &mut Self {
        self.command.arg(argument);
        self
    }

    /// Adds arguments to CRIU's command line.
    pub fn args(&mut self, arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> &mut Self {
        self.command.args(arguments);
        self
    }

    /// Sets an environment variable, which CRIU hands on to its action scripts.
    pub fn env(&mut self, name: &str, value: impl Into<OsString>) -> &mut Self {
        self.command.env(name, value.into());
        self
    }

    /// Sends pages over `socket`, which becomes CRIU's standard input.
    ///
    /// A dump does not read its standard input, and descriptor 0 is the one that reaches CRIU through
    /// wrapper scripts and sudo too, without a moment in which another thread's child could inherit it.
    pub fn page_socket(&mut self, socket: OwnedFd) -> &mut Self {
        self.command.stdin(Stdio::from(socket));
        self.args(["--page-server", "--ps-socket", "0"])
    }

    /// Sends images and pages through pipes to a socket in the images directory. The guard of the freeze, and CRIU,
    /// have `socket` as their standard input: its other end sees when they end, or when the guard shuts it down.
    pub fn stream(&mut self, socket: OwnedFd) -> &mut Self {
        self.command.stdin(Stdio::from(socket));
        self.arg("--stream")
    }

    /// Puts CRIU into a process group of its own, so that a terminal's Ctrl-C reaches only `permafrost`: a CRIU
    /// that is killed in the middle of a dump would leave its parasite in the tasks.
    pub fn own_process_group(&mut self) -> &mut Self {
        self.command.process_group(0);
        self
    }

    /// Returns the path of the log that CRIU will write.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Starts CRIU.
    ///
    /// # Errors
    /// See [`CriuError`].
    pub fn start(mut self, criu: &Criu) -> Result<Running, CriuError> {
        let io_error = |what| move |source| CriuError::Io { what, source };
        // A file and no pipe: what CRIU leaves running may hold it open for as long as it likes.
        let console = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&self.console)
            .map_err(io_error("create CRIU's console file"))?;
        let errors = console
            .try_clone()
            .map_err(io_error("create CRIU's console file"))?;
        self.command.stdout(console).stderr(errors);
        let started = Instant::now();
        let mut child = self
            .command
            .spawn()
            .map_err(|source| criu.not_started(source))?;
        // Our copy of the page socket goes now, so that the daemon sees CRIU's end of it.
        drop(self.command);
        let pid = child.id();
        let (ended, end) = mpsc::channel();
        thread::spawn(move || {
            let status = child.wait();
            // The receiver is gone only if the caller no longer waits.
            let _ = ended.send((status, started.elapsed()));
        });
        Ok(Running {
            end,
            pid,
            log: self.log,
            console: self.console,
            work_dir: self.work_dir,
            report: self.report,
        })
    }
}

/// A running CRIU process.
#[derive(Debug)]
pub struct Running {
    end: mpsc::Receiver<(io::Result<ExitStatus>, Duration)>,
    pid: u32,
    log: PathBuf,
    console: PathBuf,
    work_dir: PathBuf,
    report: Option<PathBuf>,
}

impl Running {
    /// Returns the pid of CRIU, or of its guard.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits for the end of CRIU, and calls `on_tick` every `tick` meanwhile.
    ///
    /// # Errors
    /// [`CriuError::Io`], [`CriuError::Unguarded`].
    pub fn wait(self, tick: Duration, mut on_tick: impl FnMut()) -> Result<Finished, CriuError> {
        let waited = loop {
            match self.end.recv_timeout(tick) {
                Ok(waited) => break Some(waited),
                Err(mpsc::RecvTimeoutError::Timeout) => on_tick(),
                Err(mpsc::RecvTimeoutError::Disconnected) => break None,
            }
        };
        let (status, elapsed) =
            waited.unwrap_or_else(|| (Err(io::ErrorKind::BrokenPipe.into()), Duration::ZERO));
        let status = status.map_err(|source| CriuError::Io {
            what: "wait for CRIU",
            source,
        })?;
        let report = self.report.as_deref().map(Report::read);
        let limit_reached = report.is_some_and(|report| report.limit_reached);
        let (status, elapsed) = match report {
            None => (status, elapsed),
            Some(report) => report.ended.ok_or(CriuError::Unguarded { status })?,
        };
        Ok(Finished {
            status,
            elapsed,
            limit_reached,
            log: self.log,
            console: self.console,
            work_dir: self.work_dir,
        })
    }
}

/// Result of a CRIU process that has ended.
#[derive(Debug)]
pub struct Finished {
    /// Exit status of CRIU.
    pub status: ExitStatus,
    /// Time from CRIU's start to its end.
    pub elapsed: Duration,
    /// True if CRIU was made to roll back because the freeze reached its limit.
    pub limit_reached: bool,
    /// Path of CRIU's log, which may be absent if CRIU failed early.
    pub log: PathBuf,
    /// Path of CRIU's standard output and error.
    pub console: PathBuf,
    /// CRIU's work directory, with `stats-dump` or `stats-restore`.
    pub work_dir: PathBuf,
}

impl Finished {
    /// Finds the cause of a failure in CRIU's log.
    pub fn digest(&self) -> Digest {
        digest(&tail(&self.log), &tail(&self.console), Some(self.status))
    }

    /// Returns the most informative file: the log, or the console output if CRIU did not get that far.
    pub fn evidence(&self) -> &Path {
        match fs::metadata(&self.log) {
            Ok(metadata) if metadata.len() > 0 => &self.log,
            _ => &self.console,
        }
    }
}

/// Returns the last [`LOG_TAIL_BYTES`] of a file as text; empty if there is no such file.
fn tail(path: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let len_bytes = file.metadata()?.len();
        if len_bytes > LOG_TAIL_BYTES {
            io::Seek::seek(&mut file, io::SeekFrom::Start(len_bytes - LOG_TAIL_BYTES))?;
        }
        let mut bytes = Vec::new();
        file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Writes a program that is started at once. A shell of its own does: were this process to write it, a child
    /// that another test is just forking could hold it open for writing, and the kernel would not start it (ETXTBSY).
    fn write_program(path: &Path, text: &str) {
        let mut shell = Command::new("sh")
            .args(["-c", "cat >\"$1\" && chmod 755 \"$1\"", "sh"])
            .arg(path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = shell.stdin.take().unwrap();
        input.write_all(text.as_bytes()).unwrap();
        drop(input);
        assert!(shell.wait().unwrap().success());
    }

    fn fake(directory: &Path, script: &str) -> Criu {
        let path = directory.join("criu");
        write_program(&path, &format!("#!/bin/sh\n{script}\n"));
        Criu::new(Some(path))
    }

    #[test]
    fn pages_travel_over_standard_input() {
        let directory = tempfile::tempdir().unwrap();
        let criu = fake(
            directory.path(),
            "echo \"$@\" >args; echo page >&0; read answer; test \"$answer\" = stored",
        );
        let mut run = CriuRun::new(&criu, "dump", directory.path(), directory.path());
        let (mut here, there) = UnixStream::pair().unwrap();
        run.page_socket(there.into()).own_process_group();
        run.command.current_dir(directory.path());
        let running = run.start(&criu).unwrap();
        let mut page = [0; 5];
        here.read_exact(&mut page).unwrap();
        assert_eq!(&page, b"page\n");
        here.write_all(b"stored\n").unwrap();
        let finished = running.wait(Duration::from_millis(5), || {}).unwrap();
        assert!(finished.status.success());
        // CRIU's end was the only one left.
        assert_eq!(here.read(&mut page).unwrap(), 0);
        let arguments = fs::read_to_string(directory.path().join("args")).unwrap();
        assert!(arguments.starts_with("dump --images-dir /"), "{arguments}");
        assert!(
            arguments.ends_with("--page-server --ps-socket 0\n"),
            "{arguments}"
        );
    }

    #[test]
    fn a_missing_program_is_told_apart() {
        let criu = Criu::new(Some("/nonexistent/criu".into()));
        assert!(matches!(criu.version(), Err(CriuError::NotFound { .. })));
        let other = Criu::new(Some("/bin/true".into()));
        assert!(matches!(other.version(), Err(CriuError::NotCriu { .. })));
        let directory = tempfile::tempdir().unwrap();
        let criu = fake(directory.path(), "echo 'Version: 4.2.1'; echo 'GitID: x'");
        assert_eq!(criu.version().unwrap(), "4.2.1");
        assert!(criu.has_feature("mem_dirty_track").unwrap());
    }
}
