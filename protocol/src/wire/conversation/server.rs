//! Receiver's end of a dump, over all conversations that it takes: the sender's messages that may come, the queue to
//! the handler that stores the dump, the replies to send and to repeat, and how long the dump is kept.

use std::collections::VecDeque;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::{ConversationError, ConversationOutcome, bad, check_digest, check_dump, check_id};
use crate::control;
use crate::manifest::{self, check_job_name};
use crate::wire::code;
use crate::wire::frame::{HEADER_BYTES, Header, Kind};
use crate::wire::message::{Acknowledged, Commit, DumpOpened, Reply, reply, request};
use crate::wire::receiver::Receiver;

/// Length of the queue between the connection and the handler, frames; 4 MiB with the largest frames.
pub const QUEUED_FRAMES: usize = 16;

/// Time limits of a receiver.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverLimits {
    /// Time for which a dump is kept after its conversation has ended.
    pub grace: Duration,
    /// Silence of the sender in the middle of its dump, or before its commit.
    pub idle: Duration,
    /// Silence before the first frame, and after `Close`: CRIU has not begun, or its dump is not sealed yet.
    pub wait: Duration,
}

/// Receiver's state of one dump, over all conversations that it takes. `P` is a payload.
///
/// One handler stores the dump; its calls are [`Self::opened`], [`Self::poll_frame`], [`Self::answer`],
/// [`Self::poll_commit`], and [`Self::finished`] at last. The calls of a conversation have its number as an argument.
#[derive(Debug)]
pub struct DumpServer<P> {
    request: request::Dump,
    patience: ReceiverLimits,
    receiver: Receiver,
    queue: VecDeque<(Header, P)>,
    /// True if a frame waits for room in the queue.
    waits_for_room: bool,
    /// Kind of the frame that the handler took last.
    last: Option<Kind>,
    has_parent: Option<bool>,
    /// Replies of the handler, kept for a resume: `Closed`, `Prepared`, `Committed`, and an `Error` as the last.
    replies: Vec<reply::Body>,
    commit: Option<Commit>,
    /// True if the handler has returned: no more replies follow.
    finished: bool,
    /// True if the handler is to end.
    cancelled: bool,
    /// True if the sender is lost: no conversation can continue the dump.
    failed: bool,
    /// Number of the newest conversation, which alone counts.
    conversation: u64,
    /// State of that conversation: `DumpOpened` was sent, the number of replies sent, the commit has come.
    opened: bool,
    said: usize,
    commit_came: bool,
    /// Time at which the dump is forgotten, unless a conversation continues it.
    forget_at: Option<Instant>,
}

impl<P: AsRef<[u8]>> DumpServer<P> {
    /// Makes the state of a dump that is new on this node. The caller checks whether a `resume` finds its session;
    /// there is no state to make for it.
    ///
    /// # Errors
    /// A field of the request has an impossible value.
    pub fn new(
        request: request::Dump,
        patience: ReceiverLimits,
    ) -> Result<Self, ConversationError> {
        check_dump(&request)?;
        Ok(Self {
            request,
            patience,
            receiver: Receiver::new(),
            queue: VecDeque::new(),
            waits_for_room: false,
            last: None,
            has_parent: None,
            replies: Vec::new(),
            commit: None,
            finished: false,
            cancelled: false,
            failed: false,
            conversation: 0,
            opened: false,
            said: 0,
            commit_came: false,
            forget_at: None,
        })
    }

    /// Checks a request to continue this dump: a resume, or the same request again from a sender that has not received
    /// the reply to it, and so has sent no frame.
    ///
    /// # Errors
    /// The dump has begun: it is not begun again.
    pub fn check_resume(&self, dump: &request::Dump) -> Result<(), ConversationError> {
        if dump.resume || (self.receiver.next_sequence() == 0 && *dump == self.request) {
            return Ok(());
        }
        Err(ConversationError::BegunTwice)
    }

    /// Begins a conversation, and returns its number. An earlier one, which this side may not know to be lost, counts
    /// no more.
    pub fn converse(&mut self) -> u64 {
        self.receiver.connection_lost();
        self.conversation += 1;
        self.opened = false;
        self.said = 0;
        self.commit_came = false;
        self.forget_at = None;
        self.conversation
    }

    /// Returns the next reply to send: `DumpOpened`, then acknowledgements and the handler's replies, also those that
    /// the sender may have received in an earlier conversation. `Ready(None)`: the conversation is over.
    pub fn poll_reply(&mut self, conversation: u64) -> Poll<Option<Reply>> {
        if conversation != self.conversation || self.failed {
            return Poll::Ready(None);
        }
        match self.next_reply() {
            Some(body) => Poll::Ready(Some(Reply { body: Some(body) })),
            None if self.finished && self.said == self.replies.len() => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    fn next_reply(&mut self) -> Option<reply::Body> {
        if !self.opened
            && let Some(has_parent) = self.has_parent
        {
            self.opened = true;
            return Some(reply::Body::DumpOpened(DumpOpened {
                next_sequence: self.receiver.next_sequence(),
                has_parent,
            }));
        }
        if let Some(next_sequence) = self.receiver.poll_acknowledge() {
            return Some(reply::Body::Acknowledged(Acknowledged { next_sequence }));
        }
        let reply = self.replies.get(self.said)?;
        // A sender that may not have received the reply to its commit repeats the commit first.
        if matches!(reply, reply::Body::Committed(_)) && !self.commit_came {
            return None;
        }
        self.said += 1;
        Some(reply.clone())
    }

    /// Returns true if frames are still to come.
    #[must_use]
    pub fn wants_frames(&self) -> bool {
        !self.receiver.is_over() && !self.finished && !self.failed
    }

    /// Takes a header. Its payload follows in the stream; then [`Self::taken`].
    ///
    /// # Errors
    /// The header is damaged or may not come here.
    pub fn header(
        &mut self,
        conversation: u64,
        bytes: &[u8; HEADER_BYTES],
    ) -> Result<Header, ConversationError> {
        self.check_newest(conversation)?;
        Ok(self.receiver.header(bytes)?)
    }

    /// Returns true if the queue to the handler has room for the announced frame, or needs none because the handler
    /// has returned. After a refusal the connection waits for [`Self::poll_room`], and reads nothing meanwhile: so a
    /// slow handler slows its sender down.
    pub fn may_take(&mut self) -> bool {
        self.waits_for_room = self.wants_frames() && self.queue.len() >= QUEUED_FRAMES;
        !self.waits_for_room
    }

    /// Returns true once [`Self::may_take`] would return true again. To be asked after every call of the handler.
    pub fn poll_room(&mut self) -> bool {
        self.waits_for_room && self.may_take()
    }

    /// Takes the payload of the announced frame, which is now queued for the handler. Returns true if an
    /// acknowledgement is due.
    ///
    /// # Errors
    /// The payload is a name that may not come here, or no frame was announced.
    pub fn taken(&mut self, conversation: u64, payload: P) -> Result<bool, ConversationError> {
        self.check_newest(conversation)?;
        let header = self.receiver.taken(payload.as_ref())?;
        if !self.finished {
            self.queue.push_back((header, payload));
        }
        Ok(self.receiver.is_acknowledging())
    }

    /// Takes a `Commit`. One that was carried out before is answered as it was then, and nothing is sealed again.
    ///
    /// # Errors
    /// The commit comes too early, is for other content, has an impossible value, or differs from an earlier one.
    pub fn commit(&mut self, conversation: u64, commit: Commit) -> Result<(), ConversationError> {
        self.check_newest(conversation)?;
        let prepared = self.replies.iter().find_map(|reply| match reply {
            reply::Body::Prepared(prepared) => Some(prepared),
            _ => None,
        });
        let prepared = prepared.ok_or(ConversationError::CommitTooEarly)?;
        check_digest(&commit.content_digest, &prepared.content_digest, "Commit")?;
        // Without a digest this node is the origin of the dump, and names the checkpoint itself.
        if !prepared.content_digest.is_empty() {
            check_names(&commit)?;
        }
        if self.commit.get_or_insert_with(|| commit.clone()) != &commit {
            return Err(ConversationError::CommitChanged);
        }
        self.commit_came = true;
        Ok(())
    }

    /// Records that a conversation has ended. Returns the time at which the dump is forgotten unless another
    /// conversation has continued it ([`Self::poll_forget`]), or `None`: at once.
    pub fn ended(
        &mut self,
        conversation: u64,
        now: Instant,
        end: ConversationOutcome,
    ) -> Option<Instant> {
        let forget_at = now + self.patience.grace;
        if conversation != self.conversation {
            return Some(forget_at);
        }
        self.receiver.connection_lost();
        self.failed |= match end {
            ConversationOutcome::Settled | ConversationOutcome::Lost => false,
            ConversationOutcome::Stopped(with) => with == u64::from(code::ABORTED),
            ConversationOutcome::Refused(_) | ConversationOutcome::Violated => true,
        };
        // A dump that was refused before it was opened has nothing to come back to. One that is over is kept, because
        // its last reply may have been lost with the connection.
        if self.failed || (end == ConversationOutcome::Settled && self.has_parent.is_none()) {
            return None;
        }
        self.forget_at = Some(forget_at);
        self.forget_at
    }

    /// Returns true if no conversation has continued the dump in time; it has failed then.
    pub fn poll_forget(&mut self, now: Instant) -> bool {
        let is_late = self.forget_at.is_some_and(|at| now >= at);
        self.failed |= is_late;
        is_late
    }

    /// Gives the dump up: its sender is lost, or this node stops.
    pub fn fail(&mut self) {
        self.failed = true;
    }

    /// Makes the handler end; its error is then sent.
    pub fn cancel(&mut self) {
        self.cancelled = true;
    }

    /// Returns true if the handler is to end: the queued frames, and a commit, are of no use any more.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.cancelled || self.failed
    }

    /// Returns true if no conversation can continue the dump.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Accepts the dump; `has_parent`: this node has the requested parent.
    pub fn opened(&mut self, has_parent: bool) {
        self.has_parent = Some(has_parent);
    }

    /// Returns the next frame for the handler.
    pub fn poll_frame(&mut self) -> Option<(Header, P)> {
        let frame = self.queue.pop_front()?;
        self.last = Some(frame.0.kind);
        Some(frame)
    }

    /// Returns the commit for the handler, once it has come.
    #[must_use]
    pub fn poll_commit(&self) -> Option<&Commit> {
        self.commit.as_ref()
    }

    /// Returns the time for which a handler that has nothing else to do waits for the next frame or the commit. A
    /// resumed conversation alone does not restart it.
    #[must_use]
    pub fn silence_limit(&self) -> Duration {
        match self.last {
            None | Some(Kind::Close) => self.patience.wait.max(self.patience.idle),
            Some(_) => self.patience.idle,
        }
    }

    /// Takes a reply of the handler.
    pub fn answer(&mut self, body: reply::Body) {
        self.replies.push(body);
    }

    /// Records that the handler has returned; an error replaces any other reply, and is the last.
    pub fn finished(&mut self, result: Result<(), control::Error>) {
        self.replies.extend(result.err().map(reply::Body::Error));
        self.finished = true;
        self.queue.clear();
    }

    fn check_newest(&self, conversation: u64) -> Result<(), ConversationError> {
        match conversation == self.conversation {
            true => Ok(()),
            false => Err(ConversationError::Displaced),
        }
    }
}

/// Checks the names of the checkpoint that a commit seals.
fn check_names(commit: &Commit) -> Result<(), ConversationError> {
    check_id("checkpoint", &commit.checkpoint)?;
    check_id("session", &commit.session)?;
    let named = commit.generation > 0 && check_job_name(&commit.job).is_ok();
    let parked = commit.generation == 0 && commit.job.is_empty();
    match manifest::Kind::try_from(commit.kind) {
        Ok(manifest::Kind::Parked) if parked => Ok(()),
        Ok(manifest::Kind::Full | manifest::Kind::PreDump | manifest::Kind::PreCopy) if named => {
            Ok(())
        }
        Ok(_) => Err(bad("job", &commit.job)),
        Err(_) => Err(bad("kind", &commit.kind.to_string())),
    }
}
