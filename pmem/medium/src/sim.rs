//! The crash simulator.
//!
//! # Fault model
//!
//! The simulator keeps two states: the bytes that the program sees, and the durable bytes. A write changes the former
//! only. For each aligned 8-byte chunk, the values written since it was last made durable are *pending*. A flush
//! marks the pending values of a range as flushed; a fence of that range makes each chunk's last flushed value
//! durable, and does nothing for ranges that another writer has flushed. On a crash **every chunk independently** has
//! its durable value or any of its pending ones, flushed or not, drawn from a seed: caches evict lines at any time,
//! devices reorder writes, and a program may not rely on the presence or the absence of bytes that were not fenced.
//! Streaming writes are no exception: here they need their flush, as on a plain file. (This is the model of
//! verified-storage and of Intel's persistent-memory documents: 8 bytes are written atomically.)
//!
//! # Use
//!
//! A [`SimMedium`] records a log of events. [`Replay`] follows a log and yields the [image](Replay::crash) that a
//! crash at that place may leave, a different one for each seed; each image is opened as a new `SimMedium`. So one
//! run of a scenario serves every cut of it. [`SimMedium::fail_from`] instead stops a medium for good in mid-run, to
//! test the program's error handling.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use memmap2::{MmapMut, MmapRaw};
use parking_lot::{Mutex, MutexGuard};

use super::raw::{RawBytes, check_streaming};
use super::{Flushed, Guarantee, Medium, MediumKind};
use crate::PAGE_SIZE;
use crate::convert::{to_u64, to_usize};

/// Bytes that are written atomically.
const CHUNK: usize = 8;

/// Operation on a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MediumEvent {
    /// Bytes were written at an offset.
    Write {
        /// Byte offset of the first byte.
        at: u64,
        /// Bytes that were written.
        bytes: Vec<u8>,
    },
    /// A range was flushed.
    Flush {
        /// Byte offset of the range.
        at: u64,
        /// Length of the range, bytes.
        len_bytes: u64,
    },
    /// A fence of the ranges (start, end), which were flushed before.
    Fence(Vec<(u64, u64)>),
    /// The scenario has reached this mark.
    Mark(u64),
    /// Something was changed beside the media, such as in an object store: durable by itself.
    Aside(u64),
}

impl MediumEvent {
    /// Returns true for a flush or a fence, or a change beside the media: where crashes are worth trying. Bytes that are written between two of
    /// them are pending at the second, and may be lost there as if they had not been written.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        matches!(self, Self::Flush { .. } | Self::Fence(_) | Self::Aside(_))
    }
}

/// Most mappings of dropped media that a thread keeps.
const MAX_SPARE: usize = 4;

thread_local! {
    /// Mappings of media that were dropped: page faults of new ones took half the time of a run of many cuts.
    static SPARE: RefCell<Vec<MmapRaw>> = const { RefCell::new(Vec::new()) };
}

/// Medium in memory that records all operations on it.
pub struct SimMedium {
    raw: RawBytes,
    /// There until the value is dropped.
    map: Option<MmapRaw>,
    /// Bytes of the mapping.
    len: usize,
    /// Offset of its first byte in the log, which several media may share.
    base: u64,
    guarantee: Guarantee,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    log: Vec<MediumEvent>,
    writes: u64,
    flushes: u64,
    fences: u64,
    /// Flushes and fences together, from which on all fail.
    fail_from: Option<u64>,
    /// The n-th flush or fence, counted together, that is silently not done.
    skip: Vec<u64>,
}

impl SimMedium {
    /// Makes a blank medium.
    ///
    /// # Panics
    /// If there is not enough memory: the medium is a test's tool.
    #[must_use]
    pub fn new(capacity_bytes: usize) -> Self {
        Self::from_image(&vec![0; capacity_bytes])
    }

    /// Makes a medium with the given content, all durable.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[must_use]
    pub fn from_image(image: &[u8]) -> Self {
        Self::beside(image, image.len(), 0, Arc::default())
    }

    /// Makes media with the given contents, all durable, and the given capacities, which can grow up to the contents'
    /// lengths. They have one log, in which each begins where the one before ends: so a crash hits all of them at once.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[must_use]
    pub fn several(images: &[(&[u8], usize)]) -> Vec<Self> {
        let state: Arc<Mutex<State>> = Arc::default();
        let mut base = 0;
        let media = images.iter().map(|(image, capacity_bytes)| {
            let medium = Self::beside(image, *capacity_bytes, base, Arc::clone(&state));
            base += to_u64(image.len());
            medium
        });
        media.collect()
    }

    fn beside(image: &[u8], capacity_bytes: usize, base: u64, state: Arc<Mutex<State>>) -> Self {
        let map = SPARE
            .with_borrow_mut(|spare| spare.pop_if(|map| map.len() == image.len()))
            .unwrap_or_else(|| {
                let map = MmapMut::map_anon(image.len()).expect("map memory for the simulator");
                MmapRaw::from(map)
            });
        // SAFETY: as long as the image, and this value's alone.
        unsafe {
            image
                .as_ptr()
                .copy_to_nonoverlapping(map.as_mut_ptr(), image.len())
        };
        Self {
            // SAFETY: mapped, readable and writable, as long as `map` lives beside it.
            raw: unsafe { RawBytes::new(map.as_mut_ptr(), capacity_bytes, map.len()) }
                .expect("guard memory for the simulator"),
            len: map.len(),
            map: Some(map),
            base,
            guarantee: Guarantee {
                kind: MediumKind::Simulated,
                dax_errno: None,
                dax_without_sync: false,
                volatile: true,
                instruction: None,
                emulated: None,
            },
            state,
        }
    }

    /// Returns all bytes as the program sees them.
    #[must_use]
    pub fn image(&self) -> Vec<u8> {
        let mut image = vec![0; self.len];
        let (used, _) = image.split_at_mut(to_usize(self.capacity_bytes()));
        // The whole medium is never out of range.
        let _ = self.raw.read(0, used);
        image
    }

    /// Puts a mark into the log.
    pub fn mark(&self, number: u64) {
        self.state().log.push(MediumEvent::Mark(number));
    }

    /// Puts a change beside the media into the log.
    pub fn aside(&self, number: u64) {
        self.state().log.push(MediumEvent::Aside(number));
    }

    /// Returns the log since the beginning, or since the last call.
    #[must_use]
    pub fn take_log(&self) -> Vec<MediumEvent> {
        std::mem::take(&mut self.state().log)
    }

    /// Writes so far.
    #[must_use]
    pub fn writes(&self) -> u64 {
        self.state().writes
    }

    /// Flushes so far.
    #[must_use]
    pub fn flushes(&self) -> u64 {
        self.state().flushes
    }

    /// Fences so far.
    #[must_use]
    pub fn fences(&self) -> u64 {
        self.state().fences
    }

    /// Makes everything fail from the n-th flush or fence on (counted together, from 0), without writing anything:
    /// the device is gone.
    pub fn fail_from(&self, n: u64) {
        self.state().fail_from = Some(n);
    }

    /// Makes everything fail from the next flush or fence on.
    pub fn fail_now(&self) {
        let mut state = self.state();
        state.fail_from = Some(state.flushes + state.fences);
    }

    /// Loses the pages of a range from now on, as by a media error.
    pub fn lose(&self, at: u64, len_bytes: u64) {
        self.raw.lose(at, len_bytes);
    }

    /// Skips the n-th flush or fence (counted together, from 0), too, and reports success. For tests of the tests: the
    /// simulator must detect such a medium.
    pub fn skip(&self, n: u64) {
        self.state().skip.push(n);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn record_write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        state.check()?;
        state.writes += 1;
        state.log.push(MediumEvent::Write {
            at: self.base + at,
            bytes: from.to_vec(),
        });
        Ok(())
    }
}

impl Drop for SimMedium {
    fn drop(&mut self) {
        // A thread that ends has none any more.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MAX_SPARE {
                spare.extend(self.map.take());
            }
        });
    }
}

impl State {
    fn check(&self) -> io::Result<()> {
        match self.fail_from {
            Some(n) if self.flushes + self.fences >= n => {
                Err(io::Error::from_raw_os_error(libc::EIO))
            }
            _ => Ok(()),
        }
    }

    /// Records a flush or fence unless it is to be skipped.
    fn record(&mut self, event: MediumEvent) {
        if !self.skip.contains(&(self.flushes + self.fences)) {
            self.log.push(event);
        }
    }
}

impl Medium for SimMedium {
    fn capacity_bytes(&self) -> u64 {
        self.raw.capacity_bytes()
    }

    fn guarantee(&self) -> &Guarantee {
        &self.guarantee
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
        self.raw.range(at, to_u64(from.len()))?;
        self.record_write(at, from)?;
        // SAFETY: the caller's promise.
        unsafe { self.raw.write(at, from) }
    }

    unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()> {
        check_streaming(at, from.len())?;
        // SAFETY: the caller's promise.
        unsafe { self.write(at, from) }
    }

    fn flush(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        self.raw.check(at, len_bytes)?;
        let mut state = self.state();
        state.check()?;
        state.record(MediumEvent::Flush {
            at: self.base + at,
            len_bytes,
        });
        state.flushes += 1;
        flushed.add(at, len_bytes);
        Ok(())
    }

    fn fence(&self, flushed: &mut Flushed) -> io::Result<()> {
        for &(start, end) in flushed.ranges() {
            self.raw.check(start, end - start)?;
        }
        let mut state = self.state();
        state.check()?;
        let ranges = flushed.ranges().iter();
        let ranges = ranges.map(|(start, end)| (self.base + start, self.base + end));
        state.record(MediumEvent::Fence(ranges.collect()));
        state.fences += 1;
        flushed.clear();
        Ok(())
    }

    fn grow(&self, capacity_bytes: u64) -> io::Result<()> {
        self.state().check()?;
        if capacity_bytes > to_u64(self.len) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        // SAFETY: the mapping has so many bytes.
        unsafe { self.raw.grow(to_usize(capacity_bytes)) };
        Ok(())
    }

    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        self.raw.find_again(at);
        let mut flushed = Flushed::new();
        // SAFETY: the caller's promise. Other threads' reads are of memory that they verify.
        unsafe { self.write(at, page)? };
        self.flush(at, to_u64(PAGE_SIZE), &mut flushed)?;
        self.fence(&mut flushed)
    }
}

/// Player of a log that keeps durable and pending values apart.
#[derive(Clone)]
pub struct Replay {
    durable: Vec<u8>,
    /// Pending values by chunk number, in the order of the writes.
    pending: HashMap<u64, Vec<Pending>>,
}

#[derive(Clone)]
struct Pending {
    value: [u8; CHUNK],
    flushed: bool,
}

impl Replay {
    /// Starts from a medium's content before the log's first event.
    #[must_use]
    pub fn new(image: Vec<u8>) -> Self {
        Self {
            durable: image,
            pending: HashMap::new(),
        }
    }

    /// Applies the next event.
    pub fn apply(&mut self, event: &MediumEvent) {
        match event {
            MediumEvent::Write { at, bytes } => self.write(to_usize(*at), bytes),
            MediumEvent::Flush { at, len_bytes } => {
                if *len_bytes > 0 {
                    let chunk = to_u64(CHUNK);
                    for chunk in at / chunk..=(at + len_bytes - 1) / chunk {
                        for pending in self.pending.get_mut(&chunk).into_iter().flatten() {
                            pending.flushed = true;
                        }
                    }
                }
            }
            MediumEvent::Fence(ranges) => {
                let durable = &mut self.durable;
                let fenced = |chunk: u64| {
                    let at = chunk * to_u64(CHUNK);
                    let overlaps =
                        |&(start, end): &(u64, u64)| start < at + to_u64(CHUNK) && at < end;
                    ranges.iter().any(overlaps)
                };
                self.pending.retain(|&chunk, values| {
                    if fenced(chunk)
                        && let Some(last) = values.iter().rposition(|p| p.flushed)
                    {
                        let at = to_usize(chunk) * CHUNK;
                        durable[at..at + CHUNK].copy_from_slice(&values[last].value);
                        values.drain(..=last);
                    }
                    !values.is_empty()
                });
            }
            MediumEvent::Mark(_) | MediumEvent::Aside(_) => {}
        }
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        let mut at = at;
        let mut bytes = bytes;
        while !bytes.is_empty() {
            let (start, skip) = (at / CHUNK * CHUNK, at % CHUNK);
            let (now, rest) = bytes.split_at(bytes.len().min(CHUNK - skip));
            let mut durable = [0; CHUNK];
            durable.copy_from_slice(&self.durable[start..start + CHUNK]);
            let values = self.pending.entry(to_u64(start / CHUNK)).or_default();
            let mut value = values.last().map_or(durable, |p| p.value);
            let before = value;
            value[skip..skip + now.len()].copy_from_slice(now);
            // A value that is written again still has to be flushed again if the previous one was not; if nothing is
            // pending and nothing changes, every outcome of a crash is equal.
            if !values.is_empty() || value != before {
                values.push(Pending {
                    value,
                    flushed: false,
                });
            } else {
                self.pending.remove(&to_u64(start / CHUNK));
            }
            at += now.len();
            bytes = rest;
        }
    }

    /// Returns an image that a crash here may leave. Seeds differ in which chunks they keep, and in how many: some
    /// keep nothing, some everything, some half.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Vec<u8> {
        let mut image = Vec::new();
        self.crash_into(seed, &mut image);
        image
    }

    /// Writes the image that [`crash`](Self::crash) returns into memory of an earlier one.
    pub fn crash_into(&self, seed: u64, image: &mut Vec<u8>) {
        image.clone_from(&self.durable);
        // Out of 256.
        let kept = [0, 16, 128, 240, 256][to_usize(mix(seed) % 5)];
        for (&chunk, values) in &self.pending {
            let draw = mix(seed ^ mix(chunk));
            let value = if draw % 256 < kept {
                values.last()
            } else {
                // The durable one or any but the last, each as likely.
                to_usize((draw >> 8) % to_u64(values.len()))
                    .checked_sub(1)
                    .and_then(|i| values.get(i))
            };
            if let Some(pending) = value {
                let at = to_usize(chunk) * CHUNK;
                image[at..at + CHUNK].copy_from_slice(&pending.value);
            }
        }
    }

    /// Returns the bytes as a program sees them here: what the next one finds if this one is killed and the machine
    /// runs on. Pending values are pending for it, too.
    #[must_use]
    pub fn visible(&self) -> Vec<u8> {
        let mut image = self.durable.clone();
        for (&chunk, values) in &self.pending {
            if let Some(last) = values.last() {
                let at = to_usize(chunk) * CHUNK;
                image[at..at + CHUNK].copy_from_slice(&last.value);
            }
        }
        image
    }

    /// Chunks that a crash here may change.
    #[must_use]
    pub fn pending_chunks(&self) -> usize {
        self.pending.len()
    }
}

/// Returns the output of SplitMix64's function: every bit of the result depends on every bit of the argument.
#[must_use]
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(replay: &Replay, chunk: usize) -> Vec<u8> {
        let mut seen: Vec<u8> = (0..400)
            .map(|seed| replay.crash(seed)[chunk * CHUNK])
            .collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }

    #[test]
    fn only_what_was_flushed_and_fenced_is_certain() {
        let medium = SimMedium::new(4096);
        // SAFETY: no one else has the medium.
        let write = |at, value: u8| unsafe { medium.write(at, &[value; CHUNK]).unwrap() };
        let mut replay = Replay::new(medium.image());
        let step = |replay: &mut Replay| medium.take_log().iter().for_each(|e| replay.apply(e));
        write(0, 1);
        write(8, 1);
        step(&mut replay);
        assert_eq!(outcomes(&replay, 0), [0, 1]);
        let mut flushed = Flushed::new();
        medium.flush(0, 8, &mut flushed).unwrap();
        step(&mut replay);
        assert_eq!(outcomes(&replay, 0), [0, 1], "flushed, not fenced");
        write(0, 2);
        step(&mut replay);
        assert_eq!(outcomes(&replay, 0), [0, 1, 2]);
        medium.fence(&mut Flushed::new()).unwrap();
        step(&mut replay);
        assert_eq!(outcomes(&replay, 0), [0, 1, 2], "somebody else's fence");
        medium.fence(&mut flushed).unwrap();
        step(&mut replay);
        assert_eq!(
            outcomes(&replay, 0),
            [1, 2],
            "the flush was of the value before"
        );
        assert_eq!(outcomes(&replay, 1), [0, 1], "a fence does not flush");
        medium.flush(0, 16, &mut flushed).unwrap();
        medium.fence(&mut flushed).unwrap();
        step(&mut replay);
        assert_eq!(
            (outcomes(&replay, 0), outcomes(&replay, 1)),
            (vec![2], vec![1])
        );
        assert_eq!(replay.pending_chunks(), 0);
        assert_eq!(replay.crash(0), medium.image());
    }

    #[test]
    fn chunks_are_kept_or_lost_independently() {
        let mut replay = Replay::new(vec![0; 4096]);
        replay.apply(&MediumEvent::Write {
            at: 0,
            bytes: vec![1; 4096],
        });
        let torn = (0..400).filter(|&seed| {
            let image = replay.crash(seed);
            image
                .chunks(CHUNK)
                .all(|c| c == [0; CHUNK] || c == [1; CHUNK])
                && image.contains(&0)
                && image.contains(&1)
        });
        assert!(torn.count() > 100);
    }

    #[test]
    fn a_failed_medium_stays_failed() {
        let medium = SimMedium::new(4096);
        medium.fail_from(1);
        let mut flushed = Flushed::new();
        medium.flush(0, 8, &mut flushed).unwrap();
        assert!(medium.fence(&mut flushed).is_err());
        assert!(medium.flush(0, 8, &mut flushed).is_err());
        // SAFETY: no one else has the medium.
        assert!(unsafe { medium.write(0, &[1]) }.is_err());
        assert_eq!(medium.image(), vec![0; 4096]);
    }
}
