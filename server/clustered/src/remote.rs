//! Checkpoints of other nodes, for reading.

use std::sync::Arc;

use permafrost_agent::remote::{Holders, RemoteCheckpoint};
use permafrost_protocol::control::{self, ErrorCode, ReportedError as _};
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::message::FetchOpened;
use permafrost_store::{ContentDigest, Fetch, MissingObject, StoreError, digest_of};

use crate::ClusteredStore;
use crate::listing::not_here;

/// The other nodes, as sources of checkpoints. All methods may be called on many threads at once.
pub trait RemoteNodes: Holders {
    /// Returns those of `holders` that are to be asked, in this order; never this node.
    fn in_order(&self, holders: &[String]) -> Vec<String>;

    /// Returns the checkpoints by id that are being read on the nodes, as far as they have said; they may have begun
    /// others in the last seconds. `*` stands for all.
    fn in_use(&self) -> Vec<String> {
        Vec::new()
    }
}

impl ClusteredStore {
    /// Opens a listed checkpoint (32 hex digits, and `JOB@GENERATION`) as the other nodes hold it.
    ///
    /// # Errors
    /// The checkpoint is not listed under that name, or none of its holders can be reached.
    pub fn open_on_others(
        &self,
        checkpoint: &str,
        listed_as: &str,
    ) -> Result<RemoteCheckpoint, StoreError> {
        let record = self.resolve(listed_as)?;
        if record.id != checkpoint {
            return Err(StoreError::NotFound(MissingObject::Checkpoint(
                checkpoint.to_owned(),
            )));
        }
        self.open_remote(&record)
    }

    /// Reports damage that was found while reading for another node, and returns the other copies, if there are
    /// any.
    pub fn others_of_damaged(
        &self,
        fetch: &Fetch,
        damage: &StoreError,
    ) -> Option<RemoteCheckpoint> {
        let (record, manifest) = (fetch.checkpoint(), fetch.manifest());
        self.report_damage(&record.id, damage);
        let found = self.look_up(&manifest.job, Some(manifest.generation));
        let listed = found.ok().flatten().filter(|found| found.id == record.id)?;
        self.remote_of(&listed, manifest)
    }

    /// Returns the other copies of a checkpoint whose manifest is intact here.
    pub(crate) fn remote_of(
        &self,
        record: &control::Checkpoint,
        manifest: &Manifest,
    ) -> Option<RemoteCheckpoint> {
        let remote = self.remote_nodes()?;
        let order = remote.in_order(&record.nodes);
        (!order.is_empty()).then(|| {
            let holders = Arc::clone(remote) as Arc<dyn Holders>;
            RemoteCheckpoint::new(holders, order, record.clone(), manifest.clone())
        })
    }

    /// Opens a listed checkpoint with the manifest of one of its holders. The manifest must match the listed
    /// content digest.
    pub(crate) fn open_remote(
        &self,
        record: &control::Checkpoint,
    ) -> Result<RemoteCheckpoint, StoreError> {
        let Some(remote) = self.remote_nodes() else {
            return Err(not_here(record));
        };
        let order = remote.in_order(&record.nodes);
        if order.is_empty() {
            return Err(not_here(record));
        }
        let listed = self.listed_digest(record)?;
        let holders = Arc::clone(remote) as Arc<dyn Holders>;
        let opened = RemoteCheckpoint::open(holders, order, record.clone(), |opened, manifest| {
            listed.is_none_or(|listed| is_of(opened, manifest, &listed))
        });
        opened.map_err(StoreError::Elsewhere)
    }

    /// Reports that this node's copy is damaged: to the log, and to the scrub. A copy in a cold tier that is away, or
    /// that there is no room to recall, is not.
    pub fn report_damage(&self, checkpoint: &str, error: &StoreError) {
        if matches!(error.code(), ErrorCode::Unavailable | ErrorCode::NoSpace) {
            tracing::warn!(event = "local-copy-unreadable", checkpoint, %error, "the copy on this node cannot be read now");
            return;
        }
        tracing::error!(event = "damage-found-by-reader", checkpoint, %error, "the copy on this node is damaged");
        self.suspect(checkpoint);
    }

    /// Has a checkpoint that may be damaged verified next. Returns at once.
    pub fn suspect(&self, checkpoint: &str) {
        // Healing of known damage is retried at its time.
        if self.local.damage(checkpoint).is_none() {
            self.suspects.suspect(checkpoint);
        }
    }
}

/// Returns true if a manifest has the listed content digest. A manifest sealed before maps had digests cannot
/// be checked; then the digest that its holder reports is compared.
fn is_of(opened: &FetchOpened, manifest: &Manifest, listed: &ContentDigest) -> bool {
    let mut spaces = manifest.spaces.iter().map(|space| &space.map_digest);
    let mut images = manifest.images.iter().map(|image| &image.map_digest);
    if spaces.all(|digest| !digest.is_empty()) && images.all(|digest| !digest.is_empty()) {
        return digest_of(&manifest.spaces, &manifest.images) == *listed;
    }
    opened.content_digest == listed
}
