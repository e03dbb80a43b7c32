//! Plain restores whose memory permafrostd places before the processes run: they keep all promises of those that stream.

use std::fs::Permissions;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use permafrost_tests::binaries;
use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::criu::{self, Criu};
use permafrost_tests::daemon::{Daemon, Options};
use permafrost_tests::process;
use permafrost_tests::workload::{self, Workload};
use rustix::process::Signal;

/// Exit codes of `permafrost`.
const CORRUPT: i32 = 7;
const UNREACHABLE: i32 = 10;
const INTERRUPTED: i32 = 130;

const LIMIT: Duration = Duration::from_secs(30);

/// Time in which a daemon places a small part of 512 MiB.
const MOMENT: Duration = Duration::from_millis(2);

struct Site {
    work: tempfile::TempDir,
    criu: Criu,
    daemon: Daemon,
    task: Workload,
}

impl Site {
    /// Starts a daemon and a task with this much memory, and dumps the task as job `a`.
    fn with_dump(test: &str, size_mib: u64) -> Option<Self> {
        let options = workload::Options {
            size_mib,
            threads: 2,
            open_file: true,
            ..workload::Options::default()
        };
        Self::with_dump_of(test, &options)
    }

    fn with_dump_of(test: &str, options: &workload::Options) -> Option<Self> {
        let criu = criu::for_test(test)?;
        process::adopt_orphans().unwrap();
        let work = tempfile::tempdir().unwrap();
        let options_of_daemon = Options {
            extra: ["--listen-metrics", "127.0.0.1:0"]
                .map(str::to_owned)
                .to_vec(),
            region_mib: 256 + 2 * options.size_mib,
            ..Options::default()
        };
        let daemon = Daemon::start(work.path(), &options_of_daemon).unwrap();
        let dir = work.path().join("task");
        std::fs::create_dir(&dir).unwrap();
        let mut task = Workload::start(&dir, options).unwrap();
        let pid = task.pid().to_string();
        daemon.run(&["dump", "--job", "a", "--pid", &pid]).unwrap();
        task.wait_until_gone().unwrap();
        Some(Self {
            work,
            criu,
            daemon,
            task,
        })
    }

    /// Writes a script.
    fn script(&self, name: &str, text: &str) -> PathBuf {
        let path = self.work.path().join(name);
        let text = text
            .replace("@daemon", &self.daemon.pid().to_string())
            .replace("@criu", self.criu.path.to_str().unwrap());
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        path
    }

    /// Begins a restore whose daemon is stopped before it places the memory. Returns once CRIU waits for that.
    fn begin(&self) -> Child {
        // Not earlier: CRIU accesses some of the memory while it restores.
        let text = format!(
            "[ \"$CRTOOLS_SCRIPT_ACTION\" != post-restore ] || kill -STOP @daemon\nexec {}",
            binaries::path("permafrost-action").unwrap().display()
        );
        let script = self.script("stops", &text);
        let mut command = self.daemon.command().unwrap();
        command
            .args(["restore", "a"])
            .env("PERMAFROST_ACTION", script);
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let root = self.task.pid();
        process::wait_for("the wait of CRIU", LIMIT, || {
            Ok(waiting_script(root).map(drop))
        })
        .unwrap();
        child
    }

    /// Begins a restore whose daemon is stopped when it has placed some of the memory. Lets it run for a moment at a
    /// time.
    fn begin_placing(&self, size_mib: u64) -> Child {
        let child = self.begin();
        let (daemon, root) = (self.daemon.pid(), self.task.pid());
        let placed = || process::own_memory_bytes(root) >> 20;
        let before = placed();
        process::wait_for("some of the memory", LIMIT, || {
            process::signal(daemon, Signal::CONT)?;
            std::thread::sleep(MOMENT);
            process::stop(daemon)?;
            Ok((placed() >= before + size_mib / 16).then_some(()))
        })
        .unwrap();
        assert!(placed() < size_mib * 15 / 16, "{} MiB", placed());
        assert!(waiting_script(root).is_some());
        child
    }

    fn restore(&self) -> serde_json::Value {
        self.daemon.json(&["restore", "a"]).unwrap()
    }

    fn assert_sound(&self) {
        let status = self.task.verify().unwrap();
        assert!(status.is_sound(), "{status:?}");
    }

    fn kill(&mut self) {
        self.task.kill();
        self.task.wait_until_gone().unwrap();
    }

    /// Checks that nothing of a failed restore is left, and that the next one succeeds.
    fn assert_undone(&mut self) {
        self.task.wait_until_gone().unwrap();
        process::wait_for("the end of the script", LIMIT, || {
            Ok(waiting_script(self.task.pid()).is_none().then_some(()))
        })
        .unwrap();
        let restored = self.restore();
        assert_eq!(restored["way"], "place", "{restored}");
        self.assert_sound();
        self.kill();
    }
}

/// Returns the pid of the action script that waits for the memory of a process.
fn waiting_script(root: u32) -> Option<u32> {
    let pid = format!("CRTOOLS_INIT_PID={root}");
    let wanted = ["CRTOOLS_SCRIPT_ACTION=post-restore", &pid];
    std::fs::read_dir("/proc").unwrap().find_map(|entry| {
        let path = entry.ok()?.path();
        let name = std::fs::read_to_string(path.join("comm")).ok()?;
        let environment = std::fs::read(path.join("environ")).ok()?;
        let has = |variable: &&str| {
            let mut all = environment.split(|byte| *byte == 0);
            all.any(|one| one == variable.as_bytes())
        };
        let is_it = name.trim() == "permafrost-acti" && wanted.iter().all(has);
        is_it.then(|| path.file_name()?.to_str()?.parse().ok())?
    })
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_plain_restore_places_the_memory_before_the_process_runs() {
    const TEST: &str = "a_plain_restore_places_the_memory_before_the_process_runs";
    let Some(mut site) = Site::with_dump(TEST, 64) else {
        return;
    };
    let restored = site.restore();
    assert_eq!(restored["way"], "place", "{restored}");
    assert_eq!(restored["way_reason"], "fastest", "{restored}");
    assert_eq!(restored["streamed"], false, "{restored}");
    assert!(restored.get("lazy").is_none(), "{restored}");
    // All of it is there.
    assert!(process::own_memory_bytes(site.task.pid()) >= 64 << 20);
    site.task.modify().unwrap();
    site.assert_sound();
    // It is dumped again, as it lacks nothing.
    let pid = site.task.pid().to_string();
    let dump = ["dump", "--job", "a", "--pid", &pid];
    site.daemon.run(&dump).unwrap();
    site.task.wait_until_gone().unwrap();

    let restored = site.daemon.json(&["restore", "a", "--stream"]).unwrap();
    assert_eq!(restored["way"], "stream", "{restored}");
    assert_eq!(restored["way_reason"], "requested", "{restored}");
    site.assert_sound();
    site.kill();

    // It is a restore like those that stream.
    assert_eq!(site.daemon.counter("permafrost_restores_total").unwrap(), 2);
    let log = std::fs::read_dir(site.work.path().join("run")).unwrap();
    let names: Vec<_> = log.map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name == "lazy-keeper.log"));

    // And a child of the command.
    let mut command = site.daemon.command().unwrap();
    let child = command.args(["restore", "a", "--foreground"]);
    let mut child = child.stdout(Stdio::null()).spawn().unwrap();
    process::wait_for("the restored process", LIMIT, || {
        Ok(site.task.is_running().then_some(()))
    })
    .unwrap();
    site.assert_sound();
    site.task.kill();
    child.wait().unwrap();
    site.task.wait_until_gone().unwrap();
}

#[test]
fn forked_processes_and_shared_memory_are_streamed() {
    const TEST: &str = "forked_processes_and_shared_memory_are_streamed";
    let forked = workload::Options {
        size_mib: 24,
        members: 3,
        ..workload::Options::default()
    };
    let shared = workload::Options {
        size_mib: 24,
        shared_mib: 16,
        ..workload::Options::default()
    };
    for (options, reason) in [(forked, "forked-memory"), (shared, "eager-memory")] {
        let Some(mut site) = Site::with_dump_of(TEST, &options) else {
            return;
        };
        let restored = site.restore();
        assert_eq!(restored["way"], "stream", "{restored}");
        assert_eq!(restored["way_reason"], reason, "{restored}");
        site.assert_sound();
        site.kill();
    }
}

#[test]
fn without_a_userfaultfd_a_restore_streams() {
    const TEST: &str = "without_a_userfaultfd_a_restore_streams";
    let Some(mut site) = Site::with_dump(TEST, 8) else {
        return;
    };
    let mut strace = Command::new("strace");
    strace.args(["-o", "/dev/null", "-e", "inject=userfaultfd:error=EPERM"]);
    if !strace.arg("true").status().is_ok_and(|ran| ran.success()) {
        eprintln!("skipped: {TEST}: strace is missing");
        return;
    }
    // Of this process alone: CRIU is not traced.
    let mut command = Command::new("strace");
    command.args(["-o", "/dev/null", "-e", "inject=userfaultfd:error=EPERM"]);
    command.arg(binaries::path("permafrost").unwrap());
    command.args(["--json", "restore", "a"]);
    command.env("PERMAFROST_SOCKET", site.daemon.control());
    command.env("PERMAFROST_CRIU", &site.criu.path);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let restored: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(restored["way"], "stream", "{restored}");
    assert_eq!(restored["way_reason"], "no-userfaultfd", "{restored}");
    site.assert_sound();
    site.kill();
}

#[test]
fn nothing_runs_if_a_page_is_damaged() {
    const TEST: &str = "nothing_runs_if_a_page_is_damaged";
    let Some(site) = Site::with_dump(TEST, 64) else {
        return;
    };
    site.daemon.stop().unwrap();
    let region = site.work.path().join("data/region");
    let used = std::fs::read(&region).unwrap();
    let last = used.iter().rposition(|byte| *byte != 0).unwrap();
    let file = std::fs::File::options().write(true).open(&region).unwrap();
    let at = last / 2;
    file.write_all_at(&[used[at] ^ 0x10], at as u64).unwrap();
    let daemon = Daemon::start(site.work.path(), &Options::default()).unwrap();
    let mut site = Site { daemon, ..site };
    let refused = site.daemon.try_run(&["restore", "a"]).unwrap();
    let told = said(&refused);
    assert_eq!(refused.status.code(), Some(CORRUPT), "{told}");
    assert!(
        told.contains("a@1") && told.contains("address 0x"),
        "{told}"
    );
    site.task.wait_until_gone().unwrap();
}

#[test]
fn nothing_runs_if_the_daemon_is_killed() {
    const TEST: &str = "nothing_runs_if_the_daemon_is_killed";
    let Some(site) = Site::with_dump(TEST, 16) else {
        return;
    };
    let restoring = site.begin();
    site.daemon.kill().unwrap();
    let ended = restoring.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(UNREACHABLE), "{}", said(&ended));
    let daemon = Daemon::start(site.work.path(), &Options::default()).unwrap();
    Site { daemon, ..site }.assert_undone();
}

#[test]
fn nothing_runs_if_the_daemon_or_the_command_is_killed_between_two_pages() {
    const TEST: &str = "nothing_runs_if_the_daemon_or_the_command_is_killed_between_two_pages";
    const SIZE_MIB: u64 = 512;
    let Some(site) = Site::with_dump(TEST, SIZE_MIB) else {
        return;
    };
    let restoring = site.begin_placing(SIZE_MIB);
    site.daemon.kill().unwrap();
    let ended = restoring.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(UNREACHABLE), "{}", said(&ended));
    let options = Options {
        region_mib: 256 + 2 * SIZE_MIB,
        ..Options::default()
    };
    let daemon = Daemon::start(site.work.path(), &options).unwrap();
    let mut site = Site { daemon, ..site };
    site.assert_undone();

    let mut restoring = site.begin_placing(SIZE_MIB);
    restoring.kill().unwrap();
    restoring.wait().unwrap();
    process::signal(site.daemon.pid(), Signal::CONT).unwrap();
    site.assert_undone();
}

#[test]
fn nothing_runs_if_the_command_is_interrupted_or_killed_or_criu_is() {
    const TEST: &str = "nothing_runs_if_the_command_is_interrupted_or_killed_or_criu_is";
    let Some(mut site) = Site::with_dump(TEST, 16) else {
        return;
    };
    let go_on = |site: &Site| process::signal(site.daemon.pid(), Signal::CONT).unwrap();
    let restoring = site.begin();
    process::signal(restoring.id(), Signal::INT).unwrap();
    let ended = restoring.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(INTERRUPTED), "{}", said(&ended));
    site.task.wait_until_gone().unwrap();
    go_on(&site);
    site.assert_undone();

    let mut restoring = site.begin();
    restoring.kill().unwrap();
    restoring.wait().unwrap();
    // The daemon finds the caller gone, with all that it needs to place the pages at hand.
    go_on(&site);
    site.assert_undone();

    let restoring = site.begin();
    let script = waiting_script(site.task.pid()).unwrap();
    process::signal(parent(script), Signal::KILL).unwrap();
    go_on(&site);
    let ended = restoring.wait_with_output().unwrap();
    assert!(!ended.status.success(), "{}", said(&ended));
    site.assert_undone();

    // The script is killed, of which CRIU is told as of a failure.
    let restoring = site.begin();
    let script = waiting_script(site.task.pid()).unwrap();
    process::signal(script, Signal::KILL).unwrap();
    go_on(&site);
    let ended = restoring.wait_with_output().unwrap();
    assert!(!ended.status.success(), "{}", said(&ended));
    site.assert_undone();
}

fn parent(pid: u32) -> u32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = stat.rsplit_once(") ").unwrap();
    rest.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn nothing_runs_if_the_daemon_has_no_descriptor_left() {
    const TEST: &str = "nothing_runs_if_the_daemon_has_no_descriptor_left";
    let Some(mut site) = Site::with_dump(TEST, 16) else {
        return;
    };
    let limit = |soft: &str| format!("prlimit --pid @daemon --nofile={soft}:");
    let text = format!(
        "[ \"$CRTOOLS_SCRIPT_ACTION\" != pre-restore ] || {}",
        limit("4")
    );
    let script = site.script("limit", &text);
    let line = ["restore", "a", "--", "--action-script"];
    let refused = site
        .daemon
        .try_run(&[&line[..], &[script.to_str().unwrap()]].concat())
        .unwrap();
    assert!(!refused.status.success(), "{}", said(&refused));
    site.task.wait_until_gone().unwrap();
    let more = site.script("more", &limit("1024"));
    assert!(Command::new(more).status().unwrap().success());
    site.assert_undone();
}

#[test]
fn a_criu_that_does_not_wait_is_found_out() {
    const TEST: &str = "a_criu_that_does_not_wait_is_found_out";
    let Some(mut site) = Site::with_dump(TEST, 16) else {
        return;
    };
    // A wrapper that leaves out the last two arguments, which name the script.
    let wrapper = site.script(
        "criu",
        "for one; do shift; case $one in --action-script) ;; */permafrost-action) ;; *) set -- \"$@\" \"$one\";; esac; done\nexec @criu \"$@\"",
    );
    let mut command = site.daemon.command().unwrap();
    let command = command.args(["restore", "a"]);
    let refused = command.env("PERMAFROST_CRIU", wrapper).output().unwrap();
    assert!(!refused.status.success(), "{}", said(&refused));
    assert!(
        said(&refused).contains("did not wait"),
        "{}",
        said(&refused)
    );
    site.assert_undone();
}

#[test]
fn the_memory_of_a_job_that_is_removed_meanwhile_is_placed() {
    const TEST: &str = "the_memory_of_a_job_that_is_removed_meanwhile_is_placed";
    let Some(site) = Site::with_dump(TEST, 64) else {
        return;
    };
    let permafrost = binaries::path("permafrost").unwrap();
    let remove = format!(
        "[ \"$CRTOOLS_SCRIPT_ACTION\" != pre-restore ] || {} --socket {} rm a --all >/dev/null",
        permafrost.display(),
        site.daemon.control().display()
    );
    let script = site.script("remove", &remove);
    let line = ["restore", "a", "--", "--action-script"];
    let restored = [&line[..], &[script.to_str().unwrap()]].concat();
    site.daemon.run(&restored).unwrap();
    site.assert_sound();
    let refused = site.daemon.try_run(&["show", "a"]).unwrap();
    assert!(!refused.status.success());
}

#[test]
fn a_node_without_a_copy_places_the_pages_of_others() {
    const TEST: &str = "a_node_without_a_copy_places_the_pages_of_others";
    let Some(criu) = criu::for_test(TEST) else {
        return;
    };
    let setup = Setup {
        nodes: 2,
        members: 1,
        ..Setup::default()
    };
    let Some(cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let dir = cluster.path("task").unwrap();
    let options = workload::Options {
        size_mib: 32,
        ..workload::Options::default()
    };
    let mut task = Workload::start(&dir, &options).unwrap();
    let pid = task.pid().to_string();
    let on = |node: usize, line: &[&str]| {
        let mut command = Command::new(binaries::path("permafrost").unwrap());
        command.arg("--json").args(line);
        command.env("PERMAFROST_CRIU", &criu.path);
        let output = run(command, &cluster.node(node).control());
        assert!(output.status.success(), "{output:?}");
        output.stdout
    };
    // Without a copy elsewhere.
    on(
        0,
        &["dump", "--pid", &pid, "--job", "a", "--durability", "local"],
    );
    task.wait_until_gone().unwrap();
    let restored = on(1, &["restore", "a", "--trust", "any"]);
    let restored: serde_json::Value = serde_json::from_slice(&restored).unwrap();
    assert_eq!(restored["way"], "place", "{restored}");
    let status = task.verify().unwrap();
    assert!(status.is_sound(), "{status:?}");
}

fn run(mut command: Command, control: &Path) -> Output {
    // Not on the node's host: CRIU locks the network of a task that has another one than it has itself.
    command.env("PERMAFROST_SOCKET", control).output().unwrap()
}
