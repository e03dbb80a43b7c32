//! The control socket: one thread a connection, one request after another.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_criu::frontend::{self, PipeRoom};
use permafrost_protocol::access::Access;
use permafrost_protocol::control::{self, Reply, Request, reply, request};
use permafrost_protocol::versions::{self, Interface, RELEASE};
use permafrost_transport::framing;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::net::UnixListener;

use super::error::RequestError;
use super::intake::{PipedDump, Sender};
use super::lazy_restores::LazyRestore;
use super::{Backend, Client, DumpSession, Shared, Waits, endpoints, lazy, page_server_socket};

/// Time after which a peer that does not read its replies is given up.
const REPLY_PATIENCE: Duration = Duration::from_secs(30);

/// Shortest time between two progress messages.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

/// Reserves room in pipes for a session that wants it for so many bytes. Returns it, and the bytes that
/// [`control::SessionOpened`] has: 0 only if no pipes are taken.
fn reserve_pipes(wanted: u64) -> (Option<PipeRoom>, u64) {
    if !takes(request::Body::TakeSpace(request::TakeSpace::default())) {
        return (None, 0);
    }
    let room = Some(wanted)
        .filter(|bytes| *bytes > 0)
        .and_then(PipeRoom::reserve);
    let bytes = match &room {
        Some(room) => room.reserved(),
        None => frontend::pipe_bytes(),
    };
    (room, bytes.map_or(u64::MAX, |bytes| bytes.max(1)))
}

/// Returns true if a request is of a version that is spoken here.
fn takes(body: request::Body) -> bool {
    let spoken = versions::own().of(Interface::Control);
    spoken.contains(control::since(&body))
}

pub(super) async fn accept<B: Backend>(shared: Arc<Shared<B>>, listener: UnixListener) {
    loop {
        match endpoints::accept_owner(&listener).await {
            Ok(stream) => {
                let shared = Arc::clone(&shared);
                let spawned = std::thread::Builder::new()
                    .name("control".to_owned())
                    .spawn(move || serve(&shared, &stream));
                if let Err(error) = spawned {
                    tracing::error!(event = "control-thread-failed", %error, "no thread for a control connection");
                }
            }
            Err(error) => endpoints::accept_failed(&error).await,
        }
    }
}

fn serve<B: Backend>(shared: &Arc<Shared<B>>, stream: &UnixStream) {
    let prepared = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_write_timeout(Some(REPLY_PATIENCE)));
    if let Err(error) = prepared {
        tracing::warn!(event = "control-connection-failed", %error, "control connection");
        return;
    }
    let client = match endpoints::user_of(stream) {
        Ok(client) => client,
        Err(error) => {
            tracing::warn!(event = "control-connection-failed", %error, "control connection");
            return;
        }
    };
    let mut bound = Bound::default();
    loop {
        match framing::recv::<Request>(stream) {
            Ok(Some((request, fds))) => {
                let handler = Handler {
                    shared,
                    stream,
                    client: &client,
                };
                let body = handler.answer(&mut bound, request, fds);
                if let Err(error) = framing::send(stream, &Reply { body: Some(body) }, &[]) {
                    tracing::debug!(%error, "reply not sent");
                    break;
                }
                bound.restore = None;
            }
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "control connection");
                break;
            }
        }
    }
    bound.end(&*shared.backend, &client);
}

/// Sessions and checkpoints that end with a connection, and its lazy restore.
struct Bound<B: Backend> {
    /// Dump whose pages the connection brings.
    dump: Option<PipedDump<B>>,
    sessions: Vec<String>,
    /// Sessions that are rounds of a pre-copy.
    rounds: Vec<String>,
    /// Checkpoints of the rounds that were sealed, as `JOB@GENERATION`.
    sealed_rounds: Vec<String>,
    /// Lazy restore whose end was not told yet.
    restore: Option<LazyRestore>,
}

impl<B: Backend> Default for Bound<B> {
    fn default() -> Self {
        Self {
            dump: None,
            sessions: Vec::new(),
            rounds: Vec::new(),
            sealed_rounds: Vec::new(),
            restore: None,
        }
    }
}

impl<B: Backend> Bound<B> {
    /// Returns true if the reply to a request can change what ends with its connection.
    fn is_noted(body: &request::Body) -> bool {
        use request::Body::{Open, Remove, Seal};
        matches!(body, Open(_) | Seal(_) | Remove(_))
    }

    /// Records what a request has changed.
    fn note(&mut self, body: &request::Body, answered: &reply::Body) {
        match (body, answered) {
            (request::Body::Open(open), reply::Body::SessionOpened(opened)) => {
                if open.bound_to_connection {
                    self.sessions.push(opened.session.clone());
                }
                if open.pre_copy {
                    self.rounds.push(opened.session.clone());
                }
            }
            (request::Body::Seal(seal), reply::Body::Checkpoint(sealed))
                if self.rounds.contains(&seal.session) =>
            {
                let name = format!("{}@{}", sealed.job, sealed.generation);
                self.sealed_rounds.push(name);
            }
            (request::Body::Remove(remove), reply::Body::Done(_)) => {
                self.sealed_rounds
                    .retain(|round| *round != remove.checkpoint);
            }
            _ => {}
        }
    }

    /// Discards everything: the client has ended or has given up.
    fn end(self, backend: &B, client: &Client) {
        if let Some(dump) = self.dump {
            dump.give_up(backend, client);
        }
        for session in self.sessions {
            // Sealed ones are gone already.
            backend.drop_session(&session);
        }
        for round in self.sealed_rounds {
            let remove = request::Remove {
                checkpoint: round,
                // What is restored never depends on it.
                last: true,
                ..request::Remove::default()
            };
            let body = request::Body::Remove(remove.clone());
            let trail = backend.trail(client, &body);
            let removed = backend
                .remove(&remove)
                .map(|count| reply::Body::Done(control::Done { count }));
            if let Some(trail) = trail {
                trail(removed.as_ref());
            }
            if let Err(error) = removed {
                let error = error.message;
                tracing::warn!(
                    event = "pre-copy-round-not-removed",
                    round = remove.checkpoint,
                    error,
                    "round of a pre-copy not removed"
                );
            }
        }
    }
}

struct Handler<'a, B> {
    shared: &'a Arc<Shared<B>>,
    stream: &'a UnixStream,
    client: &'a Client,
}

impl<B: Backend> Handler<'_, B> {
    fn answer(self, bound: &mut Bound<B>, request: Request, fds: Vec<OwnedFd>) -> reply::Body {
        let body = match request.known("the daemon", versions::own()) {
            Ok(body) => body.clone(),
            Err(unknown) => return reply::Body::Error(unknown.into()),
        };
        let trail = self.shared.backend.trail(self.client, &body);
        let noted = Bound::<B>::is_noted(&body).then(|| body.clone());
        let answered = self.dispatch(bound, body, fds);
        if let (Some(body), Ok(answered)) = (noted, &answered) {
            bound.note(&body, answered);
        }
        if let Some(trail) = trail {
            trail(answered.as_ref());
        }
        match answered {
            Ok(body) => body,
            Err(error) => {
                tracing::info!(
                    event = "request-refused",
                    error = error.message,
                    "request refused"
                );
                reply::Body::Error(error)
            }
        }
    }

    fn dispatch(
        self,
        bound: &mut Bound<B>,
        body: request::Body,
        fds: Vec<OwnedFd>,
    ) -> Result<reply::Body, control::Error> {
        // Names are checked before anything is done with them.
        Access::of_control(&body)?;
        let backend = &*self.shared.backend;
        let sender = Sender {
            shared: self.shared,
            stream: self.stream,
            client: self.client,
        };
        Ok(match body {
            request::Body::Open(open) => reply::Body::SessionOpened(self.open(open)?),
            request::Body::Seal(seal) => {
                let images = first(fds)?;
                let caller = Caller(self.stream);
                if caller.is_gone() {
                    // The request may have come while this process was stopped: the freeze has ended without the seal.
                    return Err(RequestError::CallerGone.into());
                }
                reply::Body::Checkpoint(backend.seal(&seal, images, &caller)?)
            }
            request::Body::Abort(abort) => {
                backend.abort(&abort)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::Adopt(adopt) => {
                reply::Body::Checkpoint(backend.adopt(adopt, first(fds)?)?)
            }
            request::Body::List(list) => reply::Body::Checkpoints(backend.list(&list)?),
            request::Body::Show(show) => reply::Body::Detail(control::Detail {
                places: takes(request::Body::Place(request::Place::default())),
                ..backend.show(&show)?
            }),
            request::Body::Describe(contents) => {
                reply::Body::Contents(backend.contents(&contents)?)
            }
            request::Body::Remove(remove) => reply::Body::Done(control::Done {
                count: backend.remove(&remove)?,
            }),
            request::Body::Pin(pin) => reply::Body::Checkpoint(backend.pin(&pin)?),
            request::Body::Verify(verify) => {
                reply::Body::Verified(backend.verify(&verify, &mut progress(self.stream))?)
            }
            request::Body::Scrub(scrub) => {
                reply::Body::Scrubbed(backend.scrub(&scrub, &mut progress(self.stream))?)
            }
            request::Body::Gc(gc) => {
                reply::Body::GcReport(backend.gc(&gc, &mut progress(self.stream))?)
            }
            request::Body::Keys(keys) => {
                reply::Body::KeyList(backend.keys(&keys, &mut progress(self.stream))?)
            }
            request::Body::SetRetention(set) => {
                reply::Body::Retention(backend.set_retention(&set)?)
            }
            request::Body::ShowRetention(show) => {
                reply::Body::Retention(backend.show_retention(&show)?)
            }
            request::Body::Prune(prune) => reply::Body::Pruned(backend.prune(&prune)?),
            request::Body::Media(media) => {
                reply::Body::RegionMedia(backend.media(&media, &mut progress(self.stream))?)
            }
            request::Body::Export(export) => reply::Body::Exported(backend.export(
                &export,
                first(fds)?,
                &mut Caller(self.stream),
                &mut progress(self.stream),
            )?),
            request::Body::Import(import) => reply::Body::Checkpoint(backend.import(
                &import,
                first(fds)?,
                &mut Caller(self.stream),
                &mut progress(self.stream),
            )?),
            request::Body::Stream(stream) => reply::Body::Exported(backend.stream(
                &stream,
                first(fds)?,
                self.stream,
                &mut Caller(self.stream),
                &mut progress(self.stream),
            )?),
            request::Body::Lend(lend) => {
                reply::Body::LazyServed(lazy::lend(self.shared, self.stream, &lend, first(fds)?)?)
            }
            request::Body::Thaw(thaw) => {
                let restore = &mut bound.restore;
                let served = lazy::thaw(self.shared, self.stream, &thaw, fds, restore)?;
                reply::Body::LazyServed(served)
            }
            request::Body::Place(place) => {
                let listener = first(fds)?;
                reply::Body::LazyServed(lazy::place(backend, self.stream, &place, listener)?)
            }
            request::Body::TakeSpace(take) => {
                sender.take_space(&mut bound.dump, &take, fds)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::EndPages(end) => {
                sender.end_pages(&mut bound.dump, &end)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::Status(_) => reply::Body::Status(self.status()?),
            request::Body::Nodes(nodes) => reply::Body::Nodes(backend.nodes(&nodes)?),
            request::Body::SetNode(set) => reply::Body::Nodes(backend.set_node(&set)?),
            request::Body::Rebuild(rebuild) => reply::Body::Rebuilt(backend.rebuild(&rebuild)?),
            request::Body::SetLevel(set) => reply::Body::Nodes(backend.set_level(&set)?),
            request::Body::Deny(deny) => reply::Body::Denials(backend.deny(&deny)?),
            request::Body::Reserve(reserve) => reply::Body::Reserved(backend.reserve(&reserve)?),
            request::Body::CancelReservation(cancel) => {
                backend.cancel_reservation(&cancel)?;
                reply::Body::Done(control::Done { count: 1 })
            }
            request::Body::Took(took) => reply::Body::Done(control::Done {
                count: u64::from(backend.took(&took)),
            }),
        })
    }

    fn open(self, open: request::Open) -> Result<control::SessionOpened, control::Error> {
        if open.job.is_empty() {
            return Err(RequestError::EmptyJob.into());
        }
        let backend = &self.shared.backend;
        let bound_to_connection = open.bound_to_connection;
        // Others have no end that is sure to come.
        let wanted = if bound_to_connection {
            open.pipe_bytes
        } else {
            0
        };
        let session = backend.open(open, &mut Caller(self.stream))?;
        // Now, not before the session's place in the queue: nobody waits there with room that others could use.
        let (room, pipe_bytes) = reserve_pipes(wanted);
        // A client that is bound to its connection is on this host, and needs no port.
        let endpoints =
            match endpoints::listen_for(self.shared, &session, !bound_to_connection, room) {
                Ok(endpoints) => endpoints,
                Err(error) => {
                    backend.drop_session(session.id());
                    return Err(endpoints::failed("listen for the session")(error).into());
                }
            };
        let (parent_generation, parent_origin) = session.parent();
        Ok(control::SessionOpened {
            session: session.id().to_owned(),
            socket: endpoints.socket.to_string_lossy().into_owned(),
            address: endpoints
                .address
                .map_or_else(String::new, |address| address.to_string()),
            parent_generation,
            parent_origin,
            depends_on: backend.depends_on(),
            pipe_bytes,
        })
    }

    fn status(&self) -> Result<control::ServerStatus, control::Error> {
        Ok(control::ServerStatus {
            version: RELEASE.to_owned(),
            speaks: Some(versions::own().clone()),
            pipe_bytes: frontend::pipe_bytes(),
            pid: std::process::id(),
            uptime_s: self.shared.started.elapsed().as_secs(),
            address: self
                .shared
                .address
                .map_or_else(String::new, |address| address.to_string()),
            socket: page_server_socket(&self.shared.options)
                .to_string_lossy()
                .into_owned(),
            ..self.shared.backend.status()?
        })
    }
}

/// Returns the descriptor of a request that takes one.
fn first(fds: Vec<OwnedFd>) -> Result<OwnedFd, RequestError> {
    fds.into_iter().next().ok_or(RequestError::NoDescriptor)
}

/// Caller of a request that waits.
pub(super) struct Caller<'a>(pub(super) &'a UnixStream);

impl Caller<'_> {
    fn tell(&self, progress: control::Progress) {
        let body = reply::Body::Progress(progress);
        if let Err(error) = framing::send(self.0, &Reply { body: Some(body) }, &[]) {
            tracing::debug!(%error, "progress not sent");
        }
    }
}

impl Waits for Caller<'_> {
    fn waits(&mut self, waiting: &control::Waiting) {
        self.tell(control::Progress {
            waiting: Some(waiting.clone()),
            ..control::Progress::default()
        });
    }

    fn begins(&mut self) {
        self.tell(control::Progress::default());
    }

    fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(self.0, PollFlags::RDHUP | PollFlags::HUP)];
        let now = Timespec::default();
        matches!(poll(&mut fds, Some(&now)), Ok(ready) if ready > 0)
    }
}

/// Returns a function that sends progress now and then; a peer that is gone is noticed at the final reply.
fn progress(stream: &UnixStream) -> impl FnMut(u64, u64) + use<> {
    let mut stream = stream.try_clone().ok();
    let mut last = Instant::now();
    move |done_bytes, total_bytes| {
        let Some(peer) = stream
            .as_ref()
            .filter(|_| last.elapsed() >= PROGRESS_PERIOD)
        else {
            return;
        };
        last = Instant::now();
        let body = reply::Body::Progress(control::Progress {
            done_bytes,
            total_bytes,
            ..control::Progress::default()
        });
        if let Err(error) = framing::send(peer, &Reply { body: Some(body) }, &[]) {
            tracing::debug!(%error, "progress not sent");
            stream = None;
        }
    }
}
