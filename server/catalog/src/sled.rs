//! The embedded catalog.
//!
//! Trees: `jobs` has `job NUL generation` (big-endian, so that a scan is in order), `parked` has the session id,
//! `last` has the highest generation a job ever used; `region` under `position` the region's uuid and position.
//! Values are protobuf [`Checkpoint`]s.
//!
//! An encrypted catalog has a code of 16 bytes in place of `job NUL` and of the job in `last`, and its values are
//! encrypted. Codes are in no order, so the names of its jobs are kept in memory, in order.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Bound;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use permafrost_protocol::control::Checkpoint;
use prost::Message;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use sled::{Db, IVec, Tree};

use super::{Around, Catalog, CatalogError, RecordCipher, RegionPosition};

/// sled's page cache, bytes. Its default of 1 GiB is out of all proportion to an index of this size.
const CACHE_BYTES: u64 = 4 << 20;

/// Most time for sled to release its own lock. Threads of a database that was closed keep that for some milliseconds; no
/// other process has it, as the directory is locked.
const RELEASED_WITHIN: Duration = Duration::from_secs(10);

/// Interval at which sled's own lock is tried.
const RELEASE_TICK: Duration = Duration::from_millis(5);

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
    cipher: Option<Arc<dyn RecordCipher>>,
    /// Jobs with sealed checkpoints, of an encrypted catalog. A job is added behind its record, and removed only while
    /// it has none, so none is missing.
    jobs_in_order: RwLock<BTreeSet<Box<str>>>,
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
        Self::open_with(path, None)
    }

    /// Opens or makes an encrypted database, as [`open_or_replace`](Self::open_or_replace) does. One that another key
    /// was used for is replaced, too.
    ///
    /// # Errors
    /// The errors of [`open_or_replace`](Self::open_or_replace).
    pub fn open_encrypted(
        path: &Path,
        cipher: Arc<dyn RecordCipher>,
    ) -> Result<(Self, Opened), CatalogError> {
        Self::open_with(path, Some(cipher))
    }

    fn open_with(
        path: &Path,
        cipher: Option<Arc<dyn RecordCipher>>,
    ) -> Result<(Self, Opened), CatalogError> {
        let lock = lock_directory(path)?;
        let existed = path.exists();
        // sled is known to panic on some damaged files.
        let attempt = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let catalog = Self::open(path, cipher.clone())?;
            // Each record is decoded, and none kept.
            catalog.visit_all(&mut |record| {
                catalog.remember(&record.job);
                true
            })?;
            catalog.all_parked()?;
            Ok::<_, CatalogError>(catalog)
        }));
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
            Self::open(path, cipher)?.with(lock),
            Opened::Replaced { aside, reason },
        ))
    }

    fn open(path: &Path, cipher: Option<Arc<dyn RecordCipher>>) -> Result<Self, CatalogError> {
        let config = sled::Config::new().path(path).cache_capacity(CACHE_BYTES);
        let until = Instant::now() + RELEASED_WITHIN;
        let db = loop {
            match config.open() {
                Err(error) if is_locked(&error) && Instant::now() < until => {
                    std::thread::sleep(RELEASE_TICK);
                }
                opened => break opened?,
            }
        };
        Ok(Self {
            jobs: db.open_tree("jobs")?,
            parked: db.open_tree("parked")?,
            last: db.open_tree("last")?,
            region: db.open_tree("region")?,
            cipher,
            jobs_in_order: RwLock::default(),
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

/// Returns true if sled's own lock is taken, of which only its message tells.
fn is_locked(error: &sled::Error) -> bool {
    let sled::Error::Io(error) = error else {
        return false;
    };
    error.to_string().starts_with("could not acquire lock")
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
            let key = checkpoint.session.as_bytes();
            self.parked.insert(key, self.seal(key, value))?;
            return Ok(());
        }
        let key = self.job_key(&checkpoint.job, checkpoint.generation);
        let value = self.seal(&key, value);
        self.jobs.insert(key, value)?;
        self.remember(&checkpoint.job);
        self.raise_last(&checkpoint.job, checkpoint.generation)
    }

    fn remove(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        if checkpoint.generation == 0 {
            self.parked.remove(checkpoint.session.as_bytes())?;
        } else {
            self.jobs
                .remove(self.job_key(&checkpoint.job, checkpoint.generation))?;
            self.forget(&checkpoint.job)?;
        }
        Ok(())
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Checkpoint>, CatalogError> {
        let key = self.job_key(job, generation);
        self.jobs
            .get(&key)?
            .map(|value| self.decode(&key, &value))
            .transpose()
    }

    fn head(&self, job: &str) -> Result<Option<Checkpoint>, CatalogError> {
        let last = self
            .jobs
            .scan_prefix(self.job_prefix(job))
            .next_back()
            .transpose()?;
        last.map(|(key, value)| self.decode(&key, &value))
            .transpose()
    }

    fn around(&self, job: &str, generation: u64) -> Result<Around, CatalogError> {
        let at = self.job_key(job, generation);
        let older = self
            .jobs
            .range(self.job_prefix(job)..at.clone())
            .next_back();
        let after = (
            Bound::Excluded(at),
            Bound::Included(self.job_key(job, u64::MAX)),
        );
        let newer = self.jobs.range::<Vec<u8>, _>(after).next();
        let decoded = |found: Option<sled::Result<(IVec, IVec)>>| {
            let found = found.transpose()?;
            found
                .map(|(key, value)| self.decode(&key, &value))
                .transpose()
        };
        Ok(Around {
            older: decoded(older)?,
            newer: decoded(newer)?,
        })
    }

    fn parked(&self, session: &str) -> Result<Option<Checkpoint>, CatalogError> {
        self.parked
            .get(session)?
            .map(|value| self.decode(session.as_bytes(), &value))
            .transpose()
    }

    fn list(&self, job: Option<&str>) -> Result<Vec<Checkpoint>, CatalogError> {
        let mut records = Vec::new();
        match job {
            Some(job) => {
                for item in self.jobs.scan_prefix(self.job_prefix(job)) {
                    let (key, value) = item?;
                    records.push(self.decode(&key, &value)?);
                }
            }
            None => self.visit_sealed(("", 0), &mut |record| {
                records.push(record);
                true
            })?,
        }
        let mut parked = self.all_parked()?;
        parked.retain(|record| job.is_none_or(|job| record.job == job));
        records.extend(parked);
        Ok(records)
    }

    fn visit_sealed(
        &self,
        (job, generation): (&str, u64),
        visit: &mut dyn FnMut(Checkpoint) -> bool,
    ) -> Result<(), CatalogError> {
        let after = Bound::Excluded(self.job_key(job, generation));
        if self.cipher.is_none() {
            self.visit_range((after, Bound::Unbounded), visit)?;
            return Ok(());
        }
        // Job by job: the rest of this one, and then those behind it.
        let last = |job: &str| Bound::Included(self.job_key(job, u64::MAX));
        let mut goes_on = self.visit_range((after, last(job)), visit)?;
        let mut before = Box::<str>::from(job);
        while goes_on && let Some(next) = self.job_after(&before) {
            let first = Bound::Included(self.job_key(&next, 0));
            goes_on = self.visit_range((first, last(&next)), visit)?;
            before = next;
        }
        Ok(())
    }

    fn all_parked(&self) -> Result<Vec<Checkpoint>, CatalogError> {
        let records = self.parked.iter().map(|item| {
            let (key, value) = item?;
            self.decode(&key, &value)
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
    /// Passes over all sealed checkpoints, in the order of their keys, until `visit` returns false.
    fn visit_all(&self, visit: &mut dyn FnMut(Checkpoint) -> bool) -> Result<(), CatalogError> {
        self.visit_range((Bound::Unbounded, Bound::Unbounded), visit)
            .map(drop)
    }

    /// Returns false if `visit` has returned false.
    fn visit_range(
        &self,
        range: (Bound<Vec<u8>>, Bound<Vec<u8>>),
        visit: &mut dyn FnMut(Checkpoint) -> bool,
    ) -> Result<bool, CatalogError> {
        for item in self.jobs.range::<Vec<u8>, _>(range) {
            let (key, value) = item?;
            if !visit(self.decode(&key, &value)?) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds the name of a job that has a record, if names are not in the keys.
    fn remember(&self, job: &str) {
        if self.cipher.is_some() && !self.jobs_in_order.read().contains(job) {
            self.jobs_in_order.write().insert(job.into());
        }
    }

    /// Removes the name of a job that has no record left.
    fn forget(&self, job: &str) -> Result<(), CatalogError> {
        if self.cipher.is_none() {
            return Ok(());
        }
        let mut jobs = self.jobs_in_order.write();
        let left = self.jobs.scan_prefix(self.job_prefix(job)).next();
        if left.transpose()?.is_none() {
            jobs.remove(job);
        }
        Ok(())
    }

    fn job_after(&self, job: &str) -> Option<Box<str>> {
        let jobs = self.jobs_in_order.read();
        let after = (Bound::Excluded(job), Bound::Unbounded);
        jobs.range::<str, _>(after).next().cloned()
    }

    fn last_generation(&self, job: &str) -> Result<u64, CatalogError> {
        let value = self.last.get(self.job_code(job))?;
        Ok(value
            .and_then(|value| value.as_ref().try_into().ok().map(u64::from_be_bytes))
            .unwrap_or(0))
    }

    /// Records that a job has used the numbers up to `generation`.
    fn raise_last(&self, job: &str, generation: u64) -> Result<(), CatalogError> {
        if generation > self.last_generation(job)? {
            let key = self.job_code(job);
            self.last.insert(key, &generation.to_be_bytes())?;
        }
        Ok(())
    }

    /// Adds everything that a catalog in the clear has.
    ///
    /// # Errors
    /// The index cannot be written.
    pub fn take_over(&self, contents: &Contents) -> Result<(), CatalogError> {
        for record in &contents.records {
            self.put(record)?;
        }
        for (job, generation) in &contents.last {
            self.raise_last(job, *generation)?;
        }
        if let Some(position) = &contents.position {
            self.note(position)?;
        }
        self.flush()
    }

    /// Returns everything in a catalog in the clear.
    ///
    /// # Errors
    /// The index cannot be read.
    pub fn contents(&self) -> Result<Contents, CatalogError> {
        let mut last = Vec::new();
        for item in &self.last {
            let (key, value) = item?;
            let job = String::from_utf8_lossy(&key).into_owned();
            let number = value.as_ref().try_into().map_or(0, u64::from_be_bytes);
            last.push((job, number));
        }
        Ok(Contents {
            records: self.list(None)?,
            last,
            position: self.noted()?,
        })
    }

    fn job_code(&self, job: &str) -> Vec<u8> {
        match &self.cipher {
            Some(cipher) => cipher.name(job.as_bytes()),
            None => job.as_bytes().to_vec(),
        }
    }

    /// Returns the prefix of a job's keys. A job name has no NUL, so no job's keys are a prefix of another's.
    fn job_prefix(&self, job: &str) -> Vec<u8> {
        let mut key = self.job_code(job);
        if self.cipher.is_none() {
            key.push(0);
        }
        key
    }

    fn job_key(&self, job: &str, generation: u64) -> Vec<u8> {
        let mut key = self.job_prefix(job);
        key.extend_from_slice(&generation.to_be_bytes());
        key
    }

    fn seal(&self, key: &[u8], record: Vec<u8>) -> Vec<u8> {
        match &self.cipher {
            Some(cipher) => cipher.seal(key, &record),
            None => record,
        }
    }

    fn decode(&self, key: &[u8], value: &[u8]) -> Result<Checkpoint, CatalogError> {
        let opened = match &self.cipher {
            Some(cipher) => Cow::Owned(cipher.open(key, value).ok_or(CatalogError::Encrypted)?),
            None => Cow::Borrowed(value),
        };
        Checkpoint::decode(&*opened).map_err(|source| CatalogError::Record {
            key: String::from_utf8_lossy(key).into_owned(),
            source,
        })
    }
}

/// Everything in a catalog.
pub struct Contents {
    records: Vec<Checkpoint>,
    /// Highest generation that each job ever used.
    last: Vec<(String, u64)>,
    position: Option<RegionPosition>,
}

#[cfg(test)]
#[path = "sled_tests.rs"]
mod tests;
