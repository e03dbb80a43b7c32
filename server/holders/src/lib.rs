//! Reading a checkpoint that this node does not hold, or whose copy here is damaged.
//!
//! ```text
//!  ClusteredStore ── RemoteNodes: order of the holders ──▶ RemoteCheckpoint ── Holders::fetch ──▶ a node's serve_fetch
//! ```
//!
//! The store sees the trait only. The daemon of a node in a cluster makes its store with [`PeerHolders`]:
//!
//! ```text
//! // A network of its own: what a restoring tree leaves unread must not hold up dumps on the same connection.
//! let network = Network::new(runtime, any, identity, region, addresses, permafrost_agent::remote::transport())?;
//! let nodes = cluster.nodes();
//! let peers = PeerHolders::new(network, move || nodes.live(), &name, domain, deadline);
//! let services = ClusterServices { remote: Some(Arc::new(peers)), … };
//! ```
//!
//! Damage that is found while reading is reported to the scrub (`ClusteredStore::suspect`), which heals it.

#![forbid(unsafe_code)]

mod measured;
mod order;

use std::sync::Arc;
use std::time::Duration;

use permafrost_agent::remote::{self, Arriving, Holders};
use permafrost_clustered::RemoteNodes;
use permafrost_metering::costs::Costs;
use permafrost_protocol::wire::message::request;
use permafrost_transport::peer::{Network, PeerError};

use self::measured::Measured;
use permafrost_cluster::{FailureDomain, NodesView};

pub use order::nearest_first;

/// The nodes of a cluster, over QUIC.
pub struct PeerHolders {
    network: Network,
    view: Box<dyn Fn() -> NodesView + Send + Sync>,
    node: String,
    domain: FailureDomain,
    deadline: Duration,
    costs: Option<Arc<Costs>>,
}

impl PeerHolders {
    /// Creates the nodes of a cluster as sources. `view` returns the live nodes and their addresses; `node` and
    /// `domain` identify this node. Each node has `deadline` to begin its reply.
    #[must_use]
    pub fn new(
        network: Network,
        view: impl Fn() -> NodesView + Send + Sync + 'static,
        node: &str,
        domain: FailureDomain,
        deadline: Duration,
    ) -> Self {
        Self {
            network,
            view: Box::new(view),
            node: node.to_owned(),
            domain,
            deadline,
            costs: None,
        }
    }

    /// Sets the costs in which the reads over each link are recorded.
    #[must_use]
    pub fn measured_by(self, costs: Option<Arc<Costs>>) -> Self {
        Self { costs, ..self }
    }
}

impl Holders for PeerHolders {
    fn fetch(
        &self,
        node: &str,
        others: bool,
        request: request::Fetch,
    ) -> Result<Arriving, PeerError> {
        let arriving = remote::fetch(&self.network, node, others, request, self.deadline)?;
        let Some(costs) = &self.costs else {
            return Ok(arriving);
        };
        Ok(Arriving {
            opened: arriving.opened,
            frames: Box::new(Measured::new(arriving.frames, node, costs)),
        })
    }
}

impl RemoteNodes for PeerHolders {
    fn in_order(&self, holders: &[String]) -> Vec<String> {
        nearest_first(&(self.view)(), &self.node, &self.domain, holders)
    }

    fn in_use(&self) -> Vec<String> {
        let nodes = (self.view)().nodes.into_iter();
        nodes.flat_map(|node| node.facts.in_use).collect()
    }
}
