//! Helpers for scenarios over a cluster: tasks on its hosts, refusals, and the holders of checkpoints.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use permafrost_protocol::control::{Checkpoint, request};
use permafrost_protocol::pageserver::Dialect;
use permafrost_tests::cluster::Cluster;
use permafrost_tests::daemon::Daemon;
use permafrost_tests::process;
use permafrost_tests::workload::{Options, Workload};
use permafrost_transport::control::Connection;

use super::{PAGE_SIZE, Peer, fake_images};

/// Time that a cluster may take for an automatic action: a lease, the leader's waiting time, a copy; on a busy
/// machine.
pub const LONG: Duration = Duration::from_secs(60);

/// Pause between two requests, each of which starts a process.
pub const PAUSE: Duration = Duration::from_millis(100);

/// A task on one of the hosts.
pub struct Task {
    task: Workload,
    _dir: tempfile::TempDir,
}

impl Task {
    /// Starts a task with random contents, `size_mib` in the root process.
    pub fn start(cluster: &Cluster, host: usize, size_mib: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            size_mib,
            // Differs from host to host: copies must not be mixed up.
            seed: 1 + host as u64,
            ..Options::default()
        };
        let host = cluster.host(host);
        let task = host.run(|| Workload::start(dir.path(), &options)).unwrap();
        Self { task, _dir: dir }
    }

    /// Returns the task's pid, as the value of `--pid`.
    pub fn pid(&self) -> String {
        self.task.pid().to_string()
    }

    /// Checks that the task runs, and that its memory is unchanged.
    pub fn assert_sound(&self) {
        assert!(self.task.is_running(), "the task must live");
        let status = self.task.verify().unwrap();
        assert!(status.is_sound(), "{status:?}");
    }
}

impl Deref for Task {
    type Target = Workload;

    fn deref(&self) -> &Workload {
        &self.task
    }
}

impl DerefMut for Task {
    fn deref_mut(&mut self) -> &mut Workload {
        &mut self.task
    }
}

/// Dumps a task, which ends. Returns its line of the listing.
pub fn dump(by: &Daemon, task: &mut Task, job: &str) -> serde_json::Value {
    let dumped = by.json(&["dump", "--job", job, "--pid", &task.pid()]);
    let dumped = dumped.unwrap();
    task.wait_until_gone().unwrap();
    dumped["checkpoint"].clone()
}

/// Dumps `memory` like a client of CRIU, with a seal while the task is frozen, as `permafrost dump` does. `opened`
/// is called once the session is open.
pub fn sealed_dump(
    by: &Daemon,
    work: &Path,
    job: &str,
    memory: &[u8],
    opened: impl FnOnce(),
) -> Checkpoint {
    let mut connection = Connection::connect(&by.control()).unwrap();
    let open = request::Open {
        job: job.to_owned(),
        seal_follows: true,
        ..request::Open::default()
    };
    let session = connection.call(open).unwrap();
    let mut peer = Peer::unix(session.socket.as_ref(), Dialect::V32);
    peer.open();
    opened();
    for (at, chunk) in memory.chunks(64 * PAGE_SIZE).enumerate() {
        peer.pages(0x5000_0000 + at as u64 * 0x100_0000, chunk);
    }
    assert_eq!(peer.close(), Some(0));
    peer.leave();
    let images = work.join(format!("images-{}", job.replace('/', "-")));
    fake_images(&images);
    let images = std::fs::File::open(&images).unwrap();
    let seal = request::Seal {
        session: session.session,
    };
    let sealed = connection.call_with(seal, Some(images.as_fd()), &mut |_| {});
    sealed.unwrap()
}

/// Restores a task that was dumped, checks its memory, and kills it: it can be restored again.
pub fn thaw(by: &Daemon, task: &mut Task, checkpoint: &str) {
    by.run(&["restore", checkpoint]).unwrap();
    task.assert_sound();
    task.kill();
}

/// Runs a command that is refused. Returns its exit code and its error output.
pub fn refusal(by: &Daemon, arguments: &[&str]) -> (i32, String) {
    refused(&by.try_run(arguments).unwrap())
}

/// Returns the exit code and the error output of a command that has ended.
pub fn refused(output: &Output) -> (i32, String) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().expect("an exit code"), said)
}

/// Starts `permafrost` without waiting for it.
pub fn spawn(by: &Daemon, arguments: &[&str]) -> Child {
    let mut command = by.command().unwrap();
    let command = command.args(arguments);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Waits until the daemon has a session of this job that has received something.
pub fn wait_for_session(at: &Daemon, job: &str) {
    let seen = process::wait_for("the dump's first pages", LONG, || {
        let status = at.json(&["status"])?;
        let sessions = status["sessions"].as_array().cloned().unwrap_or_default();
        let mine = |session: &serde_json::Value| {
            session["job"] == job && session["received_bytes"].as_u64() > Some(0)
        };
        Ok(sessions.iter().any(mine).then_some(()))
    });
    seen.unwrap();
}

/// Returns the nodes that a line of the listing names as holders.
pub fn holders(line: &serde_json::Value) -> BTreeSet<String> {
    let nodes = line["nodes"].as_array().expect("an array of nodes");
    let name = |node: &serde_json::Value| node.as_str().expect("a name").to_owned();
    nodes.iter().map(name).collect()
}

/// Returns the names of nodes.
pub fn names<const N: usize>(nodes: [usize; N]) -> BTreeSet<String> {
    nodes.map(permafrost_tests::cluster::name).into()
}

/// Returns the newest checkpoint's line in this node's listing.
pub fn line(at: &Daemon, job: &str) -> Option<serde_json::Value> {
    let lines = super::listing(at);
    let of_job = lines.into_iter().filter(|line| line["job"] == job);
    of_job.max_by_key(|line| line["generation"].as_u64())
}

/// Waits until the newest checkpoint of a job is held by all of these nodes. A dead node may be listed besides: its
/// copy is good when it comes back.
pub fn wait_held(at: &Daemon, job: &str, by: &BTreeSet<String>) {
    let mut last = None;
    let held = process::wait_for("the copies", LONG, || {
        std::thread::sleep(PAUSE);
        last = line(at, job);
        Ok(last
            .as_ref()
            .is_some_and(|line| holders(line).is_superset(by))
            .then_some(()))
    });
    held.unwrap_or_else(|error| panic!("{error}: {job} should be on {by:?}: {last:?}"));
}

/// Returns true if the node's lease is live in the view of `at`.
pub fn is_live(at: &Daemon, node: &str) -> bool {
    let list = at.json(&["node", "show", node]).unwrap();
    list["nodes"][0]["live"] == true
}

/// Kills a node, takes its disk away, and waits until the others know that it is gone.
pub fn lose(cluster: &mut Cluster, lost: usize, asked: usize) {
    cluster.kill(lost).unwrap();
    cluster.lose_disk(lost).unwrap();
    let asked = cluster.node(asked);
    let dead = process::wait_for("the end of a lease", LONG, || {
        std::thread::sleep(PAUSE);
        Ok((!is_live(asked, &permafrost_tests::cluster::name(lost))).then_some(()))
    });
    dead.unwrap();
}
