//! The HTTP API: what dumps, restores, waiting and killing cost, who is best preempted, and where checkpoints are best
//! kept and resumed.
//!
//! ```text
//!  daemon ── Source ──▶ refresh: once a second, and after an event ──▶ World ◀── routes ◀── serve (sockets, TLS, who asks)
//!                                                                        │
//!                                                    scheduling: costs, Algorithms 1 and 2, placement
//! ```
//!
//! Answers are made from a [`World`](world::World), which never changes once it is there, and say how old it is. So no
//! answer waits for a node, a disk or a lock that a dump holds. Only reservations and starting estimates are passed on,
//! on threads of their own.

pub mod caller;
pub mod kubernetes;
pub mod limits;
pub mod openapi;
pub mod problem;
pub mod refresh;
pub mod routes;
pub mod serve;
pub mod source;
pub mod world;

mod body;
mod pace;
mod say;
mod shares;
mod tasks;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use permafrost_api_types::events::Event;
use tokio::sync::{Notify, Semaphore, broadcast, watch};

pub use routes::router;

use pace::Pace;
use problem::Failure;
use shares::{Booked, Shares};
use source::Source;
use world::{Builder, Jobs, World};

/// How the API keeps up with the daemon.
#[derive(Clone, Copy, Debug)]
pub struct ApiConfig {
    /// How often the nodes are looked at anew. Shorter follows queues more closely, and costs a look at each node. 1 s.
    pub refresh: Duration,
    /// How often the checkpoints are listed anew when nothing is heard of a change. In a cluster this is how late those
    /// of other nodes are seen. 5 s.
    pub list: Duration,
    /// After how long without a new snapshot the lengths of queues do not hold any more. 1 minute: as long as most
    /// dumps take.
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

/// What all routes share.
pub struct Api {
    source: Arc<dyn Source>,
    world: RwLock<Option<Arc<World>>>,
    /// Told of each new snapshot by [`refresh`].
    published: watch::Sender<()>,
    /// Somebody waits for checkpoints to be listed anew.
    wanted: Arc<Notify>,
    /// Nobody keeps it up: it has looked once.
    looks_no_more: bool,
    events: broadcast::Sender<Event>,
    /// While something moves here.
    pace: Pace,
    /// Long batches at once.
    long: Arc<Semaphore>,
    /// Requests that are with the source.
    asking: Arc<Semaphore>,
    /// Readers of events.
    readers: Arc<Shares>,
    /// Reservations of each caller.
    booked: Booked,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

impl Api {
    /// One that has seen nothing yet: [`refresh::start`] keeps it up.
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
            booked: Booked::default(),
        }
    }

    /// One that has looked once, and looks no more: for tests and benches. Blocks as the source does.
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

    /// The newest snapshot; none before the first.
    #[must_use]
    pub fn world(&self) -> Option<Arc<World>> {
        let world = self.world.read().unwrap_or_else(PoisonError::into_inner);
        world.clone()
    }

    /// Waits for the first snapshot, but no longer than that. Whether there is one.
    pub async fn looked_within(&self, time: Duration) -> bool {
        let mut published = self.published.subscribe();
        let looked = async {
            while self.world().is_none() {
                // The sender is our own.
                let _ = published.changed().await;
            }
        };
        tokio::time::timeout(time, looked).await.is_ok()
    }

    /// A snapshot whose checkpoints were listed after `since`: only such a one tells that there is no checkpoint of a
    /// name. Lists them if need be, which takes milliseconds and as long as the daemon.
    ///
    /// # Errors
    /// They were not listed within [`limits::LISTING_PATIENCE`].
    async fn listed_since(&self, since: Instant) -> Result<Arc<World>, Failure> {
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
                // The sender is our own.
                let _ = published.changed().await;
            }
        };
        let listed = tokio::time::timeout(limits::LISTING_PATIENCE, listed).await;
        listed.map_err(|_| {
            let detail = "the store does not list its checkpoints now, so there may be one that is not known here";
            Failure::for_now(detail, 5)
        })
    }

    /// Whether a checkpoint that was there at that time is among them.
    fn shows(&self, jobs: &Jobs, at: Instant) -> bool {
        self.looks_no_more || jobs.listed_since(at)
    }

    /// Replaces a snapshot by what is left of it, unless there is a new one.
    fn publish_instead_of(&self, of: &Arc<World>, world: World) {
        let mut current = self.world.write().unwrap_or_else(PoisonError::into_inner);
        if current
            .as_ref()
            .is_some_and(|current| Arc::ptr_eq(current, of))
        {
            *current = Some(Arc::new(world));
        }
    }

    fn publish(&self, world: World) {
        let old = {
            let mut current = self.world.write().unwrap_or_else(PoisonError::into_inner);
            current.replace(Arc::new(world))
        };
        // Freeing ten thousand nodes takes a while: not under the lock.
        drop(old);
        self.published.send_replace(());
    }
}
