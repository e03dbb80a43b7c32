//! Receiver's end of a dump's conversations: the order of the sender's messages, and the replies to repeat.

use super::{ConversationError, DIGEST_BYTES, SESSION_BYTES, bad, bytes, check_dump, check_id};
use crate::control;
use crate::manifest::{Kind, check_job_name};
use crate::wire::message::{
    Acknowledged, Closed, Commit, Committed, DumpOpened, Prepared, Reply, reply, request,
};

/// Receiver's state of one dump, over all conversations that it takes.
#[derive(Debug)]
pub struct DumpServer {
    session: [u8; SESSION_BYTES],
    closed: Option<Closed>,
    prepared: Option<Prepared>,
    commit: Option<Commit>,
    committed: Option<Committed>,
}

impl DumpServer {
    /// Makes the state of a dump that is new on this node. The caller checks whether a `resume` finds its session;
    /// there is no state to make for it.
    ///
    /// # Errors
    /// A field of the request has an impossible value.
    pub fn new(dump: &request::Dump) -> Result<Self, ConversationError> {
        Ok(Self {
            session: check_dump(dump)?,
            closed: None,
            prepared: None,
            commit: None,
            committed: None,
        })
    }

    /// Returns the id of the session.
    #[must_use]
    pub fn session(&self) -> [u8; SESSION_BYTES] {
        self.session
    }

    /// Returns the first replies of a new or resumed conversation: `DumpOpened`, and all that the sender may not have
    /// received.
    #[must_use]
    pub fn opened(&self, next_sequence: u64, has_parent: bool) -> Vec<Reply> {
        let opened = reply::Body::DumpOpened(DumpOpened {
            next_sequence,
            has_parent,
        });
        let closed = self.closed.clone().map(reply::Body::Closed);
        let prepared = self.prepared.clone().map(reply::Body::Prepared);
        [Some(opened), closed, prepared]
            .into_iter()
            .flatten()
            .map(|body| Reply { body: Some(body) })
            .collect()
    }

    /// Checks a request to continue this dump.
    ///
    /// # Errors
    /// The request is for another session, or not a resume at all: a session is begun once.
    pub fn resume(&self, dump: &request::Dump) -> Result<(), ConversationError> {
        if !dump.resume || check_dump(dump)? != self.session {
            return Err(ConversationError::OtherSession);
        }
        Ok(())
    }

    /// Returns the reply that acknowledges the frames below [`crate::wire::receiver::Receiver::poll_acknowledge`].
    #[must_use]
    pub fn acknowledged(next_sequence: u64) -> Reply {
        Reply {
            body: Some(reply::Body::Acknowledged(Acknowledged { next_sequence })),
        }
    }

    /// Returns the reply to send when all address spaces are durable, and keeps it for a resume.
    pub fn closed(&mut self, closed: Closed) -> Reply {
        self.closed = Some(closed.clone());
        Reply {
            body: Some(reply::Body::Closed(closed)),
        }
    }

    /// Returns the reply to send when the images are durable too, and keeps it for a resume.
    pub fn prepared(&mut self, prepared: Prepared) -> Reply {
        self.prepared = Some(prepared.clone());
        Reply {
            body: Some(reply::Body::Prepared(prepared)),
        }
    }

    /// Takes a `Commit`. `Some` if it was done before: then this is the answer, and nothing is to be sealed.
    ///
    /// # Errors
    /// The commit comes too early, is for other content, has an impossible value, or differs from an earlier one.
    pub fn commit(&mut self, commit: &Commit) -> Result<Option<Reply>, ConversationError> {
        let prepared = self
            .prepared
            .as_ref()
            .ok_or(ConversationError::CommitTooEarly)?;
        bytes::<DIGEST_BYTES>("content_digest", &commit.content_digest)?;
        if prepared.content_digest != commit.content_digest {
            return Err(ConversationError::DigestChanged { of: "Commit" });
        }
        check_id("checkpoint", &commit.checkpoint)?;
        check_id("session", &commit.session)?;
        let kind = Kind::try_from(commit.kind);
        let named = commit.generation > 0 && check_job_name(&commit.job).is_ok();
        let parked = commit.generation == 0 && commit.job.is_empty();
        match kind {
            Ok(Kind::Parked) if parked => {}
            Ok(Kind::Full | Kind::PreDump) if named => {}
            Ok(_) => return Err(bad("job", &commit.job)),
            Err(_) => return Err(bad("kind", &commit.kind.to_string())),
        }
        if self.commit.as_ref().is_some_and(|said| said != commit) {
            return Err(ConversationError::CommitChanged);
        }
        self.commit = Some(commit.clone());
        Ok(self.committed.clone().map(|committed| Reply {
            body: Some(reply::Body::Committed(committed)),
        }))
    }

    /// Returns the reply for a sealed checkpoint, and keeps it for a resume.
    pub fn committed(&mut self, committed: Committed) -> Reply {
        self.committed = Some(committed.clone());
        Reply {
            body: Some(reply::Body::Committed(committed)),
        }
    }

    /// Returns the reply for a dump that failed: it replaces any other reply, and is the last.
    #[must_use]
    pub fn failed(error: control::Error) -> Reply {
        Reply {
            body: Some(reply::Body::Error(error)),
        }
    }
}
