//! The kernel's limit on the pipes of a user, which bounds how many pages can wait in pipes.

use std::fs;
use std::sync::Arc;

use parking_lot::Mutex;
use permafrost_protocol::PAGE_BYTES;

use super::waiting::SMALL_PIPE_BYTES;

/// Bits of capabilities (`include/uapi/linux/capability.h` of the kernel) that lift the limit (`fs/pipe.c`).
const ADMIN_OR_RESOURCE: u64 = 1 << 21 | 1 << 24;

/// Part of its memory by which a process may grow between the reservation and its freeze.
const GROWTH: u64 = 8;

/// Bytes of the smallest pipe in which something waits. A dump has one for its pagemap besides those of its pages.
const PIPE_BYTES: u64 = SMALL_PIPE_BYTES as u64;

/// Room in this process's pipes.
static ROOM: Room = Room(Mutex::new(0));

/// Room in the pipes of a process, and the bytes of it that dumps have reserved or use.
struct Room(Mutex<u64>);

impl Room {
    /// Returns the bytes of pages that one more dump may have.
    fn free(&self, limit: u64) -> u64 {
        let taken = self.0.lock().saturating_add(PIPE_BYTES);
        limit.saturating_sub(taken)
    }

    fn reserve(&'static self, bytes: u64, limit: u64) -> Option<PipeRoom> {
        let pages = bytes.checked_next_multiple_of(PIPE_BYTES)?;
        let least = pages.checked_add(PIPE_BYTES)?;
        let most = least.saturating_add(pages / GROWTH);
        let mut taken = self.0.lock();
        let reserved = limit.saturating_sub(*taken).min(most);
        if reserved < least {
            return None;
        }
        *taken += reserved;
        Some(PipeRoom::new(self, reserved))
    }
}

/// Room in pipes that one dump has: what is reserved for it, or what its pipes use if that is more. It is free again
/// when this is dropped, and its pipes are closed.
pub struct PipeRoom {
    room: &'static Room,
    reserved: u64,
    /// Bytes of the dump's pipes. Changed under the lock of the room.
    used: Mutex<u64>,
}

impl PipeRoom {
    fn new(room: &'static Room, reserved: u64) -> Self {
        Self {
            room,
            reserved,
            used: Mutex::new(0),
        }
    }

    /// Makes the room of a dump for which nothing is reserved: its pipes take what is free.
    #[must_use]
    pub fn unreserved() -> Self {
        Self::new(&ROOM, 0)
    }

    /// Reserves room for a dump of so many bytes, and for some growth of the process if there is room for that, too.
    /// `None` if the dump does not fit beside those that have room.
    #[must_use]
    pub fn reserve(bytes: u64) -> Option<Self> {
        match limit() {
            Some(limit) => ROOM.reserve(bytes, limit),
            None => Some(Self::unreserved()),
        }
    }

    /// Returns the bytes of pages for which room is reserved; `None` if the user's pipes have no limit.
    #[must_use]
    pub fn reserved(&self) -> Option<u64> {
        limit().map(|_| self.reserved.saturating_sub(PIPE_BYTES))
    }

    /// Changes the bytes of the dump's pipes.
    fn change(&self, change: impl FnOnce(u64) -> u64) {
        let mut taken = self.room.0.lock();
        let mut used = self.used.lock();
        *taken -= self.reserved.max(*used);
        *used = change(*used);
        *taken += self.reserved.max(*used);
    }
}

impl Drop for PipeRoom {
    fn drop(&mut self) {
        let used = *self.used.get_mut();
        *self.room.0.lock() -= self.reserved.max(used);
    }
}

/// Counts the size of a dump's pipe as long as it is there.
pub(super) struct UsedRoom {
    of: Arc<PipeRoom>,
    bytes: u64,
}

impl UsedRoom {
    pub(super) fn new(of: &Arc<PipeRoom>, bytes: u64) -> Self {
        of.change(|used| used + bytes);
        Self {
            of: Arc::clone(of),
            bytes,
        }
    }
}

impl Drop for UsedRoom {
    fn drop(&mut self) {
        self.of.change(|used| used - self.bytes);
    }
}

/// Returns how many bytes of pages can wait in pipes of this process, besides those that are reserved or in use; `None`
/// if its user has no limit. What does not fit is copied into files in memory, which takes longer than the page-server
/// protocol. Other pipes of the same user are unknown: an eighth of `fs.pipe-user-pages-soft` is left to them.
#[must_use]
pub fn pipe_bytes() -> Option<u64> {
    limit().map(|limit| ROOM.free(limit))
}

/// Returns the bytes of pages that can be in pipes of this process; `None` without a limit.
fn limit() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    if is_exempt(&read("/proc/self/status"), &read("/proc/self/uid_map")) {
        return None;
    }
    limit_of(&read("/proc/sys/fs/pipe-user-pages-soft"))
}

/// Returns true if a process with this `/proc/self/status` has a capability that lifts the limit. Those of a user
/// namespace do not.
fn is_exempt(status: &str, uid_map: &str) -> bool {
    let set = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    let words: Vec<&str> = uid_map.split_whitespace().collect();
    let is_initial = words == ["0", "0", "4294967295"];
    is_initial && set.is_some_and(|set| set & ADMIN_OR_RESOURCE != 0)
}

/// Returns the limit for a content of `/proc/sys/fs/pipe-user-pages-soft`, pages; 0 is none.
fn limit_of(pages: &str) -> Option<u64> {
    let pages: u64 = pages.trim().parse().unwrap_or(16_384);
    let bytes = pages.saturating_mul(PAGE_BYTES);
    (pages > 0).then_some(bytes - bytes / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_of_the_machine_lift_the_limit_and_those_of_a_container_do_not() {
        let status = |set: &str| format!("Name:\tx\nCapEff:\t{set}\nSeccomp:\t0\n");
        let all = "         0          0 4294967295\n";
        assert!(is_exempt(&status("000001ffffffffff"), all));
        assert!(is_exempt(&status("0000000000200000"), all));
        assert!(is_exempt(&status("0000000001000000"), all));
        assert!(!is_exempt(&status("0000000000000002"), all));
        assert!(!is_exempt(&status("000001ffffffffff"), "0 100000 65536"));
        assert!(!is_exempt("", ""));
    }

    #[test]
    fn the_limit_leaves_room_for_other_pipes() {
        assert_eq!(limit_of("16384\n"), Some(56 << 20));
        assert_eq!(limit_of("0\n"), None);
        assert_eq!(limit_of(""), Some(56 << 20));
    }

    const MIB: u64 = 1 << 20;
    const LIMIT: u64 = 56 * MIB;

    fn room() -> &'static Room {
        Box::leak(Box::new(Room(Mutex::new(0))))
    }

    #[test]
    fn dumps_that_fit_alone_and_not_together_do_not_both_have_room() {
        let room = room();
        assert_eq!(room.free(LIMIT), 55 * MIB);
        let first = room.reserve(40 * MIB, LIMIT).unwrap();
        // With a pipe for its pagemap, and with its growth.
        assert_eq!((first.reserved, room.free(LIMIT)), (46 * MIB, 9 * MIB));
        assert!(room.reserve(40 * MIB, LIMIT).is_none());
        assert!(room.reserve(9 * MIB + 1, LIMIT).is_none());
        // Without growth, and in whole pipes.
        let second = room.reserve(9 * MIB - 1, LIMIT).unwrap();
        assert_eq!((second.reserved, room.free(LIMIT)), (10 * MIB, 0));
        assert!(room.reserve(1, LIMIT).is_none());
        drop(first);
        assert_eq!(room.free(LIMIT), 45 * MIB);
        assert!(room.reserve(u64::MAX, LIMIT).is_none());
        assert!(room.reserve(u64::MAX - MIB, u64::MAX).is_none());
        drop(second);
        assert_eq!(room.free(LIMIT), 55 * MIB);
    }

    #[test]
    fn pipes_use_what_is_reserved_before_what_is_free() {
        let room = room();
        let taken = || *room.0.lock();
        let dump = Arc::new(room.reserve(8 * MIB, LIMIT).unwrap());
        assert_eq!(taken(), 10 * MIB);
        let within = UsedRoom::new(&dump, 10 * MIB);
        assert_eq!(taken(), 10 * MIB);
        let beyond = UsedRoom::new(&dump, 4 * MIB);
        assert_eq!(taken(), 14 * MIB);
        drop(within);
        assert_eq!(taken(), 10 * MIB);
        // The session has ended, and a pipe of it is still read.
        drop(dump);
        assert_eq!(taken(), 10 * MIB);
        drop(beyond);
        assert_eq!(taken(), 0);
        let unreserved = Arc::new(PipeRoom::new(room, 0));
        let _pipe = UsedRoom::new(&unreserved, 4 * MIB);
        assert_eq!(taken(), 4 * MIB);
    }
}
