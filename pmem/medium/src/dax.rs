//! Persistent memory mapped with MAP_SYNC: flushed by CPU instructions, no system call.
//!
//! Only MAP_SHARED_VALIDATE makes the kernel refuse unsupported flags: plain MAP_SHARED ignores flags that the kernel
//! does not know, and MAP_SYNC with them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use super::area::Area;
use super::open::allocate_more;
use super::populate::Populator;
use super::raw::RawBytes;
use super::{Flushed, Guarantee, Medium, MediumKind};
use crate::PAGE_SIZE;
use crate::convert::{to_u64, to_usize};
use crate::cpu::{self, FlushInstruction};

/// A DAX mapping of a whole file.
pub(crate) struct Dax {
    raw: RawBytes,
    mapping: Arc<Area>,
    instruction: FlushInstruction,
    guarantee: Guarantee,
    /// `None` if nothing shall be populated.
    populator: Option<Populator>,
    /// Keeps the lock on the region, and takes pages that the mapping has lost.
    file: File,
}

impl Dax {
    /// Maps `file` if its file system and device give MAP_SYNC, else gives back the file and the errno.
    pub(crate) fn map(file: File, len_bytes: u64, populate: bool) -> Result<Self, (File, i32)> {
        let instruction = FlushInstruction::detect();
        if instruction == FlushInstruction::None {
            return Err((file, rustix::io::Errno::OPNOTSUPP.raw_os_error()));
        }
        let flags = libc::MAP_SHARED_VALIDATE | libc::MAP_SYNC;
        let errno = |error: io::Error| error.raw_os_error().unwrap_or_default();
        let mapping = match Area::map(&file, to_usize(len_bytes), flags) {
            Ok(mapping) => Arc::new(mapping),
            Err(error) => return Err((file, errno(error))),
        };
        let (base, len, most) = mapping.parts();
        // SAFETY: just mapped, readable and writable, as long as `mapping` lives beside it.
        let raw = match unsafe { RawBytes::new(base, len, most) } {
            Ok(raw) => raw,
            Err(error) => return Err((file, errno(error))),
        };
        Ok(Self {
            raw,
            instruction,
            guarantee: Guarantee {
                kind: MediumKind::Dax,
                dax_errno: None,
                dax_without_sync: false,
                volatile: false,
                instruction: Some(instruction.name()),
                emulated: None,
            },
            populator: populate.then(|| Populator::new(&mapping)),
            mapping,
            file,
        })
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
        if let Some(populator) = &self.populator {
            populator.start(ranges);
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

    fn grow(&self, capacity_bytes: u64) -> io::Result<()> {
        self.mapping.check_room(capacity_bytes)?;
        allocate_more(&self.file, capacity_bytes)?;
        let len = to_usize(capacity_bytes);
        self.mapping.extend(&self.file, len)?;
        // SAFETY: mapped by the line above, as the rest is.
        unsafe { self.raw.grow(len) };
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
