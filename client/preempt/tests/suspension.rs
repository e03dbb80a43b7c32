//! Suspends real process trees. The freezer's tests need root and its hierarchy, and say so where these are missing.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use permafrost_preempt::cgroup::{Controller, Hierarchies, Version};
use permafrost_preempt::record::{RecordKind, Records};
use permafrost_preempt::{
    HeldBy, PreemptError, ResumeOutcome, SuspendOptions, SuspendOutcome, SuspendedProcess, Target,
    resume, suspend,
};

const NEVER: &dyn Fn() -> bool = &|| false;

/// A shell with its descendants. They are killed when it is dropped.
struct Tree {
    shell: Child,
    lines: Option<BufReader<std::process::ChildStdout>>,
}

impl Tree {
    /// Starts a script in a process group of its own, which is not orphaned: its parent is this process, of the same
    /// session. So SIGTSTP stops it.
    fn start(script: &str) -> Self {
        use std::os::unix::process::CommandExt as _;
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let lines = BufReader::new(shell.stdout.take().unwrap());
        let mut tree = Self {
            shell,
            lines: Some(lines),
        };
        assert_eq!(tree.line(), "ready");
        tree
    }

    fn pid(&self) -> u32 {
        self.shell.id()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.as_mut().unwrap().read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    fn target(&self) -> Target {
        Target::tree(self.pid()).unwrap()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        for pid in permafrost_criu::processes::tree(self.pid()) {
            permafrost_criu::processes::kill(pid);
        }
        // One that is still frozen dies when the bench is dropped.
        for _ in 0..100 {
            if matches!(self.shell.try_wait(), Ok(Some(_))) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

struct Bench {
    hierarchies: Hierarchies,
    records: Records,
    _dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Self::with(Hierarchies::of_this_machine().unwrap())
    }

    fn with(hierarchies: Hierarchies) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self {
            hierarchies,
            records: Records::within(&dir.path().join("records")).unwrap(),
            _dir: dir,
        }
    }

    fn suspend(&self, target: &Target, grace_ms: u64) -> Vec<SuspendedProcess> {
        match self.attempt(target, grace_ms).unwrap() {
            SuspendOutcome::Suspended { processes, .. } => processes,
            SuspendOutcome::Ended => Vec::new(),
        }
    }

    fn attempt(&self, target: &Target, grace_ms: u64) -> Result<SuspendOutcome, PreemptError> {
        let options = SuspendOptions {
            grace: Duration::from_millis(grace_ms),
            ..SuspendOptions::default()
        };
        suspend(&self.hierarchies, &self.records, target, options, NEVER)
    }

    fn resume(&self, target: &Target) -> ResumeOutcome {
        resume(&self.records, target).unwrap()
    }

    fn has_no_record(&self) -> bool {
        self.records
            .targets(RecordKind::Suspended)
            .unwrap()
            .is_empty()
    }

    /// Returns true if the freezer of this machine can be used.
    fn freezes(&self) -> bool {
        let group = self
            .hierarchies
            .group_of(Controller::Freezer, std::process::id());
        let can = group.is_ok_and(|group| {
            let probe = group
                .path
                .join(format!("permafrost-probe-{}", std::process::id()));
            fs::create_dir(&probe)
                .and_then(|()| fs::remove_dir(&probe))
                .is_ok()
        });
        if !can {
            eprintln!("skipped: this user cannot use the freezer here");
        }
        can
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for target in self
            .records
            .targets(RecordKind::Suspended)
            .unwrap_or_default()
        {
            let _ = resume(&self.records, &target);
        }
    }
}

fn state(pid: u32) -> char {
    let stat =
        fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_else(|_| "0 () Z".to_owned());
    stat.rsplit(") ").next().unwrap().chars().next().unwrap()
}

fn await_state(pid: u32, wanted: char) {
    let started = Instant::now();
    while state(pid) != wanted {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "{pid} is {}",
            state(pid)
        );
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the processor time of a process, ticks.
fn ticks(pid: u32) -> u64 {
    permafrost_criu::origin::ProcessStat::read(pid)
        .unwrap()
        .cpu_ticks
}

fn advances(pid: u32) -> bool {
    let before = ticks(pid);
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(20) {
        if ticks(pid) > before {
            return true;
        }
        thread::sleep(Duration::from_millis(20));
    }
    false
}

fn stands_still(pid: u32) -> bool {
    let before = ticks(pid);
    thread::sleep(Duration::from_millis(200));
    ticks(pid) == before
}

#[test]
fn a_tree_stops_by_sigtstp_with_its_handlers_and_goes_on() {
    let bench = Bench::new();
    let mut tree = Tree::start(
        "sleep 600 & trap 'echo closing; kill -STOP $$' TSTP; trap 'echo reopened' CONT; echo ready; \
         while :; do :; done",
    );
    let target = tree.target();
    let processes = bench.suspend(&target, 20_000);
    assert_eq!(tree.line(), "closing");
    assert!(processes.len() >= 2, "{processes:?}");
    assert!(
        processes.iter().all(|one| one.held == HeldBy::Stopped),
        "{processes:?}"
    );
    assert_eq!(processes[0].pid, tree.pid());
    assert_eq!(state(tree.pid()), 'T');
    // Once more changes nothing; another command finds the record.
    assert_eq!(bench.suspend(&target, 20_000).len(), processes.len());
    assert_eq!(
        bench.records.targets(RecordKind::Suspended).unwrap(),
        std::slice::from_ref(&target)
    );
    assert!(matches!(
        bench.resume(&target),
        ResumeOutcome::Resumed { processes: 2.. }
    ));
    assert_eq!(tree.line(), "reopened");
    assert!(bench.has_no_record());
    assert_eq!(bench.resume(&target), ResumeOutcome::NotSuspended);
}

#[test]
fn a_process_that_was_stopped_before_stays_stopped() {
    let bench = Bench::new();
    let mut tree =
        Tree::start("sleep 600 & kill -STOP $!; echo ready; echo $!; while :; do sleep 0.01; done");
    let child: u32 = tree.line().parse().unwrap();
    await_state(child, 'T');
    let processes = bench.suspend(&tree.target(), 20_000);
    let before = processes.iter().find(|one| one.pid == child).unwrap();
    assert_eq!(before.held, HeldBy::StoppedBefore);
    bench.resume(&tree.target());
    assert_eq!(state(child), 'T');
    assert_ne!(state(tree.pid()), 'T');
}

/// A script with two children, of which one ignores SIGTSTP: it inherits that, so that it never runs without.
fn with_a_child_that_ignores_sigtstp(then: &str) -> String {
    format!("sleep 600 & trap '' TSTP; (while :; do :; done) & trap - TSTP; echo ready; {then}")
}

#[test]
fn who_ignores_sigtstp_is_frozen_beside_the_others_and_thawed() {
    let bench = Bench::new();
    if !bench.freezes() {
        return;
    }
    let mut tree = Tree::start(&with_a_child_that_ignores_sigtstp("echo $!; wait"));
    let stubborn: u32 = tree.line().parse().unwrap();
    let own = bench
        .hierarchies
        .group_of(Controller::Freezer, stubborn)
        .unwrap();
    let processes = bench.suspend(&tree.target(), 100);
    let held = |pid| processes.iter().find(|one| one.pid == pid).unwrap().held;
    assert_eq!(held(stubborn), HeldBy::Frozen);
    assert_eq!(held(tree.pid()), HeldBy::Stopped);
    assert!(stands_still(stubborn));
    let made = bench
        .hierarchies
        .group_of(Controller::Freezer, stubborn)
        .unwrap();
    assert!(made.path.starts_with(&own.path) && made != own, "{made:?}");
    // Repeated, it needs no second grace time.
    let started = Instant::now();
    bench.suspend(&tree.target(), 20_000);
    assert!(started.elapsed() < Duration::from_secs(15));
    bench.resume(&tree.target());
    assert!(advances(stubborn));
    assert_eq!(
        bench
            .hierarchies
            .group_of(Controller::Freezer, stubborn)
            .unwrap(),
        own
    );
    assert!(!made.path.exists(), "the group that was made is gone");
}

#[test]
fn children_that_are_forked_all_the_while_are_all_suspended() {
    let bench = Bench::new();
    if !bench.freezes() {
        return;
    }
    let tree = Tree::start(
        "trap '' TSTP; echo ready; while :; do (sleep 0.005; true) & (sleep 600)& sleep 0.002; kill $! 2>/dev/null; done",
    );
    for _ in 0..5 {
        let processes = bench.suspend(&tree.target(), 20);
        assert!(!processes.is_empty());
        let members = permafrost_criu::processes::tree(tree.pid());
        thread::sleep(Duration::from_millis(50));
        assert_eq!(
            permafrost_criu::processes::tree(tree.pid()),
            members,
            "nothing runs"
        );
        bench.resume(&tree.target());
        assert!(advances(tree.pid()));
    }
}

#[test]
fn a_task_that_ends_meanwhile_is_reported_as_ended() {
    let bench = Bench::new();
    let tree = Tree::start("trap 'exit 0' TSTP; echo ready; while :; do :; done");
    let target = tree.target();
    assert!(bench.suspend(&target, 20_000).is_empty());
    assert!(bench.has_no_record());
    assert_eq!(bench.resume(&target), ResumeOutcome::NotSuspended);
    // One that is killed while it is suspended leaves a record, which resuming removes.
    let tree = Tree::start("echo ready; while :; do sleep 0.01; done");
    let target = tree.target();
    let processes = bench.suspend(&target, 20_000);
    drop(tree);
    for process in processes {
        while Path::new(&format!("/proc/{}", process.pid)).exists() && state(process.pid) != 'Z' {
            thread::sleep(Duration::from_millis(2));
        }
    }
    assert_eq!(bench.resume(&target), ResumeOutcome::Ended);
    assert!(bench.has_no_record());
}

#[test]
fn an_interrupt_puts_everything_back() {
    let bench = Bench::new();
    let tree = Tree::start(&with_a_child_that_ignores_sigtstp("wait"));
    let started = Instant::now();
    let interrupted = || started.elapsed() > Duration::from_millis(300);
    let options = SuspendOptions {
        grace: Duration::from_secs(60),
        ..SuspendOptions::default()
    };
    let refused = suspend(
        &bench.hierarchies,
        &bench.records,
        &tree.target(),
        options,
        &interrupted,
    );
    assert!(
        matches!(refused, Err(PreemptError::Interrupted)),
        "{refused:?}"
    );
    assert!(bench.has_no_record());
    assert_ne!(state(tree.pid()), 'T');
}

#[test]
fn a_repetition_that_is_interrupted_leaves_the_target_suspended() {
    let bench = Bench::new();
    // Without children: a shell that is stopped between vfork and exec of one waits in D.
    let tree = Tree::start("echo ready; exec sleep 600");
    let target = tree.target();
    assert!(!bench.suspend(&target, 20_000).is_empty());
    let (options, interrupted) = (SuspendOptions::default(), || true);
    let (hierarchies, records) = (&bench.hierarchies, &bench.records);
    let refused = suspend(hierarchies, records, &target, options, &interrupted);
    assert!(
        matches!(refused, Err(PreemptError::Interrupted)),
        "{refused:?}"
    );
    assert_eq!(state(tree.pid()), 'T');
    assert!(!bench.has_no_record());
    assert!(matches!(
        bench.resume(&target),
        ResumeOutcome::Resumed { .. }
    ));
    assert_ne!(state(tree.pid()), 'T');
}

#[test]
fn a_process_that_was_suspended_with_its_parent_is_found() {
    let bench = Bench::new();
    let mut tree = Tree::start("sleep 600 & echo ready; echo $!; while :; do sleep 0.01; done");
    let child: u32 = tree.line().parse().unwrap();
    let (whole, part) = (tree.target(), Target::tree(child).unwrap());
    let holder = |own: &Target, pid: u32| {
        let records = &bench.records;
        records
            .other_holder(RecordKind::Suspended, own, &[pid])
            .unwrap()
    };
    assert_eq!(holder(&part, child), None);
    bench.suspend(&whole, 20_000);
    assert_eq!(holder(&part, child), Some(whole.clone()));
    assert_eq!(holder(&whole, tree.pid()), None, "its own record");
    assert_eq!(holder(&part, std::process::id()), None);
    bench.resume(&whole);
    assert_eq!(holder(&part, child), None);
}

/// Waits until a group of version 1 is in a state.
fn await_freezer(group: &Path, wanted: &str) {
    for _ in 0..1000 {
        let state = fs::read_to_string(group.join("freezer.state")).unwrap();
        if state.trim() == wanted {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("{} is not {wanted}", group.display());
}

#[test]
fn a_group_below_a_frozen_one_is_thawed_itself_on_resumption() {
    let bench = Bench::new();
    let freezer = bench
        .hierarchies
        .group_of(Controller::Freezer, std::process::id());
    let Some(own) = freezer
        .ok()
        .filter(|own| own.version == Version::V1)
        .filter(|_| bench.freezes())
    else {
        eprintln!("skipped: no freezer of version 1 that this user can use");
        return;
    };
    let name = format!("permafrost-test-above-{}", std::process::id());
    let above = MadeGroup(own.path.join(name));
    let below = MadeGroup(above.0.join("below"));
    fs::create_dir(&above.0).unwrap();
    fs::create_dir(&below.0).unwrap();
    let tree = Tree::start("trap '' TSTP; echo ready; while :; do :; done");
    fs::write(below.0.join("cgroup.procs"), tree.pid().to_string()).unwrap();
    fs::write(above.0.join("freezer.state"), "FROZEN").unwrap();
    await_freezer(&below.0, "FROZEN");
    let processes = bench.suspend(&tree.target(), 50);
    assert_eq!(processes[0].held, HeldBy::Frozen);
    let itself = || fs::read_to_string(below.0.join("freezer.self_freezing")).unwrap();
    assert_eq!(itself().trim(), "1");
    bench.resume(&tree.target());
    assert_eq!(itself().trim(), "0");
    fs::write(above.0.join("freezer.state"), "THAWED").unwrap();
    assert!(advances(tree.pid()));
    drop(tree);
    // The inner one first.
    drop(below);
    drop(above);
}

#[test]
fn without_a_freezer_sigstop_is_the_last_resort() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::with(Hierarchies::of_version_2(dir.path(), Path::new("/proc")));
    let tree = Tree::start("trap '' TSTP; echo ready; while :; do :; done");
    let outcome = bench.attempt(&tree.target(), 50).unwrap();
    let SuspendOutcome::Suspended {
        processes,
        freezer_error,
        ..
    } = outcome
    else {
        panic!("{outcome:?}");
    };
    assert_eq!(processes[0].held, HeldBy::StoppedHard);
    assert!(freezer_error.is_some());
    bench.resume(&tree.target());
    assert!(advances(tree.pid()));
}

#[test]
fn this_process_and_its_ancestors_are_refused() {
    let bench = Bench::new();
    assert!(Target::tree(std::process::id()).is_err());
    assert!(Target::tree(1).is_err());
    assert!(Target::tree(5_000_000).is_err());
    let own = bench
        .hierarchies
        .group_of(Controller::Freezer, std::process::id());
    if let Ok(own) = own {
        let refused = bench.attempt(&Target::group(&own), 50);
        assert!(
            matches!(refused, Err(PreemptError::ContainsOneself { .. })),
            "{refused:?}"
        );
    }
    // A group that holds an ancestor, and not this process.
    let dir = tempfile::tempdir().unwrap();
    let job = dir.path().join("job");
    fs::create_dir(&job).unwrap();
    let parent = std::os::unix::process::parent_id();
    fs::write(job.join("cgroup.procs"), parent.to_string()).unwrap();
    let bench = Bench::with(Hierarchies::of_version_2(dir.path(), Path::new("/proc")));
    let group = bench
        .hierarchies
        .group_at(Controller::Freezer, &job)
        .unwrap();
    let refused = bench.attempt(&Target::group(&group), 50).unwrap_err();
    assert!(
        refused.to_string().contains("or an ancestor of it"),
        "{refused}"
    );
    assert!(bench.has_no_record());
}

/// A control group of the machine's own hierarchy, removed when dropped.
struct MadeGroup(PathBuf);

impl MadeGroup {
    /// Makes a group of version 2, if it is mounted and this user may.
    fn of_version_2() -> Option<(Hierarchies, Self)> {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let line = mounts
            .lines()
            .find(|line| line.split(' ').nth(2) == Some("cgroup2"))?;
        let at = PathBuf::from(line.split(' ').nth(1)?);
        let path = at.join(format!("permafrost-test-{}", std::process::id()));
        fs::create_dir(&path).ok()?;
        let hierarchies = Hierarchies::of_version_2(&at, Path::new("/proc"));
        Some((hierarchies, Self(path)))
    }
}

impl Drop for MadeGroup {
    fn drop(&mut self) {
        // Version 1: its processes do not die before.
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        eprintln!("{} is left", self.0.display());
    }
}

#[test]
fn a_group_of_version_2_is_frozen_in_place_and_trees_in_one_that_is_made() {
    let Some((hierarchies, made)) = MadeGroup::of_version_2() else {
        eprintln!("skipped: no hierarchy of version 2 that this user can use");
        return;
    };
    let bench = Bench::with(hierarchies);
    // The shell stays outside until it has said that it is ready.
    let tree = Tree::start(
        "trap '' TSTP; (while :; do :; done) & echo ready; while :; do sleep 0.01; done",
    );
    let own = bench
        .hierarchies
        .group_of(Controller::Freezer, tree.pid())
        .unwrap();
    let processes = bench.suspend(&tree.target(), 50);
    assert!(
        processes.iter().all(|one| one.held == HeldBy::Frozen),
        "{processes:?}"
    );
    assert!(stands_still(processes[1].pid));
    bench.resume(&tree.target());
    assert_eq!(
        bench
            .hierarchies
            .group_of(Controller::Freezer, tree.pid())
            .unwrap(),
        own
    );
    assert!(advances(processes[1].pid));

    for pid in permafrost_criu::processes::tree(tree.pid()) {
        let _ = fs::write(made.0.join("cgroup.procs"), pid.to_string());
    }
    let group = bench
        .hierarchies
        .group_at(Controller::Freezer, &made.0)
        .unwrap();
    let target = Target::group(&group);
    let processes = bench.suspend(&target, 50);
    assert!(processes.len() >= 2, "{processes:?}");
    let events = fs::read_to_string(made.0.join("cgroup.events")).unwrap();
    assert!(events.contains("frozen 1"), "{events}");
    bench.resume(&target);
    assert_eq!(
        fs::read_to_string(made.0.join("cgroup.freeze"))
            .unwrap()
            .trim(),
        "0"
    );
    assert!(advances(tree.pid()));
    drop(tree);
}
