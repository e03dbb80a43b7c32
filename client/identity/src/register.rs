//! Register of the open connections, which end when their peer's certificate is no longer valid.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rustls::pki_types::CertificateDer;

use super::Subject;

/// Callback that ends a connection; the argument is the reason.
pub(super) type End = Box<dyn FnOnce(&str) + Send>;

/// An open connection.
pub(super) struct Open {
    /// Certificates of the peer, as the handshake verified them.
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) subject: Subject,
    pub(super) end: End,
}

/// Register of all open connections.
#[derive(Default)]
pub(super) struct Register(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    next: u64,
    open: HashMap<u64, Open>,
}

/// A connection's entry in the register. Dropped with the connection.
pub struct Tenure {
    register: Arc<Register>,
    number: u64,
}

impl Register {
    pub(super) fn add(self: &Arc<Self>, open: Open) -> Tenure {
        let mut entries = self.lock();
        let number = entries.next;
        entries.next += 1;
        entries.open.insert(number, open);
        Tenure {
            register: Arc::clone(self),
            number,
        }
    }

    /// Ends every connection for which `verdict` returns a reason.
    pub(super) fn end_where(&self, verdict: impl Fn(&Open) -> Option<String>) {
        let mut ended = Vec::new();
        {
            let mut entries = self.lock();
            let reasons: Vec<(u64, String)> = entries
                .open
                .iter()
                .filter_map(|(number, open)| Some((*number, verdict(open)?)))
                .collect();
            for (number, reason) in reasons {
                ended.extend(entries.open.remove(&number).map(|open| (open, reason)));
            }
        }
        // Called without the lock, because the end of a connection drops its entry.
        for (open, reason) in ended {
            let Subject { role, name, .. } = &open.subject;
            tracing::warn!(event = "peer-connection-ended", peer = %format_args!("{role} {name}"), serial = open.subject.serial, reason, "connection ended");
            (open.end)(&reason);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock()
    }
}

impl Drop for Tenure {
    fn drop(&mut self) {
        let gone = self.register.lock().open.remove(&self.number);
        // The callback may hold the last handle of the connection, so it is dropped without the lock.
        drop(gone);
    }
}

impl fmt::Debug for Tenure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("Tenure").field(&self.number).finish()
    }
}
