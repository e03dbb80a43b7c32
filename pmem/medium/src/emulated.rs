//! Emulation of a slower device: bandwidth each way and a latency, around any other medium.
//!
//! The emulation keeps the guarantees of the medium below; only the time differs, and that is the longer of the two
//! devices'. It models:
//!
//! - **Writing.** A flush hands its range to the device, which writes it at `write_bytes_per_s` while the caller goes
//!   on; with [`QUEUE`] of work in front of it a flush waits, as a full request queue does. A fence waits for its
//!   ranges and for the work in front of them, and `latency` once.
//! - **Reading.** Bytes that are read or lent come at `read_bytes_per_s`; a read that does not begin where the last
//!   one ended waits `latency` first.
//! - **The page cache**, where the device would be behind one (`cached`): pages that were written or read since the
//!   medium was opened are read for nothing. A mapped file on a disk behaves so as long as memory lasts; mapped NVM
//!   does not.
//!
//! Not modelled: interference of reads and writes, a write's place on the device.

use std::borrow::Cow;
use std::num::NonZeroU64;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fmt, io};

use parking_lot::{Mutex, RwLock};

use super::{Flushed, Guarantee, Medium};
use crate::convert::{to_u64, to_usize};
use crate::{PAGE_BYTES, PAGE_SIZE};

/// Work that a device may have before it, beyond which a flush waits.
const QUEUE: Duration = Duration::from_millis(100);
/// Idle time that is made up for: sleeping ends late by up to a scheduler's tick, and without this every wait would
/// make the emulated device slower than configured. So its speed is off by no more than this over any stretch of
/// time.
const CREDIT: Duration = Duration::from_millis(5);
/// Least time for which a read sleeps: shorter sleeps cost more than they are worth.
const GRAIN: Duration = Duration::from_micros(200);

/// A device to be emulated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Emulation {
    /// `hdd`, `ssd`, `nvm`, or `device` for given numbers.
    pub name: Cow<'static, str>,
    /// Bytes a second to the device.
    pub write_bytes_per_s: NonZeroU64,
    /// Bytes a second from it.
    pub read_bytes_per_s: NonZeroU64,
    /// Time that each fence waits, and each read that does not begin where the last one ended.
    pub latency: Duration,
    /// True if the device is behind a page cache.
    pub cached: bool,
}

impl Emulation {
    /// Returns the device of Li et al., Middleware '15, with this name: `hdd`, `ssd`, `nvm`.
    ///
    /// Derived from Table 3, the first checkpoint of a program of 5 GB (taken as 5 × 10^9 bytes): 169.18 s on the
    /// hard disk, 43.73 s on the SSD (OCZ Deneva 2), 2.92 s on PMFS, which are 29.55, 114.34 and 1712.33 MB/s. These
    /// are the rates of a checkpoint, file system and CRIU included, and not those of the data sheets. The text gives
    /// no figure for reading alone, and no latency: reading is assumed to be as fast as writing, and the latency to
    /// be 0. The disks are behind the page cache, PMFS is mapped.
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        const CHECKPOINT_BYTES: u64 = 5_000_000_000;
        let (name, took_ms, cached) = match name {
            "hdd" => ("hdd", 169_180, true),
            "ssd" => ("ssd", 43_730, true),
            "nvm" => ("nvm", 2_920, false),
            _ => return None,
        };
        let rate = NonZeroU64::new(CHECKPOINT_BYTES * 1000 / took_ms)?;
        Some(Self {
            name: Cow::Borrowed(name),
            write_bytes_per_s: rate,
            read_bytes_per_s: rate,
            latency: Duration::ZERO,
            cached,
        })
    }
}

impl fmt::Display for Emulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = |rate: NonZeroU64| {
            let tenths = (rate.get() + 50_000) / 100_000;
            format!("{}.{} MB/s", tenths / 10, tenths % 10)
        };
        write!(
            f,
            "emulated {} ({} write, {} read",
            self.name,
            tenths(self.write_bytes_per_s),
            tenths(self.read_bytes_per_s)
        )?;
        if !self.latency.is_zero() {
            write!(f, ", latency {:?}", self.latency)?;
        }
        f.write_str(if self.cached {
            ", behind a page cache)"
        } else {
            ")"
        })
    }
}

/// Error for a text that does not describe a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no device: say hdd, ssd, nvm or WRITE:READ:LATENCY[:cached], such as 120M:140M:8ms:cached (bytes a second in units of 1000)"
)]
pub struct NoDevice {
    /// Text that was given.
    pub text: String,
}

impl FromStr for Emulation {
    type Err = NoDevice;

    fn from_str(text: &str) -> Result<Self, NoDevice> {
        let none = || NoDevice {
            text: text.to_owned(),
        };
        if let Some(preset) = Self::preset(text) {
            return Ok(preset);
        }
        let mut parts = text.split(':');
        let mut next = || parts.next().ok_or_else(none);
        let write_bytes_per_s = parse_rate(next()?).ok_or_else(none)?;
        let read_bytes_per_s = parse_rate(next()?).ok_or_else(none)?;
        let latency = parse_latency(next()?).ok_or_else(none)?;
        let cached = match (parts.next(), parts.next()) {
            (None, _) => false,
            (Some("cached"), None) => true,
            _ => return Err(none()),
        };
        Ok(Self {
            name: Cow::Borrowed("device"),
            write_bytes_per_s,
            read_bytes_per_s,
            latency,
            cached,
        })
    }
}

/// Parses a rate such as `120M`, `1.7G`, `500000`: in units of 1000, as in data sheets; at most 1 PB/s.
fn parse_rate(text: &str) -> Option<NonZeroU64> {
    let (number, unit) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 1_000),
        b'm' | b'M' => (&text[..text.len() - 1], 1_000_000),
        b'g' | b'G' => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text, 1),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || fraction.len() > 3 || !digits(whole) || !digits(fraction) {
        return None;
    }
    // In thousandths.
    let thousandths: u64 = format!("{whole}{fraction:0<3}").parse().ok()?;
    let rate = thousandths.checked_mul(unit)? / 1000;
    NonZeroU64::new(rate).filter(|rate| rate.get() <= 1_000_000_000_000_000)
}

/// Parses a latency such as `0`, `8ms`, `90us`, `1s`; at most a minute.
fn parse_latency(text: &str) -> Option<Duration> {
    let unit_at = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(unit_at.unwrap_or(text.len()));
    let number: u64 = number.parse().ok()?;
    let latency = match unit {
        "s" => Duration::from_secs(number),
        "ms" => Duration::from_millis(number),
        "us" | "µs" => Duration::from_micros(number),
        "ns" => Duration::from_nanos(number),
        "" if number == 0 => Duration::ZERO,
        _ => return None,
    };
    (latency <= Duration::from_secs(60)).then_some(latency)
}

/// Clock with a way to wait. A test brings its own.
pub(crate) trait Clock: Send + Sync {
    /// Returns the time since any fixed origin.
    fn now(&self) -> Duration;
    /// Returns at time `moment` or later.
    fn wait_until(&self, moment: Duration);
}

/// Monotonic clock of the machine.
struct Monotonic(Instant);

impl Clock for Monotonic {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn wait_until(&self, moment: Duration) {
        if let Some(left) = moment.checked_sub(self.0.elapsed()) {
            std::thread::sleep(left);
        }
    }
}

/// Direction of a device, with the time at which its work will be done.
#[derive(Debug, Default)]
struct Throttle {
    done_at: Duration,
    /// Byte-nanoseconds that did not make a whole nanosecond yet, so that many small accesses are no faster than a
    /// large one.
    carry: u128,
    /// Offset at which the last access ended: an access that begins there is sequential.
    next: u64,
}

impl Throttle {
    /// Gives it `bytes` more, at `bytes_per_s`, after `latency`. When it will be done.
    fn give(
        &mut self,
        now: Duration,
        bytes: u64,
        bytes_per_s: NonZeroU64,
        latency: Duration,
    ) -> Duration {
        let start = self.done_at.max(now.saturating_sub(CREDIT));
        let rate = u128::from(bytes_per_s.get());
        let work = u128::from(bytes) * 1_000_000_000 + self.carry;
        self.carry = work % rate;
        let takes = Duration::from_nanos(u64::try_from(work / rate).unwrap_or(u64::MAX));
        self.done_at = start.saturating_add(takes).saturating_add(latency);
        self.done_at
    }
}

/// Pages that are in the page cache, a bit each.
struct Cached(RwLock<Vec<AtomicU64>>);

impl Cached {
    fn new(capacity_bytes: u64) -> Self {
        let cached = Self(RwLock::default());
        cached.grow(capacity_bytes);
        cached
    }

    fn grow(&self, capacity_bytes: u64) {
        let words = to_usize(capacity_bytes.div_ceil(PAGE_BYTES * 64));
        self.0.write().resize_with(words, AtomicU64::default);
    }

    /// Puts the pages of a range in; returns the number of pages that were absent.
    fn insert(&self, at: u64, len_bytes: u64) -> u64 {
        let pages = at / PAGE_BYTES..at.saturating_add(len_bytes).div_ceil(PAGE_BYTES);
        let words = self.0.read();
        let absent = pages.filter(|page| {
            let bit = 1 << (page % 64);
            words
                .get(to_usize(page / 64))
                .is_some_and(|word| word.fetch_or(bit, Ordering::Relaxed) & bit == 0)
        });
        to_u64(absent.count())
    }
}

/// The slower device.
pub(crate) struct Emulated {
    below: Arc<dyn Medium>,
    device: Emulation,
    guarantee: Guarantee,
    clock: Box<dyn Clock>,
    cached: Option<Cached>,
    writing: Mutex<Throttle>,
    reading: Mutex<Throttle>,
}

impl Emulated {
    fn new(below: Arc<dyn Medium>, device: Emulation, clock: Box<dyn Clock>) -> Self {
        let guarantee = Guarantee {
            emulated: Some(device.clone()),
            ..below.guarantee().clone()
        };
        Self {
            cached: device.cached.then(|| Cached::new(below.capacity_bytes())),
            below,
            device,
            guarantee,
            clock,
            writing: Mutex::default(),
            reading: Mutex::default(),
        }
    }

    /// Waits for a read of a range, after it was found to be one.
    fn charge_read(&self, at: u64, len: usize) {
        let mut bytes = to_u64(len);
        if let Some(cached) = &self.cached {
            bytes = cached.insert(at, bytes) * PAGE_BYTES;
        }
        if bytes == 0 {
            return;
        }
        let now = self.clock.now();
        let done = {
            let mut reading = self.reading.lock();
            let latency = if reading.next == at {
                Duration::ZERO
            } else {
                self.device.latency
            };
            reading.next = at.saturating_add(to_u64(len));
            reading.give(now, bytes, self.device.read_bytes_per_s, latency)
        };
        if done.saturating_sub(now) >= GRAIN {
            self.clock.wait_until(done);
        }
    }

    /// Hands a range to the device, and waits if it has too much to do.
    fn charge_flush(&self, len_bytes: u64, flushed: &mut Flushed) {
        if len_bytes == 0 {
            return;
        }
        let done = {
            let mut writing = self.writing.lock();
            writing.give(
                self.clock.now(),
                len_bytes,
                self.device.write_bytes_per_s,
                Duration::ZERO,
            )
        };
        flushed.done_at = done;
        let start = done.saturating_sub(QUEUE);
        if start > self.clock.now() {
            self.clock.wait_until(start);
        }
    }

    fn mark_written(&self, at: u64, len: usize) {
        if let Some(cached) = &self.cached {
            cached.insert(at, to_u64(len));
        }
    }
}

impl Medium for Emulated {
    fn capacity_bytes(&self) -> u64 {
        self.below.capacity_bytes()
    }

    fn guarantee(&self) -> &Guarantee {
        &self.guarantee
    }

    fn populate(&self, ranges: Vec<Range<u64>>) {
        self.below.populate(ranges);
    }

    fn grow(&self, capacity_bytes: u64) -> io::Result<()> {
        self.below.grow(capacity_bytes)?;
        if let Some(cached) = &self.cached {
            cached.grow(capacity_bytes);
        }
        Ok(())
    }

    // No `file`: bytes that are spliced out of it would bypass the emulation.

    fn lost_pages(&self) -> u64 {
        self.below.lost_pages()
    }

    fn check(&self, at: u64, len_bytes: u64) -> io::Result<()> {
        self.below.check(at, len_bytes)
    }

    fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.below.read(at, into)?;
        self.charge_read(at, into.len());
        Ok(())
    }

    unsafe fn bytes(&self, at: u64, len: usize) -> io::Result<&[u8]> {
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.below.bytes(at, len) }?;
        self.charge_read(at, len);
        Ok(bytes)
    }

    unsafe fn write(&self, at: u64, from: &[u8]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.below.write(at, from) }?;
        self.mark_written(at, from.len());
        Ok(())
    }

    unsafe fn write_streaming(&self, at: u64, from: &[u8]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.below.write_streaming(at, from) }?;
        self.mark_written(at, from.len());
        Ok(())
    }

    unsafe fn rewrite_page(&self, at: u64, page: &[u8; PAGE_SIZE]) -> io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.below.rewrite_page(at, page) }?;
        self.mark_written(at, page.len());
        Ok(())
    }

    fn flush(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        self.below.flush(at, len_bytes, flushed)?;
        self.charge_flush(len_bytes, flushed);
        Ok(())
    }

    fn flush_streamed(&self, at: u64, len_bytes: u64, flushed: &mut Flushed) -> io::Result<()> {
        self.below.flush_streamed(at, len_bytes, flushed)?;
        self.charge_flush(len_bytes, flushed);
        Ok(())
    }

    fn fence(&self, flushed: &mut Flushed) -> io::Result<()> {
        let (any, own) = (!flushed.is_empty(), flushed.done_at);
        self.below.fence(flushed)?;
        if !any {
            return Ok(());
        }
        let (now, latency) = (self.clock.now(), self.device.latency);
        // The latency is the device's: later fences wait for it as well.
        let mut writing = self.writing.lock();
        writing.give(now, 0, self.device.write_bytes_per_s, latency);
        drop(writing);
        let done = own.max(now.saturating_sub(CREDIT)).saturating_add(latency);
        if done > now {
            self.clock.wait_until(done);
        }
        Ok(())
    }
}

/// Slows `medium` down to `device`. A medium that is already slower stays so.
///
/// Pages cannot be spliced out of the result, and are copied: that, too, costs time.
#[must_use]
pub fn emulate(medium: Arc<dyn Medium>, device: Emulation) -> Arc<dyn Medium> {
    Arc::new(Emulated::new(
        medium,
        device,
        Box::new(Monotonic(Instant::now())),
    ))
}

#[cfg(test)]
mod tests;
