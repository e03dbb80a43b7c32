//! Seals a session.

use std::time::Instant;

use permafrost_protocol::control::{ErrorCode, ReportedError};

use super::super::{SessionError, StoreError};
use super::Session;

/// A session that is being sealed. If it is dropped before [`Sealing::done`] (an error, a panic), the session
/// has failed, and releases its job.
pub(crate) struct Sealing<'a> {
    session: &'a Session,
    done: bool,
}

impl<'a> Sealing<'a> {
    pub(super) fn new(session: &'a Session) -> Self {
        Self {
            session,
            done: false,
        }
    }

    /// Begins to seal a session whose pages are all of it.
    ///
    /// # Errors
    /// The session has been discarded.
    pub(super) fn of_received(session: &'a Session) -> Result<Self, StoreError> {
        let sealing = session.state().phases.seal(Instant::now(), &session.id);
        sealing.map_err(SessionError::from)?;
        Ok(Self::new(session))
    }

    /// Returns why sealing fails: because the session was discarded meanwhile, or else with `error`.
    pub(crate) fn explain(&self, error: StoreError) -> StoreError {
        let checked = self.session.state().phases.check(&self.session.id);
        checked.map_or_else(|failed| SessionError::from(failed).into(), |()| error)
    }

    /// Ends the time in which the session can be discarded: its small images are in.
    ///
    /// # Errors
    /// The session has been discarded.
    pub(crate) fn images_are_in(&self) -> Result<(), StoreError> {
        let sealing = self
            .session
            .state()
            .phases
            .seal(Instant::now(), &self.session.id);
        Ok(sealing.map_err(SessionError::from)?)
    }

    /// Marks the session as a checkpoint; the next dump of the job may begin.
    pub(crate) fn done(mut self) {
        self.done = true;
        // Unlocking may take long: not under the session's own lock.
        let mut state = self.session.state();
        state.phases.done(Instant::now());
        let over = (state.job_guard.take(), state.turn.take());
        drop(state);
        drop(over);
        self.session.ended.send_replace(true);
    }

    /// Marks the session as failed.
    pub(crate) fn failed(mut self, error: &StoreError) {
        self.fail(error.code(), &error.to_string());
    }

    fn fail(&mut self, code: ErrorCode, reason: &str) {
        self.done = true;
        let mut state = self.session.state();
        let released = state.fail(code, reason);
        drop(state);
        // Otherwise the session was discarded while its images came.
        if let Some(released) = released {
            drop(released);
            self.session.log_failure(reason);
        }
    }
}

impl Drop for Sealing<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.fail(ErrorCode::Internal, "the sealing thread died");
        }
    }
}
