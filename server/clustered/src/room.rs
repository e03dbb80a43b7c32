//! Memory for those who read the contents of checkpoints at once.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use permafrost_protocol::control::{ErrorCode, ReportedError};

/// Memory for all readers of one kind at once, bytes. A reader who needs more has three quarters of it counted, so that
/// others with small checkpoints read beside it.
const ROOM_BYTES: u64 = 512 << 20;

/// Longest wait for room. The HTTP API gives a request up after 10 s.
const PATIENCE: Duration = Duration::from_secs(8);

/// There is no room for one more reader now.
#[derive(Debug, thiserror::Error)]
#[error(
    "the contents of other checkpoints are being read, and there is no memory for more of them"
)]
pub(crate) struct NoRoom;

impl ReportedError for NoRoom {
    fn code(&self) -> ErrorCode {
        ErrorCode::Unavailable
    }

    fn hint(&self) -> &str {
        "try again in a few seconds"
    }
}

/// Memory that readers take and give back.
pub(crate) struct Room {
    free_bytes: Mutex<u64>,
    freed: Condvar,
}

impl Default for Room {
    fn default() -> Self {
        Self {
            free_bytes: Mutex::new(ROOM_BYTES),
            freed: Condvar::new(),
        }
    }
}

/// A part of the room, until it is dropped.
pub(crate) struct RoomTaken<'a> {
    room: &'a Room,
    bytes: u64,
}

impl Room {
    /// Takes room, and waits for it for some seconds.
    ///
    /// # Errors
    /// There was none in that time.
    pub(crate) fn take(&self, bytes: u64) -> Result<RoomTaken<'_>, NoRoom> {
        self.take_until(bytes, Instant::now() + PATIENCE)
    }

    fn take_until(&self, bytes: u64, until: Instant) -> Result<RoomTaken<'_>, NoRoom> {
        let bytes = bytes.min(ROOM_BYTES / 4 * 3);
        let mut free_bytes = self.free_bytes.lock();
        while *free_bytes < bytes {
            if self.freed.wait_until(&mut free_bytes, until).timed_out() && *free_bytes < bytes {
                return Err(NoRoom);
            }
        }
        *free_bytes -= bytes;
        Ok(RoomTaken { room: self, bytes })
    }
}

impl Drop for RoomTaken<'_> {
    fn drop(&mut self) {
        *self.room.free_bytes.lock() += self.bytes;
        self.room.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_readers_go_beside_the_largest_and_none_waits_for_ever() {
        let room = Room::default();
        let largest = room.take(u64::MAX).unwrap();
        let small = room.take(ROOM_BYTES / 8).unwrap();
        let soon = || Instant::now() + Duration::from_millis(20);
        assert!(room.take_until(u64::MAX, soon()).is_err());
        assert!(room.take_until(ROOM_BYTES / 4, soon()).is_err());
        std::thread::scope(|threads| {
            let waits = threads.spawn(|| room.take(ROOM_BYTES / 2).map(drop).is_ok());
            drop(largest);
            assert!(waits.join().unwrap(), "it comes as soon as there is room");
        });
        drop(small);
        assert_eq!(*room.free_bytes.lock(), ROOM_BYTES);
    }
}
