//! A store whose requests are system calls, which have no time limit of their own.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use permafrost_cold::{ListedObject, ObjectError, Objects};

/// Maximum number of requests under way. Those of a mount that hangs stay under way: later ones fail at once.
const MAX_RUNNING: usize = 32;

/// A store whose requests run in threads of their own, and are given up after a time.
pub(crate) struct LimitedObjects {
    store: Arc<dyn Objects>,
    limit: Duration,
    running: Arc<AtomicUsize>,
}

impl LimitedObjects {
    pub(crate) fn new(store: Arc<dyn Objects>, limit: Duration) -> Self {
        Self {
            store,
            limit,
            running: Arc::default(),
        }
    }

    fn run<T: Send + 'static>(
        &self,
        request: impl FnOnce(&dyn Objects) -> Result<T, ObjectError> + Send + 'static,
    ) -> Result<T, ObjectError> {
        let failed = |error: io::Error| ObjectError::Store(error.into());
        if self.running.fetch_add(1, Ordering::Relaxed) >= MAX_RUNNING {
            self.running.fetch_sub(1, Ordering::Relaxed);
            return Err(ObjectError::Store("the requests before still hang".into()));
        }
        let (store, running) = (Arc::clone(&self.store), Arc::clone(&self.running));
        let (done, result) = mpsc::sync_channel(1);
        let run = move || {
            let _ = done.send(request(&*store));
            running.fetch_sub(1, Ordering::Relaxed);
        };
        let started = std::thread::Builder::new()
            .name("objects".to_owned())
            .spawn(run);
        if let Err(error) = started {
            self.running.fetch_sub(1, Ordering::Relaxed);
            return Err(failed(error));
        }
        let received = result.recv_timeout(self.limit);
        received.unwrap_or_else(|_| Err(failed(io::ErrorKind::TimedOut.into())))
    }
}

impl Objects for LimitedObjects {
    fn address(&self) -> &str {
        self.store.address()
    }

    fn may_be_swapped(&self) -> bool {
        self.store.may_be_swapped()
    }

    fn put(&self, name: &str, bytes: Vec<u8>) -> Result<(), ObjectError> {
        let name = name.to_owned();
        self.run(move |store| store.put(&name, bytes))
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, ObjectError> {
        let name = name.to_owned();
        self.run(move |store| store.get(&name))
    }

    fn delete(&self, name: &str) -> Result<(), ObjectError> {
        let name = name.to_owned();
        self.run(move |store| store.delete(&name))
    }

    fn list(&self, directory: &str) -> Result<Vec<ListedObject>, ObjectError> {
        let directory = directory.to_owned();
        self.run(move |store| store.list(&directory))
    }
}
