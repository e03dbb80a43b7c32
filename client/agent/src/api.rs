//! The nodes' HTTP API on a socket of the agent's host: the agent passes bytes on unchanged.
//!
//! Every connection to the socket is a stream to a node, which sees the agent's certificate and answers what that
//! allows.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use permafrost_api_types::problem::{MEDIA_TYPE, Problem, ProblemKind};
use permafrost_transport::api::SOCKET;
use permafrost_transport::peer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::nodes::Nodes;
use crate::host::{HostError, accept_failed, accept_owner};

/// Most connections at once: as many streams as a node serves for one agent without being strained.
const CONNECTIONS: usize = 64;

/// The API's socket file; removed when this value is dropped.
pub(super) struct ApiSocket {
    path: PathBuf,
    accepting: JoinHandle<()>,
}

impl ApiSocket {
    /// Listens in a run directory that belongs to this agent.
    ///
    /// # Errors
    /// The socket cannot be bound.
    pub(super) fn listen(run_dir: &Path, nodes: &Arc<Nodes>) -> Result<Self, HostError> {
        let path = run_dir.join(SOCKET);
        let bind = || -> io::Result<UnixListener> {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(&path)?;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
            Ok(listener)
        };
        let listener = bind().map_err(|source| HostError::Directory {
            path: path.clone(),
            source,
        })?;
        let accepting = tokio::spawn(accept(listener, Arc::clone(nodes)));
        Ok(Self { path, accepting })
    }
}

impl Drop for ApiSocket {
    fn drop(&mut self) {
        self.accepting.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn accept(listener: UnixListener, nodes: Arc<Nodes>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let accepted = accept_owner(&listener).await;
        match accepted.and_then(UnixStream::from_std) {
            Ok(stream) => {
                let nodes = Arc::clone(&nodes);
                tokio::spawn(async move {
                    let _place = place;
                    if let Err(error) = pass_on(stream, &nodes).await {
                        tracing::debug!(%error, "API connection ended");
                    }
                });
            }
            Err(error) => accept_failed(&error).await,
        }
    }
}

/// Passes a connection on to the first node that takes it.
async fn pass_on(mut stream: UnixStream, nodes: &Nodes) -> io::Result<()> {
    let until = nodes.until();
    let names = nodes.in_order();
    let mut reason = "no storage node is known".to_owned();
    for (name, at) in names.iter().zip(1..) {
        let is_last = at == names.len();
        let by = match is_last {
            true => until,
            false => peer::reached_by(until),
        };
        match nodes.network.api(name, by).await {
            Ok(mut node) => {
                nodes.prefer(name);
                tokio::io::copy_bidirectional(&mut stream, &mut node).await?;
                return Ok(());
            }
            Err(error) => reason = error.to_string(),
        }
    }
    refuse(stream, &reason).await
}

/// Replies with an error because no node can be reached.
async fn refuse(mut stream: UnixStream, reason: &str) -> io::Result<()> {
    let problem = Problem::new(ProblemKind::Unavailable, reason);
    let body = serde_json::to_vec(&problem)?;
    // Unread bytes at the end of a connection would make the kernel discard the reply.
    let _ = stream.read(&mut [0; 4096]).await?;
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: {MEDIA_TYPE}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(&body).await?;
    stream.shutdown().await
}
