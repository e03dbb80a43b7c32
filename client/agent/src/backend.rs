//! [`Backend`] of an agent: the storage nodes keep the checkpoints.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use permafrost_criu::ProgressReceiver;
use permafrost_criu::directory::{self, ExportedPart, ImagesDir};
use permafrost_criu::frontend::{self, StreamError};
use permafrost_criu::source::LazySource;
use permafrost_lazy::{FillGate, TouchedPages};
use permafrost_protocol::control::{self, ErrorCode, reply, request};

use super::images::Served;
use super::nodes::{Nodes, odd_answer, refusal};
use super::session::{RemoteDump, Sink};
use crate::error::{DumpError, NodesError};
use crate::host::{Backend, Client, Lent, ServeLazily, ServePlacing, TouchedFiles, Waits};
use crate::remote::{Holders, RemoteCheckpoint};

/// Time limit for CRIU to connect after it was promised its images.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time limit of a verification: it reads every page of many checkpoints, and the node reports nothing
/// meanwhile.
const VERIFY_DEADLINE: Duration = Duration::from_secs(3600);

/// Most finished sessions that are kept, so that they can be listed and their node be found.
const MAX_OVER: usize = 1024;

/// Checkpoints that the nodes keep.
pub struct Remote {
    pub(super) nodes: Arc<Nodes>,
    /// Durability that is requested for a dump without one of its own.
    pub(super) durability: String,
    /// Time for which a session may wait for its dump, or for its seal.
    pub(super) session_ttl: Duration,
    sessions: Mutex<HashMap<String, Arc<RemoteDump>>>,
    /// Orders of accesses, for lazy restores.
    touched: TouchedFiles,
}

impl Remote {
    pub(super) fn new(
        nodes: Nodes,
        durability: String,
        session_ttl: Duration,
        touched: TouchedFiles,
    ) -> Self {
        Self {
            nodes: Arc::new(nodes),
            durability,
            session_ttl,
            sessions: Mutex::default(),
            touched,
        }
    }

    /// Sends a slow request to every node, one after another, and passes each reply to `take`.
    ///
    /// # Errors
    /// Every node refuses; the error is the first node's.
    fn ask_all(
        &self,
        body: &request::Body,
        mut take: impl FnMut(&str, reply::Body) -> Result<(), control::Error>,
    ) -> Result<(), control::Error> {
        let (mut refused, mut answered) = (None, false);
        for node in self.nodes.in_order() {
            let deadline = Instant::now() + VERIFY_DEADLINE;
            match (self.nodes).ask_if_reachable(&node, body.clone(), deadline) {
                Ok(reply) => {
                    take(&node, reply)?;
                    answered = true;
                }
                Err(error) => {
                    refused.get_or_insert(error);
                }
            }
        }
        match refused {
            Some(error) if !answered => Err(error),
            _ => Ok(()),
        }
    }

    /// Asks a node for rules of retention, which all of a cluster's nodes have alike.
    fn rules(&self, body: &request::Body) -> Result<control::RetentionRules, control::Error> {
        match self.nodes.ask_any(body)? {
            (_, reply::Body::Retention(rules)) => Ok(rules),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    /// Ends every session that is not sealed, as part of stopping. Returns true if there was one.
    pub(super) fn stop(&self) -> bool {
        let sessions: Vec<_> = self.sessions().drain().collect();
        let mut ended = false;
        for (_, session) in sessions {
            ended |= session.over_since().is_none();
            // One that is being sealed is waited for.
            let _ = session.discard("the agent is stopping");
        }
        ended
    }

    /// Discards sessions whose dump never came, and forgets sessions that are over.
    pub(super) fn expire(&self) {
        let sessions: Vec<_> = self.sessions().values().cloned().collect();
        for session in sessions {
            if session.is_idle(self.session_ttl)
                && session.discard("nobody came for it in time").is_ok()
            {
                self.sessions()
                    .remove(crate::host::DumpSession::id(&*session));
            }
        }
    }

    pub(super) fn sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<RemoteDump>>> {
        self.sessions.lock()
    }

    /// Opens a checkpoint for reading: from the nodes that hold it as far as they are known, or through the
    /// others.
    fn checkpoint(&self, reference: &str) -> Result<RemoteCheckpoint, control::Error> {
        let show = request::Body::Show(request::Show {
            checkpoint: reference.to_owned(),
        });
        let (node, answer) = self.nodes.ask_for(&show)?;
        let reply::Body::Detail(control::Detail {
            checkpoint: Some(record),
            manifest: Some(manifest),
            ..
        }) = answer
        else {
            return Err(odd_answer(&node));
        };
        let checked = manifest.check();
        checked.map_err(|source| NodesError::Manifest {
            checkpoint: reference.to_owned(),
            node: node.clone(),
            source,
        })?;
        let order = self.nodes.holders_first(&node, &record.nodes);
        let holders = Arc::clone(&self.nodes) as Arc<dyn Holders>;
        Ok(RemoteCheckpoint::new(holders, order, record, manifest))
    }
}

impl Backend for Remote {
    type Session = RemoteDump;
    type Sink = Sink;

    fn open(
        &self,
        mut open: request::Open,
        waits: &mut dyn Waits,
    ) -> Result<Arc<RemoteDump>, control::Error> {
        if open.durability.is_empty() {
            open.durability.clone_from(&self.durability);
        }
        let asked = request::Open {
            // The agent itself listens for the dump; at the node, the session is bound to the conversation
            // below.
            bound_to_connection: true,
            ..open.clone()
        };
        let (node, opened) = self.await_turn(asked, waits)?;
        let Some(id) = bytes_of(&opened.session) else {
            return Err(odd_answer(&node));
        };
        let parent_spaces = if open.parent_images && opened.parent_generation > 0 {
            self.parent_spaces(&node, &open.job, opened.parent_generation)
        } else {
            Vec::new()
        };
        let sender = self.sender(&node, &id, &open.job, None)?;
        let session = RemoteDump::new(&node, open, opened, parent_spaces, sender);
        let id = crate::host::DumpSession::id(&*session).to_owned();
        let mut sessions = self.sessions();
        forget_old_failures(&mut sessions);
        sessions.insert(id, Arc::clone(&session));
        drop(sessions);
        Ok(session)
    }

    fn session(&self, id: &str) -> Option<Arc<RemoteDump>> {
        self.sessions().get(id).cloned()
    }

    fn start(
        &self,
        session: &Arc<RemoteDump>,
        // The node records this agent.
        _client: Option<&Client>,
        hang_up: Box<dyn FnOnce() + Send>,
    ) -> Result<Sink, control::Error> {
        session.start(self.nodes.deadline, hang_up)
    }

    fn depends_on(&self) -> Vec<String> {
        self.nodes.addresses.clone()
    }

    fn drop_session(&self, id: &str) {
        let session = self.sessions().get(id).cloned();
        if session.is_some_and(|session| session.discard("its opener has gone").is_ok()) {
            self.sessions().remove(id);
        }
    }

    fn seal(
        &self,
        seal: &request::Seal,
        images: OwnedFd,
        waits: &dyn Waits,
    ) -> Result<control::Checkpoint, control::Error> {
        let session = self.sessions().get(&seal.session).cloned();
        let Some(session) = session.filter(|session| !session.is_done()) else {
            return self.seal_again(&seal.session, images);
        };
        let (sender, served) = session.begin_seal()?;
        let sealed = ImagesDir::new(images)
            .map_err(control::Error::from)
            .and_then(|images| {
                self.conclude(sender, &seal.session, &images, &served, || {
                    check_waits(waits)?;
                    Ok(session.images_are_in()?)
                })
            });
        match &sealed {
            Ok(_) => {
                session.done();
                self.sessions().remove(&seal.session);
            }
            Err(error) => session.fail(error.clone()),
        }
        sealed
    }

    fn abort(&self, abort: &request::Abort) -> Result<(), control::Error> {
        let session = self.sessions().get(&abort.session).cloned();
        let node = session.as_ref().map(|session| session.node.clone());
        let aborted = match session.filter(|session| !session.is_done()) {
            Some(session) => session.discard("discarded on request").map_err(Into::into),
            None => {
                // Each node that is asked would count it.
                let abort = request::Abort {
                    freeze_limit_reached: false,
                    ..abort.clone()
                };
                self.nodes.ask_for(&request::Body::Abort(abort)).map(drop)
            }
        };
        if aborted.is_ok() {
            self.sessions().remove(&abort.session);
        }
        if let (true, Some(node)) = (abort.freeze_limit_reached, node) {
            // The node counts it. The session has ended there with its conversation, so a refusal says nothing.
            let count = request::Body::Abort(abort.clone());
            if let Err(error) = self.nodes.ask(&node, count, self.nodes.until()) {
                tracing::debug!(node, error = error.message, "abort told");
            }
        }
        aborted
    }

    fn adopt(
        &self,
        mut adopt: request::Adopt,
        images: OwnedFd,
    ) -> Result<control::Checkpoint, control::Error> {
        let images = ImagesDir::new(images)?;
        // The node gets copies, and has a clock of its own.
        adopt.images_age_us = (images.written()?)
            .and_then(|written| written.elapsed().ok())
            .and_then(|age| u64::try_from(age.as_micros()).ok());
        let session = adopt.session.clone();
        let mut refused = control::Error::from(NodesError::NoNode);
        // A parked session is on the node that took it, unless the cluster has found it another.
        let parked_at = self
            .sessions()
            .get(&session)
            .map(|session| session.node.clone());
        for node in self
            .nodes
            .holders_first(&parked_at.unwrap_or_default(), &[])
        {
            let id = uuid::Uuid::new_v4();
            let adopted = self
                .sender(&node, id.as_bytes(), &adopt.job, Some(adopt.clone()))
                .and_then(|mut sender| {
                    let until = Instant::now() + self.nodes.deadline;
                    sender.close(until).map_err(|error| refusal(&error))?;
                    self.conclude(sender, &session, &images, &Served::default(), || Ok(()))
                });
            match adopted {
                Ok(record) => {
                    self.sessions().remove(&record.session);
                    return Ok(record);
                }
                Err(error)
                    if matches!(error.code(), ErrorCode::NotFound | ErrorCode::Unavailable) =>
                {
                    refused = error;
                }
                Err(error) => return Err(error),
            }
        }
        Err(refused)
    }

    fn list(&self, list: &request::List) -> Result<control::Checkpoints, control::Error> {
        match self.nodes.ask_any(&request::Body::List(list.clone()))? {
            (_, reply::Body::Checkpoints(listed)) => Ok(listed),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn show(&self, show: &request::Show) -> Result<control::Detail, control::Error> {
        match self.nodes.ask_for(&request::Body::Show(show.clone()))? {
            (_, reply::Body::Detail(detail)) => Ok(control::Detail {
                agent: self.nodes.network.name(),
                ..detail
            }),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn contents(
        &self,
        contents: &request::Describe,
    ) -> Result<control::CheckpointContents, control::Error> {
        match (self.nodes).ask_for(&request::Body::Describe(contents.clone()))? {
            (_, reply::Body::Contents(contents)) => Ok(contents),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn remove(&self, remove: &request::Remove) -> Result<u64, control::Error> {
        match self.nodes.ask_for(&request::Body::Remove(remove.clone()))? {
            (_, reply::Body::Done(done)) => Ok(done.count),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn pin(&self, pin: &request::Pin) -> Result<control::Checkpoint, control::Error> {
        match self.nodes.ask_for(&request::Body::Pin(pin.clone()))? {
            (_, reply::Body::Checkpoint(record)) => Ok(record),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn verify(
        &self,
        verify: &request::Verify,
        _progress: ProgressReceiver<'_>,
    ) -> Result<control::Verified, control::Error> {
        // Each node reads what it holds; everything is what all of them hold.
        let mut all = control::Verified::default();
        self.ask_all(&request::Body::Verify(verify.clone()), |node, reply| {
            let reply::Body::Verified(verified) = reply else {
                return Err(odd_answer(node));
            };
            all.checkpoints += verified.checkpoints;
            all.pages += verified.pages;
            all.unverified_pages += verified.unverified_pages;
            if all.away.is_empty() && !verified.away.is_empty() {
                all.away = format!("{node}: {}", verified.away);
            }
            let damage = verified.damage.into_iter();
            all.damage
                .extend(damage.map(|damage| format!("{node}: {damage}")));
            Ok(())
        })?;
        Ok(all)
    }

    fn scrub(
        &self,
        scrub: &request::Scrub,
        _progress: ProgressReceiver<'_>,
    ) -> Result<control::Scrubbed, control::Error> {
        let mut all = control::Scrubbed::default();
        self.ask_all(&request::Body::Scrub(scrub.clone()), |node, reply| {
            let reply::Body::Scrubbed(scrubbed) = reply else {
                return Err(odd_answer(node));
            };
            all.checkpoints += scrubbed.checkpoints;
            all.pages += scrubbed.pages;
            all.unverified_pages += scrubbed.unverified_pages;
            if all.away.is_empty() && !scrubbed.away.is_empty() {
                all.away = format!("{node}: {}", scrubbed.away);
            }
            let damaged = scrubbed.damaged.into_iter();
            all.damaged
                .extend(damaged.map(|damaged| control::DamagedCheckpoint {
                    node: node.to_owned(),
                    ..damaged
                }));
            Ok(())
        })?;
        Ok(all)
    }

    fn gc(
        &self,
        gc: &request::Gc,
        _progress: ProgressReceiver<'_>,
    ) -> Result<control::GcReport, control::Error> {
        let mut all = control::GcReport::default();
        self.ask_all(&request::Body::Gc(gc.clone()), |node, reply| {
            let reply::Body::GcReport(report) = reply else {
                return Err(odd_answer(node));
            };
            let regions = report.regions.into_iter();
            all.regions.extend(regions.map(|region| control::RegionGc {
                node: node.to_owned(),
                ..region
            }));
            Ok(())
        })?;
        Ok(all)
    }

    fn set_retention(
        &self,
        set: &request::SetRetention,
    ) -> Result<control::RetentionRules, control::Error> {
        self.rules(&request::Body::SetRetention(set.clone()))
    }

    fn show_retention(
        &self,
        show: &request::ShowRetention,
    ) -> Result<control::RetentionRules, control::Error> {
        self.rules(&request::Body::ShowRetention(show.clone()))
    }

    fn prune(&self, prune: &request::Prune) -> Result<control::Pruned, control::Error> {
        match self.nodes.ask_any(&request::Body::Prune(prune.clone()))? {
            (_, reply::Body::Pruned(pruned)) => Ok(pruned),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn keys(
        &self,
        keys: &request::Keys,
        _progress: ProgressReceiver<'_>,
    ) -> Result<control::KeyList, control::Error> {
        let mut all = control::KeyList::default();
        // Nodes refuse it: each has keys of its own, which are listed and changed there.
        self.ask_all(&request::Body::Keys(keys.clone()), |node, reply| {
            let reply::Body::KeyList(answer) = reply else {
                return Err(odd_answer(node));
            };
            all.keys.extend(answer.keys);
            Ok(())
        })?;
        Ok(all)
    }

    fn media(
        &self,
        media: &request::Media,
        _progress: ProgressReceiver<'_>,
    ) -> Result<control::RegionMedia, control::Error> {
        let mut all = control::RegionMedia::default();
        self.ask_all(&request::Body::Media(media.clone()), |node, reply| {
            let reply::Body::RegionMedia(answer) = reply else {
                return Err(odd_answer(node));
            };
            let media = answer.media.into_iter();
            all.media.extend(media.map(|medium| control::MediumStatus {
                node: node.to_owned(),
                ..medium
            }));
            Ok(())
        })?;
        Ok(all)
    }

    fn export(
        &self,
        export: &request::Export,
        directory: OwnedFd,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, control::Error> {
        let checkpoint = self.checkpoint(&export.checkpoint)?;
        waits.begins();
        directory::export(&checkpoint, ExportedPart::of(export), directory, progress)
    }

    fn import(
        &self,
        import: &request::Import,
        directory: OwnedFd,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Checkpoint, control::Error> {
        self.put(import, directory, waits, progress)
    }

    fn stream(
        &self,
        stream: &request::Stream,
        listener: OwnedFd,
        caller: &UnixStream,
        waits: &mut dyn Waits,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, control::Error> {
        let checkpoint = self.checkpoint(&stream.checkpoint)?;
        waits.begins();
        let total_bytes = checkpoint.record().memory_bytes;
        let served =
            frontend::accept(&UnixListener::from(listener), caller, PATIENCE).and_then(|criu| {
                frontend::stream(&criu, &checkpoint, &Arc::default(), &mut |bytes| {
                    progress(bytes, total_bytes);
                })
            });
        let served = served.map_err(|error| match error {
            StreamError::Source(error) => error,
            StreamError::NobodyCame => NodesError::NobodyCame.into(),
            other => NodesError::Stream {
                checkpoint: stream.checkpoint.clone(),
                reason: other.to_string(),
            }
            .into(),
        })?;
        Ok(control::Exported {
            files: served.files,
            bytes: served.bytes,
            origin: checkpoint.manifest().origin.clone(),
            checkpoint: Some(checkpoint.record().clone()),
        })
    }

    fn lend(
        &self,
        wanted: &Lent<'_>,
        waits: &mut dyn Waits,
        serve: ServeLazily<'_>,
    ) -> Result<control::LazyServed, control::Error> {
        let checkpoint = self.checkpoint(wanted.checkpoint)?;
        waits.begins();
        let gate = match wanted.queued {
            Some(_) => FillGate::opened(),
            None => FillGate::default(),
        };
        serve(&checkpoint, &Arc::new(gate))
    }

    fn place(
        &self,
        place: &request::Place,
        waits: &mut dyn Waits,
        serve: ServePlacing<'_>,
    ) -> Result<control::LazyServed, control::Error> {
        let checkpoint = self.checkpoint(&place.checkpoint)?;
        waits.begins();
        let source: &dyn LazySource = &checkpoint;
        serve(source, &FillGate::opened(), &mut |_| {})
    }

    fn status(&self) -> Result<control::ServerStatus, control::Error> {
        Ok(self.status_of_all())
    }

    fn nodes(&self, nodes: &request::Nodes) -> Result<control::NodeList, control::Error> {
        match self.nodes.ask_any(&request::Body::Nodes(nodes.clone()))? {
            (_, reply::Body::Nodes(list)) => Ok(list),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn set_node(&self, set: &request::SetNode) -> Result<control::NodeList, control::Error> {
        match self.nodes.ask_any(&request::Body::SetNode(set.clone()))? {
            (_, reply::Body::Nodes(list)) => Ok(list),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn set_level(&self, set: &request::SetLevel) -> Result<control::NodeList, control::Error> {
        match self.nodes.ask_any(&request::Body::SetLevel(set.clone()))? {
            (_, reply::Body::Nodes(list)) => Ok(list),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn rebuild(&self, rebuild: &request::Rebuild) -> Result<control::Rebuilt, control::Error> {
        match self
            .nodes
            .ask_any(&request::Body::Rebuild(rebuild.clone()))?
        {
            (_, reply::Body::Rebuilt(rebuilt)) => Ok(rebuilt),
            (node, _) => Err(odd_answer(&node)),
        }
    }

    fn deny(&self, deny: &request::Deny) -> Result<control::Denials, control::Error> {
        self.deny_on_nodes(deny)
    }

    fn reserve(&self, reserve: &request::Reserve) -> Result<control::Reserved, control::Error> {
        self.reserve_on_node(reserve)
    }

    fn cancel_reservation(
        &self,
        cancel: &request::CancelReservation,
    ) -> Result<(), control::Error> {
        self.cancel_on_node(cancel)
    }

    fn touched(&self, checkpoint: &control::Checkpoint) -> TouchedPages {
        self.touched.load(&checkpoint.id)
    }

    fn record_touched(&self, checkpoint: &control::Checkpoint, touched: &TouchedPages) {
        self.touched.store(&checkpoint.id, touched);
    }

    /// Ignores the measurement: the nodes measure their part themselves.
    fn took(&self, _took: &request::Took) -> bool {
        false
    }
}

/// Forgets the oldest session that is over once there are [`MAX_OVER`] of them. Failed sessions are kept so
/// that users can see them, but a client that sends garbage for hours must not fill the memory. Nor may parked
/// sessions, which are found on their node without the agent.
fn forget_old_failures(sessions: &mut HashMap<String, Arc<RemoteDump>>) {
    let mut over: Vec<_> = sessions
        .iter()
        .filter_map(|(id, session)| Some((session.over_since()?, id.clone())))
        .collect();
    if over.len() >= MAX_OVER {
        over.sort_unstable();
        sessions.remove(&over[0].1);
    }
}

/// Checks that the requester of a seal still waits for it.
pub(super) fn check_waits(waits: &dyn Waits) -> Result<(), control::Error> {
    if waits.is_gone() {
        return Err(DumpError::CallerGone.into());
    }
    Ok(())
}

pub(super) fn bytes_of(session: &str) -> Option<[u8; 16]> {
    uuid::Uuid::try_parse(session).ok().map(|id| *id.as_bytes())
}
