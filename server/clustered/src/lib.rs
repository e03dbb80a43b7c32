//! The checkpoints of a node: its own store and, in a cluster, those that other nodes hold.
//!
//! ```text
//! daemon, peers, agents, scrub ──▶ ClusteredStore ──▶ Store: sessions, seals and reads of this node's region
//!                                       │
//!                                       └─ ClusterServices: Registry, Replicate, RemoteNodes (none on a single node)
//! ```
//!
//! A [`ClusteredStore`] contains the local [`Store`]. It adds the steps that concern other nodes: a job's lock in the
//! registry, the copies of a dump, the two-step commit, reads that fail over to other holders, and the listing of what
//! the nodes hold. On a single node there are no services, and each operation is the local store's.

#![forbid(unsafe_code)]

mod commit;
mod copies;
mod data;
mod failover;
mod listing;
mod registry;
mod remote;
mod retention;
mod room;
mod settle;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use permafrost_protocol::control;
use permafrost_store::{
    Adoption, DirectoryImport, Follower, JobGuard, MissingObject, Parent, ProgressReceiver,
    SealingError, Session, SessionError, SessionRequest, Store, StoreError, TransferSlot, job_name,
};
use uuid::Uuid;

use self::commit::ClusterDump;
use self::room::Room;

pub use copies::{CopiesRequest, CopyStreams, Durability, Replicate, SealHere};
pub use data::{Acquaintance, DataMark, KnownData};
pub use registry::{JobLock, Registered, Registry, no_other};
pub use remote::RemoteNodes;
pub use retention::{
    PolicyFile, PolicyKeeper, PolicyMemory, PolicyUsage, RemovalReceiver, RetentionNumbers,
};
pub use settle::Settled;

/// Services of a cluster that a node uses.
pub struct ClusterServices {
    /// Name of this node.
    pub node: String,
    /// Lists the checkpoints that exist.
    pub registry: Arc<dyn Registry>,
    /// Begins copies of dumps. `None`: nothing is copied while a dump streams.
    pub replicate: Option<Arc<dyn Replicate>>,
    /// Other nodes to read from. `None`: only this node's copies are read.
    pub remote: Option<Arc<dyn RemoteNodes>>,
    /// Durability of a session that requests none.
    pub durability: Durability,
    /// Longest time that CLOSE, and each step of the seal, may wait for copies: the task is frozen meanwhile.
    pub deadline: Duration,
    /// Number of copies that there should be of a checkpoint, this node's included.
    pub wanted_copies: u32,
}

/// Receives the ids of checkpoints that looked damaged to a reader: the scrub, which verifies them next.
pub trait Suspects: Send + Sync {
    /// Makes a checkpoint the next to be verified. Returns at once.
    fn suspect(&self, id: &str);
}

/// Suspects are ignored.
impl Suspects for () {
    fn suspect(&self, _: &str) {}
}

/// The checkpoints of a node and, in a cluster, of the other nodes.
pub struct ClusteredStore {
    local: Arc<Store>,
    /// `None` on a single node.
    services: Option<Arc<ClusterServices>>,
    suspects: Arc<dyn Suspects>,
    retention: retention::Retention,
    /// Memory for those who read contents of checkpoints that this node holds.
    contents_here: Room,
    /// Memory for those who read contents of checkpoints that come from other nodes, which may be slow.
    contents_elsewhere: Room,
}

impl ClusteredStore {
    /// Creates the store of a node of a cluster; without services, that of a single node. Its policies of retention end
    /// with it.
    #[must_use]
    pub fn new(
        local: Arc<Store>,
        services: Option<ClusterServices>,
        suspects: Arc<dyn Suspects>,
    ) -> Arc<Self> {
        let keeper = Box::<PolicyMemory>::default();
        Self::with_policies(local, services, suspects, keeper, Box::new(|_, _| {}))
    }

    /// Creates the store as [`Self::new`] does, with policies of retention that are kept. `removed` is told each
    /// removal by a rule. Policies that cannot be read are logged, and none until they are read again.
    #[must_use]
    pub fn with_policies(
        local: Arc<Store>,
        services: Option<ClusterServices>,
        suspects: Arc<dyn Suspects>,
        keeper: Box<dyn PolicyKeeper>,
        removed: RemovalReceiver,
    ) -> Arc<Self> {
        let store = Arc::new(Self {
            local,
            services: services.map(Arc::new),
            suspects,
            retention: retention::Retention::new(keeper, removed),
            contents_here: Room::default(),
            contents_elsewhere: Room::default(),
        });
        if let Err(error) = store.refresh_policies() {
            tracing::error!(event = "retention-rules-unreadable", %error, "no policies of retention for now");
        }
        store
    }

    /// Returns the store of this node's region.
    #[must_use]
    pub fn local(&self) -> &Arc<Store> {
        &self.local
    }

    /// Returns this node's name in the cluster; `None` without a cluster.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        Some(&self.services.as_ref()?.node)
    }

    fn registry(&self) -> Option<&dyn Registry> {
        Some(&*self.services.as_ref()?.registry)
    }

    fn remote_nodes(&self) -> Option<&Arc<dyn RemoteNodes>> {
        self.services.as_ref()?.remote.as_ref()
    }

    /// Opens a session with the default durability, without a wait.
    ///
    /// # Errors
    /// Those of [`Self::open_session_after`].
    pub fn open_session(&self, request: SessionRequest) -> Result<Arc<Session>, StoreError> {
        self.open_session_after(request, None, || Ok(None))
    }

    /// Opens a session once it is admitted; it takes pages once a connection has been made. `admit` is called after
    /// the job is locked, and may block. The session holds the returned slot until it ends. `durability` must be
    /// reached before CLOSE and the seal are answered; by default that of the cluster's configuration.
    ///
    /// # Errors
    /// The job name is invalid; a dump of the job is open already; the catalog cannot be read; there are not enough
    /// nodes; those of `admit`.
    pub fn open_session_after(
        &self,
        request: SessionRequest,
        durability: Option<Durability>,
        admit: impl FnOnce() -> Result<Option<Box<dyn TransferSlot>>, StoreError>,
    ) -> Result<Arc<Session>, StoreError> {
        let mut opening = self.local.begin_session(&request)?;
        if let Some(lock) = &mut opening.lock {
            self.lock_in_cluster(&request.job, lock)?;
        }
        opening.turn = admit()?;
        // The newest checkpoint at this moment: while its job is locked, only other nodes' repair can have added one.
        if !request.no_parent && !request.job.is_empty() {
            let parent = self.parent_of(&request.job)?;
            opening.parent = parent.map(|parent| parent.knowing(request.origin.as_ref()));
        }
        let parent = opening.parent.as_ref();
        opening.follower = self.follow(opening.id, &request.job, parent, durability)?;
        Ok(self.local.open_session(request, opening))
    }

    /// Begins this node's part of the cluster in a dump; `None` on a single node.
    ///
    /// # Errors
    /// There are not enough nodes: reported now, before the task is frozen. The registry is unavailable.
    fn follow(
        &self,
        session: Uuid,
        job: &str,
        parent: Option<&Parent>,
        durability: Option<Durability>,
    ) -> Result<Option<Box<dyn Follower>>, StoreError> {
        let services = self.services.as_ref();
        let replicate = services.and_then(|services| services.replicate.as_ref());
        if replicate.is_none() && matches!(durability, Some(Durability::Quorum | Durability::All)) {
            return Err(SessionError::NoOtherNode.into());
        }
        let Some(services) = services else {
            return Ok(None);
        };
        let begin = |replicate: &Arc<dyn Replicate>| {
            replicate.begin(CopiesRequest {
                session: *session.as_bytes(),
                job: job.to_owned(),
                parent: parent.map_or_else(String::new, |parent| parent.id().to_string()),
                compared: parent.map_or_else(HashMap::new, |parent| parent.compared().clone()),
                durability: durability.unwrap_or(services.durability),
                deadline: services.deadline,
            })
        };
        let copies = replicate.map(begin).transpose()?;
        // Now, while no task is frozen for it yet.
        let generation = match job.is_empty() {
            true => 0,
            false => services.registry.reserve_generation(job)?,
        };
        Ok(Some(Box::new(ClusterDump {
            services: Arc::clone(services),
            generation,
            copies,
        })))
    }

    /// Returns true if the store is part of a cluster.
    #[must_use]
    pub fn is_clustered(&self) -> bool {
        self.registry().is_some()
    }

    fn lock_job(&self, job: &str, holder: &str) -> Result<JobGuard, StoreError> {
        let mut guard = self.local.lock_job(job, holder)?;
        self.lock_in_cluster(job, &mut guard)?;
        Ok(guard)
    }

    /// Locks a job, which is locked here, on the other nodes, too.
    fn lock_in_cluster(&self, job: &str, guard: &mut JobGuard) -> Result<(), StoreError> {
        if let Some(registry) = self.registry() {
            guard.also(registry.lock_job(job)?);
        }
        Ok(())
    }

    fn parent_of(&self, job: &str) -> Result<Option<Parent>, StoreError> {
        let head = self.head(job)?;
        Ok(head.and_then(|head| self.local.parent(&head)))
    }

    /// Makes a closed session a checkpoint, with the small images of the directory, as
    /// [`Store::seal_session`] does. Sealing again returns the same checkpoint: a caller that lost the reply retries.
    ///
    /// # Errors
    /// Those of [`Store::seal_session`]; there is no such session.
    pub fn seal_session_while(
        &self,
        id: &str,
        images: OwnedFd,
        wanted: &dyn Fn() -> bool,
    ) -> Result<control::Checkpoint, StoreError> {
        if let Some(session) = self.local.session(id) {
            let sealed = self.local.seal_session(&session, images, wanted)?;
            self.note_sealed(&sealed);
            return Ok(sealed);
        }
        if let Some(parked) = self.local.parked(id)? {
            // The session ended with CLOSE; it knows its job.
            let adoption = Adoption {
                session: id,
                ..Adoption::into_job(&parked.job)
            };
            return self.adopt(&adoption, images);
        }
        let mut records = self.local.records(None)?.into_iter();
        let sealed = records.find(|record| record.session == id);
        self.acknowledged(sealed.ok_or_else(|| no_session(id))?)
    }

    /// Seals a session as [`Self::seal_session_while`] does, however long that takes.
    ///
    /// # Errors
    /// Those of [`Self::seal_session_while`].
    pub fn seal_session(
        &self,
        id: &str,
        images: OwnedFd,
    ) -> Result<control::Checkpoint, StoreError> {
        self.seal_session_while(id, images, &|| true)
    }

    /// Gives a parked session a job and its small images: see [`Store::adopt`].
    ///
    /// # Errors
    /// Those of [`Store::adopt`]; the job has a dump under way; the session is parked in a cluster.
    pub fn adopt(
        &self,
        adoption: &Adoption<'_>,
        images: OwnedFd,
    ) -> Result<control::Checkpoint, StoreError> {
        let _guard = self.lock_job(adoption.job, "an adoption")?;
        let adopted = self.local.adopt(adoption, images, |parked| {
            // CopyStreams are sealed on their nodes without images, and no step can add images to them yet.
            if self.services.is_none() && !self.was_committed_here(&parked.id) {
                return Ok(());
            }
            let session = parked.session.clone();
            Err(SealingError::ParkedInCluster { session }.into())
        })?;
        self.note_sealed(&adopted);
        self.acknowledged(adopted)
    }

    /// Reads a CRIU images directory as the next checkpoint of a job: see [`Store::import`].
    ///
    /// # Errors
    /// Those of [`Store::import`]; the job has a dump under way; a quota does not allow it; there are not enough nodes.
    pub fn import(
        &self,
        job: &str,
        no_parent: bool,
        durability: Option<Durability>,
        taken_by: &str,
        directory: OwnedFd,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Checkpoint, StoreError> {
        job_name(job)?;
        self.make_room(job, 0, no_parent)?;
        self.local.check_may_store(job, 1, 1)?;
        let _guard = self.lock_job(job, "an import")?;
        let parent = match no_parent {
            true => None,
            false => self.parent_of(job)?,
        };
        // No frozen task waits for an import, and it has no session: it gets an id for its copies alone.
        let session = Uuid::new_v4();
        let mut follower = self.follow(session, job, parent.as_ref(), durability)?;
        let is_copied = follower.as_mut().is_some_and(|one| one.tap().is_some());
        let import = DirectoryImport {
            job,
            parent,
            follower,
            session: match is_copied {
                true => session.simple().to_string(),
                false => String::new(),
            },
            taken_by,
        };
        let imported = self.local.import(import, directory, progress)?;
        self.note_sealed(&imported);
        Ok(imported)
    }

    /// Discards a session that is not sealed, or a parked one.
    ///
    /// # Errors
    /// There is no session of that name, or it is being sealed.
    pub fn abort_session(&self, id: &str) -> Result<(), StoreError> {
        if self.local.discard_session(id)? {
            return Ok(());
        }
        let parked = self.local.parked(id)?.ok_or_else(|| no_session(id))?;
        if self.is_provisional(&parked.id) {
            let session = id.to_owned();
            return Err(SessionError::BeingListed { session }.into());
        }
        self.delete(&parked)
    }

    /// Discards sessions, parked checkpoints and rounds of pre-copies that have outlived their retention: see
    /// [`Store::expire`].
    pub fn expire(&self) {
        let single_node = !self.is_clustered();
        self.local.expire(single_node, |record| self.delete(record));
    }
}

fn no_session(id: &str) -> StoreError {
    StoreError::NotFound(MissingObject::Session(id.to_owned()))
}
