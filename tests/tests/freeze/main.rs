//! The freeze limit: whichever process hangs or dies in the middle of a dump, at whichever phase, the task runs
//! again.
//!
//! Each cell dumps a workload of its own through a tap, which holds the dump at a phase until a process has been
//! stopped or killed. The limit is short, and the condition waited for is far longer: without the limit it never
//! comes.

mod tap;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process::{self, signal, wait_for};
use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{binaries, criu};
use rustix::process::Signal;
use tap::{Phase, Tap};

/// Limit that is long enough for all cells of a test to reach their phases, and for a rollback, on a busy machine:
/// seven seconds pass before the rollback begins.
const LIMIT: &str = "12s";

/// Limit that no test reaches.
const NO_LIMIT: &str = "1h";

/// Time that a task may take to run again: only a hang takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

const PHASES: [Phase; 5] = [
    Phase::Open,
    Phase::Pages,
    Phase::Close,
    Phase::Seal,
    Phase::Sealed,
];

/// Phases of a dump by stream: no page stream is opened.
const STREAM_PHASES: [Phase; 4] = [Phase::Pages, Phase::Close, Phase::Seal, Phase::Sealed];

/// A workload, and its dump that is held at a phase.
struct Cell {
    phase: Phase,
    /// Option that says how CRIU sends the pages.
    way: &'static str,
    job: String,
    _dir: tempfile::TempDir,
    workload: Workload,
    tap: Tap,
    client: Option<Child>,
    /// Pid of the tracer of the task.
    criu: u32,
    /// Pid of the process that requested the seal.
    action: u32,
}

impl Cell {
    fn new(daemon: &Daemon, name: &str, way: &'static str, phase: Phase) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = workload::Options {
            size_mib: 4,
            ..workload::Options::default()
        };
        Self {
            phase,
            way,
            job: format!("{name}{way}-{phase:?}"),
            workload: Workload::start(dir.path(), &options).unwrap(),
            tap: Tap::start(dir.path(), daemon.control(), phase),
            _dir: dir,
            client: None,
            criu: 0,
            action: 0,
        }
    }

    /// Begins the dump.
    fn begin(&mut self, limit: &str) {
        let mut command = dump(&self.tap.socket, &self.job, self.workload.pid(), limit);
        command.arg(self.way);
        self.client = Some(command.spawn().unwrap());
    }

    /// Waits until the dump is at its phase.
    fn await_held(&mut self) {
        self.action = self.tap.await_held();
        let path = format!("/proc/{}/status", self.workload.pid());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("TracerPid:"));
        self.criu = line.unwrap().trim().parse().unwrap();
        assert_ne!(self.criu, 0, "{} is not frozen", self.job);
    }

    fn client(&self) -> u32 {
        self.client.as_ref().unwrap().id()
    }

    /// Waits for the end of the freeze. Returns true if the task runs then; otherwise it is gone.
    fn runs_again(&self) -> bool {
        let what = format!("the end of the freeze of {}", self.job);
        wait_for(&what, PATIENCE, || {
            Ok((!process::is_alive(self.criu)).then_some(()))
        })
        .unwrap();
        match self.workload.verify() {
            Ok(status) => assert!(status.is_sound(), "{}: {status:?}", self.job),
            Err(error) => assert!(!self.workload.is_running(), "{}: {error}", self.job),
        }
        self.workload.is_running()
    }

    /// Waits for the client's end. Returns its exit code.
    fn exit_code(&mut self) -> Option<i32> {
        self.client.as_mut().unwrap().wait().unwrap().code()
    }

    /// Returns the number of the job's checkpoints.
    fn checkpoints(&self, daemon: &Daemon) -> usize {
        let listed = daemon.json(&["ls"]).unwrap();
        let all = listed["checkpoints"].as_array().unwrap();
        all.iter()
            .filter(|line| line["job"] == self.job.as_str())
            .count()
    }
}

fn dump(socket: &Path, job: &str, pid: u32, limit: &str) -> Command {
    let mut command = Command::new(binaries::path("permafrost").unwrap());
    command
        .arg("--socket")
        .arg(socket)
        .args(["dump", "--job", job])
        .args(["--pid", &pid.to_string()])
        .args(["--freeze-limit", limit])
        .env(criu::CRIU, criu::find().unwrap().path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Starts a daemon that lets all dumps run at once.
fn daemon(dir: &Path) -> Daemon {
    let options = Options {
        extra: ["--dumps-at-once=32", "--listen-metrics=127.0.0.1:0"]
            .map(str::to_owned)
            .to_vec(),
        ..Options::default()
    };
    Daemon::start(dir, &options).unwrap()
}

/// Holds dumps at their phases.
fn hold(cells: &mut [Cell], limit: &str) {
    for cell in &mut *cells {
        cell.begin(limit);
    }
    for cell in cells {
        cell.await_held();
    }
}

/// Waits until the taps have passed on that their callers are gone: a daemon that runs again then must not seal for
/// them.
fn await_callers_gone(cells: &[Cell]) {
    wait_for("the end of all callers", PATIENCE, || {
        Ok(cells
            .iter()
            .all(|cell| cell.tap.callers_are_gone())
            .then_some(()))
    })
    .unwrap();
}

/// Makes a cell for each phase.
type CellsOf = fn(&Daemon, &str, &[Phase]) -> Vec<Cell>;

fn cells(daemon: &Daemon, name: &str, phases: &[Phase]) -> Vec<Cell> {
    let cell = |&phase: &Phase| Cell::new(daemon, name, "--page-server", phase);
    phases.iter().map(cell).collect()
}

fn streams(daemon: &Daemon, name: &str, phases: &[Phase]) -> Vec<Cell> {
    let cell = |&phase: &Phase| Cell::new(daemon, name, "--stream", phase);
    phases.iter().map(cell).collect()
}

#[test]
fn a_daemon_that_hangs_freezes_no_task_for_good() {
    if criu::for_test("a daemon that hangs").is_none() {
        return;
    }
    // One way after the other: all cells of a daemon have to reach their phases within the limit.
    hang(cells, &PHASES);
    hang(streams, &STREAM_PHASES);
}

fn hang(cells: CellsOf, phases: &[Phase]) {
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path());
    let mut all = cells(&daemon, "hung", phases);
    // Their clients are killed on top of it.
    all.extend(cells(&daemon, "alone", &[Phase::Pages, Phase::Seal]));
    hold(&mut all, LIMIT);
    process::stop(daemon.pid()).unwrap();
    for cell in &all {
        if cell.job.starts_with("alone") {
            signal(cell.client(), Signal::KILL).unwrap();
        }
        cell.tap.release();
    }
    for cell in &mut all {
        let runs = cell.runs_again();
        assert_eq!(runs, cell.phase != Phase::Sealed, "{}", cell.job);
        assert_eq!(cell.exit_code() == Some(0), !runs, "{}", cell.job);
    }
    await_callers_gone(&all);
    signal(daemon.pid(), Signal::CONT).unwrap();
    // Clients that lived until their limit have said so before they ended, and the daemon reads it now.
    let told = all.iter().filter(|cell| cell.job.starts_with("hung"));
    let told = told.filter(|cell| cell.phase != Phase::Sealed).count();
    let counted = || daemon.counter("permafrost_freeze_limits_reached_total");
    let all_counted = wait_for("the count of limits", PATIENCE, || {
        Ok((counted()? == told as u64).then_some(()))
    });
    if all_counted.is_err() {
        panic!("{} of {told} limits counted", counted().unwrap());
    }
    for cell in &all {
        if cell.phase != Phase::Sealed {
            // The daemon reads what was asked while it was stopped, and seals nothing of it.
            let dumped = daemon.run(&[
                "dump",
                "--job",
                &cell.job,
                "--pid",
                &cell.workload.pid().to_string(),
            ]);
            dumped.unwrap();
        }
        assert_eq!(cell.checkpoints(&daemon), 1, "{}", cell.job);
    }
}

#[test]
fn a_daemon_that_dies_freezes_no_task_for_good() {
    if criu::for_test("a daemon that dies").is_none() {
        return;
    }
    die(cells, &PHASES);
    die(streams, &STREAM_PHASES);
}

fn die(cells: CellsOf, phases: &[Phase]) {
    let dir = tempfile::tempdir().unwrap();
    let first = daemon(dir.path());
    let mut all = cells(&first, "dead", phases);
    hold(&mut all, LIMIT);
    first.kill().unwrap();
    for cell in &mut all {
        cell.tap.release();
        let runs = cell.runs_again();
        assert_eq!(runs, cell.phase != Phase::Sealed, "{}", cell.job);
        assert_eq!(cell.exit_code() == Some(0), !runs, "{}", cell.job);
    }
    let second = daemon(dir.path());
    for cell in &all {
        let sealed = usize::from(cell.phase == Phase::Sealed);
        assert_eq!(cell.checkpoints(&second), sealed, "{}", cell.job);
    }
}

#[test]
fn a_client_a_script_or_a_criu_that_hangs_or_dies_freezes_no_task_for_good() {
    if criu::for_test("a client, a script or a CRIU that hangs or dies").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path());
    type Victim = fn(&Cell) -> u32;
    let late: &[Phase] = &[Phase::Seal, Phase::Sealed];
    let victims: [(&str, Victim, &[Phase], &[Phase]); 3] = [
        ("client", Cell::client, &PHASES, &STREAM_PHASES),
        ("criu", |cell| cell.criu, &PHASES, &[Phase::Pages]),
        ("action", |cell| cell.action, late, &[]),
    ];
    let mut all = Vec::new();
    for (name, victim, phases, stream_phases) in victims {
        for (word, how) in [("hung", Signal::STOP), ("dead", Signal::KILL)] {
            let name = format!("{name}-{word}");
            let mut these = cells(&daemon, &name, phases);
            these.extend(streams(&daemon, &name, stream_phases));
            for mut cell in these {
                cell.begin(LIMIT);
                cell.await_held();
                if how == Signal::STOP {
                    process::stop(victim(&cell)).unwrap();
                } else {
                    signal(victim(&cell), how).unwrap();
                }
                cell.tap.release();
                all.push(cell);
            }
        }
    }
    for cell in &mut all {
        let runs = cell.runs_again();
        // One that hangs ends when it is woken.
        let _ = signal(cell.client(), Signal::CONT);
        let acknowledged = cell.exit_code() == Some(0);
        assert!(
            !(runs && acknowledged),
            "{} is acknowledged and runs",
            cell.job
        );
        let sealed = cell.checkpoints(&daemon);
        assert!(
            runs || sealed == 1,
            "{} is gone without a checkpoint",
            cell.job
        );
        // From the seal on, and without a client, the dump may as well be finished.
        let before_the_seal = matches!(cell.phase, Phase::Open | Phase::Pages | Phase::Close);
        if before_the_seal && !cell.job.starts_with("client") {
            assert!(runs, "{} is gone", cell.job);
            assert_eq!(sealed, 0, "{} runs and is sealed", cell.job);
        }
    }
}

#[test]
fn interrupts_end_the_freeze_of_a_daemon_that_hangs() {
    if criu::for_test("interrupts while the daemon hangs").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path());
    let mut all = cells(&daemon, "interrupted", &PHASES[..4]);
    all.extend(streams(&daemon, "interrupted", &STREAM_PHASES[..3]));
    hold(&mut all, NO_LIMIT);
    process::stop(daemon.pid()).unwrap();
    for cell in &all {
        cell.tap.release();
        signal(cell.client(), Signal::INT).unwrap();
    }
    for cell in &mut all {
        if cell.phase == Phase::Seal {
            // The seal may be done any moment: that takes a second one, once the first one was noticed.
            std::thread::sleep(Duration::from_secs(1));
            assert!(process::is_alive(cell.criu), "{}", cell.job);
            signal(cell.client(), Signal::INT).unwrap();
        }
        assert!(cell.runs_again(), "{}", cell.job);
        assert_eq!(cell.exit_code(), Some(130), "{}", cell.job);
    }
    await_callers_gone(&all);
    signal(daemon.pid(), Signal::CONT).unwrap();
    for cell in &all {
        assert_eq!(cell.checkpoints(&daemon), 0, "{}", cell.job);
    }
}

#[test]
fn a_tree_with_a_process_that_the_dump_needs_is_refused() {
    if criu::for_test("trees with what the dump needs").is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let daemon = daemon(dir.path());
    let refused = |pid: u32| {
        let output = daemon
            .try_run(&["dump", "--job", "self", "--pid", &pid.to_string()])
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let text = refused(daemon.pid());
    let what = format!("process {} is permafrostd", daemon.pid());
    assert!(text.contains(&what), "{text}");
    // This process is the parent of both.
    let text = refused(std::process::id());
    assert!(text.contains(&std::process::id().to_string()), "{text}");
    assert!(process::is_alive(daemon.pid()));
}
