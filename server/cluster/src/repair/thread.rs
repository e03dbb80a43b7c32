//! A thread that works periodically, until it is stopped.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Signal to stop.
#[derive(Clone, Default)]
pub(super) struct Stop(Arc<(Mutex<bool>, Condvar)>);

impl Stop {
    pub(super) fn now(&self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }

    /// Waits for `time`. Returns true if it is time to stop.
    pub(super) fn after(&self, time: Duration) -> bool {
        let mut stopped = self.0.0.lock();
        self.0
            .1
            .wait_while_for(&mut stopped, |stopped| !*stopped, time);
        *stopped
    }
}

/// A thread of repair. Dropping it stops the thread and waits for its end: it finishes the current call to
/// another node or to the registry, seconds at most.
pub struct Worker {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn start(
        name: &str,
        stop: Stop,
        body: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<Self> {
        let builder = std::thread::Builder::new().name(name.to_owned());
        Ok(Self {
            stop,
            thread: Some(builder.spawn(body)?),
        })
    }

    /// Stops the thread, as dropping it does.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.now();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(event = "repair-thread-died", "a thread of repair has died");
        }
    }
}
