//! `permafrostd`: opens the region and the catalog, listens, and stops cleanly.
//!
//! Accepting is asynchronous and costs nothing while nobody calls. Each connection then gets a thread of its own
//! with blocking calls: pages are moved by plain reads into mapped memory, and there is nothing to gain from
//! being woken up in between.

mod control;
mod endpoints;
mod startup;

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;

use crate::config::Config;
use crate::store::{Store, StoreError};

pub use startup::StartError;

/// How often, at most and at least, what has outlived its retention is looked for: in between, twice in the
/// shortest retention.
const EXPIRY_PERIOD: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) store: Arc<Store>,
    pub(crate) config: Config,
    /// Where the well-known port really is (the configured one may be 0), if there is one.
    pub(crate) address: Option<SocketAddr>,
    /// Page-server connections being served.
    pub(crate) connections: AtomicUsize,
    pub(crate) started: Instant,
    /// Where the catalog came from, in words.
    pub(crate) catalog_origin: String,
    pub(crate) runtime: Handle,
}

impl Shared {
    pub(crate) fn page_server_socket(&self) -> PathBuf {
        self.config.run_dir.join("page-server.sock")
    }
}

/// A running daemon.
pub struct Daemon {
    shared: Arc<Shared>,
    accepting: Vec<tokio::task::JoinHandle<()>>,
    _run_dir_lock: File,
}

impl Daemon {
    /// Opens everything and begins to listen.
    ///
    /// # Errors
    /// See [`StartError`]; nothing was changed in a region that does not open.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        // What others may have taken comes first: a start that fails there leaves the region as it was.
        startup::check_directories(&config)?;
        let run_dir_lock = startup::prepare_run_dir(&config.run_dir)?;
        let listen = |what: &'static str| move |source| StartError::Listen { what, source };
        let control =
            bind_unix(&config.run_dir.join("control.sock")).map_err(listen("control socket"))?;
        let unix = bind_unix(&config.run_dir.join("page-server.sock"))
            .map_err(listen("page-server socket"))?;
        let port = listen("page-server port");
        let tcp = match config.listen {
            Some(address) => Some(TcpListener::bind(address).await.map_err(port)?),
            None => None,
        };
        let address = tcp
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()
            .map_err(port)?;
        if let Some(address) = address.filter(|address| !address.ip().is_loopback()) {
            tracing::warn!(
                %address,
                "the page-server port is open to the network: anyone who reaches it can store pages"
            );
        }
        let (store, catalog_origin) = startup::open_store(&config)?;
        let shared = Arc::new(Shared {
            store,
            config,
            address,
            connections: AtomicUsize::new(0),
            started: Instant::now(),
            catalog_origin,
            runtime: Handle::current(),
        });
        let mut accepting = vec![
            tokio::spawn(control::accept(Arc::clone(&shared), control)),
            tokio::spawn(endpoints::accept_unix(Arc::clone(&shared), unix)),
            tokio::spawn(expire(Arc::clone(&shared))),
        ];
        if let Some(tcp) = tcp {
            accepting.push(tokio::spawn(endpoints::accept_tcp(
                Arc::clone(&shared),
                tcp,
            )));
        }
        Ok(Self {
            shared,
            accepting,
            _run_dir_lock: run_dir_lock,
        })
    }

    /// Where the well-known page-server port is, if there is one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.shared.address
    }

    /// Where `permafrost` connects.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.shared.config.run_dir.join("control.sock")
    }

    /// Stops listening and marks the region clean. Dumps that are under way fail, and their tasks live on: what
    /// they brought is referenced by nothing.
    ///
    /// # Errors
    /// The region could not be marked.
    pub fn stop(self) -> Result<(), StoreError> {
        for task in &self.accepting {
            task.abort();
        }
        for name in ["control.sock", "page-server.sock"] {
            remove_socket(&self.shared.config.run_dir.join(name));
        }
        self.shared.store.stop();
        self.shared.store.close()
    }
}

async fn expire(shared: Arc<Shared>) {
    let retention = shared.config.retention;
    let shortest = retention.parked.min(retention.idle_session);
    let mut ticks = tokio::time::interval((shortest / 2).clamp(EXPIRY_PERIOD.0, EXPIRY_PERIOD.1));
    loop {
        ticks.tick().await;
        let store = Arc::clone(&shared.store);
        if tokio::task::spawn_blocking(move || store.expire())
            .await
            .is_err()
        {
            tracing::error!("expiry failed");
        }
    }
}

/// Binds a socket that only its owner may connect to. One left behind by a daemon that is gone is replaced;
/// that no other uses it is known, as the run directory's lock is ours.
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
        tracing::warn!(path = %path.display(), %error, "socket not removed");
    }
}
