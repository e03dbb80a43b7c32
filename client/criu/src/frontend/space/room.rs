//! The kernel's limit on the pipes of a user, which bounds how many pages can wait in pipes.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use permafrost_protocol::PAGE_BYTES;

/// Bits of capabilities (`include/uapi/linux/capability.h` of the kernel) that lift the limit (`fs/pipe.c`).
const ADMIN_OR_RESOURCE: u64 = 1 << 21 | 1 << 24;

/// Bytes of this process's pipes that hold pages.
static USED: AtomicU64 = AtomicU64::new(0);

/// Counts the size of a pipe as long as it is there.
pub(super) struct PipeRoom(u64);

impl PipeRoom {
    pub(super) fn taken(bytes: u64) -> Self {
        USED.fetch_add(bytes, Ordering::Relaxed);
        Self(bytes)
    }
}

impl Drop for PipeRoom {
    fn drop(&mut self) {
        USED.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Returns how many bytes of pages can wait in pipes of this process now; `None` if its user has no limit. What does not
/// fit is copied into files in memory, which takes longer than the page-server protocol. Other pipes of the same user are
/// unknown: an eighth of `fs.pipe-user-pages-soft` is left to them.
#[must_use]
pub fn pipe_bytes() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    if is_exempt(&read("/proc/self/status"), &read("/proc/self/uid_map")) {
        return None;
    }
    let limit = limit_of(&read("/proc/sys/fs/pipe-user-pages-soft"));
    limit.map(|limit| limit.saturating_sub(USED.load(Ordering::Relaxed)))
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

    #[test]
    fn pipes_that_hold_pages_are_counted() {
        // Other tests of this process count theirs.
        let taken = PipeRoom::taken(1 << 50);
        assert!(USED.load(Ordering::Relaxed) >= 1 << 50);
        drop(taken);
        assert!(USED.load(Ordering::Relaxed) < 1 << 50);
    }
}
