//! Pulls a checkpoint from another node: fetches it, compares its digest, and seals it here under the same id.

mod intake;
mod pages;

use permafrost_store::MissingObject;
use permafrost_store::ReadingError;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use permafrost_metering::copying::{Pulls, RunningPull};
use permafrost_metering::costs::Costs;
use permafrost_protocol::PAGE_BYTES;
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::message::{Commit, request};
use permafrost_store::{ContentDigest, CopyDump, CopyRequest, Store, StoreError};
use permafrost_transport::peer::{FetchReader, Network};

use self::intake::{Failure, Intake};
use crate::error::CopyingError;
use permafrost_metering::throttle::Throttle;

/// Longest time for a node to agree to a fetch: it may have to compute the digest of a checkpoint of an old
/// format.
const OPENING: Duration = Duration::from_secs(20);

/// Longest wait of a pull for another pull of the same checkpoint.
const PATIENCE: Duration = Duration::from_secs(10);

/// Maximum number of nodes that one pull asks.
const MAX_SOURCES: usize = 64;

/// Carries out [`request::Pull`]. A node has one; each pull under way takes a few frames of memory.
pub struct Puller {
    store: Arc<Store>,
    network: Network,
    node: String,
    throttle: Arc<Throttle>,
    costs: Arc<Costs>,
    under_way: UnderWay,
    pulls: Arc<Pulls>,
}

impl Puller {
    /// Creates a puller into `store`, over `network`; `node` is this node's name, which is never asked. Links are
    /// measured in `costs`.
    #[must_use]
    pub fn new(
        store: Arc<Store>,
        network: Network,
        node: &str,
        throttle: Arc<Throttle>,
        costs: Arc<Costs>,
    ) -> Self {
        Self {
            store,
            network,
            node: node.to_owned(),
            throttle,
            costs,
            under_way: UnderWay::default(),
            pulls: Arc::default(),
        }
    }

    /// Returns the pulls that run.
    #[must_use]
    pub fn pulls(&self) -> &Pulls {
        &self.pulls
    }

    /// Pulls a checkpoint from the first of the nodes that has it whole, and seals it here: published if the
    /// request says so, else provisional. A checkpoint that is already here is returned, unless it is known to be
    /// damaged: then it is replaced as by [`Puller::pull_again`]. Blocks for as long as the transfer takes; not to
    /// be called on a thread of the runtime.
    ///
    /// A copy that refers to pages of a parent here reads them first: if one is damaged, everything is fetched.
    ///
    /// # Errors
    /// [`ErrorCode::Unavailable`] with the answer of each node, when none has the checkpoint whole and with the
    /// requested content; [`ErrorCode::Conflict`] when it is being pulled already, or is here with another
    /// content; it is here, damaged, and no other node was named; the region is full or fails; the node stops.
    /// Nothing is left behind.
    pub fn pull(&self, request: &request::Pull) -> Result<control::Checkpoint, StoreError> {
        let _turn = self.under_way.begin(&request.checkpoint)?;
        let damage = self.store.damage(&request.checkpoint);
        let damage = damage.filter(|_| self.store.holds(&request.checkpoint));
        let record = match (self.held(request)?, damage) {
            (Some(held), None) => held,
            (Some(held), Some(damage)) if !self.has_source(request) => {
                return Err(ReadingError::Damaged {
                    name: held.id,
                    damage,
                }
                .into());
            }
            (held, _) => self.pull_from_any(request, held.is_some())?,
        };
        if request.published {
            self.store.publish(&record.id)?;
        }
        Ok(record)
    }

    fn has_source(&self, request: &request::Pull) -> bool {
        request.from.iter().any(|node| *node != self.node)
    }

    /// Pulls a fresh copy of a checkpoint that is damaged here, reusing intact pages of its parent. The copy
    /// replaces the damaged one at the instant in which it is sealed: at every moment one of them is here. Marks
    /// and pin stay.
    ///
    /// # Errors
    /// Those of [`Puller::pull`]; it is not here. The damaged copy is as it was.
    pub fn pull_again(&self, request: &request::Pull) -> Result<control::Checkpoint, StoreError> {
        let _turn = self.under_way.begin(&request.checkpoint)?;
        if !self.store.holds(&request.checkpoint) {
            return Err(StoreError::NotFound(MissingObject::Checkpoint(
                request.checkpoint.clone(),
            )));
        }
        let sealed = self.pull_from_any(request, true)?;
        if request.published {
            self.store.publish(&sealed.id)?;
        }
        Ok(sealed)
    }

    /// Returns the checkpoint if it is already here with the requested content.
    fn held(&self, request: &request::Pull) -> Result<Option<control::Checkpoint>, StoreError> {
        let held = match self.store.open_fetch(&request.checkpoint, "") {
            Ok(held) => held,
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        if !request.content_digest.is_empty() && held.content_digest() != *request.content_digest {
            return Err(CopyingError::OtherContent {
                id: request.checkpoint.clone(),
            }
            .into());
        }
        Ok(Some(held.checkpoint().clone()))
    }

    fn pull_from_any(
        &self,
        request: &request::Pull,
        again: bool,
    ) -> Result<control::Checkpoint, StoreError> {
        let mut said = Vec::new();
        let sources = request.from.iter().filter(|node| **node != self.node);
        for node in sources.take(MAX_SOURCES) {
            let mut pulled = self.pull_from(request, node, &request.parent, again);
            if let Err(Failure::Parent(error)) = &pulled {
                tracing::warn!(event = "repair-pull-without-parent", id = %request.checkpoint, %error, "pulled without its parent");
                pulled = self.pull_from(request, node, "", again);
            }
            match pulled {
                Ok(sealed) => {
                    tracing::info!(event = "repair-pulled", id = %sealed.id, job = %sealed.job, from = %node, "pulled");
                    return Ok(sealed);
                }
                Err(Failure::Own(error) | Failure::Parent(error)) => return Err(error),
                Err(Failure::Source(why)) => {
                    tracing::warn!(event = "repair-pull-failed", id = %request.checkpoint, from = %node, %why, "not pulled");
                    said.push(why);
                }
            }
        }
        Err(CopyingError::NotPulled {
            id: request.checkpoint.clone(),
            reasons: said,
        }
        .into())
    }

    fn pull_from(
        &self,
        request: &request::Pull,
        node: &str,
        parent: &str,
        again: bool,
    ) -> Result<control::Checkpoint, Failure> {
        // The parent is held open while the checkpoint is fetched: it may be removed meanwhile.
        let is_whole = self.store.holds(parent) && self.store.damage(parent).is_none();
        let parent = if is_whole { parent } else { "" };
        let fetch = request::Fetch {
            checkpoint: request.checkpoint.clone(),
            parent: parent.to_owned(),
            background: request.background,
            ..request::Fetch::default()
        };
        let deadline = Instant::now() + OPENING;
        let reader = FetchReader::open(&self.network, node, fetch, deadline)
            .map_err(|error| Failure::Source(error.to_string()))?;
        let opened = reader.opened();
        let claimed: ContentDigest = (&*opened.content_digest)
            .try_into()
            .map_err(|_| Failure::source(node, "no content digest"))?;
        if !request.content_digest.is_empty() && request.content_digest != claimed {
            return Err(Failure::source(node, "has other content than is listed"));
        }
        let manifest = opened.manifest.clone().unwrap_or_default();
        let commit = commit_of(&request.checkpoint, &manifest, claimed);
        let mut dump = self.open(&manifest, parent)?;
        if request.background {
            dump.in_background();
        }
        let throttle = request.background.then_some(&*self.throttle);
        let mut intake = Intake::new(node, dump, throttle);
        let progress = self.pulls.begin(RunningPull {
            job: manifest.job.clone(),
            generation: manifest.generation,
            from: node.to_owned(),
            memory_bytes: (manifest.spaces.iter())
                .fold(0_u64, |sum, space| sum.saturating_add(space.pages))
                .saturating_mul(PAGE_BYTES),
            background: request.background,
            ..RunningPull::default()
        });
        let (since, mut bytes) = (Instant::now(), 0);
        for frame in reader {
            if self.throttle.is_stopped() {
                return Err(Failure::Own(CopyingError::Stopping.into()));
            }
            let frame = frame.map_err(|error| Failure::Source(error.to_string()))?;
            let moved_bytes = frame.payload.len() as u64;
            bytes += moved_bytes;
            progress.told(u64::from(frame.header.pages) * PAGE_BYTES, moved_bytes);
            intake.take(&frame)?;
        }
        let elapsed = since.elapsed();
        let mut dump = intake.finish(claimed)?;
        // In the background the rate was limited, so that it does not measure the link.
        if !request.background {
            self.costs.copied(node, bytes, elapsed);
        }
        let sealed = if again {
            dump.commit_again(&commit)
        } else {
            dump.commit(&commit)
        };
        if sealed.is_ok() && again {
            self.store.lift(&request.checkpoint);
        }
        sealed.map_err(Failure::Own)
    }

    fn open(&self, manifest: &Manifest, parent: &str) -> Result<CopyDump, Failure> {
        let session = if manifest.session.is_empty() {
            [0; 16]
        } else {
            uuid::Uuid::try_parse(&manifest.session)
                .map_err(|error| Failure::Source(format!("its session: {error}")))?
                .into_bytes()
        };
        let request = CopyRequest {
            session,
            job: manifest.job.clone(),
            parent: parent.to_owned(),
            // The holder decides which pages are in the parent, and compares by pids alone.
            compared: HashMap::new(),
        };
        self.store.open_copy(request).map_err(Failure::Own)
    }
}

/// Returns the commit under which a copy of a sealed checkpoint is sealed.
fn commit_of(id: &str, manifest: &Manifest, digest: ContentDigest) -> Commit {
    Commit {
        deadline_ms: manifest.commit_deadline_ms,
        checkpoint: id.to_owned(),
        content_digest: digest.to_vec(),
        job: manifest.job.clone(),
        generation: manifest.generation,
        parent_generation: manifest.parent_generation,
        created_unix_ms: manifest.created_unix_ms,
        kind: manifest.kind,
        origin: manifest.origin.clone(),
        session: manifest.session.clone(),
        taken_by: manifest.taken_by.clone(),
    }
}

/// Checkpoints that are being pulled, each by one thread.
#[derive(Default)]
struct UnderWay {
    ids: Mutex<HashSet<String>>,
    ended: Condvar,
}

/// Exclusive right to pull a checkpoint.
struct Turn<'a> {
    under_way: &'a UnderWay,
    id: String,
}

impl UnderWay {
    fn begin(&self, id: &str) -> Result<Turn<'_>, StoreError> {
        let taken = |ids: &mut HashSet<String>| ids.contains(id);
        let mut ids = self.ids();
        self.ended.wait_while_for(&mut ids, taken, PATIENCE);
        if ids.contains(id) {
            return Err(CopyingError::PullUnderWay { id: id.to_owned() }.into());
        }
        ids.insert(id.to_owned());
        Ok(Turn {
            under_way: self,
            id: id.to_owned(),
        })
    }

    fn ids(&self) -> MutexGuard<'_, HashSet<String>> {
        self.ids.lock()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.under_way.ids().remove(&self.id);
        self.under_way.ended.notify_all();
    }
}
