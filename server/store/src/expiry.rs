//! Discards sessions and checkpoints: on request, when their opener has gone, and when their retention has ended.

use std::collections::HashSet;
use std::time::Duration;

use permafrost_protocol::control::{self, ErrorCode};
use permafrost_protocol::manifest::TakenBy;

use super::session::Session;
use super::{Store, StoreError, manifest_of};

/// Retention times and limits of unclaimed sessions and parked checkpoints.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    /// Retention of a parked session (CLOSE answered, not adopted). Default 24 h.
    pub parked: Duration,
    /// Retention of an open session without a connection, or of one that is not sealed. Default 1 h.
    pub idle_session: Duration,
    /// Maximum bytes of the region that anonymous dumps may take, parked and under way. Default half of the region.
    pub parked_bytes: Option<u64>,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            parked: Duration::from_secs(24 * 3600),
            idle_session: Duration::from_secs(3600),
            parked_bytes: None,
        }
    }
}

impl Store {
    /// Discards a session that is not sealed. Returns false if there is no session of that name.
    ///
    /// # Errors
    /// It is being sealed.
    pub fn discard_session(&self, id: &str) -> Result<bool, StoreError> {
        let Some(session) = self.session(id) else {
            return Ok(false);
        };
        session.discard(ErrorCode::SessionFailed, "discarded on request")?;
        self.sessions().remove(id);
        Ok(true)
    }

    /// Removes a session whose CLOSE left nothing to keep.
    pub(super) fn forget_session(&self, id: &str) {
        self.sessions().remove(id);
    }

    /// Discards a session whose opener has disconnected, unless the session is being sealed at this moment.
    pub fn drop_session(&self, id: &str) {
        let session = self.sessions().get(id).cloned();
        let discard = |session: &Session| {
            let discarded = session.discard(ErrorCode::SessionFailed, "its opener has gone");
            discarded.is_ok()
        };
        if session.is_some_and(|session| discard(&session)) {
            self.sessions().remove(id);
        }
    }

    /// Ends every session that is not sealed. Called when the daemon stops.
    pub fn stop(&self) {
        let sessions: Vec<_> = self.sessions().drain().collect();
        for (_, session) in sessions {
            // One that is being sealed is waited for.
            let _ = session.discard(ErrorCode::SessionFailed, "permafrostd is stopping");
        }
    }

    /// Discards sessions, parked checkpoints and rounds of pre-copies that have outlived their retention: no client
    /// connected to, sealed, adopted or continued them. With `single_node`, rounds from before the start of this
    /// daemon are discarded at once, if their connections have ended with it. `remove` removes a checkpoint.
    pub fn expire(
        &self,
        single_node: bool,
        remove: impl Fn(&control::Checkpoint) -> Result<(), StoreError>,
    ) {
        let sessions: Vec<_> = self.sessions().values().cloned().collect();
        for session in sessions {
            if session.discard_if_idle(self.retention.idle_session) {
                self.sessions().remove(&session.id);
            }
        }
        let parked = match self.catalog.all_parked() {
            Ok(listed) => listed,
            Err(error) => {
                tracing::error!(event = "parked-sessions-unreadable", %error, "parked sessions not looked through");
                return;
            }
        };
        // Adopted checkpoints need not be remembered.
        let rounds = self.stored.rounds();
        let kept = parked.iter().chain(&rounds);
        let ids: HashSet<&str> = kept.map(|record| record.id.as_str()).collect();
        self.parking.retain(&ids);
        for round in rounds {
            self.expire_round(&round, single_node, &remove);
        }
        for parked in parked {
            if self.is_provisional(&parked.id) {
                continue;
            }
            if self.parked_for(&parked.id) < self.retention.parked {
                continue;
            }
            tracing::warn!(event = "parked-session-discarded", session = %parked.session, "parked session discarded: nobody adopted it in time");
            if let Err(error) = remove(&parked) {
                tracing::error!(event = "parked-session-not-discarded", session = %parked.session, %error, "parked session not discarded");
            }
        }
        self.parking.save_now_and_then();
    }

    /// Returns true if a round's client was connected to this node, and not to an agent, which removes the round itself.
    pub(super) fn had_its_connection(&self, id: &str) -> bool {
        let taken_by = (self.manifest(id)).map(|round| TakenBy::parse(&round.taken_by));
        matches!(taken_by, Ok(TakenBy::Node(_) | TakenBy::User(_)))
    }

    /// Discards a round of a pre-copy whose connection ended with a daemon, or that has outlived an idle session.
    fn expire_round(
        &self,
        round: &control::Checkpoint,
        single_node: bool,
        remove: impl Fn(&control::Checkpoint) -> Result<(), StoreError>,
    ) {
        let ids = self.left_rounds.get().filter(|_| single_node);
        let left = ids.is_some_and(|ids| ids.contains(&round.id));
        let (job, generation) = (&round.job, round.generation);
        if self.is_provisional(&round.id)
            || !left && self.parked_for(&round.id) < self.retention.idle_session
        {
            return;
        }
        tracing::warn!(
            event = "pre-copy-round-discarded",
            job,
            generation,
            "round of a pre-copy discarded: its dump has ended"
        );
        if let Err(error) = remove(round) {
            tracing::error!(event = "pre-copy-round-not-discarded", job, generation, %error, "round of a pre-copy not discarded");
        }
    }

    /// Returns the client that brought the pages of a session that is parked here, as its manifest records it; `None`
    /// if no such session is parked here, or its manifest cannot be read. Reads a manifest.
    #[must_use]
    pub fn parked_by(&self, session: &str) -> Option<String> {
        let record = self.catalog.parked(session).ok()??;
        let checkpoint = self.checkpoint(&record.id).ok()?;
        Some(manifest_of(&checkpoint).ok()?.taken_by)
    }

    /// Returns how long daemons have run with a parked checkpoint. The wall clock is not used: a step of it must
    /// not delete the only copy of a task.
    pub(super) fn parked_for(&self, id: &str) -> Duration {
        self.parking.kept_for(id)
    }
}
