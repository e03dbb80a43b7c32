//! Page faults of another process, through the `userfaultfd` that it has handed over.
//!
//! The kernel reports accesses to missing pages, and changes of the mappings; `UFFDIO_COPY` puts pages into the other
//! process. Numbers and structures are from `linux/userfaultfd.h`. The userfaultfd crates generate them with bindgen,
//! which needs libclang to build; five calls do not justify that.

#![allow(
    unsafe_code,
    reason = "an ioctl's argument and a received descriptor are beyond what the compiler can check"
)]

mod log;

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

pub use log::{EventLog, PastEvent, PastEvents, SUBJECT_BYTES};

/// Group of the ioctls, `UFFDIO`.
const GROUP: u8 = 0xAA;

const API: Opcode = opcode::read_write::<Api>(GROUP, 0x3F);
const REGISTER: Opcode = opcode::read_write::<Register>(GROUP, 0x00);
const UNREGISTER: Opcode = opcode::read::<Range>(GROUP, 0x01);
const WAKE: Opcode = opcode::read::<Range>(GROUP, 0x02);
const COPY: Opcode = opcode::read_write::<Copy>(GROUP, 0x03);
const ZEROPAGE: Opcode = opcode::read_write::<ZeroPage>(GROUP, 0x04);
const WRITEPROTECT: Opcode = opcode::read_write::<WriteProtect>(GROUP, 0x06);

/// Size of `struct uffd_msg`, bytes.
const MESSAGE_BYTES: usize = 32;

/// Numbers of the events.
const PAGEFAULT: u8 = 0x12;
const FORK: u8 = 0x13;
const REMAP: u8 = 0x14;
const REMOVE: u8 = 0x15;
const UNMAP: u8 = 0x16;

/// Target of the link in `/proc/self/fd` of a userfaultfd.
const LINK: &[u8] = b"anon_inode:[userfaultfd]";

/// Range of addresses: `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// Argument of a registration: `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// Mode of a registration: accesses to missing pages are events, `UFFDIO_REGISTER_MODE_MISSING`.
const MODE_MISSING: u64 = 1;

/// Handshake of a new userfaultfd: `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// Version of the interface, `UFFD_API`.
const API_VERSION: u64 = 0xAA;

/// Events of forks, moves, removals and unmappings: what CRIU asks for (`NEED_UFFD_API_FEATURES`).
const CRIU_FEATURES: u64 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6;

/// Argument of a copy: `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// Argument of zeroing: `struct uffdio_zeropage`.
#[repr(C)]
struct ZeroPage {
    range: Range,
    mode: u64,
    zeropage: i64,
}

/// Argument of write protection: `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// An address that a process of any size may have, and above any `vm.mmap_min_addr`.
const PROBED: u64 = 1 << 30;

/// Value of `vm.mmap_min_addr` where it cannot be read.
const LOWEST_ADDRESS: u64 = 64 << 10;

/// Size of a page, bytes.
const PAGE_BYTES: u64 = 4096;

const _: () = assert!(size_of::<WriteProtect>() == 24 && size_of::<Register>() == 32);
const _: () = assert!(size_of::<Range>() == 16 && size_of::<Copy>() == 40);
const _: () = assert!(size_of::<Api>() == 24);
const _: () = assert!(size_of::<ZeroPage>() == 32);

/// Makes a userfaultfd as a restoring CRIU does, and closes it.
///
/// # Errors
/// The kernel has none, or this process may not make one.
pub fn try_open() -> io::Result<()> {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: no memory is registered with the descriptor, so no access of this process ever waits for it.
    let fd = unsafe { userfaultfd(flags) }?;
    let mut api = Api {
        api: API_VERSION,
        features: CRIU_FEATURES,
        ioctls: 0,
    };
    // SAFETY: the structure is that of the ioctl, which reads and writes nothing else.
    Ok(unsafe { ioctl(&fd, Updater::<API, Api>::new(&mut api)) }?)
}

/// An event of the other process. Except for a fault, its thread goes on once the event has been read.
#[derive(Debug)]
pub enum FaultEvent {
    /// A thread accesses a missing page, and waits for it.
    Fault {
        /// The address, anywhere in the page.
        address: u64,
    },
    /// The process has forked. The child has the same pages missing.
    Fork(Userfault),
    /// Mappings have changed.
    Change(SpaceChange),
}

/// A change of the mappings of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceChange {
    /// A mapping was moved.
    Remap {
        /// Address of its first page before.
        from: u64,
        /// Address of its first page now.
        to: u64,
        /// Length of the mapping, bytes.
        len: u64,
    },
    /// Pages were given up (`MADV_DONTNEED`); their mapping stays.
    Remove {
        /// Address of the first page.
        start: u64,
        /// The address behind the last page.
        end: u64,
    },
    /// A mapping was removed.
    Unmap {
        /// Address of the first page.
        start: u64,
        /// The address behind the last page.
        end: u64,
    },
}

/// The address behind all that processes have, on x86-64 with page tables of five levels.
const ADDRESSES_END: u64 = 1 << 56;

impl SpaceChange {
    /// Returns true if whole pages change, in addresses that processes have: so it is in each event of the kernel.
    fn is_possible(self) -> bool {
        let is_range = |start: u64, end: u64| {
            start <= end
                && end <= ADDRESSES_END
                && [start, end].iter().all(|at| at.is_multiple_of(PAGE_BYTES))
        };
        match self {
            Self::Remap { from, to, len } => [from, to]
                .iter()
                .all(|start| is_range(*start, start.saturating_add(len))),
            Self::Remove { start, end } | Self::Unmap { start, end } => is_range(start, end),
        }
    }
}

/// Reason why pages were not put into the other process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementError {
    /// The mappings are changing: the event must be read first.
    Changing,
    /// There is a page already.
    Exists,
    /// No mapping of this userfaultfd contains all of the range.
    Unmapped,
    /// The process has ended.
    Gone,
    /// Another error of the kernel.
    Failed(Errno),
}

impl PlacementError {
    fn of(errno: Errno) -> Self {
        match errno {
            Errno::AGAIN => Self::Changing,
            Errno::EXIST => Self::Exists,
            Errno::NOENT => Self::Unmapped,
            Errno::SRCH => Self::Gone,
            other => Self::Failed(other),
        }
    }
}

/// The userfaultfd of another process. While any descriptor of it is open, accesses to missing pages wait; when the
/// last one is closed, they read zeros.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Userfault {
    /// Takes a descriptor that another process has sent. It does not block from now on.
    ///
    /// # Errors
    /// It is no userfaultfd.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let target = rustix::fs::readlink(link, Vec::new())?;
        if target.as_bytes() != LINK {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the descriptor is no userfaultfd",
            ));
        }
        rustix::io::ioctl_fionbio(&fd, true)?;
        Ok(Self(fd))
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Reads the next event into `message`. Returns false if there is none.
    fn read(&self, message: &mut [u8]) -> io::Result<bool> {
        loop {
            match rustix::io::read(&self.0, &mut *message) {
                Ok(MESSAGE_BYTES) => return Ok(true),
                Err(Errno::AGAIN) | Ok(0) => return Ok(false),
                Err(Errno::INTR) => {}
                Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Copies whole pages to `address`. Returns the number of bytes copied, which may be less than all. Threads that
    /// wait for those pages go on.
    ///
    /// # Errors
    /// See [`PlacementError`]; nothing was copied.
    pub fn copy(&self, address: u64, pages: &[u8]) -> Result<u64, PlacementError> {
        let mut copy = Copy {
            dst: address,
            src: pages.as_ptr().addr() as u64,
            len: pages.len() as u64,
            mode: 0,
            copy: 0,
        };
        // SAFETY: the structure is that of the ioctl. The kernel reads `len` bytes from `src`, which is borrowed for
        // longer. It writes to the memory of the process that has made the userfaultfd: another one, as this one keeps
        // none (`new` takes them from sockets, `Fork` is of a child, `try_open` closes its own).
        let done = unsafe { ioctl(&self.0, Updater::<COPY, Copy>::new(&mut copy)) };
        finished(done, copy.copy, copy.len)
    }

    /// Maps zeros to `len` bytes of whole pages at `address`, as [`copy`](Self::copy) does with pages.
    ///
    /// # Errors
    /// See [`PlacementError`]; nothing was mapped.
    pub fn zero(&self, address: u64, len: u64) -> Result<u64, PlacementError> {
        let mut zero = ZeroPage {
            range: Range {
                start: address,
                len,
            },
            mode: 0,
            zeropage: 0,
        };
        // SAFETY: as in `copy`; nothing is read from this process.
        let done = unsafe { ioctl(&self.0, Updater::<ZEROPAGE, ZeroPage>::new(&mut zero)) };
        finished(done, zero.zeropage, len)
    }

    /// Makes accesses to missing pages of all mappings in a range events. Mappings that are registered already stay so.
    ///
    /// # Errors
    /// There is no mapping in the range, or one that has another userfaultfd or is no memory; the process has ended.
    pub fn register(&self, start: u64, end: u64) -> io::Result<()> {
        let mut register = Register {
            range: Range {
                start,
                len: end.saturating_sub(start),
            },
            mode: MODE_MISSING,
            ioctls: 0,
        };
        // SAFETY: the structure is that of the ioctl, which reads and writes nothing else. The mappings are of another
        // process (see `copy`), whose accesses wait from now on.
        Ok(unsafe { ioctl(&self.0, Updater::<REGISTER, Register>::new(&mut register)) }?)
    }

    /// Makes accesses in a range no events any more. A process that has ended is no error.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn unregister(&self, start: u64, end: u64) -> io::Result<()> {
        let range = Range {
            start,
            len: end.saturating_sub(start),
        };
        // SAFETY: the structure is that of the ioctl, which only reads it.
        match unsafe { ioctl(&self.0, Setter::<UNREGISTER, Range>::new(range)) } {
            // The kernel says ENOMEM when the process has gone, and EINVAL when the mapping has.
            Ok(()) | Err(Errno::NOMEM | Errno::INVAL) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes threads that wait for pages in a range try again.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn wake(&self, start: u64, end: u64) -> io::Result<()> {
        let range = Range {
            start,
            len: end.saturating_sub(start),
        };
        // SAFETY: the structure is that of the ioctl, which only reads it.
        Ok(unsafe { ioctl(&self.0, Setter::<WAKE, Range>::new(range)) }?)
    }

    /// Makes all threads that wait for pages try again: those whose faults were read by another process, for example.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn wake_all(&self) -> io::Result<()> {
        let lowest = std::fs::read_to_string("/proc/sys/vm/mmap_min_addr");
        let lowest = lowest.ok().and_then(|lowest| lowest.trim().parse().ok());
        let lowest = u64::next_multiple_of(lowest.unwrap_or(LOWEST_ADDRESS), PAGE_BYTES);
        // The kernel refuses a range that ends behind the last address of a process, which depends on the processor and
        // on the process.
        let mut end = lowest;
        for bit in (PAGE_BYTES.trailing_zeros()..u64::BITS - 1).rev() {
            let further = end + (1 << bit);
            match self.wake(lowest, further) {
                Ok(()) => end = further,
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
                Err(error) => return Err(error),
            }
        }
        match end > lowest {
            true => Ok(()),
            false => Err(Errno::INVAL.into()),
        }
    }

    /// Returns true if the process has ended. Linux before 5.7 cannot tell; there it is never true.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        let mut protect = WriteProtect {
            range: Range {
                start: PROBED,
                len: PAGE_BYTES,
            },
            mode: 0,
        };
        // SAFETY: the structure is that of the ioctl, which only reads it. It would take away a write protection of the
        // page, of which there is none: CRIU asks for events of missing pages only.
        let done = unsafe {
            ioctl(
                &self.0,
                Updater::<WRITEPROTECT, WriteProtect>::new(&mut protect),
            )
        };
        // A process that is there has no page with that protection (ENOENT), or changes its mappings (EAGAIN).
        done == Err(Errno::SRCH)
    }
}

/// Returns the number of bytes done, which the kernel reports in the structure, or the reason why there are none.
fn finished(done: rustix::io::Result<()>, reported: i64, len: u64) -> Result<u64, PlacementError> {
    match done {
        Ok(()) => Ok(len),
        Err(errno) => match u64::try_from(reported) {
            Ok(bytes) if bytes > 0 => Ok(bytes),
            _ => Err(PlacementError::of(errno)),
        },
    }
}

/// `struct uffd_msg` in the byte order of the host, without the descriptor of a fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    Fault { address: u64 },
    Fork { descriptor: RawFd },
    Change(SpaceChange),
}

/// Decodes `struct uffd_msg`.
fn decode(message: &[u8; MESSAGE_BYTES]) -> io::Result<Message> {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&message[at..at + 8]);
        u64::from_ne_bytes(bytes)
    };
    let change = match message[0] {
        PAGEFAULT => return Ok(Message::Fault { address: word(16) }),
        FORK => {
            let descriptor = [message[8], message[9], message[10], message[11]];
            let descriptor = RawFd::from_ne_bytes(descriptor);
            return Ok(Message::Fork { descriptor });
        }
        REMAP => SpaceChange::Remap {
            from: word(8),
            to: word(16),
            // mremap(2) takes a length that ends in a page, and moves all of that page.
            len: word(24)
                .checked_next_multiple_of(PAGE_BYTES)
                .unwrap_or(u64::MAX),
        },
        REMOVE => SpaceChange::Remove {
            start: word(8),
            end: word(16),
        },
        UNMAP => SpaceChange::Unmap {
            start: word(8),
            end: word(16),
        },
        other => {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("unknown userfaultfd event {other:#x}"),
            ));
        }
    };
    Ok(Message::Change(change))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_of_another_kind_is_refused() {
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(Userfault::new(file.into()).is_err());
    }

    #[test]
    fn messages_are_decoded_and_unknown_ones_are_errors() {
        let mut message = [0; MESSAGE_BYTES];
        let mut put = |at: usize, value: u64| {
            message[at..at + 8].copy_from_slice(&value.to_ne_bytes());
            message
        };
        put(8, 0x1000);
        put(16, 0x5123);
        let mut message = put(24, 0x1801);
        let mut event = |number: u8| {
            message[0] = number;
            decode(&message)
        };
        assert!(matches!(
            event(PAGEFAULT),
            Ok(Message::Fault { address: 0x5123 })
        ));
        assert!(matches!(
            event(REMAP),
            Ok(Message::Change(SpaceChange::Remap {
                from: 0x1000,
                to: 0x5123,
                len: 0x2000
            }))
        ));
        assert!(matches!(
            event(REMOVE),
            Ok(Message::Change(SpaceChange::Remove {
                start: 0x1000,
                end: 0x5123
            }))
        ));
        assert!(matches!(
            event(UNMAP),
            Ok(Message::Change(SpaceChange::Unmap { start: 0x1000, .. }))
        ));
        assert!(event(0).is_err() && event(0xff).is_err());
    }
}
