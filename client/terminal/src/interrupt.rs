//! Handles Ctrl-C, SIGTERM and SIGHUP: they end the connection to the daemon, so that a call that waits for the
//! daemon fails in its ordinary way and cleans up. Nothing is killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use parking_lot::Mutex;
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
    /// A restored process, which the command waits for: the signal is passed on to it.
    Process(Pid),
}

/// Handler of the signals, from its creation on.
#[derive(Clone, Debug)]
pub struct Interrupts {
    came: Arc<AtomicU32>,
    target: Arc<Mutex<Target>>,
}

impl Interrupts {
    /// Catches SIGINT, SIGTERM and SIGHUP from now on.
    ///
    /// # Errors
    /// The kernel refuses the handlers.
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

    /// Returns interrupts that never come, for a caller that handles signals itself.
    pub fn none() -> Self {
        Self {
            came: Arc::default(),
            target: Arc::default(),
        }
    }

    fn handle(&self, signal: i32) {
        self.came.fetch_add(1, Ordering::SeqCst);
        match &*self.target.lock() {
            Target::Nothing => {}
            Target::Connection(canceller) => canceller.cancel(),
            Target::Process(pid) => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    // The process may have just ended.
                    let _ = rustix::process::kill_process(*pid, signal);
                }
            }
        }
    }

    /// Makes further interrupts end `connection`; ends it at once if one came already.
    pub fn end(&self, connection: &Connection) -> Result<(), Failure> {
        let canceller = connection
            .canceller()
            .map_err(|error| Failure::new(Code::Internal, format!("watch connection: {error}")))?;
        self.set(Target::Connection(canceller));
        self.check()
    }

    /// Makes further interrupts be passed on to process `pid`.
    pub fn pass_on_to(&self, pid: Pid) {
        self.set(Target::Process(pid));
    }

    /// Makes further interrupts end nothing.
    pub fn leave_alone(&self) {
        self.set(Target::Nothing);
    }

    fn set(&self, target: Target) {
        *self.target.lock() = target;
    }

    /// Returns true if an interrupt has arrived.
    pub fn came(&self) -> bool {
        self.count() > 0
    }

    /// Returns the number of interrupts so far.
    pub fn count(&self) -> u32 {
        self.came.load(Ordering::SeqCst)
    }

    /// Fails if an interrupt has come.
    pub fn check(&self) -> Result<(), Failure> {
        if self.came() {
            Err(Failure::interrupted("interrupted"))
        } else {
            Ok(())
        }
    }

    /// Replaces a failure by one of being interrupted, if an interrupt has caused it.
    pub fn explain(&self, failure: Failure) -> Failure {
        let may_follow = matches!(failure.code, Code::Unreachable | Code::SessionFailed);
        if self.came() && may_follow {
            Failure::interrupted("interrupted")
        } else {
            failure
        }
    }
}
