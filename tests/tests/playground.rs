//! `permafrost playground`: a cluster of one's own, which ends with the command and goes on with its checkpoints.

use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use permafrost_tests::workload::{self, Workload};
use permafrost_tests::{binaries, criu, etcd, process};
use rustix::process::Signal;
use serde_json::Value;

/// Time limit of a start or a stop on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

fn permafrost(arguments: &[&str]) -> Command {
    let mut command = Command::new(binaries::path("permafrost").unwrap());
    command
        .arg("--json")
        .args(arguments)
        .env_remove("PERMAFROST_SOCKET")
        .stdin(Stdio::null());
    if let Ok(criu) = criu::find() {
        command.env(criu::CRIU, criu.path);
    }
    command
}

/// Runs the command on a node, and returns what it prints.
fn on(socket: &str, arguments: &[&str]) -> Value {
    let output = permafrost(arguments)
        .args(["--socket", socket])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// A playground in the background. It is killed when dropped.
struct Playground {
    child: Child,
    /// The object that it printed first.
    shown: Value,
    /// Objects that it prints.
    printed: mpsc::Receiver<Value>,
}

impl Playground {
    fn start(directory: &Path, etcd: &Path) -> Self {
        let mut child = permafrost(&["playground", "--nodes", "3", "--region-size", "64M"])
            .arg(directory)
            .env(etcd::ETCD, etcd)
            // Meant for the daemon of this machine.
            .env("PERMAFROSTD_REGION", "/no/such/directory/region")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let objects = serde_json::Deserializer::from_reader(child.stdout.take().unwrap());
        let (send, printed) = mpsc::channel();
        thread::spawn(move || {
            for object in objects.into_iter().map_while(Result::ok) {
                let _ = send.send(object);
            }
        });
        let shown = Value::Null;
        let mut playground = Self {
            child,
            shown,
            printed,
        };
        playground.shown = playground.next();
        playground
    }

    /// Returns the next object that it prints.
    fn next(&self) -> Value {
        self.printed.recv_timeout(LIMIT).unwrap()
    }

    fn socket(&self, node: usize) -> &str {
        self.shown["nodes"][node]["socket"].as_str().unwrap()
    }

    fn pids(&self) -> Vec<u32> {
        let nodes = self.shown["nodes"].as_array().unwrap().iter();
        nodes
            .map(|node| u32::try_from(node["pid"].as_u64().unwrap()).unwrap())
            .collect()
    }

    /// Waits for its end, and for that of all nodes. Returns its exit code.
    fn ended(&mut self) -> Option<i32> {
        let status = process::wait_for("the playground's end", LIMIT, || {
            Ok(self.child.try_wait()?)
        });
        for pid in self.pids() {
            process::wait_for("a node's end", LIMIT, || {
                // A node whose playground was killed is a child of this process.
                process::reap(pid);
                Ok((!process::is_alive(pid)).then_some(()))
            })
            .unwrap();
        }
        status.unwrap().code()
    }
}

impl Drop for Playground {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns etcd and a directory on a disk, unless `test` is skipped.
fn site(test: &str) -> Option<(PathBuf, tempfile::TempDir)> {
    let etcd = etcd::for_test(test)?;
    process::adopt_orphans().unwrap();
    Some((etcd, tempfile::tempdir().unwrap()))
}

fn refused(output: &Output, exit_code: i32, text: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(exit_code), "{said}");
    assert!(said.contains(text), "{said}");
}

#[test]
fn it_is_a_cluster_that_ends_with_the_command_and_goes_on_with_the_next() {
    let Some((etcd, work)) = site("it_is_a_cluster_that_ends_with_the_command") else {
        return;
    };
    if criu::for_test("it_is_a_cluster_that_ends_with_the_command").is_none() {
        return;
    }
    let directory = work.path().join("try it");
    let mut playground = Playground::start(&directory, &etcd);
    process::wait_for("three nodes that live", LIMIT, || {
        let listed = on(playground.socket(0), &["node", "ls"]);
        let nodes = listed["nodes"].as_array().unwrap().iter();
        Ok((nodes.filter(|node| node["live"] == true).count() == 3).then_some(()))
    })
    .unwrap();

    // A second one in its directory is refused, and changes nothing.
    let second = permafrost(&["playground"])
        .arg(&directory)
        .env(etcd::ETCD, &etcd)
        .output()
        .unwrap();
    refused(&second, 4, "another playground uses");

    // Frozen on one node, thawed on another.
    let mut workload = Workload::start(work.path(), &workload::Options::default()).unwrap();
    let before = workload.verify().unwrap();
    let pid = workload.pid().to_string();
    on(
        playground.socket(0),
        &["dump", "--pid", &pid, "--job", "naps"],
    );
    workload.wait_until_gone().unwrap();
    process::wait_for("two copies", LIMIT, || {
        let listed = on(playground.socket(2), &["ls", "naps"]);
        let holders = listed["checkpoints"][0]["nodes"].as_array();
        Ok(holders.is_some_and(|nodes| nodes.len() == 2).then_some(()))
    })
    .unwrap();
    on(playground.socket(2), &["restore", "naps"]);
    let after = workload.verify().unwrap();
    assert_eq!(after.checksum_found, before.checksum_found);

    // A node that dies is reported; the others go on.
    process::signal(playground.pids()[1], Signal::KILL).unwrap();
    let end = playground.next();
    assert_eq!(end["ended"], "node b", "{end}");
    assert_eq!(end["status"], "signal: 9 (SIGKILL)", "{end}");
    on(playground.socket(0), &["show", "naps"]);

    process::signal(playground.child.id(), Signal::INT).unwrap();
    assert_eq!(playground.ended(), Some(0));

    // The next one has all nodes, with what they stored.
    let mut playground = Playground::start(&directory, &etcd);
    let status = on(playground.socket(1), &["ls", "naps"]);
    assert_eq!(status["checkpoints"][0]["generation"], 1, "{status}");

    // However it ends, its nodes end.
    playground.child.kill().unwrap();
    assert_eq!(playground.ended(), None);
}

#[test]
fn what_it_cannot_use_is_refused() {
    let Some((etcd, work)) = site("what_it_cannot_use_is_refused") else {
        return;
    };
    let run = |arguments: &[&str], etcd: &Path| {
        permafrost(&["playground"])
            .args(arguments)
            .current_dir(work.path())
            .env(etcd::ETCD, etcd)
            .output()
            .unwrap()
    };
    fs::create_dir(work.path().join("photos")).unwrap();
    refused(&run(&["photos"], &etcd), 9, "photos");
    let private = work.path().join("private");
    let made = fs::DirBuilder::new().mode(0o700).create(&private);
    made.unwrap();
    fs::write(private.join("picture"), "").unwrap();
    refused(
        &run(&["private"], &etcd),
        4,
        "is there and not a playground's",
    );
    refused(
        &run(&["--nodes", "2", "--copies", "3"], &etcd),
        2,
        "3 copies need 3 nodes",
    );
    refused(&run(&["--nodes", "0"], &etcd), 2, "--nodes");
    refused(&run(&["--region-size", "4T"], &etcd), 6, "regions need");
    refused(&run(&["--region-size", "4K"], &etcd), 2, "4K");
    refused(
        &run(&["--region-size", "1M"], &etcd),
        1,
        "did not get ready",
    );
    let none = Path::new("/no/such/etcd");
    refused(&run(&["other"], none), 3, "/no/such/etcd");
    let named = ["--permafrostd", "/no/such/permafrostd"];
    refused(&run(&named, &etcd), 3, "/no/such/permafrostd is not there");
    assert!(!work.path().join("other").exists());

    // A run that is interrupted while it starts leaves a directory that the next one takes.
    let mut interrupted = permafrost(&["playground", "new"])
        .current_dir(work.path())
        .env(etcd::ETCD, &etcd)
        .spawn()
        .unwrap();
    process::wait_for("the beginning of its start", LIMIT, || {
        Ok(work.path().join("new/ca").exists().then_some(()))
    })
    .unwrap();
    process::signal(interrupted.id(), Signal::INT).unwrap();
    assert_eq!(interrupted.wait().unwrap().code(), Some(130));
    let mut next = Playground::start(&work.path().join("new"), &etcd);
    process::signal(next.child.id(), Signal::TERM).unwrap();
    assert_eq!(next.ended(), Some(0));
}

#[test]
fn a_second_interrupt_kills_a_node_that_does_not_stop() {
    let Some((etcd, work)) = site("a_second_interrupt_kills_a_node_that_does_not_stop") else {
        return;
    };
    let mut playground = Playground::start(&work.path().join("stubborn"), &etcd);
    let pids = playground.pids();
    process::stop(pids[1]).unwrap();
    let command = playground.child.id();
    process::signal(command, Signal::INT).unwrap();
    process::wait_for("the end of the other nodes", LIMIT, || {
        let others = [pids[0], pids[2]];
        Ok((!others.into_iter().any(process::is_alive)).then_some(()))
    })
    .unwrap();
    assert!(process::is_alive(pids[1]) && process::is_alive(command));
    process::signal(command, Signal::INT).unwrap();
    // The command loses its own patience after two minutes.
    let soon = Duration::from_secs(60);
    process::wait_for("the end of the command", soon, || {
        Ok((!process::is_alive(command)).then_some(()))
    })
    .unwrap();
    assert_eq!(playground.ended(), Some(0));
}
