//! Mapping of a whole file, with address space behind it in which it grows without being moved.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{Advice, madvise, munmap};

use crate::PAGE_SIZE;
use crate::convert::to_u64;

/// Least address space of a mapping. It takes no memory: pages are mapped as the file has them.
const LEAST_RESERVED: usize = 1 << 40;
/// Address space for each byte of the file.
const RESERVED_TIMES: usize = 4;
/// Alignment of a mapping, as of the largest pages that a medium may have.
const ALIGNMENT: usize = 1 << 30;

/// A mapped file; unmapped when it is dropped.
pub(crate) struct Area {
    /// Start of the reserved address space.
    start: *mut c_void,
    base: *mut u8,
    /// Bytes from `base` on that are this value's to map and to unmap.
    reserved: AtomicUsize,
    len: AtomicUsize,
    flags: i32,
}

// SAFETY: addresses and lengths; memory is accessed through `RawBytes` only, and unmapped by Drop, which has the
// value to itself.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// Maps the first `len` bytes of a file, which has them, with the given `MAP_` flags.
    pub(crate) fn map(file: &File, len: usize, flags: i32) -> io::Result<Self> {
        try_flags(file, flags)?;
        let reserved = len.saturating_mul(RESERVED_TIMES).max(LEAST_RESERVED);
        // Without so much address space (`ulimit -v`) the mapping can be used, and not grow.
        let (start, reserved) = match reserve(reserved + ALIGNMENT) {
            Ok(start) => (start, reserved),
            Err(_) => (reserve(len + ALIGNMENT)?, len),
        };
        let base = start.cast::<u8>();
        let before = base.align_offset(ALIGNMENT);
        let area = Self {
            start,
            base: base.wrapping_add(before),
            reserved: AtomicUsize::new(reserved + ALIGNMENT - before),
            len: AtomicUsize::new(0),
            flags,
        };
        area.extend(file, len)?;
        Ok(area)
    }

    /// Address, length, and the length that it can grow to.
    pub(crate) fn parts(&self) -> (*mut u8, usize, usize) {
        (
            self.base,
            self.len.load(Ordering::Acquire),
            self.reserved.load(Ordering::Acquire),
        )
    }

    /// Fails if the mapping cannot grow to `len` bytes.
    pub(crate) fn check_room(&self, len: u64) -> io::Result<()> {
        let reserved = self.reserved.load(Ordering::Acquire);
        if len <= to_u64(reserved) {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "the mapping can grow to {reserved} bytes while it is open: start the daemon again, and grow then"
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
            let error = io::Error::last_os_error();
            // The kernel may have unmapped what was reserved there, and another thread may have mapped something since.
            // So nothing from here on is this value's any more; the rest of the reserved addresses is not used again.
            self.reserved.store(from, Ordering::Release);
            return Err(error);
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
        let total = self.base.addr() - self.start.addr() + *self.reserved.get_mut();
        if total > 0 {
            // SAFETY: reserved by `map`, unmapped here only; slices borrow from the medium, which holds a reference. It
            // cannot fail for whole mappings, and nothing could be done about it.
            let _ = unsafe { munmap(self.start, total) };
        }
    }
}

/// Fails if the file cannot be mapped with these flags: found out beside the reserved address space, as a mapping that
/// fails there leaves a hole in it.
fn try_flags(file: &File, flags: i32) -> io::Result<()> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE_SIZE,
            access,
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: mapped above, and used by nothing.
    let _ = unsafe { munmap(page, PAGE_SIZE) };
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Maps an anonymous page at an address, whatever was there.
    fn take(at: *mut u8) -> *mut u8 {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the caller gives addresses that nothing is accessed through.
        let page = unsafe { libc::mmap(at.cast(), PAGE_SIZE, access, flags, -1, 0) };
        assert_eq!(page, at.cast());
        page.cast()
    }

    #[test]
    fn what_others_map_where_a_mapping_failed_stays() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * PAGE_SIZE as u64).unwrap();
        let area = Area::map(&file, PAGE_SIZE, libc::MAP_SHARED).unwrap();
        let (base, ..) = area.parts();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let unwritable = File::open(path).unwrap();
        area.extend(&unwritable, 2 * PAGE_SIZE).unwrap_err();
        // As another thread may, once the kernel has unmapped what was there.
        let taken = take(base.wrapping_add(PAGE_SIZE));
        area.extend(&file, 2 * PAGE_SIZE).unwrap_err();
        drop(area);
        // SAFETY: mapped by `take`, and by nothing since.
        unsafe {
            taken.write(7);
            assert_eq!(taken.read(), 7);
            let _ = munmap(taken.cast(), PAGE_SIZE);
        }
    }

    #[test]
    fn flags_that_a_file_does_not_have_are_refused_before_anything_is_reserved() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE_SIZE as u64).unwrap();
        let unwritable = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        assert!(try_flags(&file, libc::MAP_SHARED).is_ok());
        assert!(try_flags(&unwritable, libc::MAP_SHARED).is_err());
        assert!(Area::map(&unwritable, PAGE_SIZE, libc::MAP_SHARED).is_err());
    }
}
