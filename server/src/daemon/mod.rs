//! `permafrostd`: opens the region and the catalog, listens, and stops cleanly.

mod activity;
mod answers;
mod backend;
mod checking;
mod cleaning;
mod listing;
mod member;
mod own;
mod policies;
mod retaining;
mod source;
mod startup;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_agent::host::arguments::in_full;
use permafrost_agent::host::{self, Bound, Host, HostError, make_private_dir};
use permafrost_audit::Audit;
use permafrost_cluster::scrub::{ScrubOptions, ScrubQueue, Scrubber, Scrubbing};
use permafrost_clustered::ClusteredStore;
use permafrost_http_api::serve;
use permafrost_identity::{CriuTls, IdentityError, ReloadingIdentity};
use permafrost_metering::costs::{Costs, Probing};
use permafrost_metering::queues::{Queues, Reservations};
use permafrost_pmem::heap;
use permafrost_store::{Retention, Store, StoreError};
use permafrost_transport::peer::{self, Endpoint, Handler};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use self::answers::Answers;
use self::backend::Local;
use self::cleaning::Cleaning;
use self::member::{Joining, Member};
use self::retaining::Retaining;
use self::startup::MeasuredStore;
use crate::agents::Agents;
use crate::config::Config;
use crate::denials::{DENIED_FILE, DenialLists};
use crate::peers::NodeHandler;
use permafrost_metrics::{CertificateNumbers, Metrics};

pub use checking::check;
pub use policies::SignedPolicies;
pub use source::node_entry;
pub use startup::StartError;

/// Shortest and longest period between searches for parked dumps and sessions that have outlived their retention.
/// Within these bounds the search runs twice per shortest retention.
const EXPIRY_PERIOD: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// Period at which freed memory is returned to the system while no dump comes in.
const RETURN_PERIOD: Duration = Duration::from_secs(10);

/// Period at which the medium is checked for failures, which usually show in dumps and reads before.
const MEDIUM_PERIOD: Duration = Duration::from_secs(1);

/// Period at which measurements are saved. A crash loses the measurements of at most one period.
const FIGURES_PERIOD: Duration = Duration::from_secs(5);

/// A running daemon.
pub struct Daemon {
    store: Arc<Store>,
    queues: Arc<Queues>,
    expiry: tokio::task::JoinHandle<()>,
    watching: tokio::task::JoinHandle<()>,
    cleaning: Cleaning,
    retaining: Retaining,
    keeping: Keeping,
    host: Host<Local>,
    peers: Option<Endpoint>,
    member: Option<Member>,
    scrubbing: Scrubbing,
    probing: Option<Probing>,
    metrics: Option<permafrost_metrics::MetricsServer>,
    answers: Answers,
    audit: Arc<Audit>,
    identity: Option<Arc<ReloadingIdentity>>,
}

impl Daemon {
    /// Opens everything and begins to listen.
    ///
    /// # Errors
    /// See [`StartError`]; nothing was changed in a region that does not open.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        // What others may have taken comes first: a start that fails there leaves the region as it was.
        make_private_dir(&config.data_dir)?;
        let identity = config.identity.as_ref().map(ReloadingIdentity::load);
        let identity = identity.transpose()?.map(Arc::new);
        if let Some(identity) = &identity {
            identity.keep_denials_in(config.data_dir.join(DENIED_FILE))?;
        }
        let tls = identity.as_deref().map(CriuTls::reloading).transpose()?;
        let bound = Bound::bind(host::HostOptions {
            run_dir: config.run_dir.clone(),
            listen: config.listen,
            listen_uids: config.listen_uids.clone(),
            idle_connection: config.idle_connection,
            tls,
        })
        .await?;
        let node_name = identity
            .as_deref()
            .map_or_else(String::new, |identity| identity.current().name().to_owned());
        let audit = Audit::open(&config.audit, &config.data_dir, &node_name)
            .map(Arc::new)
            .map_err(StartError::Audit)?;
        let measured = startup::open_store(&config)?;
        match Self::serve(config, bound, identity, &measured, audit).await {
            Ok(daemon) => Ok(daemon),
            Err(error) => {
                // It was not a crash.
                measured.store.close()?;
                Err(error)
            }
        }
    }

    /// Serves all clients from an open store.
    async fn serve(
        config: Config,
        bound: Bound,
        identity: Option<Arc<ReloadingIdentity>>,
        measured: &MeasuredStore,
        audit: Arc<Audit>,
    ) -> Result<Self, StartError> {
        let MeasuredStore {
            store: local,
            costs,
            catalog_origin,
        } = measured;
        let queues = Queues::new(config.queues);
        let Peers {
            endpoint: peers,
            handler,
            member,
            store,
            scrubber,
            reservations,
            denials,
        } = serve_peers(&config, identity.clone(), measured, &queues, &audit).await?;
        let source = source::of(&store, costs, &queues, &reservations, member.as_ref());
        let answers = Answers::start(
            &config.api,
            &config.run_dir,
            identity.as_deref(),
            Arc::new(source),
            &audit,
        )
        .await?;
        if let (Some(handler), Some(api)) = (handler, answers.for_peers()) {
            handler.begin_api(api);
        }
        let numbers = match config.listen_metrics {
            Some(listen) => {
                let mut all = Metrics::new(local)
                    .costs(costs)
                    .scrub(&scrubber)
                    .queues(&queues)
                    .retention(&store)
                    .audit(&audit);
                if let Some(counter) = answers.page_requests() {
                    all = all.page(counter);
                }
                if let Some(identity) = identity.clone() {
                    all = all.certificate(move || CertificateNumbers {
                        expires_s: identity.expires_in().as_secs(),
                        denied: identity.denied().len() as u64,
                    });
                }
                Some(serve_metrics(listen, all, local, member.as_ref()).await?)
            }
            None => None,
        };
        let scrubbing = scrubber
            .start()
            .map_err(StoreError::io("start the scrub"))?;
        let probing = startup::probe(config.probe_period, local, costs, member.as_ref())?;
        let own_identity = identity.clone();
        let host = bound.serve(Arc::new(Local {
            store: Arc::clone(&store),
            scrubber,
            costs: Arc::clone(costs),
            queues: Arc::clone(&queues),
            reservations,
            park_ttl: config.retention.parked,
            catalog_origin: catalog_origin.clone(),
            denials,
            identity,
            operator: member.as_ref().map(Member::operator),
            touched: permafrost_agent::host::TouchedFiles::within(&config.data_dir),
            audit: Arc::clone(&audit),
            in_cluster: member.as_ref().map(Member::status),
            registry: config
                .cluster
                .as_ref()
                .map_or_else(Vec::new, |options| options.registry.members.clone()),
            addresses: [
                peers.as_ref().and_then(|peers| peers.local_address().ok()),
                numbers
                    .as_ref()
                    .map(permafrost_metrics::MetricsServer::address),
            ]
            .map(|address| address.map_or_else(String::new, |address| address.to_string())),
            files: startup::files(&config),
        }));
        let expiry = tokio::spawn(expire(Arc::clone(&store), config.retention));
        let watching = tokio::spawn(watch_medium(Arc::clone(local)));
        let cleaning = Cleaning::begin(local, config.clean_interval);
        let decides = member.as_ref().map(Member::decides);
        let retaining = Retaining::begin(&store, config.retention_interval, decides);
        let (end, ended) = oneshot::channel();
        let keeping = Keeping {
            end,
            task: tokio::spawn(keep_figures(Arc::clone(costs), ended)),
        };
        Ok(Self {
            store: Arc::clone(local),
            queues,
            expiry,
            watching,
            cleaning,
            retaining,
            keeping,
            host,
            peers,
            member,
            scrubbing,
            probing,
            metrics: numbers,
            answers,
            audit,
            identity: own_identity,
        })
    }

    /// Returns the address of the well-known page-server port, if there is one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.host.address()
    }

    /// Returns the path of the control socket that `permafrost` connects to.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        self.host.control_socket()
    }

    /// Returns the address on which peers are served, if they are.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.peers.as_ref()?.local_address().ok()
    }

    /// Returns the address on which Prometheus is served, if it is.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        Some(self.metrics.as_ref()?.address())
    }

    /// Returns the TCP address of the HTTP API, if it is served over TCP.
    #[must_use]
    pub fn api_address(&self) -> Option<SocketAddr> {
        self.answers.address()
    }

    /// Socket of the HTTP API, which is always served.
    #[must_use]
    pub fn api_socket(&self) -> PathBuf {
        self.control_socket().with_file_name(serve::SOCKET)
    }

    /// Waits until the daemon cannot go on, because another one has its name and a copy of its region. Returns the
    /// error.
    pub async fn failed(&self) -> StoreError {
        match &self.member {
            Some(member) => member.failed().await,
            None => std::future::pending().await,
        }
    }

    /// Applies the limits of a configuration to the running daemon: queues, API, cooling, repair. Everything else in it
    /// is ignored.
    pub fn apply_limits(&self, config: &Config) {
        let queues = &config.queues;
        self.queues
            .limit(queues.dumps_at_once, queues.restores_at_once);
        self.answers.set_rate(config.api.rate_per_s);
        self.store.set_cooling(config.cooling);
        if let (Some(member), Some(options)) = (&self.member, &config.cluster) {
            member.limit_repair(options.repair);
        }
    }

    /// Returns true if this node is one of a cluster.
    #[must_use]
    pub fn is_in_cluster(&self) -> bool {
        self.member.is_some()
    }

    /// Reads the certificates of the node and its list of denied ones again, if they have changed. They are read again
    /// by themselves, too, within [`permafrost_identity::RELOAD_INTERVAL`].
    ///
    /// # Errors
    /// They cannot be used; those before stay in use.
    pub fn reload_identity(&self) -> Result<bool, IdentityError> {
        match &self.identity {
            Some(identity) => identity.reload(),
            None => Ok(false),
        }
    }

    /// Returns the audit log.
    #[must_use]
    pub fn audit(&self) -> &Audit {
        &self.audit
    }

    /// Stops listening, and has lazy restores finish: their processes would end with the daemon.
    pub async fn finish_lazy_restores(&self) {
        self.host.finish_lazy_restores().await;
    }

    /// Stops listening and marks the region clean. Dumps that are under way fail, and their tasks live on: no record
    /// refers to the pages that were received.
    ///
    /// # Errors
    /// The region could not be marked clean.
    pub async fn stop(self) -> Result<(), StoreError> {
        self.host.stop();
        self.expiry.abort();
        self.watching.abort();
        self.cleaning.end();
        self.retaining.stop();
        // Who waits has begun nothing but lazy restores, which end with the daemon.
        self.queues.stop();
        self.answers.stop().await;
        drop(self.peers);
        drop(self.metrics);
        self.store.stop();
        // It ends with what it is reading.
        let background = (self.scrubbing, self.probing, self.retaining);
        let ended = tokio::task::spawn_blocking(move || drop(background)).await;
        if ended.is_err() {
            tracing::error!(
                event = "background-task-not-ended",
                "the scrub, the probes or retention did not end"
            );
        }
        if let Some(member) = self.member {
            member.leave().await;
        }
        drop(self.keeping.end);
        if self.keeping.task.await.is_err() {
            tracing::error!(
                event = "figures-not-written-at-stop",
                "figures were not written down"
            );
        }
        self.store.close()
    }
}

/// Parts of a daemon that serve peers.
struct Peers {
    endpoint: Option<Endpoint>,
    handler: Option<Arc<NodeHandler>>,
    member: Option<Member>,
    store: Arc<ClusteredStore>,
    scrubber: Arc<Scrubber>,
    reservations: Arc<Reservations>,
    denials: Option<Arc<DenialLists>>,
}

/// Serves peers, if an address for them is given, and joins the cluster.
async fn serve_peers(
    config: &Config,
    identity: Option<Arc<ReloadingIdentity>>,
    measured: &MeasuredStore,
    queues: &Arc<Queues>,
    audit: &Arc<Audit>,
) -> Result<Peers, StartError> {
    let MeasuredStore { store, costs, .. } = measured;
    let capacity_bytes = store.region().usage().capacity_bytes;
    let reservations_here = || Reservations::here(Arc::clone(queues), capacity_bytes);
    let scrub = ScrubOptions {
        period: config.scrub_period,
        memory: Some(config.data_dir.join("scrub.json")),
        ..ScrubOptions::default()
    };
    let Some((listen, identity)) = config.listen_peers.zip(identity.clone()) else {
        let (clustered, scrubber) = alone(config, store, scrub, audit);
        return Ok(Peers {
            endpoint: None,
            handler: None,
            member: None,
            store: clustered,
            scrubber,
            reservations: Arc::new(reservations_here().within(Arc::clone(store.quotas()))),
            denials: identity.map(|identity| Arc::new(DenialLists::new(identity, None))),
        });
    };
    let spool = config.run_dir.join("images");
    // What a daemon that is gone has left.
    match std::fs::remove_dir_all(&spool) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            let path = spool;
            return Err(HostError::Directory { path, source }.into());
        }
        _ => make_private_dir(&spool)?,
    }
    let name = identity.current().name().to_owned();
    // Before pages came over TCP, nothing stood against the same number for a port of another kind.
    let others = [config.api.listen, config.listen_metrics];
    let is_other = |other: SocketAddr| other.port() == listen.port() && listen.port() != 0;
    let pages_over_tcp = config.pages_over_tcp && !others.into_iter().flatten().any(is_other);
    let handler = NodeHandler::new(&name).with_audit(Arc::clone(audit));
    let handler = Arc::new(handler);
    let endpoint = Endpoint::serve(
        &Handle::current(),
        listen,
        Arc::clone(&identity),
        Arc::clone(&handler) as Arc<dyn Handler>,
        peer::PeerOptions {
            // A restoring tree reads two files a process, all at once.
            streams: 512,
            // One peer has at most half of the dumps: a compute node that gives way dumps hundreds of tasks at once.
            conversations: 512,
            dump_idle: config.idle_connection,
            dump_wait: config.retention.idle_session,
            tls_bulk: pages_over_tcp,
            ..peer::PeerOptions::default()
        },
    )?;
    let member = match &config.cluster {
        Some(options) => {
            let address = endpoint
                .local_address()
                .map_err(StoreError::io("ask where peers are served"))?;
            let joining = Joining {
                options,
                data_dir: &config.data_dir,
                address,
                identity: &identity,
                pages_over_tcp: config.pages_over_tcp,
                store,
                costs,
                scrub: scrub.clone(),
                audit,
            };
            Some(Member::join(joining).await?)
        }
        None => None,
    };
    let reservations = match &member {
        Some(member) => member.reservations(queues, store),
        None => reservations_here(),
    };
    let reservations = Arc::new(reservations.within(Arc::clone(store.quotas())));
    let registry = member.as_ref().map(Member::registry);
    let denials = Arc::new(DenialLists::new(identity, registry));
    if let Some(member) = &member {
        member.hear_denials(&denials);
    }
    let (clustered, scrubber) = match &member {
        Some(member) => (member.store(), member.scrubber()),
        None => alone(config, store, scrub, audit),
    };
    let mut agents = Agents::new(Arc::clone(&clustered), spool)
        .with_scrubber(Arc::clone(&scrubber))
        .with_queues(Arc::clone(queues), Arc::clone(&reservations))
        .with_denials(Arc::clone(&denials));
    if let Some(member) = &member {
        agents = agents.with_operator(member.operator());
    }
    handler.begin(agents, member.as_ref().map(Member::copying));
    Ok(Peers {
        endpoint: Some(endpoint),
        handler: Some(handler),
        member,
        store: clustered,
        scrubber,
        reservations,
        denials: Some(denials),
    })
}

/// Returns the checkpoints of a node without a cluster, and their scrub.
fn alone(
    config: &Config,
    store: &Arc<Store>,
    options: ScrubOptions,
    audit: &Arc<Audit>,
) -> (Arc<ClusteredStore>, Arc<Scrubber>) {
    let queue = Arc::<ScrubQueue>::default();
    let clustered = ClusteredStore::with_policies(
        Arc::clone(store),
        None,
        Arc::<ScrubQueue>::clone(&queue),
        policies::in_file(&config.data_dir),
        policies::recorded_by(audit),
    );
    let scrubber = Scrubber::new(&clustered, queue, None, options);
    (clustered, scrubber)
}

/// Serves metrics and health checks.
async fn serve_metrics(
    listen: SocketAddr,
    all: Metrics,
    store: &Arc<Store>,
    member: Option<&Member>,
) -> Result<permafrost_metrics::MetricsServer, StartError> {
    let watched = Arc::clone(store);
    let writable = move || watched.check_writable().map_err(|error| error.to_string());
    let served = match member {
        Some(member) => {
            let ready = member.readiness(store);
            let both = move || writable().and_then(|()| ready());
            permafrost_metrics::serve(listen, member.metrics(all), both).await
        }
        None => {
            permafrost_metrics::serve(listen, all, move || writable().map(|()| Vec::new())).await
        }
    };
    Ok(served?)
}

/// Logs a failure of the region once, and each page that its medium loses.
async fn watch_medium(store: Arc<Store>) {
    let mut ticks = tokio::time::interval(MEDIUM_PERIOD);
    let (mut has_failed, mut lost) = (false, 0);
    loop {
        ticks.tick().await;
        let region = store.region();
        if let Some(failure) = region.failure().filter(|_| !has_failed) {
            has_failed = true;
            tracing::error!(event = "region-failed", %failure, path = %store.place().path.display(), "the region takes no writes any more: dumps and copies are refused, what is stored can still be read; replace the medium and restart permafrostd");
        }
        let now = region.lost_pages();
        if now > lost {
            tracing::error!(event = "region-lost-pages", pages = now, path = %store.place().path.display(), "the medium cannot give or take pages of the region; `permafrost scrub` names what is damaged");
        }
        lost = now;
    }
}

async fn expire(store: Arc<ClusteredStore>, retention: Retention) {
    let shortest = retention.parked.min(retention.idle_session);
    let mut ticks = tokio::time::interval((shortest / 2).clamp(EXPIRY_PERIOD.0, EXPIRY_PERIOD.1));
    let mut returned = Instant::now();
    loop {
        ticks.tick().await;
        let expiring = Arc::clone(&store);
        let returns = returned.elapsed() >= RETURN_PERIOD && !store.local().is_receiving();
        if returns {
            returned = Instant::now();
        }
        let expired = tokio::task::spawn_blocking(move || {
            expiring.expire();
            if returns {
                heap::return_freed();
            }
        });
        if expired.await.is_err() {
            tracing::error!(event = "expiry-panicked", "expiry failed");
        }
    }
}

/// Task that saves measurements. Dropping `end` ends it.
struct Keeping {
    end: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

/// Saves the measurements whenever there are new ones, and at the end.
async fn keep_figures(costs: Arc<Costs>, mut ended: oneshot::Receiver<()>) {
    let mut ticks = tokio::time::interval(FIGURES_PERIOD);
    let mut kept = 0;
    let mut goes_on = true;
    while goes_on {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = &mut ended => goes_on = false,
        }
        let samples = costs.numbers().samples;
        if goes_on && samples == kept {
            continue;
        }
        kept = samples;
        let costs = Arc::clone(&costs);
        if tokio::task::spawn_blocking(move || save_figures(&costs))
            .await
            .is_err()
        {
            tracing::error!(event = "figures-panicked", "writing down figures failed");
        }
    }
}

fn save_figures(costs: &Costs) {
    if let Err(error) = costs.save() {
        let error = in_full(&error);
        tracing::warn!(
            event = "figures-not-written",
            error,
            "what was measured is lost when the daemon ends"
        );
    }
}
