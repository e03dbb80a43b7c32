//! The embedded catalog.
//!
//! Trees: `jobs` has `job NUL generation` (big-endian, so that a scan is in order), `parked` has the session id,
//! `last` has the highest generation a job ever used; `region` under `position` the region's uuid and position.
//! Values are protobuf [`Checkpoint`]s.

use std::fs::File;
use std::ops::Bound;
use std::path::{Path, PathBuf};

use permafrost_protocol::control::Checkpoint;
use prost::Message;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use sled::{Db, IVec, Tree};

use super::{Around, Catalog, CatalogError, RegionPosition};

/// sled's page cache, bytes. Its default of 1 GiB is out of all proportion to an index of this size.
const CACHE_BYTES: u64 = 4 << 20;

/// Origin of the catalog that [`SledCatalog::open_or_replace`] returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The catalog existed.
    Existing,
    /// There was no catalog; an empty one was created.
    Created,
    /// The existing catalog did not open, and was renamed.
    Replaced {
        /// Path to which the unusable catalog was renamed.
        aside: PathBuf,
        /// Error with which it did not open.
        reason: String,
    },
}

/// The catalog in a sled database.
pub struct SledCatalog {
    jobs: Tree,
    parked: Tree,
    last: Tree,
    region: Tree,
    // Last but one, so that the trees go first.
    db: Db,
    /// Lock on the database's directory, held as long as the database is open.
    _lock: Option<File>,
}

impl SledCatalog {
    /// Opens the database at `path`. One that does not open, or whose records do not decode, is renamed and
    /// replaced by an empty one: the caller reconciles it with the regions in any case.
    ///
    /// Its directory is locked as long as it is open: a database in another's hands does not open either, and
    /// must not be put aside under them.
    ///
    /// # Errors
    /// Another process has it; an empty database cannot be made there either.
    pub fn open_or_replace(path: &Path) -> Result<(Self, Opened), CatalogError> {
        let lock = lock_directory(path)?;
        let existed = path.exists();
        // sled is known to panic on some damaged files.
        let attempt = std::panic::catch_unwind(|| {
            let catalog = Self::open(path)?;
            // Each record is decoded, and none kept.
            catalog.visit_sealed(("", 0), &mut |_| true)?;
            catalog.all_parked()?;
            Ok::<_, CatalogError>(catalog)
        });
        let reason = match attempt {
            Ok(Ok(catalog)) => {
                let opened = if existed {
                    Opened::Existing
                } else {
                    Opened::Created
                };
                return Ok((catalog.with(lock), opened));
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the database library panicked".to_owned(),
        };
        let aside = put_aside(path).map_err(sled::Error::from)?;
        Ok((
            Self::open(path)?.with(lock),
            Opened::Replaced { aside, reason },
        ))
    }

    fn open(path: &Path) -> Result<Self, CatalogError> {
        let db = sled::Config::new()
            .path(path)
            .cache_capacity(CACHE_BYTES)
            .open()?;
        Ok(Self {
            jobs: db.open_tree("jobs")?,
            parked: db.open_tree("parked")?,
            last: db.open_tree("last")?,
            region: db.open_tree("region")?,
            db,
            _lock: None,
        })
    }

    fn with(self, lock: File) -> Self {
        Self {
            _lock: Some(lock),
            ..self
        }
    }
}

/// Locks the directory that `path` is in.
fn lock_directory(path: &Path) -> Result<File, CatalogError> {
    let lock = File::open(path.parent().unwrap_or(path)).map_err(sled::Error::from)?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(Errno::WOULDBLOCK) => Err(CatalogError::InUse {
            path: path.to_owned(),
        }),
        Err(errno) => Err(sled::Error::from(std::io::Error::from(errno)).into()),
    }
}

/// Renames what is at `path` to the first free `path.unusable-N`.
fn put_aside(path: &Path) -> std::io::Result<PathBuf> {
    let mut n = 0_u32;
    let aside = loop {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".unusable-{n}"));
        let candidate = PathBuf::from(name);
        if !candidate.exists() {
            break candidate;
        }
        n += 1;
    };
    std::fs::rename(path, &aside)?;
    Ok(aside)
}

impl Catalog for SledCatalog {
    fn put(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        let value = checkpoint.encode_to_vec();
        if checkpoint.generation == 0 {
            self.parked.insert(checkpoint.session.as_bytes(), value)?;
            return Ok(());
        }
        self.jobs
            .insert(job_key(&checkpoint.job, checkpoint.generation), value)?;
        if checkpoint.generation > self.last_generation(&checkpoint.job)? {
            self.last.insert(
                checkpoint.job.as_bytes(),
                &checkpoint.generation.to_be_bytes(),
            )?;
        }
        Ok(())
    }

    fn remove(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        if checkpoint.generation == 0 {
            self.parked.remove(checkpoint.session.as_bytes())?;
        } else {
            self.jobs
                .remove(job_key(&checkpoint.job, checkpoint.generation))?;
        }
        Ok(())
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Checkpoint>, CatalogError> {
        let key = job_key(job, generation);
        self.jobs
            .get(&key)?
            .map(|value| decode(&key, &value))
            .transpose()
    }

    fn head(&self, job: &str) -> Result<Option<Checkpoint>, CatalogError> {
        let last = self
            .jobs
            .scan_prefix(job_prefix(job))
            .next_back()
            .transpose()?;
        last.map(|(key, value)| decode(&key, &value)).transpose()
    }

    fn around(&self, job: &str, generation: u64) -> Result<Around, CatalogError> {
        let at = job_key(job, generation);
        let older = self.jobs.range(job_prefix(job)..at.clone()).next_back();
        let after = (Bound::Excluded(at), Bound::Included(job_key(job, u64::MAX)));
        let newer = self.jobs.range::<Vec<u8>, _>(after).next();
        let decoded = |found: Option<sled::Result<(IVec, IVec)>>| {
            let found = found.transpose()?;
            found.map(|(key, value)| decode(&key, &value)).transpose()
        };
        Ok(Around {
            older: decoded(older)?,
            newer: decoded(newer)?,
        })
    }

    fn parked(&self, session: &str) -> Result<Option<Checkpoint>, CatalogError> {
        self.parked
            .get(session)?
            .map(|value| decode(session.as_bytes(), &value))
            .transpose()
    }

    fn list(&self, job: Option<&str>) -> Result<Vec<Checkpoint>, CatalogError> {
        let sealed = match job {
            Some(job) => self.jobs.scan_prefix(job_prefix(job)),
            None => self.jobs.iter(),
        };
        let parked = self.parked.iter();
        sealed
            .chain(parked)
            .filter_map(|item| {
                let record = item
                    .map_err(CatalogError::from)
                    .and_then(|(key, value): (IVec, IVec)| decode(&key, &value));
                match record {
                    Ok(record) if job.is_some_and(|job| record.job != job) => None,
                    other => Some(other),
                }
            })
            .collect()
    }

    fn visit_sealed(
        &self,
        (job, generation): (&str, u64),
        visit: &mut dyn FnMut(Checkpoint) -> bool,
    ) -> Result<(), CatalogError> {
        let after = Bound::Excluded(job_key(job, generation));
        for item in self.jobs.range::<Vec<u8>, _>((after, Bound::Unbounded)) {
            let (key, value) = item?;
            if !visit(decode(&key, &value)?) {
                break;
            }
        }
        Ok(())
    }

    fn all_parked(&self) -> Result<Vec<Checkpoint>, CatalogError> {
        let records = self.parked.iter().map(|item| {
            let (key, value) = item?;
            decode(&key, &value)
        });
        records.collect()
    }

    fn note(&self, position: &RegionPosition) -> Result<(), CatalogError> {
        let mut value = position.position.to_be_bytes().to_vec();
        value.extend_from_slice(position.region.as_bytes());
        self.region.insert("position", value)?;
        Ok(())
    }

    fn noted(&self) -> Result<Option<RegionPosition>, CatalogError> {
        let value = self.region.get("position")?;
        Ok(value.and_then(|value| {
            let (position, region) = value.split_first_chunk()?;
            Some(RegionPosition {
                region: std::str::from_utf8(region).ok()?.to_owned(),
                position: u64::from_be_bytes(*position),
            })
        }))
    }

    fn flush(&self) -> Result<(), CatalogError> {
        self.db.flush()?;
        Ok(())
    }

    fn next_generation(&self, job: &str) -> Result<u64, CatalogError> {
        let newest = self.head(job)?.map_or(0, |head| head.generation);
        Ok(newest.max(self.last_generation(job)?) + 1)
    }
}

impl SledCatalog {
    fn last_generation(&self, job: &str) -> Result<u64, CatalogError> {
        let value = self.last.get(job)?;
        Ok(value
            .and_then(|value| value.as_ref().try_into().ok().map(u64::from_be_bytes))
            .unwrap_or(0))
    }
}

/// Returns the prefix of a job's keys. A job name has no NUL, so no job's keys are a prefix of another's.
fn job_prefix(job: &str) -> Vec<u8> {
    let mut key = job.as_bytes().to_vec();
    key.push(0);
    key
}

fn job_key(job: &str, generation: u64) -> Vec<u8> {
    let mut key = job_prefix(job);
    key.extend_from_slice(&generation.to_be_bytes());
    key
}

fn decode(key: &[u8], value: &[u8]) -> Result<Checkpoint, CatalogError> {
    Checkpoint::decode(value).map_err(|source| CatalogError::Record {
        key: String::from_utf8_lossy(key).into_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(job: &str, generation: u64) -> Checkpoint {
        Checkpoint {
            job: job.into(),
            generation,
            id: format!("{job}-{generation}"),
            ..Checkpoint::default()
        }
    }

    #[test]
    fn generations_are_ordered_and_never_reused() {
        let dir = tempfile::tempdir().unwrap();
        let (catalog, opened) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        assert_eq!(opened, Opened::Created);
        for generation in [1, 2, 255, 256, 300] {
            catalog.put(&sealed("a", generation)).unwrap();
        }
        catalog.put(&sealed("ab", 900)).unwrap();
        assert_eq!(catalog.head("a").unwrap().unwrap().generation, 300);
        assert_eq!(catalog.list(Some("a")).unwrap().len(), 5);
        for (generation, older, newer) in [
            (1, 0, 2),
            (3, 2, 255),
            (256, 255, 300),
            (300, 256, 0),
            (u64::MAX, 300, 0),
        ] {
            let around = catalog.around("a", generation).unwrap();
            let number = |one: &Option<Checkpoint>| one.as_ref().map_or(0, |one| one.generation);
            assert_eq!(
                (number(&around.older), number(&around.newer)),
                (older, newer)
            );
        }
        catalog.remove(&sealed("a", 300)).unwrap();
        assert_eq!(catalog.head("a").unwrap().unwrap().generation, 256);
        assert_eq!(catalog.next_generation("a").unwrap(), 301);
        assert_eq!(catalog.next_generation("new").unwrap(), 1);
    }

    #[test]
    fn a_database_that_does_not_open_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalog");
        drop(SledCatalog::open_or_replace(&path).unwrap());
        for file in ["conf", "db"] {
            std::fs::write(path.join(file), b"not a database").unwrap();
        }
        let (catalog, opened) = SledCatalog::open_or_replace(&path).unwrap();
        let Opened::Replaced { aside, .. } = opened else {
            panic!("opened {opened:?}")
        };
        assert!(aside.join("conf").exists());
        assert!(catalog.list(None).unwrap().is_empty());
    }

    #[test]
    fn a_database_that_another_has_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("catalog");
        let (first, _) = SledCatalog::open_or_replace(&path).unwrap();
        first.put(&sealed("a", 1)).unwrap();
        let refused = SledCatalog::open_or_replace(&path).map(|(_, opened)| opened);
        assert!(
            matches!(refused, Err(CatalogError::InUse { .. })),
            "{refused:?}"
        );
        drop(first);
        let (again, opened) = SledCatalog::open_or_replace(&path).unwrap();
        assert_eq!(opened, Opened::Existing);
        assert_eq!(again.list(None).unwrap().len(), 1);
    }
}
