//! Serves the HTTP API: on an AF_UNIX socket for this machine, and on a TCP port if one is configured.
//!
//! This module authenticates callers (credentials of the socket, a certificate, a token), and applies the
//! limits on rate and size. The router behind it reads the [`Caller`](super::caller::Caller) out of the
//! request's extensions and decides which requests are permitted. Unauthenticated requests are refused, and TCP
//! without TLS is for the loopback interface alone.

mod answer;
mod buckets;
mod door;
mod limits;
mod page;
mod patient;
mod refusal;
mod strangers;
#[cfg(test)]
mod tests;
mod tokens;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::Router;
use hyper_util::service::TowerToHyperService;
use permafrost_audit::Audit;
use permafrost_identity::{IdentityError, ReloadingIdentity};
use permafrost_transport::peer::ApiServer;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use uuid::Uuid;

use crate::shares::Shares;
use answer::{Shared, body_units};
use buckets::Buckets;
use door::{Door, Guard, PeerDoor};
use tokens::{LOOK_EVERY, Tokens};

pub use limits::{Limits, Rate};
pub use permafrost_quotas::private_file::PrivateFileError;

/// Name of the socket, which lies beside the control socket.
pub const SOCKET: &str = "api.sock";

/// Addresses, credentials and limits of the server.
#[derive(Clone, Debug, Default)]
pub struct ServeOptions {
    /// Directory in which the socket is made, with mode 0600: it is accessible to us alone, and locked by us.
    pub run_dir: PathBuf,
    /// Additional TCP port; port 0 selects any free one.
    pub listen: Option<SocketAddr>,
    /// Identity that makes the port TLS, and accepts certificates of its CA.
    pub identity: Option<ReloadingIdentity>,
    /// File of tokens.
    pub tokens: Option<PathBuf>,
    /// Limits on the callers.
    pub limits: Limits,
    /// Log in which requests and their callers are recorded.
    pub audit: Option<Arc<Audit>>,
}

/// Reason why the API is not served.
#[derive(Debug, thiserror::Error)]
pub enum ApiServeError {
    /// The socket cannot be bound.
    #[error("listen for the API on {}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The port cannot be bound.
    #[error("listen for the API on {address}")]
    Port {
        /// Address of the port.
        address: SocketAddr,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The port has neither tokens nor certificates, so that no caller could be authenticated.
    #[error("the API on {address} has neither certificates nor tokens to know its callers by")]
    Unguarded {
        /// Address of the port.
        address: SocketAddr,
    },
    /// Tokens would go over the network in clear text.
    #[error("the API on {address} would be reached from elsewhere without TLS")]
    Plain {
        /// Address of the port.
        address: SocketAddr,
    },
    /// The file of tokens cannot be used.
    #[error(transparent)]
    Tokens(#[from] PrivateFileError),
    /// TLS cannot be set up.
    #[error("serve the API over TLS")]
    Identity(#[from] IdentityError),
}

impl ApiServeError {
    /// Returns advice for the operator; empty if the message contains it.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        match self {
            Self::Unguarded { .. } => {
                "give it --api-tokens FILE (`permafrost token new` prints a line for it), or --identity DIR for certificates"
            }
            Self::Plain { .. } => {
                "give it --identity DIR for TLS (`permafrost pki issue`), or listen on a loopback address"
            }
            Self::Tokens(error) => error.hint(),
            _ => "",
        }
    }
}

/// A running server. Dropped, it ends at once.
#[derive(Debug)]
pub struct Server {
    socket: PathBuf,
    address: Option<SocketAddr>,
    stop: watch::Sender<bool>,
    doors: Vec<JoinHandle<()>>,
    peers: Arc<PeerDoor>,
}

impl Server {
    /// Returns the path of the socket for callers of this machine.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the address of the port, if there is one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Returns the counter of requests for files of the page, which anybody who reaches the port may make.
    #[must_use]
    pub fn page_requests(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.peers.shared.page_requests)
    }

    /// Replaces the rate limit for the requests of one remote caller.
    pub fn set_rate(&self, rate: Rate) {
        self.peers.shared.buckets.set_rate(rate);
    }

    /// Returns the entry point to the API for peers, who come over QUIC.
    #[must_use]
    pub fn for_peers(&self) -> Arc<dyn ApiServer> {
        Arc::<PeerDoor>::clone(&self.peers)
    }

    /// Takes no more connections, ends streams and idle connections at once, and lets requests that are being answered
    /// go on for [`Limits::grace`].
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        for door in &mut self.doors {
            // The task was aborted, or has ended.
            let _ = door.await;
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for door in &self.doors {
            door.abort();
        }
        remove_socket(&self.socket);
    }
}

/// Serves `router` until the server is stopped. Called on a tokio runtime.
///
/// # Errors
/// See [`ApiServeError`].
pub async fn serve(options: ServeOptions, router: Router) -> Result<Server, ApiServeError> {
    serve_looking(options, router, LOOK_EVERY).await
}

/// Checks options as [`serve`] does, without listening.
///
/// # Errors
/// See [`ApiServeError`].
pub fn check(options: &ServeOptions) -> Result<(), ApiServeError> {
    let tokens = options.tokens.as_deref();
    let loaded = tokens.map(|path| Tokens::load(path, LOOK_EVERY));
    loaded.transpose()?;
    acceptor(options).map(drop)
}

/// Serves as [`serve`] does, with the given interval between checks of the file of tokens.
async fn serve_looking(
    options: ServeOptions,
    router: Router,
    look_every: std::time::Duration,
) -> Result<Server, ApiServeError> {
    let limits = options.limits;
    let tokens = options.tokens.as_deref();
    let tokens = tokens
        .map(|path| Tokens::load(path, look_every))
        .transpose()?;
    let tls = acceptor(&options)?;
    let (stop, stopped) = watch::channel(false);
    let shared = Arc::new(Shared {
        router: TowerToHyperService::new(router),
        limits,
        tokens,
        buckets: Buckets::new(limits.rate),
        seats: Shares::new(limits.caller_connections, limits.connections),
        bodies: Semaphore::new(body_units(&limits)),
        stop: stopped,
        run: Uuid::new_v4().simple().to_string().split_off(20),
        requests: AtomicU64::new(0),
        page_requests: Arc::default(),
        audit: options.audit,
    });
    let (port, address) = match options.listen {
        Some(address) => {
            let failed = |source| ApiServeError::Port { address, source };
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            (Some(Door::port(listener, tls)), Some(address))
        }
        None => (None, None),
    };
    let socket = options.run_dir.join(SOCKET);
    let failed = |source| ApiServeError::Socket {
        path: socket.clone(),
        source,
    };
    let local = Door::socket(&socket).map_err(failed)?;
    let peers = Arc::new(PeerDoor {
        shared: Arc::clone(&shared),
        places: Arc::new(Semaphore::new(limits.connections)),
        runtime: Handle::current(),
    });
    let doors = std::iter::once(local)
        .chain(port)
        .map(|door| tokio::spawn(door.attend(Arc::clone(&shared))))
        .collect();
    Ok(Server {
        socket,
        address,
        stop,
        doors,
        peers,
    })
}

/// Returns the TLS configuration of the port, if it has one; refuses an unprotected port.
fn acceptor(options: &ServeOptions) -> Result<Option<Guard>, ApiServeError> {
    let Some(address) = options.listen else {
        return Ok(None);
    };
    if let Some(identity) = &options.identity {
        let config = identity.https_server_config()?;
        return Ok(Some(Guard {
            acceptor: TlsAcceptor::from(Arc::new(config)),
            identity: identity.clone(),
        }));
    }
    if !address.ip().to_canonical().is_loopback() {
        return Err(ApiServeError::Plain { address });
    }
    if options.tokens.is_none() {
        return Err(ApiServeError::Unguarded { address });
    }
    Ok(None)
}

fn remove_socket(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(event = "socket-not-removed", path = %path.display(), %error, "socket not removed");
    }
}
