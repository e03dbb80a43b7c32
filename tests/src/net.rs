//! Hosts of their own on one machine: network namespaces joined by a switch, and ways to cut between them.
//!
//! ```text
//!  host 0: eth0 ──veth── port0 ┐
//!  host 1: eth0 ──veth── port1 ┼ bridge, in a namespace of its own
//!  host 2: eth0 ──veth── port2 ┘
//! ```
//!
//! A host differs from the machine in its network only: processes, files and UNIX sockets are everybody's. Neighbours
//! and the switch's table are written down once and never learnt, so that nothing but what hosts send to each other
//! is on the wire, and a cut in one direction is one wrong neighbour: packets go to an address that no port has, and
//! the switch drops them without a word, as a broken path does. That needs no packet filter of the kernel; a blackhole
//! route would not do, as it tells the sender.

use std::ffi::OsStr;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::LinkNameSpaceType;

/// Directory in which ip-netns(8) keeps namespaces by name.
const NAMES: &str = "/run/netns";
/// Prefix of our namespaces' names; the process id follows.
const PREFIX: &str = "permafrost-";
/// A locally administered MAC address that no port has.
const NOBODY: &str = "02:00:00:00:00:ff";
/// Most hosts: the switch's ports, and a host's last address byte, are one byte in an Ethernet address.
const MOST_HOSTS: usize = 200;

/// Hosts joined by a switch. When this is dropped, their names are removed, and processes that still run in them
/// have no network.
#[derive(Debug)]
pub struct Hosts {
    hosts: Vec<Host>,
    switch: String,
}

/// One of the hosts.
#[derive(Debug)]
pub struct Host {
    index: usize,
    namespace: String,
    switch: String,
    address: Ipv4Addr,
}

/// Traffic that a host has sent, counted as on a wire: with the Ethernet, IP and TCP or UDP headers of each packet,
/// even where the kernel hands several packets on as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes, headers included.
    pub bytes: u64,
    /// Number of packets of at most an MTU.
    pub packets: u64,
}

impl Hosts {
    /// Creates `count` hosts whose links carry packets of `mtu` bytes. Their addresses are one /24 of 10.0.0.0/8.
    ///
    /// # Errors
    /// Fails where this user may not make network namespaces, or ip(8), tc(8) or bridge(8) is not there.
    pub fn create(count: usize, mtu: u32) -> Result<Self> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        ensure!(count <= MOST_HOSTS, "more than {MOST_HOSTS} hosts");
        clear_leftovers();
        let pid = std::process::id();
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{pid}-{serial}", pid_namespace()?);
        // Networks of other runs are out of reach; different ones are easier to tell apart in a log.
        let [.., x, y] = pid.to_be_bytes();
        let switch = format!("{name}-switch");
        let mut hosts = Self {
            hosts: Vec::new(),
            switch: switch.clone(),
        };
        // From here on a failure leaves nothing behind: `hosts` is dropped.
        ip(["netns", "add", &switch])?;
        for index in 0..count {
            let namespace = format!("{name}-{index}");
            hosts.hosts.push(Host {
                index,
                namespace: namespace.clone(),
                switch: switch.clone(),
                address: Ipv4Addr::new(10, x, y, last_byte(index)),
            });
            ip(["netns", "add", &namespace])?;
        }
        hosts.wire(mtu)?;
        Ok(hosts)
    }

    /// Connects the hosts, and sets every address on every host.
    fn wire(&self, mtu: u32) -> Result<()> {
        // No addresses of version 6, where the kernel has it: hosts must not send packets by themselves.
        for host in &self.hosts {
            host.run(|| {
                let default = Path::new("/proc/sys/net/ipv6/conf/default/disable_ipv6");
                if default.exists() {
                    std::fs::write(default, "1").context("turn IPv6 off")?;
                }
                Ok(())
            })?;
        }
        let mut switch = "link add bridge type bridge\n".to_owned();
        for host in &self.hosts {
            let (index, mac) = (host.index, mac(host.index));
            switch += &format!(
                "link add port{index} mtu {mtu} type veth peer name eth0 address {mac} mtu {mtu} netns {}\n\
                 link set dev port{index} master bridge\n\
                 link set dev port{index} up\n",
                host.namespace
            );
        }
        switch += "link set dev bridge up\n";
        batch("ip", &self.switch, &switch)?;
        // What the switch does not know it drops, instead of sending it to everybody.
        let mut table = String::new();
        for host in &self.hosts {
            let (index, mac) = (host.index, mac(host.index));
            table += &format!(
                "link set dev port{index} flood off mcast_flood off bcast_flood off learning off\n\
                 fdb replace {mac} dev port{index} master static\n"
            );
        }
        batch("bridge", &self.switch, &table)?;
        for host in &self.hosts {
            let mut own = format!(
                "link set dev lo up\nlink set dev eth0 up\naddr add {}/24 dev eth0\n",
                host.address
            );
            for other in self.others(host) {
                own += &neighbour(other, &mac(other.index));
            }
            batch("ip", &host.namespace, &own)?;
            // Virtual links have no queue, and only a queue counts packets as a wire would.
            run(
                "tc",
                [
                    "-n",
                    &host.namespace,
                    "qdisc",
                    "replace",
                    "dev",
                    "eth0",
                    "root",
                    "pfifo",
                    "limit",
                    "10000",
                ],
            )?;
        }
        Ok(())
    }

    fn others(&self, host: &Host) -> impl Iterator<Item = &Host> {
        let index = host.index;
        self.hosts.iter().filter(move |other| other.index != index)
    }

    /// Returns all hosts.
    pub fn iter(&self) -> impl Iterator<Item = &Host> {
        self.hosts.iter()
    }

    /// Undoes every cut.
    ///
    /// # Errors
    /// Fails when ip(8) does.
    pub fn heal(&self) -> Result<()> {
        for host in &self.hosts {
            host.heal()?;
            for other in self.others(host) {
                host.heal_to(other)?;
            }
        }
        Ok(())
    }
}

impl std::ops::Index<usize> for Hosts {
    type Output = Host;

    fn index(&self, index: usize) -> &Host {
        &self.hosts[index]
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in self
            .hosts
            .iter()
            .map(|host| &host.namespace)
            .chain([&self.switch])
        {
            // One that was not made yet is not there.
            if Path::new(NAMES).join(name).exists() {
                let _ = ip(["netns", "del", name]);
            }
        }
    }
}

impl Host {
    /// Returns the host's address, which never changes.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Returns the name of its network namespace, as ip-netns(8) knows it.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns a command that runs a program on this host. It becomes the very process that is started: `Child::id`
    /// is its pid. Not `ip netns exec`, which also makes a mount namespace: CRIU would then dump that as well.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let [first, rest @ ..] = self.prefix();
        let mut command = Command::new(first);
        command.args(rest).arg(program);
        command
    }

    /// Returns the words with which such a command begins.
    #[must_use]
    pub fn prefix(&self) -> [String; 3] {
        let net = format!("--net={}", self.path().display());
        ["nsenter".to_owned(), net, "--".to_owned()]
    }

    /// Runs `task` on this host, in a thread: sockets it makes belong here, and so do processes it starts, for good.
    /// Other threads that it wakes, such as those of a runtime made outside, are where they were.
    ///
    /// # Errors
    /// Fails when the host cannot be entered, or `task` does.
    ///
    /// # Panics
    /// When `task` does.
    pub fn run<T: Send>(&self, task: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let net = std::fs::File::open(self.path())
                    .with_context(|| format!("open {}", self.path().display()))?;
                rustix::thread::move_into_link_name_space(
                    net.as_fd(),
                    Some(LinkNameSpaceType::Network),
                )
                .with_context(|| format!("enter {}", self.namespace))?;
                task()
            });
            inside
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Cuts the host off: nothing enters and nothing leaves, and the host sees that its link is down.
    ///
    /// # Errors
    /// Fails when ip(8) does.
    pub fn cut(&self) -> Result<()> {
        self.port("down")
    }

    /// Undoes [`Self::cut`]. Cuts in one direction stay.
    ///
    /// # Errors
    /// Fails when ip(8) does.
    pub fn heal(&self) -> Result<()> {
        self.port("up")
    }

    fn port(&self, state: &str) -> Result<()> {
        let port = format!("port{}", self.index);
        ip(["-n", &self.switch, "link", "set", "dev", &port, state])
    }

    /// Drops all packets from this host to `other` from now on, without an error for either; packets from `other`
    /// arrive.
    ///
    /// # Errors
    /// Fails when ip(8) does.
    pub fn cut_to(&self, other: &Host) -> Result<()> {
        batch("ip", &self.namespace, &neighbour(other, NOBODY))
    }

    /// Undoes [`Self::cut_to`].
    ///
    /// # Errors
    /// Fails when ip(8) does.
    pub fn heal_to(&self, other: &Host) -> Result<()> {
        batch("ip", &self.namespace, &neighbour(other, &mac(other.index)))
    }

    /// Limits what this host sends to `mbit` (10^6 bits) a second from now on, to all others together. What it
    /// receives is not slowed.
    ///
    /// # Errors
    /// Fails when tc(8) does.
    pub fn limit(&self, mbit: u32) -> Result<()> {
        let rate = format!("{mbit}mbit");
        // A burst holds the largest bundle of packets that the kernel hands on at once.
        run(
            "tc",
            [
                "-n",
                &self.namespace,
                "qdisc",
                "replace",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                &rate,
                "burst",
                "128k",
                "latency",
                "50ms",
            ],
        )
    }

    /// Returns the traffic that this host has sent to the others since it was made, or since [`Self::limit`].
    ///
    /// # Errors
    /// Fails when tc(8) does.
    pub fn sent(&self) -> Result<Sent> {
        let said = output(Command::new("tc").args([
            "-s",
            "-j",
            "-n",
            &self.namespace,
            "qdisc",
            "show",
            "dev",
            "eth0",
        ]))?;
        let queues: serde_json::Value =
            serde_json::from_slice(&said).context("parse what tc says")?;
        let number = |key: &str| {
            queues[0][key]
                .as_u64()
                .with_context(|| format!("tc says no {key}: {queues}"))
        };
        Ok(Sent {
            bytes: number("bytes")?,
            packets: number("packets")?,
        })
    }

    fn path(&self) -> PathBuf {
        Path::new(NAMES).join(&self.namespace)
    }
}

/// Makes hosts for a test, or returns `None` after saying loudly that the test was skipped because hosts cannot be
/// made here.
///
/// # Panics
/// Where [`REQUIRE_CRIU`](crate::criu::REQUIRE_CRIU) is set to anything but 0: there a skipped test is a failed one.
#[must_use]
pub fn for_test(test: &str, count: usize, mtu: u32) -> Option<Hosts> {
    match Hosts::create(count, mtu) {
        Ok(hosts) => Some(hosts),
        Err(why) => {
            let required =
                std::env::var_os(crate::criu::REQUIRE_CRIU).is_some_and(|value| value != "0");
            assert!(!required, "{test} needs network namespaces: {why:#}");
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: {test}: no network namespaces: {why:#}"
            );
            None
        }
    }
}

/// Removes the namespaces that killed test processes have left. If another process has the pid by now, they stay
/// until it has ended as well.
fn clear_leftovers() {
    let Ok(entries) = std::fs::read_dir(NAMES) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(pid) = owner(name)
            && !Path::new("/proc").join(pid.to_string()).exists()
        {
            // Another test may have been faster.
            let _ = ip(["netns", "del", name]);
        }
    }
}

/// Returns the number of the pid namespace of this process.
fn pid_namespace() -> Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let namespace = std::fs::metadata("/proc/self/ns/pid").context("look at the pid namespace")?;
    Ok(namespace.ino())
}

/// Returns the process that made a namespace of this name, if it is one of ours.
fn owner(name: &str) -> Option<u32> {
    let mut parts = name.strip_prefix(PREFIX)?.split('-');
    // Pids of another pid namespace say nothing here.
    let pid_namespace = pid_namespace().ok()?;
    if parts.next()?.parse::<u64>() != Ok(pid_namespace) {
        return None;
    }
    parts.next()?.parse().ok()
}

/// Returns the last byte of a host's address: host 0 is x.y.z.1.
fn last_byte(index: usize) -> u8 {
    u8::try_from(index + 1).unwrap_or(u8::MAX)
}

fn mac(index: usize) -> String {
    format!("02:00:00:00:00:{:02x}", last_byte(index))
}

/// Returns a line for ip(8) that sets the MAC address for packets to `other`.
fn neighbour(other: &Host, mac: &str) -> String {
    format!(
        "neigh replace {} lladdr {mac} dev eth0 nud permanent\n",
        other.address
    )
}

fn ip<const N: usize>(arguments: [&str; N]) -> Result<()> {
    run("ip", arguments)
}

fn run<const N: usize>(program: &str, arguments: [&str; N]) -> Result<()> {
    output(Command::new(program).args(arguments)).map(drop)
}

/// Runs all of `lines` with ip(8) or bridge(8) in a namespace.
fn batch(program: &str, namespace: &str, lines: &str) -> Result<()> {
    let mut script = tempfile::NamedTempFile::new().context("create a script")?;
    script
        .write_all(lines.as_bytes())
        .context("write a script")?;
    output(
        Command::new(program)
            .args(["-n", namespace, "-batch"])
            .arg(script.path()),
    )
    .with_context(|| format!("in {namespace}, of\n{lines}"))
    .map(drop)
}

fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {command:?} (package iproute2)"))?;
    if !output.status.success() {
        bail!(
            "{command:?} fails ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_ours_have_an_owner() {
        let ours = pid_namespace().unwrap();
        let of = |namespace: u64, rest: &str| owner(&format!("permafrost-{namespace}-{rest}"));
        assert_eq!(of(ours, "4711-0-switch"), Some(4711));
        assert_eq!(of(ours, "4711-0-2"), Some(4711));
        assert_eq!(of(ours + 1, "4711-0-2"), None);
        assert_eq!(owner("permafrost-prod"), None);
        assert_eq!(owner("4711"), None);
    }
}
