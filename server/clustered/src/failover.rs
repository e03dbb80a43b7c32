//! Reads a checkpoint from this node's copy, or from other nodes where this node has no copy or a damaged one.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use permafrost_agent::remote::{MapDigest, RemoteCheckpoint};
use permafrost_criu::contents::{self, ContentsError};
use permafrost_criu::directory::{self, ExportedPart};
use permafrost_criu::frontend::{self, StreamError};
use permafrost_criu::source::{
    CheckpointSource, LazySource, OutlinePages, PageRun, PagesOut, ReadError, Reported,
};
use permafrost_protocol::control::{self, request};
use permafrost_protocol::manifest::Manifest;
use permafrost_store::{
    LocalCheckpoint, ProgressReceiver, ReadingError, Restoring, StoreError, checkpoint_name,
};

use crate::ClusteredStore;
use crate::listing::{named_holders, not_here};

/// Longest time that CRIU may take to connect once it has been promised its images.
const PATIENCE: Duration = Duration::from_secs(60);

/// A checkpoint that is being read from this node's copy, and from the others where that one fails.
struct Failover<'a> {
    store: &'a ClusteredStore,
    /// Record of the checkpoint in the listing.
    record: control::Checkpoint,
    /// Manifest of the checkpoint; the map roots are this node's where it has a copy.
    manifest: Manifest,
    /// This node's copy, if it has one that can be opened.
    here: Option<LocalCheckpoint>,
    /// The other nodes' copies. `None`: there are none.
    others: OnceLock<Option<RemoteCheckpoint>>,
}

impl ClusteredStore {
    /// Writes a checkpoint into a directory as CRIU images: the small ones byte for byte, the pages in the files
    /// that CRIU would have made, zero pages as holes. Every page is verified before it is written; pages that are
    /// not here, or damaged here, come from another node.
    ///
    /// # Errors
    /// There is no such checkpoint; a page is damaged, reported by name and address; no node that holds the
    /// checkpoint can be reached; a file exists already or cannot be written.
    pub fn export(
        &self,
        reference: &str,
        part: ExportedPart,
        directory: OwnedFd,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, StoreError> {
        let source = self.open(self.resolve(reference)?)?;
        if part != ExportedPart::All {
            // For a dump to be compared with, which is no restore, or for one that gets its pages later.
            return directory::export(&source, part, directory, progress);
        }
        let restoring = self.local.restoring(source.record.memory_bytes);
        let exported = directory::export(&source, part, directory, &mut |bytes, total| {
            restoring.progress(bytes);
            progress(bytes, total);
        })?;
        let here = source.here.is_some();
        self.local
            .restored(&source.record, here, restoring, exported.bytes);
        Ok(exported)
    }

    /// Serves a checkpoint to the CRIU that connects to `listener`, until that CRIU disconnects. Every page is
    /// verified before it is given; one that is not here, or damaged here, comes from another node. If there is
    /// none, the file ends early, which makes the restore fail. `served` counts the bytes as they are given.
    ///
    /// # Errors
    /// There is no such checkpoint; nobody connects before `caller` disconnects; a page is damaged, reported by
    /// name and address; no node that holds the checkpoint can be reached.
    pub fn stream(
        &self,
        reference: &str,
        listener: OwnedFd,
        caller: &UnixStream,
        served: &Arc<AtomicU64>,
        progress: ProgressReceiver<'_>,
    ) -> Result<control::Exported, StoreError> {
        let source = self.open(self.resolve(reference)?)?;
        let total_bytes = source.record.memory_bytes;
        let mut restoring = self.local.restoring(total_bytes);
        let counter = served;
        let served =
            frontend::accept(&UnixListener::from(listener), caller, PATIENCE).and_then(|criu| {
                restoring.begun();
                frontend::stream(&criu, &source, counter, &mut |bytes| {
                    restoring.progress(bytes);
                    progress(bytes, total_bytes);
                })
            });
        let served = served.map_err(|error| match error {
            StreamError::Source(error) => error,
            StreamError::NobodyCame => ReadingError::NobodyCame.into(),
            other => StoreError::io(format!("stream {}", checkpoint_name(&source.record)))(
                io::Error::other(other.to_string()),
            ),
        })?;
        let here = source.here.is_some();
        self.local
            .restored(&source.record, here, restoring, served.bytes);
        Ok(control::Exported {
            checkpoint: Some(source.record),
            files: served.files,
            bytes: served.bytes,
            origin: source.manifest.origin,
        })
    }

    /// Calls `serve` with a checkpoint whose pages it can read in any order. The checkpoint's pages stay until it returns,
    /// even if the checkpoint is removed meanwhile. Pages that are not here, or damaged here, come from another node.
    ///
    /// # Errors
    /// There is no such checkpoint; no node that holds it can be reached.
    pub fn lend<T>(
        &self,
        reference: &str,
        serve: impl FnOnce(&dyn LazySource) -> T,
    ) -> Result<T, StoreError> {
        let source = self.open(self.resolve(reference)?)?;
        Ok(serve(&Reported(&source)))
    }

    /// Restores a checkpoint by `place`, which reads its pages in any order. Otherwise like [`lend`](Self::lend).
    ///
    /// # Errors
    /// There is no such checkpoint; no node that holds it can be reached; an error of `place`.
    pub fn place(
        &self,
        reference: &str,
        place: impl FnOnce(
            &dyn LazySource,
            &mut Restoring,
        ) -> Result<control::LazyServed, control::Error>,
    ) -> Result<control::LazyServed, control::Error> {
        let source = self.open(self.resolve(reference)?)?;
        let mut restoring = self.local.restoring(source.record.memory_bytes);
        let placed = place(&Reported(&source), &mut restoring)?;
        let here = source.here.is_some();
        self.local
            .restored(&source.record, here, restoring, placed.bytes);
        Ok(placed)
    }

    /// Returns all details of one checkpoint. For one that is not here, the space that it takes here is zero.
    ///
    /// # Errors
    /// No such checkpoint; a damaged manifest, and no other node has a copy.
    pub fn show(&self, reference: &str) -> Result<control::Detail, StoreError> {
        let record = self.resolve(reference)?;
        let here = self.local.open_in_place(record.clone());
        let shown = self.opened(record, here)?;
        let (segments, exclusive_bytes) = shown.here.as_ref().map_or((0, 0), |here| {
            let checkpoint = here.checkpoint();
            let exclusive_bytes = self.local.region().exclusive_bytes(checkpoint);
            (checkpoint.segments(), exclusive_bytes)
        });
        Ok(control::Detail {
            manifest: Some(shown.manifest),
            segments,
            exclusive_bytes,
            checkpoint: Some(self.local.with_state(shown.record)),
            ..control::Detail::default()
        })
    }

    /// Returns what a checkpoint consists of, compared with another one of its job or with its parent. Reads small images
    /// and page maps, and nothing from an object store but those. The memory of all such requests together is limited, and
    /// those that read from other nodes do not take it from the others.
    ///
    /// # Errors
    /// There is no such checkpoint; no node that holds it can be reached; an image does not decode; there is more than
    /// fits into a reply; others read, and leave no room in time.
    pub fn contents(
        &self,
        asked: &request::Describe,
    ) -> Result<control::CheckpointContents, StoreError> {
        let source = self.open_in_place(&asked.checkpoint)?;
        let record = &source.record;
        let before = match asked.before.as_str() {
            "" if asked.with_parent && record.parent_generation > 0 => {
                let parent = format!("{}@{}", record.job, record.parent_generation);
                // The caller asked for the checkpoint: it is told of it, whatever has become of its parent.
                match self.open_in_place(&parent) {
                    Ok(opened) => Some(opened),
                    Err(StoreError::NotFound(_)) => None,
                    Err(error) => {
                        tracing::warn!(event = "contents-not-compared", %parent, %error, "contents are not compared with the parent");
                        None
                    }
                }
            }
            "" => None,
            before => Some(self.open_in_place(before)?),
        };
        let is_here = |source: &Failover<'_>| source.here.is_some();
        let room = match is_here(&source) && before.as_ref().is_none_or(is_here) {
            true => &self.contents_here,
            false => &self.contents_elsewhere,
        };
        let _room = room
            .take(contents::room_bytes(&source, before.as_ref()))
            .map_err(StoreError::port)?;
        let tells_both = !asked.before.is_empty();
        contents::of(&source, before.as_ref(), tells_both, asked.pid).map_err(|error| match error {
            ContentsError::Source(error) => error,
            ContentsError::Limit(limit) => StoreError::port(limit),
        })
    }

    fn open_in_place(&self, reference: &str) -> Result<Failover<'_>, StoreError> {
        let record = self.resolve(reference)?;
        let here = self.local.open_in_place(record.clone());
        self.opened(record, here)
    }

    fn open(&self, record: control::Checkpoint) -> Result<Failover<'_>, StoreError> {
        let here = self.local.open(record.clone());
        self.opened(record, here)
    }

    /// Returns this node's copy, or those of other nodes if it could not be opened.
    fn opened(
        &self,
        record: control::Checkpoint,
        here: Result<LocalCheckpoint, StoreError>,
    ) -> Result<Failover<'_>, StoreError> {
        let error = match here {
            Ok(here) => {
                return Ok(Failover {
                    store: self,
                    record,
                    manifest: here.manifest().clone(),
                    here: Some(here),
                    others: OnceLock::new(),
                });
            }
            Err(error) => named_holders(error, &record),
        };
        if matches!(error, StoreError::Reading(ReadingError::Mislisted { .. })) {
            return Err(error);
        }
        let is_damaged = !matches!(error, StoreError::NotFound(_));
        if is_damaged {
            self.report_damage(&record.id, &error);
        }
        match self.open_remote(&record) {
            Ok(remote) => Ok(Failover {
                store: self,
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
}

impl CheckpointSource for Failover<'_> {
    type Error = StoreError;

    fn record(&self) -> &control::Checkpoint {
        &self.record
    }

    fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn is_remote(&self) -> bool {
        self.here.is_none()
    }

    fn small(
        &self,
        place: usize,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<(), ReadError<StoreError>> {
        let mut cause = None;
        if let Some(here) = &self.here {
            let mut begun = false;
            let read = here.small(place, &mut |bytes| {
                begun = true;
                sink(bytes)
            });
            match read {
                Err(ReadError::Source(error)) if !begun => cause = Some(error),
                read => return read,
            }
        }
        let Some(others) = self.others(cause.as_ref()) else {
            return Err(ReadError::Source(self.nobody(cause)));
        };
        let passed = others.image(place, sink);
        passed.map_err(|error| self.error_of(cause, error))
    }

    fn pagemap(&self, place: usize) -> Result<Vec<u8>, StoreError> {
        let mut cause = None;
        if let Some(here) = &self.here {
            match here.pagemap(place) {
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

    fn positions(
        &self,
        place: usize,
        take: &mut dyn FnMut(u64, OutlinePages<'_>),
    ) -> Result<(), StoreError> {
        let (mut next_index, mut cause) = (0, None);
        if let Some(here) = &self.here {
            let read = here.positions(place, &mut |first_index, pages| {
                next_index = first_index.saturating_add(pages.len());
                take(first_index, pages);
            });
            match read {
                Err(error) => cause = Some(error),
                read => return read,
            }
        }
        let Some(others) = self.others(cause.as_ref()) else {
            return Err(self.nobody(cause));
        };
        // What this node's copy has told is not told again.
        let passed = CheckpointSource::positions(others, place, &mut |first_index, pages| {
            let known = next_index.saturating_sub(first_index);
            let rest = pages.without(known);
            if !rest.is_empty() {
                take(first_index.max(next_index), rest);
            }
        });
        passed.map_err(|error| self.failed(cause, error))
    }

    fn pages(&self, place: usize, out: &mut PagesOut<'_>) -> Result<(), ReadError<StoreError>> {
        let (mut next_index, mut cause) = (0, None);
        if let Some(here) = &self.here {
            match here.write_pages(place, out, &mut next_index) {
                Err(ReadError::Source(error)) => cause = Some(error),
                written => return written,
            }
        }
        let Some(others) = self.others(cause.as_ref()) else {
            return Err(ReadError::Source(self.nobody(cause)));
        };
        let before = match &self.here {
            Some(here) => here
                .digest_before(place, next_index)
                .map_err(ReadError::Source)?,
            None => MapDigest::default(),
        };
        let passed = others.pages(place, next_index, before, |run| out.put(run));
        passed.map_err(|error| self.error_of(cause, error))
    }

    fn hold(&self) {
        if let Some(Some(others)) = self.others.get() {
            CheckpointSource::hold(others);
        }
    }

    fn range(
        &self,
        place: usize,
        first_index: u64,
        pages: u64,
        take: &mut dyn FnMut(PageRun<'_>) -> io::Result<()>,
    ) -> Result<(), ReadError<StoreError>> {
        let (mut next_index, mut cause) = (first_index, None);
        if let Some(here) = &self.here {
            let read = here.range(place, first_index, pages, &mut |run| {
                let (first_index, pages) = run.span();
                take(run)?;
                next_index = first_index + pages;
                Ok(())
            });
            match read {
                Err(ReadError::Source(error)) => cause = Some(error),
                read => return read,
            }
        }
        let Some(others) = self.others(cause.as_ref()) else {
            return Err(ReadError::Source(self.nobody(cause)));
        };
        let left = first_index.saturating_add(pages).saturating_sub(next_index);
        let passed = others.range(place, next_index, left, take);
        passed.map_err(|error| self.error_of(cause, error))
    }
}

impl Failover<'_> {
    /// Returns the error of a read from the other nodes, which followed on `cause`.
    fn error_of(
        &self,
        cause: Option<StoreError>,
        error: ReadError<control::Error>,
    ) -> ReadError<StoreError> {
        match error {
            ReadError::Taker(error) => ReadError::Taker(error),
            ReadError::Source(error) => ReadError::Source(self.failed(cause, error)),
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
            event = "read-failed-everywhere",
            checkpoint = checkpoint_name(&self.record),
            error = error.message,
            "nor do others have it"
        );
        cause
    }

    fn nobody(&self, cause: Option<StoreError>) -> StoreError {
        cause.unwrap_or_else(|| not_here(&self.record))
    }
}
