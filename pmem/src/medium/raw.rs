//! Bounds-checked access to a mapping; shared by the media.

use std::io;

use crate::convert::{to_u64, to_usize};
use crate::cpu;

/// A mapping's address and length. Whoever holds one keeps the mapping alive beside it.
#[derive(Clone, Copy)]
pub(super) struct RawBytes {
    base: *mut u8,
    len: usize,
}

// SAFETY: plain memory that is not tied to a thread; every access goes through the methods below,
// whose contracts exclude races.
unsafe impl Send for RawBytes {}
// SAFETY: as above.
unsafe impl Sync for RawBytes {}

impl RawBytes {
    /// # Safety
    /// `base` is valid for reads and writes of `len` bytes while the value and its copies are used.
    pub(super) const unsafe fn new(base: *mut u8, len: usize) -> Self {
        Self { base, len }
    }

    pub(super) const fn capacity_bytes(&self) -> u64 {
        to_u64(self.len)
    }

    /// The address of a range, once it is known to lie inside.
    pub(super) fn range(&self, at: u64, len_bytes: u64) -> io::Result<*mut u8> {
        match at.checked_add(len_bytes) {
            Some(end) if end <= to_u64(self.len) => {
                // SAFETY: at <= end <= len, so this stays within the mapping or one past its end.
                Ok(unsafe { self.base.add(to_usize(at)) })
            }
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "{len_bytes} bytes at {at:#x} are outside a medium of {:#x}",
                    self.len
                ),
            )),
        }
    }

    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let from = self.range(at, to_u64(into.len()))?;
        // SAFETY: `range` has checked the source; `into` is a unique borrow and so no part of the
        // mapping; writers promise that nobody reads what they write.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// # Safety
    /// As [`super::Medium::bytes`].
    pub(super) unsafe fn bytes(&self, at: u64, len: usize) -> io::Result<&[u8]> {
        let from = self.range(at, to_u64(len))?;
        // SAFETY: `range` has checked it; the caller promises that nobody writes to it.
        Ok(unsafe { std::slice::from_raw_parts(from, len) })
    }

    /// # Safety
    /// As [`super::Medium::write`].
    pub(super) unsafe fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let to = self.range(at, to_u64(from.len()))?;
        // SAFETY: `range` has checked the target; the caller promises that it is nobody else's, so
        // `from` is no part of it.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    /// # Safety
    /// As [`super::Medium::write_streaming`].
    pub(super) unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let to = self.range(at, to_u64(from.len()))?;
        check_streaming(at, from.len())?;
        // SAFETY: as in `write`; mappings start on a page, so `to` is as aligned as `at`.
        unsafe { cpu::copy_streaming(to, from) };
        Ok(())
    }
}

/// Streaming copies move whole cache lines.
pub(super) fn check_streaming(at: u64, len: usize) -> io::Result<()> {
    if at.is_multiple_of(to_u64(cpu::CACHE_LINE)) && len.is_multiple_of(cpu::CACHE_LINE) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "a streaming write is not of whole cache lines",
    ))
}
