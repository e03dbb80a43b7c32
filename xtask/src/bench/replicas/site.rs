//! What the contenders run on: two hosts, their certificates, and two nodes of Permafrost with their registry.

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
/// Room in a region beside the pages of one dump: maps, small images, a generation that is not collected yet.
const SPARE_MIB: u64 = 512;
/// Time for the copies of a removed checkpoint to be freed on both nodes.
const FREED: Duration = Duration::from_secs(120);

/// Where everything is.
pub(super) struct Site {
    // In the order in which they are taken down.
    nodes: Option<Nodes>,
    hosts: Hosts,
    identities: [PathBuf; 2],
    dir: TempDir,
    criu: PathBuf,
    mtu: u32,
}

/// Two nodes, one on each host, and the registry on the first.
pub(super) struct Nodes {
    pub(super) daemons: [Daemon; 2],
    etcd: EtcdCluster,
    /// What is used in each region with nothing in it, bytes.
    empty: [u64; 2],
}

impl Site {
    /// Starts what does not belong to one sample alone.
    ///
    /// # Errors
    /// Fails where network namespaces cannot be made, and with the end of a node's log when it does not start.
    pub(super) fn new(
        criu: &Path,
        mtu: u32,
        mbit: Option<u32>,
        largest_mib: u64,
        with_nodes: bool,
    ) -> Result<Self> {
        let hosts = Hosts::create(2, mtu).context("make two hosts")?;
        if let Some(mbit) = mbit {
            hosts.iter().try_for_each(|host| host.limit(mbit))?;
        }
        let region_mib = largest_mib + largest_mib / 8 + SPARE_MIB;
        // Both regions, or the images of a page server: never at once, but both are there.
        let nodes_mib = if with_nodes { 2 * region_mib } else { 0 };
        let dir = rig::memory_dir(nodes_mib + largest_mib + largest_mib / 8 + 64)?;
        let ca = dir.path().join("ca");
        pki(&["init".as_ref(), "--dir".as_ref(), ca.as_os_str()])?;
        let issue = |index: usize| -> Result<PathBuf> {
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
                hosts[index].address().to_string().as_ref(),
                "--out".as_ref(),
                out.as_os_str(),
            ])?;
            Ok(out)
        };
        let identities = [issue(0)?, issue(1)?];
        let mut site = Self {
            nodes: None,
            hosts,
            identities,
            dir,
            criu: criu.to_owned(),
            mtu,
        };
        if with_nodes {
            site.nodes = Some(Nodes::start(&site, region_mib)?);
        }
        Ok(site)
    }

    /// Where the process runs.
    pub(super) fn here(&self) -> &Host {
        &self.hosts[0]
    }

    /// Where its memory is brought.
    pub(super) fn there(&self) -> &Host {
        &self.hosts[1]
    }

    /// Directory of the certificate and key of host 0 or 1.
    pub(super) fn identity(&self, index: usize) -> &Path {
        &self.identities[index]
    }

    /// Name in that certificate.
    pub(super) fn name(&self, index: usize) -> String {
        name(index)
    }

    pub(super) fn criu(&self) -> &Path {
        &self.criu
    }

    /// What a UDP datagram can hold: the headers of IPv4 and UDP are 28 bytes.
    pub(super) fn packet_bytes(&self) -> u32 {
        self.mtu - 28
    }

    pub(super) fn nodes(&self) -> Result<&Nodes> {
        self.nodes.as_ref().context("there are no nodes")
    }

    /// For the files of one sample, on tmpfs.
    pub(super) fn work_dir(&self) -> Result<TempDir> {
        tempfile::tempdir_in(self.dir.path()).context("create a work directory")
    }

    /// Ends the nodes in peace.
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
        let task = ui::Task::begin("start a registry and two nodes");
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
        let daemons = [start(0)?, start(1)?];
        let mut nodes = Self {
            daemons,
            etcd,
            empty: [0; 2],
        };
        nodes.settle()?;
        nodes.empty = nodes.used()?;
        task.done("at rest");
        Ok(nodes)
    }

    /// Waits until neither daemon has anything to do: they map their regions in the background, and on two processors
    /// that would be measured too.
    fn settle(&self) -> Result<()> {
        /// Less than this of a look's time is rest: leases are renewed all the time.
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
                    .zip(used)
                    .all(|(&before, now)| now.saturating_sub(before) <= REST);
                Ok(at_rest.then_some(()))
            },
        )
    }

    /// Processor time of both so far.
    pub(super) fn cpu_time(&self) -> Result<[Duration; 2]> {
        let [here, there] = &self.daemons;
        Ok([
            process::cpu_time(here.pid())?,
            process::cpu_time(there.pid())?,
        ])
    }

    /// Processor time of the registry so far.
    pub(super) fn registry_cpu_time(&self) -> Result<Duration> {
        process::cpu_time(self.etcd.pid(0)?)
    }

    fn used(&self) -> Result<[u64; 2]> {
        let used = |daemon: &Daemon| -> Result<u64> {
            let status = daemon.json(&["status"])?;
            let capacity = rig::number(&status, "capacity_bytes");
            Ok(capacity.saturating_sub(rig::number(&status, "free_bytes")))
        };
        let [here, there] = &self.daemons;
        Ok([used(here)?, used(there)?])
    }

    /// Removes a job, and waits until both regions are as empty as before, so that they never fill.
    pub(super) fn remove(&self, job: &str) -> Result<()> {
        self.daemons[0].run(&["rm", job, "--all"])?;
        process::wait_for("the freeing of both copies", FREED, || {
            std::thread::sleep(Duration::from_millis(50));
            let used = self.used()?;
            // A little is kept of what is gone, such as a generation's number.
            let is_free = |(used, empty): (u64, &u64)| used <= empty + (SPARE_MIB << 20) / 8;
            Ok(used.into_iter().zip(&self.empty).all(is_free).then_some(()))
        })
    }

    /// What both nodes said last.
    pub(super) fn logs(&self) -> String {
        let log = |(index, daemon): (usize, &Daemon)| {
            format!("{}:\n{}\n", name(index), daemon::tail(&daemon.log()))
        };
        self.daemons.iter().enumerate().map(log).collect()
    }
}

fn name(index: usize) -> String {
    format!("n{index}")
}

/// What a program's command begins with, to run on `host`.
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
