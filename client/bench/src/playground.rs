//! `permafrost playground`: a cluster on this machine, to try things on.
//!
//! The directory has a CA, the data of etcd, and for each node a directory with its certificate, its data, its log and
//! its sockets. All processes end with the command. What the nodes store stays, and the next run goes on with it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;

use clap::Args;
use clap::builder::RangedU64ValueParser;
use permafrost_criu::scratch::is_in_memory;
use permafrost_terminal::context::Context;
use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::table::{Align, Table, facts};
use serde::Serialize;

use super::etcd::{self, Etcd};
use super::tiers::parse_size;
use super::{child, daemon, machine};

/// Help text behind the options of `permafrost playground`.
pub const PLAYGROUND_EXAMPLES: &str = "\
It runs until Ctrl-C, and needs etcd. Each node has its control socket at DIR/NAME/control.sock, for --socket or \
PERMAFROST_SOCKET, and its log at DIR/NAME/log. The next run with the same DIR goes on with what its nodes store. Remove \
DIR when you no longer need its checkpoints. All nodes are on this machine and its disk: keep no checkpoint here that \
matters.

Examples:
    permafrost playground                                      # three nodes, two copies, in ./playground
    permafrost --socket playground/a/control.sock node ls
    permafrost playground /var/tmp/try --nodes 5 --copies 3
";

/// Copies of each checkpoint where none are given.
const COPIES: u8 = 2;

/// Largest number of nodes.
const MOST_NODES: u8 = 9;

/// Size of a new region where none is given, bytes.
const REGION_BYTES: u64 = 1 << 30;

/// Arguments of `permafrost playground`.
#[derive(Debug, Args)]
pub struct PlaygroundArguments {
    /// Directory of the cluster, which is made if it is not there; otherwise empty and of mode 0700, or an earlier run's.
    #[arg(value_name = "DIR", default_value = "playground")]
    directory: PathBuf,
    /// Number of nodes, up to 9. They are named a, b, c and so on.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = RangedU64ValueParser::<u8>::new().range(1..=MOST_NODES.into()))]
    nodes: u8,
    /// Copies of each checkpoint [default: 2, or 1 for one node].
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<u8>::new().range(1..=MOST_NODES.into()))]
    copies: Option<u8>,
    /// Size of the regions of new nodes [default: 1G].
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    region_size: Option<u64>,
    /// permafrostd program [default: the one next to this program, or that of the package].
    #[arg(long, value_name = "PATH")]
    permafrostd: Option<PathBuf>,
}

/// A running playground, which the command prints.
#[derive(Debug, Serialize)]
struct Playground {
    /// Directory of the cluster.
    directory: PathBuf,
    /// URL of the registry.
    registry: String,
    /// Nodes, by name.
    nodes: Vec<PlaygroundNode>,
    /// URL of the page that the first node serves.
    page: String,
    /// Token for that page, which may read.
    token: String,
    /// Certificate of the CA that the page's certificate is from.
    ca: PathBuf,
}

/// A node of a playground.
#[derive(Debug, Serialize)]
struct PlaygroundNode {
    /// Name of the node.
    name: String,
    /// Process id of its permafrostd.
    pid: u32,
    /// Its control socket.
    socket: PathBuf,
    /// Address at which it serves other nodes, `address:port`.
    peers: String,
    /// Path of its log.
    log: PathBuf,
}

/// A process of a playground that has ended by itself, which is printed when it happens.
#[derive(Debug, Serialize)]
struct PlaygroundEnd {
    /// `node NAME`, or `etcd`.
    ended: String,
    /// Exit code or signal.
    status: String,
    /// Path of its log.
    log: PathBuf,
}

/// Processes of a playground. Dropping it ends them, the nodes before their registry.
struct Running {
    nodes: Vec<Node>,
    etcd: Etcd,
}

struct Node {
    name: String,
    child: Child,
    /// Values of the line with which its permafrostd said that it is ready.
    ready: String,
}

impl Running {
    /// Stops the nodes; kills them at a second interrupt.
    fn stop(&mut self, interrupts: &Interrupts) -> Result<(), Failure> {
        let before = interrupts.count();
        let is_impatient = || interrupts.count() > before;
        let mut children: Vec<_> = self.nodes.iter_mut().map(|node| &mut node.child).collect();
        daemon::stop_all(&mut children, &is_impatient)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After an error, which is the one to report.
        let _ = self.stop(&Interrupts::none());
    }
}

/// Runs `permafrost playground`.
///
/// # Errors
/// The failure of the command.
pub fn playground(context: &Context, arguments: &PlaygroundArguments) -> Result<(), Failure> {
    let interrupts = Interrupts::install()?;
    let site = Site::prepare(arguments)?;
    context.remark("starting etcd and the nodes");
    site.remark_what_is_left_out(context, arguments);
    let token = site.new_token(&interrupts)?;
    let mut running = site.start(&interrupts)?;
    context.print(&site.describe(&running, token), human_playground)?;
    context.remark("it runs until Ctrl-C; the next run goes on with what is stored");
    supervise(context, &site, &mut running, &interrupts)?;
    context.remark("stopping the nodes; a second Ctrl-C kills them");
    running.stop(&interrupts)
}

/// Waits for an interrupt, and reports what ends before.
///
/// # Errors
/// No node is left.
fn supervise(
    context: &Context,
    site: &Site,
    running: &mut Running,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let mut has_registry = true;
    while !interrupts.came() {
        let mut ended = Vec::new();
        running.nodes.retain_mut(|node| {
            let Ok(Some(status)) = node.child.try_wait() else {
                return true;
            };
            ended.push(PlaygroundEnd {
                ended: format!("node {}", node.name),
                status: status.to_string(),
                log: site.node(&node.name).join("log"),
            });
            false
        });
        if has_registry && let Some(status) = running.etcd.ended() {
            has_registry = false;
            ended.push(PlaygroundEnd {
                ended: "etcd".to_owned(),
                status: status.to_string(),
                log: site.etcd_directory().join("log"),
            });
        }
        for one in &ended {
            context.print(one, |one| {
                let (ended, status, log) = (&one.ended, &one.status, one.log.display());
                format!(
                    "{ended} has ended ({status}), and the next run brings it back; its log: {log}"
                )
            })?;
        }
        if running.nodes.is_empty() {
            return Err(Failure::new(Code::Unreachable, "all nodes have ended"));
        }
        thread::sleep(daemon::POLL);
    }
    Ok(())
}

/// Directory and programs of a playground.
struct Site {
    directory: PathBuf,
    etcd: PathBuf,
    permafrostd: PathBuf,
    names: Vec<String>,
    copies: u8,
    region_bytes: u64,
    /// Held as long as the playground runs.
    _lock: File,
}

impl Site {
    fn prepare(arguments: &PlaygroundArguments) -> Result<Self, Failure> {
        let nodes = arguments.nodes;
        let copies = arguments.copies.unwrap_or(COPIES.min(nodes));
        if copies > nodes {
            let message = format!("{copies} copies need {copies} nodes, not {nodes}");
            return Err(Failure::new(Code::Invalid, message).hint("give more --nodes"));
        }
        let etcd = etcd::find().map_err(|reason| {
            Failure::new(Code::NotFound, reason)
                .hint("install it (Debian: etcd-server), or name it with PERMAFROST_ETCD")
        })?;
        let permafrostd = permafrostd(arguments.permafrostd.as_deref())?;
        let directory = std::path::absolute(&arguments.directory)
            .map_err(|error| Failure::io("use", &arguments.directory, &error))?;
        let lock = daemon::lock_directory(&directory, "playground")?;
        let site = Self {
            directory,
            etcd,
            permafrostd,
            names: names().take(usize::from(nodes)).collect(),
            copies,
            region_bytes: arguments.region_size.unwrap_or(REGION_BYTES),
            _lock: lock,
        };
        site.check_room()?;
        Ok(site)
    }

    /// Checks that the regions which are not there yet have room.
    fn check_room(&self) -> Result<(), Failure> {
        let is_new = |name: &&String| !self.has_region(name);
        let new = self.names.iter().filter(is_new).count() as u64;
        let wanted_bytes = new.saturating_mul(self.region_bytes);
        let free_bytes = machine::free_bytes(&self.directory);
        if wanted_bytes <= free_bytes {
            return Ok(());
        }
        Err(Failure::new(
            Code::NoSpace,
            format!(
                "{new} regions need {}, and {} has {} free",
                human::bytes(wanted_bytes),
                self.directory.display(),
                human::bytes(free_bytes)
            ),
        )
        .hint("give a smaller --region-size, fewer --nodes, or another directory"))
    }

    fn has_region(&self, name: &str) -> bool {
        self.node(name).join("data/region").exists()
    }

    /// Prints which options and nodes of an earlier run are left out.
    fn remark_what_is_left_out(&self, context: &Context, arguments: &PlaygroundArguments) {
        if arguments.region_size.is_some() && self.names.iter().any(|name| self.has_region(name)) {
            context.remark(
                "--region-size is for new nodes; the regions of the others keep their size",
            );
        }
        let others = names().skip(self.names.len());
        let others: Vec<_> = others.filter(|name| self.has_region(name)).collect();
        if !others.is_empty() {
            let others = others.join(", ");
            context.remark(&format!(
                "the directory also has {others}, which are not started: give more --nodes"
            ));
        }
    }

    fn node(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn etcd_directory(&self) -> PathBuf {
        self.directory.join("etcd")
    }

    fn ca(&self) -> PathBuf {
        self.directory.join("ca")
    }

    fn start(&self, interrupts: &Interrupts) -> Result<Running, Failure> {
        let ca = self.ca();
        if !ca.join("ca.pem").exists() {
            // A run that was killed may have left a part of it.
            let line = ["pki", "init", "--force", "--dir"].map(OsStr::new);
            daemon::offline(interrupts, &[&line[..], &[ca.as_os_str()]].concat())?;
        }
        let etcd = Etcd::start(&self.etcd, &self.etcd_directory(), interrupts)?;
        let nodes = Vec::new();
        let mut running = Running { nodes, etcd };
        // The first node last: who waits for it finds the others.
        for name in self.names.iter().rev() {
            let node = self.start_node(name, &running.etcd.url(), interrupts)?;
            running.nodes.insert(0, node);
        }
        Ok(running)
    }

    fn start_node(
        &self,
        name: &str,
        catalog: &str,
        interrupts: &Interrupts,
    ) -> Result<Node, Failure> {
        let home = self.node(name);
        permafrost_criu::scratch::create_private(&home)
            .map_err(|error| Failure::io("create", &home, &error))?;
        let identity = home.join("identity");
        // Anew at each run: no certificate is valid for ever.
        let line = [
            "pki",
            "issue",
            "--force",
            "--name",
            name,
            "--role",
            "node",
            "--host",
            "127.0.0.1",
            "--dir",
        ];
        let paths = [
            self.ca().into_os_string(),
            "--out".into(),
            identity.clone().into(),
        ];
        let line: Vec<_> = line.map(OsString::from).into_iter().chain(paths).collect();
        daemon::offline(interrupts, &line)?;
        let log_path = home.join("log");
        let log = File::options().create(true).append(true).open(&log_path);
        let mut command = child::guarded(&self.permafrostd)?;
        command
            .args(["--config", "none", "--listen", "none"])
            .arg("--data-dir")
            .arg(home.join("data"))
            .arg("--run-dir")
            .arg(&home)
            .arg("--identity")
            .arg(&identity)
            .args(["--listen-peers", "127.0.0.1:0", "--catalog", catalog])
            .args(["--copies", &self.copies.to_string()])
            .args(["--listen-api", "127.0.0.1:0", "--api-tokens"])
            .arg(self.tokens())
            .stdout(Stdio::piped())
            .stderr(log.map_err(|error| Failure::io("create", &log_path, &error))?);
        if !self.has_region(name) {
            command.args(["--region-size", &self.region_bytes.to_string()]);
        }
        if is_in_memory(&self.directory) {
            // No copy here outlives the machine anyway.
            command.arg("--count-volatile-copies");
        }
        let (child, ready) = daemon::spawn_ready(command, &log_path, interrupts)?;
        let name = name.to_owned();
        Ok(Node { name, child, ready })
    }

    fn tokens(&self) -> PathBuf {
        self.directory.join("tokens")
    }

    /// Makes a token for the page, in place of those of earlier runs.
    fn new_token(&self, interrupts: &Interrupts) -> Result<String, Failure> {
        let path = self.tokens();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Failure::io("remove", &path, &error));
            }
            _ => {}
        }
        let line = [
            "token",
            "new",
            "--name",
            "playground",
            "--scopes",
            "read",
            "--add-to",
        ];
        let line = [&line.map(OsStr::new)[..], &[path.as_os_str()]].concat();
        let made = daemon::offline(interrupts, &line)?;
        Ok(made["token"].as_str().unwrap_or_default().to_owned())
    }

    fn describe(&self, running: &Running, token: String) -> Playground {
        let first = running.nodes.first();
        let api = first.map_or("", |node| value_of(&node.ready, "api"));
        Playground {
            directory: self.directory.clone(),
            registry: running.etcd.url(),
            nodes: running.nodes.iter().map(|node| self.entry(node)).collect(),
            page: format!("https://{api}/ui"),
            token,
            ca: self.ca().join("ca.pem"),
        }
    }

    fn entry(&self, node: &Node) -> PlaygroundNode {
        let home = self.node(&node.name);
        PlaygroundNode {
            name: node.name.clone(),
            pid: node.child.id(),
            socket: home.join("control.sock"),
            peers: value_of(&node.ready, "peers").to_owned(),
            log: home.join("log"),
        }
    }
}

/// Returns the names of nodes: a, b and so on.
fn names() -> impl Iterator<Item = String> {
    (b'a'..b'a' + MOST_NODES).map(|letter| char::from(letter).to_string())
}

/// Returns the value of `KEY=VALUE` in a line; empty if it is not there.
fn value_of<'a>(line: &'a str, key: &str) -> &'a str {
    let mut words = line.split_whitespace();
    words
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
        .unwrap_or_default()
}

/// Returns the permafrostd to start: `named`, or the one next to this program, or that of the package.
fn permafrostd(named: Option<&Path>) -> Result<PathBuf, Failure> {
    let candidates = match named {
        Some(path) => vec![std::path::absolute(path).unwrap_or_else(|_| path.to_owned())],
        None => vec![
            child::own_program()?.with_file_name("permafrostd"),
            PathBuf::from("/usr/sbin/permafrostd"),
        ],
    };
    let found = candidates.iter().find(|path| path.is_file()).cloned();
    found.ok_or_else(|| {
        let paths: Vec<_> = candidates
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        Failure::new(
            Code::NotFound,
            format!("{} is not there", paths.join(", nor ")),
        )
        .hint("install the package permafrostd, or name the program with --permafrostd")
    })
}

fn human_playground(playground: &Playground) -> String {
    let mut table = Table::new([
        ("NODE", Align::Left),
        ("PID", Align::Right),
        ("PEERS", Align::Left),
        ("SOCKET", Align::Left),
    ]);
    for node in &playground.nodes {
        table.row([
            node.name.clone(),
            node.pid.to_string(),
            node.peers.clone(),
            node.socket.display().to_string(),
        ]);
    }
    let page = facts(
        &format!("page {}", playground.page),
        &[
            ("token", playground.token.clone()),
            ("ca", playground.ca.display().to_string()),
        ],
    );
    format!("{}\n{page}", table.render())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_from_the_line_of_a_daemon() {
        let line = "permafrostd ready: control=/r/control.sock page-server=none peers=127.0.0.1:9 metrics=none api=x";
        assert_eq!(value_of(line, "peers"), "127.0.0.1:9");
        assert_eq!(value_of(line, "api"), "x");
        assert_eq!(value_of(line, "page"), "");
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let refused = permafrostd(Some(Path::new("/no/such/permafrostd"))).unwrap_err();
        assert_eq!(refused.code, Code::NotFound);
        assert!(
            refused.message.contains("/no/such/permafrostd"),
            "{refused:?}"
        );
    }
}
