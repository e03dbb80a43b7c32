//! Seals or parks a closed dump.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use permafrost_pmem::{ATTR_PROVISIONAL, CheckpointId, Shadow};
use permafrost_protocol::control;
use permafrost_protocol::images::ImageName;
use permafrost_protocol::manifest::{
    self, AddressSpace, Image, Kind, Manifest, Origin, namespace_of,
};

use super::dump::{Dump, tap_of};
use super::evidence::process_spaces;
use super::images::{DirectoryImages, SmallImages, store_small};
use super::session::{Sealing, Session};
use super::{Index, Store, StoreError, digest};
use crate::clock::unix_ms;
use crate::reader::checkpoint_name;
use crate::{ContentDigest, Follower, ImagesError, MissingObject, ReadingError, SealingError};

/// Contents of a manifest, apart from the fields that the seal adds.
pub struct DumpContents {
    /// Job; empty for an anonymous dump that is parked.
    pub job: String,
    /// Kind of the checkpoint.
    pub kind: Kind,
    /// Generation that the dump was compared with; 0 for none.
    pub parent_generation: u64,
    /// Facts about the dump's origin.
    pub origin: Option<Origin>,
    /// Small images of the dump, sorted by name.
    pub images: Vec<Image>,
    /// Address spaces with the roots of their maps.
    pub spaces: Vec<AddressSpace>,
    /// Id of the session; empty for none.
    pub session: String,
    /// Client that took the dump; see [`permafrost_protocol::manifest::TakenBy`].
    pub taken_by: String,
}

impl Store {
    /// Makes a closed session a checkpoint, with the small images of the directory, unless `wanted` returns false
    /// before the commit: the caller has stopped waiting. Its freeze has ended, the task runs on, and the checkpoint
    /// would be of a failed dump. When it fails, the session is over and everything it held is free.
    ///
    /// # Errors
    /// The session is not closed, the directory does not fit its pages, the region is full or fails; the caller no
    /// longer waits.
    pub fn seal_session(
        &self,
        session: &Session,
        images: OwnedFd,
        wanted: &dyn Fn() -> bool,
    ) -> Result<control::Checkpoint, StoreError> {
        let images = |spaces: &[AddressSpace]| DirectoryImages::of(images, spaces);
        self.seal_images(session, images, wanted)
    }

    /// Seals a session as [`Store::seal_session`] does, with small images that come one after another. Until the
    /// last of them is received, the session can still be discarded.
    ///
    /// # Errors
    /// Those of [`Store::seal_session`]; there is no such session; the images end early.
    pub fn seal_with(
        &self,
        id: &str,
        images: &mut dyn SmallImages,
    ) -> Result<control::Checkpoint, StoreError> {
        let session = self.sessions().get(id).cloned();
        let session =
            session.ok_or_else(|| StoreError::NotFound(MissingObject::Session(id.to_owned())))?;
        self.seal_images(&session, |_| Ok(images), &|| true)
    }

    fn seal_images<S: SmallImages>(
        &self,
        session: &Session,
        images: impl FnOnce(&[AddressSpace]) -> Result<S, StoreError>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<control::Checkpoint, StoreError> {
        let since = Instant::now();
        let (dump, sealing) = session.begin_seal()?;
        let sealed = images(&dump.spaces)
            .and_then(|mut images| self.seal_dump(session, &sealing, dump, &mut images, wanted))
            .map_err(|error| sealing.explain(error));
        match &sealed {
            Ok(record) => {
                self.measured(session, record);
                sealing.done();
                self.counters.sealed(since, session.age());
                self.sessions().remove(&session.id);
            }
            Err(error) => sealing.failed(error),
        }
        sealed
    }

    fn seal_dump(
        &self,
        session: &Session,
        sealing: &Sealing<'_>,
        dump: Dump,
        images: &mut dyn SmallImages,
        wanted: &dyn Fn() -> bool,
    ) -> Result<control::Checkpoint, StoreError> {
        let Dump {
            mut shadow,
            spaces,
            mut follower,
            ..
        } = dump;
        let images = store_small(images, &mut shadow, tap_of(&mut follower))?;
        sealing.images_are_in()?;
        let kind = match (session.request.pre_copy, session.request.pre_dump) {
            (true, _) => Kind::PreCopy,
            (false, true) => Kind::PreDump,
            (false, false) => Kind::Full,
        };
        check_images_fit(kind, &images, &spaces)?;
        let contents = DumpContents {
            job: session.request.job.clone(),
            kind,
            parent_generation: session.parent_generation,
            origin: session.request.origin.clone(),
            images,
            spaces,
            session: session.id.clone(),
            taken_by: session.taken_by(),
        };
        self.commit(shadow, contents, follower, None, wanted)
    }

    /// Makes the pages of a session that ends with CLOSE durable and findable, for a later adoption.
    pub(super) fn park(&self, session: &Session, dump: Dump) -> Result<(), StoreError> {
        let contents = DumpContents {
            job: session.request.job.clone(),
            kind: Kind::Parked,
            parent_generation: session.parent_generation,
            origin: Some(session.parked_origin(&dump.spaces)),
            images: Vec::new(),
            spaces: dump.spaces,
            session: session.id.clone(),
            taken_by: session.taken_by(),
        };
        let parked = self.commit(dump.shadow, contents, dump.follower, None, &|| true)?;
        tracing::info!(event = "session-parked", session = %parked.session, bytes = parked.memory_bytes, "session parked");
        self.measured(session, &parked);
        self.sessions().remove(&session.id);
        Ok(())
    }

    /// Checks that the quota of the namespace allows the checkpoint that is about to be sealed. A parked one of the
    /// same namespace is counted already.
    fn check_room(
        &self,
        shadow: &Shadow,
        contents: &DumpContents,
        replaced: Option<&Replaced>,
    ) -> Result<(), StoreError> {
        let added = shadow.added_bytes();
        let (bytes, checkpoints) = match replaced {
            None => (added, 1),
            Some(parked) if namespace_of(&parked.record.job) == namespace_of(&contents.job) => {
                (added, 0)
            }
            Some(parked) => (added.saturating_add(parked.added_bytes), 1),
        };
        self.check_may_store(&contents.job, bytes, checkpoints)
    }

    /// Seals a dump: numbers the checkpoint, writes its manifest, commits it in the region, then in the catalog. If
    /// the dump has a follower, that one seals it. Fails if `wanted` returns false. The caller holds the job's lock.
    pub(super) fn commit(
        &self,
        shadow: Shadow,
        contents: DumpContents,
        follower: Option<Box<dyn Follower>>,
        replaced: Option<Replaced>,
        wanted: &dyn Fn() -> bool,
    ) -> Result<control::Checkpoint, StoreError> {
        self.check_room(&shadow, &contents, replaced.as_ref())?;
        let digest = digest::of_whole(&contents.spaces, &contents.images);
        if let Some(follower) = follower {
            let prepared = PreparedDump {
                store: self,
                shadow,
                contents,
                digest,
            };
            return follower.seal(prepared, wanted);
        }
        let mut index = self.index();
        index.check()?;
        check_wanted(wanted)?;
        let numbering = Numbering::new(match contents.kind {
            Kind::Parked => 0,
            _ => self.catalog.next_generation(&contents.job)?,
        });
        self.seal_locked(
            &mut index, shadow, contents, &numbering, 0, digest, replaced,
        )
    }

    /// Seals under a number, an id and a time that the caller chose, in the region, then in the catalog.
    ///
    /// # Errors
    /// The id or the number is another checkpoint's; a rule for manifests is broken; the region is full or fails.
    pub(super) fn seal_numbered(
        &self,
        shadow: Shadow,
        contents: DumpContents,
        numbering: &Numbering,
        attrs: u32,
        digest: ContentDigest,
    ) -> Result<control::Checkpoint, StoreError> {
        let mut index = self.index();
        index.check()?;
        let place = control::Checkpoint {
            job: contents.job.clone(),
            generation: numbering.generation,
            session: contents.session.clone(),
            ..control::Checkpoint::default()
        };
        if let Some(other) = self.catalogued(&place)? {
            return Err(SealingError::NameTaken {
                checkpoint: checkpoint_name(&other),
                id: other.id,
            }
            .into());
        }
        self.seal_locked(&mut index, shadow, contents, numbering, attrs, digest, None)
    }

    /// Seals a whole copy in the place of one of the same id that is damaged; marks and pin stay. One record of the
    /// journal does both: a crash leaves the one or the other, and a failure leaves the damaged one.
    ///
    /// # Errors
    /// There is no checkpoint of that id. Those of [`Store::seal_numbered`].
    pub(super) fn seal_again(
        &self,
        shadow: Shadow,
        contents: DumpContents,
        numbering: &Numbering,
        digest: ContentDigest,
    ) -> Result<control::Checkpoint, StoreError> {
        let mut index = self.index();
        index.check()?;
        let damaged = self.checkpoint(&numbering.id.to_string())?;
        let replaced = Replaced {
            id: damaged.id(),
            record: control::Checkpoint {
                job: contents.job.clone(),
                generation: numbering.generation,
                session: contents.session.clone(),
                id: numbering.id.to_string(),
                ..control::Checkpoint::default()
            },
            added_bytes: 0,
        };
        let attrs = damaged.attrs();
        drop(damaged);
        self.seal_locked(
            &mut index,
            shadow,
            contents,
            numbering,
            attrs,
            digest,
            Some(replaced),
        )
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the one place where all of it meets"
    )]
    fn seal_locked(
        &self,
        index: &mut Index,
        shadow: Shadow,
        contents: DumpContents,
        numbering: &Numbering,
        attrs: u32,
        digest: ContentDigest,
        replaced: Option<Replaced>,
    ) -> Result<control::Checkpoint, StoreError> {
        let id = numbering.id;
        let manifest = Manifest {
            version: manifest::VERSION,
            job: contents.job,
            generation: numbering.generation,
            parent_generation: contents.parent_generation,
            created_unix_ms: numbering.created_unix_ms,
            kind: contents.kind.into(),
            origin: contents.origin,
            images: contents.images,
            spaces: contents.spaces,
            session: contents.session,
            added_bytes: shadow.added_bytes()
                + replaced.as_ref().map_or(0, |replaced| replaced.added_bytes),
            content_digest: digest.to_vec(),
            commit_deadline_ms: u64::try_from(numbering.commit_deadline.as_millis())
                .unwrap_or(u64::MAX),
            taken_by: contents.taken_by,
        };
        let bytes = manifest
            .encode_checked()
            .map_err(|source| ReadingError::Manifest { id, source })?;
        let replaces = replaced.as_ref().map(|replaced| replaced.id);
        let sealed = shadow.seal_with(id, &bytes, replaces, attrs)?;
        let summary = self.summary(&sealed, &manifest);
        match (self.catalog.put(&summary), &replaced) {
            (Ok(()), None) => {}
            // The record was replaced in place.
            (Ok(()), Some(replaced)) if replaced.id == id => {}
            (Ok(()), Some(replaced)) => {
                // A surplus record reads as "not found", and is removed at the next start.
                if let Err(error) = self.catalog.remove(&replaced.record) {
                    tracing::error!(event = "adopted-session-still-listed", %error, "the adopted session is still listed");
                }
            }
            // The checkpoint could not be found, so it must not count as sealed: the caller rolls back, and so does
            // this node.
            (Err(error), None) => {
                self.region.delete(id)?;
                return Err(error.into());
            }
            // The pages of an adopted session are the only copy: they stay, and the next start finds them. Until then
            // no other checkpoint may take the same number.
            (Err(error), Some(_)) => {
                index.lost_track(&error);
                return Err(error.into());
            }
        }
        self.note_shared(&summary);
        tracing::info!(event = "checkpoint-sealed", id = %summary.id, session = %summary.session, kind = %summary.kind, bytes = summary.memory_bytes, "checkpoint sealed");
        Ok(summary)
    }
}

/// A dump whose pages and images are durable in the region, and that no record refers to yet. Dropped before it is
/// sealed, everything it holds is free again.
pub struct PreparedDump<'a> {
    store: &'a Store,
    shadow: Shadow,
    contents: DumpContents,
    digest: ContentDigest,
}

impl<'a> PreparedDump<'a> {
    /// Returns the store that the dump is in.
    #[must_use]
    pub fn store(&self) -> &'a Store {
        self.store
    }

    /// Returns the contents of the manifest.
    #[must_use]
    pub fn contents(&self) -> &DumpContents {
        &self.contents
    }

    /// Returns the digest of pages and images.
    #[must_use]
    pub fn digest(&self) -> ContentDigest {
        self.digest
    }

    /// Seals the dump as a *provisional* checkpoint, until [`Store::publish`] or [`Store::roll_back`].
    ///
    /// # Errors
    /// The id or the number is another checkpoint's; a rule for manifests is broken; the region is full or fails.
    pub fn seal(self, numbering: &Numbering) -> Result<control::Checkpoint, StoreError> {
        self.store.seal_numbered(
            self.shadow,
            self.contents,
            numbering,
            ATTR_PROVISIONAL,
            self.digest,
        )
    }
}

/// Fails if the caller no longer waits for the seal.
///
/// # Errors
/// `wanted` returns false.
pub fn check_wanted(wanted: &dyn Fn() -> bool) -> Result<(), StoreError> {
    if wanted() {
        return Ok(());
    }
    Err(SealingError::CallerGone.into())
}

/// Id, number and seal time of a checkpoint: equal on all copies.
pub struct Numbering {
    /// Id of the checkpoint.
    pub id: CheckpointId,
    /// Generation; 0 while the checkpoint is parked.
    pub generation: u64,
    /// Time of the seal, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// Time after the seal within which a provisional checkpoint must be published; zero for any other.
    pub commit_deadline: Duration,
}

impl Numbering {
    /// Returns a new id and the current time for a checkpoint of this generation.
    #[must_use]
    pub fn new(generation: u64) -> Self {
        Self {
            id: CheckpointId::random(),
            generation,
            created_unix_ms: unix_ms(),
            commit_deadline: Duration::ZERO,
        }
    }
}

/// A parked checkpoint that an adopted one replaces.
pub(super) struct Replaced {
    pub(super) id: CheckpointId,
    pub(super) record: control::Checkpoint,
    pub(super) added_bytes: u64,
}

/// Checks that a directory belongs to the pages. Otherwise the checkpoint could not be restored; the error is
/// better now, while the task still exists.
pub(super) fn check_images_fit(
    kind: Kind,
    images: &[Image],
    spaces: &[AddressSpace],
) -> Result<(), ImagesError> {
    if !images.iter().any(|image| image.name == "inventory.img") {
        return Err(ImagesError::NoInventory);
    }
    if matches!(kind, Kind::PreDump | Kind::PreCopy) {
        return Ok(());
    }
    let described = processes_of(images.iter().map(|image| image.name.as_str()));
    let received = process_spaces(spaces);
    if described != received {
        return Err(ImagesError::OtherProcesses {
            described,
            received,
        });
    }
    Ok(())
}

/// Returns the kind of a dump: a dump describes its tasks in `core-N.img`, a pre-dump has no such image.
pub(super) fn kind_of(images: &[Image]) -> Kind {
    let whole = images.iter().any(|image| image.name.starts_with("core-"));
    if whole { Kind::Full } else { Kind::PreDump }
}

/// Returns the processes with a memory of their own: those that have an `mm-N.img`.
fn processes_of<'a>(names: impl Iterator<Item = &'a str>) -> BTreeSet<u64> {
    names
        .filter_map(|name| match ImageName::parse(name) {
            ImageName::Mm(pid) => Some(u64::from(pid)),
            _ => None,
        })
        .collect()
}

/// Fails for a directory that names no process: it would fit no parked dump, or any.
pub(super) fn check_tells_processes(processes: &BTreeSet<u64>) -> Result<(), ImagesError> {
    if !processes.is_empty() {
        return Ok(());
    }
    Err(ImagesError::NoProcess)
}
