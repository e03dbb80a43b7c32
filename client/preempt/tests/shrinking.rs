//! Shrinks real process trees in control groups of version 1, and groups of version 2 in a directory in which a thread
//! acts as the kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use permafrost_preempt::cgroup::{Controller, Hierarchies};
use permafrost_preempt::record::{RecordKind, Records};
use permafrost_preempt::{
    Grown, PreemptError, ShrinkEnd, ShrinkOptions, ShrinkOutcome, Target, grow, shrink,
};
use permafrost_scheduling::cost::TaskResources;
use permafrost_scheduling::quantity::Bytes;

const NEVER: &dyn Fn() -> bool = &|| false;
const MIB: u64 = 1 << 20;

fn resources(cpu_millis: u64, mib: u64) -> TaskResources {
    TaskResources {
        cpu_millis,
        memory: Bytes::mib(mib),
    }
}

fn options(to: TaskResources) -> ShrinkOptions {
    ShrinkOptions {
        to,
        interval: Duration::from_millis(10),
        ..ShrinkOptions::default()
    }
}

struct Bench {
    hierarchies: Hierarchies,
    records: Records,
    _dir: tempfile::TempDir,
}

impl Bench {
    fn with(hierarchies: Hierarchies) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self {
            hierarchies,
            records: Records::within(&dir.path().join("records")).unwrap(),
            _dir: dir,
        }
    }

    fn shrink(
        &self,
        target: &Target,
        options: ShrinkOptions,
    ) -> Result<ShrinkOutcome, PreemptError> {
        let mut reported = Vec::new();
        let mut report = |step: &_| reported.push(*step);
        let shrunk = shrink(
            &self.hierarchies,
            &self.records,
            target,
            options,
            NEVER,
            &mut report,
        )?;
        assert_eq!(reported, shrunk.steps);
        Ok(shrunk)
    }

    fn grow(&self, target: &Target) -> Grown {
        grow(&self.hierarchies, &self.records, target, None).unwrap()
    }
}

/// Groups of version 2 as files. A thread reclaims as the kernel would, down to what cannot be reclaimed, and swaps what
/// is below `swaps_below`.
struct FakeKernel {
    dir: tempfile::TempDir,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    child: Child,
}

impl FakeKernel {
    fn new(used_mib: u64, least_mib: u64, swaps_below_mib: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let group = dir.path().join("batch/job");
        fs::create_dir_all(&group).unwrap();
        for (file, value) in [
            ("cgroup.procs", child.id().to_string()),
            ("cpu.max", "max 100000".to_owned()),
            ("memory.current", (used_mib * MIB).to_string()),
            ("memory.high", "max".to_owned()),
            ("memory.max", "max".to_owned()),
            ("memory.swap.current", "0".to_owned()),
            ("memory.reclaim", String::new()),
        ] {
            fs::write(group.join(file), value).unwrap();
        }
        let stopped = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stopped);
        let thread = thread::spawn(move || {
            let read = |file: &str| {
                fs::read_to_string(group.join(file))
                    .unwrap()
                    .trim()
                    .to_owned()
            };
            while !until.load(Ordering::Relaxed) {
                if let Ok(high) = read("memory.high").parse::<u64>() {
                    let used: u64 = read("memory.current").parse().unwrap_or(u64::MAX);
                    let now = used.min(high.max(least_mib * MIB));
                    let swapped = (swaps_below_mib * MIB).saturating_sub(now);
                    // A file is never seen empty: it is replaced.
                    for (file, value) in [("memory.swap.current", swapped), ("memory.current", now)]
                    {
                        let path = group.join("new");
                        fs::write(&path, value.to_string()).unwrap();
                        fs::rename(&path, group.join(file)).unwrap();
                    }
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        Self {
            dir,
            stopped,
            thread: Some(thread),
            child,
        }
    }

    fn bench(&self) -> (Bench, Target) {
        let bench = Bench::with(Hierarchies::of_version_2(
            self.dir.path(),
            Path::new("/proc"),
        ));
        let group = bench
            .hierarchies
            .group_at(Controller::Cpu, Path::new("/batch/job"))
            .unwrap();
        let target = Target::group(&group);
        (bench, target)
    }

    fn file(&self, file: &str) -> String {
        fs::read_to_string(self.dir.path().join("batch/job").join(file)).unwrap()
    }
}

impl FakeKernel {
    /// Stops the thread: the files stay as they are.
    fn stop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for FakeKernel {
    fn drop(&mut self) {
        self.stop();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_group_of_version_2_shrinks_in_steps_to_the_footprint_and_grows_back() {
    let kernel = FakeKernel::new(9 * 1024, 0, 0);
    let (bench, target) = kernel.bench();
    let shrunk = bench.shrink(&target, options(resources(0, 0))).unwrap();
    assert_eq!(shrunk.end, ShrinkEnd::Reached, "{shrunk:?}");
    let memory: Vec<u64> = shrunk
        .steps
        .iter()
        .map(|step| step.memory_bytes / MIB)
        .collect();
    // 4 GB a step, and never below the footprint.
    assert_eq!(memory, [5 * 1024, 1024, 64]);
    assert_eq!(shrunk.steps.last().unwrap().cpu_millis, 10);
    assert_eq!(kernel.file("cpu.max"), "1000 100000");
    assert_eq!(kernel.file("memory.high"), (64 * MIB).to_string());
    assert_eq!(
        kernel.file("memory.max"),
        "max",
        "below it the kernel would kill"
    );
    // Repeated, it takes nothing more.
    assert!(
        bench
            .shrink(&target, options(resources(0, 0)))
            .unwrap()
            .steps
            .is_empty()
    );
    let part = Some(resources(500, 2048));
    assert_eq!(
        grow(&bench.hierarchies, &bench.records, &target, part).unwrap(),
        Grown::Part
    );
    assert_eq!(kernel.file("cpu.max"), "50000 100000");
    assert_eq!(kernel.file("memory.high"), (2048 * MIB).to_string());
    assert_eq!(bench.grow(&target), Grown::Whole);
    assert_eq!(kernel.file("cpu.max"), "max 100000");
    assert_eq!(kernel.file("memory.high"), "max");
    assert_eq!(bench.grow(&target), Grown::NotShrunk);
}

#[test]
fn a_group_that_begins_to_swap_is_frozen_and_keeps_the_rest() {
    let kernel = FakeKernel::new(9 * 1024, 0, 6 * 1024);
    let (bench, target) = kernel.bench();
    let shrunk = bench.shrink(&target, options(resources(500, 64))).unwrap();
    assert_eq!(shrunk.end, ShrinkEnd::Swapping);
    assert_eq!(shrunk.steps.len(), 1);
    assert_eq!(shrunk.steps[0].memory_bytes, 5 * 1024 * MIB);
    assert_eq!(
        kernel.file("cpu.max"),
        "1000 100000",
        "1 %, though 50 % were to be left"
    );
    bench.grow(&target);
    // Immediate preemption takes everything at once all the same.
    let kernel = FakeKernel::new(9 * 1024, 0, 6 * 1024);
    let (bench, target) = kernel.bench();
    let immediate = ShrinkOptions {
        immediate: true,
        ..options(resources(0, 0))
    };
    let shrunk = bench.shrink(&target, immediate).unwrap();
    assert_eq!((shrunk.end, shrunk.steps.len()), (ShrinkEnd::Reached, 1));
    assert_eq!(shrunk.steps[0].memory_bytes, 64 * MIB);
}

#[test]
fn swap_by_another_cause_does_not_freeze_a_group_that_loses_processors_alone() {
    let kernel = FakeKernel::new(9 * 1024, 0, 0);
    let (bench, target) = kernel.bench();
    let options = ShrinkOptions {
        step: resources(100, 4096),
        ..options(TaskResources {
            cpu_millis: 500,
            memory: Bytes::new(u64::MAX),
        })
    };
    let group = kernel.dir.path().join("batch/job");
    fs::write(group.join("cpu.max"), "100000 100000").unwrap();
    let mut swap = |_: &_| fs::write(group.join("memory.swap.current"), "4096").unwrap();
    let (hierarchies, records) = (&bench.hierarchies, &bench.records);
    let shrunk = shrink(hierarchies, records, &target, options, NEVER, &mut swap).unwrap();
    assert_eq!(shrunk.end, ShrinkEnd::Reached, "{shrunk:?}");
    let last = shrunk.steps.last().unwrap();
    assert_eq!((last.swapped_bytes, last.cpu_millis), (4096, 500));
    assert_eq!(kernel.file("cpu.max"), "50000 100000");
}

#[test]
fn a_repetition_that_fails_leaves_what_was_taken() {
    let kernel = FakeKernel::new(1024, 0, 0);
    let (bench, target) = kernel.bench();
    bench.shrink(&target, options(resources(500, 512))).unwrap();
    let group = kernel.dir.path().join("batch/job");
    fs::rename(group.join("cpu.max"), group.join("away")).unwrap();
    bench.shrink(&target, options(resources(0, 0))).unwrap_err();
    assert_eq!(kernel.file("memory.high"), (512 * MIB).to_string());
    fs::rename(group.join("away"), group.join("cpu.max")).unwrap();
    assert_eq!(bench.grow(&target), Grown::Whole);
    assert_eq!(kernel.file("memory.high"), "max");
    assert_eq!(kernel.file("cpu.max"), "max 100000");
}

#[test]
fn a_setting_that_cannot_be_put_back_does_not_keep_the_rest_from_it() {
    let mut kernel = FakeKernel::new(1024, 0, 0);
    let (bench, target) = kernel.bench();
    bench.shrink(&target, options(resources(500, 512))).unwrap();
    kernel.stop();
    // The memory limit comes first, being the last that was changed: a directory takes no value.
    let group = kernel.dir.path().join("batch/job");
    fs::remove_file(group.join("memory.high")).unwrap();
    fs::create_dir(group.join("memory.high")).unwrap();
    let failed = grow(&bench.hierarchies, &bench.records, &target, None).unwrap_err();
    assert!(failed.to_string().contains("memory.high"), "{failed}");
    assert_eq!(kernel.file("cpu.max"), "max 100000");
    fs::remove_dir(group.join("memory.high")).unwrap();
    fs::write(group.join("memory.high"), "1").unwrap();
    assert_eq!(bench.grow(&target), Grown::Whole);
    assert_eq!(kernel.file("memory.high"), "max");
}

#[test]
fn what_cannot_be_reclaimed_is_left_and_said() {
    let kernel = FakeKernel::new(2 * 1024, 1024, 0);
    let (bench, target) = kernel.bench();
    let shrunk = bench.shrink(&target, options(resources(100, 256))).unwrap();
    assert_eq!(shrunk.end, ShrinkEnd::NotReclaimable);
    assert!(
        shrunk.why.as_ref().unwrap().contains("1024 MiB are left"),
        "{shrunk:?}"
    );
    // It is not slowed down at a limit below what it uses.
    assert_eq!(kernel.file("memory.high"), (1025 * MIB).to_string());
    assert_eq!(kernel.file("cpu.max"), "10000 100000");
}

#[test]
fn a_killed_command_leaves_what_it_has_taken_on_record() {
    let kernel = FakeKernel::new(9 * 1024, 0, 0);
    let (bench, target) = kernel.bench();
    // Stopped after the first step, as if it had been killed: nothing is put back.
    let count = std::cell::Cell::new(0);
    let after_the_first = || {
        count.set(count.get() + 1);
        count.get() > 1
    };
    let shrunk = shrink(
        &bench.hierarchies,
        &bench.records,
        &target,
        options(resources(0, 0)),
        &after_the_first,
        &mut |_| {},
    )
    .unwrap();
    assert_eq!(shrunk.end, ShrinkEnd::Interrupted);
    assert_eq!(kernel.file("memory.high"), (5 * 1024 * MIB).to_string());
    assert_eq!(
        bench.records.targets(RecordKind::Shrunk).unwrap(),
        std::slice::from_ref(&target)
    );
    assert_eq!(bench.grow(&target), Grown::Whole);
    assert_eq!(kernel.file("memory.high"), "max");
}

#[test]
fn a_controller_that_is_not_enabled_is_said_before_anything_is_changed() {
    let kernel = FakeKernel::new(1024, 0, 0);
    fs::remove_file(kernel.dir.path().join("batch/job/cpu.max")).unwrap();
    let (bench, target) = kernel.bench();
    let refused = bench.shrink(&target, options(resources(0, 0))).unwrap_err();
    assert!(
        refused.to_string().contains("cgroup.subtree_control"),
        "{refused}"
    );
    assert!(
        bench
            .records
            .targets(RecordKind::Shrunk)
            .unwrap()
            .is_empty()
    );
    assert_eq!(kernel.file("memory.high"), "max");
}

/// A process in groups of its own in the hierarchies of version 1.
struct InGroups {
    child: Child,
    groups: Vec<PathBuf>,
}

impl InGroups {
    /// Starts a script in groups of the controllers, if this user may make them.
    fn start(hierarchies: &Hierarchies, controllers: &[Controller], script: &str) -> Option<Self> {
        let mut groups = Vec::new();
        for &controller in controllers {
            let own = hierarchies.group_of(controller, std::process::id()).ok()?;
            let path = own.path.join(format!(
                "permafrost-test-{}-{}",
                std::process::id(),
                script.len()
            ));
            if !path.join("..").join("cgroup.sane_behavior").exists()
                && !own.path.join("tasks").exists()
            {
                return None;
            }
            fs::create_dir(&path).ok()?;
            groups.push(path);
        }
        let joined = groups
            .iter()
            .map(|group| format!("echo $$ > {}/cgroup.procs; ", group.display()));
        let script = joined.collect::<String>() + script;
        let child = Command::new("sh")
            .args(["-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Some(Self { child, groups })
    }

    fn target(&self) -> Target {
        Target::tree(self.child.id()).unwrap()
    }
}

impl Drop for InGroups {
    fn drop(&mut self) {
        for pid in permafrost_criu::processes::tree(self.child.id()) {
            permafrost_criu::processes::kill(pid);
        }
        let _ = self.child.wait();
        for group in &self.groups {
            for _ in 0..100 {
                if fs::remove_dir(group).is_ok() {
                    break;
                }
                thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Waits until the process has made `file`, which it does once its memory is filled: what a group is charged passes any
/// limit earlier, by page cache and by copies that are freed again.
fn await_filled(file: &Path) {
    for _ in 0..1000 {
        if file.exists() {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("the process has not filled its memory");
}

#[test]
fn memory_that_no_swap_takes_is_left_and_the_process_lives_on() {
    let bench = Bench::with(Hierarchies::of_this_machine().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let filled = dir.path().join("filled");
    let fill = format!(
        "exec python3 -c \"x = bytearray(b'y' * (200 << 20)); open('{}', 'w'); import time\nwhile True: x[1] = 1; time.sleep(0.01)\"",
        filled.display()
    );
    let controllers = [Controller::Memory, Controller::Cpu];
    let Some(process) = InGroups::start(&bench.hierarchies, &controllers, &fill) else {
        eprintln!("skipped: no memory hierarchy of version 1 that this user can use");
        return;
    };
    let memory = &process.groups[0];
    await_filled(&filled);
    let has_swap = fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1;
    let shrunk = bench
        .shrink(&process.target(), options(resources(0, 0)))
        .unwrap();
    let last = shrunk.steps.last().unwrap();
    assert_eq!(last.cpu_millis, 10);
    if has_swap {
        assert!(
            matches!(shrunk.end, ShrinkEnd::Swapping | ShrinkEnd::Reached),
            "{shrunk:?}"
        );
    } else {
        assert_eq!(shrunk.end, ShrinkEnd::NotReclaimable, "{shrunk:?}");
        let why = shrunk.why.unwrap();
        assert!(why.contains("no swap"), "{why}");
        assert!(
            last.memory_bytes > 200 * MIB && last.memory_limit_bytes < 260 * MIB,
            "{last:?}"
        );
    }
    let quota = |file: &str| {
        fs::read_to_string(process.groups[1].join(file))
            .unwrap()
            .trim()
            .to_owned()
    };
    assert_eq!(quota("cpu.cfs_quota_us"), "1000");
    let oom = fs::read_to_string(memory.join("memory.oom_control")).unwrap();
    assert!(oom.contains("oom_kill_disable 1"), "{oom}");
    assert_eq!(bench.grow(&process.target()), Grown::Whole);
    assert_eq!(quota("cpu.cfs_quota_us"), "-1");
    let limit = fs::read_to_string(memory.join("memory.limit_in_bytes")).unwrap();
    assert!(limit.trim().parse::<u64>().unwrap() > 1 << 60, "{limit}");
    let oom = fs::read_to_string(memory.join("memory.oom_control")).unwrap();
    assert!(oom.contains("oom_kill_disable 0"), "{oom}");
    assert!(
        permafrost_criu::origin::ProcessStat::read(process.child.id())
            .unwrap()
            .state
            != 'Z'
    );
}

#[test]
fn page_cache_is_reclaimed_without_swap() {
    let bench = Bench::with(Hierarchies::of_this_machine().unwrap());
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = dir.path().join("file");
    let cached = dir.path().join("cached");
    let read = format!(
        "dd if=/dev/zero of={0} bs=1M count=200 2>/dev/null; sync {0}; cat {0} >/dev/null; touch {1}; exec sleep 600",
        file.display(),
        cached.display()
    );
    let controllers = [Controller::Memory, Controller::Cpu];
    let Some(process) = InGroups::start(&bench.hierarchies, &controllers, &read) else {
        eprintln!("skipped: no memory hierarchy of version 1 that this user can use");
        return;
    };
    await_filled(&cached);
    thread::sleep(Duration::from_secs(1));
    let shrunk = bench
        .shrink(&process.target(), options(resources(0, 0)))
        .unwrap();
    assert_eq!(shrunk.end, ShrinkEnd::Reached, "{shrunk:?}");
    assert!(
        shrunk.steps.last().unwrap().memory_bytes <= 64 * MIB,
        "{shrunk:?}"
    );
    assert_eq!(bench.grow(&process.target()), Grown::Whole);
}

#[test]
fn a_tree_that_shares_its_groups_loses_processors_in_a_group_that_is_made() {
    let bench = Bench::with(Hierarchies::of_this_machine().unwrap());
    let Ok(own) = bench
        .hierarchies
        .group_of(Controller::Cpu, std::process::id())
    else {
        eprintln!("skipped: no hierarchy with the cpu controller");
        return;
    };
    let Some(process) = InGroups::start(
        &bench.hierarchies,
        &[],
        "sh -c 'while :; do :; done' & wait",
    ) else {
        return;
    };
    let probe = own
        .path
        .join(format!("permafrost-probe-{}", std::process::id()));
    if fs::create_dir(&probe)
        .and_then(|()| fs::remove_dir(&probe))
        .is_err()
    {
        eprintln!("skipped: this user cannot make control groups");
        return;
    }
    let shrunk = bench
        .shrink(&process.target(), options(resources(50, 64)))
        .unwrap();
    assert_eq!(shrunk.end, ShrinkEnd::NoMemoryGroup);
    assert_eq!(shrunk.steps.last().unwrap().cpu_millis, 50);
    let tree = permafrost_criu::processes::tree(process.child.id());
    let group = bench
        .hierarchies
        .group_of(Controller::Cpu, tree[1])
        .unwrap();
    assert_ne!(group, own);
    let stat = || {
        permafrost_criu::origin::ProcessStat::read(tree[1])
            .unwrap()
            .cpu_ticks
    };
    let before = stat();
    thread::sleep(Duration::from_secs(2));
    let used = stat() - before;
    // 5 % of two seconds are ten ticks of 10 ms.
    assert!(
        used <= 40,
        "{used} ticks of {} a second",
        rustix::param::clock_ticks_per_second()
    );
    assert_eq!(bench.grow(&process.target()), Grown::Whole);
    assert_eq!(
        bench
            .hierarchies
            .group_of(Controller::Cpu, tree[1])
            .unwrap(),
        own
    );
    assert!(!group.path.exists());
}
