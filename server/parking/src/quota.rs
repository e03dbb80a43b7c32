//! Limit on the space that anonymous dumps take in a region.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use permafrost_quotas::QuotaError;

/// Limit on the bytes of the region that anonymous dumps take, parked and under way.
#[derive(Debug)]
pub struct ParkedQuota {
    limit_bytes: u64,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    parked_bytes: u64,
    under_way_bytes: u64,
}

/// Share of the limit that one dump under way holds. Dropped, it is given back.
#[derive(Debug)]
pub struct ParkedShare {
    quota: Arc<ParkedQuota>,
    bytes: u64,
}

impl ParkedQuota {
    /// Makes a limit of so many bytes.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            limit_bytes,
            taken: Mutex::default(),
        })
    }

    /// Begins a dump with a share of one segment; `parked_bytes` are parked.
    ///
    /// # Errors
    /// The limit has no room for the dump.
    pub fn begin(
        self: &Arc<Self>,
        parked_bytes: u64,
        segment_bytes: u64,
    ) -> Result<ParkedShare, QuotaError> {
        self.lock().parked_bytes = parked_bytes;
        let mut share = ParkedShare {
            quota: Arc::clone(self),
            bytes: 0,
        };
        share.grow_to(segment_bytes)?;
        Ok(share)
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock()
    }
}

impl ParkedShare {
    /// Grows the share to `bytes` in total.
    ///
    /// # Errors
    /// The limit has no room for the bytes.
    pub fn grow_to(&mut self, bytes: u64) -> Result<(), QuotaError> {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return Ok(());
        }
        let mut taken = self.quota.lock();
        let others = taken.parked_bytes.saturating_add(taken.under_way_bytes);
        if others.saturating_add(more) > self.quota.limit_bytes {
            return Err(QuotaError::Parked {
                limit_bytes: self.quota.limit_bytes,
            });
        }
        taken.under_way_bytes += more;
        self.bytes = bytes;
        Ok(())
    }

    /// Releases the share: the dump is now counted as parked.
    pub fn park(self) {
        self.quota.lock().parked_bytes += self.bytes;
    }
}

impl Drop for ParkedShare {
    fn drop(&mut self) {
        self.quota.lock().under_way_bytes -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_parked_and_under_way_stays_below_the_quota() {
        let quota = ParkedQuota::new(100);
        let mut first = quota.begin(20, 10).unwrap();
        let mut second = quota.begin(20, 10).unwrap();
        first.grow_to(60).unwrap();
        first.grow_to(50).unwrap();
        assert!(second.grow_to(21).is_err());
        second.grow_to(20).unwrap();
        first.park();
        assert!(second.grow_to(21).is_err());
        drop(second);
        assert!(quota.begin(95, 10).is_err());
        assert!(quota.begin(0, 100).is_ok());
    }
}
