//! Returns memory of the C library's allocator to the system.
//!
//! The memory is not a region's: the function is here because the way to the allocator is `unsafe`, which only this
//! crate has.
//!
//! glibc keeps freed memory. A flood of connections leaves holes in the arenas of the threads that served it, a block
//! that is still in use behind each of them, and a daemon that runs for months would keep the most it ever had.
//! `malloc_trim` gives the whole pages of such holes back. Fewer arenas leave fewer holes.

/// Maximum number of arenas. By default glibc makes eight for each processor, to avoid contention of threads that
/// allocate all the time; here pages move without allocations.
const ARENAS: i32 = 4;

/// `M_ARENA_MAX` of malloc.h.
const M_ARENA_MAX: i32 = -8;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    // SAFETY: both have these signatures in glibc's malloc.h, take no pointers and may be called by any thread at any
    // time.
    unsafe extern "C" {
        pub(super) safe fn malloc_trim(pad: usize) -> i32;
        pub(super) safe fn mallopt(parameter: i32, value: i32) -> i32;
    }
}

/// Bounds the number of arenas. To be called before there are threads.
pub fn bound_arenas() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::mallopt(M_ARENA_MAX, ARENAS);
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    let _ = (M_ARENA_MAX, ARENAS);
}

/// Gives freed memory back to the system. Costs a walk over the free blocks, milliseconds for hundreds of megabytes.
pub fn return_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::malloc_trim(0);
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;

    fn anonymous_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:"));
        let words = line.unwrap().split_whitespace();
        words.filter_map(|word| word.parse().ok()).next().unwrap()
    }

    #[test]
    fn freed_memory_goes_back_though_a_block_behind_it_is_in_use() {
        let mut blocks: Vec<Box<[u8; 4000]>> = Vec::new();
        for _ in 0..32_768 {
            blocks.push(Box::new([1; 4000]));
        }
        let held = anonymous_kib();
        blocks.drain(..32_767);
        let kept = anonymous_kib();
        return_freed();
        let returned = anonymous_kib();
        assert_eq!(blocks.len(), 1);
        assert!(returned + 100_000 < held, "{held} {kept} {returned}");
    }
}
