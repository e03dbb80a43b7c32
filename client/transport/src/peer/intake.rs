//! The receiving side of a dump: one session, over all of its conversations.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use permafrost_protocol::control;
use permafrost_protocol::wire::frame::{Header, Kind};
use permafrost_protocol::wire::message::{
    Acknowledged, Closed, Commit, Committed, DumpOpened, Prepared, Reply, reply,
};
use permafrost_protocol::wire::receiver::{Received, Receiver};
use quinn::{RecvStream, SendStream, VarInt};
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{Notify, mpsc, watch};

use super::router::Router;
use super::stream::{self, Bulk, within};
use super::{PeerError, PeerOptions, ReceivedFrame, code, decode};

/// Most dumps that are kept, including those that are over but whose last reply may have to be repeated.
const MAX_SESSIONS: usize = 1024;

/// Most dumps of one peer that are kept.
const MAX_OF_PEER: usize = MAX_SESSIONS / 4;

/// Length of the queue between the connection and the handler, frames; 4 MiB with the largest frames.
const QUEUED_FRAMES: usize = 16;

/// Source of the frames of a dump, in order and each once, for a blocking handler.
pub trait FrameSource: Send {
    /// Returns the next frame, decoded; blocks until it arrives. The last frame is [`Kind::Prepare`].
    ///
    /// # Errors
    /// The dump was given up: by the sender, or because its connection did not come back in time.
    fn next(&mut self) -> Result<ReceivedFrame, PeerError>;

    /// Waits for the commit, which follows [`Kind::Prepare`] and says under which name the dump is sealed.
    ///
    /// # Errors
    /// The same as for [`Self::next`].
    fn commit(&mut self) -> Result<Commit, PeerError>;

    /// Returns a function that makes [`Self::next`] and [`Self::commit`] fail from another thread, at once and
    /// for good.
    fn canceller(&self) -> Box<dyn FnOnce() + Send>;
}

/// Replies of a handler to a dump. Kept until the dump is over, and repeated after a lost connection.
pub trait Replies: Send {
    /// Accepts the dump. To be called before the first frame is requested. `has_parent`: the receiver has the
    /// parent too.
    fn opened(&mut self, has_parent: bool);
    /// Replies to [`Kind::Close`].
    fn closed(&mut self, closed: Closed);
    /// Replies to [`Kind::Prepare`].
    fn prepared(&mut self, prepared: Prepared);
    /// Replies to the commit that [`FrameSource::commit`] returned.
    fn committed(&mut self, committed: Committed);
}

/// A frame in the queue for the handler; `None` wakes the handler.
type Queued = Option<(Header, Bytes)>;

struct State {
    receiver: Receiver,
    acknowledge: Option<u64>,
    has_parent: Option<bool>,
    replies: Vec<reply::Body>,
    commit: Option<Commit>,
    /// The handler has returned: no more replies follow.
    done: bool,
    failed: Option<PeerError>,
    /// True if the handler was told to end.
    cancelled: bool,
    frames: Option<mpsc::Sender<Queued>>,
    /// Time since which no conversation serves the dump.
    alone_since: Option<Instant>,
}

/// A dump that is being received.
pub(crate) struct Session {
    peer: String,
    state: Mutex<State>,
    changed: Condvar,
    /// Notified when there is something to send to the peer.
    say: Notify,
    /// Number of conversations that the dump has had; the newest counts.
    conversations: watch::Sender<u64>,
    /// Locked by the conversation that serves the dump.
    seat: tokio::sync::Mutex<()>,
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: PeerError) {
        let mut state = self.lock();
        state.failed.get_or_insert(error);
        state.frames = None;
        drop(state);
        self.changed.notify_all();
        self.say.notify_one();
    }

    /// Ends the handler's waiting. The handler then reports the reason to the peer.
    fn cancel(&self) {
        let mut state = self.lock();
        state.cancelled = true;
        if let Some(frames) = &state.frames {
            // A full queue means that the handler does not wait.
            let _ = frames.try_send(None);
        }
        drop(state);
        self.changed.notify_all();
    }

    fn reply(&self, body: reply::Body) {
        self.lock().replies.push(body);
        self.say.notify_one();
    }

    fn is_given_up(&self) -> bool {
        let state = self.lock();
        state.cancelled || state.failed.is_some()
    }

    /// Records that the handler has returned.
    pub(crate) fn finish(&self, result: Result<(), control::Error>) {
        let mut state = self.lock();
        if let Err(error) = result {
            state.replies.push(reply::Body::Error(error));
        }
        state.done = true;
        state.frames = None;
        drop(state);
        self.say.notify_one();
    }
}

/// The dumps that are being received, from all peers.
#[derive(Clone, Default)]
pub(crate) struct Sessions(Arc<Mutex<HashMap<Key, Arc<Session>>>>);

/// Key of a session: peer and id. A session belongs to its peer: another peer that knows the id cannot use it.
type Key = (String, [u8; 16]);

/// The handler's end of a session.
pub(crate) struct Intake {
    session: Arc<Session>,
    frames: mpsc::Receiver<Queued>,
    runtime: Handle,
    /// Limits of the sender's silence, see [`PeerOptions`].
    idle: Duration,
    wait: Duration,
    /// True if CRIU has not begun, or its dump is closed and not sealed yet.
    is_waiting: bool,
}

/// Replies of the handler.
pub(crate) struct Answers(Arc<Session>);

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Session>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a session that the same peer has begun.
    pub(crate) fn find(&self, peer: &str, id: [u8; 16]) -> Option<Arc<Session>> {
        self.lock().get(&(peer.to_owned(), id)).cloned()
    }

    /// Begins a session; `None` if one of this id exists, or there are too many. Must be called within a tokio
    /// runtime.
    pub(crate) fn begin(
        &self,
        peer: &str,
        id: [u8; 16],
        options: &PeerOptions,
    ) -> Option<(Arc<Session>, Intake, Answers)> {
        let (send, frames) = mpsc::channel(QUEUED_FRAMES);
        let session = Arc::new(Session {
            peer: peer.to_owned(),
            state: Mutex::new(State {
                receiver: Receiver::new(),
                acknowledge: None,
                has_parent: None,
                replies: Vec::new(),
                commit: None,
                done: false,
                failed: None,
                cancelled: false,
                frames: Some(send),
                alone_since: None,
            }),
            changed: Condvar::new(),
            say: Notify::new(),
            conversations: watch::Sender::new(0),
            seat: tokio::sync::Mutex::new(()),
        });
        let mut sessions = self.lock();
        let own = sessions.keys().filter(|(owner, _)| owner == peer).count();
        if sessions.len() >= MAX_SESSIONS || own >= MAX_OF_PEER {
            return None;
        }
        let place = sessions.entry((peer.to_owned(), id));
        let std::collections::hash_map::Entry::Vacant(place) = place else {
            return None;
        };
        place.insert(Arc::clone(&session));
        drop(sessions);
        let intake = Intake {
            session: Arc::clone(&session),
            frames,
            runtime: Handle::current(),
            idle: options.dump_idle,
            wait: options.dump_wait,
            is_waiting: true,
        };
        Some((Arc::clone(&session), intake, Answers(session)))
    }

    fn forget(&self, id: [u8; 16], session: &Arc<Session>) {
        let mut sessions = self.lock();
        let key = (session.peer.clone(), id);
        if sessions
            .get(&key)
            .is_some_and(|held| Arc::ptr_eq(held, session))
        {
            sessions.remove(&key);
        }
    }

    /// Serves a session on one conversation, until it is over or the conversation is lost; then keeps it for the
    /// grace period.
    pub(crate) async fn serve(
        &self,
        id: [u8; 16],
        session: Arc<Session>,
        router: &Router,
        mut send: SendStream,
        mut receive: RecvStream,
        options: &PeerOptions,
    ) {
        let mut number = 0;
        session.conversations.send_modify(|count| {
            *count += 1;
            number = *count;
        });
        let mut newest = session.conversations.subscribe();
        let seat = session.seat.lock().await;
        let conversation = Conversation {
            session: &session,
            options,
        };
        session.lock().alone_since = None;
        let ended = tokio::select! {
            ended = conversation.run(id, router, &mut send, &mut receive) => ended,
            _ = newest.wait_for(|newest| *newest > number) => Ok(false),
        };
        let over = match ended {
            Ok(over) => over,
            Err(error) => {
                tracing::debug!(peer = session.peer, %error, "dump's conversation ended");
                match error {
                    PeerError::Lost { .. } | PeerError::Deadline { .. } => {}
                    PeerError::Ended { code: with, .. } if with != u64::from(code::ABORTED) => {}
                    error => session.fail(error),
                }
                false
            }
        };
        let unserved = {
            let mut state = session.lock();
            state.receiver.connection_lost();
            state.acknowledge = None;
            state.alone_since = Some(Instant::now());
            // Failed, or refused before it was opened: there is nothing to come back to.
            (state.failed.is_some() && !state.done) || (over && state.has_parent.is_none())
        };
        if over {
            let _ = send.finish();
        } else {
            let misbehaved = VarInt::from_u32(code::MISBEHAVED);
            let _ = send.reset(misbehaved);
            let _ = receive.stop(misbehaved);
        }
        drop(seat);
        if unserved {
            return self.forget(id, &session);
        }
        // This includes a session that is over: its last reply may have been lost with the connection.
        let sessions = self.clone();
        let grace = options.grace;
        tokio::spawn(async move {
            let mut newest = session.conversations.subscribe();
            let resumed = newest.wait_for(|newest| *newest > number);
            if tokio::time::timeout(grace, resumed).await.is_err() {
                sessions.forget(id, &session);
                session.fail(PeerError::deadline(
                    &session.peer,
                    "a lost connection's grace",
                ));
            }
        });
    }

    /// Gives up all sessions, because the daemon stops.
    pub(crate) fn fail_all(&self) {
        for (_, session) in self.lock().drain() {
            session.fail(PeerError::aborted(&session.peer));
        }
    }
}

/// A conversation of a session.
struct Conversation<'a> {
    session: &'a Session,
    options: &'a PeerOptions,
}

impl Conversation<'_> {
    /// Serves the conversation. Returns true if everything was sent and answered, false if another conversation
    /// serves the session now.
    async fn run(
        &self,
        id: [u8; 16],
        router: &Router,
        send: &mut SendStream,
        receive: &mut RecvStream,
    ) -> Result<bool, PeerError> {
        let node = self.session.peer.as_str();
        let Some(opened) = self.opened().await else {
            // The handler refused the dump, with an error of its own.
            return self.say(send).await;
        };
        let answer = Reply {
            body: Some(reply::Body::DumpOpened(opened)),
        };
        stream::write(send, node, "reply", &answer).await?;
        let stream = router.claim(id);
        let frames = async {
            let stream = within(node, "a bulk stream", self.options.request_timeout, async {
                stream
                    .await
                    .map_err(|_| PeerError::ended(node, "a bulk stream", 0))
            });
            self.take_in(Bulk::new(stream.await?)).await
        };
        let mut frames = std::pin::pin!(frames);
        let mut commits = std::pin::pin!(self.take_commit(receive));
        let mut said = std::pin::pin!(self.say(send));
        let (mut all_in, mut committing) = (false, false);
        loop {
            tokio::select! {
                said = &mut said => return said,
                taken = &mut frames, if !all_in => { taken?; all_in = true; }
                taken = &mut commits, if !committing => { taken?; committing = true; }
            }
        }
    }

    /// Waits for the handler's decision on the dump; `None` if the handler refused it.
    async fn opened(&self) -> Option<DumpOpened> {
        loop {
            {
                let state = self.session.lock();
                if let Some(has_parent) = state.has_parent {
                    return Some(DumpOpened {
                        next_sequence: state.receiver.next_sequence(),
                        has_parent,
                    });
                }
                if state.done || state.failed.is_some() {
                    return None;
                }
            }
            self.session.say.notified().await;
        }
    }

    /// Receives frames until the last of them, as fast as the handler takes them.
    async fn take_in(&self, mut bulk: Bulk) -> Result<(), PeerError> {
        let session = self.session;
        let node = session.peer.as_str();
        let timeout = self.options.frame_timeout;
        let Some(frames) = session.lock().frames.clone() else {
            return Ok(());
        };
        while !session.lock().receiver.is_over() {
            let Some(bytes) = bulk.array(node, timeout).await? else {
                return Err(PeerError::ended(node, "frames", 0));
            };
            let received = session.lock().receiver.header(&bytes);
            let (header, new) = match received {
                Ok(Received::New(header)) => (header, true),
                Ok(Received::Duplicate(header)) => (header, false),
                Err(error) => {
                    tracing::warn!(peer = node, %error, "dump refused");
                    return Err(PeerError::protocol(node, "a frame that may not come"));
                }
            };
            let length = usize::try_from(header.payload_bytes).unwrap_or(usize::MAX);
            let payload = bulk.payload(node, length, timeout).await?;
            if !new {
                continue;
            }
            // Here a slow handler slows its sender down: nothing is read, the windows fill.
            let Ok(place) = frames.reserve().await else {
                return Ok(());
            };
            let mut state = session.lock();
            let named = header.kind != Kind::Image || state.receiver.image_name(&payload).is_ok();
            if !named || state.receiver.taken().is_err() {
                return Err(PeerError::protocol(node, "an image that may not come"));
            }
            place.send(Some((header, payload)));
            if let Some(next) = state.receiver.poll_acknowledge() {
                state.acknowledge = Some(next);
                session.say.notify_one();
            }
        }
        Ok(())
    }

    async fn take_commit(&self, receive: &mut RecvStream) -> Result<(), PeerError> {
        let node = self.session.peer.as_str();
        let max_bytes = stream::MAX_REQUEST_BYTES;
        let commit: Commit = stream::read(receive, node, "commit", max_bytes).await?;
        self.session.lock().commit.get_or_insert(commit);
        self.session.changed.notify_all();
        // After it, only the end of the stream or an abort can come.
        match receive.read(&mut [0]).await {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(PeerError::protocol(node, "a second commit")),
            Err(error) => Err(PeerError::read(node, "commit", error)),
        }
    }

    /// Sends acknowledgements and replies, until the handler is done.
    async fn say(&self, send: &mut SendStream) -> Result<bool, PeerError> {
        let node = self.session.peer.as_str();
        let mut said = 0;
        loop {
            let (bodies, done) = {
                let mut state = self.session.lock();
                let acknowledge = state.acknowledge.take();
                let mut bodies: Vec<_> = acknowledge
                    .map(|next_sequence| reply::Body::Acknowledged(Acknowledged { next_sequence }))
                    .into_iter()
                    .collect();
                bodies.extend(state.replies[said..].iter().cloned());
                said = state.replies.len();
                (bodies, state.done || state.failed.is_some())
            };
            for body in &bodies {
                let answer = Reply {
                    body: Some(body.clone()),
                };
                stream::write(send, node, "reply", &answer).await?;
            }
            if done && bodies.is_empty() {
                return Ok(true);
            }
            if bodies.is_empty() {
                self.session.say.notified().await;
            }
        }
    }
}

impl FrameSource for Intake {
    fn next(&mut self) -> Result<ReceivedFrame, PeerError> {
        loop {
            // The queued frames are of no use any more.
            if self.session.is_given_up() {
                return Err(self.ended());
            }
            match self.receive()? {
                Some(Some((header, payload))) => {
                    let decoded = decode(&self.session.peer, &header, payload);
                    let payload = decoded.inspect_err(|error| self.session.fail(error.clone()))?;
                    self.is_waiting = header.kind == Kind::Close;
                    return Ok(ReceivedFrame { header, payload });
                }
                Some(None) => {}
                None => return Err(self.ended()),
            }
        }
    }

    fn commit(&mut self) -> Result<Commit, PeerError> {
        let until = Instant::now() + self.idle;
        let mut state = self.session.lock();
        loop {
            if let Some(commit) = &state.commit {
                return Ok(commit.clone());
            }
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.cancelled {
                return Err(PeerError::aborted(&self.session.peer));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.cancelled = true;
                return Err(PeerError::deadline(&self.session.peer, "a commit"));
            }
            (state, _) = self
                .session
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn canceller(&self) -> Box<dyn FnOnce() + Send> {
        let session = Arc::clone(&self.session);
        Box::new(move || session.cancel())
    }
}

impl Intake {
    /// Waits for the next item of the connection, as long as a sender may be silent: the handler has nothing
    /// else to do, so only the sender delays it. A resumed conversation alone, without new items, does not
    /// restart the time.
    fn receive(&mut self) -> Result<Option<Queued>, PeerError> {
        match self.frames.try_recv() {
            Ok(queued) => return Ok(Some(queued)),
            Err(TryRecvError::Disconnected) => return Ok(None),
            Err(TryRecvError::Empty) => {}
        }
        let limit = if self.is_waiting {
            self.wait.max(self.idle)
        } else {
            self.idle
        };
        let received = async { tokio::time::timeout(limit, self.frames.recv()).await };
        self.runtime.block_on(received).map_err(|_| {
            tracing::warn!(
                peer = self.session.peer,
                ?limit,
                "dump given up: its sender is silent"
            );
            self.session.cancel();
            PeerError::deadline(&self.session.peer, "its dump, of which nothing more came,")
        })
    }

    fn ended(&self) -> PeerError {
        let failed = self.session.lock().failed.clone();
        failed.unwrap_or_else(|| PeerError::aborted(&self.session.peer))
    }
}

impl Replies for Answers {
    fn opened(&mut self, has_parent: bool) {
        self.0.lock().has_parent = Some(has_parent);
        self.0.say.notify_one();
    }

    fn closed(&mut self, closed: Closed) {
        self.0.reply(reply::Body::Closed(closed));
    }

    fn prepared(&mut self, prepared: Prepared) {
        self.0.reply(reply::Body::Prepared(prepared));
    }

    fn committed(&mut self, committed: Committed) {
        self.0.reply(reply::Body::Committed(committed));
    }
}
