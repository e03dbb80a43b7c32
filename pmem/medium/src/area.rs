//! Mapping of a whole file, with address space behind it in which it grows without being moved.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{Advice, madvise, munmap};

use crate::convert::to_u64;

/// Least address space of a mapping. It takes no memory: pages are mapped as the file has them.
const LEAST_RESERVED: usize = 1 << 40;
/// Address space for each byte of the file.
const RESERVED_TIMES: usize = 4;
/// Alignment of a mapping, as of the largest pages that a medium may have.
const ALIGNMENT: usize = 1 << 30;

/// A mapped file; unmapped when it is dropped.
pub(crate) struct Area {
    /// All of the reserved address space.
    start: *mut c_void,
    total: usize,
    base: *mut u8,
    reserved: usize,
    len: AtomicUsize,
    flags: i32,
}

// SAFETY: addresses and lengths; memory is accessed through `RawBytes` only, and unmapped by Drop, which has the value to
// itself.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// Maps the first `len` bytes of a file, which has them, with the given `MAP_` flags.
    pub(crate) fn map(file: &File, len: usize, flags: i32) -> io::Result<Self> {
        let reserved = len.saturating_mul(RESERVED_TIMES).max(LEAST_RESERVED);
        // Without so much address space (`ulimit -v`) the mapping can be used, and not grow.
        let (start, total, reserved) = match reserve(reserved + ALIGNMENT) {
            Ok(start) => (start, reserved + ALIGNMENT, reserved),
            Err(_) => (reserve(len + ALIGNMENT)?, len + ALIGNMENT, len),
        };
        let base = start.cast::<u8>();
        let area = Self {
            start,
            total,
            base: base.wrapping_add(base.align_offset(ALIGNMENT)),
            reserved,
            len: AtomicUsize::new(0),
            flags,
        };
        area.extend(file, len)?;
        Ok(area)
    }

    /// Address, length, and the length that it can grow to.
    pub(crate) fn parts(&self) -> (*mut u8, usize, usize) {
        (self.base, self.len.load(Ordering::Acquire), self.reserved)
    }

    /// Fails if the mapping cannot grow to `len` bytes.
    pub(crate) fn check_room(&self, len: u64) -> io::Result<()> {
        if len <= to_u64(self.reserved) {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the mapping can grow to {} bytes while it is open: start the daemon again, and grow then",
            self.reserved
        )))
    }

    /// Maps the file's bytes up to `len`, behind those that are mapped.
    pub(crate) fn extend(&self, file: &File, len: usize) -> io::Result<()> {
        let from = self.len.load(Ordering::Acquire);
        let Some(more) = len.checked_sub(from).filter(|more| *more > 0) else {
            return Ok(());
        };
        self.check_room(to_u64(len))?;
        let at = self.base.wrapping_add(from).cast::<c_void>();
        let offset = i64::try_from(from).map_err(io::Error::other)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = self.flags | libc::MAP_FIXED;
        // SAFETY: the range lies in the address space that this value has reserved, behind what it has mapped.
        let mapped = unsafe { libc::mmap(at, more, access, flags, file.as_raw_fd(), offset) };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Memory of other processes is kept out of core files. That it cannot be is no reason to do without it.
        // SAFETY: the mapping made above, whole; the advice changes nothing about its contents.
        let _ = unsafe { madvise(at, more, Advice::LinuxDontDump) };
        self.len.store(len, Ordering::Release);
        Ok(())
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: reserved by `map`, unmapped here only; slices borrow from the medium, which holds a reference. It cannot
        // fail for whole mappings, and nothing could be done about it.
        let _ = unsafe { munmap(self.start, self.total) };
    }
}

/// Reserves address space that has no memory.
fn reserve(len: usize) -> io::Result<*mut c_void> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(start)
}
