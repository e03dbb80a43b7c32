//! The nodes that a case is measured on: a permafrostd of the benchmark's own, for copies a second one with a registry.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use permafrost_criu::scratch::is_in_memory;
use permafrost_protocol::control::{RegionStatus, request};
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;
use permafrost_transport::control::Connection;
use tempfile::TempDir;

use super::arguments::Copies;
use super::plan::{Case, Plan, Tier};
use crate::etcd::Etcd;
use crate::{child, daemon, machine};

/// Name of the benchmark's directory, beneath a tier's directory.
const DIRECTORY: &str = "permafrost-bench";

/// Nodes with their directories. Dropping stops the nodes and removes their data.
pub(super) struct Site {
    // In the order in which they are taken down.
    nodes: Vec<Node>,
    _etcd: Option<Etcd>,
    store: Store,
    /// Directory for sockets, certificates and reports of workloads: paths of sockets must be short.
    scratch: TempDir,
    permafrostd: PathBuf,
    emulate: Option<String>,
    region_bytes: u64,
    catalog: Option<String>,
    /// Status of the first node's region.
    region: RegionStatus,
}

struct Node {
    child: Child,
    control: PathBuf,
    region: PathBuf,
    /// Free bytes of an empty region.
    empty_bytes: u64,
}

/// The benchmark's directory on a tier, locked against other benchmarks.
struct Store {
    path: PathBuf,
    _lock: File,
}

impl Store {
    /// Locks the directory, and removes what a killed run has left in it.
    fn take(tier: &Path) -> Result<Self, Failure> {
        let path = tier.join(DIRECTORY);
        let failed = |error: std::io::Error| Failure::io("use", &path, &error);
        let lock = daemon::lock_directory(&path, "benchmark")?;
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?.path();
            if entry.is_dir() {
                fs::remove_dir_all(&entry).map_err(failed)?;
            }
        }
        Ok(Self { path, _lock: lock })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // A directory that cannot be removed is emptied by the next run.
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Site {
    /// Starts the nodes that a case needs.
    pub(super) fn start(
        plan: &Plan,
        case: &Case,
        interrupts: &Interrupts,
    ) -> Result<Self, Failure> {
        let region_bytes = plan.region_bytes(case.size_bytes);
        let tier = plan.tier(&case.tier)?;
        Self::on(plan, tier, region_bytes, case.copies, interrupts)
    }

    /// Starts nodes on a tier.
    pub(super) fn on(
        plan: &Plan,
        tier: &Tier,
        region_bytes: u64,
        copies: Copies,
        interrupts: &Interrupts,
    ) -> Result<Self, Failure> {
        let store = Store::take(&tier.directory)?;
        let scratch = tempfile::Builder::new()
            .prefix("permafrost-bench-")
            .tempdir()
            .map_err(|error| Failure::io("create", &std::env::temp_dir(), &error))?;
        let etcd = match (copies, &plan.etcd) {
            (Copies::Local, _) => None,
            (Copies::Replicated, Err(reason)) => {
                return Err(Failure::new(Code::NotFound, reason.clone()));
            }
            (Copies::Replicated, Ok(program)) => Some(Etcd::start(
                program,
                &scratch.path().join("etcd"),
                interrupts,
            )?),
        };
        let mut site = Self {
            nodes: Vec::new(),
            catalog: etcd.as_ref().map(Etcd::url),
            _etcd: etcd,
            store,
            scratch,
            permafrostd: plan.permafrostd.clone(),
            emulate: tier.emulate.clone(),
            region_bytes,
            region: RegionStatus::default(),
        };
        let nodes = match copies {
            Copies::Local => 1,
            Copies::Replicated => 2,
        };
        if nodes == 2 {
            let ca = site.scratch.path().join("ca");
            daemon::offline(interrupts, &["pki", "init", "--dir", &ca.to_string_lossy()])?;
        }
        for index in 0..nodes {
            if nodes == 2 {
                site.issue(index, interrupts)?;
            }
            let node = site.start_node(index, interrupts)?;
            site.nodes.push(node);
        }
        site.await_whole(interrupts)?;
        site.await_populated(interrupts)?;
        for node in &mut site.nodes {
            node.empty_bytes = region_status(&node.control)?.free_bytes;
        }
        site.region = region_status(site.control())?;
        Ok(site)
    }

    fn issue(&self, index: usize, interrupts: &Interrupts) -> Result<(), Failure> {
        let path = |name: String| {
            self.scratch
                .path()
                .join(name)
                .to_string_lossy()
                .into_owned()
        };
        let (ca, out) = (path("ca".to_owned()), path(format!("identity-{index}")));
        let name = format!("bench-{index}");
        let arguments = [
            "pki", "issue", "--dir", &ca, "--name", &name, "--role", "node", "--out", &out,
        ];
        daemon::offline(interrupts, &arguments).map(drop)
    }

    fn start_node(&self, index: usize, interrupts: &Interrupts) -> Result<Node, Failure> {
        let data = self.store.path.join(format!("node-{index}"));
        let run = self.scratch.path().join(format!("run-{index}"));
        let log_path = self.scratch.path().join(format!("permafrostd-{index}.log"));
        let log = File::options()
            .create(true)
            .append(true)
            .open(&log_path)
            .map_err(|error| Failure::io("create", &log_path, &error))?;
        let mut command = child::guarded(&self.permafrostd)?;
        command
            .arg("--data-dir")
            .arg(&data)
            .arg("--run-dir")
            .arg(&run)
            .args(["--listen", "none"])
            // Only the measured operations may use the medium.
            .args(["--scrub-period", "off", "--probe-period", "off"])
            // A slow medium may keep a dump for long.
            .args(["--session-ttl", "1d", "--idle-timeout", "1d"])
            .args(["--region-size", &self.region_bytes.to_string()])
            .stdout(Stdio::piped())
            .stderr(log);
        if let Some(device) = &self.emulate {
            command.args(["--emulate-medium", device]);
        }
        if let Some(catalog) = &self.catalog {
            command
                .args(["--listen-peers", "127.0.0.1:0", "--catalog", catalog])
                .arg("--count-volatile-copies")
                .args(["--copies", "2", "--deadline", "1d", "--identity"])
                .arg(self.scratch.path().join(format!("identity-{index}")));
        }
        let (child, _) = daemon::spawn_ready(command, &log_path, interrupts)?;
        Ok(Node {
            child,
            control: run.join("control.sock"),
            region: data.join("region"),
            empty_bytes: 0,
        })
    }

    /// Returns the control socket of the node that dumps and restores.
    pub(super) fn control(&self) -> &Path {
        self.nodes
            .first()
            .map_or(Path::new(""), |node| node.control.as_path())
    }

    /// Returns a directory for the reports of a workload.
    pub(super) fn workload_dir(&self) -> PathBuf {
        self.scratch.path().join("workload")
    }

    /// Returns the guarantee of the medium as the node reports it, including whether it is emulated.
    pub(super) fn guarantee(&self) -> &str {
        &self.region.guarantee
    }

    /// Returns the processor time of the nodes so far.
    pub(super) fn cpu_time(&self) -> Duration {
        let nodes = self.nodes.iter();
        nodes.map(|node| machine::cpu_time(node.child.id())).sum()
    }

    /// Returns true if the medium has a page cache that may serve reads.
    pub(super) fn is_cached(&self) -> bool {
        if self.emulate.is_some() {
            return self.guarantee().contains("behind a page cache");
        }
        self.region.medium == "file" && !is_in_memory(&self.store.path)
    }

    /// Makes the first node drop its page cache, as if the dump were old: the node is restarted.
    pub(super) fn forget(&mut self, interrupts: &Interrupts) -> Result<(), Failure> {
        if self.nodes.is_empty() {
            return Ok(());
        }
        let mut node = self.nodes.remove(0);
        daemon::stop(&mut node.child)?;
        machine::forget_cached(&node.region)
            .map_err(|error| Failure::io("forget", &node.region, &error))?;
        let again = self.start_node(0, interrupts)?;
        self.nodes.insert(
            0,
            Node {
                empty_bytes: node.empty_bytes,
                ..again
            },
        );
        self.await_whole(interrupts)
    }

    /// Waits until the nodes see each other.
    fn await_whole(&self, interrupts: &Interrupts) -> Result<(), Failure> {
        if self.catalog.is_none() {
            return Ok(());
        }
        daemon::wait_for("the nodes to see each other", interrupts, || {
            let listed = child::permafrost(interrupts, self.control(), ["node", "ls"])?;
            let nodes = listed["nodes"].as_array().cloned().unwrap_or_default();
            let live = nodes.iter().filter(|node| node["live"] == true).count();
            Ok(live == self.nodes.len())
        })
    }

    /// Waits until regions in memory are fully populated: dumps would wait for page faults otherwise.
    fn await_populated(&self, interrupts: &Interrupts) -> Result<(), Failure> {
        if !is_in_memory(&self.store.path) {
            return Ok(());
        }
        let mut before = 0;
        daemon::wait_for("the regions to be populated", interrupts, || {
            let nodes = self.nodes.iter();
            let bytes: u64 = nodes
                .map(|node| machine::shared_memory_bytes(node.child.id()))
                .sum();
            let all = self.region_bytes * self.nodes.len() as u64;
            // Or no longer grows: it is populated with what can be had.
            let done = bytes >= all - all / 64 || (bytes > 0 && bytes == before);
            before = bytes;
            if !done {
                thread::sleep(Duration::from_millis(300));
            }
            Ok(done)
        })
    }

    /// Waits until the space of removed checkpoints is free.
    pub(super) fn await_freed(&self, interrupts: &Interrupts) -> Result<(), Failure> {
        daemon::wait_for("the removed checkpoints to be freed", interrupts, || {
            for node in &self.nodes {
                // A segment stays open here and there.
                let slack = self.region_bytes / 64;
                if region_status(&node.control)?.free_bytes + slack < node.empty_bytes {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    /// Stops the nodes, and fails if one does not end cleanly.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        (self.nodes.iter_mut()).try_for_each(|node| daemon::stop(&mut node.child))
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let _ = daemon::stop(&mut node.child);
        }
    }
}

fn region_status(control: &Path) -> Result<RegionStatus, Failure> {
    let status = Connection::connect(control)?.call(request::Status {})?;
    Ok(status.regions.into_iter().next().unwrap_or_default())
}
