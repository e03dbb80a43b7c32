//! A store whose requests are system calls, which have no time limit of their own.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use permafrost_cold::{ListedObject, ObjectError, Objects};

/// Maximum number of requests under way. More wait for one of them to end; but where all were given up, as those of a
/// mount that hangs are, more fail at once.
const MAX_RUNNING: usize = 32;

/// A store whose requests run in threads of their own, and are given up after a time.
pub(crate) struct LimitedObjects {
    store: Arc<dyn Objects>,
    limit: Duration,
    places: Arc<Places>,
}

/// Places of requests under way.
#[derive(Default)]
struct Places {
    running: Mutex<Running>,
    freed: Condvar,
}

/// Requests under way by number, each with true if it was given up.
#[derive(Default)]
struct Running {
    requests: HashMap<u64, bool>,
    last: u64,
}

impl Places {
    /// Waits for a place until a time, and returns its number. `None`: none became free, or none will.
    fn take(&self, until: Instant) -> Option<u64> {
        let mut running = self.running.lock();
        while running.requests.len() >= MAX_RUNNING {
            let all_hang = running.requests.values().all(|given_up| *given_up);
            if all_hang || self.freed.wait_until(&mut running, until).timed_out() {
                return None;
            }
        }
        running.last += 1;
        let number = running.last;
        running.requests.insert(number, false);
        Some(number)
    }

    fn give_up(&self, number: u64) {
        if let Some(given_up) = self.running.lock().requests.get_mut(&number) {
            *given_up = true;
        }
        // Those who wait for a place look again, as none may become free any more.
        self.freed.notify_all();
    }
}

/// A place that was taken, until it is dropped.
struct Place {
    places: Arc<Places>,
    number: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.running.lock().requests.remove(&self.number);
        self.places.freed.notify_one();
    }
}

impl LimitedObjects {
    pub(crate) fn new(store: Arc<dyn Objects>, limit: Duration) -> Self {
        Self {
            store,
            limit,
            places: Arc::default(),
        }
    }

    fn run<T: Send + 'static>(
        &self,
        request: impl FnOnce(&dyn Objects) -> Result<T, ObjectError> + Send + 'static,
    ) -> Result<T, ObjectError> {
        let failed = |error: io::Error| ObjectError::Store(error.into());
        let until = Instant::now() + self.limit;
        let number = self.places.take(until);
        let number =
            number.ok_or_else(|| ObjectError::Store("the requests before still hang".into()))?;
        let place = Place {
            places: Arc::clone(&self.places),
            number,
        };
        let store = Arc::clone(&self.store);
        let (done, result) = mpsc::sync_channel(1);
        let run = move || {
            let _place = place;
            let _ = done.send(request(&*store));
        };
        let started = std::thread::Builder::new()
            .name("objects".to_owned())
            .spawn(run);
        started.map_err(failed)?;
        let received = result.recv_timeout(until.saturating_duration_since(Instant::now()));
        received.unwrap_or_else(|_| {
            self.places.give_up(number);
            Err(failed(io::ErrorKind::TimedOut.into()))
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A store whose requests wait until they are let go.
    #[derive(Default)]
    struct Waiting {
        /// Requests that have come, and true if they are let go.
        state: Mutex<(usize, bool)>,
        changed: Condvar,
    }

    impl Waiting {
        fn wait_for(&self, count: usize) {
            let mut state = self.state.lock();
            while state.0 < count {
                self.changed.wait(&mut state);
            }
        }

        fn let_go(&self) {
            self.state.lock().1 = true;
            self.changed.notify_all();
        }
    }

    impl Objects for Waiting {
        fn address(&self) -> &str {
            "waiting"
        }

        fn put(&self, _: &str, _: Vec<u8>) -> Result<(), ObjectError> {
            Ok(())
        }

        fn get(&self, _: &str) -> Result<Vec<u8>, ObjectError> {
            let mut state = self.state.lock();
            state.0 += 1;
            self.changed.notify_all();
            while !state.1 {
                self.changed.wait(&mut state);
            }
            Ok(vec![1])
        }

        fn delete(&self, _: &str) -> Result<(), ObjectError> {
            Ok(())
        }

        fn list(&self, _: &str) -> Result<Vec<ListedObject>, ObjectError> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn more_requests_than_places_wait_for_one() {
        let store = Arc::<Waiting>::default();
        let limited = LimitedObjects::new(Arc::clone(&store) as _, Duration::from_secs(600));
        std::thread::scope(|scope| {
            let asked: Vec<_> = (0..MAX_RUNNING + 8)
                .map(|_| scope.spawn(|| limited.get("a")))
                .collect();
            store.wait_for(MAX_RUNNING);
            store.let_go();
            for answer in asked {
                assert_eq!(answer.join().unwrap().unwrap(), [1]);
            }
        });
    }

    #[test]
    fn where_all_requests_hang_more_fail_at_once() {
        let store = Arc::<Waiting>::default();
        let mut limited = LimitedObjects::new(Arc::clone(&store) as _, Duration::from_millis(1));
        for _ in 0..MAX_RUNNING {
            limited.get("a").unwrap_err();
        }
        store.wait_for(MAX_RUNNING);
        limited.limit = Duration::from_secs(3600);
        let refused = limited.get("a").unwrap_err();
        assert!(refused.to_string().contains("still hang"), "{refused}");
        store.let_go();
        while !limited.places.running.lock().requests.is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(limited.get("a").unwrap(), [1]);
    }
}
