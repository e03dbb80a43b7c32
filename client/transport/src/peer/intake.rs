//! The receiving side of a dump: one session, over all of its conversations.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use permafrost_protocol::control;
use permafrost_protocol::wire::conversation::{
    ConversationError, ConversationOutcome, DumpServer, ReceiverLimits, SESSION_BYTES,
};
use permafrost_protocol::wire::frame::HEADER_BYTES;
use permafrost_protocol::wire::message::{Closed, Commit, Committed, Prepared, reply, request};
use quinn::{RecvStream, SendStream, VarInt};
use tokio::sync::{oneshot, watch};

use super::bulk::BulkReceiver;
use super::router::Router;
use super::stream::{self, within};
use super::{PeerError, PeerOptions, ReceivedFrame, code, decode};

/// Most dumps that are kept, including those that are over but whose last reply may have to be repeated.
const MAX_SESSIONS: usize = 1024;

/// Most dumps of one peer that are kept.
const MAX_OF_PEER: usize = MAX_SESSIONS / 4;

/// Bytes of frames from which on the handler is woken while more come.
const WAKE_BYTES: usize = 256 << 10;

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

struct State {
    server: DumpServer<Bytes>,
    /// Reason why the dump has failed.
    failed: Option<PeerError>,
}

/// A dump that is being received: the shell of a [`DumpServer`].
pub(crate) struct Session {
    peer: String,
    state: Mutex<State>,
    /// Notified when there is a frame or a commit for the handler, or it is to end.
    changed: Condvar,
    /// Notified when there is a reply, or room in the queue, or a conversation is to end.
    news: watch::Sender<()>,
    /// Takes the bulk stream over TLS that the latest conversation waits for.
    bulk: Mutex<Option<oneshot::Sender<BulkReceiver>>>,
}

/// The bulk stream of a conversation, which comes in one of two ways.
struct Arriving {
    quic: oneshot::Receiver<RecvStream>,
    tls: oneshot::Receiver<BulkReceiver>,
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Begins to wait for the bulk stream of a conversation. An earlier conversation waits no longer.
    fn expect_bulk(&self, id: [u8; SESSION_BYTES], router: &Router) -> Arriving {
        let (give, tls) = oneshot::channel();
        *self.bulk.lock() = Some(give);
        Arriving {
            quic: router.claim(id),
            tls,
        }
    }

    /// Hands over the bulk stream that has come over TLS. Returns false if no conversation waits for one.
    pub(crate) fn deliver(&self, bulk: BulkReceiver) -> bool {
        let waiting = self.bulk.lock().take();
        waiting.is_some_and(|waiting| waiting.send(bulk).is_ok())
    }

    /// Applies a call of the handler, and wakes the conversations.
    fn handle(&self, call: impl FnOnce(&mut DumpServer<Bytes>)) {
        call(&mut self.lock().server);
        self.news.send_replace(());
    }

    fn fail(&self, error: PeerError) {
        let mut state = self.lock();
        state.failed.get_or_insert(error);
        state.server.fail();
        drop(state);
        self.changed.notify_all();
        self.news.send_replace(());
    }

    /// Checks a request to continue this dump.
    pub(crate) fn check_resume(&self, dump: &request::Dump) -> Result<(), ConversationError> {
        self.lock().server.check_resume(dump)
    }

    /// Records that the handler has returned.
    pub(crate) fn finish(&self, result: Result<(), control::Error>) {
        self.handle(|server| server.finished(result));
    }
}

/// The dumps that are being received, from all peers.
#[derive(Clone, Default)]
pub(crate) struct Sessions(Arc<Mutex<HashMap<Key, Arc<Session>>>>);

/// Key of a session: peer and id. A session belongs to its peer: another peer that knows the id cannot use it.
type Key = (String, [u8; SESSION_BYTES]);

/// The handler's end of a session.
pub(crate) struct Intake(Arc<Session>);

/// Replies of the handler.
pub(crate) struct Answers(Arc<Session>);

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Session>>> {
        self.0.lock()
    }

    /// Returns a session that the same peer has begun.
    pub(crate) fn find(&self, peer: &str, id: [u8; SESSION_BYTES]) -> Option<Arc<Session>> {
        self.lock().get(&(peer.to_owned(), id)).cloned()
    }

    /// Begins a session; `None` if one of this id exists, or there are too many.
    pub(crate) fn begin(
        &self,
        peer: &str,
        id: [u8; SESSION_BYTES],
        dump: &request::Dump,
        options: &PeerOptions,
    ) -> Option<(Arc<Session>, Intake, Answers)> {
        let patience = ReceiverLimits {
            grace: options.grace,
            idle: options.dump_idle,
            wait: options.dump_wait,
        };
        let session = Arc::new(Session {
            peer: peer.to_owned(),
            state: Mutex::new(State {
                server: DumpServer::new(dump.clone(), patience).ok()?,
                failed: None,
            }),
            changed: Condvar::new(),
            news: watch::Sender::new(()),
            bulk: Mutex::default(),
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
        let (intake, answers) = (Arc::clone(&session), Arc::clone(&session));
        Some((session, Intake(intake), Answers(answers)))
    }

    fn forget(&self, id: [u8; SESSION_BYTES], session: &Arc<Session>) {
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
        id: [u8; SESSION_BYTES],
        session: Arc<Session>,
        router: &Router,
        mut send: SendStream,
        mut receive: RecvStream,
        options: &PeerOptions,
    ) {
        let number = session.lock().server.converse();
        // An earlier conversation ends.
        session.news.send_replace(());
        let conversation = Conversation {
            session: &session,
            number,
            options,
        };
        let ended = conversation.run(id, router, &mut send, &mut receive).await;
        let end = ended
            .as_ref()
            .map_or_else(PeerError::end, |()| ConversationOutcome::Settled);
        let forget_at = {
            let mut state = session.lock();
            let forget_at = state.server.ended(number, Instant::now(), end);
            if let Err(error) = &ended {
                tracing::debug!(peer = session.peer, %error, "dump's conversation ended");
                if state.server.has_failed() {
                    state.failed.get_or_insert_with(|| error.clone());
                }
            }
            forget_at
        };
        session.changed.notify_all();
        if ended.is_ok() {
            let _ = send.finish();
        } else {
            let why = match ended {
                Err(PeerError::BulkLost { .. }) => code::BULK_LOST,
                _ => code::MISBEHAVED,
            };
            let _ = send.reset(VarInt::from_u32(why));
            let _ = receive.stop(VarInt::from_u32(why));
        }
        let Some(forget_at) = forget_at else {
            return self.forget(id, &session);
        };
        let sessions = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(forget_at.into()).await;
            if session.lock().server.poll_forget(Instant::now()) {
                sessions.forget(id, &session);
                let late = PeerError::deadline(&session.peer, "a lost connection's grace");
                session.fail(late);
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

/// Wakes the handler for many small frames at once: to wake a thread for each takes longer than to store it.
struct HandlerWaker<'a> {
    session: &'a Session,
    /// Bytes of the frames that the handler was not woken for, headers included.
    unseen_bytes: usize,
}

impl<'a> HandlerWaker<'a> {
    fn new(session: &'a Session) -> Self {
        Self {
            session,
            unseen_bytes: 0,
        }
    }

    /// Counts a frame, with `payload_bytes`, that is in the queue now.
    fn came(&mut self, payload_bytes: usize) {
        self.unseen_bytes += HEADER_BYTES + payload_bytes;
        if self.unseen_bytes >= WAKE_BYTES {
            self.wake();
        }
    }

    /// Wakes the handler, if there is something for it.
    fn wake(&mut self) {
        if std::mem::take(&mut self.unseen_bytes) > 0 {
            self.session.changed.notify_all();
        }
    }

    /// Completes `next`. The handler is woken before it is waited for.
    async fn wake_before<T>(&mut self, next: impl Future<Output = T>) -> T {
        let mut next = std::pin::pin!(next);
        std::future::poll_fn(|context| {
            let polled = next.as_mut().poll(context);
            if polled.is_pending() {
                self.wake();
            }
            polled
        })
        .await
    }
}

impl Drop for HandlerWaker<'_> {
    fn drop(&mut self) {
        self.wake();
    }
}

/// A conversation of a session.
struct Conversation<'a> {
    session: &'a Session,
    number: u64,
    options: &'a PeerOptions,
}

impl Conversation<'_> {
    /// Serves the conversation until everything was sent and answered, or a newer one serves the session.
    async fn run(
        &self,
        id: [u8; SESSION_BYTES],
        router: &Router,
        send: &mut SendStream,
        receive: &mut RecvStream,
    ) -> Result<(), PeerError> {
        let mut news = self.session.news.subscribe();
        // Before the reply, upon which the sender opens it.
        let arriving = self.session.expect_bulk(id, router);
        // The handler has decided on the dump: frames may come.
        if !self.say(&mut news, send).await? {
            return Ok(());
        }
        let mut said = std::pin::pin!(async {
            while self.say(&mut news, send).await? {}
            Ok(())
        });
        let mut frames = std::pin::pin!(self.take_in(arriving));
        let mut commits = std::pin::pin!(self.take_commit(receive));
        let (mut all_in, mut committing) = (false, false);
        loop {
            tokio::select! {
                said = &mut said => return said,
                taken = &mut frames, if !all_in => match taken {
                    Ok(()) => all_in = true,
                    // A sender that gives up says so on this conversation, which may come later.
                    Err(lost @ PeerError::BulkLost { .. }) if !committing => {
                        let words = tokio::time::timeout(stream::LAST_WORDS, &mut commits).await;
                        return Err(words.ok().and_then(Result::err).unwrap_or(lost));
                    }
                    Err(error) => return Err(error),
                },
                taken = &mut commits, if !committing => { taken?; committing = true; }
            }
        }
    }

    /// Sends the next reply; returns false if no more follow.
    async fn say(
        &self,
        news: &mut watch::Receiver<()>,
        send: &mut SendStream,
    ) -> Result<bool, PeerError> {
        loop {
            let polled = self.session.lock().server.poll_reply(self.number);
            match polled {
                Poll::Ready(None) => return Ok(false),
                Poll::Ready(Some(reply)) => {
                    stream::write(send, &self.session.peer, "reply", &reply).await?;
                    return Ok(true);
                }
                Poll::Pending => drop(news.changed().await),
            }
        }
    }

    /// Receives frames until the last of them, as fast as the handler takes them.
    async fn take_in(&self, arriving: Arriving) -> Result<(), PeerError> {
        let session = self.session;
        let node = session.peer.as_str();
        let bulk = within(node, "a bulk stream", self.options.request_timeout, async {
            tokio::select! {
                Ok(stream) = arriving.quic => Ok(BulkReceiver::over_quic(stream)),
                Ok(bulk) = arriving.tls => Ok(bulk),
                else => Err(PeerError::ended(node, "a bulk stream", 0)),
            }
        });
        let mut bulk = bulk.await?;
        let mut news = session.news.subscribe();
        let timeout = self.options.frame_timeout;
        let refused = |error| {
            tracing::warn!(event = "peer-dump-refused", peer = node, %error, "dump refused");
            PeerError::conversation(node, error)
        };
        let mut waker = HandlerWaker::new(session);
        while session.lock().server.wants_frames() {
            let Some(bytes) = waker.wake_before(bulk.array(node, timeout)).await? else {
                return Err(PeerError::ended(node, "frames", 0));
            };
            let header = session.lock().server.header(self.number, &bytes);
            let header = header.map_err(refused)?;
            let length = usize::try_from(header.payload_bytes).unwrap_or(usize::MAX);
            let payload = waker
                .wake_before(bulk.payload(node, length, timeout))
                .await?;
            // Here a slow handler slows its sender down: nothing is read, the windows fill.
            while !session.lock().server.may_take() {
                waker.wake();
                drop(news.changed().await);
            }
            let acknowledges = session.lock().server.taken(self.number, payload);
            waker.came(length);
            if acknowledges.map_err(refused)? {
                session.news.send_replace(());
            }
        }
        Ok(())
    }

    async fn take_commit(&self, receive: &mut RecvStream) -> Result<(), PeerError> {
        let node = self.session.peer.as_str();
        let max_bytes = stream::MAX_REQUEST_BYTES;
        let commit: Commit = stream::read(receive, node, "commit", max_bytes).await?;
        let taken = self.session.lock().server.commit(self.number, commit);
        taken.map_err(|error| PeerError::conversation(node, error))?;
        self.session.changed.notify_all();
        self.session.news.send_replace(());
        // After it, only the end of the stream or an abort can come.
        match receive.read(&mut [0]).await {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(PeerError::protocol(node, "a second commit")),
            Err(error) => Err(PeerError::read(node, "commit", error)),
        }
    }
}

impl FrameSource for Intake {
    fn next(&mut self) -> Result<ReceivedFrame, PeerError> {
        let polled = self.wait("its next frame", DumpServer::poll_frame);
        let (header, payload) = polled?;
        let decoded = decode(&self.0.peer, &header, payload);
        let payload = decoded.inspect_err(|error| self.0.fail(error.clone()))?;
        Ok(ReceivedFrame { header, payload })
    }

    fn commit(&mut self) -> Result<Commit, PeerError> {
        self.wait("a commit", |server| server.poll_commit().cloned())
    }

    fn canceller(&self) -> Box<dyn FnOnce() + Send> {
        let session = Arc::clone(&self.0);
        Box::new(move || {
            session.lock().server.cancel();
            session.changed.notify_all();
        })
    }
}

impl Intake {
    /// Waits until `poll` returns a value, as long as a sender may be silent: the handler has nothing else to do, so
    /// only the sender delays it.
    fn wait<T>(
        &self,
        awaited: &'static str,
        poll: impl Fn(&mut DumpServer<Bytes>) -> Option<T>,
    ) -> Result<T, PeerError> {
        let session = &*self.0;
        let mut state = session.lock();
        let limit = state.server.silence_limit();
        let until = Instant::now() + limit;
        loop {
            if state.server.is_given_up() {
                let failed = state.failed.clone();
                return Err(failed.unwrap_or_else(|| PeerError::aborted(&session.peer)));
            }
            if let Some(value) = poll(&mut state.server) {
                if state.server.poll_room() {
                    session.news.send_replace(());
                }
                return Ok(value);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(
                    event = "peer-dump-given-up",
                    peer = session.peer,
                    ?limit,
                    "dump given up: its sender is silent"
                );
                state.server.cancel();
                return Err(PeerError::deadline(&session.peer, awaited));
            }
            session.changed.wait_for(&mut state, left);
        }
    }
}

impl Replies for Answers {
    fn opened(&mut self, has_parent: bool) {
        self.0.handle(|server| server.opened(has_parent));
    }

    fn closed(&mut self, closed: Closed) {
        self.0
            .handle(|server| server.answer(reply::Body::Closed(closed)));
    }

    fn prepared(&mut self, prepared: Prepared) {
        self.0
            .handle(|server| server.answer(reply::Body::Prepared(prepared)));
    }

    fn committed(&mut self, committed: Committed) {
        self.0
            .handle(|server| server.answer(reply::Body::Committed(committed)));
    }
}
