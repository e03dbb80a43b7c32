//! The compared methods of bringing a process's memory to another host, and their measurements.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use permafrost_tests::daemon;
use permafrost_tests::net::{Host, Sent};
use permafrost_tests::workload::Workload;
use permafrost_tests::{criu, process};

use super::child::{self, Running};
use super::site::{self, Site};
use crate::rig::{self, Interrupt};

/// Time limit of a sample: only one that hangs takes longer.
const LIMIT: Duration = Duration::from_secs(300);
/// Port of `criu page-server`; each host has all ports to itself.
const PAGE_SERVER_PORT: &str = "7119";
/// Port of the receiver of the bare pair.
const BARE_PORT: u16 = 7120;

/// Compared method of replication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Contender {
    /// `criu dump --page-server` to `criu page-server`
    PageServer,
    /// `criu dump --page-server` to `criu page-server`, with --tls
    PageServerTls,
    /// `permafrost dump`, acknowledged by two nodes
    Permafrost,
    /// Bytes on one stream of a quinn pair
    BareQuic,
}

impl std::fmt::Display for Contender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::PageServer => "page-server",
            Self::PageServerTls => "page-server --tls",
            Self::Permafrost => "permafrost, 2 copies",
            Self::BareQuic => "bare QUIC",
        })
    }
}

impl Contender {
    pub(super) const ALL: [Self; 4] = [
        Self::PageServer,
        Self::PageServerTls,
        Self::Permafrost,
        Self::BareQuic,
    ];
}

/// Measurements of one dump, or of one transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// Time for which the task was frozen, as CRIU counts it; 0 if there is no task.
    pub(super) frozen_ms: f64,
    /// Duration of the dump command; for the bare pair, of sending.
    pub(super) wall_ms: f64,
    /// Bytes sent by the host of the task.
    pub(super) forth_bytes: u64,
    /// Bytes sent by the other host.
    pub(super) back_bytes: u64,
    /// Processor time on the host of the task: CRIU, `permafrost` and that node; for the bare pair the sender.
    pub(super) here_cpu_s: f64,
    /// Processor time on the other host: the receiver of the pages.
    pub(super) there_cpu_s: f64,
    /// Processor time of the registry, which belongs to neither host.
    pub(super) registry_cpu_s: f64,
}

impl std::fmt::Display for Sample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.frozen_ms > 0.0 {
            write!(
                f,
                "frozen {:.0} ms, dump {:.0} ms",
                self.frozen_ms, self.wall_ms
            )
        } else {
            write!(f, "{:.0} ms", self.wall_ms)
        }
    }
}

/// Dumps `task`. With `restore`, also restores it from the copy on the other host.
///
/// # Errors
/// Fails with the log of whoever fails.
pub(super) fn dump(
    contender: Contender,
    site: &Site,
    work: &Path,
    task: &mut Workload,
    restore: bool,
    interrupt: &Interrupt,
) -> Result<Sample> {
    match contender {
        Contender::PageServer => page_server(site, work, task, false, restore, interrupt),
        Contender::PageServerTls => page_server(site, work, task, true, restore, interrupt),
        Contender::Permafrost => permafrost(site, work, task, restore, interrupt)
            .with_context(|| site.nodes().map(site::Nodes::logs).unwrap_or_default()),
        Contender::BareQuic => bail!("the bare pair dumps nothing"),
    }
}

fn page_server(
    site: &Site,
    work: &Path,
    task: &mut Workload,
    tls: bool,
    restore: bool,
    interrupt: &Interrupt,
) -> Result<Sample> {
    // The page server's and the dump's: the same, so that a restore finds all images in one.
    let images = work.join("images");
    std::fs::create_dir(&images).context("create an images directory")?;
    let address = site.there().address().to_string();
    let criu_at = |host: &Host, action: &str, identity: usize| {
        let mut command = host.command(site.criu());
        command.arg(action);
        command.args(["--address", &address, "--port", PAGE_SERVER_PORT, "-D"]);
        command.arg(&images);
        if tls {
            // Names are not compared: it is the encryption that is measured.
            command.args(["--tls", "--tls-no-cn-verify"]);
            for (option, file) in [
                ("--tls-cacert", "ca.pem"),
                ("--tls-cert", "cert.pem"),
                ("--tls-key", "key.pem"),
            ] {
                command.arg(option).arg(site.identity(identity).join(file));
            }
        }
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let mut server = criu_at(site.there(), "page-server", 1);
    // It writes a byte to the status descriptor when it is ready.
    server
        .args(["--status-fd", "1", "-o", "page-server.log"])
        .stdout(Stdio::piped());
    let server_log = images.join("page-server.log");
    let mut server = Running::start(&mut server)?;
    let mut ready = [0];
    let heard = server
        .child()
        .stdout
        .take()
        .context("take its stdout")?
        .read(&mut ready)
        .context("hear from criu page-server")?;
    if heard == 0 {
        bail!(
            "criu page-server does not start:\n{}",
            daemon::tail(&server_log)
        );
    }

    let mut command = criu_at(site.here(), "dump", 0);
    command.args([
        "-t",
        &task.pid().to_string(),
        "-o",
        "dump.log",
        "--page-server",
    ]);
    let wire = Wire::begin(site)?;
    let cpu = process::ended_children_cpu_time()?;
    let start = Instant::now();
    let status = Running::start(&mut command)?.wait(LIMIT, interrupt)?;
    let wall_ms = ms(start.elapsed());
    let here = process::ended_children_cpu_time()?;
    if !status.success() {
        bail!(
            "criu dump fails ({status}):\n{}\npage server:\n{}",
            daemon::tail(&images.join("dump.log")),
            daemon::tail(&server_log)
        );
    }
    let status = server.wait(LIMIT, interrupt)?;
    let there = process::ended_children_cpu_time()?;
    if !status.success() {
        bail!(
            "criu page-server fails ({status}):\n{}",
            daemon::tail(&server_log)
        );
    }
    let (forth, back) = wire.end(site)?;
    let stats = criu::dump_stats(&images)?;
    task.wait_until_gone()?;
    if restore {
        let mut command = site.here().command(site.criu());
        command
            .args(["restore", "-d", "-o", "restore.log", "-D"])
            .arg(&images)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let status = Running::start(&mut command)?.wait(LIMIT, interrupt)?;
        if !status.success() {
            bail!(
                "criu restore fails ({status}):\n{}",
                daemon::tail(&images.join("restore.log"))
            );
        }
    }
    Ok(Sample {
        frozen_ms: ms(Duration::from_micros(stats.frozen_time.into())),
        wall_ms,
        forth_bytes: forth.bytes,
        back_bytes: back.bytes,
        here_cpu_s: here.saturating_sub(cpu).as_secs_f64(),
        there_cpu_s: there.saturating_sub(here).as_secs_f64(),
        registry_cpu_s: 0.0,
    })
}

/// Dumps with a fresh job each time, so that no page is found in a parent.
fn permafrost(
    site: &Site,
    work: &Path,
    task: &mut Workload,
    restore: bool,
    interrupt: &Interrupt,
) -> Result<Sample> {
    let nodes = site.nodes()?;
    let (here, there) = (&nodes.daemons[0], &nodes.daemons[1]);
    let job = work
        .file_name()
        .map(|name| name.to_string_lossy().replace('.', "bench"))
        .context("a work directory without a name")?;
    let mut command = here.command()?;
    command.args(["--json", "dump", "--pid", &task.pid().to_string()]);
    command.args(["--job", &job]);
    let wire = Wire::begin(site)?;
    let (daemons, registry) = (nodes.cpu_time()?, nodes.registry_cpu_time()?);
    let children = process::ended_children_cpu_time()?;
    let start = Instant::now();
    let output = child::output(&mut command, LIMIT, interrupt)?;
    let wall_ms = ms(start.elapsed());
    // The command, and CRIU, which it has waited for.
    let children = process::ended_children_cpu_time()?.saturating_sub(children);
    let spent = |after: Duration, before: Duration| after.saturating_sub(before).as_secs_f64();
    let after = nodes.cpu_time()?;
    let registry_cpu_s = spent(nodes.registry_cpu_time()?, registry);
    let (forth, back) = wire.end(site)?;
    let said: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("parse what permafrost dump says")?;
    nodes.check_both_hold_it()?;
    task.wait_until_gone()?;
    if restore {
        // From the copy of the other node, on the other host.
        there.run(&["restore", &job])?;
    }
    nodes.remove(&job)?;
    Ok(Sample {
        frozen_ms: ms(Duration::from_micros(rig::number(&said, "frozen_time"))),
        wall_ms,
        forth_bytes: forth.bytes,
        back_bytes: back.bytes,
        here_cpu_s: children.as_secs_f64() + spent(after[0], daemons[0]),
        there_cpu_s: spent(after[1], daemons[1]),
        registry_cpu_s,
    })
}

/// Transfers as many bytes as the process has from one end to the other, through nothing but quinn.
///
/// # Errors
/// Fails with what either end says.
pub(super) fn bare_quic(site: &Site, size_mib: u64, interrupt: &Interrupt) -> Result<Sample> {
    let program = permafrost_tests::binaries::path("permafrost-bare-quic")?;
    let address = format!("{}:{BARE_PORT}", site.there().address());
    let end = |host: &Host, action: &str, identity: usize| -> Command {
        let mut command = host.command(&program);
        command.arg(action).arg("--identity");
        command.arg(site.identity(identity));
        command.args(["--packet-bytes", &site.packet_bytes().to_string()]);
        command
    };
    let mut receive = end(site.there(), "receive", 1);
    receive.args(["--listen", &address]).stdout(Stdio::piped());
    let mut receiver = Running::start(&mut receive)?;
    let stdout = receiver.child().stdout.take().context("take its stdout")?;
    let mut served = String::new();
    BufReader::new(stdout)
        .read_line(&mut served)
        .context("hear from the receiver")?;
    if served.is_empty() {
        bail!("permafrost-bare-quic does not listen");
    }
    let mut send = end(site.here(), "send", 0);
    send.args(["--to", &address, "--name", &site::name(1)]);
    send.args(["--bytes", &(size_mib << 20).to_string()]);
    let wire = Wire::begin(site)?;
    let cpu = process::ended_children_cpu_time()?;
    let output = child::output(&mut send, LIMIT, interrupt)?;
    let here = process::ended_children_cpu_time()?;
    let status = receiver.wait(LIMIT, interrupt)?;
    let there = process::ended_children_cpu_time()?;
    if !status.success() {
        bail!("permafrost-bare-quic fails ({status})");
    }
    let (forth, back) = wire.end(site)?;
    Ok(Sample {
        wall_ms: seconds(&output.stdout)? * 1e3,
        forth_bytes: forth.bytes,
        back_bytes: back.bytes,
        here_cpu_s: here.saturating_sub(cpu).as_secs_f64(),
        there_cpu_s: there.saturating_sub(here).as_secs_f64(),
        ..Sample::default()
    })
}

/// Parses the one number that the sender prints.
fn seconds(said: &[u8]) -> Result<f64> {
    let said = String::from_utf8_lossy(said);
    said.trim()
        .parse()
        .with_context(|| format!("parse the seconds of permafrost-bare-quic: {said:?}"))
}

/// Traffic that each of the two hosts had sent before a sample.
struct Wire([Sent; 2]);

impl Wire {
    fn begin(site: &Site) -> Result<Self> {
        Ok(Self([site.here().sent()?, site.there().sent()?]))
    }

    /// Returns the traffic that each host has sent since the beginning of the sample.
    fn end(&self, site: &Site) -> Result<(Sent, Sent)> {
        let since = |now: Sent, before: Sent| Sent {
            bytes: now.bytes.saturating_sub(before.bytes),
            packets: now.packets.saturating_sub(before.packets),
        };
        let [here, there] = self.0;
        Ok((
            since(site.here().sent()?, here),
            since(site.there().sent()?, there),
        ))
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn the_sender_says_seconds() {
        assert!((seconds(b"1.25\n").unwrap() - 1.25).abs() < 1e-9);
        assert!(seconds(b"").is_err());
    }

    #[test]
    fn every_contender_can_be_named() {
        assert_eq!(Contender::value_variants(), Contender::ALL);
    }
}
