//! Intake of an agent's dump: passes its frames on as the pages of a session.

use std::sync::Arc;
use std::time::{Duration, Instant};

use permafrost_criu::frontend::{PageSink, SinkError};
use permafrost_identity::Peer;
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::access::Access;
use permafrost_protocol::control::{self, ErrorCode, ReportedError};
use permafrost_protocol::wire::frame::Kind;
use permafrost_protocol::wire::message::{Closed, Committed, Prepared, request};
use permafrost_store::{Adoption, MissingObject, Session, SessionSink, StoreError};
use permafrost_transport::peer::{FrameSource, ReceivedFrame, Replies};

use super::arriving::ArrivingImages;
use super::rights::{authorize, check_dump, check_read, job_of};
use super::spool::Spool;
use super::{Agents, name_of};
use crate::error::RequestError;

impl Agents {
    /// Receives a dump: the pages of a session that `peer` has opened, or the small images for a parked one.
    ///
    /// # Errors
    /// The error for the peer.
    pub fn dump(
        &self,
        peer: &Peer,
        request: request::Dump,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        authorize(peer, &Access::of_dump(&request)?)?;
        if let Some(adopt) = request.adopt {
            return self.adopt(peer, adopt, frames, replies);
        }
        let id = uuid::Uuid::from_slice(&request.session)
            .map(|id| id.simple().to_string())
            .map_err(|_| RequestError::SessionLength)?;
        let session = self.take(peer, &id)?;
        // Whatever ends this conversation early ends the session; one that is sealed or parked is gone already.
        let taken = self.session(peer, &session, frames, replies);
        self.store.local().drop_session(&id);
        taken
    }

    fn session(
        &self,
        peer: &Peer,
        session: &Arc<Session>,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        // Its certificate may have been replaced since it opened the session.
        match session.request.job.as_str() {
            "" => {}
            job => check_dump(peer, &job_of(job)?)?,
        }
        replies.opened(true);
        // It is open, and not receiving, until CRIU sends something.
        session.expect_from(frames.canceller());
        let mut frame = frames
            .next()
            .map_err(|error| ended(session, RequestError::SenderGone(error)))?;
        let started = session.start(self.store.local(), frames.canceller());
        let mut sink = started?;
        while frame.header.kind != Kind::Close {
            if let Err(error) = pass(&mut sink, &frame) {
                sink.abort(&error.message);
                return Err(told(&error));
            }
            frame = match frames.next() {
                Ok(frame) => frame,
                Err(error) => {
                    let reason = error.to_string();
                    let said = ended(session, RequestError::SenderGone(error));
                    sink.abort(&reason);
                    return Err(said);
                }
            };
        }
        if let Err(error) = sink.close() {
            sink.abort(&error.message);
            return Err(told(&error));
        }
        if !session.request.seal_follows {
            replies.closed(Closed::default());
            return Ok(());
        }
        replies.closed(Closed::default());
        let mut images = ArrivingImages::new(frames, replies, &session.id);
        let sealed = self.store.local().seal_with(&session.id, &mut images);
        let sealed = sealed.map_err(|error| match &error {
            // It was discarded just before.
            StoreError::NotFound { .. } => ended(session, error),
            error => error.to_reply(),
        })?;
        self.store.note_sealed(&sealed);
        replies.committed(committed(sealed));
        Ok(())
    }

    /// Gives a parked session its job and small images.
    fn adopt(
        &self,
        peer: &Peer,
        adopt: control::request::Adopt,
        frames: &mut dyn FrameSource,
        replies: &mut dyn Replies,
    ) -> Result<(), control::Error> {
        if !adopt.session.is_empty() {
            // Before its images are taken in.
            let adoptable = self.check_adoptable(peer, &adopt.session);
            adoptable?;
        }
        let asked = Instant::now();
        replies.opened(false);
        let first = frames.next().map_err(RequestError::SenderGone)?;
        if first.header.kind != Kind::Close {
            return Err(RequestError::PagesForParked.into());
        }
        replies.closed(Closed::default());
        let spool = self.images(peer, frames)?;
        replies.prepared(Prepared::default());
        frames.commit().map_err(RequestError::SenderGone)?;
        let adopted = self.adopt_spooled(peer, &adopt, &spool, asked);
        let adopted = adopted?;
        replies.committed(committed(adopted));
        Ok(())
    }

    fn adopt_spooled(
        &self,
        peer: &Peer,
        adopt: &control::request::Adopt,
        spool: &Spool,
        asked: Instant,
    ) -> Result<control::Checkpoint, StoreError> {
        let age = Duration::from_micros(adopt.images_age_us.unwrap_or(0));
        let taken_by = name_of(peer);
        let adoption = Adoption {
            taken_by: &taken_by,
            session: &adopt.session,
            origin: adopt.origin.clone(),
            // The times of the files here are those of the copy, so the agent sends the images' age.
            images_age: Some(age.saturating_add(asked.elapsed())),
            ignore_times: adopt.ignore_times,
            // With a name, `check_adoptable` has checked the rights. Without one, an agent finds only its own
            // sessions.
            may_find: &|session| self.owns(peer, session),
            ..Adoption::into_job(&adopt.job)
        };
        self.store.adopt(&adoption, spool.descriptor()?)
    }

    /// Checks that `peer` may adopt the parked session into a job: either it may read and dump into the job that the
    /// session was parked for, or the session has no job and the peer itself sent it.
    fn check_adoptable(&self, peer: &Peer, session: &str) -> Result<(), StoreError> {
        let not_found = || StoreError::NotFound(MissingObject::ParkedSession(session.to_owned()));
        let parked = self
            .store
            .list(None)?
            .into_iter()
            .find(|record| record.generation == 0 && record.session == session)
            .ok_or_else(not_found)?;
        match parked.job.as_str() {
            "" if self.owns(peer, session) => Ok(()),
            // The error does not reveal that the session exists.
            "" => Err(not_found()),
            job => job_of(job)
                .and_then(|job| check_read(peer, &job).and_then(|()| check_dump(peer, &job)))
                .map_err(StoreError::Elsewhere),
        }
    }

    /// Receives all small images, for a session that is chosen by their contents.
    fn images(&self, peer: &Peer, frames: &mut dyn FrameSource) -> Result<Spool, control::Error> {
        let spool = Spool::new(&self.spool, &self.spooled, &name_of(peer));
        let mut spool = spool?;
        loop {
            let frame = frames.next().map_err(RequestError::SenderGone)?;
            if frame.header.kind == Kind::Prepare {
                return Ok(spool);
            }
            spool.take(&frame)?;
        }
    }
}

/// Passes a frame to the session, as CRIU would have sent it.
fn pass(sink: &mut SessionSink, frame: &ReceivedFrame) -> Result<(), SinkError> {
    let header = &frame.header;
    let vaddr = header.index.saturating_mul(PAGE_BYTES);
    match header.kind {
        Kind::Space => {
            let space = header.space().map_err(|error| SinkError {
                message: error.to_string(),
                status: EINVAL,
            })?;
            sink.open(space).map(drop)
        }
        Kind::Pages => sink.pages(vaddr, header.flags, &frame.payload),
        Kind::Zero => sink.zeros(header.index, header.flags, header.pages.into()),
        Kind::Parent => sink.hole(vaddr, header.pages.into()),
        _ => Err(SinkError {
            message: "a frame that may not come here".to_owned(),
            status: EINVAL,
        }),
    }
}

const EINVAL: i32 = 22;

fn committed(checkpoint: control::Checkpoint) -> Committed {
    Committed {
        nodes: checkpoint.nodes.clone(),
        checkpoint: Some(checkpoint),
    }
}

/// Returns the reason why a dump ended early: its session was discarded, or else `error`.
fn ended(session: &Session, error: impl Into<control::Error>) -> control::Error {
    let reason = session.status().error;
    if reason.is_empty() {
        return error.into();
    }
    RequestError::SessionEnded { reason }.into()
}

/// Converts an error of the session's sink to an error of the control protocol.
fn told(error: &SinkError) -> control::Error {
    const ENOSPC: i32 = 28;
    let code = match error.status {
        EINVAL => ErrorCode::Invalid,
        ENOSPC => ErrorCode::NoSpace,
        _ => ErrorCode::SessionFailed,
    };
    RequestError::Sink {
        code,
        reason: error.message.clone(),
    }
    .into()
}
