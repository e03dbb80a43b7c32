//! Lazy restores: processes run before they have their memory, and nothing that happens meanwhile shows in it.

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

use permafrost_protocol::control::request;
use permafrost_tests::binaries;
use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::criu::{self, Criu};
use permafrost_tests::daemon::{Daemon, Options, tail};
use permafrost_tests::process;
use permafrost_tests::status::Status;
use permafrost_tests::workload::{self, Workload};
use permafrost_transport::control::Connection;
use rustix::process::Signal;

/// Exit codes of `permafrost`.
const CONFLICT: i32 = 4;
const UNREACHABLE: i32 = 10;
const INTERRUPTED: i32 = 130;

/// Restores of one checkpoint at once.
const CLONES: usize = 3;

struct Site {
    work: tempfile::TempDir,
    criu: Criu,
    daemon: Daemon,
    task: Workload,
}

impl Site {
    /// Starts a daemon and a task, and dumps the task as job `a`.
    fn with_dump(test: &str, task: &workload::Options) -> Option<Self> {
        Self::with_dump_by(test, &Options::default(), task)
    }

    /// Does so with a daemon of these options.
    fn with_dump_by(test: &str, options: &Options, task: &workload::Options) -> Option<Self> {
        let criu = criu::for_test(test)?;
        let work = tempfile::tempdir().unwrap();
        let daemon = Daemon::start(work.path(), options).unwrap();
        let dir = work.path().join("task");
        std::fs::create_dir(&dir).unwrap();
        let mut task = Workload::start(&dir, task).unwrap();
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

    /// Kills the daemon, and starts another one.
    fn with_new_daemon(self) -> Self {
        self.daemon.kill().unwrap();
        let daemon = Daemon::start(self.work.path(), &Options::default()).unwrap();
        Self { daemon, ..self }
    }

    /// Waits for the end of a daemon that was killed: the command may see the end of its connection first.
    fn wait_for_the_daemons_end(&mut self) {
        let limit = Duration::from_secs(10);
        process::wait_for("the end of the daemon", limit, || {
            Ok((!self.daemon.is_running()).then_some(()))
        })
        .unwrap();
    }

    /// Begins a restore that brings only what is accessed. Returns once the task runs.
    fn touched_only(&self) -> (Child, BufReader<ChildStderr>) {
        self.touched_only_with(&[])
    }

    /// Does so with more arguments.
    fn touched_only_with(&self, arguments: &[&str]) -> (Child, BufReader<ChildStderr>) {
        let mut command = self.daemon.command().unwrap();
        command.args(["restore", "a", "--touched-only"]);
        command.args(arguments);
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        told.read_line(&mut line).unwrap();
        assert!(line.contains("runs as process"), "{line}");
        (child, told)
    }

    /// Returns the directory into which the task reports.
    fn task_dir(&self) -> PathBuf {
        self.work.path().join("task")
    }

    fn assert_sound(&self) {
        let status = self.task.verify().unwrap();
        assert!(status.is_sound(), "{status:?}");
    }

    fn kill(&mut self) {
        self.task.kill();
        self.task.wait_until_gone().unwrap();
    }
}

#[test]
fn a_process_runs_and_writes_while_its_memory_comes() {
    const TEST: &str = "a_process_runs_and_writes_while_its_memory_comes";
    let Some(mut site) = Site::with_dump(TEST, &workload::Options::tree(64)) else {
        return;
    };
    let restored = site.daemon.json(&["restore", "a", "--lazy"]).unwrap();
    let brought = restored["lazy"]["bytes"].as_u64().unwrap();
    assert!(brought >= 64 << 20, "{restored}");
    // What it took is a figure of the node from now on.
    process::wait_for("figures of lazy restores", Duration::from_secs(20), || {
        let nodes = site.daemon.json(&["nodes"])?;
        let tier = &nodes["nodes"][0]["tiers"][0];
        let is_known = |name: &str| tier[name]["p50"].as_f64().is_some_and(|p50| p50 > 0.0);
        Ok((is_known("lazy_bytes_per_s") && is_known("lazy_start_s")).then_some(()))
    })
    .unwrap();
    site.task.modify().unwrap();
    site.assert_sound();
    site.kill();

    let (child, _told) = site.touched_only();
    // What is not there yet would be missing in the checkpoint.
    let pid = site.task.pid().to_string();
    let refused = site
        .daemon
        .try_run(&["dump", "--job", "a", "--pid", &pid])
        .unwrap();
    assert_eq!(refused.status.code(), Some(CONFLICT), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("restored lazily"));
    site.task.modify().unwrap();
    site.assert_sound();
    site.kill();
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");

    // The order of its accesses is known now.
    let orders = std::fs::read_dir(site.work.path().join("data/touched")).unwrap();
    assert_eq!(orders.count(), 1);
    let hybrid = site.daemon.json(&["restore", "a", "--hybrid"]).unwrap();
    assert!(
        hybrid["lazy"]["bytes"].as_u64().unwrap() >= 64 << 20,
        "{hybrid}"
    );
    site.assert_sound();
    site.kill();

    // The command goes; the daemon still answers.
    let (mut child, _told) = site.touched_only();
    process::signal(child.id(), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(INTERRUPTED));
    site.task.modify().unwrap();
    site.assert_sound();
    site.kill();

    // Another daemon takes the process over, with the command or without it.
    let (mut child, _told) = site.touched_only();
    process::signal(child.id(), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(INTERRUPTED));
    site = site.with_new_daemon();
    site.task.modify().unwrap();
    site.assert_sound();
    site.kill();
    let (mut child, mut told) = site.touched_only();
    site = site.with_new_daemon();
    let mut said = String::new();
    told.read_line(&mut said).unwrap();
    assert!(said.contains("waits for it to come back"), "{said}");
    site.assert_sound();
    site.kill();
    assert!(child.wait().unwrap().success());

    // A process must not see zeros because the daemon has gone and none comes back, with the command or without it.
    let at_once = ["--daemon-timeout", "0s"];
    let (mut child, _told) = site.touched_only_with(&at_once);
    process::signal(child.id(), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(INTERRUPTED));
    site = site.with_new_daemon();
    site.task.wait_until_gone().unwrap();
    let (mut child, mut told) = site.touched_only_with(&at_once);
    let log = site.work.path().join("run/lazy-keeper.log");
    site.daemon.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(UNREACHABLE));
    site.task.wait_until_gone().unwrap();
    let mut said = String::new();
    told.read_to_string(&mut said).unwrap();
    assert!(said.contains(log.to_str().unwrap()), "{said}");
    // The log has all restores, the processes of each, and what became of them.
    let mode = std::fs::metadata(&log).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let log = std::fs::read_to_string(&log).unwrap();
    let restored = format!("dumped_as={}", site.task.pid());
    for line in [
        "lazy restore begins event=\"lazy-restore-begun\" checkpoint=\"a@1\"",
        &restored,
        "the restore is complete",
        "brings no more memory",
        "ending the processes",
        "the processes have ended",
    ] {
        assert!(log.contains(line), "{line}: {log}");
    }
}

/// A stop has what is missing brought, as the process would end with the daemon. A second signal ends the wait.
#[test]
fn a_stop_brings_the_rest_and_the_process_lives_on() {
    const TEST: &str = "a_stop_brings_the_rest_and_the_process_lives_on";
    let Some(mut site) = Site::with_dump(TEST, &workload::Options::tree(64)) else {
        return;
    };
    let (mut child, mut told) = site.touched_only();
    let brought = process::own_memory_bytes(site.task.pid());
    assert!(brought < 32 << 20, "{brought} bytes came at once");
    assert!(site.daemon.stop().unwrap().success());
    let mut said = String::new();
    told.read_to_string(&mut said).unwrap();
    assert!(child.wait().unwrap().success(), "{said}");
    let status = site.task.verify().unwrap();
    assert!(status.is_sound(), "{status:?}");
    site.task.kill();
    site.task.wait_until_gone().unwrap();

    // CRIU does not come to this one, so that it cannot finish.
    let daemon = Daemon::start(site.work.path(), &Options::default()).unwrap();
    let mut restoring = Connection::connect(&daemon.control()).unwrap();
    let (_criu, theirs) = UnixStream::pair().unwrap();
    let thaw = request::Thaw {
        checkpoint: "a".to_owned(),
        ..request::Thaw::default()
    };
    restoring.begin(thaw, Some(theirs.as_fd())).unwrap();
    restoring.await_turn(&mut |_| {}).unwrap();
    process::signal(daemon.pid(), Signal::TERM).unwrap();
    process::wait_for("the begin of the stop", Duration::from_secs(20), || {
        // The log has the stop before, too.
        let log = std::fs::read_to_string(daemon.log())?;
        Ok((log.matches("lazy-restores-finishing").count() == 2).then_some(()))
    })
    .unwrap();
    assert!(daemon.stop().unwrap().success());
    assert!(restoring.finish::<request::Thaw>(&mut |_| {}).is_err());
}

/// The background transfer waits for its turn in the queue of restores, and the process does not: it runs, and gets the
/// pages that it accesses.
#[test]
fn memory_that_nobody_accesses_waits_for_its_turn() {
    const TEST: &str = "memory_that_nobody_accesses_waits_for_its_turn";
    const MIB: u64 = 1 << 20;
    let one_at_once = Options {
        extra: vec!["--restores-at-once".to_owned(), "1".to_owned()],
        ..Options::default()
    };
    let task = workload::Options {
        size_mib: 64,
        ..workload::Options::default()
    };
    let Some(site) = Site::with_dump_by(TEST, &one_at_once, &task) else {
        return;
    };
    // Another restore is under way: its CRIU has not come yet.
    let mut other = Connection::connect(&site.daemon.control()).unwrap();
    let listener = UnixListener::bind(site.work.path().join("other.sock")).unwrap();
    let stream = request::Stream {
        checkpoint: "a".to_owned(),
        ..request::Stream::default()
    };
    other.begin(stream, Some(listener.as_fd())).unwrap();
    other.await_turn(&mut |_| {}).unwrap();

    let mut command = site.daemon.command().unwrap();
    command.args(["--json", "restore", "a", "--lazy"]);
    let restoring = command.stdout(Stdio::piped()).spawn().unwrap();
    let limit = Duration::from_secs(30);
    process::wait_for("the restored process", limit, || {
        Ok(site.task.is_running().then_some(()))
    })
    .unwrap();
    // It answers before the other restore has ended, and does not look at its memory for that.
    site.task.report().unwrap();
    let memory = || process::own_memory_bytes(site.task.pid());
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(50));
        assert!(memory() < 32 * MIB, "{} bytes came", memory());
    }
    // Its turn comes with the end of the other.
    other.end_requests();
    assert!(other.finish::<request::Stream>(&mut |_| {}).is_err());
    process::wait_for("the rest of the memory", limit, || {
        Ok((memory() >= 64 * MIB).then_some(()))
    })
    .unwrap();
    let restored = restoring.wait_with_output().unwrap();
    assert!(restored.status.success(), "{restored:?}");
    site.assert_sound();
}

/// Kills the daemon when CRIU runs it for an action.
const KILLER: &str = r#"#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" != @action ] || kill -KILL @daemon
"#;

/// Kills the daemon before CRIU restores. The pause is longer than the keeper needs to see it.
const CRIU_WITHOUT_DAEMON: &str = r#"#!/bin/sh
if [ "$1" = restore ]; then
    kill -KILL @daemon
    sleep 0.3
fi
exec @criu "$@"
"#;

#[test]
fn no_process_is_left_if_the_daemon_dies_while_they_are_handed_over() {
    const TEST: &str = "no_process_is_left_if_the_daemon_dies_while_they_are_handed_over";
    let Some(mut site) = Site::with_dump(TEST, &workload::Options::tree(8)) else {
        return;
    };
    // Before CRIU hands over the first process, and after the last.
    for action in ["pre-restore", "post-restore"] {
        let script = site.work.path().join(action);
        let killer = KILLER.replace("@action", action);
        let killer = killer.replace("@daemon", &site.daemon.pid().to_string());
        std::fs::write(&script, killer).unwrap();
        std::fs::set_permissions(&script, Permissions::from_mode(0o700)).unwrap();
        let script = script.to_str().unwrap();
        let mut line = vec!["restore", "a", "--lazy", "--daemon-timeout", "0s"];
        line.extend(["--", "--action-script", script]);
        let restored = site.daemon.try_run(&line).unwrap();
        assert!(!restored.status.success(), "{action}: {restored:?}");
        site.wait_for_the_daemons_end();
        site.task.wait_until_gone().unwrap();
        site = site.with_new_daemon();
    }
    // Before CRIU connects.
    let script = site.work.path().join("criu");
    let killer = CRIU_WITHOUT_DAEMON.replace("@criu", site.criu.path.to_str().unwrap());
    let killer = killer.replace("@daemon", &site.daemon.pid().to_string());
    std::fs::write(&script, killer).unwrap();
    std::fs::set_permissions(&script, Permissions::from_mode(0o700)).unwrap();
    let mut command = site.daemon.command().unwrap();
    command
        .args(["restore", "a", "--lazy"])
        .env("PERMAFROST_CRIU", script);
    let restored = command.output().unwrap();
    assert!(!restored.status.success(), "{restored:?}");
    site.wait_for_the_daemons_end();
    site.task.wait_until_gone().unwrap();
    site = site.with_new_daemon();
    site.daemon.run(&["restore", "a", "--lazy"]).unwrap();
    site.assert_sound();
    site.kill();
}

/// Leaves out the last action script, for which CRIU would wait.
const CRIU_THAT_DOES_NOT_WAIT: &str = r#"#!/bin/sh
for one; do
    shift
    case $one in --action-script | */permafrost-action) ;; *) set -- "$@" "$one" ;; esac
done
exec @criu "$@"
"#;

#[test]
fn a_criu_that_does_not_wait_is_found_out_and_its_processes_are_ended() {
    const TEST: &str = "a_criu_that_does_not_wait_is_found_out_and_its_processes_are_ended";
    let Some(mut site) = Site::with_dump(TEST, &workload::Options::tree(8)) else {
        return;
    };
    let script = site.work.path().join("criu");
    let wrapper = CRIU_THAT_DOES_NOT_WAIT.replace("@criu", site.criu.path.to_str().unwrap());
    std::fs::write(&script, wrapper).unwrap();
    std::fs::set_permissions(&script, Permissions::from_mode(0o700)).unwrap();
    let mut command = site.daemon.command().unwrap();
    command.args(["restore", "a", "--lazy"]);
    let refused = command.env("PERMAFROST_CRIU", script).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success(), "{said}");
    assert!(
        said.contains("did not wait") && said.contains("--stream"),
        "{said}"
    );
    site.task.wait_until_gone().unwrap();
    site.daemon.run(&["restore", "a", "--lazy"]).unwrap();
    site.assert_sound();
    site.kill();
}

/// Restores the task in a pid namespace of its own, verifies it there while pages are brought, and prints its report.
const CLONE: &str = r#"
set -e
mount -t tmpfs none "$1"
"$2" restore a --touched-only >/dev/null 2>"$1/told" &
while ! grep -q "runs as process" "$1/told"; do
    kill -0 $! || { cat "$1/told" >&2; exit 1; }
    sleep 0.02
done
echo running
read go
kill -USR2 "$3"
while ! [ -e "$1/workload.status" ]; do
    kill -0 "$3"
    sleep 0.02
done
cat "$1/workload.status"
"#;

/// Clone of a task in namespaces of its own, which end with it.
struct ClonedTask {
    unshare: Child,
    told: BufReader<ChildStdout>,
}

impl ClonedTask {
    /// Starts a restore of the task by the daemon with this control socket.
    fn start(control: &Path, task_dir: &Path, pid: u32) -> Self {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]);
        command.args(["sh", "-c", CLONE, "sh"]).arg(task_dir);
        command.arg(binaries::path("permafrost").unwrap());
        command.arg(pid.to_string());
        command.env("PERMAFROST_SOCKET", control);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut unshare = command.spawn().unwrap();
        let told = BufReader::new(unshare.stdout.take().unwrap());
        Self { unshare, told }
    }

    fn wait_until_running(&mut self) {
        let mut line = String::new();
        self.told.read_line(&mut line).unwrap();
        assert_eq!(line, "running\n");
    }

    /// Verifies the clone's memory, and ends it.
    fn assert_sound(mut self) {
        let go = self.unshare.stdin.as_mut().unwrap();
        go.write_all(b"go\n").unwrap();
        let mut report = String::new();
        self.told.read_to_string(&mut report).unwrap();
        let status: Status = serde_json::from_str(&report).unwrap();
        assert!(status.is_sound(), "{status:?}");
        self.unshare.wait().unwrap();
    }
}

#[test]
fn clones_get_the_pages_of_a_job_that_was_removed() {
    const TEST: &str = "clones_get_the_pages_of_a_job_that_was_removed";
    let Some(site) = Site::with_dump(TEST, &workload::Options::default()) else {
        return;
    };
    let (control, dir, pid) = (site.daemon.control(), site.task_dir(), site.task.pid());
    let mut clones: Vec<_> = (0..CLONES)
        .map(|_| ClonedTask::start(&control, &dir, pid))
        .collect();
    clones.iter_mut().for_each(ClonedTask::wait_until_running);
    site.daemon.run(&["rm", "a", "--all"]).unwrap();
    clones.into_iter().for_each(ClonedTask::assert_sound);
}

#[test]
fn eight_clones_on_two_nodes_get_the_pages_of_a_job_that_was_removed() {
    const TEST: &str = "eight_clones_on_two_nodes_get_the_pages_of_a_job_that_was_removed";
    if criu::for_test(TEST).is_none() {
        return;
    }
    let setup = Setup {
        nodes: 2,
        members: 1,
        ..Setup::default()
    };
    let Some(cluster) = Cluster::for_test(TEST, setup).unwrap() else {
        return;
    };
    let dir = cluster.path("task").unwrap();
    let mut task = Workload::start(&dir, &workload::Options::default()).unwrap();
    let pid = task.pid().to_string();
    let dump = ["dump", "--pid", &pid, "--job", "a", "--durability", "all"];
    // Not on the node's host: CRIU locks the network of a task that has another one than it has itself.
    let dumped = Command::new(binaries::path("permafrost").unwrap())
        .args(dump)
        .env("PERMAFROST_SOCKET", cluster.node(0).control())
        .output()
        .unwrap();
    assert!(dumped.status.success(), "{dumped:?}");
    task.wait_until_gone().unwrap();
    let start = |n: usize| ClonedTask::start(&cluster.node(n % 2).control(), &dir, task.pid());
    let mut clones: Vec<_> = (0..8).map(start).collect();
    clones.iter_mut().for_each(ClonedTask::wait_until_running);
    cluster.node(0).run(&["rm", "a", "--all"]).unwrap();
    clones.into_iter().for_each(ClonedTask::assert_sound);
}

#[test]
fn crius_own_daemon_gets_the_pages_of_a_lent_checkpoint() {
    const TEST: &str = "crius_own_daemon_gets_the_pages_of_a_lent_checkpoint";
    let Some(mut site) = Site::with_dump(TEST, &workload::Options::tree(16)) else {
        return;
    };
    let images = site.work.path().join("images");
    let mut lending = site.daemon.command().unwrap();
    lending.args(["--json", "lend", "a"]).arg(&images);
    let mut lending = lending.stdout(Stdio::piped()).spawn().unwrap();
    let told = serde_json::Deserializer::from_reader(lending.stdout.take().unwrap());
    let told: serde_json::Value = told.into_iter().next().unwrap().unwrap();
    let (address, port) = told["address"].as_str().unwrap().split_once(':').unwrap();
    // Twice: each restore is served from the beginning.
    for _ in 0..2 {
        let mut pages = Command::new(&site.criu.path);
        pages.args([
            "lazy-pages",
            "--page-server",
            "--address",
            address,
            "--port",
            port,
        ]);
        pages.args(["-v4", "-o", "pages.log", "-D"]).arg(&images);
        let mut pages = pages.spawn().unwrap();
        let socket = images.join("lazy-pages.socket");
        process::wait_for("criu lazy-pages", Duration::from_secs(20), || {
            Ok(socket.exists().then_some(()))
        })
        .unwrap();
        let mut restore = Command::new(&site.criu.path);
        restore.args([
            "restore",
            "-d",
            "--lazy-pages",
            "-o",
            "restore.log",
            "-v4",
            "-D",
        ]);
        let status = restore.arg(&images).status().unwrap();
        assert!(status.success(), "{}", tail(&images.join("restore.log")));
        site.task.modify().unwrap();
        site.assert_sound();
        let status = pages.wait().unwrap();
        assert!(status.success(), "{}", tail(&images.join("pages.log")));
        site.kill();
        std::fs::remove_file(socket).unwrap();
    }
    process::signal(lending.id(), Signal::INT).unwrap();
    assert!(lending.wait().unwrap().success());
}
