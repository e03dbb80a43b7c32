//! A real etcd for one test, whose members can be killed, stopped and restarted.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{binaries, process};

/// Environment variable that names the etcd to use.
pub const ETCD: &str = "PERMAFROST_ETCD";
/// Environment variable that turns a skipped test into a failed one.
pub const REQUIRE_ETCD: &str = "PERMAFROST_REQUIRE_ETCD";

/// Time that a cluster may take to elect a leader: on a busy machine an election takes several rounds.
const READY: Duration = Duration::from_secs(60);

/// Returns the etcd to use: the first of [`ETCD`], the one on PATH, and the one that `cargo xtask setup` has fetched
/// that prints its version. The search runs once a process.
///
/// # Errors
/// Says of each candidate why not.
pub fn find() -> Result<PathBuf, String> {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    // What is not there may be fetched meanwhile.
    let found = look_for()?;
    Ok(FOUND.get_or_init(|| found).clone())
}

fn look_for() -> Result<PathBuf, String> {
    let candidates = match std::env::var_os(ETCD) {
        Some(path) => vec![path.into()],
        None => vec![binaries::resolve(Path::new("etcd")), fetched()],
    };
    let mut reasons = Vec::new();
    for candidate in candidates {
        match check(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(why) => reasons.push(format!("{}: {why}", candidate.display())),
        }
    }
    Err(reasons.join("; "))
}

/// Returns the path at which `cargo xtask` puts the script that starts the etcd it fetched.
#[must_use]
pub fn fetched() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests).join("target/etcd/etcd")
}

/// Returns `etcdctl`: the one that `cargo xtask setup` has fetched, else the one on PATH.
#[must_use]
pub fn client() -> PathBuf {
    let fetched = fetched_client();
    if fetched.exists() {
        fetched
    } else {
        "etcdctl".into()
    }
}

/// Path at which `cargo xtask setup` puts the script that starts the `etcdctl` it fetched.
#[must_use]
pub fn fetched_client() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests
        .parent()
        .unwrap_or(tests)
        .join("target/etcdctl/etcdctl")
}

/// Checks that this etcd starts.
///
/// # Errors
/// Gives the reason in one line.
pub fn check(etcd: &Path) -> Result<(), String> {
    let output = Command::new(etcd)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("does not start: {error}"))?;
    if !output.status.success() {
        return Err(format!("`etcd --version` fails ({})", output.status));
    }
    Ok(())
}

/// Returns the etcd for a test, or `None` after saying loudly that the test was skipped.
///
/// # Panics
/// Where [`REQUIRE_ETCD`] is set to anything but 0: there a skipped test is a failed one.
#[must_use]
pub fn for_test(test: &str) -> Option<PathBuf> {
    match find() {
        Ok(etcd) => Some(etcd),
        Err(why) => {
            let required = std::env::var_os(REQUIRE_ETCD).is_some_and(|value| value != "0");
            assert!(!required, "{test} needs etcd: {why}");
            // Past libtest's capture, which would hide it. `cargo xtask test` counts these.
            let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: no etcd: {why}");
            None
        }
    }
}

/// Address, ports and command prefix of a member.
#[derive(Clone, Debug)]
pub struct Place {
    /// Host address of both ports.
    pub host: String,
    /// Port for clients.
    pub client_port: u16,
    /// Port for the other members.
    pub peer_port: u16,
    /// Command that starts etcd, such as `ip netns exec NAME`; empty for none. It must become etcd by `exec`, so
    /// that its pid is etcd's.
    pub prefix: Vec<String>,
}

impl Place {
    /// Returns a place on loopback, with ports that are free at the moment.
    ///
    /// # Errors
    /// There are none.
    pub fn loopback() -> Result<Self> {
        // Both are open at once, so they differ.
        let client = TcpListener::bind("127.0.0.1:0").context("find a free port")?;
        let peer = TcpListener::bind("127.0.0.1:0").context("find a free port")?;
        Ok(Self {
            host: "127.0.0.1".to_owned(),
            client_port: client.local_addr().context("read a port")?.port(),
            peer_port: peer.local_addr().context("read a port")?.port(),
            prefix: Vec::new(),
        })
    }

    fn client_url(&self, secure: bool) -> String {
        let scheme = if secure { "https" } else { "http" };
        format!("{scheme}://{}:{}", self.host, self.client_port)
    }

    fn peer_url(&self) -> String {
        format!("http://{}:{}", self.host, self.peer_port)
    }
}

/// PEM files of an etcd that accepts only clients whose certificates are of `ca`.
#[derive(Clone, Debug)]
pub struct ServerTls {
    /// Path of etcd's certificate.
    pub certificate: PathBuf,
    /// Path of the certificate's key.
    pub key: PathBuf,
    /// Path of the certificate of the clients' authority.
    pub ca: PathBuf,
}

struct Member {
    place: Place,
    child: Option<Child>,
}

/// A running cluster of etcd. When it is dropped, its processes are killed and its data removed.
pub struct EtcdCluster {
    etcd: PathBuf,
    dir: TempDir,
    members: Vec<Member>,
    tls: Option<ServerTls>,
}

impl EtcdCluster {
    /// Starts `members` members on loopback, and waits until each has seen a leader.
    ///
    /// # Errors
    /// etcd does not start.
    pub fn start(etcd: &Path, members: usize) -> Result<Self> {
        let places: Result<Vec<_>> = (0..members).map(|_| Place::loopback()).collect();
        let cluster = Self::start_at(etcd, places?)?;
        cluster.wait_ready()?;
        Ok(cluster)
    }

    /// Starts one member, like [`Self::start`], for clients with certificates.
    ///
    /// # Errors
    /// etcd does not start.
    pub fn start_secure(etcd: &Path, tls: ServerTls) -> Result<Self> {
        let cluster = Self::begin(etcd, vec![Place::loopback()?], Some(tls))?;
        cluster.wait_ready()?;
        Ok(cluster)
    }

    /// Starts a member at each place, without waiting.
    ///
    /// # Errors
    /// etcd does not start.
    pub fn start_at(etcd: &Path, places: Vec<Place>) -> Result<Self> {
        Self::begin(etcd, places, None)
    }

    fn begin(etcd: &Path, places: Vec<Place>, tls: Option<ServerTls>) -> Result<Self> {
        let mut cluster = Self {
            etcd: etcd.to_path_buf(),
            // Memory-backed where there is such a place: every write of etcd is synced, and it forgives no slow disk.
            dir: TempDir::with_prefix_in("permafrost-etcd-", quick_dir())
                .context("make a directory for etcd")?,
            members: places
                .into_iter()
                .map(|place| Member { place, child: None })
                .collect(),
            tls,
        };
        for index in 0..cluster.members.len() {
            cluster.restart(index)?;
        }
        Ok(cluster)
    }

    /// Waits until every running member has seen a leader.
    ///
    /// # Errors
    /// One has not within a minute, or has ended.
    pub fn wait_ready(&self) -> Result<()> {
        for (index, member) in self.members.iter().enumerate() {
            let Some(child) = &member.child else { continue };
            let pid = child.id();
            process::wait_for("a leader of etcd", READY, || {
                if !process::is_alive(pid) {
                    bail!("etcd {index} has ended: {}", self.log(index));
                }
                // Not with the cluster's own address where that is in another network namespace.
                if member.place.prefix.is_empty()
                    && TcpStream::connect((member.place.host.as_str(), member.place.client_port))
                        .is_err()
                {
                    return Ok(None);
                }
                // etcd's own word for: this member has joined, and there is a leader.
                Ok(self
                    .log(index)
                    .contains("serving client traffic")
                    .then_some(()))
            })?;
        }
        Ok(())
    }

    /// Returns the client address of each member, `host:port`.
    #[must_use]
    pub fn addresses(&self) -> Vec<String> {
        let place = |member: &Member| format!("{}:{}", member.place.host, member.place.client_port);
        self.members.iter().map(place).collect()
    }

    /// Returns the URL for `permafrostd --catalog`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("etcd://{}", self.addresses().join(","))
    }

    /// Returns the number of members, running or not.
    #[must_use]
    pub fn members(&self) -> usize {
        self.members.len()
    }

    /// Starts a stopped member, with the data it had.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&mut self, index: usize) -> Result<()> {
        let named =
            |(index, member): (usize, &Member)| format!("m{index}={}", member.place.peer_url());
        let all: Vec<_> = self.members.iter().enumerate().map(named).collect();
        let place = &self.members[index].place;
        let log = self.dir.path().join(format!("m{index}.log"));
        // Begun anew, so that `wait_ready` sees this run's words.
        let log = File::create(&log).context("create etcd's log")?;
        let mut words = place.prefix.iter();
        let mut command = match words.next() {
            Some(first) => {
                let mut command = Command::new(first);
                command.args(words).arg(&self.etcd);
                command
            }
            None => Command::new(&self.etcd),
        };
        command
            .args(["--name", &format!("m{index}")])
            .arg("--data-dir")
            .arg(self.dir.path().join(format!("m{index}")))
            .args([
                "--listen-client-urls",
                &place.client_url(self.tls.is_some()),
            ])
            .args([
                "--advertise-client-urls",
                &place.client_url(self.tls.is_some()),
            ])
            .args(["--listen-peer-urls", &place.peer_url()])
            .args(["--initial-advertise-peer-urls", &place.peer_url()])
            .args(["--initial-cluster", &all.join(",")])
            .args(["--initial-cluster-token", "permafrost-test"])
            .args(["--logger", "zap", "--log-level", "info"])
            // Tests kill processes, never the machine: what etcd has written survives that in the page cache. With
            // fsync, a busy disk of the machine would keep the registry from answering for seconds.
            .arg("--unsafe-no-fsync")
            // Nothing of this machine's own etcd.
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share etcd's log")?)
            .stderr(log);
        if let Some(tls) = &self.tls {
            command.arg("--cert-file").arg(&tls.certificate);
            command.arg("--key-file").arg(&tls.key);
            command.arg("--trusted-ca-file").arg(&tls.ca);
            command.arg("--client-cert-auth");
        }
        let child = command.spawn().context("start etcd")?;
        self.members[index].child = Some(child);
        Ok(())
    }

    /// Kills one member with `kill -9`. Does nothing if it does not run.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn kill(&mut self, index: usize) -> Result<()> {
        if let Some(mut child) = self.members[index].child.take() {
            child.kill().context("kill etcd")?;
            child.wait().context("wait for etcd")?;
        }
        Ok(())
    }

    /// Suspends a member (SIGSTOP): its connections stay and are silent.
    ///
    /// # Errors
    /// It does not run.
    pub fn pause(&self, index: usize) -> Result<()> {
        process::stop(self.pid(index)?)
    }

    /// Resumes a suspended member.
    ///
    /// # Errors
    /// It does not run.
    pub fn resume(&self, index: usize) -> Result<()> {
        process::signal(self.pid(index)?, Signal::CONT)
    }

    /// Returns the process id of a running member.
    ///
    /// # Errors
    /// It does not run.
    pub fn pid(&self, index: usize) -> Result<u32> {
        let child = self.members[index].child.as_ref();
        Ok(child.context("this member does not run")?.id())
    }

    /// Returns the log of a member since its last start.
    #[must_use]
    pub fn log(&self, index: usize) -> String {
        let log = self.dir.path().join(format!("m{index}.log"));
        String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned()
    }
}

impl Drop for EtcdCluster {
    fn drop(&mut self) {
        for index in 0..self.members.len() {
            let _ = self.kill(index);
        }
    }
}

fn quick_dir() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() {
        memory
    } else {
        std::env::temp_dir()
    }
}
