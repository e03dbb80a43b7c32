//! Bounds-checked, guarded access to a mapping; shared by the media.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::guard::Guard;
use crate::convert::{to_u64, to_usize};
use crate::{PAGE_BYTES, PAGE_SIZE, cpu};

/// Address and length of a mapping. The owner of a value keeps the mapping alive beside it, and drops the value
/// first.
pub(crate) struct RawBytes {
    base: *mut u8,
    len: AtomicUsize,
    guard: Guard,
}

// SAFETY: plain memory that is not tied to a thread; every access goes through the methods below,
// whose contracts exclude races.
unsafe impl Send for RawBytes {}
// SAFETY: as above.
unsafe impl Sync for RawBytes {}

impl RawBytes {
    /// Makes access to `len` bytes, which can become `most`.
    ///
    /// # Errors
    /// The handler for lost pages cannot be installed.
    ///
    /// # Safety
    /// `base` is valid for reads and writes of `len` bytes while the value is used, and a mapping of the caller's own, which
    /// has the address space up to `most`.
    pub(crate) unsafe fn new(base: *mut u8, len: usize, most: usize) -> io::Result<Self> {
        // SAFETY: the caller's promise; code that uses lent bytes checks them afterwards (`Medium::check`).
        let guard = unsafe { Guard::new(base, len, most)? };
        let len = AtomicUsize::new(len);
        Ok(Self { base, len, guard })
    }

    /// Gives access to `len` bytes, if they are more than before.
    ///
    /// # Safety
    /// They are valid for reads and writes as those given to [`new`](Self::new), and no more than `most`.
    pub(crate) unsafe fn grow(&self, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.guard.grow(len) };
        self.len.fetch_max(len, Ordering::Release);
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        to_u64(self.len.load(Ordering::Acquire))
    }

    pub(crate) fn lost_pages(&self) -> u64 {
        self.guard.lost_pages()
    }

    /// Fails if a page of the range is lost, as [`super::Medium::check`] does.
    pub(crate) fn check(&self, at: u64, len_bytes: u64) -> io::Result<()> {
        self.range(at, len_bytes)?;
        Ok(self.guard.check(at, len_bytes)?)
    }

    pub(crate) fn lose(&self, at: u64, len_bytes: u64) {
        self.guard.lose(at, len_bytes);
    }

    /// Marks the page at `at` as not lost: nothing has to be mapped.
    pub(crate) fn find_again(&self, at: u64) {
        self.guard.find_again(at);
    }

    /// Maps the page at `at` of the file again in the place of the empty one, if it was lost.
    pub(crate) fn restore(&self, at: u64, file: BorrowedFd<'_>, flags: i32) -> io::Result<()> {
        let page = self.range(at / PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)?;
        if self.guard.check(at, 1).is_ok() {
            return Ok(());
        }
        let offset = i64::try_from(at / PAGE_BYTES * PAGE_BYTES).map_err(io::Error::other)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the page is part of the mapping that this value owns alone, and the empty page stands in its place.
        // Code that reads it meanwhile finds it marked as lost.
        let mapped = unsafe {
            libc::mmap(
                page.cast(),
                PAGE_SIZE,
                access,
                flags | libc::MAP_FIXED,
                file.as_raw_fd(),
                offset,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        self.guard.find_again(at);
        Ok(())
    }

    /// Returns the address of a range, once it is known to lie inside.
    pub(crate) fn range(&self, at: u64, len_bytes: u64) -> io::Result<*mut u8> {
        match at.checked_add(len_bytes) {
            Some(end) if end <= self.capacity_bytes() => {
                // SAFETY: at <= end <= len, so this stays within the mapping or one past its end.
                Ok(unsafe { self.base.add(to_usize(at)) })
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{len_bytes} bytes at {at:#x} are outside a medium of {:#x}",
                    self.capacity_bytes()
                ),
            )),
        }
    }

    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let len = to_u64(into.len());
        let from = self.range(at, len)?;
        // SAFETY: `range` has checked the source; `into` is a unique borrow and so no part of the mapping; writers
        // promise that no other code reads the bytes that they write.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(self.guard.check(at, len)?)
    }

    /// # Safety
    /// As [`super::Medium::bytes`].
    pub(crate) unsafe fn bytes(&self, at: u64, len: usize) -> io::Result<&[u8]> {
        let from = self.range(at, to_u64(len))?;
        self.guard.check(at, to_u64(len))?;
        // SAFETY: `range` has checked it; the caller promises that no code writes to it.
        Ok(unsafe { std::slice::from_raw_parts(from, len) })
    }

    /// # Safety
    /// As [`super::Medium::write`].
    pub(crate) unsafe fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let len = to_u64(from.len());
        let to = self.range(at, len)?;
        // SAFETY: `range` has checked the target; the caller promises that no other code uses it, so `from` is no
        // part of it.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(self.guard.check(at, len)?)
    }

    /// # Safety
    /// As [`super::Medium::write_streaming`].
    pub(crate) unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let len = to_u64(from.len());
        let to = self.range(at, len)?;
        check_streaming(at, from.len())?;
        // SAFETY: as in `write`; mappings start on a page, so `to` is as aligned as `at`.
        unsafe { cpu::copy_streaming(to, from) };
        Ok(self.guard.check(at, len)?)
    }
}
/// Checks the alignment of a streaming copy, which moves whole cache lines.
pub(crate) fn check_streaming(at: u64, len: usize) -> io::Result<()> {
    if at.is_multiple_of(to_u64(cpu::CACHE_LINE)) && len.is_multiple_of(cpu::CACHE_LINE) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "a streaming write is not of whole cache lines",
    ))
}
