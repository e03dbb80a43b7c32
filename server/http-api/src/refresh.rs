//! Refreshes the snapshot.
//!
//! A thread of its own polls the daemon, one poll after another. If a poll does not return, answers go on with
//! the last snapshot and report its age; if one panics, the next begins anew. A task on the runtime decides
//! when to poll.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use permafrost_api_types::events::ApiEvent;
use permafrost_api_types::reserve::Direction;
use permafrost_scheduling::NodeId;
use permafrost_scheduling::figure::Figure;
use permafrost_scheduling::quantity::Bytes;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, broadcast};
use tokio::task::JoinHandle;

use super::source::QueueLength;
use super::world::{Builder, Jobs, World};
use super::{Api, ApiConfig, limits};

/// Interval at which a stale snapshot is published again, with its age.
const SAY_STALE: Duration = Duration::from_secs(10);

/// Keeps an [`Api`] refreshed until it is dropped.
#[derive(Debug)]
pub struct Refresher {
    driver: JoinHandle<()>,
}

impl Drop for Refresher {
    fn drop(&mut self) {
        // The thread ends when it gets no more requests.
        self.driver.abort();
    }
}

/// One poll of the daemon.
#[derive(Clone, Copy, Debug)]
struct Look {
    /// True if the checkpoints are listed, too.
    list: bool,
}

/// Polls the daemon now, and repeatedly from now on. Called on a tokio runtime.
///
/// # Errors
/// The thread cannot be started.
pub fn start(api: &Arc<Api>, config: ApiConfig) -> io::Result<Refresher> {
    // One waiting poll is enough: it sees all earlier changes.
    let (looks, asked) = sync_channel(1);
    let events = api.source.events();
    let looking = Arc::downgrade(api);
    thread::Builder::new()
        .name("api-refresh".into())
        .spawn(move || look_when_asked(&looking, &asked))?;
    let driver = Driver {
        api: Arc::downgrade(api),
        wanted: Arc::clone(&api.wanted),
        config,
        looks,
        looked: None,
        listed: None,
        changed: false,
        said_stale: None,
    };
    Ok(Refresher {
        driver: tokio::spawn(driver.run(events)),
    })
}

/// Decides when to poll the daemon.
struct Driver {
    api: Weak<Api>,
    wanted: Arc<Notify>,
    config: ApiConfig,
    looks: SyncSender<Look>,
    looked: Option<Instant>,
    listed: Option<Instant>,
    /// True if checkpoints have come or gone since they were listed, or may have.
    changed: bool,
    said_stale: Option<Instant>,
}

impl Driver {
    async fn run(mut self, mut events: broadcast::Receiver<ApiEvent>) {
        let mut heard = true;
        loop {
            let due = self.due().into();
            tokio::select! {
                () = self.wanted.notified() => self.changed = true,
                () = tokio::time::sleep_until(due) => {
                    let Some(api) = self.api.upgrade() else { return };
                    self.say_stale(&api);
                    self.ask_for_a_look();
                }
                event = events.recv(), if heard => {
                    let Some(api) = self.api.upgrade() else { return };
                    let event = match event {
                        Ok(event) => event,
                        Err(RecvError::Lagged(missed)) => ApiEvent::Missed { missed },
                        Err(RecvError::Closed) => {
                            heard = false;
                            continue;
                        }
                    };
                    self.changed = true;
                    // There may be no subscriber.
                    let _ = api.events.send(event);
                }
            }
        }
    }

    fn due(&self) -> Instant {
        let Some(looked) = self.looked else {
            return Instant::now();
        };
        let between = if self.changed {
            limits::LEAST_BETWEEN_LOOKS.min(self.config.refresh)
        } else {
            self.config.refresh
        };
        looked + between
    }

    fn ask_for_a_look(&mut self) {
        let now = Instant::now();
        let is_old = |listed: Instant| now.duration_since(listed) >= self.config.list;
        let list = self.changed || self.listed.is_none_or(is_old);
        self.looked = Some(now);
        // A requested poll that has not begun is enough; the change is kept for the next one.
        if self.looks.try_send(Look { list }).is_ok() && list {
            self.listed = Some(now);
            self.changed = false;
        }
    }

    fn say_stale(&mut self, api: &Api) {
        let Some(world) = api.world() else { return };
        let limit = self.config.stale_after;
        if world.age() < limit {
            self.said_stale = None;
        } else if self
            .said_stale
            .is_none_or(|said| said.elapsed() >= SAY_STALE)
        {
            tracing::warn!(event = "api-view-stale", age = ?world.age(), "the daemon has not been seen for long: queues are not told any more");
            self.said_stale = Some(Instant::now());
            api.publish_instead_of(&world, world.stale(limit));
        }
    }
}

fn look_when_asked(api: &Weak<Api>, asked: &Receiver<Look>) {
    let mut builder = Builder::default();
    let mut jobs: Option<Arc<Jobs>> = None;
    while let Ok(Look { list }) = asked.recv() {
        let Some(api) = api.upgrade() else { return };
        let looked = catch_unwind(AssertUnwindSafe(|| {
            if list || jobs.is_none() {
                match Builder::jobs(api.source.as_ref()) {
                    Ok(listed) => jobs = Some(Arc::new(listed)),
                    Err(error) => {
                        tracing::warn!(event = "api-list-failed", %error, "list checkpoints for the API")
                    }
                }
            }
            builder.world(api.source.as_ref(), jobs.clone())
        }));
        match looked {
            Ok(world) => {
                tell_changes(&api, &world);
                api.publish(world);
            }
            Err(_) => {
                tracing::error!(
                    event = "api-view-panicked",
                    "the look at the daemon has panicked"
                );
                builder = Builder::default();
            }
        }
    }
}

/// Publishes the changes of nodes and queues.
fn tell_changes(api: &Api, new: &World) {
    if api.events.receiver_count() == 0 {
        return;
    }
    let Some(old) = api.world() else { return };
    // Numbers may have been reassigned: nodes are compared by their names.
    let is_live = |world: &World, name: &str| {
        let node = world.names().id(name).and_then(|id| world.node(id));
        node.is_some_and(|node| node.entry.live)
    };
    let tell = |event| {
        // The subscribers may have gone.
        let _ = api.events.send(event);
    };
    for (name, id) in new.names().in_order() {
        let live = is_live(new, name);
        if live != is_live(&old, name) || old.names().id(name).is_none() {
            let node = name.to_owned();
            tell(ApiEvent::Node { node, live });
        }
        for direction in [Direction::Write, Direction::Read] {
            let now = queue(new, id, direction);
            let before = old
                .names()
                .id(name)
                .and_then(|id| queue(&old, id, direction));
            if let Some((bytes, length)) = now
                && now != before
            {
                tell(ApiEvent::Queue {
                    node: name.to_owned(),
                    direction,
                    bytes: bytes.count(),
                    running: length.running,
                    waiting: length.waiting,
                });
            }
        }
    }
    for (name, _) in old.names().in_order() {
        if new.names().id(name).is_none() && is_live(&old, name) {
            let node = name.to_owned();
            tell(ApiEvent::Node { node, live: false });
        }
    }
}

fn queue(world: &World, id: NodeId, direction: Direction) -> Option<(Bytes, QueueLength)> {
    let entry = &world.node(id)?.entry;
    let (queued, length) = match direction {
        Direction::Write => (&entry.figures.write_queue, entry.write_queue),
        Direction::Read => (&entry.figures.read_queue, entry.read_queue),
    };
    match queued {
        Figure::Known(queued) => Some((queued.p50, length?)),
        Figure::Unknown { .. } => None,
    }
}
