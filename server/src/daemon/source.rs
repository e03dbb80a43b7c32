//! The daemon as the source of the HTTP API: its own figures, the accepted figures from other nodes' reports, the
//! listed checkpoints, and the queues.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_agent::host::arguments::in_full;
use permafrost_api_types::events::ApiEvent;
use permafrost_api_types::figure::{Figure, Known};
use permafrost_api_types::figures::{StartFigures, StartRate, StartTime};
use permafrost_api_types::nodes as api;
use permafrost_api_types::reserve::{Direction, Reservation, ReserveRequest};
use permafrost_cluster::repair::{Puller, RepairBoard, RepairProgress};
use permafrost_cluster::{ClusterNodes, Fence, LiveNode, MemberState, NodeFacts};
use permafrost_clustered::ClusteredStore;
use permafrost_http_api::caller::Caller;
use permafrost_http_api::source::{Activity, NodeEntry, QueueLength, Refusal, Source};
use permafrost_metering::QueueReport;
use permafrost_metering::costs::{
    self, Believed, Costs, InstallError, Reports, StartSample, StartWhat,
};
use permafrost_metering::queues::{Owner, Queues, Reservations};
use permafrost_protocol::control::{Checkpoint, CheckpointContents, ErrorCode, Reserved, request};
use permafrost_protocol::versions::{Interface, SpokenVersions};
use permafrost_scheduling::NodeId;
use permafrost_scheduling::figure::Missing;
use permafrost_scheduling::quantity::Seconds;
use permafrost_scheduling::size::{DumpKind, Memory, Prediction};
use permafrost_store::StoreError;
use tokio::sync::broadcast;
use tokio::task::JoinHandle;

use super::activity;
use super::member::Member;
use super::own;

/// Events kept for a reader that lags.
const EVENTS: usize = 1024;

/// Size of the transfer with which a stated bandwidth of a link counts as measured, bytes.
const LINK_BYTES: u64 = 64 << 20;

/// Number of samples for which a stated median counts: as many as a size class needs before it is used.
const SAMPLES_OF_A_MEDIAN: usize = 3;

/// The other nodes, if there are any.
pub(super) struct Others {
    pub(super) nodes: ClusterNodes,
    pub(super) fence: Arc<Fence>,
    pub(super) copying: Copying,
}

/// Copies and repair in progress.
pub(super) struct Copying {
    pub(super) puller: Arc<Puller>,
    pub(super) progress: Arc<RepairProgress>,
    pub(super) board: RepairBoard,
    pub(super) leads: Box<dyn Fn() -> bool + Send + Sync>,
}

/// Source of the data that the HTTP API serves.
pub(super) struct OfDaemon {
    store: Arc<ClusteredStore>,
    costs: Arc<Costs>,
    queues: Arc<Queues>,
    reservations: Arc<Reservations>,
    /// Facts of this node, used where the registry does not list it.
    own: NodeFacts,
    others: Option<Others>,
    reports: Mutex<Reports>,
    /// Time at which each node of the cluster was last alive.
    seen: Mutex<HashMap<String, Instant>>,
    events: broadcast::Sender<ApiEvent>,
    telling: JoinHandle<()>,
}

/// The daemon of this store. Called on a tokio runtime.
pub(super) fn of(
    store: &Arc<ClusteredStore>,
    costs: &Arc<Costs>,
    queues: &Arc<Queues>,
    reservations: &Arc<Reservations>,
    member: Option<&Member>,
) -> OfDaemon {
    let asked = Arc::clone(queues);
    costs.set_queues(move || asked.report());
    let local = Arc::downgrade(store.local());
    costs.set_tiers(move || {
        let store = local.upgrade();
        store.map(|store| store.tier_rooms()).unwrap_or_default()
    });
    let (own, others) = match member {
        Some(member) => (member.facts(), Some(member.others())),
        None => (own::alone(store.local()), None),
    };
    OfDaemon::new(store, costs, queues, reservations, own, others)
}

impl OfDaemon {
    fn new(
        store: &Arc<ClusteredStore>,
        costs: &Arc<Costs>,
        queues: &Arc<Queues>,
        reservations: &Arc<Reservations>,
        own: NodeFacts,
        others: Option<Others>,
    ) -> Self {
        let (events, _) = broadcast::channel(EVENTS);
        let telling = tokio::spawn(tell(Arc::clone(store), costs.events(), events.clone()));
        Self {
            store: Arc::clone(store),
            costs: Arc::clone(costs),
            queues: Arc::clone(queues),
            reservations: Arc::clone(reservations),
            own,
            others,
            reports: Mutex::new(Reports::counted_by(Arc::clone(costs))),
            seen: Mutex::default(),
            events,
            telling,
        }
    }

    /// Builds a node's entry from its facts and its report.
    fn entry(&self, facts: &NodeFacts, reports: &mut Reports, state: MemberState) -> NodeEntry {
        let now = Instant::now();
        let own;
        let report = if facts.name == self.own.name {
            own = self.costs.report();
            Some(&own)
        } else {
            facts.figures.as_ref()
        };
        let believed = reports.take(&facts.name, report, NodeId(0), now);
        node_entry(facts, believed, report.is_some(), state)
    }

    fn only_this(&self, reports: &mut Reports) -> Vec<NodeEntry> {
        let facts = NodeFacts {
            free_bytes: self.store.local().region_status().free_bytes,
            ..self.own.clone()
        };
        let entry = self.entry(&facts, reports, MemberState::Active);
        vec![NodeEntry {
            age: Some(Duration::ZERO),
            ..entry
        }]
    }

    fn in_cluster(&self, others: &Others, reports: &mut Reports) -> Vec<NodeEntry> {
        let view = others.nodes.live();
        let live: BTreeMap<&str, &LiveNode> = (view.nodes.iter())
            .map(|node| (node.facts.name.as_str(), node))
            .collect();
        let mut entries: Vec<_> = (view.nodes.iter())
            .map(|node| NodeEntry {
                // The registry's word is as old as the view of it.
                age: (view.age != Duration::MAX).then_some(view.age),
                ..self.entry(&node.facts, reports, node.state)
            })
            .collect();
        let mut seen = self.seen.lock();
        seen.retain(|name, _| view.members.iter().any(|member| member.name == *name));
        if let Some(now) = Instant::now().checked_sub(view.age) {
            let there = live.keys().map(|name| ((*name).to_owned(), now));
            seen.extend(there);
        }
        let gone = |member: &&permafrost_cluster::Member| !live.contains_key(member.name.as_str());
        entries.extend(view.members.iter().filter(gone).map(|member| NodeEntry {
            state: state_of(member.state),
            live: false,
            age: seen.get(&member.name).map(Instant::elapsed),
            speaks: member.speaks.as_ref().map_or_else(Vec::new, interfaces),
            ..NodeEntry::unknown(&member.name)
        }));
        let names: Vec<&str> = live.into_keys().collect();
        reports.keep(&names);
        entries
    }
}

impl Drop for OfDaemon {
    fn drop(&mut self) {
        self.telling.abort();
    }
}

impl Source for OfDaemon {
    fn own_name(&self) -> String {
        self.own.name.clone()
    }

    fn is_moving(&self) -> bool {
        self.costs.is_moving()
    }

    fn nodes(&self) -> Vec<NodeEntry> {
        let mut reports = self.reports.lock();
        match &self.others {
            Some(others) => self.in_cluster(others, &mut reports),
            None => self.only_this(&mut reports),
        }
    }

    fn checkpoints(&self) -> Result<Vec<Checkpoint>, StoreError> {
        self.store.list(None)
    }

    fn activity(&self) -> Activity {
        let copying = self.others.as_ref().map(|others| &others.copying);
        Activity {
            told: activity::of(&self.own.name, &self.queues, &self.costs, copying),
        }
    }

    fn contents(&self, of: &request::Describe) -> Result<CheckpointContents, Refusal> {
        Ok(self.store.contents(of)?)
    }

    fn predict(
        &self,
        job: &str,
        program: &str,
        dump: DumpKind,
        memory: &Memory,
    ) -> Result<Prediction, Missing> {
        self.costs.predict(job, program, dump, memory)
    }

    fn reserve(&self, caller: &Caller, wanted: &ReserveRequest) -> Result<Reservation, Refusal> {
        let node = wanted.node.clone().unwrap_or_default();
        let reserve = request::Reserve {
            node: if node == self.own.name {
                String::new()
            } else {
                node
            },
            direction: wanted.direction.name().to_owned(),
            bytes: wanted.bytes.count(),
            priority: u32::from(wanted.priority.level()),
            deadline_ms: wanted.start_within_s.map(|time| millis(time.value())),
            lifetime_ms: wanted.lifetime_s.map_or(0, |time| millis(time.value())),
            namespace: wanted.namespace.clone().unwrap_or_default(),
        };
        let owner = Owner::named(&caller.name);
        let reserved = self
            .reservations
            .reserve(owner, &reserve)
            .map_err(refusal)?;
        Ok(self.reservation(reserved, wanted.direction))
    }

    fn cancel(&self, token: &str) -> Result<(), Refusal> {
        let cancel = request::CancelReservation {
            token: token.to_owned(),
            ..request::CancelReservation::default()
        };
        match self.reservations.cancel(&cancel) {
            // Whatever is wrong with the token, here or at the node that gave it out: nothing is kept for it.
            Err(error)
                if matches!(
                    ErrorCode::try_from(error.code),
                    Ok(ErrorCode::NotFound | ErrorCode::Invalid | ErrorCode::Conflict)
                ) =>
            {
                Err(Refusal::NoReservation)
            }
            answer => answer.map_err(refusal),
        }
    }

    fn install(&self, figures: &StartFigures) -> Result<(), Refusal> {
        let installed = self.costs.install(&samples(figures));
        installed.map_err(|error| match error {
            InstallError::Write { .. } => Refusal::Unavailable {
                message: in_full(&error),
            },
            // The whole of it: samples are not fields.
            _ => Refusal::Invalid {
                pointer: String::new(),
                detail: error.to_string(),
            },
        })
    }

    fn events(&self) -> broadcast::Receiver<ApiEvent> {
        self.events.subscribe()
    }

    fn ready(&self) -> Result<(), String> {
        match &self.others {
            Some(others) => others.fence.check().map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }
}

impl OfDaemon {
    fn reservation(&self, reserved: Reserved, direction: Direction) -> Reservation {
        let starts_in_s = match reserved.starts_in_ms {
            Some(ms) => Figure::Known(Known {
                p50: seconds(ms),
                p95: seconds(ms),
                age_s: 0.0,
                samples: 0,
            }),
            None => Figure::unknown("nothing was moved there yet to go by"),
        };
        Reservation {
            token: reserved.token,
            node: if reserved.node.is_empty() {
                self.own.name.clone()
            } else {
                reserved.node
            },
            direction,
            bytes_before: reserved.bytes_before,
            starts_in_s,
            lapses_in_s: seconds(reserved.lapses_in_ms),
        }
    }
}

/// Forwards events of checkpoints to the API.
async fn tell(
    store: Arc<ClusteredStore>,
    mut happened: broadcast::Receiver<permafrost_store::StoreEvent>,
    events: broadcast::Sender<ApiEvent>,
) {
    loop {
        let event = match happened.recv().await {
            Ok(event) => event,
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                let _ = events.send(ApiEvent::Missed { missed });
                continue;
            }
            Err(broadcast::error::RecvError::Closed) => return,
        };
        let store = Arc::clone(&store);
        // The checkpoint is looked up, which may ask the registry.
        let told = tokio::task::spawn_blocking(move || event_of(&store, event)).await;
        if let Ok(Some(event)) = told {
            // Nobody may be listening.
            let _ = events.send(event);
        }
    }
}

fn event_of(store: &ClusteredStore, event: permafrost_store::StoreEvent) -> Option<ApiEvent> {
    match event {
        permafrost_store::StoreEvent::Dumped {
            job, generation, ..
        } if generation > 0 => {
            let checkpoint = format!("{job}@{generation}");
            let record = store.resolve(&checkpoint).ok()?;
            Some(ApiEvent::Checkpoint {
                checkpoint,
                job,
                generation,
                memory_bytes: record.memory_bytes,
                stored_bytes: record.added_bytes,
            })
        }
        permafrost_store::StoreEvent::Removed {
            job, generation, ..
        } if generation > 0 => Some(ApiEvent::Removed {
            checkpoint: format!("{job}@{generation}"),
            job,
            generation,
        }),
        _ => None,
    }
}

/// Returns a node as the API sees it: with its facts, and what is believed of its report.
#[must_use]
pub fn node_entry(
    facts: &NodeFacts,
    believed: Believed,
    reported: bool,
    state: MemberState,
) -> NodeEntry {
    let Believed {
        figures,
        tiers,
        links,
        swap,
        write_queue,
        read_queue,
        emulated,
        doubts,
    } = believed;
    let length = |queue: QueueReport| reported.then(|| length(queue));
    NodeEntry {
        address: facts.address.clone(),
        // A failed node is reported as drained: it gets no new copies, and its copies are read.
        state: match state {
            MemberState::Active if !facts.failed.is_empty() => api::NodeState::Drained,
            state => state_of(state),
        },
        stopping: facts.draining,
        class: facts.class,
        zone: facts.domain.zone.clone(),
        rack: facts.domain.rack.clone(),
        host: facts.domain.host.clone(),
        version: facts.version.clone(),
        speaks: facts.speaks.as_ref().map_or_else(Vec::new, interfaces),
        tier: facts.tier.word().to_owned(),
        emulated,
        capacity_bytes: facts.capacity_bytes,
        free_bytes: facts.free_bytes,
        room_bytes: facts.room_bytes(),
        durable: facts.counts(),
        figures,
        write_queue: length(write_queue),
        read_queue: length(read_queue),
        tiers,
        links,
        swap,
        doubts,
        ..NodeEntry::unknown(&facts.name)
    }
}

fn interfaces(speaks: &SpokenVersions) -> Vec<api::InterfaceVersions> {
    let versions = Interface::ALL.map(|interface| {
        let range = speaks.of(interface);
        api::InterfaceVersions {
            interface: interface.word().to_owned(),
            oldest: range.oldest,
            newest: range.newest,
        }
    });
    versions.into()
}

const fn length(queue: QueueReport) -> QueueLength {
    QueueLength {
        running: queue.running,
        waiting: queue.waiting,
        reserved: queue.reserved,
        slots: queue.slots,
    }
}

const fn state_of(state: MemberState) -> api::NodeState {
    match state {
        MemberState::Active => api::NodeState::Active,
        MemberState::Drained => api::NodeState::Drained,
        MemberState::Removed => api::NodeState::Removed,
    }
}

fn refusal(error: permafrost_protocol::control::Error) -> Refusal {
    match ErrorCode::try_from(error.code) {
        Ok(ErrorCode::Invalid | ErrorCode::NotFound) => Refusal::Invalid {
            pointer: "/node".to_owned(),
            detail: error.message,
        },
        Ok(ErrorCode::Unavailable) => Refusal::Unavailable {
            message: error.message,
        },
        _ => Refusal::Conflict {
            message: error.message,
        },
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "2^53 milliseconds are 285,000 years"
)]
fn seconds(ms: u64) -> f64 {
    ms as f64 / 1000.0
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float that does not fit becomes the nearest number that does"
)]
fn millis(seconds: f64) -> u64 {
    (seconds * 1000.0).ceil() as u64
}

/// Converts stated figures to samples that yield them.
fn samples(figures: &StartFigures) -> costs::SavedFigures {
    let mut samples = Vec::new();
    let mut add = |what: &StartWhat, bytes: u64, elapsed: f64, times: usize| {
        if let Ok(elapsed) = Seconds::new(elapsed) {
            let sample = StartSample {
                what: what.clone(),
                tier: String::new(),
                bytes,
                elapsed,
                age: Seconds::ZERO,
            };
            samples.extend(std::iter::repeat_n(sample, times));
        }
    };
    let mut rates = |what: &StartWhat, rates: &[StartRate]| {
        for rate in rates {
            let bytes = rate.size_bytes.count();
            #[expect(clippy::cast_precision_loss, reason = "a rate is no count")]
            let at = |bytes_per_s: f64| bytes as f64 / bytes_per_s;
            add(
                what,
                bytes,
                at(rate.p50_bytes_per_s.value()),
                SAMPLES_OF_A_MEDIAN,
            );
            if let Some(slow) = rate.p95_bytes_per_s {
                add(what, bytes, at(slow.value()), 1);
            }
        }
    };
    rates(&StartWhat::Write, &figures.write);
    rates(&StartWhat::Read, &figures.read);
    for (node, rate) in &figures.links {
        #[expect(clippy::cast_precision_loss, reason = "a rate is no count")]
        let elapsed = LINK_BYTES as f64 / rate.value();
        let link = StartWhat::Link(node.clone());
        add(&link, LINK_BYTES, elapsed, SAMPLES_OF_A_MEDIAN);
    }
    let mut times = |what: &StartWhat, time: Option<StartTime>| {
        let Some(time) = time else { return };
        add(what, 0, time.p50_s.value(), SAMPLES_OF_A_MEDIAN);
        if let Some(long) = time.p95_s {
            add(what, 0, long.value(), 1);
        }
    };
    times(&StartWhat::Write, figures.dump_start);
    times(&StartWhat::Read, figures.restore_start);
    costs::SavedFigures {
        samples,
        emulated: None,
    }
}
