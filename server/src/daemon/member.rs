//! A daemon as a node of a cluster: joining, and the work in the background from then on.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use permafrost_agent::remote;
use permafrost_audit::Audit;
use permafrost_cluster::repair::{
    ClusterView, Leading, Puller, RepairBoard, RepairLimits, RepairProgress, Sweep, SweepTiming,
    Throttle, Timing, Worker,
};
use permafrost_cluster::replication::{FanOut, FanOutStats};
use permafrost_cluster::scrub::{MendByPull, ScrubOptions, ScrubQueue, Scrubber};
use permafrost_cluster::{
    Cluster, ClusterNodes, EtcdRegistry, NodeFacts, Operate, PeerInventories,
};
use permafrost_clustered::{ClusterServices, ClusteredStore, KnownData, Registry as _};
use permafrost_holders::PeerHolders;
use permafrost_identity::ReloadingIdentity;
use permafrost_metering::costs::{Costs, Links, Publication};
use permafrost_metering::queues::{Others, Queues, Reservations};
use permafrost_protocol::control;
use permafrost_protocol::wire::message;
use permafrost_store::{Store, StoreError};
use permafrost_transport::peer::{self, Network};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::backend::InCluster;
use super::listing::Listing;
use super::own::facts;
use super::policies::{self, SignedPolicies};
use super::retaining::Decides;
use super::{StartError, source};
use crate::config::ClusterOptions;
use crate::denials::DenialLists;
use crate::peers::Copying;
use permafrost_metrics::{ClusterNumbers, Metrics, ReplicationNumbers};

/// Time within which a node must begin its reply to a reader. The reader then tries the next holder.
const READ_DEADLINE: Duration = Duration::from_secs(10);

/// Time within which a node must answer a request that was forwarded to it: a caller waits for the reply.
const ASK_DEADLINE: Duration = Duration::from_secs(5);

/// Time after which a replica that accepts nothing is abandoned: the task is frozen meanwhile.
const STALL: Duration = Duration::from_secs(5);

/// Time that a node may take for one part of its inventory: it reads a manifest for each checkpoint.
const INVENTORY_DEADLINE: Duration = Duration::from_secs(30);

/// Period at which this node reads its own facts again. The next renewal of the lease publishes what has changed.
const FACTS_PERIOD: Duration = Duration::from_secs(1);

/// Most checkpoints that this node names as being read.
const MAX_IN_USE: usize = 256;

/// State of this node as a member of a cluster.
pub(super) struct Member {
    cluster: Arc<Cluster>,
    name: String,
    /// Facts of this node when it joined.
    facts: NodeFacts,
    /// Description of the registry and of the connection with it, for `status`.
    registry_words: String,
    /// Number of copies wanted of each checkpoint.
    wanted: u32,
    networks: [Network; 2],
    throttle: Arc<Throttle>,
    store: Arc<ClusteredStore>,
    scrubber: Arc<Scrubber>,
    puller: Arc<Puller>,
    operator: Arc<dyn Operate>,
    progress: Arc<RepairProgress>,
    board: RepairBoard,
    copies: Arc<FanOutStats>,
    links: Arc<FanOut>,
    telling: JoinHandle<()>,
    /// Task that receives the cluster's list of denied certificates.
    hearing: OnceLock<JoinHandle<()>>,
    workers: Vec<Worker>,
}

/// Parameters for joining a cluster.
pub(super) struct Joining<'a> {
    pub(super) options: &'a ClusterOptions,
    pub(super) data_dir: &'a Path,
    /// Address on which peers are served.
    pub(super) address: SocketAddr,
    pub(super) identity: &'a Arc<ReloadingIdentity>,
    /// Send the pages of dumps over TLS where the other node takes them so.
    pub(super) pages_over_tcp: bool,
    pub(super) store: &'a Arc<Store>,
    pub(super) costs: &'a Arc<Costs>,
    pub(super) scrub: ScrubOptions,
    pub(super) audit: &'a Arc<Audit>,
}

impl Member {
    /// Registers the node, and joins the store to the cluster.
    pub(super) async fn join(joining: Joining<'_>) -> Result<Self, StartError> {
        let Joining {
            options,
            data_dir,
            address,
            identity,
            pages_over_tcp,
            store,
            costs,
            scrub,
            audit,
        } = joining;
        let runtime = Handle::current();
        let name = identity.current().name().to_owned();
        let facts = facts(options, &name, address, store)?;
        let region = facts.region.clone();
        let joined = Cluster::join_as(&options.registry, facts.clone(), Some(Arc::clone(identity)));
        let cluster = Arc::new(joined.await?);
        let network = |transport: peer::PeerOptions| {
            let nodes = cluster.nodes();
            let any = if address.is_ipv4() {
                SocketAddr::from(([0; 4], 0))
            } else {
                SocketAddr::from(([0; 16], 0))
            };
            Network::new(
                runtime.clone(),
                any,
                Arc::clone(identity),
                &region,
                Arc::new(move |node: &str| address_of(&nodes, node)),
                transport,
            )
        };
        let copies = network(peer::PeerOptions {
            reconnect: STALL,
            stall: STALL,
            tls_bulk: pages_over_tcp,
            ..peer::PeerOptions::default()
        })?;
        // Of its own: what a restoring tree leaves unread must not hold up dumps on the same connection.
        let reads = network(remote::transport())?;

        let nodes = cluster.nodes();
        let registry = Arc::new(cluster.registry());
        let fan_out = FanOut::new(
            runtime.clone(),
            copies.clone(),
            Arc::new(nodes.clone()),
            &name,
            facts.counts(),
            options.copies,
            Arc::clone(costs),
        );
        let copy_stats = fan_out.stats();
        let fan_out = Arc::new(fan_out);
        let view = nodes.clone();
        let peers = PeerHolders::new(
            reads.clone(),
            move || view.live(),
            &name,
            options.domain.clone(),
            READ_DEADLINE,
        );
        let queue = Arc::<ScrubQueue>::default();
        let services = ClusterServices {
            node: name.clone(),
            registry: registry.clone(),
            replicate: Some(Arc::<FanOut>::clone(&fan_out)),
            remote: Some(Arc::new(peers.measured_by(Some(Arc::clone(costs))))),
            durability: options.durability,
            deadline: options.deadline,
            wanted_copies: options.copies,
        };
        let keeper = SignedPolicies::new(cluster.registry(), Arc::clone(identity));
        let clustered = ClusteredStore::with_policies(
            Arc::clone(store),
            Some(services),
            Arc::<ScrubQueue>::clone(&queue),
            Box::new(keeper),
            policies::recorded_by(audit),
        );

        let throttle = Throttle::of(store, options.repair);
        let puller = Arc::new(Puller::new(
            Arc::clone(store),
            reads.clone(),
            &name,
            Arc::clone(&throttle),
            Arc::clone(costs),
        ));
        let mend = MendByPull::new(Arc::clone(&clustered), Arc::clone(&puller));
        let scrubber = Scrubber::new(&clustered, queue, Some(Arc::new(mend)), scrub);
        let inventories = PeerInventories {
            node: name.clone(),
            store: Arc::clone(store),
            scrubber: Arc::clone(&scrubber),
            network: reads.clone(),
            deadline: INVENTORY_DEADLINE,
        };
        let operator = cluster.operator(Arc::new(inventories), options.copies);

        let progress = Arc::<RepairProgress>::default();
        let leading = Leading::new(
            registry,
            Arc::new(reads.clone()),
            Arc::new(ClusterView {
                leader: cluster.leader(),
                nodes: nodes.clone(),
            }),
            Timing {
                grace: options.repair_grace,
                ..Timing::default()
            },
            Arc::clone(&progress),
        );
        let board = leading.board();
        let listing = Arc::new(Listing::new(
            cluster.registry(),
            KnownData::new(data_dir),
            Arc::clone(store),
            nodes,
            &name,
        ));
        // Must precede the first dump: checkpoints on this node may have been listed in other data of etcd, and a
        // rebuild lists them again under the old numbers. Without the registry there is no dump either, and the
        // sweep does this later.
        let first = Arc::clone(&listing);
        let looked = tokio::task::spawn_blocking(move || first.list("")).await;
        if let Ok(Err(error)) = looked {
            tracing::warn!(event = "registry-not-read", %error, "the registry was not looked through");
        }
        let sweep = Sweep::new(
            Arc::clone(&clustered),
            listing.clone(),
            &name,
            listing,
            SweepTiming {
                // Whoever seals has given up by then, or cannot publish any more.
                settle: options.deadline * 2 + options.registry.lease_ttl * 2,
                ..SweepTiming::default()
            },
        );
        let no_thread = StoreError::io("start a thread");
        let workers = [leading.start(), sweep.start()].into_iter();
        let workers = workers.collect::<Result<_, _>>().map_err(no_thread)?;
        let telling = tokio::spawn(tell_facts(
            Arc::clone(&cluster),
            Arc::clone(store),
            Arc::clone(costs),
        ));
        Ok(Self {
            cluster,
            name,
            facts,
            registry_words: options.registry.words(),
            wanted: options.copies,
            networks: [copies, reads],
            throttle,
            store: clustered,
            scrubber,
            puller,
            operator: Arc::new(operator),
            progress,
            board,
            copies: copy_stats,
            links: fan_out,
            telling,
            hearing: OnceLock::new(),
            workers,
        })
    }

    /// Returns the puller and the throttle that requests of peers need.
    pub(super) fn copying(&self) -> Copying {
        Copying {
            puller: Arc::clone(&self.puller),
            throttle: Arc::clone(&self.throttle),
        }
    }

    /// Returns the checkpoints of this node and of the others.
    pub(super) fn store(&self) -> Arc<ClusteredStore> {
        Arc::clone(&self.store)
    }

    /// Returns the scrub of this node.
    pub(super) fn scrubber(&self) -> Arc<Scrubber> {
        Arc::clone(&self.scrubber)
    }

    /// Returns the reservations in the queues of all nodes.
    pub(super) fn reservations(&self, queues: &Arc<Queues>, store: &Store) -> Reservations {
        let [_, network] = &self.networks;
        let others = OtherNodes(network.clone());
        let capacity_bytes = store.region().usage().capacity_bytes;
        Reservations::of_cluster(
            Arc::clone(queues),
            capacity_bytes,
            &self.name,
            Box::new(others),
        )
    }

    /// Returns the links to other nodes, for probes.
    pub(super) fn links(&self) -> Arc<dyn Links> {
        Arc::<FanOut>::clone(&self.links)
    }

    /// Waits until this node has to stop, and returns the reason.
    pub(super) async fn failed(&self) -> StoreError {
        self.cluster.failed().await
    }

    /// Returns the cluster's registry.
    pub(super) fn registry(&self) -> EtcdRegistry {
        self.cluster.registry()
    }

    /// Applies the cluster's list of denied certificates on this node. Must be called once.
    pub(super) fn hear_denials(&self, denials: &Arc<DenialLists>) {
        let (denials, mut lists) = (Arc::clone(denials), self.cluster.denials());
        let hearing = tokio::spawn(async move {
            loop {
                let list = lists.borrow_and_update().clone();
                if let Some(list) = list {
                    let denials = Arc::clone(&denials);
                    let taken = tokio::task::spawn_blocking(move || denials.hear(&list)).await;
                    if taken.is_err() {
                        tracing::error!(
                            event = "denials-task-failed",
                            "taking in the cluster's list of denied certificates failed"
                        );
                    }
                }
                if lists.changed().await.is_err() {
                    return;
                }
            }
        });
        if let Err(second) = self.hearing.set(hearing) {
            second.abort();
        }
    }

    /// Returns the handler of `permafrost node …`.
    pub(super) fn operator(&self) -> Arc<dyn Operate> {
        Arc::clone(&self.operator)
    }

    /// Returns a function that returns true while this node leads the cluster's work in the background.
    pub(super) fn decides(&self) -> Decides {
        let leader = self.cluster.leader();
        Box::new(move || leader.is_mine())
    }

    /// Returns a function that reports the status of this node and of the registry. It queries the registry unless
    /// the registry is known to be unreachable.
    pub(super) fn status(&self) -> InCluster {
        let (cluster, node, copies_wanted) =
            (Arc::clone(&self.cluster), self.name.clone(), self.wanted);
        let registry = self.registry_words.clone();
        let copies_count = self.facts.counts();
        let operator = Arc::clone(&self.operator);
        Box::new(move || {
            let fenced = cluster.fence().check().err();
            // Nobody waits for a registry that is known to be away.
            let counted = match &fenced {
                None => operator.nodes(&control::request::Nodes::default()).ok(),
                Some(_) => None,
            };
            let counted = counted.unwrap_or_default();
            control::ClusterStatus {
                node: node.clone(),
                id: cluster.id().unwrap_or_default(),
                fenced: fenced.map_or_else(String::new, |error| error.to_string()),
                leader: counted.leader,
                copies_wanted,
                registry: registry.clone(),
                copies_count,
                under_replicated: counted.under_replicated,
                stranded: counted.stranded,
                damaged: counted.damaged,
            }
        })
    }

    /// Returns the facts that this node publishes.
    pub(super) fn facts(&self) -> NodeFacts {
        self.facts.clone()
    }

    /// Returns the other nodes in this node's view.
    pub(super) fn others(&self) -> source::Others {
        source::Others {
            nodes: self.cluster.nodes(),
            fence: self.cluster.fence(),
            copying: source::Copying {
                puller: Arc::clone(&self.puller),
                progress: Arc::clone(&self.progress),
                board: self.board.clone(),
                leads: {
                    let leader = self.cluster.leader();
                    Box::new(move || leader.is_mine())
                },
            },
        }
    }

    /// Adds the counters of repair, replication and the cluster to the metrics.
    pub(super) fn metrics(&self, metrics: Metrics) -> Metrics {
        let (copies, cluster) = (Arc::clone(&self.copies), Arc::clone(&self.cluster));
        metrics
            .repair(Arc::clone(&self.progress))
            .registry(self.cluster.registry_counters())
            .replication(move || ReplicationNumbers {
                copies_failed: copies.failed.load(Ordering::Relaxed),
                copies_replaced: copies.replaced.load(Ordering::Relaxed),
            })
            .cluster(move || ClusterNumbers {
                leader: cluster.leader().is_mine(),
                fenced: cluster.fence().check().is_err(),
                nodes_live: cluster.nodes().live().nodes.len() as u64,
                nodes_down: cluster.nodes().live().down() as u64,
            })
    }

    /// Returns a check of whether this node may act. `Err` gives the reason why it may not; `Ok` lists, in words,
    /// how many checkpoints have fewer good copies than wanted. The leader counts all listed checkpoints, and each
    /// node its own damaged copies.
    pub(super) fn readiness(
        &self,
        store: &Arc<Store>,
    ) -> impl Fn() -> Result<Vec<String>, String> + Send + Sync + 'static {
        let fence = self.cluster.fence();
        let (progress, store) = (Arc::clone(&self.progress), Arc::clone(store));
        move || {
            fence.check().map_err(|error| error.to_string())?;
            let listed = [
                (
                    &progress.under_replicated,
                    "have fewer good copies than wanted",
                ),
                (&progress.stranded, "have no good copy on a live node"),
            ];
            let listed = listed.into_iter().map(|(number, what)| {
                (
                    number.load(Ordering::Relaxed),
                    format!("listed checkpoints {what}"),
                )
            });
            let own = (
                store.set_asides().len() as u64,
                "copies on this node are damaged".to_owned(),
            );
            let some = listed.chain([own]).filter(|(number, _)| *number > 0);
            Ok(some
                .map(|(number, what)| format!("{number} {what}"))
                .collect())
        }
    }

    /// Replaces the limits of the repair rate.
    pub(super) fn limit_repair(&self, limits: RepairLimits) {
        self.throttle.set_limits(limits);
    }

    /// Leaves the cluster: the other nodes notice at once, and this node's locks are released.
    pub(super) async fn leave(self) {
        self.throttle.stop();
        self.telling.abort();
        if let Some(hearing) = self.hearing.get() {
            hearing.abort();
        }
        // They end with the call that they are in.
        let workers = self.workers;
        let ended = tokio::task::spawn_blocking(move || drop(workers)).await;
        if ended.is_err() {
            tracing::error!(
                event = "cluster-task-not-ended",
                "what works in the background did not end"
            );
        }
        self.cluster.leave().await;
        for network in &self.networks {
            network.close();
        }
    }
}

/// Control requests to other nodes.
struct OtherNodes(Network);

impl Others for OtherNodes {
    fn ask(
        &self,
        node: &str,
        body: control::request::Body,
    ) -> Result<control::reply::Body, control::Error> {
        let body = message::request::Body::Control(control::Request::new(body));
        let answer = self.0.call(node, body, Instant::now() + ASK_DEADLINE);
        match answer.map_err(|error| {
            remote::refusal(&error, "`permafrost node ls` tells which nodes are there")
        })? {
            message::reply::Body::Control(control::Reply { body: Some(body) }) => match body {
                control::reply::Body::Error(error) => Err(error),
                body => Ok(body),
            },
            _ => Err(remote::OtherAnswer {
                node: node.to_owned(),
            }
            .into()),
        }
    }
}

fn address_of(nodes: &ClusterNodes, node: &str) -> Option<SocketAddr> {
    let view = nodes.live();
    let live = view.nodes.iter().find(|live| live.facts.name == node)?;
    live.facts.address.parse().ok()
}

/// Publishes changes of the node's facts.
async fn tell_facts(cluster: Arc<Cluster>, store: Arc<Store>, costs: Arc<Costs>) {
    let mut ticks = tokio::time::interval(FACTS_PERIOD);
    let mut publication = Publication::default();
    loop {
        ticks.tick().await;
        let free_bytes = store.region_status().free_bytes;
        let mut in_use = store.in_use();
        in_use.sort();
        if in_use.len() > MAX_IN_USE {
            in_use = vec!["*".to_owned()];
        }
        let failure = store.region().failure();
        let failed = failure.map_or_else(String::new, ToString::to_string);
        let report = publication.next(costs.report(), Instant::now());
        cluster.update_facts(|facts| {
            facts.free_bytes = free_bytes;
            facts.in_use.clone_from(&in_use);
            facts.failed.clone_from(&failed);
            if let Some(report) = report {
                let [write, read, network, queued] = report.in_brief();
                facts.write_bytes_per_s = write;
                facts.read_bytes_per_s = read;
                facts.network_bytes_per_s = network;
                facts.queued_bytes = queued;
                facts.figures = Some(report);
            }
        });
    }
}
