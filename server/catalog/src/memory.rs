//! A catalog in memory: of a region that is only looked at, and whose names are not to be written anywhere.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;

use parking_lot::Mutex;
use permafrost_protocol::control::Checkpoint;

use super::{Around, Catalog, CatalogError, RegionPosition};

/// An index that is gone with its process.
#[derive(Default)]
pub struct MemoryCatalog(Mutex<Records>);

#[derive(Default)]
struct Records {
    sealed: BTreeMap<(String, u64), Checkpoint>,
    parked: BTreeMap<String, Checkpoint>,
    /// Highest generation that each job ever used.
    last: HashMap<String, u64>,
    position: Option<RegionPosition>,
}

impl Records {
    /// Returns the first of a job's checkpoints, or of those of later jobs, behind a generation.
    fn next(&self, job: &str, generation: u64) -> Option<&Checkpoint> {
        let after = Bound::Excluded((job.to_owned(), generation));
        let mut behind = self.sealed.range((after, Bound::Unbounded));
        behind.next().map(|(_, record)| record)
    }

    /// Returns the last of a job's checkpoints before a generation.
    fn before(&self, job: &str, generation: u64) -> Option<&Checkpoint> {
        let of_job = (job.to_owned(), 0)..(job.to_owned(), generation);
        let last = self.sealed.range(of_job).next_back();
        last.map(|(_, record)| record)
    }
}

impl Catalog for MemoryCatalog {
    fn put(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        let mut records = self.0.lock();
        if checkpoint.generation == 0 {
            let session = checkpoint.session.clone();
            records.parked.insert(session, checkpoint.clone());
            return Ok(());
        }
        let (job, generation) = (&checkpoint.job, checkpoint.generation);
        let last = records.last.entry(job.clone()).or_default();
        *last = generation.max(*last);
        let key = (job.clone(), generation);
        records.sealed.insert(key, checkpoint.clone());
        Ok(())
    }

    fn remove(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        let mut records = self.0.lock();
        if checkpoint.generation == 0 {
            records.parked.remove(&checkpoint.session);
        } else {
            let key = (checkpoint.job.clone(), checkpoint.generation);
            records.sealed.remove(&key);
        }
        Ok(())
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Checkpoint>, CatalogError> {
        let records = self.0.lock();
        Ok(records.sealed.get(&(job.to_owned(), generation)).cloned())
    }

    fn head(&self, job: &str) -> Result<Option<Checkpoint>, CatalogError> {
        Ok(self.0.lock().before(job, u64::MAX).cloned())
    }

    fn around(&self, job: &str, generation: u64) -> Result<Around, CatalogError> {
        let records = self.0.lock();
        let newer = records.next(job, generation);
        Ok(Around {
            older: records.before(job, generation).cloned(),
            newer: newer.filter(|newer| newer.job == job).cloned(),
        })
    }

    fn parked(&self, session: &str) -> Result<Option<Checkpoint>, CatalogError> {
        Ok(self.0.lock().parked.get(session).cloned())
    }

    fn list(&self, job: Option<&str>) -> Result<Vec<Checkpoint>, CatalogError> {
        let records = self.0.lock();
        let all = records.sealed.values().chain(records.parked.values());
        let of_job = all.filter(|record| job.is_none_or(|job| record.job == job));
        Ok(of_job.cloned().collect())
    }

    fn visit_sealed(
        &self,
        (job, generation): (&str, u64),
        visit: &mut dyn FnMut(Checkpoint) -> bool,
    ) -> Result<(), CatalogError> {
        let mut after = (job.to_owned(), generation);
        loop {
            // `visit` may change the catalog.
            let next = self.0.lock().next(&after.0, after.1).cloned();
            let Some(record) = next else {
                return Ok(());
            };
            after = (record.job.clone(), record.generation);
            if !visit(record) {
                return Ok(());
            }
        }
    }

    fn all_parked(&self) -> Result<Vec<Checkpoint>, CatalogError> {
        Ok(self.0.lock().parked.values().cloned().collect())
    }

    fn next_generation(&self, job: &str) -> Result<u64, CatalogError> {
        let last = self.0.lock().last.get(job).copied();
        Ok(last.unwrap_or(0) + 1)
    }

    fn note(&self, position: &RegionPosition) -> Result<(), CatalogError> {
        self.0.lock().position = Some(position.clone());
        Ok(())
    }

    fn noted(&self) -> Result<Option<RegionPosition>, CatalogError> {
        Ok(self.0.lock().position.clone())
    }

    fn flush(&self) -> Result<(), CatalogError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SledCatalog;

    fn record(job: &str, generation: u64) -> Checkpoint {
        Checkpoint {
            job: job.into(),
            generation,
            session: format!("{job}-{generation}"),
            ..Checkpoint::default()
        }
    }

    #[test]
    fn it_answers_as_the_database_does() {
        let dir = tempfile::tempdir().unwrap();
        let (sled, _) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        let memory = MemoryCatalog::default();
        let catalogs: [&dyn Catalog; 2] = [&sled, &memory];
        for catalog in catalogs {
            for (job, generation) in [
                ("b", 2),
                ("a/x", 300),
                ("a", 1),
                ("a", 256),
                ("a-b", 3),
                ("", 0),
            ] {
                catalog.put(&record(job, generation)).unwrap();
            }
            catalog.put(&record("a", 9)).unwrap();
            catalog.remove(&record("a", 256)).unwrap();
        }
        let visited = |catalog: &dyn Catalog, job: &str, generation| {
            let mut visited = Vec::new();
            let visit = &mut |record| {
                visited.push(record);
                visited.len() < 3
            };
            catalog.visit_sealed((job, generation), visit).unwrap();
            visited
        };
        for job in ["a", "a/x", "b", "none"] {
            let heads = catalogs.map(|catalog| catalog.head(job).unwrap());
            assert_eq!(heads[0], heads[1]);
            let next = catalogs.map(|catalog| catalog.next_generation(job).unwrap());
            assert_eq!(next[0], next[1]);
            let lists = catalogs.map(|catalog| catalog.list(Some(job)).unwrap());
            assert_eq!(lists[0], lists[1]);
            for generation in [0, 1, 8, 9, 300] {
                let around = catalogs.map(|catalog| catalog.around(job, generation).unwrap());
                assert_eq!(around[0], around[1]);
                assert_eq!(
                    visited(&sled, job, generation),
                    visited(&memory, job, generation)
                );
                let found = catalogs.map(|catalog| catalog.find(job, generation).unwrap());
                assert_eq!(found[0], found[1]);
            }
        }
        assert_eq!(sled.list(None).unwrap(), memory.list(None).unwrap());
        assert_eq!(sled.all_parked().unwrap(), memory.all_parked().unwrap());
        assert_eq!(sled.parked("-0").unwrap(), memory.parked("-0").unwrap());
    }
}
