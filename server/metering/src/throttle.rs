//! Limits the rate of repair: to full speed while nothing else runs, and to a fraction of it while dumps come
//! in.
//!
//! Each thread that copies for repair reports the cost of each frame, and waits for the time that it gets. The
//! limit is on the throughput, as a share of that measured while no dump came in: then processor, link and
//! medium have that share of the load at both ends, whichever of them is the bottleneck. The time that this
//! node's own threads work is bounded by the same share on top of it, for work that moves few bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use permafrost_protocol::wire::frame::Kind;
use permafrost_store::Store;

/// Full speed that is assumed until it has been measured, bytes per second: half of a gigabit link.
const UNMEASURED: u64 = 64 << 20;

/// Slowest rate, bytes per second: a peer gives up a connection on which a frame takes seconds.
const SLOWEST: u64 = 1 << 20;

/// Duration of one measurement of full speed.
const MEASURE: Duration = Duration::from_millis(500);

/// Maximum of unused time that may be caught up with at once.
const BURST: Duration = Duration::from_millis(20);

/// Longest sleep before the reason to wait is checked again.
const NAP: Duration = Duration::from_millis(50);

/// Cost of a page that is only referenced, in bytes of one that is sent: its entry in a map.
const NAMED_PAGE_BYTES: u64 = 16;

/// Returns the cost, bytes, of the pages that a frame only references. A run of zeros costs as much as one page,
/// whatever its length.
pub fn named_bytes(kind: Kind, pages: u32) -> u64 {
    match kind {
        Kind::Zero => NAMED_PAGE_BYTES,
        Kind::Parent => u64::from(pages) * NAMED_PAGE_BYTES,
        _ => 0,
    }
}

/// Limits of the rate of repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RepairLimits {
    /// Bytes per second at any time; `None`: unlimited. Less than 1 MiB/s is raised to that.
    pub rate: Option<u64>,
    /// Percent of full speed, and of the time of a processor, while dumps come in; 1 to 100.
    pub share_percent: u8,
}

impl Default for RepairLimits {
    fn default() -> Self {
        Self {
            rate: None,
            share_percent: 25,
        }
    }
}

/// Rate limiter for all repair on one node. Reads no clock.
#[derive(Debug)]
pub struct RepairThrottle {
    limits: RepairLimits,
    /// Time at which all bytes so far are through at the limited rate.
    paid: Duration,
    /// Time at which all work so far is through at the limited share of a processor's time.
    rested: Duration,
    /// Full speed, bytes per second, measured while no dump came in.
    full: Option<u64>,
    /// Start of the current measurement, and the bytes since then.
    measuring: Option<(Duration, u64)>,
    last: Duration,
}

impl RepairThrottle {
    /// Creates a rate limiter without a measurement.
    #[must_use]
    pub fn new(limits: RepairLimits) -> Self {
        Self {
            limits,
            paid: Duration::ZERO,
            rested: Duration::ZERO,
            full: None,
            measuring: None,
            last: Duration::ZERO,
        }
    }

    /// Replaces the limits. Waits that are due under the limits before are forgotten; what was measured stays.
    pub fn set_limits(&mut self, limits: RepairLimits) {
        if limits != self.limits {
            (self.paid, self.rested) = (Duration::ZERO, Duration::ZERO);
        }
        self.limits = limits;
    }

    /// Returns full speed as far as it is known, bytes per second.
    #[must_use]
    pub fn full_speed(&self) -> u64 {
        self.full.unwrap_or(UNMEASURED)
    }

    /// Records that `bytes` are through at `now`, which took a thread `busy`; `receiving` is true while dumps come
    /// in.
    pub fn took(&mut self, now: Duration, bytes: u64, busy: Duration, receiving: bool) {
        self.measure(now, bytes, receiving);
        let earliest = now.saturating_sub(BURST);
        self.paid = match self.rate(receiving) {
            Some(rate) => {
                let ns = u128::from(bytes) * 1_000_000_000 / u128::from(rate);
                let takes = Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX));
                self.paid.max(earliest).saturating_add(takes)
            }
            None => now,
        };
        self.rested = if receiving {
            let began = earliest.saturating_sub(busy);
            let takes = busy.saturating_mul(100) / self.share();
            self.rested.max(began).saturating_add(takes)
        } else {
            now
        };
    }

    /// Returns the time to wait, at `now`, before going on.
    #[must_use]
    pub fn wait(&self, now: Duration, receiving: bool) -> Duration {
        let mut until = Duration::ZERO;
        if self.limits.rate.is_some() || receiving {
            until = self.paid;
        }
        if receiving {
            until = until.max(self.rested);
        }
        until.saturating_sub(now)
    }

    fn share(&self) -> u32 {
        self.limits.share_percent.clamp(1, 100).into()
    }

    /// Returns the highest allowed rate, bytes per second.
    fn rate(&self, receiving: bool) -> Option<u64> {
        let mut rate = self.limits.rate;
        if receiving {
            let share = self.full_speed() / 100 * u64::from(self.share());
            rate = Some(rate.map_or(share, |rate| rate.min(share)));
        }
        rate.map(|rate| rate.max(SLOWEST))
    }

    fn measure(&mut self, now: Duration, bytes: u64, receiving: bool) {
        let paused = now.saturating_sub(self.last) > MEASURE;
        self.last = now;
        if receiving {
            self.measuring = None;
            return;
        }
        let (since, before) = match self.measuring {
            Some(measuring) if !paused => measuring,
            // The cost of this piece is not known.
            _ => {
                self.measuring = Some((now, 0));
                return;
            }
        };
        let (bytes, took) = (before + bytes, now.saturating_sub(since));
        if took < MEASURE {
            self.measuring = Some((since, bytes));
            return;
        }
        let speed = u128::from(bytes) * 1_000_000_000 / took.as_nanos().max(1);
        let speed = u64::try_from(speed).unwrap_or(u64::MAX);
        // A slow source, or a busy machine, says little about full speed; a fast one measures it.
        self.full = Some(match self.full {
            Some(full) => speed.max(full - full / 8 + speed / 8),
            None => speed,
        });
        self.measuring = Some((now, 0));
    }
}

/// [`RepairThrottle`] by the real clock, for all threads that repair on this node.
pub struct Throttle {
    pace: Mutex<RepairThrottle>,
    began: Instant,
    receiving: Box<dyn Fn() -> bool + Send + Sync>,
    stopped: AtomicBool,
}

impl Throttle {
    /// Creates a throttle. `receiving` returns true while dumps come in; it is called for each frame.
    #[must_use]
    pub fn new(
        limits: RepairLimits,
        receiving: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            pace: Mutex::new(RepairThrottle::new(limits)),
            began: Instant::now(),
            receiving: Box::new(receiving),
            stopped: AtomicBool::new(false),
        })
    }

    /// Creates the throttle of a node, whose store reports if dumps come in.
    #[must_use]
    pub fn of(store: &Arc<Store>, limits: RepairLimits) -> Arc<Self> {
        let store = Arc::downgrade(store);
        Self::new(limits, move || {
            store.upgrade().is_some_and(|store| store.is_receiving())
        })
    }

    /// Records that `bytes` are through, which took this thread `busy`; waits until the limits allow more.
    pub fn took(&self, bytes: u64, busy: Duration) {
        let receiving = (self.receiving)();
        self.pace()
            .took(self.began.elapsed(), bytes, busy, receiving);
        loop {
            if self.is_stopped() {
                return;
            }
            let receiving = (self.receiving)();
            let wait = self.pace().wait(self.began.elapsed(), receiving);
            if wait.is_zero() {
                return;
            }
            std::thread::sleep(wait.min(NAP));
        }
    }

    /// Replaces the limits; a wait under way ends when the new ones let it.
    pub fn set_limits(&self, limits: RepairLimits) {
        self.pace().set_limits(limits);
    }

    /// Ends every wait, now and from now on; repair ends at its next frame.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Returns true if it was stopped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    fn pace(&self) -> parking_lot::MutexGuard<'_, RepairThrottle> {
        self.pace.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: u64 = 256 << 10;
    const FULL: u64 = 500 << 20;

    /// Passes frames as fast as the limiter allows, for `seconds`; returns the bytes per second.
    fn run(pace: &mut RepairThrottle, now: &mut Duration, seconds: u64, receiving: bool) -> u64 {
        let (began, mut bytes) = (*now, 0);
        let takes = Duration::from_nanos(FRAME * 1_000_000_000 / FULL);
        while *now < began + Duration::from_secs(seconds) {
            *now += takes;
            bytes += FRAME;
            pace.took(*now, FRAME, takes / 3, receiving);
            *now += pace.wait(*now, receiving);
        }
        bytes * 1000 / u64::try_from((*now - began).as_millis()).unwrap()
    }

    #[test]
    fn a_new_limit_ends_the_waits_of_the_one_before() {
        let limited = |rate| RepairLimits {
            rate: Some(rate),
            ..RepairLimits::default()
        };
        let mut pace = RepairThrottle::new(limited(1 << 20));
        let now = Duration::from_secs(5);
        pace.took(now, 8 << 20, Duration::ZERO, false);
        assert!(pace.wait(now, false) > Duration::from_secs(7));
        pace.set_limits(limited(64 << 20));
        assert_eq!(pace.wait(now, false), Duration::ZERO);
        let mut now = now;
        let rate = run(&mut pace, &mut now, 3, false);
        assert!(rate.abs_diff(64 << 20) < 2 << 20, "{rate}");
    }

    #[test]
    fn alone_it_goes_at_full_speed_and_beside_a_dump_at_its_share() {
        let mut pace = RepairThrottle::new(RepairLimits::default());
        let mut now = Duration::from_secs(5);
        assert!(run(&mut pace, &mut now, 3, false) > FULL * 99 / 100);
        assert!(pace.full_speed().abs_diff(FULL) < FULL / 50);
        let beside = run(&mut pace, &mut now, 5, true);
        assert!(beside < FULL * 26 / 100, "{beside}");
        assert!(beside > FULL * 22 / 100, "{beside}");
        // Once the dump is over, repair is as fast as before, and remembers full speed.
        assert!(run(&mut pace, &mut now, 3, false) > FULL * 98 / 100);
        assert!(run(&mut pace, &mut now, 3, true) < FULL * 26 / 100);
    }

    #[test]
    fn before_anything_was_measured_it_is_careful() {
        let mut pace = RepairThrottle::new(RepairLimits::default());
        let mut now = Duration::ZERO;
        let beside = run(&mut pace, &mut now, 5, true);
        assert!(beside < UNMEASURED * 26 / 100, "{beside}");
        assert!(beside > UNMEASURED * 22 / 100, "{beside}");
    }

    #[test]
    fn a_rate_holds_at_all_times() {
        let limits = RepairLimits {
            rate: Some(40 << 20),
            ..RepairLimits::default()
        };
        let mut pace = RepairThrottle::new(limits);
        let mut now = Duration::ZERO;
        let alone = run(&mut pace, &mut now, 5, false);
        assert!(alone.abs_diff(40 << 20) < 2 << 20, "{alone}");
        let beside = run(&mut pace, &mut now, 5, true);
        assert!(beside < 12 << 20, "{beside}");
    }

    #[test]
    fn work_that_moves_nothing_has_its_share_of_a_processor() {
        let mut pace = RepairThrottle::new(RepairLimits::default());
        let (mut now, mut busy) = (Duration::ZERO, Duration::ZERO);
        while now < Duration::from_secs(10) {
            now += Duration::from_millis(1);
            busy += Duration::from_millis(1);
            pace.took(now, 0, Duration::from_millis(1), true);
            now += pace.wait(now, true);
        }
        assert!(busy < now * 26 / 100 && busy > now * 23 / 100, "{busy:?}");
    }

    #[test]
    fn a_pause_between_two_pulls_is_not_taken_for_a_slow_link() {
        let mut pace = RepairThrottle::new(RepairLimits::default());
        let mut now = Duration::ZERO;
        for _ in 0..20 {
            run(&mut pace, &mut now, 1, false);
            now += Duration::from_secs(60);
        }
        assert!(pace.full_speed() > FULL * 95 / 100);
    }

    #[test]
    fn a_wait_ends_when_the_dump_does() {
        let receiving = Arc::new(AtomicBool::new(true));
        let seen = Arc::clone(&receiving);
        let throttle = Throttle::new(RepairLimits::default(), move || {
            seen.load(Ordering::Relaxed)
        });
        let began = Instant::now();
        let over = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            receiving.store(false, Ordering::Relaxed);
        });
        // Without the stop this would take a minute.
        throttle.took(UNMEASURED * 15, Duration::ZERO);
        assert!(began.elapsed() < Duration::from_secs(30));
        assert!(began.elapsed() >= Duration::from_millis(190));
        over.join().unwrap();
    }
}
