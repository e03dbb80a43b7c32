//! Phases of a dump's session, on the node or the agent that has it.
//!
//! ```text
//!   open ─▶ receiving ─▶ closed ─▶ images ─▶ sealing ─▶ done
//!               └────── CLOSE parks it ────────▲
//! ```
//!
//! A session may fail in every phase before `done`. Another request may discard it in every phase before `sealing`:
//! each change is one call under the owner's lock, so a session is never both discarded and sealed.

use std::time::{Duration, Instant};

use permafrost_protocol::control::{self, ErrorCode, ReportedError};

/// Phase of a session. `O` is what an open session has for its dump, `C` is the dump behind CLOSE.
enum Phase<O, C> {
    Open(O),
    Receiving,
    Closed(C),
    /// The small images are being received.
    Images,
    Sealing,
    /// Sealed or parked.
    Done,
    Failed(control::Error),
}

/// State machine of a session. The caller logs and notifies.
pub struct SessionPhases<O, C> {
    phase: Phase<O, C>,
    since: Instant,
    hang_up: Option<Box<dyn FnOnce() + Send>>,
}

/// Contents of the phase that a session has left by failing, and its connection. To be dropped or ended without the
/// owner's lock, as either may call other nodes.
#[must_use = "it is dropped once the lock is released"]
pub struct LeftPhase<O, C> {
    phase: Phase<O, C>,
    hang_up: Option<Box<dyn FnOnce() + Send>>,
}

/// Refusal of a request that a session cannot take in its phase.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PhaseError {
    /// Another connection brings, or has brought, the pages.
    #[error("session {session} is {phase} and takes no other connection")]
    Taken {
        /// Id of the session.
        session: String,
        /// Name of its phase.
        phase: &'static str,
    },
    /// The dump is not complete.
    #[error("session {session} is {phase}, not closed: CRIU's CLOSE has not come")]
    NotClosed {
        /// Id of the session.
        session: String,
        /// Name of its phase.
        phase: &'static str,
    },
    /// The dump is complete, and is becoming a checkpoint.
    #[error("session {session} is being sealed")]
    Sealing {
        /// Id of the session.
        session: String,
    },
    /// The session has failed.
    #[error("session {session} failed: {}", error.message)]
    Failed {
        /// Id of the session.
        session: String,
        /// Reason for the failure.
        error: control::Error,
    },
}

/// Reason for the failure of a session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct SessionFailure {
    /// Code of the error.
    pub code: ErrorCode,
    /// Error, or the request that discarded the session.
    pub reason: String,
}

impl ReportedError for SessionFailure {
    fn code(&self) -> ErrorCode {
        self.code
    }
}

impl ReportedError for PhaseError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Taken { .. } | Self::NotClosed { .. } | Self::Sealing { .. } => {
                ErrorCode::Conflict
            }
            Self::Failed { error, .. } => error.code(),
        }
    }

    fn hint(&self) -> &str {
        match self {
            Self::Taken { .. } => "open a session for every dump",
            Self::NotClosed { .. } => "seal after CRIU has sent all pages (the post-dump action)",
            Self::Sealing { .. } => "remove the checkpoint when it is there",
            Self::Failed { error, .. } => &error.hint,
        }
    }
}

impl<O, C> LeftPhase<O, C> {
    /// Drops the contents, and ends the connection that brings the pages.
    pub fn hang_up(self) {
        let Self { phase, hang_up } = self;
        drop(phase);
        if let Some(hang_up) = hang_up {
            hang_up();
        }
    }
}

impl<O, C> SessionPhases<O, C> {
    /// Makes the phases of a session that was opened.
    #[must_use]
    pub fn new(now: Instant, opened: O) -> Self {
        Self {
            phase: Phase::Open(opened),
            since: now,
            hang_up: None,
        }
    }

    /// Returns the name of the phase, for listings.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.phase {
            Phase::Open(_) => "open",
            Phase::Receiving => "receiving",
            Phase::Closed(_) => "closed",
            Phase::Images | Phase::Sealing => "sealing",
            Phase::Done => "done",
            Phase::Failed(_) => "failed",
        }
    }

    /// Returns the reason for the failure of a failed session.
    #[must_use]
    pub fn failure(&self) -> Option<&control::Error> {
        match &self.phase {
            Phase::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// Returns what the session has for its dump, while it is open.
    pub fn opened_mut(&mut self) -> Option<&mut O> {
        match &mut self.phase {
            Phase::Open(opened) => Some(opened),
            _ => None,
        }
    }

    /// Registers the function that ends the connection which is going to bring the pages. Returns it for an immediate
    /// call if the session has failed.
    #[must_use]
    pub fn expect(
        &mut self,
        hang_up: Box<dyn FnOnce() + Send>,
    ) -> Option<Box<dyn FnOnce() + Send>> {
        if self.failure().is_some() {
            return Some(hang_up);
        }
        self.hang_up = Some(hang_up);
        None
    }

    /// Assigns the session to the one connection that brings its pages.
    ///
    /// # Errors
    /// Another connection is or was at it.
    pub fn start(
        &mut self,
        now: Instant,
        session: &str,
        hang_up: Box<dyn FnOnce() + Send>,
    ) -> Result<O, PhaseError> {
        match std::mem::replace(&mut self.phase, Phase::Receiving) {
            Phase::Open(opened) => {
                self.since = now;
                self.hang_up = Some(hang_up);
                Ok(opened)
            }
            other => {
                self.phase = other;
                let (session, phase) = (session.to_owned(), self.name());
                Err(PhaseError::Taken { session, phase })
            }
        }
    }

    /// Forgets the connection, which has ended.
    pub fn disconnected(&mut self) {
        // The function holds the connection open.
        self.hang_up = None;
    }

    /// Keeps the dump for its seal: its pages are durable.
    ///
    /// # Errors
    /// The session has been discarded. The dump is returned, to be dropped without the lock.
    pub fn close(&mut self, now: Instant, session: &str, dump: C) -> Result<(), (PhaseError, C)> {
        match self.check(session) {
            Ok(()) => self.enter(now, Phase::Closed(dump)),
            Err(error) => return Err((error, dump)),
        };
        Ok(())
    }

    /// Takes the dump for sealing. The session can still be discarded until [`Self::seal`].
    ///
    /// # Errors
    /// The session is not closed, or has failed.
    pub fn begin_seal(&mut self, now: Instant, session: &str) -> Result<C, PhaseError> {
        match std::mem::replace(&mut self.phase, Phase::Images) {
            Phase::Closed(dump) => {
                self.since = now;
                Ok(dump)
            }
            other => {
                self.phase = other;
                self.check(session)?;
                let (session, phase) = (session.to_owned(), self.name());
                Err(PhaseError::NotClosed { session, phase })
            }
        }
    }

    /// Ends the time in which the session can be discarded: all of the dump is in, and is sealed or parked.
    ///
    /// # Errors
    /// The session has been discarded.
    pub fn seal(&mut self, now: Instant, session: &str) -> Result<(), PhaseError> {
        self.check(session)?;
        self.enter(now, Phase::Sealing);
        Ok(())
    }

    /// Records that the session is sealed or parked.
    pub fn done(&mut self, now: Instant) {
        self.enter(now, Phase::Done);
    }

    /// Fails the session, unless it is over.
    pub fn fail(&mut self, now: Instant, error: control::Error) -> Option<LeftPhase<O, C>> {
        if self.is_over() {
            return None;
        }
        Some(LeftPhase {
            phase: self.enter(now, Phase::Failed(error)),
            hang_up: self.hang_up.take(),
        })
    }

    /// Fails the session at the request of another than its connection, unless it is over.
    ///
    /// # Errors
    /// It is being sealed, and goes on.
    pub fn discard(
        &mut self,
        now: Instant,
        session: &str,
        error: control::Error,
    ) -> Result<Option<LeftPhase<O, C>>, PhaseError> {
        if matches!(self.phase, Phase::Sealing) {
            let session = session.to_owned();
            return Err(PhaseError::Sealing { session });
        }
        Ok(self.fail(now, error))
    }

    /// Returns true if the pages are being received.
    #[must_use]
    pub fn is_receiving(&self) -> bool {
        matches!(self.phase, Phase::Receiving)
    }

    /// Returns true if pages or images are being received, or sealed.
    #[must_use]
    pub fn is_taking(&self) -> bool {
        matches!(
            self.phase,
            Phase::Receiving | Phase::Images | Phase::Sealing
        )
    }

    /// Returns true if the session has waited for `limit`, for its dump or for its seal, or has been over for so long.
    #[must_use]
    pub fn is_idle(&self, now: Instant, limit: Duration) -> bool {
        !self.is_taking() && now.saturating_duration_since(self.since) >= limit
    }

    /// Returns true if the session is sealed or parked.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// Returns the time since which the session is over, if it is.
    #[must_use]
    pub fn over_since(&self) -> Option<Instant> {
        self.is_over().then_some(self.since)
    }

    /// Checks that the session has not failed.
    ///
    /// # Errors
    /// It has failed.
    pub fn check(&self, session: &str) -> Result<(), PhaseError> {
        match self.failure() {
            None => Ok(()),
            Some(error) => Err(PhaseError::Failed {
                session: session.to_owned(),
                error: error.clone(),
            }),
        }
    }

    fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Done | Phase::Failed(_))
    }

    fn enter(&mut self, now: Instant, phase: Phase<O, C>) -> Phase<O, C> {
        self.since = now;
        std::mem::replace(&mut self.phase, phase)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Phases = SessionPhases<&'static str, u8>;

    fn discarded() -> control::Error {
        let reason = "discarded on request".to_owned();
        let code = ErrorCode::SessionFailed;
        SessionFailure { code, reason }.into()
    }

    /// Returns a session after so many of its changes.
    fn after(changes: usize, now: Instant) -> Phases {
        let mut phases = Phases::new(now, "parent");
        let all: [fn(&mut Phases, Instant); 5] = [
            |phases, now| {
                let opened = phases.start(now, "s", Box::new(|| {}));
                assert_eq!(opened, Ok("parent"));
            },
            |phases, now| phases.close(now, "s", 7).unwrap(),
            |phases, now| assert_eq!(phases.begin_seal(now, "s"), Ok(7)),
            |phases, now| phases.seal(now, "s").unwrap(),
            |phases, now| phases.done(now),
        ];
        for change in &all[..changes] {
            change(&mut phases, now);
        }
        phases
    }

    #[test]
    fn a_session_is_discarded_or_sealed_and_never_both() {
        let now = Instant::now();
        let names = ["open", "receiving", "closed", "sealing", "sealing", "done"];
        for (changes, name) in names.into_iter().enumerate() {
            let mut phases = after(changes, now);
            assert_eq!(phases.name(), name);
            match phases.discard(now, "s", discarded()) {
                Ok(Some(_)) => assert!(changes < 4, "{name}"),
                Err(_) => assert_eq!(changes, 4),
                Ok(None) => assert_eq!(changes, 5),
            }
            if changes < 4 {
                assert_eq!(phases.over_since(), Some(now));
                let again = phases.discard(now, "s", discarded());
                assert!(matches!(again, Ok(None)));
                // Whoever works on it learns the reason, and changes nothing.
                let failed = PhaseError::Failed {
                    session: "s".to_owned(),
                    error: discarded(),
                };
                assert_eq!(phases.close(now, "s", 8), Err((failed.clone(), 8)));
                assert_eq!(phases.begin_seal(now, "s"), Err(failed.clone()));
                assert_eq!(phases.seal(now, "s"), Err(failed));
                assert_eq!(phases.name(), "failed");
            }
        }
    }

    #[test]
    fn one_connection_brings_the_pages_and_only_a_closed_dump_is_sealed() {
        let now = Instant::now();
        for changes in 0..6 {
            let mut phases = after(changes, now);
            let name = phases.name();
            let (session, phase) = ("s".to_owned(), name);
            if changes != 2 {
                let refused = PhaseError::NotClosed {
                    session: session.clone(),
                    phase,
                };
                assert_eq!(phases.begin_seal(now, "s"), Err(refused));
            }
            if changes != 0 {
                let refused = PhaseError::Taken { session, phase };
                assert_eq!(phases.start(now, "s", Box::new(|| {})), Err(refused));
            }
            assert_eq!(phases.name(), name, "a refusal changes nothing");
        }
    }

    #[test]
    fn the_connection_of_a_failed_session_ends_and_idle_ones_wait_for_something() {
        let now = Instant::now();
        let (call, is_called) = std::sync::mpsc::channel();
        let hang_up = || -> Box<dyn FnOnce() + Send> {
            let call = call.clone();
            Box::new(move || call.send(()).unwrap())
        };
        let mut phases = Phases::new(now, "parent");
        assert!(phases.expect(hang_up()).is_none());
        phases.fail(now, discarded()).unwrap().hang_up();
        assert!(is_called.try_recv().is_ok());
        assert!(phases.expect(hang_up()).is_some());
        assert!(phases.fail(now, discarded()).is_none());

        let limit = Duration::from_secs(60);
        for (changes, idle) in [true, false, true, false, false, true].iter().enumerate() {
            let phases = after(changes, now);
            assert_eq!(phases.is_idle(now + limit, limit), *idle);
            assert_eq!(phases.is_taking(), !idle);
            assert!(!phases.is_idle(now + limit / 2, limit));
        }
    }
}
