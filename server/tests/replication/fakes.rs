//! Nodes, a wire and a registry, with faults on demand.

mod content;
mod registry;
mod wire;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use permafrost_catalog::SledCatalog;
use permafrost_clustered::{ClusterServices, ClusteredStore, Durability, Registry, Replicate};
use permafrost_pmem::{FormatOptions, Region, create_medium_in_memory};
use permafrost_store::{RegionLocation, Store, StoreError, StoreParts};

pub(crate) use self::content::{Pages, Whole, dump, images, page, request, send};
pub(crate) use self::registry::FakeRegistry;
pub(crate) use self::wire::Seen;
use permafrost_store::SessionError;

use self::wire::Wire;

pub(crate) const REGION_BYTES: u64 = 16 << 20;
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Step of a dump at which a fault can be injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Close,
    Prepare,
    Reserve,
    /// Before the copy of that number is committed; the number of copies stands for the step after the last.
    Commit(usize),
    /// After the origin has sealed its own, between the first copy and the second.
    SealedHere,
    BeforePublish,
    AfterPublish,
    Published,
}

/// Faults to inject. Each stays until it is cleared.
#[derive(Default)]
pub(crate) struct Faults {
    /// Step at which the origin's thread dies.
    pub(crate) die_at: Option<Step>,
    /// Copies that fail from the first page on.
    pub(crate) broken: HashSet<usize>,
    /// Copies in which one bit of the first page is flipped.
    pub(crate) corrupt: HashSet<usize>,
    /// Error with which publishing fails without an effect.
    pub(crate) refuse_publish: Option<fn() -> StoreError>,
    /// The registry publishes, and its reply is lost.
    pub(crate) lose_answer: bool,
    /// The registry answers publications only.
    pub(crate) silent: bool,
}

pub(crate) fn unavailable() -> StoreError {
    StoreError::ReadOnly {
        reason: "the registry does not answer".to_owned(),
    }
}

pub(crate) fn fenced() -> StoreError {
    SessionError::Over.into()
}

#[derive(Clone, Default)]
pub(crate) struct Shared(Arc<Mutex<Faults>>);

impl Shared {
    pub(crate) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.0.lock()
    }

    fn pass(&self, step: Step) {
        let die = self.faults().die_at == Some(step);
        assert!(!die, "the origin dies at {step:?}");
    }
}

/// A node with a store of its own.
pub(crate) struct Node {
    pub(crate) store: Arc<ClusteredStore>,
    _dir: tempfile::TempDir,
}

impl Node {
    pub(crate) fn new(services: Option<ClusterServices>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let medium = create_medium_in_memory(REGION_BYTES).unwrap();
        let options = FormatOptions {
            segment_bytes: 64 << 10,
            ..FormatOptions::default()
        };
        Region::format(Arc::clone(&medium), &options).unwrap();
        let guarantee = medium.guarantee().clone();
        let region = Region::open(medium).unwrap().0;
        let (catalog, _) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        let place = RegionLocation {
            path: PathBuf::from("memory"),
            guarantee,
        };
        let local = Store::new(StoreParts::new(region, place, Box::new(catalog))).unwrap();
        let store = ClusteredStore::new(local, services, Arc::new(()));
        Self { store, _dir: dir }
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.store.local().region().usage().free_bytes
    }

    pub(crate) fn checkpoints(&self) -> usize {
        self.store.local().region().checkpoints().len()
    }
}

/// One origin, several replicas, a registry.
pub(crate) struct World {
    pub(crate) origin: Node,
    pub(crate) replicas: Vec<Arc<Node>>,
    pub(crate) registry: Arc<FakeRegistry>,
    pub(crate) faults: Shared,
    wire: Arc<Wire>,
}

impl World {
    pub(crate) fn new(replicas: usize, durability: Durability) -> Self {
        let faults = Shared::default();
        let registry = Arc::new(FakeRegistry {
            faults: faults.clone(),
            state: Mutex::default(),
        });
        let services = |node: String, replicate, wanted_copies| ClusterServices {
            node,
            registry: Arc::clone(&registry) as Arc<dyn Registry>,
            replicate,
            remote: None,
            durability,
            deadline: DEADLINE,
            wanted_copies,
        };
        let replica = |n| Arc::new(Node::new(Some(services(name(n), None, 1))));
        let replicas: Vec<_> = (0..replicas).map(replica).collect();
        let wire = Arc::new(Wire {
            replicas: Mutex::new(replicas.clone()),
            faults: faults.clone(),
            seen: Arc::default(),
        });
        let replicate = Some(Arc::clone(&wire) as Arc<dyn Replicate>);
        let copies = u32::try_from(replicas.len() + 1).unwrap();
        let origin = Node::new(Some(services("origin".to_owned(), replicate, copies)));
        Self {
            origin,
            replicas,
            registry,
            faults,
            wire,
        }
    }

    /// Replaces a replica by a node with an empty store.
    pub(crate) fn replace(&mut self, n: usize) {
        self.replicas[n] = Arc::new(Node::new(None));
        self.wire.replicas.lock()[n] = Arc::clone(&self.replicas[n]);
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        std::iter::once(&self.origin).chain(self.replicas.iter().map(|node| &**node))
    }

    /// Returns what went over the wire since the last call.
    pub(crate) fn seen(&self) -> Seen {
        std::mem::take(&mut self.wire.seen.lock())
    }
}

pub(crate) fn name(n: usize) -> String {
    format!("replica-{n}")
}
