//! Log of the events that a process has read, in memory that outlives it.
//!
//! An event that was read is not reported again, and the process that it is of goes on. So the reader of a log has the
//! kernel write each event into the log itself: when it is killed, between two system calls or within one, the log has all
//! events that it has read. Whoever else has the descriptor can go on in its place.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{FaultEvent, MESSAGE_BYTES, Message, SpaceChange, Userfault, decode};

/// First bytes of a log: its format, and the format's version.
const MAGIC: [u8; 8] = *b"PFEVENT1";

/// Length of the name of what a log is about.
pub const SUBJECT_BYTES: usize = 32;

/// Bytes before the first entry: [`MAGIC`], one that is 1 if events are missing, seven of padding, and the subject.
const HEAD_BYTES: usize = 16 + SUBJECT_BYTES;

/// Place of the byte that is 1 if events are missing.
const IS_INCOMPLETE: usize = 8;

/// Bytes of an entry: the number of a process, and the kernel's message. Zeros follow the last entry.
const ENTRY_BYTES: usize = 8 + MESSAGE_BYTES;

/// Most entries of a log.
const ENTRIES: usize = 64 << 10;

/// Size of a log. Memory is taken as entries are written.
const LOG_BYTES: usize = HEAD_BYTES + ENTRIES * ENTRY_BYTES;

/// Seals of the file of a log: others can neither write to it nor cut it off.
const SEALS: SealFlags = SealFlags::FUTURE_WRITE
    .union(SealFlags::GROW)
    .union(SealFlags::SHRINK)
    .union(SealFlags::SEAL);

/// A log that this process writes.
#[derive(Debug)]
pub struct EventLog {
    file: OwnedFd,
    /// True if nobody else can write to the file.
    is_sealed: bool,
    memory: NonNull<u8>,
    entries: usize,
}

// SAFETY: the memory is mapped until the log is dropped, by whichever thread, and only reached through the log.
unsafe impl Send for EventLog {}

/// Events of a log that another process may have written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PastEvents {
    /// Name of what the log is about.
    pub subject: [u8; SUBJECT_BYTES],
    /// True if there were more events than a log has room for.
    pub is_incomplete: bool,
    /// Events, the earliest first.
    pub events: Vec<PastEvent>,
}

/// An entry of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PastEvent {
    /// Number of the process.
    pub process: u64,
    /// Change of its mappings; `None` if it has forked.
    pub change: Option<SpaceChange>,
    message: [u8; MESSAGE_BYTES],
}

impl EventLog {
    /// Makes a log about `subject` that begins with the events of another one. It takes 2.5 MiB of addresses.
    ///
    /// # Errors
    /// No descriptor or no memory is left.
    pub fn create(subject: [u8; SUBJECT_BYTES], past: &[PastEvent]) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("permafrost-events", flags)?;
        ftruncate(&file, LOG_BYTES as u64)?;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let memory = unsafe {
            mmap(
                std::ptr::null_mut(),
                LOG_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let memory = NonNull::new(memory.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        // This process's own mapping stays writable. Linux before 5.1 has no such seal.
        let is_sealed = fcntl_add_seals(&file, SEALS).is_ok();
        let mut log = Self {
            file,
            is_sealed,
            memory,
            entries: 0,
        };
        let bytes = log.bytes();
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        bytes[HEAD_BYTES - SUBJECT_BYTES..HEAD_BYTES].copy_from_slice(&subject);
        for event in past {
            let Some(entry) = log.next_entry(event.process) else {
                break;
            };
            entry.copy_from_slice(&event.message);
            log.entries += 1;
        }
        Ok(log)
    }

    /// Reads the next event of process `process`, if there is one. All of them but faults are in the log then.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn next_event(
        &mut self,
        userfault: &Userfault,
        process: u64,
    ) -> io::Result<Option<FaultEvent>> {
        let mut message = [0; MESSAGE_BYTES];
        let is_read = if let Some(entry) = self.next_entry(process) {
            let is_read = userfault.read(entry)?;
            message.copy_from_slice(entry);
            is_read
        } else {
            self.bytes()[IS_INCOMPLETE] = 1;
            userfault.read(&mut message)?
        };
        if !is_read {
            return Ok(None);
        }
        let event = match decode(&message)? {
            // The next event takes its place.
            Message::Fault { address } => return Ok(Some(FaultEvent::Fault { address })),
            Message::Change(change) => FaultEvent::Change(change),
            Message::Fork { descriptor } if descriptor < 0 => {
                return Err(io::ErrorKind::InvalidData.into());
            }
            Message::Fork { descriptor } => {
                // SAFETY: the kernel has just installed the descriptor for the reader of this message, which is read once.
                // Nobody else can write to a file that is passed on (`descriptor`).
                let child = Userfault(unsafe { OwnedFd::from_raw_fd(descriptor) });
                // The kernel copies the flag from the parent's descriptor, unless that one got it later.
                rustix::io::ioctl_fionbio(&child.0, true)?;
                FaultEvent::Fork(child)
            }
        };
        self.entries = (self.entries + 1).min(ENTRIES);
        Ok(Some(event))
    }

    /// Returns the descriptor for whoever keeps the log; `None` if they could write to it.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.is_sealed.then(|| self.file.as_fd())
    }

    /// Returns the place of the next message, with zeros; `None` if the log is full.
    fn next_entry(&mut self, process: u64) -> Option<&mut [u8]> {
        let at = HEAD_BYTES + self.entries * ENTRY_BYTES;
        let entry = self.bytes().get_mut(at..at + ENTRY_BYTES)?;
        entry.fill(0);
        let (number, message) = entry.split_at_mut(8);
        number.copy_from_slice(&process.to_ne_bytes());
        Some(message)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has this length, and cannot be cut off. Only this process writes to it, through this log.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), LOG_BYTES) }
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        // SAFETY: the mapping is the log's own, and nothing borrows it any more. It cannot fail for a whole mapping.
        let _ = unsafe { munmap(self.memory.as_ptr().cast(), LOG_BYTES) };
    }
}

impl PastEvents {
    /// Reads the log behind a descriptor that another process has sent, up to 2.5 MiB.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it is no log of this version, or has events that the kernel reports of no process;
    /// an error of the kernel.
    pub fn read(file: BorrowedFd<'_>) -> io::Result<Self> {
        let no_log = || io::Error::new(io::ErrorKind::InvalidData, "no log of events");
        // Other files may keep a reader waiting.
        let seals = fcntl_get_seals(file).map_err(|_| no_log())?;
        if !seals.contains(SEALS) {
            return Err(no_log());
        }
        let bytes = read_up_to(file, LOG_BYTES)?;
        if bytes.len() != LOG_BYTES || bytes[..MAGIC.len()] != MAGIC {
            return Err(no_log());
        }
        let mut past = Self {
            is_incomplete: bytes[IS_INCOMPLETE] != 0,
            ..Self::default()
        };
        past.subject
            .copy_from_slice(&bytes[HEAD_BYTES - SUBJECT_BYTES..HEAD_BYTES]);
        for entry in bytes[HEAD_BYTES..].chunks_exact(ENTRY_BYTES) {
            let (number, rest) = entry.split_at(8);
            let mut process = [0; 8];
            process.copy_from_slice(number);
            let mut message = [0; MESSAGE_BYTES];
            message.copy_from_slice(rest);
            // A fault that was not answered comes again.
            let change = match message[0] {
                0 => break,
                _ => match decode(&message)? {
                    Message::Fault { .. } => break,
                    Message::Fork { .. } => None,
                    Message::Change(change) if !change.is_possible() => return Err(no_log()),
                    Message::Change(change) => Some(change),
                },
            };
            past.events.push(PastEvent {
                process: u64::from_ne_bytes(process),
                change,
                message,
            });
        }
        Ok(past)
    }
}

/// Reads the first bytes of a file, `most` at most.
fn read_up_to(file: BorrowedFd<'_>, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; most];
    let mut filled = 0;
    while filled < most {
        match rustix::io::pread(file, &mut bytes[filled..], filled as u64) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use rustix::mm::{Advice, UserfaultfdFlags, madvise, mmap_anonymous, userfaultfd};

    use super::*;
    use crate::PAGE_BYTES;

    const SUBJECT: [u8; SUBJECT_BYTES] = *b"0123456789abcdef0123456789abcdef";

    /// Memory of this process whose changes are events.
    fn watched(pages: u64) -> (Userfault, u64) {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: all accesses of the tests to the memory wait for events that the tests read.
        let userfault = Userfault(unsafe { userfaultfd(flags) }.unwrap());
        let mut api = crate::Api {
            api: crate::API_VERSION,
            features: crate::CRIU_FEATURES,
            ioctls: 0,
        };
        // SAFETY: the structure is that of the ioctl.
        unsafe {
            let api = rustix::ioctl::Updater::<{ crate::API }, crate::Api>::new(&mut api);
            rustix::ioctl::ioctl(&userfault.0, api).unwrap();
        }
        let bytes = usize::try_from(pages * PAGE_BYTES).unwrap();
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let memory = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE).unwrap()
        };
        let start = memory.addr() as u64;
        userfault
            .register(start, start + pages * PAGE_BYTES)
            .unwrap();
        (userfault, start)
    }

    /// Gives up pages of this process's own memory, which waits until the event is read.
    fn give_up(start: u64, pages: u64) {
        let start = std::ptr::with_exposed_provenance_mut(usize::try_from(start).unwrap());
        let bytes = usize::try_from(pages * PAGE_BYTES).unwrap();
        // SAFETY: nobody has stored anything in these pages.
        unsafe { madvise(start, bytes, Advice::LinuxDontNeed) }.unwrap();
    }

    fn next_of(log: &mut EventLog, userfault: &Userfault, process: u64) -> FaultEvent {
        loop {
            if let Some(event) = log.next_event(userfault, process).unwrap() {
                return event;
            }
            thread::yield_now();
        }
    }

    #[test]
    fn what_was_read_is_in_the_log_and_goes_on_in_the_next() {
        let (userfault, start) = watched(8);
        let mut log = EventLog::create(SUBJECT, &[]).unwrap();
        assert!(log.next_event(&userfault, 7).unwrap().is_none());
        let removed = |from: u64, to: u64| SpaceChange::Remove {
            start: start + from * PAGE_BYTES,
            end: start + to * PAGE_BYTES,
        };
        for (process, page) in [(7, 0), (9, 2)] {
            let giving_up = thread::spawn(move || give_up(start + page * PAGE_BYTES, 2));
            let event = next_of(&mut log, &userfault, process);
            giving_up.join().unwrap();
            assert!(
                matches!(event, FaultEvent::Change(change) if change == removed(page, page + 2))
            );
        }
        // A fault is no change.
        let reading = thread::spawn(move || {
            let page: *const u8 =
                std::ptr::with_exposed_provenance(usize::try_from(start).unwrap());
            // SAFETY: the page is mapped, and nobody writes to it.
            unsafe { page.read_volatile() }
        });
        let event = next_of(&mut log, &userfault, 7);
        assert!(matches!(event, FaultEvent::Fault { address } if address == start));
        let past = PastEvents::read(log.descriptor().unwrap()).unwrap();
        let found: Vec<_> = past
            .events
            .iter()
            .map(|past| (past.process, past.change))
            .collect();
        let expected = [(7, Some(removed(0, 2))), (9, Some(removed(2, 4)))];
        assert_eq!((past.subject, past.is_incomplete), (SUBJECT, false));
        assert_eq!(found, expected);
        // The fault was read, and comes again.
        drop(log);
        let mut log = EventLog::create(SUBJECT, &past.events).unwrap();
        userfault.wake_all().unwrap();
        let event = next_of(&mut log, &userfault, 7);
        assert!(matches!(event, FaultEvent::Fault { address } if address == start));
        userfault.zero(start, PAGE_BYTES).unwrap();
        assert_eq!(reading.join().unwrap(), 0);
        assert_eq!(PastEvents::read(log.descriptor().unwrap()).unwrap(), past);
    }

    #[test]
    fn a_full_log_says_that_events_are_missing() {
        let (userfault, start) = watched(1);
        let mut log = EventLog::create(SUBJECT, &[]).unwrap();
        log.entries = ENTRIES - 1;
        for is_incomplete in [false, true] {
            let giving_up = thread::spawn(move || give_up(start, 1));
            next_of(&mut log, &userfault, 0);
            giving_up.join().unwrap();
            let past = PastEvents::read(log.descriptor().unwrap()).unwrap();
            assert_eq!(past.is_incomplete, is_incomplete);
        }
    }

    /// Makes a file like that of a log, with these entries: the number of a process, and a message.
    fn forged(entries: &[(u64, [u8; MESSAGE_BYTES])]) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("forged", flags).unwrap();
        let mut bytes = vec![0; LOG_BYTES];
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        let places = bytes[HEAD_BYTES..].chunks_exact_mut(ENTRY_BYTES);
        for (place, (process, message)) in places.zip(entries) {
            place[..8].copy_from_slice(&process.to_ne_bytes());
            place[8..].copy_from_slice(message);
        }
        let written = rustix::io::write(&file, &bytes).unwrap();
        assert_eq!(written, LOG_BYTES);
        fcntl_add_seals(&file, SEALS).unwrap();
        file
    }

    fn message(event: u8, words: [u64; 3]) -> [u8; MESSAGE_BYTES] {
        let mut message = [0; MESSAGE_BYTES];
        message[0] = event;
        for (place, word) in message[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        message
    }

    #[test]
    fn a_forged_log_with_events_that_no_process_has_is_refused() {
        let read = |event, words| {
            let forged = forged(&[(3, message(event, words))]);
            PastEvents::read(forged.as_fd()).map(|past| past.events.len())
        };
        let end = crate::ADDRESSES_END;
        for (event, words) in [
            (crate::REMOVE, [0x1000, end, 0]),
            (crate::UNMAP, [0x1000, 0x1000, 0]),
            (crate::REMAP, [0x1000, end - 0x2000, 0x1801]),
        ] {
            assert_eq!(read(event, words).unwrap(), 1, "{event:#x} {words:x?}");
        }
        for (event, words) in [
            (crate::REMOVE, [0x1001, 0x3000, 0]),
            (crate::REMOVE, [0x3000, 0x1000, 0]),
            (crate::UNMAP, [0x1000, end + 0x1000, 0]),
            (crate::UNMAP, [0, u64::MAX, 0]),
            (crate::REMAP, [0x1000, 0x2800, 0x1000]),
            (crate::REMAP, [0x1000, end - 0x1000, 0x1801]),
            (crate::REMAP, [0x1000, 0x8000, u64::MAX]),
            (0x77, [0x1000, 0x2000, 0]),
        ] {
            let refused = read(event, words).unwrap_err();
            let kind = refused.kind();
            assert_eq!(kind, io::ErrorKind::InvalidData, "{event:#x} {words:x?}");
        }
    }

    #[test]
    fn nobody_else_writes_to_a_log_and_other_files_are_none() {
        let log = EventLog::create(SUBJECT, &[]).unwrap();
        let copy = log.descriptor().unwrap().try_clone_to_owned().unwrap();
        assert!(rustix::io::write(&copy, &[1]).is_err());
        assert!(ftruncate(&copy, 0).is_err());
        // SAFETY: the mapping, if there were one, would not be used.
        let mapped = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            mmap(
                std::ptr::null_mut(),
                LOG_BYTES,
                protection,
                MapFlags::SHARED,
                &copy,
                0,
            )
        };
        assert!(mapped.is_err());

        let (pipe, _writer) = rustix::pipe::pipe().unwrap();
        assert!(PastEvents::read(pipe.as_fd()).is_err());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let other = memfd_create("other", flags).unwrap();
        ftruncate(&other, LOG_BYTES as u64).unwrap();
        assert!(PastEvents::read(other.as_fd()).is_err());
        fcntl_add_seals(&other, SEALS).unwrap();
        assert!(PastEvents::read(other.as_fd()).is_err());
    }
}
