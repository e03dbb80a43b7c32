//! Persistent memory mapped with MAP_SYNC: flushed by CPU instructions, no system call.
//!
//! Only MAP_SHARED_VALIDATE makes the kernel refuse unsupported flags: plain MAP_SHARED ignores flags that the kernel
//! does not know, and MAP_SYNC with them.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::populate::{Mapping, populate_in_background};
use super::raw::RawBytes;
use super::{Flushed, Guarantee, Medium, MediumKind};
use crate::PAGE_SIZE;
use crate::convert::{to_u64, to_usize};
use crate::cpu::{self, FlushInstruction};

/// A DAX mapping of a whole file.
pub(crate) struct Dax {
    raw: RawBytes,
    mapping: Arc<DaxMapping>,
    instruction: FlushInstruction,
    guarantee: Guarantee,
    populate: bool,
    /// Keeps the lock on the region, and takes pages that the mapping has lost.
    file: File,
}

/// Mapping that `mmap` returned; unmapped when dropped.
pub(crate) struct DaxMapping {
    base: *mut c_void,
    len: usize,
}

// SAFETY: an address and a length; memory is accessed through `RawBytes` only, and unmapped by Drop,
// which has the value to itself.
unsafe impl Send for DaxMapping {}
// SAFETY: as above.
unsafe impl Sync for DaxMapping {}

impl Mapping for DaxMapping {
    fn area(&self) -> (*mut u8, usize) {
        (self.base.cast(), self.len)
    }
}

impl Drop for DaxMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `Dax::map`, unmapped here only; slices borrow from the medium, which holds
        // a reference. It cannot fail for a whole mapping, and nothing could be done about it.
        let _ = unsafe { munmap(self.base, self.len) };
    }
}

impl Dax {
    /// Maps `file` if its file system and device give MAP_SYNC, else gives back the file and the errno.
    pub(crate) fn map(file: File, len_bytes: u64, populate: bool) -> Result<Self, (File, i32)> {
        let instruction = FlushInstruction::detect();
        if instruction == FlushInstruction::None {
            return Err((file, rustix::io::Errno::OPNOTSUPP.raw_os_error()));
        }
        let len = to_usize(len_bytes);
        // SAFETY: a fresh mapping at an address of the kernel's choice replaces nothing.
        let mapped = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED_VALIDATE | MapFlags::SYNC,
                &file,
                0,
            )
        };
        if let Ok(base) = mapped {
            // Memory of other processes is kept out of core files. That it cannot be is no reason to do without DAX.
            // SAFETY: the mapping made above, whole; the advice changes nothing about its contents.
            let _ = unsafe { madvise(base, len, Advice::LinuxDontDump) };
        }
        match mapped {
            Ok(base) => {
                let mapping = Arc::new(DaxMapping { base, len });
                // SAFETY: just mapped, readable and writable, as long as `mapping` lives beside it.
                let raw = match unsafe { RawBytes::new(base.cast(), len) } {
                    Ok(raw) => raw,
                    Err(error) => return Err((file, error.raw_os_error().unwrap_or_default())),
                };
                Ok(Self {
                    raw,
                    mapping,
                    instruction,
                    guarantee: Guarantee {
                        kind: MediumKind::Dax,
                        dax_errno: None,
                        dax_without_sync: false,
                        volatile: false,
                        instruction: Some(instruction.name()),
                        emulated: None,
                    },
                    populate,
                    file,
                })
            }
            Err(errno) => Err((file, errno.raw_os_error())),
        }
    }
}

impl Medium for Dax {
    fn capacity_bytes(&self) -> u64 {
        self.raw.capacity_bytes()
    }

    fn guarantee(&self) -> &Guarantee {
        &self.guarantee
    }

    fn populate(&self, ranges: Vec<Range<u64>>) {
        if self.populate {
            populate_in_background(&self.mapping, ranges);
        }
    }

    fn lost_pages(&self) -> u64 {
        self.raw.lost_pages()
    }

    fn check(&self, at: u64, len_bytes: u64) -> io::Result<()> {
        self.raw.check(at, len_bytes)
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

    fn flush(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        let start = self.raw.range(at, len_bytes)?;
        // SAFETY: checked to be inside the mapping; the instruction was detected.
        unsafe { cpu::write_back(start, to_usize(len_bytes), self.instruction) };
        flushed.add(at, len_bytes);
        self.raw.check(at, len_bytes)
    }

    fn flush_streamed(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        // Streaming stores have left the cache, or never entered it: the fence orders them.
        flushed.add(at, len_bytes);
        self.raw.check(at, len_bytes)
    }

    fn fence(&self, flushed: &mut Flushed) -> io::Result<()> {
        cpu::store_fence();
        for &(start, end) in flushed.ranges() {
            self.raw.check(start, end - start)?;
        }
        flushed.clear();
        Ok(())
    }

    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        self.raw.range(at, to_u64(PAGE_SIZE))?;
        self.file.write_all_at(page, at)?;
        self.file.sync_data()?;
        self.raw.restore(
            at,
            self.file.as_fd(),
            libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC,
        )
    }
}
