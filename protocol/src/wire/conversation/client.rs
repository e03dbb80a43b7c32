//! The sender's end of a dump's conversations: which reply may come.

use super::{ConversationError, DIGEST_BYTES, bytes, refused, unexpected};
use crate::wire::message::{Closed, Commit, Committed, DumpOpened, Prepared, Reply, reply};

/// Meaning of a reply.
#[derive(Clone, Debug, PartialEq)]
pub enum DumpEvent {
    /// The dump is open, or continues: for [`crate::wire::sender::Sender::resumed`].
    Opened(DumpOpened),
    /// Every frame below this is in: for [`crate::wire::sender::Sender::acknowledged`].
    Acknowledged(u64),
    /// All address spaces are durable at the peer. Repeated after a resume.
    Closed(Closed),
    /// All images are durable at the peer, too. Repeated after a resume.
    Prepared(Prepared),
    /// Sealed. The conversation is over.
    Committed(Box<Committed>),
}

/// Checks the replies to one dump, over all conversations that it takes.
#[derive(Debug, Default)]
pub struct DumpClient {
    /// True if `DumpOpened` has come in this conversation.
    open: bool,
    /// True if `DumpOpened` has come in any conversation.
    begun: bool,
    acknowledged: u64,
    /// Sequences of the frames `Close` and `Prepare`, once they were sent.
    close: Option<u64>,
    prepare: Option<u64>,
    closed: Option<Vec<u8>>,
    prepared: Option<Vec<u8>>,
    /// Commit that was sent: names the content that is to be sealed.
    commit: Option<Commit>,
    committed: bool,
}

impl DumpClient {
    /// Makes the client of a new dump: [`crate::wire::message::request::Dump`] was sent, without `resume`.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records that the connection was lost. The next conversation requests the dump with `resume` if
    /// [`Self::has_begun`], and otherwise without: no frame was sent yet.
    pub fn connection_lost(&mut self) {
        self.open = false;
    }

    /// Returns true if the peer has sent `DumpOpened` at least once.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Returns true if the peer has sent `Closed` at least once.
    #[must_use]
    pub fn has_closed(&self) -> bool {
        self.closed.is_some()
    }

    /// Records that the frame `Close` was pushed, with this sequence.
    pub fn close_pushed(&mut self, sequence: u64) {
        self.close = Some(sequence);
    }

    /// Records that the frame `Prepare` was pushed, with this sequence.
    pub fn prepare_pushed(&mut self, sequence: u64) {
        self.prepare = Some(sequence);
    }

    /// Records that `Commit` is sent; after a resume, that it is repeated.
    ///
    /// # Errors
    /// The peer has not sent `Prepared`, or has prepared other content.
    pub fn commit(&mut self, commit: &Commit) -> Result<(), ConversationError> {
        let prepared = self
            .prepared
            .as_ref()
            .ok_or(ConversationError::CommitTooEarly)?;
        if *prepared != commit.content_digest {
            return Err(ConversationError::DigestChanged { of: "Commit" });
        }
        if self.commit.as_ref().is_some_and(|said| said != commit) {
            return Err(ConversationError::CommitChanged);
        }
        self.commit = Some(commit.clone());
        Ok(())
    }

    /// Takes a reply.
    ///
    /// # Errors The peer refuses ([`ConversationError::Refused`]), or sends a message that may not come here. The
    /// dump has failed at this peer.
    pub fn reply(&mut self, reply: Reply) -> Result<DumpEvent, ConversationError> {
        match reply.body {
            Some(reply::Body::Error(error)) => Err(refused(&error)),
            Some(reply::Body::DumpOpened(opened)) if !self.open => self.opened(opened),
            Some(reply::Body::Acknowledged(acknowledged)) if self.open => {
                self.advance(acknowledged.next_sequence)?;
                Ok(DumpEvent::Acknowledged(acknowledged.next_sequence))
            }
            Some(reply::Body::Closed(closed)) if self.open && self.close.is_some() => {
                same(&mut self.closed, &closed.content_digest, "Closed")?;
                Ok(DumpEvent::Closed(closed))
            }
            Some(reply::Body::Prepared(prepared))
                if self.open && self.prepare.is_some() && self.closed.is_some() =>
            {
                same(&mut self.prepared, &prepared.content_digest, "Prepared")?;
                Ok(DumpEvent::Prepared(prepared))
            }
            Some(reply::Body::Committed(committed))
                if self.open && self.commit.is_some() && !self.committed =>
            {
                self.committed = true;
                Ok(DumpEvent::Committed(Box::new(committed)))
            }
            other => Err(unexpected(other.as_ref(), self.during())),
        }
    }

    fn opened(&mut self, opened: DumpOpened) -> Result<DumpEvent, ConversationError> {
        let next_sequence = opened.next_sequence;
        if !self.begun && next_sequence != 0 {
            return Err(ConversationError::NotNew { next_sequence });
        }
        self.advance(next_sequence)?;
        self.begun = true;
        self.open = true;
        Ok(DumpEvent::Opened(opened))
    }

    fn advance(&mut self, next_sequence: u64) -> Result<(), ConversationError> {
        if next_sequence < self.acknowledged {
            return Err(ConversationError::Backwards {
                next_sequence,
                acknowledged: self.acknowledged,
            });
        }
        self.acknowledged = next_sequence;
        Ok(())
    }

    /// Returns the phase of the conversation, for error messages.
    fn during(&self) -> &'static str {
        match (self.open, self.committed) {
            (false, _) => "the opening of a dump",
            (true, true) => "the end of a dump",
            (true, false) if self.commit.is_some() => "a commit",
            (true, false) if self.prepare.is_some() => "a prepare",
            (true, false) if self.close.is_some() => "a close",
            (true, false) => "a dump's pages",
        }
    }
}

/// Keeps a digest, and compares a repeated one with it.
fn same(
    known: &mut Option<Vec<u8>>,
    digest: &[u8],
    of: &'static str,
) -> Result<(), ConversationError> {
    bytes::<DIGEST_BYTES>("content_digest", digest)?;
    if known.as_ref().is_some_and(|known| known != digest) {
        return Err(ConversationError::DigestChanged { of });
    }
    *known = Some(digest.to_vec());
    Ok(())
}
