//! Pages of a dump that come through CRIU's own pipes, whose descriptors a client of the control socket hands over.

use std::collections::BTreeSet;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use permafrost_criu::frontend::{PageSink as _, PipeRoom, SpaceLimits, SpacePipes};
use permafrost_protocol::control::{self, ReportedError as _, request};
use permafrost_protocol::manifest::SpaceType;
use permafrost_protocol::pageserver::{MAX_SPACES, ProtocolError, SpaceId};

use super::error::RequestError;
use super::{Backend, Client, DumpSession as _, Shared, endpoints};

/// The dump that a control connection brings. Dropped before its end, the session has failed.
pub(super) struct PipedDump<B: Backend> {
    session: Arc<B::Session>,
    sink: B::Sink,
    spaces: BTreeSet<SpaceId>,
}

impl<B: Backend> PipedDump<B> {
    /// Fails the session of a dump whose connection has ended before the dump.
    pub(super) fn give_up(mut self, backend: &B, client: &Client) {
        let reason = "the connection that brought the pages has ended before the dump".to_owned();
        self.sink.abort(&reason);
        let error = RequestError::Conversation { reason }.to_reply();
        self.received(backend, client, Err(&error));
    }

    /// Records the outcome, as of a dump in the page-server protocol.
    fn received(&self, backend: &B, client: &Client, outcome: Result<(), &control::Error>) {
        let name = match self.session.job() {
            "" => self.session.id(),
            job => job,
        };
        backend.received(client, name, outcome);
    }
}

/// A control connection that brings pages.
pub(super) struct Sender<'a, B> {
    pub(super) shared: &'a Shared<B>,
    pub(super) stream: &'a UnixStream,
    pub(super) client: &'a Client,
}

impl<B: Backend> Sender<'_, B> {
    /// Takes an address space. `dump` is the one that the connection has begun, if any, and afterwards the one that goes
    /// on.
    pub(super) fn take_space(
        &self,
        dump: &mut Option<PipedDump<B>>,
        take: &request::TakeSpace,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), control::Error> {
        let Ok([pagemap, pages]) = <[OwnedFd; 2]>::try_from(descriptors) else {
            return Err(RequestError::NoDescriptor.into());
        };
        let pipes = SpacePipes {
            space: space(take)?,
            pages_id: take.pages_id,
            pagemap,
            pages,
            room: self.room(&take.session),
        };
        let mut begun = self.begun(dump, &take.session)?;
        let limits = SpaceLimits {
            idle: self.shared.options.idle_connection,
            ..SpaceLimits::default()
        };
        let space = pipes.space;
        let refusal = match begun.spaces.len() {
            MAX_SPACES.. => Some(ProtocolError::TooManySpaces),
            _ if !begun.spaces.insert(space) => Some(ProtocolError::OpenedTwice { space }),
            _ => None,
        };
        if let Some(refusal) = refusal {
            let reason = refusal.to_string();
            begun.sink.abort(&reason);
            return Err(self.failed(&begun, reason));
        }
        match pipes.take(&mut begun.sink, &limits, self.stream.as_fd()) {
            Ok(()) => {
                // A client that stops sending must not keep the job for ever.
                let limited = self.stream.set_read_timeout(Some(limits.idle));
                limited.map_err(endpoints::failed("limit the time of reads"))?;
                *dump = Some(begun);
                Ok(())
            }
            Err(error) => Err(self.failed(&begun, error.to_string())),
        }
    }

    /// Returns the room in pipes that is reserved for a session, or makes one that is not.
    fn room(&self, session: &str) -> Arc<PipeRoom> {
        let reserved = self.shared.pipe_rooms.lock().get(session).cloned();
        reserved.unwrap_or_else(|| Arc::new(PipeRoom::unreserved()))
    }

    /// Ends the dump: its pages are as durable as its session requires.
    pub(super) fn end_pages(
        &self,
        dump: &mut Option<PipedDump<B>>,
        end: &request::EndPages,
    ) -> Result<(), control::Error> {
        let mut begun = self.begun(dump, &end.session)?;
        let limited = self.stream.set_read_timeout(None);
        limited.map_err(endpoints::failed("limit the time of reads"))?;
        if let Err(refusal) = begun.sink.close() {
            begun.sink.abort(&refusal.message);
            return Err(self.failed(&begun, refusal.message));
        }
        begun.received(&self.shared.backend, self.client, Ok(()));
        Ok(())
    }

    /// Returns the dump that the connection has begun, or begins it.
    fn begun(
        &self,
        dump: &mut Option<PipedDump<B>>,
        session: &str,
    ) -> Result<PipedDump<B>, control::Error> {
        if let Some(begun) = dump.take() {
            if begun.session.id() == session {
                return Ok(begun);
            }
            let refusal = RequestError::OtherSession {
                begun: begun.session.id().to_owned(),
                session: session.to_owned(),
            };
            *dump = Some(begun);
            return Err(refusal.into());
        }
        let backend = &*self.shared.backend;
        let found = backend.session(session);
        let session = found.ok_or_else(|| RequestError::NoSession {
            session: session.to_owned(),
        })?;
        let stream = self.stream.try_clone();
        let stream = stream.map_err(endpoints::failed("duplicate a descriptor"))?;
        // It may have ended already.
        let hang_up = Box::new(move || drop(stream.shutdown(Shutdown::Both)));
        let sink = backend.start(&session, Some(self.client), hang_up)?;
        Ok(PipedDump {
            session,
            sink,
            spaces: BTreeSet::new(),
        })
    }

    fn failed(&self, begun: &PipedDump<B>, reason: String) -> control::Error {
        // What the connection asks for next is no part of the dump.
        let _ = self.stream.set_read_timeout(None);
        let error = RequestError::Conversation { reason }.to_reply();
        begun.received(&self.shared.backend, self.client, Err(&error));
        error
    }
}

fn space(take: &request::TakeSpace) -> Result<SpaceId, RequestError> {
    let space = match SpaceType::try_from(take.space_type) {
        Ok(SpaceType::Process) => u32::try_from(take.space).ok().map(SpaceId::process),
        Ok(SpaceType::SharedMemory) => SpaceId::shared_memory(take.space),
        Err(_) => None,
    };
    space.ok_or(RequestError::NoSpace {
        space_type: take.space_type,
        space: take.space,
    })
}
