//! Limits the part of a shared resource that one peer or caller may hold.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

/// Counters of held shares, by caller and in all.
#[derive(Debug)]
pub struct Shares {
    most_each: usize,
    most: usize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    by_caller: HashMap<String, usize>,
    all: usize,
}

/// A share of the resource. Dropping it returns it.
#[derive(Debug)]
pub struct Share {
    shares: Arc<Shares>,
    caller: String,
}

impl Shares {
    /// Returns counters with a limit for each caller, and one in all.
    #[must_use]
    pub fn new(most_each: usize, most: usize) -> Arc<Self> {
        Arc::new(Self {
            most_each,
            most,
            held: Mutex::default(),
        })
    }

    /// Takes a share for the caller of that name; `None` if a limit would be exceeded.
    #[must_use]
    pub fn take(self: &Arc<Self>, caller: &str) -> Option<Share> {
        let mut held = self.held();
        if held.all >= self.most {
            return None;
        }
        let own = held.by_caller.entry(caller.to_owned()).or_default();
        if *own >= self.most_each {
            return None;
        }
        *own += 1;
        held.all += 1;
        Some(Share {
            shares: Arc::clone(self),
            caller: caller.to_owned(),
        })
    }

    /// Returns the number of shares that are held.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.held().all
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.shares.held();
        held.all = held.all.saturating_sub(1);
        if let Some(own) = held.by_caller.get_mut(&self.caller) {
            *own = own.saturating_sub(1);
            if *own == 0 {
                held.by_caller.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_caller_leaves_room_for_others() {
        let shares = Shares::new(2, 3);
        let held = [shares.take("a"), shares.take("a")];
        assert!(held.iter().all(Option::is_some) && shares.take("a").is_none());
        let other = shares.take("b").unwrap();
        assert!(shares.take("c").is_none());
        drop(held);
        drop(other);
        assert!(shares.take("a").is_some());
        assert_eq!(shares.held().all, 0);
        assert!(shares.held().by_caller.is_empty());
    }
}
