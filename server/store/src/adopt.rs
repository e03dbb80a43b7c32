//! Adopts a parked dump: gives it a job and its small images.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use permafrost_criu::directory::ImagesDir;
use permafrost_pmem::{BlobError, StoredCheckpoint};
use permafrost_protocol::control;
use permafrost_protocol::control::{ErrorCode, ReportedError};
use permafrost_protocol::manifest::{Image, Manifest, Origin, TakenBy};

use super::dump::map_root;
use super::evidence::Evidence;
use super::images::{DirectoryImages, holds_pages, store_small};
use super::seal::{DumpContents, Replaced, check_images_fit, check_tells_processes, kind_of};
use super::{Store, StoreError, digest, manifest_of};
use crate::clock::unix_ms;
use crate::reader::checkpoint_name;
use crate::{MissingObject, ReadingError, SealingError};

/// Name of the statistics image, which CRIU writes after everything else: an adoption by CRIU's action script
/// comes before it.
const STATS: &str = "stats-dump";

/// A parked dump that becomes a checkpoint of a job.
pub struct Adoption<'a> {
    /// Session of the parked dump; empty: the one parked dump that the images belong to.
    pub session: &'a str,
    /// Job of the checkpoint.
    pub job: &'a str,
    /// Facts that were not known when the session was opened.
    pub origin: Option<Origin>,
    /// Time since the images were written. Used where the files do not tell.
    pub images_age: Option<Duration>,
    /// The images may have been written at any time.
    pub ignore_times: bool,
    /// Client that adopts the dump, as it was authenticated; empty: the client that the pages came from.
    pub taken_by: &'a str,
    /// Sessions that may be found without being named.
    pub may_find: &'a dyn Fn(&str) -> bool,
}

impl<'a> Adoption<'a> {
    /// Returns an adoption into `job` with everything else left open.
    #[must_use]
    pub fn into_job(job: &'a str) -> Self {
        Self {
            session: "",
            job,
            origin: None,
            images_age: None,
            ignore_times: false,
            taken_by: "",
            may_find: &|_| true,
        }
    }
}

impl Store {
    /// Gives a parked session a job and its small images, in one step: before it there is the parked session, after
    /// it the checkpoint. Adopting again returns the same checkpoint. `may_adopt` checks the parked session before it
    /// is changed. The caller holds the lock on the job.
    ///
    /// # Errors
    /// The images match no parked session, or several equally well; `may_adopt` fails; the region is full or fails.
    pub fn adopt(
        &self,
        adoption: &Adoption<'_>,
        images: OwnedFd,
        may_adopt: impl FnOnce(&control::Checkpoint) -> Result<(), StoreError>,
    ) -> Result<control::Checkpoint, StoreError> {
        let job = adoption.job;
        super::check_origin(adoption.origin.as_ref())?;
        let dir = ImagesDir::new(images)?;
        let evidence = Evidence::read(&dir, adoption.images_age)?;
        if let Some(adopted) = self.adopted_before(adoption, &dir, &evidence)? {
            return Ok(adopted);
        }
        let record = if adoption.session.is_empty() {
            self.parked_for_images(adoption, &evidence)?
        } else {
            self.parked_by_name(adoption, &evidence)?
        };
        may_adopt(&record)?;
        let parked = self.checkpoint(&record.id)?;
        let manifest = manifest_of(&parked)?;

        let mut shadow = self.begin_shadow(job)?;
        shadow.inherit(&parked);
        let mut images = DirectoryImages::new(dir, &manifest.spaces)?;
        let images = store_small(&mut images, &mut shadow, None)?;
        let kind = kind_of(&images);
        check_images_fit(kind, &images, &manifest.spaces)?;
        let contents = DumpContents {
            job: job.to_owned(),
            kind,
            parent_generation: if manifest.job == job {
                manifest.parent_generation
            } else {
                0
            },
            origin: merged(manifest.origin, adoption.origin.clone()),
            images,
            spaces: digest::with_digests(&parked, manifest.spaces)?,
            session: manifest.session,
            taken_by: adopted_from(manifest.taken_by, adoption.taken_by),
        };
        let replaced = Replaced {
            id: parked.id(),
            record,
            added_bytes: manifest.added_bytes,
        };
        let adopted = self.commit(shadow, contents, None, Some(replaced), &|| true)?;
        // The checkpoint has a job only now, whose dumps it may be compared with.
        self.observer.learn_history(std::slice::from_ref(&adopted));
        Ok(adopted)
    }

    /// Returns the checkpoint that an earlier adoption of these images has made.
    fn adopted_before(
        &self,
        adoption: &Adoption<'_>,
        dir: &ImagesDir,
        evidence: &Evidence,
    ) -> Result<Option<control::Checkpoint>, StoreError> {
        let by_name = !adoption.session.is_empty();
        let mut listed = self.catalog.list((!by_name).then_some(adoption.job))?;
        listed.retain(|record| record.generation > 0 && !record.session.is_empty());
        if by_name {
            listed.retain(|record| record.session == adoption.session);
        }
        listed.sort_unstable_by_key(|record| std::cmp::Reverse(record.generation));
        for record in listed {
            let checkpoint = self.checkpoint(&record.id)?;
            let manifest = manifest_of(&checkpoint)?;
            let was_parked =
                (manifest.origin.as_ref()).is_some_and(|origin| origin.pages_closed_unix_ms > 0);
            let in_time =
                adoption.ignore_times || evidence.check_time(manifest.origin.as_ref()).is_ok();
            if record.job == adoption.job
                && was_parked
                && in_time
                && has_images(&checkpoint, &manifest, dir)?
            {
                return Ok(Some(record));
            }
            if by_name {
                return Err(SealingError::Adopted {
                    checkpoint: checkpoint_name(&record),
                    session: record.session,
                }
                .into());
            }
        }
        Ok(None)
    }

    fn parked_by_name(
        &self,
        adoption: &Adoption<'_>,
        evidence: &Evidence,
    ) -> Result<control::Checkpoint, StoreError> {
        let session = adoption.session;
        let record = self.catalog.parked(session)?;
        let record = record.ok_or_else(|| {
            StoreError::NotFound(MissingObject::ParkedSession(session.to_owned()))
        })?;
        self.check_belongs(&record, evidence, adoption.ignore_times)?;
        Ok(record)
    }

    /// Returns the one parked session that the images belong to.
    fn parked_for_images(
        &self,
        adoption: &Adoption<'_>,
        evidence: &Evidence,
    ) -> Result<control::Checkpoint, StoreError> {
        let wanted = evidence.processes();
        check_tells_processes(&wanted)?;
        let (mut fitting, mut misfits) = (Vec::new(), Vec::new());
        for record in self.catalog.all_parked()? {
            if !(adoption.may_find)(&record.session) {
                continue;
            }
            match self.check_belongs(&record, evidence, adoption.ignore_times) {
                Ok(()) => fitting.push(record),
                Err(error) if error.code() == ErrorCode::Invalid => {
                    misfits.push(format!("{}: {error}", named(&record)));
                }
                Err(error) => return Err(error),
            }
        }
        match fitting.len() {
            1 => Ok(fitting.swap_remove(0)),
            0 => Err(StoreError::NotFound(MissingObject::ParkedDump {
                processes: wanted,
                misfits,
            })),
            _ => Err(SealingError::Ambiguous {
                processes: wanted,
                sessions: fitting.iter().map(named).collect(),
            }
            .into()),
        }
    }

    fn check_belongs(
        &self,
        record: &control::Checkpoint,
        evidence: &Evidence,
        ignore_times: bool,
    ) -> Result<(), StoreError> {
        let parked = self.checkpoint(&record.id)?;
        let manifest = manifest_of(&parked)?;
        evidence.check_pages(&parked, &manifest)?;
        if ignore_times {
            return Ok(());
        }
        evidence.check_time(manifest.origin.as_ref())
    }
}

/// Formats the name of a parked session with the facts that distinguish it from others.
fn named(record: &control::Checkpoint) -> String {
    let processes = record.parked_processes.iter().map(|process| {
        if process.program.is_empty() {
            process.pid.to_string()
        } else {
            format!("{} {}", process.pid, process.program)
        }
    });
    format!(
        "{} ({}; {} s ago)",
        record.session,
        processes.collect::<Vec<_>>().join(", "),
        unix_ms().saturating_sub(record.created_unix_ms) / 1_000
    )
}

/// Compares a checkpoint's small images with those of a directory, byte by byte, but for the statistics.
fn has_images(
    checkpoint: &Arc<StoredCheckpoint>,
    manifest: &Manifest,
    dir: &ImagesDir,
) -> Result<bool, StoreError> {
    let mut names = dir.small_images(|name| holds_pages(name, &manifest.spaces))?;
    names.retain(|name| name != STATS);
    let mut kept: Vec<&Image> = manifest.images.iter().collect();
    kept.retain(|image| image.name != STATS);
    kept.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if !kept.iter().map(|image| &image.name).eq(&names) {
        return Ok(false);
    }
    for image in kept {
        if !is_same(checkpoint, image, dir)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_same(
    checkpoint: &Arc<StoredCheckpoint>,
    image: &Image,
    dir: &ImagesDir,
) -> Result<bool, StoreError> {
    let mut file = dir.open(&image.name)?;
    let metadata = file.metadata();
    let len_bytes = metadata
        .map_err(StoreError::io(format!("stat image {}", image.name)))?
        .len();
    if len_bytes != image.len_bytes {
        return Ok(false);
    }
    let mut buffer = Vec::new();
    let map = checkpoint.map(&map_root(&image.map_root)?);
    let compared = map.read_blob(image.offset_bytes, image.len_bytes, |piece| {
        buffer.resize(piece.len(), 0);
        file.read_exact(&mut buffer)?;
        if buffer == piece {
            Ok(())
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    });
    match compared {
        Ok(()) => Ok(true),
        Err(BlobError::Page(source)) => Err(ReadingError::Corrupt {
            part: format!("image {}", image.name),
            source,
        }
        .into()),
        // The image differs, or has become shorter.
        Err(_) => Ok(false),
    }
}

/// Returns the client that is recorded for an adopted checkpoint. A client that adopts an agent's pages on a
/// storage node does not make them the node's.
fn adopted_from(parked: String, adopter: &str) -> String {
    let is_node = |client: &str| matches!(TakenBy::parse(client), TakenBy::Node(_));
    if adopter.is_empty() || is_node(adopter) && !is_node(&parked) {
        parked
    } else {
        adopter.to_owned()
    }
}

/// Merges the facts known when the session was opened or parked with those that the adopter adds.
fn merged(known: Option<Origin>, added: Option<Origin>) -> Option<Origin> {
    let (Some(mut known), Some(added)) = (known.clone(), added.clone()) else {
        return added.or(known);
    };
    known.restore_options.extend(added.restore_options);
    for (known, added) in [
        (&mut known.criu_version, added.criu_version),
        (&mut known.host, added.host),
        (&mut known.boot_id, added.boot_id),
    ] {
        if known.is_empty() {
            *known = added;
        }
    }
    Some(known)
}
