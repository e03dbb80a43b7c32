//! An etcd of one's own, as the registry of nodes on this machine.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::interrupt::Interrupts;

use super::child;

/// Time limit for etcd to become ready.
const READY: Duration = Duration::from_secs(60);

/// Returns the path of etcd: `PERMAFROST_ETCD`, or the program on PATH.
pub(super) fn find() -> Result<PathBuf, String> {
    let named = std::env::var_os("PERMAFROST_ETCD").filter(|named| !named.is_empty());
    if let Some(named) = named.map(PathBuf::from) {
        // Without a slash it is looked up in PATH when it is started.
        if named.components().count() > 1 && !named.is_file() {
            return Err(format!(
                "{}, which PERMAFROST_ETCD names, is not there",
                named.display()
            ));
        }
        return Ok(named);
    }
    let directories = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&directories)
        .map(|directory| directory.join("etcd"))
        .find(|path| path.is_file())
        .ok_or_else(|| "there is no etcd in PATH, and PERMAFROST_ETCD names none".to_owned())
}

/// A running etcd of one member on loopback. It is killed when it is dropped, which its data withstands.
pub(super) struct Etcd {
    child: Child,
    port: u16,
}

impl Etcd {
    pub(super) fn start(
        program: &Path,
        directory: &Path,
        interrupts: &Interrupts,
    ) -> Result<Self, Failure> {
        let failed =
            |error: std::io::Error| Failure::new(Code::Unavailable, format!("start etcd: {error}"));
        // Both are open at once, so they differ.
        let bound = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0"));
        let [client, peer] = bound;
        let (client, peer) = (client.map_err(failed)?, peer.map_err(failed)?);
        let port = client.local_addr().map_err(failed)?.port();
        let peer_port = peer.local_addr().map_err(failed)?.port();
        drop((client, peer));
        fs::create_dir_all(directory).map_err(|error| Failure::io("create", directory, &error))?;
        let log_path = directory.join("log");
        let log = File::create(&log_path).map_err(failed)?;
        let client_url = format!("http://127.0.0.1:{port}");
        let peer_url = format!("http://127.0.0.1:{peer_port}");
        let mut command = child::guarded(program)?;
        command
            .args(["--name", "bench", "--data-dir"])
            .arg(directory.join("data"))
            .args(["--listen-client-urls", &client_url])
            .args(["--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url])
            .args(["--initial-advertise-peer-urls", &peer_url])
            .args(["--initial-cluster", &format!("bench={peer_url}")])
            .args(["--logger", "zap", "--log-level", "info"])
            .stdout(log.try_clone().map_err(failed)?)
            .stderr(log);
        let mut etcd = Self {
            child: command.spawn().map_err(failed)?,
            port,
        };
        etcd.await_ready(&log_path, interrupts)?;
        Ok(etcd)
    }

    fn await_ready(&mut self, log: &Path, interrupts: &Interrupts) -> Result<(), Failure> {
        let start = Instant::now();
        loop {
            let said = fs::read_to_string(log).unwrap_or_default();
            // etcd's message that there is a leader.
            if said.contains("serving client traffic")
                && TcpStream::connect(("127.0.0.1", self.port)).is_ok()
            {
                return Ok(());
            }
            interrupts.check()?;
            if self.ended().is_some() || start.elapsed() > READY {
                return Err(Failure::new(
                    Code::Unavailable,
                    format!("etcd did not get ready: {}", child::tail(log)),
                ));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns how it has ended; `None` while it runs.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap_or_default()
    }

    /// Returns the registry's URL for `permafrostd --catalog`.
    pub(super) fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
