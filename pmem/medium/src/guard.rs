//! Mappings whose lost pages are errors instead of the end of the process.
//!
//! A load from a mapped page that its medium cannot give raises SIGBUS: a poisoned line, a bad sector, a file that
//! was truncated. The handler here puts an empty anonymous page in its place and marks it lost; the access goes on,
//! and the code that made the access calls [`Guard::check`] afterwards and gets an error. A lost page stays lost
//! until it is rewritten through its file, or the medium is opened again: bytes that are stored there are not kept,
//! so writes and flushes of it fail.
//!
//! Jumping out of the faulting access instead (`siglongjmp`) would skip Rust frames, which is undefined.
//!
//! The handler makes one system call, allocates nothing and takes no lock: mappings are found through a list that
//! only grows, whose entries are read under a version number each. Addresses that belong to no guarded mapping go to
//! the handler that was there before.

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence,
};
use std::{io, ptr};

use parking_lot::Mutex;

use crate::convert::{to_u64, to_usize};
use crate::{PAGE_BYTES, PAGE_SIZE};

/// Maximum number of isolated lost pages that are replaced one by one. Each splits the mapping in two, of which a
/// process may have 65,530 (`vm.max_map_count`); past this the whole mapping counts as lost.
const MAX_FRAGMENTS: usize = 8192;

/// Every slot ever made, the newest first.
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

/// Slots without a mapping. Not used by the handler.
static FREE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());

/// The handler that was there before; set before ours is.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A page that the medium could not give or take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the page at byte {at:#x} is lost: the medium returned an error, or its file was truncated"
)]
pub struct LostPage {
    /// Byte offset in the medium.
    pub at: u64,
}

impl From<LostPage> for io::Error {
    fn from(lost: LostPage) -> Self {
        Self::other(lost)
    }
}

impl LostPage {
    /// Returns the lost page that an error of a medium is about; `None` for other errors.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

/// A place in the handler's list. Never freed, so that the handler may walk the list at any time.
struct Slot {
    next: *mut Slot,
    /// Odd while the fields below change.
    version: AtomicUsize,
    base: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicPtr<LostPages>,
}

// SAFETY: `next` is written once, before the slot is reachable; the rest is atomic. What `lost` points to is shared by
// reference only, and is made of atomics.
unsafe impl Sync for Slot {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for Slot {}

const _: () = assert!(align_of::<AtomicU64>() == align_of::<u64>());

/// The lost pages of one mapping, a bit each.
struct LostPages {
    bits: Box<[AtomicU64]>,
    count: AtomicU64,
    fragments: AtomicUsize,
    /// True if the lost pages are too many to be told apart, or could not be replaced for lack of memory: all of the
    /// mapping counts as lost.
    all: AtomicBool,
}

impl LostPages {
    fn new(pages: usize) -> Self {
        // Zeroed by the kernel where it is large, and so takes no memory before pages are lost.
        let zeros = vec![0_u64; pages.div_ceil(64)].into_boxed_slice();
        // SAFETY: an `AtomicU64` has the size and the bit validity of a `u64`, and on the 64-bit machines that this
        // is for its alignment (asserted below).
        let bits = unsafe { Box::from_raw(Box::into_raw(zeros) as *mut [AtomicU64]) };
        Self {
            bits,
            count: AtomicU64::new(0),
            fragments: AtomicUsize::new(0),
            all: AtomicBool::new(false),
        }
    }

    fn has(&self, page: usize) -> bool {
        let word = self.bits.get(page / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) & 1 << (page % 64) != 0)
    }

    /// Marks a page as lost. Async-signal-safe.
    fn mark(&self, page: usize) {
        let Some(word) = self.bits.get(page / 64) else {
            return;
        };
        let bit = 1 << (page % 64);
        if word.fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return;
        }
        self.count.fetch_add(1, Ordering::AcqRel);
        let isolated = !self.has(page + 1) && !page.checked_sub(1).is_some_and(|p| self.has(p));
        if isolated && self.fragments.fetch_add(1, Ordering::Relaxed) >= MAX_FRAGMENTS {
            self.all.store(true, Ordering::Release);
        }
    }
}

/// A mapping that the handler knows. Dropped before the mapping is.
pub(crate) struct Guard {
    slot: &'static Slot,
    lost: *mut LostPages,
    base: usize,
    pages: AtomicUsize,
}

// SAFETY: `lost` is owned by the guard and only ever shared by reference; it is made of atomics.
unsafe impl Send for Guard {}
// SAFETY: as above.
unsafe impl Sync for Guard {}

impl Guard {
    /// Guards `len` bytes from `base`, which can become `most`.
    ///
    /// # Safety
    /// The bytes are one mapping that belongs to the caller for longer than the guard lives. No reference points into
    /// it whose target must not change: a page that faults is replaced by an empty one.
    pub(crate) unsafe fn new(base: *mut u8, len: usize, most: usize) -> io::Result<Self> {
        install()?;
        let lost = Box::into_raw(Box::new(LostPages::new(most.div_ceil(PAGE_SIZE))));
        let slot = FREE.lock().pop();
        let slot = slot.unwrap_or_else(add_slot);
        let base = base as usize;
        slot.set(base, len, lost);
        let pages = AtomicUsize::new(len.div_ceil(PAGE_SIZE));
        Ok(Self {
            slot,
            lost,
            base,
            pages,
        })
    }

    /// Guards `len` bytes from now on. One caller at a time.
    ///
    /// # Safety
    /// As for [`new`](Self::new); no more than its `most`.
    pub(crate) unsafe fn grow(&self, len: usize) {
        self.slot.set(self.base, len, self.lost);
        self.pages.store(len.div_ceil(PAGE_SIZE), Ordering::Release);
    }

    fn lost(&self) -> &LostPages {
        // SAFETY: made by `new`, freed by `drop` only.
        unsafe { &*self.lost }
    }

    /// Pages lost so far.
    pub(crate) fn lost_pages(&self) -> u64 {
        if self.lost().all.load(Ordering::Acquire) {
            return to_u64(self.pages.load(Ordering::Acquire));
        }
        self.lost().count.load(Ordering::Acquire)
    }

    /// Fails if a page of the range is lost. To be called after an access to the range: the bytes that were read or
    /// written count only then. One atomic load while nothing is lost.
    pub(crate) fn check(&self, at: u64, len_bytes: u64) -> Result<(), LostPage> {
        // The handler runs on this thread, between the access and this.
        compiler_fence(Ordering::SeqCst);
        if self.lost().count.load(Ordering::Acquire) == 0 || len_bytes == 0 {
            return Ok(());
        }
        if self.lost().all.load(Ordering::Acquire) {
            return Err(LostPage { at });
        }
        let pages = at / PAGE_BYTES..(at + len_bytes).div_ceil(PAGE_BYTES);
        match pages.into_iter().find(|&p| self.lost().has(to_usize(p))) {
            Some(page) => Err(LostPage {
                at: page * PAGE_BYTES,
            }),
            None => Ok(()),
        }
    }

    /// Marks the page at `at` as not lost: it is mapped again, or was only marked.
    pub(crate) fn find_again(&self, at: u64) {
        let page = to_usize(at / PAGE_BYTES);
        if let Some(word) = self.lost().bits.get(page / 64) {
            let bit = 1 << (page % 64);
            if word.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
                self.lost().count.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Counts the pages of a range as lost, without a signal.
    pub(crate) fn lose(&self, at: u64, len_bytes: u64) {
        for page in at / PAGE_BYTES..(at + len_bytes).div_ceil(PAGE_BYTES) {
            self.lost().mark(to_usize(page));
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.slot.set(0, 0, ptr::null_mut());
        // SAFETY: from `Box::into_raw`, freed here only. The handler does not reach it any more: it takes the pointer
        // for addresses in the mapping, and any code that accesses those holds the medium that this guard is part of.
        drop(unsafe { Box::from_raw(self.lost) });
        FREE.lock().push(self.slot);
    }
}

impl Slot {
    /// Sets the mapping of a slot. One caller at a time: the owner of the slot.
    fn set(&self, base: usize, len: usize, lost: *mut LostPages) {
        self.version.fetch_add(1, Ordering::AcqRel);
        fence(Ordering::Release);
        self.base.store(base, Ordering::Relaxed);
        self.end.store(base + len, Ordering::Relaxed);
        self.lost.store(lost, Ordering::Relaxed);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Returns base, end and lost pages, if they are of one mapping.
    fn read(&self) -> Option<(usize, usize, *mut LostPages)> {
        let version = self.version.load(Ordering::Acquire);
        let fields = (
            self.base.load(Ordering::Relaxed),
            self.end.load(Ordering::Relaxed),
            self.lost.load(Ordering::Relaxed),
        );
        fence(Ordering::Acquire);
        let same = self.version.load(Ordering::Relaxed) == version;
        (same && version.is_multiple_of(2)).then_some(fields)
    }
}

fn add_slot() -> &'static Slot {
    let slot = Box::leak(Box::new(Slot {
        next: SLOTS.load(Ordering::Acquire),
        version: AtomicUsize::new(0),
        base: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicPtr::new(ptr::null_mut()),
    }));
    loop {
        let next = slot.next;
        let pushed = SLOTS.compare_exchange(
            next,
            ptr::from_mut(slot),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        match pushed {
            Ok(_) => return slot,
            Err(newest) => slot.next = newest,
        }
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock();
    if *installed {
        return Ok(());
    }
    // SAFETY: `sigaction` is plain data; all zero is one with the default action.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks for the present action only.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Before the handler can run.
    let _ = PREVIOUS.set(previous);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    // ONSTACK, as in Rust's own handler, which detects stack overflows.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler is async-signal-safe, see there.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    *installed = true;
    Ok(())
}

/// Async-signal-safe: atomic loads and stores, `mmap`, and in the end `sigaction`.
extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the thread's own errno, put back below: the code that was interrupted may be about to read it.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    // SAFETY: the kernel gives a siginfo to a handler with SA_SIGINFO; the address counts for signals of the kernel's.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let ours = code > 0 && lose(address, code);
    if !ours {
        pass_on(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *errno = saved };
}

/// Replaces the page at `address`, if it is in a guarded mapping, and marks it; returns true if it did.
fn lose(address: usize, code: libc::c_int) -> bool {
    let mut slot = SLOTS.load(Ordering::Acquire);
    // SAFETY: slots are never freed.
    while let Some(here) = unsafe { slot.as_ref() } {
        slot = here.next;
        let Some((base, end, lost)) = here.read() else {
            continue;
        };
        if !(base..end).contains(&address) {
            continue;
        }
        if code == libc::BUS_MCEERR_AO {
            // Poison that no access has read yet. It is handled when an access does.
            return true;
        }
        // SAFETY: the interrupted access is to this mapping, so the code that makes it holds the medium, and the
        // medium contains the guard that owns the pages.
        let lost = unsafe { &*lost };
        let page = (address - base) / PAGE_SIZE;
        // First: a thread that reads the new page must find it marked.
        lost.mark(page);
        if !lost.all.load(Ordering::Acquire) && put_empty(base + page * PAGE_SIZE, PAGE_SIZE) {
            return true;
        }
        lost.all.store(true, Ordering::Release);
        return put_empty(base, end - base);
    }
    false
}

/// Puts empty memory in the place of a part of a guarded mapping.
fn put_empty(at: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range is part of a live mapping whose owner gave it to the guard for this.
    let mapped = unsafe { libc::mmap(at as *mut libc::c_void, len, access, flags, -1, 0) };
    mapped != libc::MAP_FAILED
}

/// Does as if this handler were not there.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(previous) = PREVIOUS.get() else {
        return;
    };
    let handler = previous.sa_sigaction;
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // The access faults again when this returns, and ends the process; a signal that was sent is sent again.
        // SAFETY: plain data; all zero is the default action.
        let default: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `sigaction` and `raise` are async-signal-safe.
        unsafe {
            libc::sigaction(signal, &raw const default, ptr::null_mut());
            if (*info).si_code <= 0 {
                libc::raise(signal);
            }
        }
    } else if previous.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: a handler that is installed with SA_SIGINFO is a function of this type.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: without SA_SIGINFO it is a function of this type.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}
