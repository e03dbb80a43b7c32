//! Ctrl-C, SIGTERM and SIGHUP: end the connection to the daemon, so that whatever waits for it fails in
//! its ordinary way and cleans up behind itself. Nothing is killed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use permafrost_transport::control::{Canceller, Connection};
use rustix::process::{Pid, Signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::failure::{Code, Failure};

/// Target of the next interrupt.
#[derive(Debug, Default)]
enum Target {
    #[default]
    Nothing,
    Connection(Canceller),
    /// Waiting for a restored process: the signal is meant for it.
    Process(Pid),
}

/// Catches the signals from its making on.
#[derive(Clone, Debug)]
pub struct Interrupts {
    came: Arc<AtomicU32>,
    target: Arc<Mutex<Target>>,
}

impl Interrupts {
    /// Catches SIGINT, SIGTERM and SIGHUP from now on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn install() -> Result<Self, Failure> {
        let interrupts = Self::none();
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
            .map_err(|error| Failure::new(Code::Internal, format!("catch signals: {error}")))?;
        let handler = interrupts.clone();
        thread::spawn(move || {
            for signal in signals.forever() {
                handler.handle(signal);
            }
        });
        Ok(interrupts)
    }

    /// Those that never come: whoever asks sees to signals itself.
    pub fn none() -> Self {
        Self {
            came: Arc::default(),
            target: Arc::default(),
        }
    }

    fn handle(&self, signal: i32) {
        self.came.fetch_add(1, Ordering::SeqCst);
        match &*self.target.lock().unwrap_or_else(PoisonError::into_inner) {
            Target::Nothing => {}
            Target::Connection(canceller) => canceller.cancel(),
            Target::Process(pid) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    // It may have ended this moment.
                    let _ = rustix::process::kill_process(*pid, signal);
                }
            }
        }
    }

    /// From now on an interrupt ends `connection`; at once if one came already.
    pub fn end(&self, connection: &Connection) -> Result<(), Failure> {
        let canceller = connection
            .canceller()
            .map_err(|error| Failure::new(Code::Internal, format!("watch connection: {error}")))?;
        self.set(Target::Connection(canceller));
        self.check()
    }

    /// From now on an interrupt is passed on to process `pid`.
    pub fn pass_on_to(&self, pid: Pid) {
        self.set(Target::Process(pid));
    }

    /// From now on an interrupt ends nothing.
    pub fn leave_alone(&self) {
        self.set(Target::Nothing);
    }

    fn set(&self, target: Target) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = target;
    }

    /// Returns true if an interrupt has arrived.
    pub fn came(&self) -> bool {
        self.count() > 0
    }

    /// Returns the number of interrupts so far.
    pub fn count(&self) -> u32 {
        self.came.load(Ordering::SeqCst)
    }

    /// Fails if one came.
    pub fn check(&self) -> Result<(), Failure> {
        if self.came() {
            Err(Failure::interrupted("interrupted"))
        } else {
            Ok(())
        }
    }

    /// A failure that an interrupt is behind is one of being interrupted.
    pub fn explain(&self, failure: Failure) -> Failure {
        if self.came() && failure.code == Code::Unreachable {
            Failure::interrupted("interrupted")
        } else {
            failure
        }
    }
}
