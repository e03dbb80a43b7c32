//! Media: memory that is read, written, flushed and fenced.
//!
//! There are three: a DAX mapping, where a flush is a few CPU instructions; a plain file, where it is `msync`; and
//! the crash simulator. Each can be slowed down to another device. Regions access storage only through a medium.

#![allow(
    unsafe_code,
    reason = "mapping, flushing and lending mapped memory is what this crate is for"
)]

mod area;
pub mod convert;
mod cpu;
mod dax;
mod emulated;
mod error;
mod file;
mod flushed;
mod guard;
pub mod heap;
mod open;
mod pipe;
mod populate;
mod raw;
mod set;
pub mod sim;

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

pub use cpu::is_zero;
pub use emulated::{Emulation, NoDevice, emulate};
pub use error::MediumError;
pub use flushed::Flushed;
pub use guard::LostPage;
pub use open::{OpenOptions, create_medium_in_memory, open_medium, open_sparse_medium};
pub use pipe::refer_to_memory;
pub use set::{MAX_MEDIA, MEDIUM_SPAN, MediumSet};

/// Bytes of a page of a medium: the unit of what it can lose, and of a region's map nodes and checksums. The store
/// checks at compile time that a page of an image has the same size.
pub const PAGE_SIZE: usize = 4096;

/// [`PAGE_SIZE`] as an offset.
pub(crate) const PAGE_BYTES: u64 = PAGE_SIZE as u64;

/// Kind of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MediumKind {
    /// Mapped persistent memory, made durable by CPU instructions.
    Dax,
    /// A mapped file, made durable by `msync`.
    File,
    /// The crash simulator.
    Simulated,
}

/// Durability that a medium guarantees, and the reasons why it is no better.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Guarantee {
    /// Kind of the medium.
    pub kind: MediumKind,
    /// Error number with which DAX with MAP_SYNC was refused; `None` if it was not tried or not refused.
    pub dax_errno: Option<i32>,
    /// True if the file system has DAX, yet without MAP_SYNC (as on virtio-pmem): the CPU cannot make it durable.
    pub dax_without_sync: bool,
    /// True if nothing on the medium outlives a power failure or a reboot: the file is on tmpfs or ramfs.
    pub volatile: bool,
    /// Write-back instruction of a DAX mapping.
    pub instruction: Option<&'static str>,
    /// The device whose speed is emulated on it.
    pub emulated: Option<Emulation>,
}

impl fmt::Display for Guarantee {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = &self.emulated {
            write!(f, "{device} over ")?;
        }
        match self.kind {
            MediumKind::Dax => {
                f.write_str("DAX, MAP_SYNC: durable after flush and fence")?;
                if let Some(instruction) = self.instruction {
                    write!(f, " ({instruction}, sfence)")?;
                }
            }
            MediumKind::File if self.volatile => {
                f.write_str("file in memory (tmpfs): survives this process, not a reboot")?;
            }
            MediumKind::File => f.write_str("file: durable after msync, page-granular")?,
            MediumKind::Simulated => {
                f.write_str("simulated: durable after flush and fence, until it is dropped")?
            }
        }
        if let Some(errno) = self.dax_errno {
            let text = rustix::io::Errno::from_raw_os_error(errno);
            write!(f, " (DAX refused: {text}")?;
            if self.dax_without_sync {
                f.write_str("; the file system has DAX, its device no MAP_SYNC")?;
            }
            f.write_str(")")?;
        }
        Ok(())
    }
}

/// A page is in an object store, and is to be recalled before it is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("in the cold tier, and not recalled")]
pub struct NotRecalled;

impl NotRecalled {
    /// Returns true if an error is this one.
    #[must_use]
    pub fn is(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|inner| inner.is::<Self>())
    }
}

impl From<NotRecalled> for io::Error {
    fn from(error: NotRecalled) -> Self {
        Self::other(error)
    }
}

/// Returns true if an error of a cold medium says that an object is missing or damaged, and not that its store is away:
/// its kind is [`io::ErrorKind::InvalidData`], which no other error of a medium has.
#[must_use]
pub fn is_damaged_object(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidData
}

/// Identity of a cold medium: its index and its object store carry it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColdIdentity {
    /// UUID of the region.
    pub region: [u8; 16],
    /// UUID of the medium.
    pub medium: [u8; 16],
}

/// Pages of a block that were fetched from an object store, and are read from memory while this is kept.
pub type FetchedPages = Box<dyn std::any::Any + Send>;

/// An object store under a medium: blocks, which are the slots of a region, are moved out to it.
///
/// A page that is out is read from the store ([`Medium::read`], which may take long and fail), and not lent.
///
/// Errors say that the store is away, unless [`is_damaged_object`] returns true.
///
/// Methods that ask the store say so. They may take as long as it lets a request take, so a caller holds no lock.
pub trait ColdStore {
    /// Returns the address of the store, without credentials.
    fn address(&self) -> &str;

    /// Makes the index and the store those of a new medium; the index has `generation`. Asks the store.
    /// `is_listed` returns true for media of the same region, whose store is not taken over.
    ///
    /// # Errors
    /// The store is away, or is another medium's; the index cannot be written.
    fn adopt(
        &self,
        identity: ColdIdentity,
        generation: u32,
        is_listed: &dyn Fn([u8; 16]) -> bool,
    ) -> io::Result<()>;

    /// Checks that the index is that of a medium, and of `generation` or the next one: a crash may have come between
    /// the index and the region's record of it.
    ///
    /// # Errors
    /// The index is missing, damaged, another medium's or another generation's. The message says what to do.
    fn attach(&self, identity: ColdIdentity, generation: u32) -> io::Result<()>;

    /// Writes the generation of the index, durably.
    ///
    /// # Errors
    /// The index cannot be written.
    fn set_generation(&self, generation: u32) -> io::Result<()>;

    /// Gives the store up, so that another medium can have it. Asks the store.
    ///
    /// # Errors
    /// The store is away.
    fn release(&self) -> io::Result<()>;

    /// Moves the block at `at` out: the pages `out` into an object. The pages `kept` stay, all others are not needed
    /// any more. What was written is durable. Returns the size of the object. Asks the store.
    ///
    /// # Errors
    /// The store is away, or a medium fails: everything is as it was, but an object that nothing names may be left.
    fn move_out(&self, at: u64, len_bytes: u64, kept: &[u32], out: &[u32]) -> io::Result<u64>;

    /// Returns true if pages of the block at `at` are out.
    fn is_out(&self, at: u64) -> bool;

    /// Returns the offsets of all blocks with pages that are out.
    ///
    /// # Errors
    /// The index fails.
    fn blocks_out(&self) -> io::Result<Vec<u64>>;

    /// Fetches the pages of the block at `at` that are out, if there are any, so that they are read from memory while
    /// the result is kept. Asks the store.
    ///
    /// # Errors
    /// The store is away, or the object is missing or damaged.
    fn fetch_block(&self, at: u64) -> io::Result<FetchedPages>;

    /// Forgets the object of the block at `at`, which nothing refers to.
    ///
    /// # Errors
    /// The index fails.
    fn forget(&self, at: u64) -> io::Result<()>;

    /// Returns the objects that nothing names: those that were given up since the medium was opened, or, with `list`,
    /// also those that crashes have left, by a list of the store. Asks the store, unless there is nothing to remove.
    ///
    /// # Errors
    /// The store is away, or the index fails.
    fn unneeded(&self, list: bool) -> io::Result<Vec<String>>;

    /// Removes objects that nothing names. Returns their number. Asks the store.
    ///
    /// # Errors
    /// The store is away, or the index fails.
    fn remove(&self, unneeded: &[String]) -> io::Result<u64>;

    /// Lists the store, and returns the offsets of blocks whose objects are missing or do not have the size that was
    /// written. Asks the store: one list, no object.
    ///
    /// # Errors
    /// The store is away, or the index fails.
    fn absent(&self) -> io::Result<Vec<u64>>;
}

/// Memory with explicit durability.
///
/// A range is durable once [`flush`](Self::flush) of it **and** a later [`fence`](Self::fence) of its [`Flushed`]
/// have returned. Before that, on a crash, each aligned 8-byte chunk of it has either its old or its new value,
/// independently of all others. A failed fence is final: all later ones fail too.
///
/// Offsets are bytes from the medium's start; a range past [`capacity_bytes`](Self::capacity_bytes) is
/// [`io::ErrorKind::InvalidInput`], never a fault. A page that the medium cannot give or take is a [`LostPage`] to
/// every access from then on, until the medium is opened again.
pub trait Medium: Send + Sync {
    /// Returns the number of usable bytes, a multiple of the page size.
    fn capacity_bytes(&self) -> u64;

    /// Returns the kind of the medium.
    fn kind(&self) -> MediumKind {
        self.guarantee().kind
    }

    /// Returns the durability that the medium guarantees.
    fn guarantee(&self) -> &Guarantee;

    /// Returns the file behind the medium, for reading only, at equal offsets: for `splice`, which moves pages into a
    /// pipe without copying them.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Has the pages of these ranges mapped by background threads, in this order, so that dumps do not wait for page
    /// faults. Returns at once. Without effect unless the medium was opened with [`OpenOptions::populate`].
    fn populate(&self, ranges: Vec<Range<u64>>) {
        drop(ranges);
    }

    /// Gives the medium more usable bytes, a multiple of the page size; what was lent before stays where it is. Their
    /// length is durable when it returns, their content is not known. One caller at a time.
    ///
    /// # Errors
    /// There is no room, or the medium cannot grow: it has the size that it had.
    fn grow(&self, capacity_bytes: u64) -> io::Result<()> {
        let _ = capacity_bytes;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the object store under the medium; `None` for a medium that has all pages itself.
    fn cold(&self) -> Option<&dyn ColdStore> {
        None
    }

    /// Pages lost since the medium was opened.
    fn lost_pages(&self) -> u64;

    /// Fails if a page of the range is lost. To be called after the use of bytes that [`bytes`](Self::bytes) lent:
    /// they count only then. One atomic load while nothing is lost.
    ///
    /// # Errors
    /// A [`LostPage`], or a range outside the medium.
    fn check(&self, at: u64, len_bytes: u64) -> io::Result<()>;

    /// Copies bytes out.
    ///
    /// # Errors
    /// A [`LostPage`], or a range outside the medium.
    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// Lends bytes. A page that is lost while they are used reads as zeros: see [`check`](Self::check).
    ///
    /// # Errors
    /// A [`LostPage`], or a range outside the medium.
    ///
    /// # Safety
    /// Nobody writes to the range while the slice lives.
    unsafe fn bytes(&self, at: u64, len: usize) -> io::Result<&[u8]>;

    /// Copies bytes in.
    ///
    /// # Errors
    /// A [`LostPage`], or a range outside the medium.
    ///
    /// # Safety
    /// Nobody else reads, writes or has borrowed any of the range.
    unsafe fn write(&self, at: u64, from: &[u8]) -> io::Result<()>;

    /// Copies bytes in around the CPU cache where that is faster. `at` and the length must be multiples of 64. To be
    /// flushed with [`flush_streamed`](Self::flush_streamed).
    ///
    /// # Errors
    /// A [`LostPage`], a range outside the medium, or not aligned.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()>;

    /// Begins making a range durable, and adds it to `flushed`.
    ///
    /// # Errors
    /// A [`LostPage`], a range outside the medium, or a failing device.
    fn flush(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()>;

    /// Begins making durable a range that was only ever written by [`write_streaming`](Self::write_streaming): free
    /// on DAX, where such stores are on their way already.
    ///
    /// # Errors
    /// The errors of [`flush`](Self::flush).
    fn flush_streamed(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        self.flush(at, len_bytes, flushed)
    }

    /// Waits until everything in `flushed` is durable, and for nothing else; `flushed` is empty then. Writes of
    /// another thread must happen before this call.
    ///
    /// # Errors
    /// A [`LostPage`] in one of the ranges, or a failing device: it is then unknown what is durable.
    fn fence(&self, flushed: &mut Flushed) -> io::Result<()>;

    /// Writes a whole page that the medium has lost, durably; it is lost no longer. Where there is a file this is a
    /// system call: a store would first have to read the lost page, and clears no poison of persistent memory.
    ///
    /// # Errors
    /// A range outside the medium, or a page that takes no write.
    ///
    /// # Safety
    /// No other thread writes to the page. Code that reads it or has borrowed any of it relies only on bytes that
    /// equal `page`.
    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()>;
}
