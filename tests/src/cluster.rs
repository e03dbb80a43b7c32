//! Nodes and etcd members, each on a host of its own.
//!
//! The hosts are network namespaces: first the nodes', then the members', then those of whoever else is there.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::daemon::{Daemon, Options};
use crate::etcd::{self, EtcdCluster, Place};
use crate::net::{self, Host, Hosts};
use crate::{binaries, process};

/// UDP port on which every node serves its peers.
const PEERS_PORT: u16 = 7118;

/// Size and options of a cluster.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Number of nodes. Default 3.
    pub nodes: usize,
    /// Number of members of etcd. Default 3.
    pub members: usize,
    /// Number of further hosts, for agents and tasks. Default 0.
    pub others: usize,
    /// Size of each node's region, MiB. Default 256 MiB.
    pub region_mib: u64,
    /// Further arguments of every node. Default none.
    pub extra: Vec<String>,
    /// MTU of the hosts' links, bytes. Default 1500.
    pub mtu: u32,
    /// Changes the options of single nodes; it gets the number of the node. Default: changes nothing.
    pub adjust: fn(usize, &mut Options),
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            nodes: 3,
            members: 3,
            others: 0,
            region_mib: 256,
            extra: Vec::new(),
            mtu: 1500,
            adjust: |_, _| {},
        }
    }
}

/// A running cluster. When it is dropped, its processes are killed, and hosts and data removed.
pub struct Cluster {
    // In the order in which they are taken down.
    nodes: Vec<Option<Daemon>>,
    /// The etcd cluster that holds the registry.
    pub etcd: EtcdCluster,
    hosts: Hosts,
    setup: Setup,
    dir: TempDir,
}

impl Cluster {
    /// Starts everything and waits until every node sees all others. Returns `None` after saying loudly that `test`
    /// was skipped, if there is no etcd or no network namespace.
    ///
    /// # Errors
    /// Something does not start.
    pub fn for_test(test: &str, setup: Setup) -> Result<Option<Self>> {
        let Some(etcd) = etcd::for_test(test) else {
            return Ok(None);
        };
        let count = setup.nodes + setup.members + setup.others;
        let Some(hosts) = net::for_test(test, count, setup.mtu) else {
            return Ok(None);
        };
        Self::start(&etcd, hosts, setup).map(Some)
    }

    fn start(etcd: &Path, hosts: Hosts, setup: Setup) -> Result<Self> {
        let dir = tempfile::tempdir().context("make a directory")?;
        let members = setup.nodes..setup.nodes + setup.members;
        let places = members.map(|index| Place {
            host: hosts[index].address().to_string(),
            client_port: 2379,
            peer_port: 2380,
            prefix: hosts[index].prefix().to_vec(),
        });
        let etcd = EtcdCluster::start_at(etcd, places.collect())?;
        let ready = std::thread::scope(|scope| {
            // The members are reached from a host only.
            let waiting = scope.spawn(|| hosts[0].run(|| etcd.wait_ready()));
            waiting
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        ready?;
        let ca = dir.path().join("ca");
        pki(&["init", "--dir", text(&ca)])?;
        let mut cluster = Self {
            nodes: Vec::new(),
            etcd,
            hosts,
            setup,
            dir,
        };
        for index in 0..cluster.setup.nodes {
            cluster.issue(&name(index), "node", &[])?;
            let node = cluster.start_node(index)?;
            cluster.nodes.push(Some(node));
        }
        cluster.wait_whole(cluster.setup.nodes)?;
        Ok(cluster)
    }

    /// Issues a certificate into a directory of its own.
    ///
    /// # Errors
    /// It is not issued.
    pub fn issue(&self, name: &str, role: &str, extra: &[&str]) -> Result<PathBuf> {
        let out = self.dir.path().join(format!("identity-{name}"));
        let ca = self.authority();
        let mut arguments = vec!["issue", "--dir", text(&ca), "--name", name, "--role", role];
        arguments.extend(["--out", text(&out)]);
        arguments.extend(extra);
        pki(&arguments)?;
        Ok(out)
    }

    /// Stops a node as an operator does, and starts it with other options, with the data it had.
    ///
    /// # Errors
    /// It does not end with success, or does not start: then it does not run.
    pub fn replace(&mut self, index: usize, change: impl Fn(&mut Options)) -> Result<()> {
        self.stop(index)?;
        self.nodes[index] = Some(self.start_as(index, change)?);
        Ok(())
    }

    fn start_node(&self, index: usize) -> Result<Daemon> {
        self.start_as(index, |options| (self.setup.adjust)(index, options))
    }

    fn start_as(&self, index: usize, change: impl Fn(&mut Options)) -> Result<Daemon> {
        let mut options = self.node_options(index, &name(index));
        change(&mut options);
        Daemon::start(&self.path(&name(index))?, &options)
    }

    /// Returns the options that start a node on this host with the certificate issued for `name`.
    #[must_use]
    pub fn node_options(&self, host: usize, name: &str) -> Options {
        let host = &self.hosts[host];
        let identity = self.dir.path().join(format!("identity-{name}"));
        let mut extra = vec![
            "--listen-peers".to_owned(),
            format!("{}:{PEERS_PORT}", host.address()),
            "--identity".to_owned(),
            text(&identity).to_owned(),
            // Where the scratch directory is in memory.
            "--count-volatile-copies".to_owned(),
            "--catalog".to_owned(),
            self.etcd.url(),
        ];
        extra.extend(self.setup.extra.iter().cloned());
        Options {
            region_mib: self.setup.region_mib,
            extra,
            prefix: host.prefix().to_vec(),
            ..Options::default()
        }
    }

    /// Returns a running node.
    ///
    /// # Panics
    /// It does not.
    #[must_use]
    pub fn node(&self, index: usize) -> &Daemon {
        self.nodes[index].as_ref().expect("a node that runs")
    }

    /// Returns the host of a node, of a member (after the nodes) or one of the further hosts (after the members).
    #[must_use]
    pub fn host(&self, index: usize) -> &Host {
        &self.hosts[index]
    }

    /// Returns the hosts.
    #[must_use]
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Returns true if the node runs.
    #[must_use]
    pub fn runs(&self, index: usize) -> bool {
        self.nodes[index].is_some()
    }

    /// Kills a node with `kill -9`. Does nothing if it does not run.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn kill(&mut self, index: usize) -> Result<()> {
        self.nodes[index].take().map_or(Ok(()), Daemon::kill)
    }

    /// Stops a node as an operator does.
    ///
    /// # Errors
    /// It does not end with success.
    pub fn stop(&mut self, index: usize) -> Result<()> {
        if let Some(node) = self.nodes[index].take() {
            let status = node.stop()?;
            if !status.success() {
                bail!("{} ended with {status}", name(index));
            }
        }
        Ok(())
    }

    /// Starts a stopped node, with the data it had.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&mut self, index: usize) -> Result<()> {
        if self.nodes[index].is_none() {
            self.nodes[index] = Some(self.start_node(index)?);
        }
        Ok(())
    }

    /// Removes a node's data, like a lost disk. The node must not run.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn lose_disk(&self, index: usize) -> Result<()> {
        let data = self.path(&name(index))?.join("data");
        std::fs::remove_dir_all(data).context("remove a node's data")
    }

    /// Starts an agent on a host. The agent knows all nodes.
    ///
    /// # Errors
    /// It does not start.
    pub fn agent(
        &self,
        agent: &str,
        host: usize,
        namespace: &str,
        extra: &[&str],
    ) -> Result<Daemon> {
        let identity = self.issue(agent, "agent", &["--namespace", namespace])?;
        self.agent_as(agent, host, &identity, extra)
    }

    /// Starts an agent on a host, like [`Self::agent`], with an existing certificate.
    ///
    /// # Errors
    /// It does not start.
    pub fn agent_as(
        &self,
        agent: &str,
        host: usize,
        identity: &Path,
        extra: &[&str],
    ) -> Result<Daemon> {
        let mut arguments = vec!["--identity".to_owned(), text(identity).to_owned()];
        for index in 0..self.setup.nodes {
            let address = self.hosts[index].address();
            arguments.push(format!("--node={}={address}:{PEERS_PORT}", name(index)));
        }
        arguments.extend(extra.iter().map(|&argument| argument.to_owned()));
        Daemon::agent_at(&self.path(agent)?, &arguments, &self.hosts[host].prefix())
    }

    /// Returns the directory of the authority that all nodes trust.
    #[must_use]
    pub fn authority(&self) -> PathBuf {
        self.dir.path().join("ca")
    }

    /// Makes a directory in the cluster's own and returns its path.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        let path = self.dir.path().join(name);
        std::fs::create_dir_all(&path).context("make a directory")?;
        Ok(path)
    }

    /// Returns the path of a node's region.
    #[must_use]
    pub fn region(&self, index: usize) -> PathBuf {
        self.dir.path().join(name(index)).join("data/region")
    }

    /// Waits until the first running node sees `live` nodes.
    ///
    /// # Errors
    /// It does not within a minute.
    pub fn wait_whole(&self, live: usize) -> Result<()> {
        let asked = self.nodes.iter().flatten().next();
        Self::wait_seen_by(asked.context("no node runs")?, live)
    }

    /// Waits until every node that runs sees so many nodes alive.
    ///
    /// # Errors
    /// They do not within a minute.
    pub fn wait_whole_everywhere(&self, live: usize) -> Result<()> {
        (self.nodes.iter().flatten()).try_for_each(|asked| Self::wait_seen_by(asked, live))
    }

    fn wait_seen_by(asked: &Daemon, live: usize) -> Result<()> {
        process::wait_for(
            "the nodes to see each other",
            Duration::from_secs(60),
            || {
                let listed = asked.json_patiently(&["node", "ls"])?;
                let nodes = listed["nodes"].as_array().cloned().unwrap_or_default();
                let up = nodes.iter().filter(|node| node["live"] == true).count();
                Ok((up == live).then_some(()))
            },
        )
    }
}

/// Returns the name of a node.
#[must_use]
pub fn name(index: usize) -> String {
    format!("node-{index}")
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// Runs `permafrost pki`.
///
/// # Errors
/// It cannot be run, or fails: with its words.
pub fn pki(arguments: &[&str]) -> Result<()> {
    let output = Command::new(binaries::path("permafrost")?)
        .arg("pki")
        .args(arguments)
        .output()
        .context("run permafrost pki")?;
    if !output.status.success() {
        bail!(
            "permafrost pki {arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
