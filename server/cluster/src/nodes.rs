//! A view of the nodes, updated by a watch.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Error, EventType, GetOptions, KeyValue, WatchOptions};
use parking_lot::RwLock;

use super::etcd::Etcd;
use super::fence::Tick;
use super::keys::Keys;
use super::values::{Json as _, Member, MemberState, Node, NodeFacts};

/// Interval at which etcd is asked to confirm that the view is up to date.
const PROGRESS: Duration = Duration::from_secs(1);

/// Time after which a watch that is silent, although asked, is replaced by one on another member.
const SILENCE: Duration = Duration::from_secs(3);

/// A node that is alive.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveNode {
    /// Facts that the node publishes.
    pub facts: NodeFacts,
    /// Membership status set by an operator.
    pub state: MemberState,
    /// Fencing token: the higher of two is the later registration.
    pub token: u64,
}

/// The nodes at one point in time.
#[derive(Clone, Debug)]
pub struct NodesView {
    /// Live nodes, by name.
    pub nodes: Vec<LiveNode>,
    /// All nodes that have ever been registered, alive or not, by name.
    pub members: Vec<Member>,
    /// Time since etcd last confirmed the view; if it is longer than a lease, nothing is known about the present.
    /// [`Duration::MAX`] if it was never confirmed.
    pub age: Duration,
}

impl NodesView {
    /// Returns the number of nodes that are neither alive nor removed.
    #[must_use]
    pub fn down(&self) -> usize {
        let is_live = |name: &str| self.nodes.iter().any(|node| node.facts.name == name);
        let down = (self.members.iter())
            .filter(|member| member.state != MemberState::Removed && !is_live(&member.name));
        down.count()
    }
}

#[derive(Default)]
struct State {
    nodes: BTreeMap<String, (Node, i64)>,
    members: BTreeMap<String, Member>,
    confirmed: Option<Tick>,
}

/// View of the nodes; clones share it.
#[derive(Clone, Default)]
pub struct ClusterNodes {
    state: Arc<RwLock<State>>,
}

impl ClusterNodes {
    /// Returns the last known nodes. Makes no call, and never blocks for longer than it takes to copy them.
    #[must_use]
    pub fn live(&self) -> NodesView {
        let state = self.state.read();
        let live = state.nodes.values().map(|(node, revision)| LiveNode {
            facts: node.facts.clone(),
            state: state
                .members
                .get(&node.facts.name)
                .map(|member| member.state)
                .unwrap_or_default(),
            token: u64::try_from(*revision).unwrap_or_default(),
        });
        NodesView {
            nodes: live.collect(),
            members: state.members.values().cloned().collect(),
            age: state
                .confirmed
                .map_or(Duration::MAX, |confirmed| Tick::now().since(confirmed)),
        }
    }

    /// Follows etcd until dropped.
    pub(crate) async fn follow(self, etcd: Arc<Etcd>, keys: Keys) {
        loop {
            if let Err(error) = self.follow_once(&etcd, &keys).await {
                tracing::debug!(%error, "view of the nodes lost; taking it up again");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// Reads all nodes, then applies changes, until the watch fails.
    async fn follow_once(&self, etcd: &Etcd, keys: &Keys) -> Result<(), Error> {
        let (from, to) = keys.members_and_nodes();
        let range = GetOptions::new().with_range(to.clone());
        let sent = Tick::now();
        let read = etcd
            .call(SILENCE, |mut client| {
                let (from, range) = (from.clone(), range.clone());
                async move { client.get(from, Some(range)).await }
            })
            .await
            .map_err(|failure| Error::Internal(failure.to_string()))?;
        let revision = read.header().map_or(0, |header| header.revision());
        let (before, now) = {
            let mut state = self.state.write();
            let before = state.names();
            state.nodes.clear();
            state.members.clear();
            for kv in read.kvs() {
                state.put(keys, kv);
            }
            state.confirmed = Some(sent);
            (before, state.names())
        };
        log_changes(&before, &now);
        let (index, mut client) = etcd.stream_client().await?;
        let result = self.watch(&mut client, keys, &from, to, revision).await;
        etcd.give_up(index);
        result
    }

    async fn watch(
        &self,
        client: &mut etcd_client::Client,
        keys: &Keys,
        from: &str,
        to: String,
        revision: i64,
    ) -> Result<(), Error> {
        let options = WatchOptions::new()
            .with_range(to)
            .with_start_revision(revision + 1);
        let silent = || Error::WatchError("silent".to_owned());
        let mut stream = tokio::time::timeout(SILENCE, client.watch(from, Some(options)))
            .await
            .map_err(|_| silent())??;
        let mut asked = Tick::now();
        let mut heard = tokio::time::Instant::now();
        loop {
            let Ok(message) = tokio::time::timeout(PROGRESS, stream.message()).await else {
                if heard.elapsed() > SILENCE {
                    return Err(silent());
                }
                asked = Tick::now();
                stream.request_progress().await?;
                continue;
            };
            let Some(message) = message? else {
                return Err(Error::WatchError("ended".to_owned()));
            };
            if message.canceled() {
                return Err(Error::WatchError(message.cancel_reason().to_owned()));
            }
            heard = tokio::time::Instant::now();
            let (before, now) = {
                let mut state = self.state.write();
                let before = state.names();
                for event in message.events() {
                    let Some(kv) = event.kv() else { continue };
                    match event.event_type() {
                        EventType::Put => state.put(keys, kv),
                        EventType::Delete => state.remove(keys, kv.key()),
                    }
                }
                // As of the time of the request: an answer may have been on its way for long.
                state.confirmed = state.confirmed.max(Some(asked));
                (before, state.names())
            };
            log_changes(&before, &now);
        }
    }
}

/// Logs the nodes that have come, and those that have gone. A log that nobody reads blocks: no lock is held here.
fn log_changes(before: &BTreeSet<String>, now: &BTreeSet<String>) {
    for node in now.difference(before) {
        tracing::info!(event = "node-joined", node, "node is alive");
    }
    for node in before.difference(now) {
        tracing::warn!(
            event = "node-lost",
            node,
            "node is gone: it has left, or its lease has ended"
        );
    }
}

impl State {
    fn names(&self) -> BTreeSet<String> {
        self.nodes.keys().cloned().collect()
    }

    fn put(&mut self, keys: &Keys, kv: &KeyValue) {
        let key = String::from_utf8_lossy(kv.key());
        if key.starts_with(&keys.nodes()) {
            match Node::decode(kv.value()) {
                // A value under another node's key is not valid.
                Ok(node) if keys.node(&node.facts.name) == key => {
                    let name = node.facts.name.clone();
                    self.nodes.insert(name, (node, kv.create_revision()));
                }
                Ok(_) => {
                    tracing::warn!(event = "registry-node-misplaced", %key, "node under a foreign key ignored")
                }
                Err(error) => {
                    tracing::warn!(event = "registry-node-unreadable", %key, %error, "node ignored")
                }
            }
        } else {
            match Member::decode(kv.value()) {
                Ok(member) => {
                    self.members.insert(member.name.clone(), member);
                }
                Err(error) => {
                    tracing::warn!(event = "registry-member-unreadable", %key, %error, "member ignored")
                }
            }
        }
    }

    fn remove(&mut self, keys: &Keys, key: &[u8]) {
        self.nodes
            .retain(|name, _| keys.node(name).as_bytes() != key);
        self.members
            .retain(|name, _| keys.member(name).as_bytes() != key);
    }
}
