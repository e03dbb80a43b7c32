//! Sender's end of a dump, over all conversations that it takes: the frames to send, the replies that may come, and
//! whether another conversation continues a dump whose conversation has ended.

use std::time::{Duration, Instant};

use super::{
    ConversationError, ConversationOutcome, SESSION_BYTES, check_digest, check_dump, refused,
    unexpected,
};
use crate::control::ErrorCode;
use crate::wire::code;
use crate::wire::frame::{Coding, Header, Kind};
use crate::wire::message::{Closed, Commit, Committed, Prepared, Reply, reply, request};
use crate::wire::sender::{PushError, Sender};

/// Pause between two conversations, so that a peer that ends each of them at once is not flooded.
pub const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Meaning of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DumpEvent {
    /// The dump is open, or continues: frames may be sent.
    Opened,
    /// The receiver has taken frames in.
    Acknowledged {
        /// Bytes of the window that became free.
        freed_bytes: u64,
    },
    /// All address spaces are durable at the peer. Repeated after a resume.
    Closed,
    /// All images are durable at the peer, too. Repeated after a resume.
    Prepared,
    /// Sealed. The conversation is over.
    Committed,
}

/// Continuation of a dump whose conversation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// Another conversation is to begin at this time.
    Converse(Instant),
    /// The dump is sealed, or was given up on this side.
    Over,
    /// The dump has failed at this peer.
    Failed,
}

/// Sender's state of one dump, over all conversations that it takes. `P` is a payload, as for [`Sender`].
#[derive(Debug)]
pub struct DumpClient<P> {
    request: request::Dump,
    session: [u8; SESSION_BYTES],
    window: Sender<P>,
    /// Time in which a lost conversation must be continued by another one.
    reconnect: Duration,
    /// Time by which the next conversation must be open.
    deadline: Instant,
    conversations: u32,
    /// True if `DumpOpened` has come in this conversation.
    open: bool,
    has_parent: Option<bool>,
    close_pushed: bool,
    prepare_pushed: bool,
    closed: Option<Closed>,
    prepared: Option<Prepared>,
    /// Commit that is to be sent: names the content that is to be sealed.
    commit: Option<Commit>,
    /// True if the commit was sent in this conversation.
    commit_sent: bool,
    committed: Option<Committed>,
    over: bool,
}

impl<P: AsRef<[u8]> + Clone> DumpClient<P> {
    /// Makes the sender of a new dump. Its first conversation must be open by `deadline`; once one was open, a lost one
    /// must be continued within `reconnect`.
    ///
    /// # Errors
    /// A field of the request has an impossible value.
    pub fn new(
        request: request::Dump,
        window_bytes: u64,
        deadline: Instant,
        reconnect: Duration,
    ) -> Result<Self, ConversationError> {
        Ok(Self {
            session: check_dump(&request)?,
            request,
            window: Sender::new(window_bytes),
            reconnect,
            deadline,
            conversations: 0,
            open: false,
            has_parent: None,
            close_pushed: false,
            prepare_pushed: false,
            closed: None,
            prepared: None,
            commit: None,
            commit_sent: false,
            committed: None,
            over: false,
        })
    }

    /// Returns the session, which is the preamble of the bulk streams.
    #[must_use]
    pub fn session(&self) -> [u8; SESSION_BYTES] {
        self.session
    }

    /// Returns the request that begins the next conversation, and the time by which its reply must have come.
    #[must_use]
    pub fn request(&self) -> (request::Dump, Instant) {
        let mut request = self.request.clone();
        // Before the first reply no frame was sent: there is nothing to resume.
        request.resume |= self.has_parent.is_some();
        (request, self.deadline)
    }

    /// Takes a reply.
    ///
    /// # Errors
    /// The peer refuses ([`ConversationError::Refused`]), or sends a message that may not come here.
    pub fn reply(&mut self, reply: Reply) -> Result<DumpEvent, ConversationError> {
        match reply.body {
            Some(reply::Body::Error(error)) => Err(refused(&error)),
            Some(reply::Body::DumpOpened(opened)) if !self.open => {
                self.window.resumed(opened.next_sequence)?;
                self.has_parent.get_or_insert(opened.has_parent);
                self.open = true;
                self.conversations += 1;
                Ok(DumpEvent::Opened)
            }
            Some(reply::Body::Acknowledged(acknowledged)) if self.open => {
                let freed_bytes = self.window.acknowledged(acknowledged.next_sequence)?;
                Ok(DumpEvent::Acknowledged { freed_bytes })
            }
            Some(reply::Body::Closed(closed)) if self.open && self.close_pushed => {
                let known = self.closed.get_or_insert_with(|| closed.clone());
                check_digest(&closed.content_digest, &known.content_digest, "Closed")?;
                Ok(DumpEvent::Closed)
            }
            Some(reply::Body::Prepared(prepared))
                if self.open && self.prepare_pushed && self.closed.is_some() =>
            {
                let known = self.prepared.get_or_insert_with(|| prepared.clone());
                check_digest(&prepared.content_digest, &known.content_digest, "Prepared")?;
                Ok(DumpEvent::Prepared)
            }
            Some(reply::Body::Committed(committed)) if self.commit_sent && !self.over => {
                self.committed = Some(committed);
                self.over = true;
                Ok(DumpEvent::Committed)
            }
            other => Err(unexpected(other.as_ref(), self.during())),
        }
    }

    /// Returns true if a frame with a payload of `payload_bytes` may be pushed now. After a refusal the pusher waits
    /// for [`Self::poll_room`].
    pub fn may_push(&mut self, payload_bytes: usize) -> bool {
        !self.over && self.window.may_push(payload_bytes)
    }

    /// Returns true once the frame that [`Self::may_push`] refused may be pushed. To be asked after every other call.
    pub fn poll_room(&mut self) -> bool {
        self.window.poll_room()
    }

    /// Takes a frame, connected or not. Returns its sequence.
    ///
    /// # Errors
    /// There is no room for the frame now, or the frame is not valid. Nothing was changed.
    pub fn push(
        &mut self,
        kind: Kind,
        coding: Coding,
        flags: u16,
        pages: u32,
        index: u64,
        payload: P,
    ) -> Result<u64, PushError> {
        let sequence = self
            .window
            .push(kind, coding, flags, pages, index, payload)?;
        self.close_pushed |= kind == Kind::Close;
        self.prepare_pushed |= kind == Kind::Prepare;
        Ok(sequence)
    }

    /// Returns the next frame to send in this conversation, if there is one.
    pub fn poll_transmit(&mut self) -> Option<(Header, P)> {
        self.window.poll_transmit()
    }

    /// Makes the peer seal the dump: the commit is sent now, and again in each further conversation.
    ///
    /// # Errors
    /// The peer has not sent `Prepared`, or has prepared other content; or another commit was made.
    pub fn commit(&mut self, commit: &Commit) -> Result<(), ConversationError> {
        let prepared = self
            .prepared
            .as_ref()
            .ok_or(ConversationError::CommitTooEarly)?;
        check_digest(&commit.content_digest, &prepared.content_digest, "Commit")?;
        if self.commit.get_or_insert_with(|| commit.clone()) != commit {
            return Err(ConversationError::CommitChanged);
        }
        Ok(())
    }

    /// Returns the commit, if it is to be sent in this conversation now.
    pub fn poll_commit(&mut self) -> Option<Commit> {
        if !self.open || self.commit_sent {
            return None;
        }
        self.commit_sent = self.commit.is_some();
        self.commit.clone()
    }

    /// Records that the conversation has ended, or could not be begun. Frames may still be pushed while the window
    /// has room.
    pub fn ended(&mut self, now: Instant, end: ConversationOutcome) -> Continuation {
        if self.over {
            return Continuation::Over;
        }
        // The time for a new conversation counts from the end of one that was open.
        if self.open {
            self.deadline = now + self.reconnect;
        }
        self.open = false;
        self.commit_sent = false;
        self.window.connection_lost();
        let may_be_there_again = match end {
            ConversationOutcome::Lost => true,
            // A peer that stops or is busy now, or has lost the bulk stream.
            ConversationOutcome::Stopped(with) => {
                [code::BUSY, code::BULK_LOST].map(u64::from).contains(&with)
            }
            ConversationOutcome::Refused(with) => with == ErrorCode::Unavailable,
            ConversationOutcome::Settled | ConversationOutcome::Violated => false,
        };
        let at = now + RETRY_PAUSE;
        if may_be_there_again && at < self.deadline {
            return Continuation::Converse(at);
        }
        self.over = true;
        Continuation::Failed
    }

    /// Gives the dump up.
    pub fn abandon(&mut self) {
        self.over = true;
    }

    /// Returns true if the dump is sealed, has failed, or was given up: nothing more is sent.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Returns true if the peer has the requested parent; `None` before the first reply.
    #[must_use]
    pub fn has_parent(&self) -> Option<bool> {
        self.has_parent
    }

    /// Returns the reply to `Close`, once it has come.
    #[must_use]
    pub fn closed(&self) -> Option<&Closed> {
        self.closed.as_ref()
    }

    /// Returns the reply to `Prepare`, once it has come.
    #[must_use]
    pub fn prepared(&self) -> Option<&Prepared> {
        self.prepared.as_ref()
    }

    /// Returns the reply to the commit, once it has come.
    #[must_use]
    pub fn committed(&self) -> Option<&Committed> {
        self.committed.as_ref()
    }

    /// Returns the frames that the peer has not acknowledged.
    #[must_use]
    pub fn window(&self) -> &Sender<P> {
        &self.window
    }

    /// Returns the number of conversations that were open.
    #[must_use]
    pub fn conversations(&self) -> u32 {
        self.conversations
    }

    /// Returns the phase of the conversation, for error messages.
    fn during(&self) -> &'static str {
        match (self.open, self.over) {
            (false, _) => "the opening of a dump",
            (true, true) => "the end of a dump",
            (true, false) if self.commit.is_some() => "a commit",
            (true, false) if self.prepare_pushed => "a prepare",
            (true, false) if self.close_pushed => "a close",
            (true, false) => "a dump's pages",
        }
    }
}
