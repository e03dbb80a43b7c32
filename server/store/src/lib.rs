//! The store: sessions that become checkpoints of jobs, over one region and its catalog.
//!
//! Everything here blocks: callers are threads of their own, one for each connection.

#![forbid(unsafe_code)]

mod adopt;
mod checking;
mod clean;
pub mod clock;
mod cooling;
mod copy;
mod counters;
mod digest;
mod dump;
mod error;
mod evidence;
mod expiry;
mod export;
mod fetch;
mod images;
mod import;
mod in_use;
mod inspect;
mod jobs;
mod keys;
mod measured;
mod media;
mod opening;
mod parked;
mod ports;
pub mod private;
mod provisional;
mod quarantine;
mod reader;
mod seal;
mod session;
mod sharing;
mod stream;
mod usage;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use permafrost_cooling::CoolingRules;
use permafrost_parking::{ParkedQuota, ParkedTimes};
use permafrost_pmem::{ATTR_PINNED, CheckpointId, Guarantee, KeyId, Region, Shadow};
use permafrost_protocol::control;
use permafrost_protocol::manifest::{
    JobName, Kind, Manifest, Origin, check_restore_options, namespace_of,
};
use permafrost_retention::Newest;
use permafrost_sharing::SharedPages;

use self::jobs::JobLocks;
use permafrost_catalog::{
    Catalog, CatalogError, Counted, NamespaceSums, PRE_COPY, add_missing, remove_stale,
};
use permafrost_quotas::Quotas;

pub use adopt::Adoption;
pub use checking::{Checked, ColdPages, DamagedPage, HeldCheckpoint, Object, PagesRead};
pub use copy::{CopyDump, CopyRequest};
pub use counters::{BOUNDS_S, Counter, Counters, Timings};
pub use digest::{ContentDigest, of_whole as digest_of};
pub use dump::Parent;
pub use error::{
    CopyError, ImagesError, KeyRequestError, MissingObject, PortError, ReadingError,
    RegionMediaError, SealingError, SessionError, StoreError,
};
pub use expiry::Retention;
pub use fetch::{Fetch, Fetched, FetchedRuns};
pub use images::SmallImages;
pub use import::DirectoryImport;
pub use jobs::JobGuard;
pub use measured::Restoring;
pub use opening::Opening;
pub use permafrost_criu::ProgressReceiver;
pub use ports::{
    Beginning, DataKeys, DumpDone, DumpTap, Expected, Follower, NamespaceKey, Observer, Ongoing,
    RestoreDone, StoreEvent, TransferSlot, Transferred, Unobserved,
};
pub use provisional::{Holding, PublicationState};
pub use reader::{LocalCheckpoint, check_listed_as, checkpoint_name};
pub use seal::{DumpContents, Numbering, PreparedDump, check_wanted};
pub use session::{Session, SessionRequest, SessionSink};

/// Maximum number of failed sessions that `permafrost status` can show.
const MAX_FAILED_SESSIONS: usize = 64;

/// A page of a region holds a page of an image: neither crate uses the other.
const _: () = assert!(permafrost_pmem::PAGE_SIZE == permafrost_protocol::PAGE_SIZE);

/// Location of the region, and the guarantee of its medium.
pub struct RegionLocation {
    /// Path of the region.
    pub path: PathBuf,
    /// Durability guarantee of the medium.
    pub guarantee: Guarantee,
}

/// Everything that a store is made of.
pub struct StoreParts {
    /// Region that holds the checkpoints.
    pub region: Arc<Region>,
    /// Location of the region.
    pub place: RegionLocation,
    /// Index of the region.
    pub catalog: Box<dyn Catalog>,
    /// Retention times and limits of what is not sealed for a job.
    pub retention: Retention,
    /// File that retention times of parked checkpoints are saved in. Default `None`: a restart begins them anew.
    pub parked_file: Option<PathBuf>,
    /// Measures dumps and restores. Default [`Unobserved`].
    pub observer: Arc<dyn Observer>,
    /// Limits of namespaces. Default none.
    pub quotas: Arc<Quotas>,
    /// Rules by which segments move to slower tiers.
    pub cooling: CoolingRules,
    /// Namespaces whose jobs share equal pages. Default none.
    pub sharing: SharedPages,
    /// Keys that new checkpoints are encrypted with. Default `None`: they are not.
    pub keys: Option<Arc<dyn DataKeys>>,
}

impl StoreParts {
    /// Returns the parts of a store that nothing measures or limits, with the default retention.
    #[must_use]
    pub fn new(region: Arc<Region>, place: RegionLocation, catalog: Box<dyn Catalog>) -> Self {
        Self {
            region,
            place,
            catalog,
            retention: Retention::default(),
            parked_file: None,
            observer: Arc::new(Unobserved),
            quotas: Arc::default(),
            cooling: CoolingRules::default(),
            sharing: SharedPages::default(),
            keys: None,
        }
    }
}

/// A store of checkpoints over one region and its catalog.
pub struct Store {
    region: Arc<Region>,
    place: RegionLocation,
    catalog: Box<dyn Catalog>,
    /// Stored bytes and checkpoints of each namespace.
    stored: Arc<NamespaceSums>,
    jobs: JobLocks,
    sessions: Mutex<HashMap<String, Arc<Session>>>,
    /// Times for which parked checkpoints have been kept.
    parking: ParkedTimes,
    /// Limits the space that anonymous dumps take.
    anonymous: Arc<ParkedQuota>,
    /// Provisional checkpoints by id, and the time at which this daemon first saw each.
    provisional_since: Mutex<HashMap<String, Instant>>,
    index: Mutex<Index>,
    retention: Retention,
    /// Checkpoints that are being read.
    reads: Arc<in_use::Reads>,
    /// Number of copies of dumps that are being received.
    copies_coming: copy::Coming,
    cleaning: clean::CleaningState,
    cooling: cooling::CoolingState,
    quarantine: quarantine::Quarantine,
    counters: Arc<Counters>,
    observer: Arc<dyn Observer>,
    quotas: Arc<Quotas>,
    sharing: SharedPages,
    /// Set once the checkpoints of earlier times are noted.
    sharing_known: OnceLock<()>,
    keys: Option<Arc<dyn DataKeys>>,
    /// Ids of rounds of pre-copies whose clients were connected to a daemon before this one. Set after the catalog.
    left_rounds: OnceLock<HashSet<String>>,
}

impl Store {
    /// Opens the store over an open region, and makes the catalog agree with it.
    ///
    /// Cost: a pass over the catalog, and a manifest read for every checkpoint that the catalog lacks. The observer
    /// learns from the newest checkpoints.
    ///
    /// # Errors
    /// The catalog cannot be read or written. A checkpoint whose manifest is damaged is logged and not listed.
    pub fn new(parts: StoreParts) -> Result<Arc<Self>, StoreError> {
        let StoreParts {
            region,
            place,
            catalog,
            retention,
            parked_file,
            observer,
            quotas,
            cooling,
            sharing,
            keys,
        } = parts;
        let mut truth: Vec<(String, bool)> = region
            .listed()
            .iter()
            .map(|c| (c.id.to_string(), c.attrs & ATTR_PINNED != 0))
            .collect();
        let half = region.usage().capacity_bytes / 2;
        let gone = gone(&region, &*catalog)?;
        truth.extend(gone.iter().map(|(id, pinned, _)| (id.clone(), *pinned)));
        let catalog = Counted::new(catalog);
        let mut newest = Newest::default();
        let (removed, missing) = remove_stale(catalog.inner(), &truth, |record, before| {
            catalog.count(record, before);
            newest.add(record);
        })?;
        observer.learn_history(&newest.into_records());
        let store = Self {
            cleaning: clean::CleaningState::of(&region),
            region,
            place,
            stored: catalog.sums(),
            catalog: Box::new(catalog),
            jobs: JobLocks::default(),
            sessions: Mutex::default(),
            parking: ParkedTimes::new(parked_file),
            anonymous: ParkedQuota::new(retention.parked_bytes.unwrap_or(half)),
            provisional_since: Mutex::default(),
            index: Mutex::default(),
            retention,
            reads: Arc::default(),
            copies_coming: copy::Coming::default(),
            quarantine: quarantine::Quarantine::default(),
            cooling: cooling::CoolingState::new(cooling),
            counters: Arc::default(),
            observer,
            quotas,
            sharing,
            sharing_known: OnceLock::new(),
            keys,
            left_rounds: OnceLock::new(),
        };
        for (id, _, reason) in gone {
            store.set_aside_gone(id, reason);
        }
        let done = add_missing(&*store.catalog, &truth, &missing, |id| {
            let checkpoint = store.checkpoint(id)?;
            let manifest = manifest_of(&checkpoint)?;
            Ok::<_, StoreError>(store.summary(&checkpoint, &manifest))
        })?;
        let changed = removed + done.changed;
        if changed > 0 {
            tracing::info!(
                event = "catalog-reconciled",
                changed,
                "catalog made to agree with the region"
            );
        }
        for (id, error) in &done.unreadable {
            if let Some(key) = store.locked(id) {
                tracing::error!(event = "checkpoint-locked", %id, %key, "checkpoint is locked: its key is not here");
                let reason = format!("locked: it is encrypted with key {key}, which is not here");
                store.set_aside_gone(id.clone(), reason);
                continue;
            }
            let error = error as &dyn std::error::Error;
            tracing::error!(event = "damage-found-at-opening", %id, error, "checkpoint is damaged and not listed; it stays in the region");
        }
        for hidden in &done.hidden {
            let (id, by) = (&hidden.id, &hidden.by);
            let (job, generation) = (&hidden.job, hidden.generation);
            tracing::error!(event = "checkpoint-number-taken", %id, %by, job, generation, "checkpoint is not listed: a later one has its number; it stays in the region");
        }
        let rounds = (store.stored.rounds().into_iter()).map(|round| round.id);
        let left = rounds.filter(|id| store.had_its_connection(id));
        let _ = store.left_rounds.set(left.collect());
        Ok(Arc::new(store))
    }

    /// Begins a shadow for a checkpoint of a job; of none for a dump that has no name yet. It is encrypted if there are
    /// keys.
    fn begin_shadow(&self, job: &str) -> Result<Shadow, StoreError> {
        let namespace = match job {
            "" => "",
            job => namespace_of(job).unwrap_or_default(),
        };
        let keys = self.keys.as_ref();
        let key = keys.map(|keys| keys.key_for(namespace)).transpose()?;
        Ok(self.region.begin_encrypted(key)?)
    }

    /// Returns the key that is missing to read a checkpoint's manifest.
    fn locked(&self, id: &str) -> Option<KeyId> {
        let checkpoint = self.checkpoint(id).ok()?;
        checkpoint.manifest().err()?.locked()
    }

    /// Returns the region.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Returns the counters of the store's work.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Returns the location of the region, and the guarantee of its medium.
    #[must_use]
    pub fn place(&self) -> &RegionLocation {
        &self.place
    }

    /// Fails while the region takes no writes.
    ///
    /// # Errors
    /// [`StoreError::ReadOnly`].
    pub fn check_writable(&self) -> Result<(), StoreError> {
        match self.region.failure() {
            None => Ok(()),
            Some(failure) => Err(StoreError::ReadOnly {
                reason: failure.to_string(),
            }),
        }
    }

    /// Returns true if a dump or a copy of one is being received: work that can wait then waits. Costs a lock and a
    /// check of each session.
    #[must_use]
    pub fn is_receiving(&self) -> bool {
        self.copies_coming.any() || self.sessions().values().any(|session| session.is_taking())
    }

    /// Returns the states of the sessions that are not sealed.
    #[must_use]
    pub fn session_states(&self) -> Vec<control::SessionStatus> {
        let mut states: Vec<_> = self
            .sessions()
            .values()
            .map(|session| session.status())
            .collect();
        states.sort_by(|a, b| {
            b.age_s
                .cmp(&a.age_s)
                .then_with(|| a.session.cmp(&b.session))
        });
        states
    }

    /// Makes the catalog durable and marks the region clean. Called once, when the store takes no more sessions.
    ///
    /// # Errors
    /// The catalog or the medium fails.
    pub fn close(&self) -> Result<(), StoreError> {
        self.parking.save();
        // Threads that still serve a client keep the catalog from being dropped, which would flush it.
        let flushed = self.catalog.flush();
        // A failing index is no reason to leave the region marked as crashed.
        self.region.close()?;
        Ok(flushed?)
    }

    pub(crate) fn sessions(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.sessions.lock()
    }

    fn checkpoint(&self, id: &str) -> Result<Arc<permafrost_pmem::StoredCheckpoint>, StoreError> {
        let missing = || StoreError::NotFound(MissingObject::Checkpoint(id.to_owned()));
        let id: CheckpointId = id.parse().map_err(|_| missing())?;
        self.region.checkpoint(id).ok_or_else(missing)
    }

    fn summary(
        &self,
        checkpoint: &permafrost_pmem::StoredCheckpoint,
        manifest: &Manifest,
    ) -> control::Checkpoint {
        let page = permafrost_pmem::PAGE_SIZE as u64;
        let sum = |of: fn(&permafrost_protocol::manifest::AddressSpace) -> u64| {
            let pages = manifest.spaces.iter().map(of);
            pages.fold(0, u64::saturating_add).saturating_mul(page)
        };
        let processes = manifest
            .spaces
            .iter()
            .filter(|space| space.space_type == 0)
            .count();
        control::Checkpoint {
            job: manifest.job.clone(),
            generation: manifest.generation,
            id: checkpoint.id().to_string(),
            kind: kind_name(manifest.kind()).to_owned(),
            created_unix_ms: manifest.created_unix_ms,
            memory_bytes: sum(|space| space.pages),
            added_bytes: manifest.added_bytes,
            pinned: checkpoint.attrs() & ATTR_PINNED != 0,
            processes: u32::try_from(processes).unwrap_or(u32::MAX),
            session: manifest.session.clone(),
            // Set when the checkpoint is listed: see `Store::with_state`.
            expires_unix_ms: 0,
            parent_generation: manifest.parent_generation,
            parent_bytes: sum(|space| space.parent_pages),
            zero_bytes: sum(|space| space.zero_pages),
            nodes: Vec::new(),
            copies_wanted: 0,
            damaged_nodes: Vec::new(),
            cold: Vec::new(),
            damaged: String::new(),
            work: manifest.origin.as_ref().and_then(control::Work::of),
            parked_processes: parked::processes_of(manifest),
        }
    }

    /// Removes a checkpoint from the region, then from the catalog. In between, the catalog names a missing
    /// checkpoint, which reads as "not found" and is repaired here or at the next start.
    ///
    /// # Errors
    /// The journal or the catalog cannot be written.
    pub fn delete(&self, record: &control::Checkpoint) -> Result<(), StoreError> {
        let _index = self.index();
        let id = record.id.parse::<CheckpointId>();
        if let Some(id) = id.ok().filter(|&id| self.region.lists(id)) {
            self.region.delete(id)?;
            self.catalog.remove(record)?;
        } else if self
            .catalogued(record)?
            .is_some_and(|found| found.id == record.id)
        {
            self.catalog.remove(record)?;
        }
        self.forget_gone(&record.id);
        self.parking.forget(&record.id);
        self.observer.tell(&|| StoreEvent::Removed {
            job: record.job.clone(),
            generation: record.generation,
            id: record.id.clone(),
        });
        Ok(())
    }

    /// Locks region and catalog together, so that both change in the same order.
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock()
    }
}

/// Lists the checkpoints that are known and cannot be read: ids, true if pinned, and the reason. These are
/// checkpoints whose root is damaged; and, where the journal is damaged and the region therefore read-only,
/// those that the catalog has and the journal lacks.
fn gone(
    region: &Region,
    catalog: &dyn Catalog,
) -> Result<Vec<(String, bool, String)>, CatalogError> {
    let mut gone: Vec<_> = region
        .damaged()
        .into_iter()
        .map(|damaged| {
            let pinned = damaged.attrs & ATTR_PINNED != 0;
            (damaged.id.to_string(), pinned, damaged.reason.to_string())
        })
        .collect();
    if region.journal_damage().is_some() && region.failure().is_some() {
        for record in catalog.list(None)? {
            if !record.id.parse().is_ok_and(|id| region.lists(id)) {
                let reason = "lost: the region's journal is damaged".to_owned();
                gone.push((record.id, record.pinned, reason));
            }
        }
    }
    Ok(gone)
}

/// Lock over region and catalog; `lost` is true if the catalog cannot be trusted to give out numbers.
#[derive(Default)]
struct Index {
    lost: bool,
}

impl Index {
    fn check(&self) -> Result<(), StoreError> {
        if self.lost {
            return Err(StoreError::CatalogIncomplete);
        }
        Ok(())
    }

    fn lost_track(&mut self, error: &CatalogError) {
        tracing::error!(event = "catalog-lacks-checkpoint", %error, "the catalog lacks a checkpoint; nothing is sealed until permafrostd is restarted");
        self.lost = true;
    }
}

/// Forgets the oldest failed sessions. They are kept for people to see, but a client that sends garbage for
/// hours must not fill the memory.
fn forget_old_failures(sessions: &mut HashMap<String, Arc<Session>>) {
    let mut failed: Vec<_> = sessions
        .values()
        .filter_map(|session| Some((session.failed_since()?, session.id.clone())))
        .collect();
    if failed.len() >= MAX_FAILED_SESSIONS {
        failed.sort_unstable();
        sessions.remove(&failed[0].1);
    }
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Full => "full",
        Kind::PreDump => "pre-dump",
        Kind::PreCopy => PRE_COPY,
        Kind::Parked => "parked",
    }
}

fn manifest_of(
    checkpoint: &Arc<permafrost_pmem::StoredCheckpoint>,
) -> Result<Manifest, StoreError> {
    let id = checkpoint.id();
    let bytes = checkpoint
        .manifest()
        .map_err(|source| ReadingError::Corrupt {
            part: format!("manifest of {id}"),
            source,
        })?;
    Manifest::decode_checked(&bytes).map_err(|source| ReadingError::Manifest { id, source }.into())
}

/// Returns `job` as a valid job name.
///
/// # Errors
/// The name is invalid, or empty.
pub fn job_name(job: &str) -> Result<JobName, StoreError> {
    job.parse().map_err(|source| {
        SessionError::JobName {
            job: job.to_owned(),
            source,
        }
        .into()
    })
}

fn check_job(job: &str) -> Result<(), StoreError> {
    job_name(job).map(drop)
}

/// Refuses an origin that a restore must not repeat. Otherwise the error would come when the manifest is
/// written; here the task still runs.
fn check_origin(origin: Option<&Origin>) -> Result<(), StoreError> {
    let recorded = origin.map_or(&[][..], |origin| &origin.restore_options);
    check_restore_options(recorded).map_err(|error| SessionError::from(error).into())
}
