//! Reads a checkpoint from this node's copy, or from other nodes where this node has no copy or a damaged one.

use std::io;
use std::sync::OnceLock;

use permafrost_agent::remote::{self, MapDigest, RemoteCheckpoint};
use permafrost_criu::directory::PageRun;
use permafrost_protocol::control;
use permafrost_protocol::manifest::Manifest;

use super::reader::{ReadError, Reader, checkpoint_name};
use super::{Store, StoreError};
use crate::ReadingError;

/// A checkpoint that is being read.
pub(super) struct Anywhere<'a> {
    store: &'a Store,
    /// Name of the checkpoint as people write it.
    pub(super) name: String,
    /// Record of the checkpoint in the listing.
    pub(super) record: control::Checkpoint,
    /// Manifest of the checkpoint; the map roots are this node's where it has a copy.
    pub(super) manifest: Manifest,
    /// This node's copy, if it has one that can be opened.
    pub(super) here: Option<Reader>,
    /// The other nodes' copies. `None`: there are none.
    others: OnceLock<Option<RemoteCheckpoint>>,
}

impl<'a> Anywhere<'a> {
    pub(super) fn open(store: &'a Store, record: control::Checkpoint) -> Result<Self, StoreError> {
        let error = match Reader::open(store, record.clone()) {
            Ok(here) => {
                return Ok(Self {
                    store,
                    name: checkpoint_name(&record),
                    record,
                    manifest: here.manifest.clone(),
                    here: Some(here),
                    others: OnceLock::new(),
                });
            }
            Err(error) => error,
        };
        if matches!(error, StoreError::Reading(ReadingError::Mislisted { .. })) {
            return Err(error);
        }
        let is_damaged = !matches!(error, StoreError::NotFound { .. });
        if is_damaged {
            store.report_damage(&record.id, &error);
        }
        match store.open_remote(&record) {
            Ok(remote) => Ok(Self {
                store,
                name: checkpoint_name(&record),
                record,
                manifest: remote.manifest().clone(),
                here: None,
                others: OnceLock::from(Some(remote)),
            }),
            Err(elsewhere) if !is_damaged && !record.nodes.is_empty() => Err(elsewhere),
            // This error says more than that no other node has the checkpoint.
            Err(_) => Err(error),
        }
    }

    /// Passes a small image on, piece by piece, after all of it was verified.
    pub(super) fn small(
        &self,
        place: usize,
        mut sink: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        let mut cause = None;
        if let Some(here) = &self.here {
            let mut begun = false;
            let read = here.small(&self.manifest.images[place], |bytes| {
                begun = true;
                sink(bytes)
            });
            match read {
                Err(ReadError::Source(error)) if !begun => cause = Some(error),
                read => return read,
            }
        }
        let Some(others) = self.others(cause.as_ref()) else {
            return Err(self.nobody(cause).into());
        };
        match others.image(place, sink) {
            Ok(()) => Ok(()),
            Err(remote::ReadError::Taker(error)) => Err(ReadError::Out(error)),
            Err(remote::ReadError::Holders(error)) => Err(self.failed(cause, error).into()),
        }
    }

    /// Returns the pagemap image of the address space at `place`.
    pub(super) fn pagemap(&self, place: usize) -> Result<Vec<u8>, StoreError> {
        let mut cause = None;
        if let Some(here) = &self.here {
            match here.pagemap(&self.manifest.spaces[place]) {
                Err(error) => cause = Some(error),
                pagemap => return pagemap,
            }
        }
        match self.others(cause.as_ref()) {
            Some(others) => others
                .pagemap(place)
                .map_err(|error| self.failed(cause, error)),
            None => Err(self.nobody(cause)),
        }
    }

    /// Passes on the pages of the address space at `place` from `from_index` on, as the other nodes have them. The
    /// pages before `from_index` were read from this node's copy; `cause` is the error that ended that reading.
    pub(super) fn pages_of_others(
        &self,
        place: usize,
        from_index: u64,
        cause: Option<StoreError>,
        take: impl FnMut(PageRun<'_>) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        let Some(others) = self.others(cause.as_ref()) else {
            return Err(self.nobody(cause).into());
        };
        let before = self.digest_before(place, from_index)?;
        match others.pages(place, from_index, before, take) {
            Ok(()) => Ok(()),
            Err(remote::ReadError::Taker(error)) => Err(ReadError::Out(error)),
            Err(remote::ReadError::Holders(error)) => Err(self.failed(cause, error).into()),
        }
    }

    fn digest_before(&self, place: usize, from_index: u64) -> Result<MapDigest, StoreError> {
        match &self.here {
            Some(here) => here.digest_before(&self.manifest.spaces[place], from_index),
            None => Ok(MapDigest::default()),
        }
    }

    /// Returns the copies on other nodes. `cause` is the damage that was found in this node's copy, if any.
    fn others(&self, cause: Option<&StoreError>) -> Option<&RemoteCheckpoint> {
        if let Some(cause) = cause {
            self.store.report_damage(&self.record.id, cause);
        }
        let find = || self.store.remote_of(&self.record, &self.manifest);
        self.others.get_or_init(find).as_ref()
    }

    /// Returns the error to report: the one from this node's copy, if there is one, as it says more than that of
    /// the other nodes, which is logged.
    fn failed(&self, cause: Option<StoreError>, error: control::Error) -> StoreError {
        let Some(cause) = cause else {
            return StoreError::Elsewhere(error);
        };
        tracing::warn!(
            checkpoint = self.name,
            error = error.message,
            "nor do others have it"
        );
        cause
    }

    fn nobody(&self, cause: Option<StoreError>) -> StoreError {
        cause.unwrap_or_else(|| super::elsewhere::not_here(&self.record))
    }
}
