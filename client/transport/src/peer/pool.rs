//! Pool of reusable buffers for payloads.
//!
//! A fresh buffer of 256 KiB costs more than the copy into it: its page faults, and the cache lines that it
//! displaces. The buffer that was returned last is taken first, because it is the likeliest to be in a cache.

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use permafrost_protocol::wire::frame::MAX_PAYLOAD_BYTES;
use tokio::runtime::Handle;

/// Length of a pooled buffer, bytes: the longest payload's.
const BUFFER_BYTES: usize = MAX_PAYLOAD_BYTES as usize;
/// Shortest payload for a pooled buffer. Shorter ones get memory of their own: windows and queues are bounded
/// by the bytes of payloads, and a pooled buffer takes its whole length whatever is in it.
const MIN_POOLED_BYTES: usize = BUFFER_BYTES / 4 * 3;
/// Most buffers that are kept for later: 32 MiB, a window.
const MAX_KEPT: usize = 128;

/// Time after which buffers that nobody has used are freed.
const UNUSED: Duration = Duration::from_secs(10);

/// Buffers of one stream, or of all dumps that a node sends. A clone shares the pool.
#[derive(Clone, Default)]
pub(crate) struct Pool(Arc<Kept>);

type Kept = Mutex<Buffers>;

#[derive(Default)]
struct Buffers {
    /// The one that was returned last comes last.
    kept: Vec<Vec<u8>>,
    /// Least number of them since the last call of [`Buffers::free_unused`]: so many at the front were not used.
    unused: usize,
}

impl Buffers {
    fn take(&mut self) -> Option<Vec<u8>> {
        let taken = self.kept.pop();
        self.unused = self.unused.min(self.kept.len());
        taken
    }

    fn free_unused(&mut self) {
        self.kept.drain(..self.unused);
        self.unused = self.kept.len();
    }
}

/// A buffer that returns to its pool, unless the pool is gone or it is shorter than those that are kept.
pub(crate) struct PayloadBuffer {
    pub(crate) bytes: Vec<u8>,
    pool: Weak<Kept>,
}

impl Pool {
    /// Makes a pool that outlives single dumps. On `runtime`, what was not used for [`UNUSED`] is freed.
    pub(crate) fn lasting(runtime: &Handle) -> Self {
        let pool = Self::default();
        let kept = Arc::downgrade(&pool.0);
        runtime.spawn(async move {
            loop {
                tokio::time::sleep(UNUSED).await;
                match kept.upgrade() {
                    Some(kept) => kept.lock().free_unused(),
                    None => return,
                }
            }
        });
        pool
    }

    /// Returns an empty buffer with room for `length` bytes, at most [`BUFFER_BYTES`].
    pub(crate) fn buffer(&self, length: usize) -> PayloadBuffer {
        if !(MIN_POOLED_BYTES..=BUFFER_BYTES).contains(&length) {
            return PayloadBuffer {
                bytes: Vec::with_capacity(length),
                pool: Weak::new(),
            };
        }
        let kept = self.0.lock().take();
        PayloadBuffer {
            bytes: kept.unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES)),
            pool: Arc::downgrade(&self.0),
        }
    }

    /// Returns a payload of about `length` bytes, at most [`BUFFER_BYTES`], that `fill` writes into the empty
    /// buffer.
    pub(crate) fn payload(&self, length: usize, fill: impl FnOnce(&mut Vec<u8>)) -> Bytes {
        let mut buffer = self.buffer(length);
        fill(&mut buffer.bytes);
        buffer.into_payload()
    }
}

impl PayloadBuffer {
    /// Returns the contents as a payload.
    pub(crate) fn into_payload(mut self) -> Bytes {
        if self.pool.strong_count() == 0 {
            return std::mem::take(&mut self.bytes).into();
        }
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for PayloadBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for PayloadBuffer {
    fn drop(&mut self) {
        let Some(pool) = self.pool.upgrade() else {
            return;
        };
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        let mut buffers = pool.lock();
        if buffers.kept.len() < MAX_KEPT {
            buffers.kept.push(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(pool: &Pool, bytes: &[u8]) -> Bytes {
        pool.payload(bytes.len(), |buffer| buffer.extend_from_slice(bytes))
    }

    #[test]
    fn a_buffer_is_used_again_once_its_last_reader_is_gone() {
        let pool = Pool::default();
        let first = copied(&pool, &[1; BUFFER_BYTES]);
        let reader = first.slice(10..20);
        let place = first.as_ptr();
        drop(first);
        let second = copied(&pool, &[2; BUFFER_BYTES]);
        assert_ne!(second.as_ptr(), place);
        assert_eq!(reader.as_ref(), [1; 10]);
        drop(reader);
        let third = copied(&pool, &[3; MIN_POOLED_BYTES]);
        assert_eq!(third.as_ptr(), place);
        assert_eq!(third.as_ref(), [3; MIN_POOLED_BYTES]);
        assert_eq!(second.as_ref(), [2; BUFFER_BYTES]);
    }

    #[test]
    fn buffers_that_are_not_used_for_a_while_are_freed() {
        let pool = Pool::default();
        let some = |count| {
            let payloads = (0..count).map(|_| copied(&pool, &[7; BUFFER_BYTES]));
            drop(payloads.collect::<Vec<_>>());
        };
        some(5);
        pool.0.lock().free_unused();
        assert_eq!(pool.0.lock().kept.len(), 5, "all have just been used");
        some(2);
        pool.0.lock().free_unused();
        assert_eq!(pool.0.lock().kept.len(), 2);
        pool.0.lock().free_unused();
        assert_eq!(pool.0.lock().kept.len(), 0);
    }

    #[test]
    fn what_is_kept_is_bounded_and_short_payloads_pin_nothing() {
        let pool = Pool::default();
        let payloads: Vec<_> = (0..MAX_KEPT + 5)
            .map(|_| copied(&pool, &[7; BUFFER_BYTES]))
            .collect();
        drop(payloads);
        assert_eq!(pool.0.lock().kept.len(), MAX_KEPT);
        drop(copied(&pool, &[7; 4096]));
        assert_eq!(pool.0.lock().kept.len(), MAX_KEPT);
        let outlives = copied(&pool, &[9; BUFFER_BYTES]);
        drop(pool);
        assert_eq!(outlives.as_ref(), [9; BUFFER_BYTES]);
    }
}
