//! Reads checkpoints from other nodes that are not here, or are damaged here.

use std::sync::Arc;

use permafrost_agent::remote::{Holders, RemoteCheckpoint};
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;
use permafrost_protocol::wire::message::FetchOpened;

use super::reader::checkpoint_name;
use super::{Fetch, Store, StoreError, digest};
use crate::{ContentDigest, Elsewhere, MissingObject};

impl Store {
    /// Sets the remote source of checkpoints that are not here, once. Must be called before requests come. Returns
    /// false if it is set already.
    pub fn look_elsewhere(&self, elsewhere: Arc<dyn Elsewhere>) -> bool {
        self.elsewhere.set(elsewhere).is_ok()
    }

    /// Opens a listed checkpoint (32 hex digits, and `JOB@GENERATION`) as the other nodes hold it.
    ///
    /// # Errors
    /// The checkpoint is not listed under that name, or none of its holders can be reached.
    pub fn open_elsewhere(
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
    pub(super) fn remote_of(
        &self,
        record: &control::Checkpoint,
        manifest: &Manifest,
    ) -> Option<RemoteCheckpoint> {
        let elsewhere = self.elsewhere.get()?;
        let order = elsewhere.in_order(&record.nodes);
        (!order.is_empty()).then(|| {
            let holders = Arc::clone(elsewhere) as Arc<dyn Holders>;
            RemoteCheckpoint::new(holders, order, record.clone(), manifest.clone())
        })
    }

    /// Opens a listed checkpoint with the manifest of one of its holders. The manifest must match the listed
    /// content digest.
    pub(super) fn open_remote(
        &self,
        record: &control::Checkpoint,
    ) -> Result<RemoteCheckpoint, StoreError> {
        let Some(elsewhere) = self.elsewhere.get() else {
            return Err(not_here(record));
        };
        let order = elsewhere.in_order(&record.nodes);
        if order.is_empty() {
            return Err(not_here(record));
        }
        let listed = self.listed_digest(record)?;
        let holders = Arc::clone(elsewhere) as Arc<dyn Holders>;
        let opened = RemoteCheckpoint::open(holders, order, record.clone(), |opened, manifest| {
            listed.is_none_or(|listed| is_of(opened, manifest, &listed))
        });
        opened.map_err(StoreError::Elsewhere)
    }

    /// Returns the content digest that the registry lists for a checkpoint; `None` without a registry.
    ///
    /// # Errors
    /// The registry does not list the checkpoint, or does not answer.
    pub fn listed_digest(
        &self,
        record: &control::Checkpoint,
    ) -> Result<Option<ContentDigest>, StoreError> {
        let Some(registry) = self.registry() else {
            return Ok(None);
        };
        let found = registry.find(&record.job, record.generation)?;
        match found {
            Some(entry) if entry.checkpoint.id == record.id => Ok(Some(entry.content_digest)),
            _ => Err(StoreError::NotFound(MissingObject::Checkpoint(
                checkpoint_name(record),
            ))),
        }
    }

    /// Reports that this node's copy is damaged: to the log, and to the scrub.
    pub fn report_damage(&self, checkpoint: &str, error: &StoreError) {
        tracing::error!(checkpoint, %error, "the copy on this node is damaged");
        self.suspect(checkpoint);
    }
}

/// Returns true if a manifest has the listed content digest. A manifest sealed before maps had digests cannot
/// be checked; then the digest that its holder reports is compared.
fn is_of(opened: &FetchOpened, manifest: &Manifest, listed: &ContentDigest) -> bool {
    let mut spaces = manifest.spaces.iter().map(|space| &space.map_digest);
    let mut images = manifest.images.iter().map(|image| &image.map_digest);
    if spaces.all(|digest| !digest.is_empty()) && images.all(|digest| !digest.is_empty()) {
        return digest::of_whole(&manifest.spaces, &manifest.images) == *listed;
    }
    opened.content_digest == listed
}

/// Returns the error for a checkpoint that is listed and not on this node.
pub(super) fn not_here(record: &control::Checkpoint) -> StoreError {
    StoreError::NotFound(MissingObject::Copy {
        checkpoint: checkpoint_name(record),
        holders: record.nodes.clone(),
    })
}
