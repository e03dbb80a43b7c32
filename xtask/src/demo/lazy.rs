//! `cargo xtask demo --lazy`: many clones of one warmed-up process, started lazily on two nodes of a cluster.
//!
//! Each clone is restored in a pid namespace of its own, as the processes of containers are, and *answers* when it has
//! replied to a request. What it does not touch for that comes while it answers.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use permafrost_tests::binaries;
use permafrost_tests::cluster::{Cluster, Setup};
use permafrost_tests::criu;
use permafrost_tests::daemon::Daemon;
use permafrost_tests::status::Status;
use permafrost_tests::workload::{self, Workload};

use super::Options;
use crate::rig::Interrupt;
use crate::{table, tools, ui};

/// Nodes with a copy, on which the clones start in turn.
const NODES: usize = 2;

/// Restores the task in namespaces of its own, and makes it answer. Arguments: `permafrost`, the way, the task's
/// directory and pid.
const CLONE: &str = r#"
set -e
permafrost=$1 way=$2 dir=$3 pid=$4
mount -t tmpfs none "$dir"
report() {
    rm -f "$dir/workload.status"
    kill "-$1" "$pid"
    while ! [ -e "$dir/workload.status" ]; do
        kill -0 "$pid"
        sleep 0.005
    done
}
if [ "$way" != plain ]; then
    # Read by the shell itself: programs that look for the line again and again take the processor from the clones.
    mkfifo "$dir/told"
    "$permafrost" restore demo "--$way" >/dev/null 2>"$dir/told" &
    exec 3<"$dir/told"
    line=
    until [ "${line#*runs as process}" != "$line" ]; do
        echo "$line" >&2
        read -r line <&3
    done
    cat <&3 >/dev/null &
else
    "$permafrost" --quiet restore demo >/dev/null
fi
echo running
report HUP
echo answered
read go
report USR2
cat "$dir/workload.status"
"#;

/// Times of a clone since the first of its batch was started.
#[derive(Clone, Copy)]
struct Times {
    running: Duration,
    answered: Duration,
}

/// Clones that were started at once.
struct Batch {
    name: String,
    times: Vec<Times>,
}

/// Runs the demo.
///
/// # Errors
/// Fails at the first step that does not do what it should.
pub(super) fn run(options: &Options, interrupt: &Interrupt) -> Result<()> {
    tools::etcd()?;
    let task = ui::Task::begin("start a cluster of two nodes");
    let setup = Setup {
        nodes: NODES,
        members: 1,
        region_mib: options.size_mib * 3 / 2 + 128,
        ..Setup::default()
    };
    let cluster = Cluster::for_test("demo --lazy", setup)?
        .context("no network namespaces or no etcd: run as root")?;
    task.done("each with a network of its own, and an etcd");
    let task = ui::Task::begin("start a process and fill its memory");
    let dir = cluster.path("task")?;
    let wanted = workload::Options {
        size_mib: options.size_mib,
        ..workload::Options::default()
    };
    let mut workload = Workload::start(&dir, &wanted)?;
    let pid = workload.pid();
    task.done(&format!("pid {pid}, {} MiB", options.size_mib));
    interrupt.check()?;

    let task = ui::Task::begin("permafrost dump --durability all");
    let id = pid.to_string();
    let dump = ["dump", "--pid", &id, "--job", "demo", "--durability", "all"];
    // Not on the node's host: CRIU locks the network of a task that has another one than it has itself.
    let dumped = Command::new(binaries::path("permafrost")?)
        .args(dump)
        .env("PERMAFROST_SOCKET", cluster.node(0).control())
        .env(criu::CRIU, &criu::find()?.path)
        .output()
        .context("run permafrost dump")?;
    ensure!(
        dumped.status.success(),
        "permafrost dump failed: {}",
        String::from_utf8_lossy(&dumped.stderr)
    );
    workload.wait_until_gone()?;
    task.done("the process is gone, and both nodes have a copy");

    let mut batches = Vec::new();
    let mut ways = vec![("plain", 1), ("lazy", 1)];
    if options.touched_only {
        ways.extend([("touched-only", 1), ("touched-only", options.clones)]);
    } else {
        ways.push(("lazy", options.clones));
    }
    for (way, count) in ways {
        interrupt.check()?;
        let name = match count {
            1 => format!("one, {way}"),
            count => format!("{count} clones, {way}"),
        };
        let task = ui::Task::begin(&name);
        let times = batch(&cluster, way, count, &dir, &id)?;
        let verified = count.min(verified(way));
        task.done(&format!("the memory of {verified} is as it was dumped"));
        batches.push(Batch { name, times });
    }
    println!("\n{}", summary(&batches));
    Ok(())
}

/// Returns the number of clones whose memory is verified, one after another. That brings all of it, and takes seconds
/// for each where only what is accessed comes: then one clone of each node is verified.
fn verified(way: &str) -> usize {
    match way {
        "touched-only" => NODES,
        _ => usize::MAX,
    }
}

/// Starts clones at once, waits until each has answered, and then verifies their memory.
fn batch(cluster: &Cluster, way: &str, count: usize, dir: &Path, pid: &str) -> Result<Vec<Times>> {
    let began = Instant::now();
    let clones: Vec<_> = (0..count)
        .map(|index| CloneProcess::start(cluster.node(index % NODES), way, dir, pid))
        .collect::<Result<_>>()?;
    let followed = std::thread::scope(|scope| {
        let following: Vec<_> = clones
            .into_iter()
            .map(|mut clone| scope.spawn(move || Ok((clone.follow(began)?, clone))))
            .collect();
        let followed = following.into_iter().map(|thread| match thread.join() {
            Ok(followed) => followed,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        followed.collect::<Result<Vec<(Times, CloneProcess)>>>()
    })?;
    let times = followed.iter().map(|(times, _)| *times).collect();
    for (_, clone) in followed.into_iter().take(verified(way)) {
        clone.verify()?;
    }
    Ok(times)
}

/// A clone in its namespaces, which end with it.
struct CloneProcess {
    child: Child,
    told: BufReader<ChildStdout>,
}

impl CloneProcess {
    fn start(node: &Daemon, way: &str, dir: &Path, pid: &str) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]);
        command.args(["sh", "-c", CLONE, "sh"]);
        command.arg(binaries::path("permafrost")?);
        command.arg(way).arg(dir).arg(pid);
        command.env("PERMAFROST_SOCKET", node.control());
        command.env(criu::CRIU, &criu::find()?.path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("start unshare")?;
        let told = child.stdout.take().context("read what the clone tells")?;
        Ok(Self {
            child,
            told: BufReader::new(told),
        })
    }

    fn follow(&mut self, began: Instant) -> Result<Times> {
        let mut wait = |word: &str| {
            let mut line = String::new();
            self.told.read_line(&mut line).context("wait for a clone")?;
            if line.trim_end() != word {
                bail!("a clone ended before it was {word}");
            }
            Ok(began.elapsed())
        };
        Ok(Times {
            running: wait("running")?,
            answered: wait("answered")?,
        })
    }

    /// Has the clone verify all of its memory, and ends it.
    fn verify(mut self) -> Result<()> {
        let go = self.child.stdin.as_mut().context("talk to a clone")?;
        go.write_all(b"go\n").context("talk to a clone")?;
        let mut report = String::new();
        self.told
            .read_to_string(&mut report)
            .context("read the report of a clone")?;
        let status: Status = serde_json::from_str(&report).context("read the report of a clone")?;
        ensure!(status.is_sound(), "a clone is not sound: {status:?}");
        self.child.wait().context("wait for a clone")?;
        Ok(())
    }
}

fn summary(batches: &[Batch]) -> String {
    let ms = |time: Duration| format!("{:.0} ms", time.as_secs_f64() * 1e3);
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    };
    let head = ["", "runs, median", "all run", "all have answered"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(batches.iter().map(|batch| {
        let running = batch.times.iter().map(|times| times.running);
        let answered = batch.times.iter().map(|times| times.answered);
        vec![
            batch.name.clone(),
            ms(median(running.clone().collect())),
            ms(running.max().unwrap_or_default()),
            ms(answered.max().unwrap_or_default()),
        ]
    }));
    table::render(&rows)
}

impl Drop for CloneProcess {
    fn drop(&mut self) {
        // The namespace's processes end with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
