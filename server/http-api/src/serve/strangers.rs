//! Unauthenticated connections from other machines: their number is small, and the oldest is closed when one
//! more comes.
//!
//! So silent connections keep nobody out: a caller that sends a token or a certificate at once is authenticated
//! long before its connection is the oldest. The oldest connection of the address with the most of them is
//! closed, so that a flood from one address displaces itself.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::task::AbortHandle;

/// Unauthenticated connections of one port.
pub(super) struct Strangers {
    most: usize,
    here: Mutex<Here>,
}

#[derive(Default)]
struct Here {
    /// Connections by address and order of arrival.
    by_address: HashMap<IpAddr, BTreeMap<u64, Option<AbortHandle>>>,
    count: usize,
    next: u64,
}

/// One unauthenticated connection. Dropped when it is closed, or authenticated.
pub(super) struct Stranger {
    strangers: Arc<Strangers>,
    address: IpAddr,
    number: u64,
}

impl Strangers {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most: most.max(1),
            here: Mutex::default(),
        })
    }

    /// Registers a connection; another one is closed if there are too many.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Stranger {
        let mut here = self.here();
        while here.count >= self.most && here.displace() {}
        here.count += 1;
        here.next += 1;
        let number = here.next;
        here.by_address
            .entry(address)
            .or_default()
            .insert(number, None);
        drop(here);
        Stranger {
            strangers: Arc::clone(self),
            address,
            number,
        }
    }

    /// Sets the handle that closes a registered connection.
    pub(super) fn ended_by(&self, address: IpAddr, number: u64, end: AbortHandle) {
        let mut here = self.here();
        let there = here.by_address.get_mut(&address);
        if let Some(slot) = there.and_then(|there| there.get_mut(&number)) {
            *slot = Some(end);
        }
    }

    fn here(&self) -> MutexGuard<'_, Here> {
        self.here.lock()
    }
}

impl Here {
    /// Closes the oldest connection of the address with the most. Returns false if there is none.
    fn displace(&mut self) -> bool {
        let most = self.by_address.iter().max_by_key(|(_, there)| there.len());
        let Some(address) = most.map(|(address, _)| *address) else {
            return false;
        };
        let there = self.by_address.get(&address);
        let Some(number) = there.and_then(|there| there.keys().next().copied()) else {
            return false;
        };
        self.remove(address, number)
    }

    fn remove(&mut self, address: IpAddr, number: u64) -> bool {
        let Some(there) = self.by_address.get_mut(&address) else {
            return false;
        };
        let Some(end) = there.remove(&number) else {
            return false;
        };
        if there.is_empty() {
            self.by_address.remove(&address);
        }
        self.count -= 1;
        if let Some(end) = end {
            end.abort();
        }
        true
    }
}

impl Stranger {
    /// Returns the connection's address and number, for [`Strangers::ended_by`].
    pub(super) fn place(&self) -> (IpAddr, u64) {
        (self.address, self.number)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut here = self.strangers.here();
        if let Some(there) = here.by_address.get_mut(&self.address)
            && let Some(end) = there.get_mut(&self.number)
        {
            // The connection ends, or continues as that of an authenticated caller: it must not be aborted.
            *end = None;
            here.remove(self.address, self.number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here(strangers: &Strangers) -> Vec<(IpAddr, usize)> {
        let here = strangers.here();
        let mut all: Vec<_> = here
            .by_address
            .iter()
            .map(|(address, there)| (*address, there.len()))
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn a_flood_displaces_itself_and_not_others() {
        let strangers = Strangers::new(4);
        let (one, flood) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let quiet = strangers.enter(one);
        let many: Vec<_> = (0..300).map(|_| strangers.enter(flood)).collect();
        assert_eq!(here(&strangers), [(one, 1), (flood, 3)]);
        drop(many);
        assert_eq!(here(&strangers), [(one, 1)]);
        drop(quiet);
        assert_eq!(strangers.here().count, 0);
    }
}
