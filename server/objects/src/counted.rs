//! Counters of the requests to all object stores of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_cold::{ListedObject, ObjectError, Objects};

/// Requests to object stores since the process started.
#[derive(Debug, Default)]
pub struct ObjectCounters {
    requests: AtomicU64,
    failures: AtomicU64,
}

impl ObjectCounters {
    /// Returns the number of requests that have ended, failed ones included.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns the number of requests that failed because the store could not be reached, or failed. A missing object
    /// is an answer.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// Stores are opened in many places, and share one runtime: so they share the counters, too.
static COUNTERS: ObjectCounters = ObjectCounters {
    requests: AtomicU64::new(0),
    failures: AtomicU64::new(0),
};

/// Returns the counters of all stores of this process.
#[must_use]
pub fn counters() -> &'static ObjectCounters {
    &COUNTERS
}

/// A store whose requests are counted.
pub(crate) struct CountedObjects<S> {
    store: S,
}

impl<S: Objects + 'static> CountedObjects<S> {
    pub(crate) fn wrap(store: S) -> Arc<dyn Objects> {
        Arc::new(Self { store })
    }

    fn counted<T>(&self, answer: Result<T, ObjectError>) -> Result<T, ObjectError> {
        COUNTERS.requests.fetch_add(1, Ordering::Relaxed);
        if matches!(answer, Err(ObjectError::Store(_))) {
            COUNTERS.failures.fetch_add(1, Ordering::Relaxed);
        }
        answer
    }
}

impl<S: Objects + 'static> Objects for CountedObjects<S> {
    fn address(&self) -> &str {
        self.store.address()
    }

    fn may_be_swapped(&self) -> bool {
        self.store.may_be_swapped()
    }

    fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), ObjectError> {
        self.counted(self.store.put(name, bytes))
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, ObjectError> {
        self.counted(self.store.get(name))
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        self.counted(self.store.delete(name))
    }

    fn list(&self, directory: &str) -> Result<Vec<ListedObject>, ObjectError> {
        self.counted(self.store.list(directory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Away;

    impl Objects for Away {
        fn address(&self) -> &str {
            "away"
        }

        fn put(&self, _: &str, _: Vec<u8>) -> Result<(), ObjectError> {
            Ok(())
        }

        fn get(&self, _: &str) -> Result<Vec<u8>, ObjectError> {
            Err(ObjectError::Missing)
        }

        fn delete(&self, _: &str) -> Result<(), ObjectError> {
            Err(ObjectError::Store("no route".into()))
        }

        fn list(&self, _: &str) -> Result<Vec<ListedObject>, ObjectError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn a_store_that_cannot_be_reached_is_a_failure_and_a_missing_object_is_none() {
        // Tests of one process share the counters, so only differences count, and only their least values.
        let store = CountedObjects::wrap(Away);
        let (requests, failures) = (counters().requests(), counters().failures());
        store.put("a", Vec::new()).unwrap();
        assert!(matches!(store.get("a"), Err(ObjectError::Missing)));
        assert_eq!(counters().failures(), failures);
        store.delete("a").unwrap_err();
        store.list("a").unwrap();
        assert_eq!(counters().requests() - requests, 4);
        assert_eq!(counters().failures() - failures, 1);
    }
}
