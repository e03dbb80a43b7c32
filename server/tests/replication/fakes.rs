//! Nodes, a wire and a registry, with faults on demand.

mod content;
mod registry;
mod wire;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use permafrost_pmem::{FormatOptions, Region, create_medium_in_memory};
use permafrost_store::catalog::SledCatalog;
use permafrost_store::{
    ClusterServices, Durability, RegionLocation, Registry, Replicate, Store, StoreError, StoreParts,
};

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
    pub(crate) store: Arc<Store>,
    _dir: tempfile::TempDir,
}

impl Node {
    pub(crate) fn new() -> Self {
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
        let store = Store::new(StoreParts::new(region, place, Box::new(catalog))).unwrap();
        Self { store, _dir: dir }
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.store.region().usage().free_bytes
    }

    pub(crate) fn checkpoints(&self) -> usize {
        self.store.region().checkpoints().len()
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
        let replicas: Vec<_> = (0..replicas).map(|_| Arc::new(Node::new())).collect();
        let registry = Arc::new(FakeRegistry {
            faults: faults.clone(),
            state: Mutex::default(),
        });
        let wire = Arc::new(Wire {
            replicas: Mutex::new(replicas.clone()),
            faults: faults.clone(),
            seen: Arc::default(),
        });
        let origin = Node::new();
        assert!(origin.store.join(ClusterServices {
            node: "origin".to_owned(),
            replicate: Some(Arc::clone(&wire) as Arc<dyn Replicate>),
            registry: Some(Arc::clone(&registry) as Arc<dyn Registry>),
            durability,
            deadline: DEADLINE,
            wanted_copies: u32::try_from(replicas.len() + 1).unwrap(),
        }));
        for (n, replica) in replicas.iter().enumerate() {
            replica.store.join(ClusterServices {
                node: name(n),
                replicate: None,
                registry: Some(Arc::clone(&registry) as Arc<dyn Registry>),
                durability,
                deadline: DEADLINE,
                wanted_copies: 1,
            });
        }
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
        self.replicas[n] = Arc::new(Node::new());
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
