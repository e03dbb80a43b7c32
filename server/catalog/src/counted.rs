//! A catalog that also counts the stored bytes and checkpoints of each namespace.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use permafrost_protocol::control::Checkpoint;
use permafrost_protocol::manifest::namespace_of;
use permafrost_retention::{Charged, charge};

use super::{Around, Catalog, CatalogError, RegionPosition};

/// Kind of the checkpoints that are rounds of a pre-copy, as records name it.
pub const PRE_COPY: &str = "pre-copy";

/// Checkpoints of a namespace on this node, parked ones included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Bytes that the checkpoints take: shared pages count once (see [`charge`]).
    pub bytes: u64,
    /// Number of checkpoints.
    pub checkpoints: u64,
}

/// Updates the sums of the namespaces with each put and remove. Each of these reads the index one more time;
/// two threads must not write the same record at the same time.
pub struct Counted {
    inner: Box<dyn Catalog>,
    sums: Arc<NamespaceSums>,
}

/// Amount that is stored in each namespace, and number of records of each kind.
#[derive(Debug, Default)]
pub struct NamespaceSums(Mutex<Sums>);

#[derive(Debug, Default)]
struct Sums {
    namespaces: HashMap<String, Stored>,
    kinds: BTreeMap<String, u64>,
    /// Records of rounds of pre-copies, by job and generation: a few at most.
    rounds: BTreeMap<(String, u64), Checkpoint>,
}

impl NamespaceSums {
    /// Returns how much is stored in a namespace.
    pub fn stored(&self, namespace: &str) -> Stored {
        self.sums()
            .namespaces
            .get(namespace)
            .copied()
            .unwrap_or_default()
    }

    /// Returns the namespaces in which something is stored, in no order.
    pub fn namespaces(&self) -> Vec<String> {
        self.sums().namespaces.keys().cloned().collect()
    }

    /// Returns the number of records of each kind.
    pub fn kinds(&self) -> BTreeMap<String, u64> {
        self.sums().kinds.clone()
    }

    /// Returns the rounds of pre-copies, at a cost that does not depend on the number of other records.
    pub fn rounds(&self) -> Vec<Checkpoint> {
        self.sums().rounds.values().cloned().collect()
    }

    fn sums(&self) -> MutexGuard<'_, Sums> {
        self.0.lock()
    }
}

impl Counted {
    /// Creates the catalog, without its stored records: each of them is to be counted by [`Counted::count`].
    pub fn new(inner: Box<dyn Catalog>) -> Self {
        Self {
            inner,
            sums: Arc::default(),
        }
    }

    /// Returns the catalog that is counted.
    pub fn inner(&self) -> &dyn Catalog {
        &*self.inner
    }

    /// Counts a stored record: they come by job and generation, parked ones last. `before` is the one before.
    pub fn count(&self, record: &Checkpoint, before: Option<Checkpoint>) {
        // Each counts behind the one before of its job.
        let is_of_job = |older: &Checkpoint| record.generation > 0 && older.job == record.job;
        let around = Around {
            older: before.filter(is_of_job),
            newer: None,
        };
        add(&mut self.sums.sums(), record, &around);
    }

    /// Returns the sums, which this catalog keeps up to date.
    pub fn sums(&self) -> Arc<NamespaceSums> {
        Arc::clone(&self.sums)
    }

    /// Returns the record that `record` replaces.
    fn in_place_of(&self, record: &Checkpoint) -> Result<Option<Checkpoint>, CatalogError> {
        if record.generation == 0 {
            self.inner.parked(&record.session)
        } else {
            self.inner.find(&record.job, record.generation)
        }
    }
}

impl Counted {
    /// Changes the record in the place of `record` by `change`, and the sums with it: what it counts, and what the
    /// newer one of its job counts, as that takes over its pages.
    fn change(
        &self,
        record: &Checkpoint,
        now: Option<&Checkpoint>,
        change: impl FnOnce() -> Result<(), CatalogError>,
    ) -> Result<(), CatalogError> {
        let before = self.in_place_of(record)?;
        let around = match record.generation {
            0 => Around::default(),
            generation => self.inner.around(&record.job, generation)?,
        };
        change()?;
        let mut sums = self.sums.sums();
        if let Some(before) = &before {
            subtract(&mut sums, before, &around);
        }
        if let Some(now) = now {
            add(&mut sums, now, &around);
        }
        Ok(())
    }
}

/// Returns the bytes that a record counts, and what the next newer one counts more or less because of it: with the
/// record and without.
fn counts(record: &Checkpoint, around: &Around) -> (u64, u64, u64) {
    let number = |one: &Checkpoint| one.generation;
    let older = around.older.as_ref().map(number);
    let own = match record.generation {
        0 => record.added_bytes,
        _ => charge(&Charged::from(record), older),
    };
    let newer = |before| {
        around
            .newer
            .as_ref()
            .map_or(0, |newer| charge(&Charged::from(newer), before))
    };
    (own, newer(Some(record.generation)), newer(older))
}

/// Adds a record to the sums. Parked pages without a job are in no namespace.
fn add(sums: &mut Sums, record: &Checkpoint, around: &Around) {
    *sums.kinds.entry(record.kind.clone()).or_default() += 1;
    if record.kind == PRE_COPY {
        let place = (record.job.clone(), record.generation);
        sums.rounds.insert(place, record.clone());
    }
    if let Ok(namespace) = namespace_of(&record.job) {
        let (own, with, without) = counts(record, around);
        let sum = sums.namespaces.entry(namespace.to_owned()).or_default();
        let bytes = sum.bytes.saturating_sub(without);
        sum.bytes = bytes.saturating_add(own).saturating_add(with);
        sum.checkpoints += 1;
    }
}

fn subtract(sums: &mut Sums, record: &Checkpoint, around: &Around) {
    if let Some(count) = sums.kinds.get_mut(&record.kind) {
        *count = count.saturating_sub(1);
    }
    if record.kind == PRE_COPY {
        sums.rounds.remove(&(record.job.clone(), record.generation));
    }
    let Ok(namespace) = namespace_of(&record.job) else {
        return;
    };
    if let Some(sum) = sums.namespaces.get_mut(namespace) {
        let (own, with, without) = counts(record, around);
        let bytes = sum.bytes.saturating_sub(own).saturating_sub(with);
        sum.bytes = bytes.saturating_add(without);
        sum.checkpoints = sum.checkpoints.saturating_sub(1);
        if sum.checkpoints == 0 {
            sums.namespaces.remove(namespace);
        }
    }
}

impl Catalog for Counted {
    fn put(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        self.change(checkpoint, Some(checkpoint), || self.inner.put(checkpoint))
    }

    fn remove(&self, checkpoint: &Checkpoint) -> Result<(), CatalogError> {
        self.change(checkpoint, None, || self.inner.remove(checkpoint))
    }

    fn around(&self, job: &str, generation: u64) -> Result<Around, CatalogError> {
        self.inner.around(job, generation)
    }

    fn find(&self, job: &str, generation: u64) -> Result<Option<Checkpoint>, CatalogError> {
        self.inner.find(job, generation)
    }

    fn head(&self, job: &str) -> Result<Option<Checkpoint>, CatalogError> {
        self.inner.head(job)
    }

    fn parked(&self, session: &str) -> Result<Option<Checkpoint>, CatalogError> {
        self.inner.parked(session)
    }

    fn list(&self, job: Option<&str>) -> Result<Vec<Checkpoint>, CatalogError> {
        self.inner.list(job)
    }

    fn visit_sealed(
        &self,
        after: (&str, u64),
        visit: &mut dyn FnMut(Checkpoint) -> bool,
    ) -> Result<(), CatalogError> {
        self.inner.visit_sealed(after, visit)
    }

    fn all_parked(&self) -> Result<Vec<Checkpoint>, CatalogError> {
        self.inner.all_parked()
    }

    fn next_generation(&self, job: &str) -> Result<u64, CatalogError> {
        self.inner.next_generation(job)
    }

    fn flush(&self) -> Result<(), CatalogError> {
        self.inner.flush()
    }

    fn note(&self, position: &RegionPosition) -> Result<(), CatalogError> {
        self.inner.note(position)
    }

    fn noted(&self) -> Result<Option<RegionPosition>, CatalogError> {
        self.inner.noted()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SledCatalog;

    fn record(job: &str, generation: u64, added_bytes: u64) -> Checkpoint {
        Checkpoint {
            job: job.to_owned(),
            generation,
            session: format!("{job}-{generation}"),
            added_bytes,
            ..Checkpoint::default()
        }
    }

    fn counted(inner: Box<dyn Catalog>) -> Counted {
        let counted = Counted::new(inner);
        let mut before = None;
        for record in counted.inner().list(None).unwrap() {
            counted.count(&record, before);
            before = Some(record);
        }
        counted
    }

    fn stored(bytes: u64, checkpoints: u64) -> Stored {
        Stored { bytes, checkpoints }
    }

    #[test]
    fn pages_of_removed_parents_still_count() {
        let delta = |generation: u64| Checkpoint {
            parent_generation: generation - 1,
            parent_bytes: if generation == 1 { 0 } else { 90 },
            ..record("a/x", generation, if generation == 1 { 90 } else { 2 })
        };
        let order = |generations: &[u64]| {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("catalog");
            let (sled, _) = SledCatalog::open_or_replace(&path).unwrap();
            let counted = counted(Box::new(sled));
            for generation in 1..=4 {
                counted.put(&delta(generation)).unwrap();
            }
            assert_eq!(counted.sums().stored("a"), stored(96, 4));
            for &generation in generations {
                counted.remove(&delta(generation)).unwrap();
            }
            let sums = counted.sums().stored("a");
            // Counted anew from the records it is the same.
            let kinds = counted.sums().kinds();
            let again = super::tests::counted(counted.inner);
            assert_eq!(again.sums().stored("a"), sums);
            assert_eq!(
                again.sums().kinds().values().sum::<u64>(),
                kinds.values().sum::<u64>()
            );
            sums
        };
        assert_eq!(order(&[1]), stored(96, 3));
        assert_eq!(order(&[1, 2, 3]), stored(92, 1));
        assert_eq!(order(&[3, 2, 1]), stored(92, 1));
        assert_eq!(order(&[2]), stored(96, 3));
        assert_eq!(order(&[4, 1, 2]), stored(92, 1));
        assert_eq!(order(&[4, 1, 2, 3]), stored(0, 0));
    }

    #[test]
    fn rounds_of_pre_copies_are_known_without_a_pass_over_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let (sled, _) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        let counted = counted(Box::new(sled));
        let round = |job: &str, generation| Checkpoint {
            kind: PRE_COPY.to_owned(),
            ..record(job, generation, 10)
        };
        counted.put(&record("a/x", 1, 10)).unwrap();
        for (job, generation) in [("a/x", 2), ("a/x", 3), ("b", 1)] {
            counted.put(&round(job, generation)).unwrap();
        }
        let names = |counted: &Counted| {
            let rounds = counted.sums().rounds().into_iter();
            let names: Vec<String> = rounds
                .map(|round| format!("{}@{}", round.job, round.generation))
                .collect();
            names.join(" ")
        };
        assert_eq!(names(&counted), "a/x@2 a/x@3 b@1");
        counted.remove(&round("a/x", 2)).unwrap();
        counted.remove(&record("a/x", 1, 10)).unwrap();
        // Of a catalog with records, too.
        let again = super::tests::counted(counted.inner);
        assert_eq!(names(&again), "a/x@3 b@1");
    }

    #[test]
    fn sums_follow_what_is_put_in_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (sled, _) = SledCatalog::open_or_replace(&dir.path().join("catalog")).unwrap();
        sled.put(&record("a/x", 1, 10)).unwrap();
        let counted = counted(Box::new(sled));
        let sums = counted.sums();
        assert_eq!(sums.stored("a"), stored(10, 1));

        counted.put(&record("a/y", 1, 5)).unwrap();
        counted.put(&record("b", 1, 7)).unwrap();
        // A record that replaces itself, and one without a job.
        counted.put(&record("a/x", 1, 20)).unwrap();
        counted.put(&record("", 0, 100)).unwrap();
        assert_eq!(sums.stored("a"), stored(25, 2));
        assert_eq!(sums.stored("default"), stored(7, 1));
        assert_eq!(sums.stored(""), stored(0, 0));

        // A record without its size, as some removals pass it.
        counted.remove(&record("a/x", 1, 0)).unwrap();
        counted.remove(&record("a/x", 1, 0)).unwrap();
        assert_eq!(sums.stored("a"), stored(5, 1));
        counted.remove(&record("a/y", 1, 5)).unwrap();
        assert_eq!(sums.namespaces(), ["default"]);
    }
}
