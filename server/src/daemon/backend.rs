//! The store as the backend of the sockets and ports on this host.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use permafrost_agent::host::{
    Backend, Client, Lent, PlacingEvent, ServeLazily, ServePlacing, Trail, Waits,
};
use permafrost_audit::{Audit, AuditedRequest, Who};
use permafrost_catalog::ListPart;
use permafrost_cluster::scrub::Scrubber;
use permafrost_cluster::{Operate, no_cluster};
use permafrost_clustered::ClusteredStore;
use permafrost_clustered::Durability;
use permafrost_criu::ProgressReceiver;
use permafrost_criu::directory::ExportedPart;
use permafrost_identity::ReloadingIdentity;
use permafrost_lazy::{FillGate, TouchedPages};
use permafrost_metering::costs::Costs;
use permafrost_metering::queues::{
    Admission, AdmittedTransfer, Direction, Owner, Queues, QueuesError, Reservations,
    expected_bytes,
};
use permafrost_protocol::control::{self, request};
use permafrost_protocol::manifest::TakenBy;
use permafrost_store::{Adoption, SessionRequest, SessionSink, StoreError, TransferSlot as _};

use crate::denials::{DenialLists, no_certificates};
use permafrost_agent::host::TouchedFiles;

/// The store of this node.
pub(crate) struct Local {
    pub(crate) store: Arc<ClusteredStore>,
    /// Scrub of the store.
    pub(crate) scrubber: Arc<Scrubber>,
    /// Measurements of the store, and predictions made from them.
    pub(crate) costs: Arc<Costs>,
    /// Queues for writing to the store and reading from it.
    pub(crate) queues: Arc<Queues>,
    /// Places in the queues of this node, and of others.
    pub(crate) reservations: Arc<Reservations>,
    /// Time for which a parked dump is kept.
    pub(crate) park_ttl: Duration,
    /// Description of the origin of the catalog, for `status`.
    pub(crate) catalog_origin: String,
    /// Operator's requests to the cluster, if this node is in one.
    pub(crate) operator: Option<Arc<dyn Operate>>,
    /// Denied certificates, if this node keeps a list.
    pub(crate) denials: Option<Arc<DenialLists>>,
    /// Certificate of the node, if it has one.
    pub(crate) identity: Option<Arc<ReloadingIdentity>>,
    /// Orders in which restored processes accessed their pages.
    pub(crate) touched: TouchedFiles,
    /// The node's audit log.
    pub(crate) audit: Arc<Audit>,
    /// Function that returns the node's status in its cluster, if it is in one.
    pub(crate) in_cluster: Option<InCluster>,
    /// Members of the cluster's etcd, `host:port`; none without a cluster.
    pub(crate) registry: Vec<String>,
    /// Addresses on which peers and metrics are served; an empty string for one that is not served.
    pub(crate) addresses: [String; 2],
    /// Files that the daemon uses, for `status` on this machine.
    pub(crate) files: Vec<control::DaemonFile>,
}

/// Function that returns a node's status in its cluster. It may ask the registry.
pub(crate) type InCluster = Box<dyn Fn() -> control::ClusterStatus + Send + Sync>;

impl Local {
    /// Returns the client that manifests record for a dump that came over this node's own sockets.
    fn taken_by(&self) -> String {
        let name = self.identity.as_deref();
        let name = name.map_or_else(String::new, |identity| identity.current().name().to_owned());
        TakenBy::Node(name).to_string()
    }

    fn operator(&self) -> Result<&dyn Operate, StoreError> {
        self.operator.as_deref().ok_or_else(no_cluster)
    }

    /// Waits for the admission of a restore. A checkpoint that cannot be restored is refused without a wait.
    fn turn_to_read(
        &self,
        checkpoint: &str,
        priority: u32,
        admission: Result<Admission, QueuesError>,
        waits: &mut dyn Waits,
    ) -> Result<AdmittedTransfer, StoreError> {
        self.store.check_restorable(checkpoint)?;
        let record = self.store.resolve(checkpoint)?;
        self.store.local().check_priority(&record.job, priority)?;
        let turn = admission.and_then(|admission| {
            let admission = Admission {
                bytes: record.memory_bytes,
                ..admission
            };
            self.queues.enter(Direction::Read, &admission, waits)
        });
        let turn = turn?;
        waits.begins();
        Ok(turn)
    }

    /// Calls `lend` at once, with a gate that opens when the restore is admitted: a process starts without waiting for
    /// the memory of others. Whatever would have it refused is found out before.
    fn when_admitted<T>(
        &self,
        checkpoint: &str,
        thaw: &request::Thaw,
        lend: impl FnOnce(&Arc<FillGate>) -> Result<T, control::Error>,
    ) -> Result<T, control::Error> {
        let admission = Admission::new(0, thaw.priority, thaw.deadline_ms, &thaw.reservation);
        let gate = &Arc::new(FillGate::default());
        std::thread::scope(|scope| {
            let (tell, told) = mpsc::sync_channel(1);
            let wait = move || {
                let mut waits = UntilOver {
                    gate,
                    queued: tell.clone(),
                };
                match self.turn_to_read(checkpoint, thaw.priority, admission, &mut waits) {
                    Ok(mut turn) => {
                        turn.follow(gate.counter());
                        gate.wait_until_over();
                    }
                    // Once it is queued, nobody listens: the restore has ended, or the daemon stops.
                    Err(error) => drop(tell.try_send(Err(error))),
                }
            };
            let waiting = std::thread::Builder::new().spawn_scoped(scope, wait);
            waiting.map_err(StoreError::io("start a thread"))?;
            let _ends = EndsGate(gate);
            told.recv().map_err(|_| QueuesError::Stopping)??;
            lend(gate)
        })
    }
}

/// Waits for the turn of a lazy restore until that is over.
struct UntilOver<'a> {
    gate: &'a FillGate,
    /// Learns that the request is queued or admitted.
    queued: mpsc::SyncSender<Result<(), StoreError>>,
}

impl UntilOver<'_> {
    fn tell(&self) {
        // A full channel has been told already.
        drop(self.queued.try_send(Ok(())));
    }
}

impl Waits for UntilOver<'_> {
    fn waits(&mut self, _waiting: &control::Waiting) {
        self.tell();
    }

    fn begins(&mut self) {
        self.tell();
        self.gate.open();
    }

    fn is_gone(&self) -> bool {
        self.gate.is_over()
    }
}

/// Ends the wait for a turn however the restore ends.
struct EndsGate<'a>(&'a FillGate);

impl Drop for EndsGate<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Returns the client that a manifest records for a connection that brings pages. `None` for root and the daemon's
/// own user: their dumps are recorded as the node's.
fn other_than_own(client: Option<&Client>) -> Option<String> {
    let Some(client) = client else {
        // It is gone, and nobody knows who it was.
        return Some(String::new());
    };
    let own = rustix::process::geteuid().as_raw();
    match client {
        Client::User { uid, .. } | Client::Tcp { uid: Some(uid), .. } => {
            (*uid != 0 && *uid != own).then(|| TakenBy::User(*uid).to_string())
        }
        Client::Tcp { address, uid: None } => Some(format!("address {}", address.ip())),
        Client::Certificate(peer) => Some(format!("{} {}", peer.role(), peer.name())),
    }
}

/// Returns the error of a request that was not admitted.
impl Backend for Local {
    type Session = permafrost_store::Session;
    type Sink = SessionSink;

    fn open(
        &self,
        open: request::Open,
        waits: &mut dyn Waits,
    ) -> Result<Arc<permafrost_store::Session>, control::Error> {
        let durability = Durability::parse(&open.durability)?;
        let admission = Admission::new(
            expected_bytes(&open),
            open.priority,
            open.deadline_ms,
            &open.reservation,
        )
        .map_err(control::Error::from)?;
        let priority = self.store.local().check_priority(&open.job, open.priority);
        priority?;
        if !open.job.is_empty() {
            self.store
                .make_room(&open.job, expected_bytes(&open), open.no_parent)?;
        }
        let frozen = open.job.is_empty();
        let request = SessionRequest {
            job: open.job,
            pre_dump: open.pre_dump,
            pre_copy: open.pre_copy,
            seal_follows: open.seal_follows,
            origin: open.origin,
            no_parent: open.no_parent,
            parent_images: open.parent_images,
            from_here: true,
            taken_by: self.taken_by(),
        };
        let admit = || {
            if frozen {
                // Nobody has asked whether it may freeze its task: it is frozen.
                let turn = self.queues.run(Direction::Write, admission.bytes);
                return Ok(Some(
                    Box::new(turn) as Box<dyn permafrost_store::TransferSlot>
                ));
            }
            let turn = self.queues.enter(Direction::Write, &admission, waits);
            turn.map(|turn| Some(Box::new(turn) as _))
                .map_err(StoreError::from)
        };
        self.store
            .open_session_after(request, durability, admit)
            .map_err(control::Error::from)
    }

    fn session(&self, id: &str) -> Option<Arc<permafrost_store::Session>> {
        self.store.local().session(id)
    }

    fn start(
        &self,
        session: &Arc<permafrost_store::Session>,
        client: Option<&Client>,
        hang_up: Box<dyn FnOnce() + Send>,
    ) -> Result<SessionSink, control::Error> {
        let sink = session.start(self.store.local(), hang_up)?;
        if let Some(other) = other_than_own(client) {
            session.brought_by(other);
        }
        Ok(sink)
    }

    fn drop_session(&self, id: &str) {
        self.store.local().drop_session(id);
    }

    fn depends_on(&self) -> Vec<String> {
        self.registry.clone()
    }

    fn seal(
        &self,
        seal: &request::Seal,
        images: OwnedFd,
        waits: &dyn Waits,
    ) -> Result<control::Checkpoint, control::Error> {
        let wanted = || !waits.is_gone();
        let sealed = self
            .store
            .seal_session_while(&seal.session, images, &wanted);
        sealed.map_err(control::Error::from)
    }

    fn abort(&self, abort: &request::Abort) -> Result<(), control::Error> {
        if abort.freeze_limit_reached {
            // First: a session that is being sealed cannot be discarded, and its task was frozen for as long.
            let counters = self.store.local().counters();
            counters.freeze_limits_reached.add(1);
        }
        let aborted = self.store.abort_session(&abort.session);
        aborted.map_err(control::Error::from)
    }

    fn adopt(
        &self,
        adopt: request::Adopt,
        images: OwnedFd,
    ) -> Result<control::Checkpoint, control::Error> {
        let taken_by = self.taken_by();
        let adoption = Adoption {
            taken_by: &taken_by,
            session: &adopt.session,
            origin: adopt.origin,
            images_age: adopt.images_age_us.map(Duration::from_micros),
            ignore_times: adopt.ignore_times,
            ..Adoption::into_job(&adopt.job)
        };
        self.store
            .adopt(&adoption, images)
            .map_err(control::Error::from)
    }

    fn list(&self, list: &request::List) -> Result<control::Checkpoints, control::Error> {
        Ok(self.store.list_part(&ListPart::new(list)?)?)
    }

    fn show(&self, show: &request::Show) -> Result<control::Detail, control::Error> {
        self.store
            .show(&show.checkpoint)
            .map_err(control::Error::from)
    }

    fn contents(
        &self,
        contents: &request::Describe,
    ) -> Result<control::CheckpointContents, control::Error> {
        self.store.contents(contents).map_err(control::Error::from)
    }

    fn remove(&self, remove: &request::Remove) -> Result<u64, control::Error> {
        self.store.remove(remove).map_err(control::Error::from)
    }

    fn pin(&self, pin: &request::Pin) -> Result<control::Checkpoint, control::Error> {
        self.store
            .pin(&pin.checkpoint, pin.pinned)
            .map_err(control::Error::from)
    }

    fn verify(
        &self,
        verify: &request::Verify,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Verified, control::Error> {
        self.store
            .verify(&verify.checkpoint, verify.cold, progress)
            .map_err(control::Error::from)
    }

    fn scrub(
        &self,
        scrub: &request::Scrub,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Scrubbed, control::Error> {
        self.scrubber
            .scrub(&scrub.checkpoint, scrub.cold, progress)
            .map_err(control::Error::from)
    }

    fn gc(
        &self,
        gc: &request::Gc,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::GcReport, control::Error> {
        let report = self.store.local().gc(gc.dry_run, progress);
        report.map_err(control::Error::from)
    }

    fn set_retention(
        &self,
        set: &request::SetRetention,
    ) -> Result<control::RetentionRules, control::Error> {
        self.store.set_retention(set).map_err(control::Error::from)
    }

    fn show_retention(
        &self,
        show: &request::ShowRetention,
    ) -> Result<control::RetentionRules, control::Error> {
        let rules = self.store.retention_rules(&show.namespace);
        rules.map_err(control::Error::from)
    }

    fn prune(&self, prune: &request::Prune) -> Result<control::Pruned, control::Error> {
        self.store.prune(prune).map_err(control::Error::from)
    }

    fn keys(
        &self,
        keys: &request::Keys,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::KeyList, control::Error> {
        let may_remove = !self.store.is_clustered();
        let changed = self.store.local().keys(keys, may_remove, progress);
        changed.map_err(control::Error::from)
    }

    fn media(
        &self,
        media: &request::Media,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::RegionMedia, control::Error> {
        let answer = self.store.local().media(media, progress);
        answer.map_err(control::Error::from)
    }

    fn export(
        &self,
        export: &request::Export,
        directory: OwnedFd,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, control::Error> {
        let part = ExportedPart::of(export);
        if part != ExportedPart::All {
            // For a dump to be compared with, which is no restore, or little beside the pages that follow.
            return self
                .store
                .export(&export.checkpoint, part, directory, progress)
                .map_err(control::Error::from);
        }
        let since = Instant::now();
        let admission = Admission::new(0, export.priority, export.deadline_ms, &export.reservation);
        let exported = self
            .turn_to_read(&export.checkpoint, export.priority, admission, waits)
            .and_then(|turn| {
                let mut told = turn.tells(progress);
                self.store
                    .export(&export.checkpoint, part, directory, &mut told)
            });
        self.store
            .local()
            .counters()
            .restored(since, exported, |exported| exported.bytes)
            .map_err(control::Error::from)
    }

    fn import(
        &self,
        import: &request::Import,
        directory: OwnedFd,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Checkpoint, control::Error> {
        let durability = Durability::parse(&import.durability)?;
        let turn = self
            .queues
            .enter(Direction::Write, &Admission::default(), waits)
            .map_err(control::Error::from)?;
        waits.begins();
        let mut told = turn.tells(progress);
        self.store
            .import(
                &import.job,
                import.no_parent,
                durability,
                &self.taken_by(),
                directory,
                &mut told,
            )
            .map_err(control::Error::from)
    }

    fn stream(
        &self,
        stream: &request::Stream,
        listener: OwnedFd,
        caller: &UnixStream,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, control::Error> {
        let since = Instant::now();
        let admission = Admission::new(0, stream.priority, stream.deadline_ms, &stream.reservation);
        let streamed = self
            .turn_to_read(&stream.checkpoint, stream.priority, admission, waits)
            .and_then(|mut turn| {
                let served = Arc::default();
                permafrost_store::TransferSlot::follow(&mut turn, Arc::clone(&served));
                self.store
                    .stream(&stream.checkpoint, listener, caller, &served, progress)
            });
        self.store
            .local()
            .counters()
            .restored(since, streamed, |streamed| streamed.bytes)
            .map_err(control::Error::from)
    }

    fn lend(
        &self,
        wanted: &Lent<'_>,
        waits: &mut dyn Waits,
        serve: ServeLazily<'_>,
    ) -> Result<control::LazyServed, control::Error> {
        let since = Instant::now();
        let mut lend = |gate: &Arc<FillGate>| {
            waits.begins();
            let lent = (self.store).lend(wanted.checkpoint, |source| serve(source, gate));
            lent.map_err(control::Error::from).flatten()
        };
        let served = match wanted.queued {
            Some(thaw) => self.when_admitted(wanted.checkpoint, thaw, lend),
            None => {
                self.store.check_restorable(wanted.checkpoint)?;
                lend(&Arc::default())
            }
        };
        if let Ok(served) = &served
            && let Some(record) = &served.checkpoint
            && self.store.local().holds(&record.id)
        {
            let elapsed = Duration::from_micros(served.rest_us);
            self.costs.brought(served.rest_bytes, elapsed);
        }
        let bytes = |served: &control::LazyServed| served.bytes;
        self.store.local().counters().restored(since, served, bytes)
    }

    fn place(
        &self,
        place: &request::Place,
        waits: &mut dyn Waits,
        serve: ServePlacing<'_>,
    ) -> Result<control::LazyServed, control::Error> {
        let since = Instant::now();
        let admission = Admission::new(0, place.priority, place.deadline_ms, &place.reservation);
        let gate = FillGate::opened();
        let placed = self
            .turn_to_read(&place.checkpoint, place.priority, admission, waits)
            .map_err(control::Error::from)
            .and_then(|mut turn| {
                turn.follow(gate.counter());
                self.store.place(&place.checkpoint, |source, restoring| {
                    serve(source, &gate, &mut |event| match event {
                        PlacingEvent::Begun => restoring.begun(),
                        PlacingEvent::Placed(bytes) => restoring.progress(bytes),
                    })
                })
            });
        let bytes = |placed: &control::LazyServed| placed.bytes;
        self.store.local().counters().restored(since, placed, bytes)
    }

    fn status(&self) -> Result<control::ServerStatus, control::Error> {
        let (checkpoints, parked) = self.store.count_checkpoints()?;
        let [peers, metrics] = self.addresses.clone();
        Ok(control::ServerStatus {
            regions: vec![self.store.local().region_status()],
            sessions: self.store.local().session_states(),
            checkpoints,
            parked,
            park_ttl_s: self.park_ttl.as_secs(),
            catalog: self.catalog_origin.clone(),
            scrub: Some(self.scrubber.status()),
            queues: self.queues.status(),
            namespaces: self
                .store
                .local()
                .namespace_usage(&|namespace| self.reservations.kept_for(namespace)),
            peers,
            metrics,
            cluster: self.in_cluster.as_ref().map(|status| status()),
            certificate: self.identity.as_deref().map(ReloadingIdentity::status),
            files: self.files.clone(),
            ..control::ServerStatus::default()
        })
    }

    fn nodes(&self, nodes: &request::Nodes) -> Result<control::NodeList, control::Error> {
        let answer = self.operator().and_then(|operator| operator.nodes(nodes));
        answer.map_err(control::Error::from)
    }

    fn set_node(&self, set: &request::SetNode) -> Result<control::NodeList, control::Error> {
        let answer = self.operator().and_then(|operator| operator.set_node(set));
        answer.map_err(control::Error::from)
    }

    fn set_level(&self, set: &request::SetLevel) -> Result<control::NodeList, control::Error> {
        let answer = self.operator().and_then(|operator| operator.set_level(set));
        answer.map_err(control::Error::from)
    }

    fn rebuild(&self, rebuild: &request::Rebuild) -> Result<control::Rebuilt, control::Error> {
        let answer = self
            .operator()
            .and_then(|operator| operator.rebuild(rebuild));
        let rebuilt = answer?;
        if let (Some(denials), false) = (&self.denials, rebuild.dry_run) {
            denials.list_again()?;
        }
        Ok(rebuilt)
    }

    fn deny(&self, deny: &request::Deny) -> Result<control::Denials, control::Error> {
        let denials = self.denials.as_deref().ok_or_else(no_certificates);
        denials
            .and_then(|denials| denials.answer(deny))
            .map_err(control::Error::from)
    }

    fn reserve(&self, reserve: &request::Reserve) -> Result<control::Reserved, control::Error> {
        self.reservations.reserve(Owner::trusted(), reserve)
    }

    fn cancel_reservation(
        &self,
        cancel: &request::CancelReservation,
    ) -> Result<(), control::Error> {
        self.reservations.cancel(cancel)
    }

    fn trail(&self, client: &Client, body: &request::Body) -> Option<Trail> {
        let (audit, who) = (Arc::clone(&self.audit), Who::client("control", client));
        let event = AuditedRequest::of_control(body);
        Some(Box::new(move |answered| match answered {
            Ok(reply) => {
                if let Some(event) = event.told_by(reply) {
                    audit.record(&who, &event, Ok(()));
                }
            }
            Err(error) => audit.record(&who, &event, Err(error)),
        }))
    }

    fn received(&self, client: &Client, session: &str, outcome: Result<(), &control::Error>) {
        let event = AuditedRequest::change("receive", session);
        self.audit
            .record(&Who::client("page-server", client), &event, outcome);
    }

    fn lent(&self, client: &Client, checkpoint: &str, outcome: Result<(), &control::Error>) {
        let event = AuditedRequest::change("give-pages", checkpoint);
        let who = Who::client("lazy-pages", client);
        self.audit.record(&who, &event, outcome);
    }

    fn touched(&self, checkpoint: &control::Checkpoint) -> TouchedPages {
        self.touched.load(&checkpoint.id)
    }

    fn record_touched(&self, checkpoint: &control::Checkpoint, touched: &TouchedPages) {
        self.touched.store(&checkpoint.id, touched);
    }

    fn took(&self, took: &request::Took) -> bool {
        let elapsed = Duration::from_micros(took.elapsed_us);
        if took.lazy {
            // Of a checkpoint that is elsewhere, the time of other nodes and of the network would be in it.
            let is_here = self.store.local().holds(&took.checkpoint);
            if is_here {
                self.costs.ran_lazily(elapsed);
            }
            return is_here;
        }
        self.costs.took(&took.checkpoint, took.restored, elapsed)
    }
}
