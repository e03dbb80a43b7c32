//! The agent of a compute node without storage: the front ends of a host over the nodes of a cluster.
//!
//! ```text
//!  criu ── page-server ──▶ front end ──▶ Sink ── one QUIC stream ──▶ node ──▶ its region, and the other copies
//!  permafrost ── control socket ──▶ Remote ── requests ──▶ a node
//!  schedulers ── HTTP on api.sock ──▶ bytes passed on ──▶ a node
//!  criu restore ◀── pipes ◀── RemoteCheckpoint ◀── pages, digests compared ◀── a node that has them
//! ```
//!
//! The agent chooses the node that takes a dump; everything else is the node's: the job's lock, the generation,
//! the seal, the copies. The dump is an ordinary session there whose pages come by QUIC. When that node fails,
//! so does the dump, and its task lives on; the next dump goes to another node.

#![forbid(unsafe_code)]

mod api;
mod backend;
mod denials;
mod error;
pub mod host;
mod images;
mod nodes;
pub mod phases;
mod put;
pub mod remote;
mod sealing;
mod session;
mod status;
mod turns;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use permafrost_identity::{IdentityError, ReloadingIdentity};
use permafrost_transport::peer::{self, PeerError};
use tokio::runtime::Handle;

use self::host::{Bound, Host, HostError};

pub use crate::remote::transport;
pub use backend::Remote;
use denials::DenialPoller;
pub use nodes::StorageNode;

/// Time for the message that dumps are given up to reach the nodes.
const FAREWELL: Duration = Duration::from_millis(300);

/// Configuration of an agent.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// Storage nodes, in the order in which they are asked.
    pub nodes: Vec<StorageNode>,
    /// Directory with `ca.pem`, `cert.pem` and `key.pem`.
    pub identity: PathBuf,
    /// Listeners on this host.
    pub host: host::HostOptions,
    /// Durability that is requested for a dump without one of its own: `local`, `quorum`, `all`, or empty for
    /// the node's default.
    pub durability: String,
    /// Time limit for a node's reply, and for a dump to become durable.
    pub deadline: Duration,
    /// Time for which a session waits for its dump, or for its seal.
    pub session_ttl: Duration,
    /// Limits of the transport.
    pub transport: peer::PeerOptions,
    /// Interval at which one node after another is asked for the cluster's list of denied certificates. 5 s is usual:
    /// with three nodes, a denial is known after 15 s at most.
    pub denials_every: Duration,
}

/// Usual value of [`AgentOptions::denials_every`].
pub const DENIALS_EVERY: Duration = Duration::from_secs(5);

/// An agent that cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A directory does not meet the requirements, or a socket or port cannot be bound.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The certificate cannot be used.
    #[error("load the identity")]
    Identity(#[from] IdentityError),
    /// The transport to the nodes cannot be set up.
    #[error("open the way to the nodes")]
    Peer(#[from] PeerError),
}

/// A running agent.
pub struct Agent {
    host: Host<Remote>,
    remote: Arc<Remote>,
    _api: api::ApiSocket,
    expiry: tokio::task::JoinHandle<()>,
    denials: tokio::task::JoinHandle<()>,
}

impl Agent {
    /// Begins to listen. No node has to be reachable yet.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn start(options: AgentOptions) -> Result<Self, AgentError> {
        let identity = Arc::new(ReloadingIdentity::load(&options.identity)?);
        let run_dir = options.host.run_dir.clone();
        let bound = Bound::bind(options.host).await?;
        let poller = DenialPoller::new(&options.nodes, &identity)?;
        let nodes = nodes::Nodes::new(
            Handle::current(),
            &options.nodes,
            identity,
            options.deadline,
            options.transport,
        )?;
        let touched = host::TouchedFiles::within(&run_dir);
        let remote = Remote::new(nodes, options.durability, options.session_ttl, touched);
        let remote = Arc::new(remote);
        let api = api::ApiSocket::listen(&run_dir, &remote.nodes)?;
        let host = bound.serve(Arc::clone(&remote));
        let expiry = tokio::spawn(expire(Arc::clone(&remote)));
        let denials = tokio::spawn(poller.run(options.denials_every));
        Ok(Self {
            host,
            remote,
            _api: api,
            expiry,
            denials,
        })
    }

    /// Returns the address of the well-known page-server port, if there is one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.host.address()
    }

    /// Returns the path of the control socket, to which `permafrost` connects.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.host.control_socket()
    }

    /// Stops listening, and has lazy restores finish: their processes would end with the agent.
    pub async fn finish_lazy_restores(&self) {
        self.host.finish_lazy_restores().await;
    }

    /// Stops listening. Dumps that are under way fail, and their tasks live on.
    pub async fn stop(self) {
        self.host.stop();
        self.expiry.abort();
        self.denials.abort();
        if self.remote.stop() {
            // The nodes are informed, or they would keep the sessions for a connection that may come back.
            tokio::time::sleep(FAREWELL).await;
        }
        self.remote.nodes.network.close();
    }
}

async fn expire(remote: Arc<Remote>) {
    let period =
        (remote.session_ttl / 2).clamp(Duration::from_millis(100), Duration::from_secs(10));
    let mut ticks = tokio::time::interval(period);
    loop {
        ticks.tick().await;
        remote.expire();
    }
}
