//! The cluster's list of denied certificates: an agent asks its nodes for it, and refuses nodes that are on it.
//!
//! A node whose key was stolen may report anything, so each node is asked over a connection of its own, whose
//! handshake goes by the agent's own files only: a report of one node keeps no other from being asked. A certificate
//! that any node reports is refused. So two nodes that deny each other are both refused until the agent's own file
//! denies one of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_identity::{Denial, DenyList, IdentityError, ReloadingIdentity};
use permafrost_protocol::control::{self, request};
use permafrost_protocol::wire::message;
use permafrost_transport::peer::{self, Network, PeerError};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::StorageNode;

/// Time limit for a node's reply.
const PATIENCE: Duration = Duration::from_secs(5);
/// Size of the socket buffers, bytes: a list has at most 4,096 entries.
const BUFFER_BYTES: usize = 256 << 10;
/// UDP payload, bytes: jumbo frames would bring nothing, and quinn keeps larger buffers for them.
const PACKET_BYTES: u16 = 1452;

/// Task that asks the nodes for the list of denied certificates.
pub(super) struct DenialPoller {
    nodes: Vec<StorageNode>,
    /// Identity of the agent, which refuses the certificates that nodes report.
    identity: Arc<ReloadingIdentity>,
    /// Identity with the same certificate that goes by the agent's own files only.
    asking: Arc<ReloadingIdentity>,
}

impl DenialPoller {
    pub(super) fn new(
        nodes: &[StorageNode],
        identity: &Arc<ReloadingIdentity>,
    ) -> Result<Self, IdentityError> {
        Ok(Self {
            nodes: nodes.to_vec(),
            identity: Arc::clone(identity),
            asking: Arc::new(identity.by_files_only()?),
        })
    }

    /// Asks all nodes at once, and from then on one node after each `interval`: hundreds of agents must not
    /// keep the nodes busy with handshakes.
    pub(super) async fn run(self, interval: Duration) {
        let this = Arc::new(self);
        let mut first = JoinSet::new();
        for number in 0..this.nodes.len() {
            let this = Arc::clone(&this);
            first.spawn(async move { this.ask(&this.nodes[number]).await });
        }
        while first.join_next().await.is_some() {}
        loop {
            for node in &this.nodes {
                tokio::time::sleep(interval).await;
                this.ask(node).await;
            }
            if this.nodes.is_empty() {
                return;
            }
        }
    }

    async fn ask(&self, node: &StorageNode) {
        let entries = match self.entries(node).await {
            Ok(entries) => entries,
            Err(error) => {
                // The node's previous report stays in use.
                return tracing::debug!(node = node.name, %error, "no list of denied certificates");
            }
        };
        let mut list = DenyList::default();
        for entry in entries {
            let added = entry.parse().and_then(|denial: Denial| list.insert(denial));
            if let Err(error) = added {
                tracing::warn!(event = "denial-entry-skipped", node = node.name, %error, "an entry of the cluster's list is skipped");
            }
        }
        let count = list.len();
        if self.identity.report_denials(&node.name, list) {
            tracing::warn!(
                event = "cluster-denials-changed",
                node = node.name,
                count,
                "the cluster's list of denied certificates has changed"
            );
        }
    }

    async fn entries(&self, node: &StorageNode) -> Result<Vec<String>, PeerError> {
        let any = match node.address {
            SocketAddr::V4(_) => SocketAddr::from(([0, 0, 0, 0], 0)),
            SocketAddr::V6(_) => SocketAddr::from(([0_u16; 8], 0)),
        };
        let address = node.address;
        let options = peer::PeerOptions {
            socket_buffer_bytes: BUFFER_BYTES,
            packet_bytes: PACKET_BYTES,
            ..peer::PeerOptions::default()
        };
        let network = Network::new(
            Handle::current(),
            any,
            Arc::clone(&self.asking),
            "",
            Arc::new(move |_: &str| Some(address)),
            options,
        )?;
        let body = message::request::Body::Control(control::Request::new(request::Body::Deny(
            request::Deny::default(),
        )));
        let until = Instant::now() + PATIENCE;
        let answer = network.call_async(&node.name, body, until).await;
        network.close();
        match answer? {
            message::reply::Body::Control(control::Reply {
                body: Some(control::reply::Body::Denials(denials)),
            }) => Ok(denials.entries),
            message::reply::Body::Control(control::Reply {
                body: Some(control::reply::Body::Error(error)),
            }) => Err(PeerError::Refused {
                node: node.name.clone(),
                error,
            }),
            _ => Err(PeerError::Protocol {
                node: node.name.clone(),
                what: "an odd answer",
            }),
        }
    }
}
