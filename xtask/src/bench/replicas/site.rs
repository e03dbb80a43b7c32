//! Environment of the measurements: hosts, their certificates, and nodes of Permafrost on them with their registry.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use permafrost_tests::daemon::{self, Daemon};
use permafrost_tests::etcd::{EtcdCluster, Place};
use permafrost_tests::net::{Host, Hosts};
use permafrost_tests::{binaries, process};
use tempfile::TempDir;

use crate::{rig, tools, ui};

/// Port that a node serves others on.
const PEERS_PORT: u16 = 7118;
/// Room in a region beside the pages of one dump, MiB: maps, small images, a generation that is not collected yet.
const SPARE_MIB: u64 = 512;
/// Time for the copies of a removed checkpoint to be freed on both nodes.
const FREED: Duration = Duration::from_secs(120);

/// Hosts, nodes and files of a measurement.
pub(super) struct Site {
    // In the order in which they are taken down.
    nodes: Option<Nodes>,
    hosts: Hosts,
    identities: Vec<PathBuf>,
    dir: TempDir,
    criu: PathBuf,
    mtu: u32,
}

/// Size of a site.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Number of hosts, and, with `node_mib`, of nodes.
    pub(super) hosts: usize,
    /// MTU of the link, bytes.
    pub(super) mtu: u32,
    /// Speed of the link; `None`: not limited.
    pub(super) mbit: Option<u32>,
    /// Pages that each node is to hold at a time; `None`: no nodes.
    pub(super) node_mib: Option<u64>,
    /// Room for images of CRIU beside the regions, MiB.
    pub(super) images_mib: u64,
}

/// A node on each host, and the registry on the first.
pub(super) struct Nodes {
    pub(super) daemons: Vec<Daemon>,
    etcd: EtcdCluster,
    /// Bytes used in each region while it holds no checkpoint.
    empty: Vec<u64>,
}

impl Site {
    /// Starts everything that is shared by several samples.
    ///
    /// # Errors
    /// Fails where network namespaces cannot be made, and with the end of a node's log when it does not start.
    pub(super) fn new(criu: &Path, size: &Size) -> Result<Self> {
        let hosts = Hosts::create(size.hosts, size.mtu).context("make hosts")?;
        if let Some(mbit) = size.mbit {
            hosts.iter().try_for_each(|host| host.limit(mbit))?;
        }
        let region_mib = size.node_mib.map(|mib| mib + mib / 8 + SPARE_MIB);
        let regions_mib =
            region_mib.map_or(0, |mib| mib * u64::try_from(size.hosts).unwrap_or(u64::MAX));
        let dir = rig::memory_dir(regions_mib + size.images_mib + size.images_mib / 8 + 64)?;
        let ca = dir.path().join("ca");
        pki(&["init".as_ref(), "--dir".as_ref(), ca.as_os_str()])?;
        let issue = |(index, host): (usize, &Host)| -> Result<PathBuf> {
            let out = dir.path().join(format!("identity-{index}"));
            pki(&[
                "issue".as_ref(),
                "--dir".as_ref(),
                ca.as_os_str(),
                "--name".as_ref(),
                name(index).as_ref(),
                "--role".as_ref(),
                "node".as_ref(),
                "--host".as_ref(),
                host.address().to_string().as_ref(),
                "--out".as_ref(),
                out.as_os_str(),
            ])?;
            Ok(out)
        };
        let identities = hosts.iter().enumerate().map(issue).collect::<Result<_>>()?;
        let mut site = Self {
            nodes: None,
            hosts,
            identities,
            dir,
            criu: criu.to_owned(),
            mtu: size.mtu,
        };
        if let Some(region_mib) = region_mib {
            site.nodes = Some(Nodes::start(&site, region_mib)?);
        }
        Ok(site)
    }

    /// Returns the host on which the process runs.
    pub(super) fn here(&self) -> &Host {
        &self.hosts[0]
    }

    /// Returns the host to which its memory is sent.
    pub(super) fn there(&self) -> &Host {
        &self.hosts[1]
    }

    /// Returns the directory of a host's certificate and key.
    pub(super) fn identity(&self, index: usize) -> &Path {
        &self.identities[index]
    }

    pub(super) fn criu(&self) -> &Path {
        &self.criu
    }

    /// Returns the largest payload of a UDP datagram, bytes: the headers of IPv4 and UDP take 28 bytes.
    pub(super) fn packet_bytes(&self) -> u32 {
        self.mtu - 28
    }

    pub(super) fn nodes(&self) -> Result<&Nodes> {
        self.nodes.as_ref().context("there are no nodes")
    }

    /// Makes a directory on tmpfs for the files of one sample.
    pub(super) fn work_dir(&self) -> Result<TempDir> {
        tempfile::tempdir_in(self.dir.path()).context("create a work directory")
    }

    /// Stops the nodes cleanly.
    pub(super) fn stop(mut self) -> Result<()> {
        if let Some(nodes) = self.nodes.take() {
            for daemon in nodes.daemons {
                let log = daemon.log();
                let status = daemon.stop()?;
                ensure!(
                    status.success(),
                    "permafrostd ends with {status}:\n{}",
                    daemon::tail(&log)
                );
            }
        }
        Ok(())
    }
}

impl Nodes {
    fn start(site: &Site, region_mib: u64) -> Result<Self> {
        let task = ui::Task::begin("start a registry, and a node on each host");
        let place = Place {
            host: site.here().address().to_string(),
            client_port: 2379,
            peer_port: 2380,
            prefix: prefix(site.here()),
        };
        let etcd = EtcdCluster::start_at(&tools::etcd()?, vec![place])?;
        etcd.wait_ready()?;
        let start = |index: usize| -> Result<Daemon> {
            let address = format!("{}:{PEERS_PORT}", site.hosts[index].address());
            let dir = site.dir.path().join(name(index));
            std::fs::create_dir(&dir).context("create a node's directory")?;
            let extra = [
                // Where the scratch directory is in memory.
                "--count-volatile-copies",
                "--catalog",
                &etcd.url(),
                "--identity",
                &site.identity(index).display().to_string(),
                "--listen-peers",
                &address,
                "--advertise",
                &address,
                "--copies",
                "2",
                "--durability",
                "all",
            ];
            let options = daemon::Options {
                region_mib,
                listen: "none".to_owned(),
                extra: extra.map(str::to_owned).to_vec(),
                prefix: prefix(&site.hosts[index]),
                ..daemon::Options::default()
            };
            Daemon::start(&dir, &options).with_context(|| format!("start node {}", name(index)))
        };
        let daemons = (0..site.identities.len())
            .map(start)
            .collect::<Result<_>>()?;
        let mut nodes = Self {
            daemons,
            etcd,
            empty: Vec::new(),
        };
        nodes.settle()?;
        nodes.empty = nodes.used()?;
        task.done("at rest");
        Ok(nodes)
    }

    /// Waits until all daemons are idle: they map their regions in the background, and on two processors that would
    /// affect the measurements.
    pub(super) fn settle(&self) -> Result<()> {
        /// Processor time per poll below which a daemon counts as idle: leases are renewed all the time.
        const REST: Duration = Duration::from_millis(20);
        const LOOK: Duration = Duration::from_millis(500);
        let mut used = self.cpu_time()?;
        process::wait_for(
            "the nodes' coming to rest",
            Duration::from_secs(120),
            || {
                std::thread::sleep(LOOK);
                let before = std::mem::replace(&mut used, self.cpu_time()?);
                let at_rest = before
                    .iter()
                    .zip(&used)
                    .all(|(&before, &now)| now.saturating_sub(before) <= REST);
                Ok(at_rest.then_some(()))
            },
        )
    }

    /// Returns the processor time of each node so far.
    pub(super) fn cpu_time(&self) -> Result<Vec<Duration>> {
        let time = |daemon: &Daemon| process::cpu_time(daemon.pid());
        self.daemons.iter().map(time).collect()
    }

    /// Returns the processor time of the registry so far.
    pub(super) fn registry_cpu_time(&self) -> Result<Duration> {
        process::cpu_time(self.etcd.pid(0)?)
    }

    /// Returns the used bytes of one region.
    pub(super) fn used_by(&self, index: usize) -> Result<u64> {
        let status = self.daemons[index].json(&["status"])?;
        let capacity = rig::number(&status, "capacity_bytes");
        Ok(capacity.saturating_sub(rig::number(&status, "free_bytes")))
    }

    /// Returns the bytes that were used in one region while it held no checkpoint.
    pub(super) fn empty(&self, index: usize) -> u64 {
        self.empty.get(index).copied().unwrap_or(0)
    }

    fn used(&self) -> Result<Vec<u64>> {
        (0..self.daemons.len())
            .map(|index| self.used_by(index))
            .collect()
    }

    /// Returns the bytes that the first two nodes hold, beyond those of an empty region.
    fn held(&self) -> Result<[u64; 2]> {
        let used = self.used()?;
        Ok([0, 1].map(|index| used[index].saturating_sub(self.empty[index])))
    }

    /// Checks that the last dump is in both regions: a restore would also work with a copy on another node.
    pub(super) fn check_both_hold_it(&self) -> Result<()> {
        let [here, there] = self.held()?;
        ensure!(
            there >= here - here / 8,
            "the dump was acknowledged with {} here and {} there",
            rig::mib(here),
            rig::mib(there)
        );
        Ok(())
    }

    /// Removes a job, and waits until both regions are as empty as before, so that they never fill. For two nodes.
    pub(super) fn remove(&self, job: &str) -> Result<()> {
        self.daemons[0].run(&["rm", job, "--all"])?;
        process::wait_for("the freeing of both copies", FREED, || {
            std::thread::sleep(Duration::from_millis(50));
            // A little data remains of removed checkpoints, such as a generation's number.
            let is_free = |held: u64| held <= (SPARE_MIB << 20) / 8;
            Ok(self.held()?.into_iter().all(is_free).then_some(()))
        })
    }

    /// Returns the end of each node's log.
    pub(super) fn logs(&self) -> String {
        let log = |(index, daemon): (usize, &Daemon)| {
            format!("{}:\n{}\n", name(index), daemon::tail(&daemon.log()))
        };
        self.daemons.iter().enumerate().map(log).collect()
    }
}

/// Returns a host's name in its certificate.
pub(super) fn name(index: usize) -> String {
    format!("n{index}")
}

/// Returns the words that a command must begin with to run on `host`.
fn prefix(host: &Host) -> Vec<String> {
    let command = host.command("");
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(
        command
            .get_args()
            .map(|word| word.to_string_lossy().into_owned())
            .filter(|word| !word.is_empty()),
    );
    words
}

fn pki(arguments: &[&std::ffi::OsStr]) -> Result<()> {
    let output = Command::new(binaries::path("permafrost")?)
        .arg("pki")
        .args(arguments)
        .output()
        .context("run permafrost pki")?;
    if !output.status.success() {
        bail!(
            "permafrost pki {arguments:?} fails ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
