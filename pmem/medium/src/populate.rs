//! Mapping pages before they are needed, in the background.
//!
//! A page that is not mapped costs a fault when a dump writes to it, and on tmpfs its clearing too: on a
//! small virtual machine, appending ran at 0.3 GB/s into a fresh region and at over 12 GB/s into a populated
//! one. Populating a whole region takes seconds, though, so opening does not wait for it. Segments are
//! allocated from the lowest on, in the order that they are populated in.

use std::sync::{Arc, Weak};

/// Bytes populated at a time: large enough that the calls do not matter, small enough that no thread waits long for
/// the lock on the address space that each call holds.
const STEP_BYTES: usize = 2 << 20;

/// Mapping that unmaps itself when it is dropped.
pub(crate) trait Mapping: Send + Sync + 'static {
    /// Address and length.
    fn area(&self) -> (*mut u8, usize);
}

impl Mapping for memmap2::MmapRaw {
    fn area(&self) -> (*mut u8, usize) {
        (self.as_mut_ptr(), self.len())
    }
}

/// Starts a thread that populates the mapping, writable, until it is done or the mapping is dropped.
pub(crate) fn populate_in_background<M: Mapping>(mapping: &Arc<M>) {
    let mapping = Arc::downgrade(mapping);
    let started = std::thread::Builder::new()
        .name("populate".to_owned())
        .spawn(move || populate(&mapping));
    // Without it there are page faults later, nothing worse.
    drop(started);
}

fn populate<M: Mapping>(mapping: &Weak<M>) {
    let mut done = 0;
    // Held for a step only, so that dropping the medium does not wait for more than that.
    while let Some(mapping) = mapping.upgrade() {
        let (base, len) = mapping.area();
        let step = STEP_BYTES.min(len - done);
        if step == 0 || !populate_now(base.wrapping_add(done), step) {
            return;
        }
        done += step;
    }
}

/// Populates a range of a mapping; returns true if the kernel did.
pub(crate) fn populate_now(start: *mut u8, len: usize) -> bool {
    // SAFETY: callers give a range of a live mapping of theirs. The advice changes page tables, never
    // contents, so it races with no reader or writer.
    unsafe { rustix::mm::madvise(start.cast(), len, rustix::mm::Advice::LinuxPopulateWrite) }
        .is_ok()
}
