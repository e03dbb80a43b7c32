//! The HTTP API: answers schedulers' questions about the cost of dumps, restores, waiting and killing, about
//! the best task to preempt, and about the best nodes to keep and resume checkpoints.
//!
//! ```text
//!  daemon ── Source ──▶ refresh: once a second, and after an event ──▶ World ◀── routes ◀── serve (sockets, TLS, who asks)
//!                                                                        │
//!                                                    scheduling: costs, Algorithms 1 and 2, placement
//! ```
//!
//! Answers are made from a [`World`](world::World), which is immutable, and contain its age. So no answer waits
//! for a node, a disk or a lock that a dump holds. Only reservations and starting estimates are passed on, on
//! threads of their own.

pub mod caller;
pub mod kubernetes;
pub mod limits;
pub mod openapi;
pub mod problem;
pub mod refresh;
pub mod router;
pub mod routes;
pub mod serve;
pub mod source;
pub mod world;

mod body;
mod nodes;
mod pace;
mod responses;
mod say;
mod shares;
mod tasks;
mod view;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use permafrost_api_types::events::ApiEvent;
use tokio::sync::{Notify, Semaphore, broadcast, watch};

pub use router::router;

use pace::Pace;
use problem::RequestProblem;
use shares::{Booked, Shares};
use source::Source;
use world::{Builder, Jobs, World};

/// Refresh intervals of the API's snapshot.
#[derive(Clone, Copy, Debug)]
pub struct ApiConfig {
    /// Interval between two snapshots of the nodes. A shorter one follows queues more closely, and costs a check of
    /// each node. 1 s.
    pub refresh: Duration,
    /// Interval between two listings of the checkpoints while no change is reported. In a cluster, checkpoints of
    /// other nodes are seen with this delay. 5 s.
    pub list: Duration,
    /// Age of a snapshot after which its lengths of queues are no longer used. 1 minute: as long as most dumps
    /// take.
    pub stale_after: Duration,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            refresh: Duration::from_secs(1),
            list: Duration::from_secs(5),
            stale_after: Duration::from_secs(60),
        }
    }
}

/// State that all routes share.
pub struct Api {
    source: Arc<dyn Source>,
    world: RwLock<Option<Arc<World>>>,
    /// Channel that [`refresh`] notifies of each new snapshot.
    published: watch::Sender<()>,
    /// Notified when a request waits for a new listing of the checkpoints.
    wanted: Arc<Notify>,
    /// True if the snapshot is never refreshed after the first one.
    looks_no_more: bool,
    events: broadcast::Sender<ApiEvent>,
    /// Limits the rate of answers while a dump or a restore runs here.
    pace: Pace,
    /// Limits the long batches that run at once.
    long: Arc<Semaphore>,
    /// Limits the requests that the source is handling.
    asking: Arc<Semaphore>,
    /// Limits the readers of events.
    readers: Arc<Shares>,
    /// Limits the requests for contents of checkpoints.
    describing: Arc<Shares>,
    /// Reservations of each caller.
    booked: Booked,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

impl Api {
    /// Creates an API without a snapshot: [`refresh::start`] makes and refreshes it.
    #[must_use]
    pub fn new(source: Arc<dyn Source>) -> Arc<Self> {
        Arc::new(Self::unseeing(source))
    }

    fn unseeing(source: Arc<dyn Source>) -> Self {
        Self {
            source,
            world: RwLock::new(None),
            published: watch::Sender::new(()),
            wanted: Arc::default(),
            looks_no_more: false,
            events: broadcast::channel(limits::EVENTS_KEPT).0,
            pace: Pace::default(),
            long: Arc::new(Semaphore::new(limits::LONG_AT_ONCE)),
            asking: Arc::new(Semaphore::new(limits::ASKING_AT_ONCE)),
            readers: Shares::new(limits::CALLER_EVENT_READERS, limits::EVENT_READERS),
            describing: Shares::new(limits::CALLER_CONTENTS, limits::CONTENTS_AT_ONCE),
            booked: Booked::default(),
        }
    }

    /// Creates an API with one snapshot that is never refreshed, for tests and benches. Blocks as the source does.
    #[must_use]
    pub fn looked_once(source: Arc<dyn Source>) -> Arc<Self> {
        let api = Self {
            looks_no_more: true,
            ..Self::unseeing(source)
        };
        let mut builder = Builder::default();
        let jobs = Builder::jobs(api.source.as_ref()).ok();
        api.publish(builder.world(api.source.as_ref(), jobs.map(Arc::new)));
        Arc::new(api)
    }

    /// Returns the newest snapshot; `None` before the first.
    #[must_use]
    pub fn world(&self) -> Option<Arc<World>> {
        let world = self.world.read();
        world.clone()
    }

    /// Waits for the first snapshot, for `time` at most. Returns true if there is one.
    pub async fn looked_within(&self, time: Duration) -> bool {
        let mut published = self.published.subscribe();
        let looked = async {
            while self.world().is_none() {
                // The channel cannot close: this object owns its sender.
                let _ = published.changed().await;
            }
        };
        tokio::time::timeout(time, looked).await.is_ok()
    }

    /// Returns a snapshot whose checkpoints were listed after `since`: only such a one proves that there is no
    /// checkpoint of a name. Has them listed if necessary, which takes milliseconds and as long as the daemon.
    ///
    /// # Errors
    /// The checkpoints were not listed within [`limits::LISTING_PATIENCE`].
    async fn listed_since(&self, since: Instant) -> Result<Arc<World>, RequestProblem> {
        let mut published = self.published.subscribe();
        let listed = async {
            loop {
                published.mark_unchanged();
                if let Some(world) = self.world()
                    && world.jobs().is_some_and(|jobs| self.shows(jobs, since))
                {
                    return world;
                }
                self.wanted.notify_one();
                // The channel cannot close: this object owns its sender.
                let _ = published.changed().await;
            }
        };
        let listed = tokio::time::timeout(limits::LISTING_PATIENCE, listed).await;
        listed.map_err(|_| {
            let detail = "the store does not list its checkpoints now, so there may be one that is not known here";
            RequestProblem::for_now(detail, 5)
        })
    }

    /// Returns true if every checkpoint that existed at `at` is among `jobs`.
    fn shows(&self, jobs: &Jobs, at: Instant) -> bool {
        self.looks_no_more || jobs.listed_since(at)
    }

    /// Replaces a snapshot by the part of it that is still valid, unless there is a new one.
    fn publish_instead_of(&self, of: &Arc<World>, world: World) {
        let mut current = self.world.write();
        if current
            .as_ref()
            .is_some_and(|current| Arc::ptr_eq(current, of))
        {
            *current = Some(Arc::new(world));
        }
    }

    fn publish(&self, world: World) {
        let old = {
            let mut current = self.world.write();
            current.replace(Arc::new(world))
        };
        // Freeing ten thousand nodes takes a while: not under the lock.
        drop(old);
        self.published.send_replace(());
    }
}
