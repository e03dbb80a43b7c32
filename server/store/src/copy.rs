//! Receives a copy of a dump that was received elsewhere: its pages come compared with the parent already, and its
//! number is given.
//!
//! ```text
//! open_copy ─▶ space, pages, zero, parent … ─▶ close ─▶ image … ─▶ prepare ─▶ commit ─▶ publish
//!                 └──── dropped before the commit: everything is free again ────┘    └─▶ roll_back
//! ```
//!
//! A committed copy is *provisional* until it is published. Numbers, names and times are the sender's; nothing here
//! depends on the store's own dumps.

mod images;

use std::collections::HashMap;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use permafrost_pmem::{ATTR_PROVISIONAL, CheckpointId};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Kind;
use permafrost_protocol::pageserver::SpaceId;
use permafrost_protocol::wire::message::Commit;

use self::images::Closed;
use super::dump::{DumpBuilder, Parent};
use super::images::IMAGE_CHUNK;
use super::seal::{DumpContents, Numbering};
use super::{Store, StoreError, check_job, digest, manifest_of};
use crate::{ContentDigest, CopyError};

/// Request to open a copy.
pub struct CopyRequest {
    /// Session id, chosen by the receiver of the dump; zeros for a checkpoint that was stored without a
    /// session.
    pub session: [u8; 16],
    /// Job; empty while unknown.
    pub job: String,
    /// Id (32 hex digits) of the checkpoint that pages may refer to; empty for none.
    pub parent: String,
    /// Processes that are compared with one of another pid in the parent, and that pid.
    pub compared: HashMap<u64, u64>,
}

/// A copy that is being received. Dropped before it is committed, everything it wrote is free again. Methods
/// block while the medium is slow.
pub struct CopyDump {
    store: Arc<Store>,
    session: String,
    has_parent: bool,
    stage: Stage,
    /// Counts the copy as coming in, while a session waits for it.
    coming: Option<OneComing>,
}

/// Number of copies of dumps that are being received.
#[derive(Clone, Default)]
pub(super) struct Coming(Arc<AtomicUsize>);

/// One copy that is counted in [`Coming`] until dropped.
struct OneComing(Coming);

impl Coming {
    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    fn one(&self) -> OneComing {
        self.0.fetch_add(1, Ordering::Relaxed);
        OneComing(self.clone())
    }
}

impl Drop for OneComing {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

enum Stage {
    Receiving(Box<DumpBuilder>),
    Closed(Box<Closed>),
    Committed {
        id: String,
        digest: ContentDigest,
        record: Box<control::Checkpoint>,
    },
    /// A step failed in the middle; the copy cannot go on.
    Failed,
}

impl Store {
    /// Begins a copy of a dump. A parent that is not here, or is damaged, is ignored: see
    /// [`CopyDump::has_parent`].
    ///
    /// # Errors
    /// A bad job name.
    pub fn open_copy(self: &Arc<Self>, request: CopyRequest) -> Result<CopyDump, StoreError> {
        self.check_writable()?;
        if !request.job.is_empty() {
            check_job(&request.job)?;
        }
        let parent = if request.parent.is_empty() {
            None
        } else {
            let parent = self.parent_by_id(&request.parent);
            parent.map(|parent| parent.compared_as(request.compared))
        };
        let has_parent = parent.is_some();
        if !has_parent {
            self.refresh_shared(&request.job);
        }
        let builder = DumpBuilder::new(self.begin_shadow(&request.job)?, parent, None);
        self.counters.copies_begun.add(1);
        Ok(CopyDump {
            store: Arc::clone(self),
            session: if request.session == [0; 16] {
                String::new()
            } else {
                hex(&request.session)
            },
            has_parent,
            coming: Some(self.copies_coming.one()),
            stage: Stage::Receiving(Box::new(builder.sharing(self.page_finder(&request.job)))),
        })
    }

    /// Returns the checkpoint of a commit that was done before: a sender that lost the reply retries, perhaps after
    /// a restart.
    ///
    /// # Errors
    /// There is a checkpoint of that id with other content; its manifest is damaged.
    pub fn committed(&self, commit: &Commit) -> Result<Option<control::Checkpoint>, StoreError> {
        let Ok(checkpoint) = self.checkpoint(&commit.checkpoint) else {
            return Ok(None);
        };
        check_digest(
            &commit.checkpoint,
            digest::of_checkpoint(&checkpoint)?,
            commit,
        )?;
        let manifest = manifest_of(&checkpoint)?;
        Ok(Some(self.summary(&checkpoint, &manifest)))
    }

    /// Returns the checkpoint to compare with. Comparing saves space and transfer, so damage is only logged.
    pub(super) fn parent_by_id(&self, id: &str) -> Option<Parent> {
        let checkpoint = self.checkpoint(id).ok()?;
        if let Some(damage) = self.damage(id) {
            tracing::warn!(
                event = "parent-of-copy-damaged",
                id,
                damage,
                "not compared with: damaged"
            );
            return None;
        }
        let held = Arc::new(self.cooling.hold(id));
        let recalled = self.recall_all(&checkpoint);
        match recalled.and_then(|()| manifest_of(&checkpoint)) {
            Ok(manifest) => Some(Parent::new(checkpoint, manifest, held)),
            Err(error) => {
                tracing::error!(event = "parent-of-copy-unreadable", id, %error, "not compared with: damaged or away");
                None
            }
        }
    }
}

impl CopyDump {
    /// Returns true if the requested parent is here, so that pages may refer to it.
    #[must_use]
    pub fn has_parent(&self) -> bool {
        self.has_parent
    }

    /// Marks the copy as one that no session waits for: it does not count as a dump that is being received.
    pub fn in_background(&mut self) {
        self.coming = None;
    }

    /// Returns the session id, 32 hex digits; empty for none.
    #[must_use]
    pub fn session(&self) -> &str {
        &self.session
    }

    /// Begins an address space and ends the one before.
    ///
    /// # Errors
    /// The region is full or fails; the dump is closed.
    pub fn space(&mut self, space: SpaceId, pages_id: u32) -> Result<(), StoreError> {
        self.receiving()?.open(space, Some(pages_id))?;
        Ok(())
    }

    /// Appends whole pages to the open space, ascending.
    ///
    /// # Errors
    /// The region is full or fails; the indices do not ascend, no space is open, or the dump is closed.
    pub fn pages(&mut self, first_index: u64, flags: u16, bytes: &[u8]) -> Result<(), StoreError> {
        self.receiving()?.append(first_index, flags, bytes)?;
        let received = &self.store.counters.copies_received_bytes;
        received.add(bytes.len() as u64);
        Ok(())
    }

    /// Appends pages of zeros. The cost does not depend on their number.
    ///
    /// # Errors
    /// Those of [`CopyDump::pages`].
    pub fn zero(&mut self, first_index: u64, flags: u16, pages: u64) -> Result<(), StoreError> {
        self.receiving()?.zeros(first_index, flags, pages)
    }

    /// Appends references to pages that the parent has at the same place, with the flags `flags`.
    ///
    /// # Errors
    /// Those of [`CopyDump::pages`]; the parent is not here, lacks a page, or its map is damaged.
    pub fn parent(&mut self, first_index: u64, flags: u16, pages: u64) -> Result<(), StoreError> {
        self.receiving()?.same_as_parent(first_index, flags, pages)
    }

    /// Reads and verifies pages of the parent, which [`CopyDump::parent`] does not do: they may have been damaged
    /// since.
    ///
    /// # Errors
    /// One of them is damaged, or missing.
    pub fn check_parent(&mut self, first_index: u64, pages: u64) -> Result<(), StoreError> {
        self.receiving()?.check_parent(first_index, pages)
    }

    /// Ends the address spaces: everything is durable when this returns, and referenced by nothing. Returns the
    /// digest of the spaces. Idempotent.
    ///
    /// # Errors
    /// The region is full or fails.
    pub fn close(&mut self) -> Result<ContentDigest, StoreError> {
        if let Stage::Closed(closed) = &self.stage {
            return Ok(closed.dump.digest);
        }
        match std::mem::replace(&mut self.stage, Stage::Failed) {
            Stage::Receiving(builder) => {
                let dump = builder.finish()?;
                let digest = dump.digest;
                self.stage = Stage::Closed(Box::new(Closed::new(dump)));
                Ok(digest)
            }
            other => {
                self.stage = other;
                Err(out_of_order("closed"))
            }
        }
    }

    /// Begins a small image of `len_bytes` bytes, which follow through [`CopyDump::image_data`].
    ///
    /// # Errors
    /// The image before is short; the name is no file name, or another image has it; the spaces are not closed.
    pub fn begin_image(&mut self, name: &str, len_bytes: u64) -> Result<(), StoreError> {
        self.closed()?.begin_image(name, len_bytes)
    }

    /// Appends the next bytes of the image.
    ///
    /// # Errors
    /// No image is open, or they are too many; the region is full or fails.
    pub fn image_data(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.closed()?.image_data(bytes)
    }

    /// Stores a small image in one call.
    ///
    /// # Errors
    /// Those of [`CopyDump::begin_image`] and [`CopyDump::image_data`]; it cannot be read.
    pub fn image(
        &mut self,
        name: &str,
        len_bytes: u64,
        contents: &mut dyn Read,
    ) -> Result<(), StoreError> {
        self.begin_image(name, len_bytes)?;
        let mut buffer = vec![0; IMAGE_CHUNK];
        loop {
            match contents.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => self.image_data(&buffer[..read])?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(StoreError::io(format!("read image {name}"))(error)),
            }
        }
    }

    /// Ends the images: everything is as durable as after [`CopyDump::close`]. Returns the digest of the whole.
    /// Idempotent.
    ///
    /// # Errors
    /// An image is short; the spaces are not closed; the region is full or fails.
    pub fn prepare(&mut self) -> Result<ContentDigest, StoreError> {
        self.closed()?.prepare()
    }

    /// Seals the copy as a checkpoint, provisional for now. Committing a committed copy again returns its
    /// checkpoint.
    ///
    /// # Errors
    /// The copy is not prepared, or its contents differ from those that the sender wants sealed; another checkpoint
    /// has the number or the id; the manifest would break a rule; the region is full or fails. Nothing is sealed
    /// then.
    pub fn commit(&mut self, commit: &Commit) -> Result<control::Checkpoint, StoreError> {
        self.commit_as(commit, false)
    }

    /// Commits as [`CopyDump::commit`] does, in the place of the damaged checkpoint of that id, whose marks
    /// stay. The copy must be opened without a parent, whose pages may be the damaged ones.
    ///
    /// # Errors
    /// There is no checkpoint of that id. Those of [`CopyDump::commit`]; then the damaged checkpoint may be
    /// gone, too.
    pub fn commit_again(&mut self, commit: &Commit) -> Result<control::Checkpoint, StoreError> {
        self.commit_as(commit, true)
    }

    fn commit_as(
        &mut self,
        commit: &Commit,
        again: bool,
    ) -> Result<control::Checkpoint, StoreError> {
        if let Stage::Committed { id, digest, record } = &self.stage {
            if *id != commit.checkpoint {
                return Err(out_of_order("committed under another id"));
            }
            check_digest(id, *digest, commit)?;
            return Ok((**record).clone());
        }
        let digest = self
            .closed()?
            .prepared
            .ok_or_else(|| out_of_order("committed"))?;
        check_digest(&commit.checkpoint, digest, commit)?;
        if commit.session != self.session {
            return Err(CopyError::OtherSession {
                own: self.session.clone(),
                sent: commit.session.clone(),
            }
            .into());
        }
        super::check_origin(commit.origin.as_ref())?;
        let numbering = Numbering::of(commit)?;
        let Stage::Closed(closed) = std::mem::replace(&mut self.stage, Stage::Failed) else {
            return Err(out_of_order("committed"));
        };
        let Closed { dump, images, .. } = *closed;
        let contents = DumpContents {
            job: commit.job.clone(),
            kind: Kind::try_from(commit.kind)
                .map_err(|_| CopyError::UnknownKind { kind: commit.kind })?,
            parent_generation: commit.parent_generation,
            origin: commit.origin.clone(),
            images,
            spaces: dump.spaces,
            session: commit.session.clone(),
            taken_by: commit.taken_by.clone(),
        };
        let (store, shadow) = (&self.store, dump.shadow);
        let record = if again {
            store.seal_again(shadow, contents, &numbering, digest)?
        } else {
            store.seal_numbered(shadow, contents, &numbering, ATTR_PROVISIONAL, digest)?
        };
        self.coming = None;
        self.stage = Stage::Committed {
            id: commit.checkpoint.clone(),
            digest,
            record: Box::new(record.clone()),
        };
        self.store.counters.copies_sealed.add(1);
        Ok(record)
    }

    /// Checks that the quota of the job's namespace allows the bytes that were received.
    ///
    /// # Errors
    /// A quota of this node does not allow it.
    pub fn check_room(&self, job: &str) -> Result<(), StoreError> {
        match &self.stage {
            Stage::Closed(closed) => {
                let bytes = closed.dump.shadow.added_bytes();
                self.store.check_may_store(job, bytes, 1)
            }
            _ => Ok(()),
        }
    }

    fn receiving(&mut self) -> Result<&mut DumpBuilder, StoreError> {
        match &mut self.stage {
            Stage::Receiving(builder) => Ok(builder),
            _ => Err(out_of_order("given pages")),
        }
    }

    fn closed(&mut self) -> Result<&mut Closed, StoreError> {
        match &mut self.stage {
            Stage::Closed(closed) => Ok(closed),
            _ => Err(out_of_order("given images, prepared or committed")),
        }
    }
}

/// Refuses to seal a copy, or to confirm a sealed one, whose digest differs from the sender's.
fn check_digest(id: &str, own: ContentDigest, commit: &Commit) -> Result<(), StoreError> {
    if commit.content_digest == own {
        return Ok(());
    }
    Err(CopyError::OtherContent {
        id: id.to_owned(),
        own: hex(&own),
        sent: hex(&commit.content_digest),
    }
    .into())
}

impl Numbering {
    /// Reads the numbering that the sender of a dump chose.
    fn of(commit: &Commit) -> Result<Self, StoreError> {
        let id: CheckpointId = commit.checkpoint.parse().map_err(|_| CopyError::BadId {
            id: commit.checkpoint.clone(),
        })?;
        Ok(Self {
            id,
            generation: commit.generation,
            created_unix_ms: commit.created_unix_ms,
            commit_deadline: Duration::from_millis(commit.deadline_ms),
        })
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn out_of_order(step: &'static str) -> StoreError {
    CopyError::OutOfOrder { step }.into()
}
