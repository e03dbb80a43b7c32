//! A mapped file, made durable by `msync`.
//!
//! Honest about its grain: the kernel tracks dirtiness by page, so flushing eight bytes writes 4096.
//! A flush starts write-back at once (`sync_file_range`), so that the device works while the dump still
//! comes in; the fence then waits for exactly the ranges flushed since the last one (`msync`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::MmapRaw;

use super::raw::RawBytes;
use super::{Guarantee, Medium};
use crate::convert::to_usize;
use crate::{PAGE_BYTES, PAGE_SIZE};

/// Past so many separate ranges one `fdatasync` is cheaper than an `msync` each: every one of either
/// ends with a flush of the device's cache.
const MAX_MSYNCS: usize = 16;

/// A mapping of a whole file.
pub(super) struct MappedFile {
    raw: RawBytes,
    map: Arc<MmapRaw>,
    /// Also keeps the lock on the region.
    file: File,
    /// The same file for reading only, to be lent; `None` where `/proc` is not there to open it by.
    reading: Option<File>,
    guarantee: Guarantee,
    /// Page-aligned (start, end) flushed and not yet fenced.
    pending: Mutex<Vec<(u64, u64)>>,
    /// Held while a fence waits, so that a thread whose ranges another one's fence took up waits too.
    /// True once a fence has failed: the kernel then forgets which pages were dirty, so nothing after
    /// it can be believed.
    failed: Mutex<bool>,
}

impl MappedFile {
    pub(super) fn map(file: File, len_bytes: u64, guarantee: Guarantee) -> io::Result<Self> {
        let map = memmap2::MmapOptions::new()
            .len(to_usize(len_bytes))
            .map_raw(&file)?;
        let map = Arc::new(map);
        let reading = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
        Ok(Self {
            // SAFETY: mapped readable and writable for as long as `map` lives, beside it. The file was
            // allocated to its length and is locked; who truncates it all the same breaks the contract
            // of the region (docs/format.md).
            raw: unsafe { RawBytes::new(map.as_mut_ptr(), map.len()) },
            map,
            file,
            reading,
            guarantee,
            pending: Mutex::default(),
            failed: Mutex::default(),
        })
    }

    pub(super) const fn mapping(&self) -> &Arc<MmapRaw> {
        &self.map
    }

    fn sync(&self, ranges: &[(u64, u64)]) -> io::Result<()> {
        if ranges.len() > MAX_MSYNCS {
            return self.file.sync_data();
        }
        for &(start, end) in ranges {
            self.map
                .flush_range(to_usize(start), to_usize(end - start))?;
        }
        Ok(())
    }
}

/// Joins ranges that touch.
fn coalesce(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    ranges.sort_unstable();
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (start, end) in ranges {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

impl Medium for MappedFile {
    fn capacity_bytes(&self) -> u64 {
        self.raw.capacity_bytes()
    }

    fn guarantee(&self) -> &Guarantee {
        &self.guarantee
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.reading.as_ref().map(File::as_fd)
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.raw.read(at, into)
    }

    unsafe fn bytes(&self, at: u64, len: usize) -> io::Result<&[u8]> {
        // SAFETY: the caller's promise.
        unsafe { self.raw.bytes(at, len) }
    }

    unsafe fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw.write(at, from) }
    }

    unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.raw.write_streaming(at, from) }
    }

    fn flush(&self, at: u64, len_bytes: u64) -> io::Result<()> {
        self.raw.range(at, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        // Streaming stores are weakly ordered; write-back must see them.
        crate::cpu::store_fence();
        let start = at / PAGE_BYTES * PAGE_BYTES;
        let end = (at + len_bytes).next_multiple_of(PAGE_BYTES);
        if !self.guarantee.volatile {
            // Only a head start: its failure is found by the fence, which does not rely on it.
            let _ = start_write_back(&self.file, start, end - start);
        }
        self.pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((start, end));
        Ok(())
    }

    fn fence(&self) -> io::Result<()> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if *failed {
            return Err(io::Error::other(
                "an earlier write-back of this medium failed",
            ));
        }
        let taken =
            std::mem::take(&mut *self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        let result = self.sync(&coalesce(taken));
        *failed = result.is_err();
        result
    }

    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        self.raw.range(at, PAGE_BYTES)?;
        self.file.write_all_at(page, at)?;
        // A device that refuses the write-back refuses it for good, like any other.
        self.flush(at, PAGE_BYTES)?;
        self.fence()
    }
}

/// `sync_file_range(SYNC_FILE_RANGE_WRITE)`, which neither rustix nor memmap2 has.
fn start_write_back(file: &File, start: u64, len_bytes: u64) -> io::Result<()> {
    let (Ok(start), Ok(len)) = (i64::try_from(start), i64::try_from(len_bytes)) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    // SAFETY: no memory is involved; the descriptor is open as long as `file` is borrowed.
    match unsafe {
        libc::sync_file_range(file.as_raw_fd(), start, len, libc::SYNC_FILE_RANGE_WRITE)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_ranges_are_joined() {
        assert_eq!(
            coalesce(vec![(8, 12), (0, 4), (4, 8), (20, 24), (9, 10)]),
            [(0, 12), (20, 24)]
        );
        assert!(coalesce(Vec::new()).is_empty());
    }
}
