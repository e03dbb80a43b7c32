//! Serves the agents of compute nodes. The dumps of an agent are sessions of this node whose pages arrive by QUIC.
//! Its requests are those of `permafrost`, restricted by the rights of its certificate.

mod arriving;
mod fetch;
mod intake;
mod requests;
mod rights;
mod spool;
mod turns;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use permafrost_cluster::Operate;
use permafrost_cluster::scrub::Scrubber;
use permafrost_clustered::ClusteredStore;
use permafrost_identity::Peer;
use permafrost_metering::queues::{Queues, Reservations};
use permafrost_store::{MissingObject, ReadingError, Session, StoreError};

use crate::denials::DenialLists;

pub use fetch::serve_fetch;
pub(crate) use rights::authorize;

/// Time for an agent to begin the conversation of a session that it has opened. An agent begins it at once or never.
const BEGIN: Duration = Duration::from_secs(60);

/// Shared state of the service for agents.
pub struct Agents {
    store: Arc<ClusteredStore>,
    /// Directory of the small images with which parked sessions are adopted.
    spool: PathBuf,
    /// Bytes in the spool, by peer.
    spooled: Arc<spool::Spooled>,
    /// Opened sessions whose conversation has not begun.
    opened: Mutex<HashMap<String, Opened>>,
    /// Operator's requests to the cluster, if this node is in one.
    operator: Option<Arc<dyn Operate>>,
    /// Scrub of the store, if there is one.
    scrubber: Option<Arc<Scrubber>>,
    /// Denied certificates, if this node keeps a list.
    denials: Option<Arc<DenialLists>>,
    /// Queues of this node, and the reservations in them.
    queues: Option<(Arc<Queues>, Arc<Reservations>)>,
    /// Number of agents that wait for an answer.
    held: AtomicUsize,
}

/// An opened session that waits for its conversation.
struct Opened {
    owner: String,
    session: Arc<Session>,
    since: Instant,
}

impl Agents {
    /// Makes the service over a store. `spool` is a private directory, best in memory.
    #[must_use]
    pub fn new(store: Arc<ClusteredStore>, spool: PathBuf) -> Self {
        Self {
            store,
            spool,
            spooled: Arc::default(),
            opened: Mutex::default(),
            operator: None,
            scrubber: None,
            denials: None,
            queues: None,
            held: AtomicUsize::new(0),
        }
    }

    /// Makes dumps wait in these queues until they are admitted.
    #[must_use]
    pub fn with_queues(self, queues: Arc<Queues>, reservations: Arc<Reservations>) -> Self {
        Self {
            queues: Some((queues, reservations)),
            ..self
        }
    }

    /// Enables `permafrost pki deny` for peers.
    #[must_use]
    pub fn with_denials(self, denials: Arc<DenialLists>) -> Self {
        Self {
            denials: Some(denials),
            ..self
        }
    }

    /// Enables `permafrost node …` for peers.
    #[must_use]
    pub fn with_operator(self, operator: Arc<dyn Operate>) -> Self {
        Self {
            operator: Some(operator),
            ..self
        }
    }

    /// Verifies checkpoints with this scrub.
    #[must_use]
    pub fn with_scrubber(self, scrubber: Arc<Scrubber>) -> Self {
        Self {
            scrubber: Some(scrubber),
            ..self
        }
    }

    /// Returns the checkpoints that are served.
    pub(crate) fn store(&self) -> &Arc<ClusteredStore> {
        &self.store
    }

    /// Returns the scrub, which `action` in an error needs.
    pub(crate) fn scrubber(&self, action: &'static str) -> Result<&Scrubber, StoreError> {
        let scrubber = self.scrubber.as_deref();
        scrubber.ok_or_else(|| ReadingError::NoScrub { action }.into())
    }

    fn opened(&self) -> MutexGuard<'_, HashMap<String, Opened>> {
        self.opened.lock()
    }

    /// Keeps a session until a conversation brings its pages.
    fn expect(&self, peer: &Peer, session: &Arc<Session>) {
        let waiting = Opened {
            owner: name_of(peer),
            session: Arc::clone(session),
            since: Instant::now(),
        };
        self.opened().insert(session.id.clone(), waiting);
    }

    /// Discards sessions whose conversation did not begin in time, so that their jobs are unlocked.
    fn discard_late(&self) {
        let mut late = Vec::new();
        self.opened().retain(|id, waiting| {
            let stays = waiting.since.elapsed() < BEGIN;
            if !stays {
                late.push(id.clone());
            }
            stays
        });
        for id in late {
            self.store.local().drop_session(&id);
        }
    }

    /// Returns the opened session of `peer` for its conversation.
    fn take(&self, peer: &Peer, id: &str) -> Result<Arc<Session>, StoreError> {
        let mut opened = self.opened();
        match opened.remove(id) {
            Some(waiting) if waiting.owner == name_of(peer) => Ok(waiting.session),
            other => {
                if let Some(anothers) = other {
                    opened.insert(id.to_owned(), anothers);
                }
                Err(StoreError::NotFound(MissingObject::Session(id.to_owned())))
            }
        }
    }

    /// Returns true if `peer` sent the pages of a parked session.
    fn owns(&self, peer: &Peer, id: &str) -> bool {
        self.store
            .local()
            .parked_by(id)
            .is_some_and(|client| client == name_of(peer))
    }
}

/// Returns role and name of a peer, as names are unique only within a role.
fn name_of(peer: &Peer) -> String {
    format!("{} {}", peer.role(), peer.name())
}
