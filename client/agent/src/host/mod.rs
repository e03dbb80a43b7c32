//! Listeners of a host for CRIU and for `permafrost`: the control socket, the well-known page-server port and
//! socket, and a pair of endpoints for each session.
//!
//! The checkpoints are kept behind [`Backend`]: by the store of `permafrostd`, or, on a host without one, by
//! the nodes that an agent talks to.
//!
//! Accepting is asynchronous and costs nothing while no connection comes. Each connection then gets a thread of
//! its own with blocking calls: pages are moved by plain reads, and there is nothing to gain from being woken
//! up in between.

pub mod arguments;
mod backend;
mod control;
mod descriptors;
mod ending;
mod endpoints;
mod error;
mod intake;
mod lazy;
mod lazy_restores;
mod limits;
pub mod manual;
mod notify;
mod owner;
mod panics;
mod private_memory;
mod run_dir;
mod touched;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_criu::frontend::PipeRoom;
use permafrost_identity::CriuTls;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;

use self::lazy_restores::{FINISHING, LazyRestores};
use self::limits::Places;

pub(crate) use endpoints::{accept_failed, accept_owner};

pub use backend::{
    Backend, Client, DumpSession, Lent, Patiently, PlacingEvent, ServeLazily, ServePlacing, Trail,
    Waits,
};
pub use descriptors::raise_descriptor_limit;
pub use ending::{STOPPING, end_within};
pub use notify::notify_manager;
pub use private_memory::keep_memory_private;
pub use run_dir::make_private_dir;
pub use touched::TouchedFiles;

/// Addresses and time limits of a host's listeners.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Directory of the sockets, which have mode 0600 in a directory of mode 0700.
    pub run_dir: PathBuf,
    /// Address of the well-known page-server port; port 0 takes any. The ports of sessions are on the same
    /// address. `None`: no ports at all, AF_UNIX sockets only.
    pub listen: Option<SocketAddr>,
    /// Users of this machine, besides root and this process's own, whose connections to the ports are accepted.
    pub listen_uids: Vec<u32>,
    /// Time after which a silent connection in the middle of a dump is given up.
    pub idle_connection: Duration,
    /// TLS configuration for `criu --tls` on the ports; connections without TLS are then refused from other
    /// hosts. `None`: no TLS, and every peer that reaches the ports may dump.
    pub tls: Option<CriuTls>,
}

impl HostOptions {
    /// Returns true if a user of this machine may store pages over the ports.
    fn admits(&self, uid: u32) -> bool {
        uid == 0 || uid == rustix::process::geteuid().as_raw() || self.listen_uids.contains(&uid)
    }
}

/// A host that cannot begin to listen.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A directory cannot be made or examined.
    #[error("prepare directory {path}")]
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// A directory belongs to another user, who could replace its contents.
    #[error("directory {path} belongs to user {owner}, this runs as {user}: name another one")]
    DirectoryOwner {
        /// Path of the directory.
        path: PathBuf,
        /// User id of its owner.
        owner: u32,
        /// User id of this process.
        user: u32,
    },
    /// A directory that others can enter: one made for this purpose is not, so it may have been named by
    /// mistake.
    #[error(
        "directory {path} is open to others (mode {mode:o}): chmod 700 it if it was made for this, or name another one"
    )]
    DirectoryOpen {
        /// Path of the directory.
        path: PathBuf,
        /// Permission bits of the directory.
        mode: u32,
    },
    /// Another daemon uses the sockets of this run directory.
    #[error(
        "run directory {path} is in use by another permafrostd or agent; name another with --run-dir"
    )]
    RunDirInUse {
        /// Path of the run directory.
        path: PathBuf,
    },
    /// A socket or port cannot be bound.
    #[error("listen on the {what}")]
    Listen {
        /// Name of the socket or port.
        what: &'static str,
        /// Error of the system.
        source: io::Error,
    },
}

/// Listeners that are bound but not served yet: a conflict with another daemon is found before a store is
/// opened.
pub struct Bound {
    options: HostOptions,
    control: UnixListener,
    unix: UnixListener,
    tcp: Option<TcpListener>,
    /// Address of the well-known port, if there is one, with the port that was really bound (the configured one
    /// may be 0).
    address: Option<SocketAddr>,
    run_dir_lock: File,
}

impl Bound {
    /// Locks the run directory for this process and binds everything in it.
    ///
    /// # Errors
    /// See [`HostError`].
    pub async fn bind(mut options: HostOptions) -> Result<Self, HostError> {
        // Clients receive the paths of their sessions' sockets, and have working directories of their own.
        options.run_dir =
            std::path::absolute(&options.run_dir).map_err(|source| HostError::Directory {
                path: options.run_dir.clone(),
                source,
            })?;
        make_private_dir(&options.run_dir)?;
        let run_dir_lock = run_dir::prepare(&options.run_dir)?;
        let listen = |what: &'static str| move |source| HostError::Listen { what, source };
        let control = bind_unix(&control_socket(&options)).map_err(listen("control socket"))?;
        let unix =
            bind_unix(&page_server_socket(&options)).map_err(listen("page-server socket"))?;
        let port = listen("page-server port");
        let tcp = match options.listen {
            Some(address) => Some(TcpListener::bind(address).await.map_err(port)?),
            None => None,
        };
        let address = tcp
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()
            .map_err(port)?;
        let unguarded = options.tls.is_none();
        if let Some(address) = address.filter(|a| unguarded && !a.ip().is_loopback()) {
            tracing::warn!(
                event = "page-server-port-open", %address,
                "the page-server port is open to the network: anyone who reaches it can store pages (with --identity, only criu --tls can)"
            );
        }
        Ok(Self {
            options,
            control,
            unix,
            tcp,
            address,
            run_dir_lock,
        })
    }

    /// Begins to serve. Must be called in a tokio runtime, which must outlive the host.
    #[must_use]
    pub fn serve<B: Backend>(self, backend: Arc<B>) -> Host<B> {
        let shared = Arc::new(Shared {
            backend,
            options: self.options,
            address: self.address,
            places: Places::default(),
            pipe_rooms: Mutex::default(),
            lazy_restores: LazyRestores::default(),
            started: Instant::now(),
            runtime: Handle::current(),
        });
        let mut accepting = vec![
            tokio::spawn(control::accept(Arc::clone(&shared), self.control)),
            tokio::spawn(endpoints::accept_unix(Arc::clone(&shared), self.unix)),
        ];
        if let Some(tcp) = self.tcp {
            accepting.push(tokio::spawn(endpoints::accept_tcp(
                Arc::clone(&shared),
                tcp,
            )));
        }
        Host {
            shared,
            accepting,
            _run_dir_lock: self.run_dir_lock,
        }
    }
}

/// State that all connections of a host share.
struct Shared<B> {
    backend: Arc<B>,
    options: HostOptions,
    address: Option<SocketAddr>,
    /// Counters of the page-server connections, by kind.
    places: Places,
    /// Room in pipes that is reserved for sessions, by their ids.
    pipe_rooms: Mutex<HashMap<String, Arc<PipeRoom>>>,
    lazy_restores: LazyRestores,
    started: Instant,
    runtime: Handle,
}

/// The listeners of a host, while they are served.
pub struct Host<B> {
    shared: Arc<Shared<B>>,
    accepting: Vec<tokio::task::JoinHandle<()>>,
    _run_dir_lock: File,
}

impl<B: Backend> Host<B> {
    /// Returns the address of the well-known page-server port, if there is one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.shared.address
    }

    /// Returns the path of the control socket, to which `permafrost` connects.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        control_socket(&self.shared.options)
    }

    /// Stops listening. Connections that are being served go on until the backend ends their session. The run
    /// directory stays locked until the host is dropped.
    pub fn stop(&self) {
        for task in &self.accepting {
            task.abort();
        }
        remove_socket(&control_socket(&self.shared.options));
        remove_socket(&page_server_socket(&self.shared.options));
    }

    /// Stops listening, and has lazy restores finish, within a minute: their processes would end with this one.
    pub async fn finish_lazy_restores(&self) {
        self.stop();
        let left = self.shared.lazy_restores.finish(FINISHING).await;
        if left > 0 {
            tracing::error!(
                event = "lazy-restores-cut",
                restores = left,
                "lazy restores are not finished: their processes end"
            );
        }
    }
}

fn control_socket(options: &HostOptions) -> PathBuf {
    options.run_dir.join("control.sock")
}

fn page_server_socket(options: &HostOptions) -> PathBuf {
    options.run_dir.join("page-server.sock")
}

/// Binds a socket that only its owner may connect to. A socket left behind by a daemon that has ended is
/// replaced: this process holds the run directory's lock, so no other process uses it.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    remove_socket(path);
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn remove_socket(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(event = "socket-not-removed", path = %path.display(), %error, "socket not removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_relative_run_directory_is_told_as_an_absolute_one() {
        let dir = tempfile::tempdir().unwrap();
        let mut run_dir = PathBuf::new();
        for _ in std::env::current_dir().unwrap().components().skip(1) {
            run_dir.push("..");
        }
        run_dir.extend(dir.path().join("run").components().skip(1));
        let bound = Bound::bind(HostOptions {
            run_dir,
            listen: None,
            listen_uids: Vec::new(),
            idle_connection: Duration::from_secs(1),
            tls: None,
        });
        let bound = bound.await.unwrap();
        let socket = control_socket(&bound.options);
        assert!(socket.is_absolute() && socket.exists(), "{socket:?}");
    }
}
