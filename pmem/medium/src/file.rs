//! Mapped file, made durable by `msync`.
//!
//! The kernel tracks dirtiness by page, so flushing eight bytes writes 4096. A flush starts write-back at once
//! (`sync_file_range`), so that the device works while the dump still comes in; the fence then waits for exactly the
//! ranges of its own writer (`msync`), and not for ranges of others.
//!
//! The kernel reports a failed write-back once to every open file description, and to an arbitrary one of the threads
//! that wait through it. A thread could so take the error of another, which would then see success. Therefore each
//! fence has a description to itself while it waits. All of them are as old as the medium: none has missed an error.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::{MmapRaw, RemapOptions};
use parking_lot::{Condvar, Mutex};
use rustix::mm::MsyncFlags;

use super::area::Area;
use super::flushed::cover;
use super::open::allocate_more;
use super::populate::{Populator, populate_now};
use super::raw::RawBytes;
use super::{Flushed, Guarantee, Medium};
use crate::convert::to_usize;
use crate::{PAGE_BYTES, PAGE_SIZE};

/// Maximum number of separate ranges to wait for; beyond it the closest ones are joined: every `msync` ends with a
/// flush of the device's cache.
const MAX_MSYNCS: usize = 16;

/// Fences that wait at once; more wait for each other. Each takes a descriptor.
const MAX_FENCES: usize = 8;

/// A mapping of a whole file.
pub(crate) struct MappedFile {
    raw: RawBytes,
    map: Arc<Area>,
    /// File of the region; keeps the lock on it.
    file: File,
    /// Second open file of the region's file, for reading only, to be lent; `None` where it cannot be opened because
    /// `/proc` is missing.
    reading: Option<File>,
    guarantee: Guarantee,
    /// `None` if nothing shall be populated.
    populator: Option<Populator>,
    /// Mappings through descriptions of their own that no fence uses: `msync` takes a mapping.
    fences: Mutex<Vec<Description>>,
    /// Number of descriptions, those in use included.
    descriptions: usize,
    fence_freed: Condvar,
    /// A fence has failed: the kernel then forgets which pages were dirty, so nothing after it can be believed.
    failed: AtomicBool,
}

/// Mapping through an open file description that a fence waits through.
enum Description {
    /// The one that pages are written through.
    Own(Arc<Area>),
    Other(MmapRaw),
}

impl Description {
    fn wait(&self, at: usize, len: usize) -> io::Result<()> {
        match self {
            Self::Own(area) => {
                let (base, ..) = area.parts();
                // SAFETY: the caller has checked that the range is in the mapping; nothing is changed in it.
                let waited = unsafe {
                    rustix::mm::msync(base.wrapping_add(at).cast(), len, MsyncFlags::SYNC)
                };
                Ok(waited?)
            }
            Self::Other(map) => map.flush_range(at, len),
        }
    }
}

impl MappedFile {
    /// Maps the file, to be populated if asked for and `populate` is true.
    pub(crate) fn map(
        file: File,
        len_bytes: u64,
        guarantee: Guarantee,
        populate: bool,
    ) -> io::Result<Self> {
        let map_whole = |file: &File| {
            let map = memmap2::MmapOptions::new()
                .len(to_usize(len_bytes))
                .map_raw(file)?;
            // Memory of other processes, kept out of core files. (On tmpfs and of deleted files it would be in them.)
            map.advise(memmap2::Advice::DontDump)?;
            io::Result::Ok(Description::Other(map))
        };
        let map = Arc::new(Area::map(&file, to_usize(len_bytes), libc::MAP_SHARED)?);
        let (base, len, most) = map.parts();
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut fences = vec![Description::Own(Arc::clone(&map))];
        while fences.len() < MAX_FENCES && !guarantee.volatile {
            // Without `/proc` fences wait for each other, and are no less sure.
            let Ok(again) = File::options().read(true).write(true).open(&itself) else {
                break;
            };
            fences.push(map_whole(&again)?);
        }
        Ok(Self {
            // SAFETY: mapped readable and writable for as long as `map` lives, beside it, and by this value alone.
            // The file was allocated to its length and is locked; a page that is truncated away nevertheless becomes
            // a lost page.
            raw: unsafe { RawBytes::new(base, len, most)? },
            populator: populate.then(|| Populator::new(&map)),
            map,
            reading: File::open(itself).ok(),
            file,
            guarantee,
            descriptions: fences.len(),
            fences: Mutex::new(fences),
            fence_freed: Condvar::new(),
            failed: AtomicBool::new(false),
        })
    }

    /// Populates the whole mapping.
    pub(crate) fn populate_now(&self) {
        let (base, len, _) = self.map.parts();
        populate_now(base, len);
    }

    /// Waits for the ranges, with a description that no other fence waits through.
    fn sync(&self, ranges: &[(u64, u64)]) -> io::Result<()> {
        let mut free = self.fences.lock();
        let through = loop {
            match free.pop() {
                Some(through) => break through,
                None => self.fence_freed.wait(&mut free),
            }
        };
        drop(free);
        let result = self.sync_through(&through, ranges);
        if result.is_err() {
            // Before the next one may have the description, which has reported its error.
            self.failed.store(true, Ordering::SeqCst);
        }
        self.fences.lock().push(through);
        // All: one that grows the mappings waits for every description.
        self.fence_freed.notify_all();
        result
    }

    /// Extends the mappings of all descriptions, once no fence uses them.
    fn extend(&self, len: usize) -> io::Result<()> {
        let mut free = self.fences.lock();
        while free.len() < self.descriptions {
            self.fence_freed.wait(&mut free);
        }
        for description in &mut *free {
            if let Description::Other(map) = description {
                let options = RemapOptions::new().may_move(true);
                // SAFETY: the file has `len` bytes, and no slice of this mapping is ever lent.
                unsafe { map.remap(len, options)? };
            }
        }
        drop(free);
        self.fence_freed.notify_all();
        self.map.extend(&self.file, len)
    }

    fn sync_through(&self, through: &Description, ranges: &[(u64, u64)]) -> io::Result<()> {
        if self.failed.load(Ordering::SeqCst) {
            return Err(io::Error::other(
                "an earlier write-back of this medium failed",
            ));
        }
        // Written back to nowhere otherwise, without an error.
        if self.file.metadata()?.len() < self.capacity_bytes() {
            return Err(io::Error::other("the region's file was truncated"));
        }
        if self.guarantee.volatile {
            return Ok(());
        }
        for (start, end) in cover(ranges, PAGE_BYTES, MAX_MSYNCS) {
            through.wait(to_usize(start), to_usize(end - start))?;
        }
        Ok(())
    }
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
        self.raw.check(at, len_bytes)?;
        if len_bytes == 0 {
            return Ok(());
        }
        // Streaming stores are weakly ordered; write-back must see them.
        crate::cpu::store_fence();
        if !self.guarantee.volatile {
            let start = at / PAGE_BYTES * PAGE_BYTES;
            let end = (at + len_bytes).next_multiple_of(PAGE_BYTES);
            // Only a head start: its failure is found by the fence, which does not rely on it.
            let _ = start_write_back(&self.file, start, end - start);
        }
        flushed.add(at, len_bytes);
        Ok(())
    }

    fn fence(&self, flushed: &mut Flushed) -> io::Result<()> {
        for &(start, end) in flushed.ranges() {
            self.raw.check(start, end - start)?;
        }
        self.sync(flushed.ranges())?;
        flushed.clear();
        Ok(())
    }

    fn grow(&self, capacity_bytes: u64) -> io::Result<()> {
        self.map.check_room(capacity_bytes)?;
        allocate_more(&self.file, capacity_bytes)?;
        let len = to_usize(capacity_bytes);
        self.extend(len)?;
        // SAFETY: mapped by the line above, as the rest is.
        unsafe { self.raw.grow(len) };
        Ok(())
    }

    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        self.raw.range(at, PAGE_BYTES)?;
        self.file.write_all_at(page, at)?;
        // A device that refuses the write-back refuses it for good, like any other.
        self.sync(&[(at, at + PAGE_BYTES)])?;
        self.raw.restore(at, self.file.as_fd(), libc::MAP_SHARED)
    }
}

/// Calls `sync_file_range(SYNC_FILE_RANGE_WRITE)`, which neither rustix nor memmap2 has.
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
