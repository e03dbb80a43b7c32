//! Registers this node, keeps the registration alive, refreshes it, and registers again when it was lost.

mod refusal;
mod register;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use etcd_client::{Compare, CompareOp, KeyValue, PutOptions, Txn, TxnOp};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::config::ClusterConfig;
use super::etcd::{Etcd, Failure, Outcome};
use super::fence::{Fence, Registration, Tick};
use super::keys::Keys;
use super::values::{DenialList, Holder, Json as _, Node, NodeFacts, VERSION};
pub(crate) use refusal::Refusal;

/// Number of signs of life after which unchanged facts are written again, so that a value damaged by hand is
/// repaired.
const REFRESH_EVERY: u32 = 20;

/// Leadership of the background work: one node of all has it.
#[derive(Clone, Debug)]
pub struct Leader {
    fence: Arc<Fence>,
    /// Fencing token of the registration that leads; 0 for none.
    token: Arc<AtomicI64>,
}

impl Leader {
    /// Returns true if this node certainly leads. Makes no call.
    #[must_use]
    pub fn is_mine(&self) -> bool {
        self.fence
            .registration()
            .is_ok_and(|own| own.token == self.token.load(Ordering::Acquire))
    }
}

/// Id of etcd's data, if known.
#[derive(Clone, Debug, Default)]
pub(crate) struct DataId(Arc<Mutex<Option<String>>>);

impl DataId {
    pub(crate) fn known(&self) -> Option<String> {
        self.0.lock().clone()
    }

    fn learn(&self, found: &[Vec<KeyValue>], key: &str) {
        let mut kvs = found.iter().flatten();
        let Some(kv) = kvs.find(|kv| kv.key() == key.as_bytes()) else {
            return;
        };
        let id = String::from_utf8_lossy(kv.value()).into_owned();
        let mut known = self.0.lock();
        if known.as_ref() != Some(&id) {
            tracing::info!(
                event = "registry-data-joined",
                cluster = id,
                "the registry's data"
            );
            *known = Some(id);
        }
    }
}

/// The cluster's list of denied certificates, as the registry has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeardDenials {
    /// Id of etcd's data; empty while unknown.
    pub data: String,
    /// Revision of the list's last change, in that data.
    pub revision: i64,
    /// Entries of the list.
    pub entries: Vec<String>,
}

pub(crate) struct Keeper {
    etcd: Arc<Etcd>,
    keys: Keys,
    fence: Arc<Fence>,
    leader: Arc<AtomicI64>,
    data: DataId,
    facts: watch::Receiver<NodeFacts>,
    denials: watch::Sender<Option<HeardDenials>>,
    /// Set to the reason for which this node can never register again.
    end: watch::Sender<Option<String>>,
    ttl: Duration,
    incarnation: String,
    boot: String,
    /// Reason why the last attempt to register failed.
    refused: Option<String>,
}

/// Keeps the registration until it is dropped or [`Self::leave`] is called.
pub(crate) struct Membership {
    fence: Arc<Fence>,
    leader: Arc<AtomicI64>,
    data: DataId,
    facts: watch::Sender<NodeFacts>,
    denials: watch::Receiver<Option<HeardDenials>>,
    stop: watch::Sender<bool>,
    ended: watch::Receiver<Option<String>>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Membership {
    /// Registers, and keeps the registration in the background. If etcd does not answer, registering continues in
    /// the background, too.
    pub(crate) async fn begin(
        etcd: Arc<Etcd>,
        config: &ClusterConfig,
        facts: NodeFacts,
    ) -> Result<Self, Refusal> {
        let (facts_sender, facts) = watch::channel(facts);
        let (stop, stopped) = watch::channel(false);
        let (heard, denials) = watch::channel(None);
        let (end, ended) = watch::channel(None);
        let keeper = Keeper {
            etcd,
            keys: Keys::new(&config.prefix),
            fence: Arc::default(),
            leader: Arc::default(),
            data: DataId::default(),
            facts,
            denials: heard,
            end,
            ttl: config.lease_ttl.max(Duration::from_secs(2)),
            incarnation: uuid::Uuid::new_v4().to_string(),
            boot: boot_id(),
            refused: None,
        };
        let (fence, leader) = (keeper.fence.clone(), keeper.leader.clone());
        let data = keeper.data.clone();
        let registration = match keeper.register().await {
            Ok(registration) => Some(registration),
            // Wrong credentials do not become right by waiting.
            Err(Refusal::Etcd(failure)) if !failure.is_ours() => {
                tracing::warn!(event = "registry-registration-failed", %failure, "not registered in the cluster; going on trying");
                keeper.fence.lose(&failure.to_string());
                None
            }
            Err(refusal) => return Err(refusal),
        };
        let task = tokio::spawn(keeper.keep(registration, stopped));
        Ok(Self {
            fence,
            leader,
            data,
            facts: facts_sender,
            denials,
            ended,
            stop,
            task: Mutex::new(Some(task)),
        })
    }

    pub(crate) fn fence(&self) -> Arc<Fence> {
        self.fence.clone()
    }

    pub(crate) fn leader(&self) -> Leader {
        Leader {
            fence: self.fence.clone(),
            token: self.leader.clone(),
        }
    }

    /// Returns the id of etcd's data; `None` before the first registration.
    pub(crate) fn data_id(&self) -> Option<String> {
        self.data.known()
    }

    /// Returns a channel that is set to the reason when this node must stop.
    pub(crate) fn ended(&self) -> watch::Receiver<Option<String>> {
        self.ended.clone()
    }

    /// Returns a channel with the cluster's list of denied certificates.
    pub(crate) fn denials(&self) -> watch::Receiver<Option<HeardDenials>> {
        self.denials.clone()
    }

    /// Changes this node's facts; its name and region stay.
    pub(crate) fn update(&self, change: impl FnOnce(&mut NodeFacts)) {
        self.facts.send_if_modified(|facts| {
            let before = facts.clone();
            change(facts);
            facts.name.clone_from(&before.name);
            facts.region.clone_from(&before.region);
            *facts != before
        });
    }

    /// Ends the registration: other nodes see at once that the node is gone, and its locks are free.
    pub(crate) async fn leave(&self) {
        let _ = self.stop.send(true);
        let task = self.task.lock().take();
        if let Some(task) = task {
            // The wait is bounded: the task makes one more call.
            let _ = task.await;
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let task = self.task.get_mut();
        // Without a call to etcd, as after a crash: the lease expires by itself.
        if let Some(task) = task.take() {
            task.abort();
            self.fence.lose("it has left the cluster");
        }
    }
}

impl Keeper {
    async fn keep(
        mut self,
        mut registration: Option<Registration>,
        mut stopped: watch::Receiver<bool>,
    ) {
        let stay = async {
            loop {
                let own = match registration {
                    Some(own) => own,
                    None => match self.register_at_last().await {
                        Ok(own) => own,
                        // The daemon that took its place is alive, and neither may end the other's lease.
                        Err(twin) => {
                            self.end.send_replace(Some(twin));
                            return std::future::pending().await;
                        }
                    },
                };
                registration = Some(own);
                // In parallel: an election that waits for a silent member must not delay the signs of life.
                let why = tokio::select! {
                    why = self.stay_alive(own) => why,
                    why = self.serve(own) => why,
                };
                tracing::error!(
                    event = "registry-registration-lost",
                    "{why}; registering again"
                );
                self.fence.lose(why);
                registration = None;
            }
        };
        // A call that waits for etcd must not keep a daemon from stopping.
        tokio::select! {
            _ = stopped.wait_for(|stop| *stop) => {}
            () = stay => {}
        }
        self.fence.lose("it has left the cluster");
        if let Some(registration) = registration {
            let _ = self.revoke(registration.lease).await;
        }
    }

    /// Registers, retrying after every refusal.
    ///
    /// # Errors
    /// Another daemon has taken this node's place with a copy of its region.
    async fn register_at_last(&mut self) -> Result<Registration, String> {
        let mut ticks = self.ticks();
        loop {
            ticks.tick().await;
            match self.register().await {
                Ok(own) => {
                    tracing::info!(
                        event = "node-registered",
                        token = own.token,
                        "registered in the cluster"
                    );
                    self.refused = None;
                    return Ok(own);
                }
                Err(refusal) => {
                    let why = refusal.to_string();
                    // Logged once, and not with every attempt: a removed node retries for as long as it runs.
                    if self.refused.as_ref() != Some(&why) {
                        tracing::warn!(event = "registry-registration-refused", %refusal, "not registered in the cluster; going on trying");
                    }
                    self.fence.lose(&why);
                    if matches!(refusal, Refusal::Twin { .. }) {
                        return Err(why);
                    }
                    self.refused = Some(why);
                }
            }
        }
    }

    /// Sends signs of life until the lease is lost, and returns the reason. Each is a stream of its own, and waits
    /// for no earlier one: one that hangs blocks no other.
    async fn stay_alive(&self, own: Registration) -> &'static str {
        let mut ticks = self.ticks();
        let mut sent = FuturesUnordered::new();
        loop {
            tokio::select! {
                _ = ticks.tick() => sent.push(self.keep_alive(own)),
                Some(answer) = sent.next() => match answer {
                    Ok(()) => {}
                    Err(Failure::Refused(error)) => {
                        tracing::error!(event = "registry-lease-refused", %error, "a sign of life was refused");
                        return "its lease was lost";
                    }
                    // The lease may be lost or not; the fence closes by itself, and opens again if it was not.
                    Err(failure) => tracing::warn!(event = "registry-lease-unanswered", %failure, "no sign of life reached the registry"),
                },
            }
        }
    }

    /// Refreshes the facts, and leads if no node does, until the registration is gone; returns the reason.
    async fn serve(&self, own: Registration) -> &'static str {
        let mut ticks = self.ticks();
        let mut facts = self.facts.clone();
        let mut since_refresh = 0;
        loop {
            ticks.tick().await;
            since_refresh += 1;
            if facts.has_changed().unwrap_or(false) || since_refresh >= REFRESH_EVERY {
                since_refresh = 0;
                let told = facts.borrow_and_update().clone();
                match self.refresh(own, told).await {
                    Ok(true) => {}
                    Ok(false) => return "its registration was taken away",
                    Err(failure) => {
                        tracing::warn!(event = "registry-facts-not-refreshed", %failure, "facts not refreshed")
                    }
                }
            }
            self.campaign(own).await;
        }
    }

    /// Returns an interval of a third of a lease.
    fn ticks(&self) -> tokio::time::Interval {
        let mut ticks = tokio::time::interval(self.ttl / 3);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        ticks
    }

    fn value(&self, facts: NodeFacts) -> Vec<u8> {
        Node {
            v: VERSION,
            incarnation: self.incarnation.clone(),
            boot: self.boot.clone(),
            facts,
        }
        .encode()
    }

    async fn transaction(&self, txn: Txn) -> Result<Outcome, Failure> {
        self.etcd.transact(self.ttl, txn).await
    }

    async fn grant(&self) -> Result<(i64, Tick, Duration), Failure> {
        let limit = self.ttl;
        let ttl = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
        self.etcd
            .call(self.ttl, |mut client| async move {
                let sent = Tick::now();
                let lease = client.lease_grant(ttl, None).await?;
                // etcd may lengthen the lease; counting with the shorter time is safe.
                Ok((lease.id(), sent, seconds(lease.ttl()).min(limit)))
            })
            .await
    }

    async fn revoke(&self, lease: i64) -> Result<(), Failure> {
        let revoked = self
            .etcd
            .call(Duration::from_secs(2), |mut client| async move {
                client.lease_revoke(lease).await
            })
            .await;
        match revoked {
            // Not found: the registration is already gone, as intended.
            Ok(_) | Err(Failure::Refused(_)) => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    async fn keep_alive(&self, own: Registration) -> Result<(), Failure> {
        let sent = self
            .etcd
            .call(self.ttl, |mut client| async move {
                let sent = Tick::now();
                // Returns when the first answer has come, and fails if the lease does not exist.
                client.lease_keep_alive(own.lease).await?;
                Ok(sent)
            })
            .await?;
        self.fence.extend(own, sent, self.ttl);
        Ok(())
    }

    /// Writes the facts. Returns `false` if the registration is gone.
    async fn refresh(&self, own: Registration, facts: NodeFacts) -> Result<bool, Failure> {
        let key = self.keys.node(&facts.name);
        let put = Txn::new()
            .when([Compare::create_revision(
                key.clone(),
                CompareOp::Equal,
                own.token,
            )])
            .and_then([
                TxnOp::put(
                    key,
                    self.value(facts),
                    Some(PutOptions::new().with_lease(own.lease)),
                ),
                // An operator may have removed it, so that nodes treat etcd's data as new.
                self.name_data(),
                TxnOp::get(self.keys.cluster(), None),
            ]);
        let outcome = self.transaction(put).await?;
        self.data.learn(&outcome.found, &self.keys.cluster());
        Ok(outcome.succeeded)
    }

    /// Publishes the list of denied certificates to this node.
    fn hear_denials(&self, found: &[Vec<KeyValue>]) {
        let key = self.keys.denied();
        let mut kvs = found.iter().flatten();
        let Some(kv) = kvs.find(|kv| kv.key() == key.as_bytes()) else {
            return;
        };
        let data = self.data.known().unwrap_or_default();
        let revision = kv.mod_revision();
        let is_known = |heard: &HeardDenials| heard.data == data && heard.revision == revision;
        if self.denials.borrow().as_ref().is_some_and(is_known) {
            return;
        }
        match DenialList::decode(kv.value()) {
            Ok(list) => drop(self.denials.send_replace(Some(HeardDenials {
                data,
                revision,
                entries: list.entries.into_iter().collect(),
            }))),
            Err(error) => {
                tracing::error!(event = "registry-denials-refused", %error, key, "the list of denied certificates is not used")
            }
        }
    }

    /// Leads if no node does, and reads the list of denied certificates: each third of a lease's time.
    async fn campaign(&self, own: Registration) {
        let name = self.facts.borrow().name.clone();
        let (key, node_key) = (self.keys.leader(), self.keys.node(&name));
        let holder = Holder {
            v: VERSION,
            node: name,
            token: self.incarnation.clone(),
        };
        let put = Txn::new()
            .when([
                Compare::create_revision(node_key, CompareOp::Equal, own.token),
                Compare::create_revision(key.clone(), CompareOp::Equal, 0),
            ])
            .and_then([
                TxnOp::put(
                    key.clone(),
                    holder.encode(),
                    Some(PutOptions::new().with_lease(own.lease)),
                ),
                TxnOp::get(key.clone(), None),
                TxnOp::get(self.keys.denied(), None),
            ])
            .or_else([TxnOp::get(key, None), TxnOp::get(self.keys.denied(), None)]);
        match self.transaction(put).await {
            Ok(outcome) => {
                self.hear_denials(&outcome.found);
                let is_mine = outcome
                    .found
                    .iter()
                    .flatten()
                    .any(|kv| kv.lease() == own.lease);
                let token = if is_mine { own.token } else { 0 };
                if self.leader.swap(token, Ordering::AcqRel) != token && is_mine {
                    tracing::info!(
                        event = "leader-elected",
                        "this node leads the work in the background"
                    );
                }
            }
            // The result is unknown: the current leader leads on, while the fence is open.
            Err(failure) => {
                tracing::warn!(event = "leader-election-failed", %failure, "no leader chosen")
            }
        }
    }
}

fn seconds(ttl: i64) -> Duration {
    Duration::from_secs(u64::try_from(ttl).unwrap_or_default())
}

/// Returns an id that changes with every start of the machine. Random where the kernel gives none.
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or_else(
        |_| uuid::Uuid::new_v4().to_string(),
        |id| id.trim().to_owned(),
    )
}
