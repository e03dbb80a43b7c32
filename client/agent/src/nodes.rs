//! The storage nodes that an agent knows, and requests to them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use permafrost_identity::ReloadingIdentity;
use permafrost_protocol::access::Access;
use permafrost_protocol::control::{self, ErrorCode, Reply, Request};
use permafrost_protocol::wire::message;
use permafrost_transport::peer::{self, Network, PeerError};
use tokio::runtime::Handle;

use crate::error::NodesError;
use crate::remote::{self, Arriving, Holders};

/// A storage node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageNode {
    /// Name of the node, which its certificate must have.
    pub name: String,
    /// Address on which the node listens for peers.
    pub address: SocketAddr,
}

/// The agent's storage nodes, and the connections to them.
pub(super) struct Nodes {
    pub(super) network: Network,
    pub(super) identity: Arc<ReloadingIdentity>,
    names: Vec<String>,
    /// Addresses on which the nodes listen for peers, `address:port`.
    pub(super) addresses: Vec<String>,
    /// Index of the node that answered last; it is asked first.
    preferred: AtomicUsize,
    /// Time limit of a request.
    pub(super) deadline: Duration,
}

impl Nodes {
    pub(super) fn new(
        runtime: Handle,
        nodes: &[StorageNode],
        identity: Arc<ReloadingIdentity>,
        deadline: Duration,
        transport: peer::PeerOptions,
    ) -> Result<Self, PeerError> {
        let addresses: HashMap<String, SocketAddr> = nodes
            .iter()
            .map(|node| (node.name.clone(), node.address))
            .collect();
        let any = if nodes.iter().all(|node| node.address.is_ipv4()) {
            SocketAddr::from(([0, 0, 0, 0], 0))
        } else {
            SocketAddr::from(([0_u16; 8], 0))
        };
        let lookup = move |node: &str| addresses.get(node).copied();
        Ok(Self {
            network: Network::new(
                runtime,
                any,
                Arc::clone(&identity),
                "",
                Arc::new(lookup),
                transport,
            )?,
            identity,
            names: nodes.iter().map(|node| node.name.clone()).collect(),
            addresses: nodes.iter().map(|node| node.address.to_string()).collect(),
            preferred: AtomicUsize::new(0),
            deadline,
        })
    }

    /// Returns the names of all nodes, the preferred one first.
    pub(super) fn in_order(&self) -> Vec<String> {
        let first = self.preferred.load(Ordering::Relaxed) % self.names.len().max(1);
        let (before, from) = self.names.split_at(first);
        from.iter().chain(before).cloned().collect()
    }

    /// Returns true if the agent knows `node`.
    pub(super) fn knows(&self, node: &str) -> bool {
        self.names.iter().any(|name| name == node)
    }

    /// Returns the names of all nodes: those that hold a checkpoint first, and of these, or else of the others,
    /// `first`.
    pub(super) fn holders_first(&self, first: &str, holders: &[String]) -> Vec<String> {
        let mut names = self.in_order();
        // Stable, so that the rest stays in order.
        names.sort_by_key(|name| (!holders.contains(name), name != first));
        names
    }

    pub(super) fn prefer(&self, node: &str) {
        if let Some(at) = self.names.iter().position(|name| name == node) {
            self.preferred.store(at, Ordering::Relaxed);
        }
    }

    /// Returns the deadline of a request that begins now.
    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.deadline
    }

    /// Sends a request to one node.
    pub(super) fn ask(
        &self,
        node: &str,
        body: control::request::Body,
        until: Instant,
    ) -> Result<control::reply::Body, control::Error> {
        self.ask_once(node, body, until).map_err(|(error, _)| error)
    }

    /// Sends a request to one node that can be reached now, which has until `until` for it.
    pub(super) fn ask_if_reachable(
        &self,
        node: &str,
        body: control::request::Body,
        until: Instant,
    ) -> Result<control::reply::Body, control::Error> {
        self.reach(node, true, until)
            .map_err(|error| refusal(&error))?;
        self.ask(node, body, until)
    }

    /// Sends a request to one node. With an error comes whether the request may have been carried out.
    fn ask_once(
        &self,
        node: &str,
        body: control::request::Body,
        until: Instant,
    ) -> Result<control::reply::Body, (control::Error, bool)> {
        let body = message::request::Body::Control(Request::new(body));
        match self.network.call(node, body, until) {
            Ok(message::reply::Body::Control(Reply { body: Some(body) })) => match body {
                control::reply::Body::Error(error) => Err((error, false)),
                body => Ok(body),
            },
            Ok(_) => Err((odd_answer(node), true)),
            Err(error) => Err((refusal(&error), error.may_have_arrived())),
        }
    }

    /// Sends a request to one node after another until one can be reached. Returns its name and its reply,
    /// which may be a refusal. One that may have been carried out is sent to another node only if it can be
    /// [repeated](Access::is_repeatable).
    pub(super) fn ask_any(
        &self,
        body: &control::request::Body,
    ) -> Result<(String, control::reply::Body), control::Error> {
        self.ask_until(body, |error| error.code() == ErrorCode::Unavailable)
    }

    /// Sends a request to one node after another until one has what is requested.
    pub(super) fn ask_for(
        &self,
        body: &control::request::Body,
    ) -> Result<(String, control::reply::Body), control::Error> {
        self.ask_until(body, |error| {
            matches!(error.code(), ErrorCode::Unavailable | ErrorCode::NotFound)
        })
    }

    fn ask_until(
        &self,
        body: &control::request::Body,
        another_may: impl Fn(&control::Error) -> bool,
    ) -> Result<(String, control::reply::Body), control::Error> {
        let until = self.until();
        let mut refused: Option<control::Error> = None;
        let names = self.in_order();
        let is_repeatable = Access::of_control(body).is_ok_and(|access| access.is_repeatable());
        for (name, at) in names.iter().zip(1..) {
            let has_answer = refused
                .as_ref()
                .is_some_and(|kept| kept.code() != ErrorCode::Unavailable);
            let asked = match self.reach(name, at < names.len() || has_answer, until) {
                Ok(()) => self.ask_once(name, body.clone(), until),
                Err(error) => Err((refusal(&error), false)),
            };
            match asked {
                Ok(answer) => {
                    self.prefer(name);
                    return Ok((name.clone(), answer));
                }
                Err((error, may_be_done))
                    if another_may(&error) && (is_repeatable || !may_be_done) =>
                {
                    // The refusal of a node that answered counts more than that of a node that could not be reached.
                    if !has_answer {
                        refused = Some(error);
                    }
                    if Instant::now() >= until {
                        break;
                    }
                }
                Err((error, _)) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(|| NodesError::NoNode.into()))
    }

    /// Checks that a node can be reached, if there are `others` to turn to until `deadline`.
    fn reach(&self, node: &str, others: bool, deadline: Instant) -> Result<(), PeerError> {
        if !others {
            return Ok(());
        }
        remote::reach(&self.network, node, deadline)
    }
}

impl Holders for Nodes {
    fn fetch(
        &self,
        node: &str,
        others: bool,
        request: message::request::Fetch,
    ) -> Result<Arriving, PeerError> {
        remote::fetch(&self.network, node, others, request, self.deadline)
    }
}

/// Converts a node's failure into an error of the control protocol.
pub(super) fn refusal(error: &PeerError) -> control::Error {
    let hint = "the next attempt goes to another node, if the agent knows one";
    remote::refusal(error, hint)
}

/// Returns the error for a node that answers something else than it was asked.
pub(super) fn odd_answer(node: &str) -> control::Error {
    let node = node.to_owned();
    remote::OtherAnswer { node }.into()
}
