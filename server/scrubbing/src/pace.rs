//! Limits work to a share of a processor's time: works a little, sleeps in proportion.

use std::time::Duration;

/// Amount of work between two sleeps.
const SLICE: Duration = Duration::from_millis(5);

/// Counts work, and returns the time to sleep. Reads no clock.
pub struct ScrubThrottle {
    /// Share of a processor's time, percent, 1 to 100.
    share: u32,
    worked: Duration,
}

impl ScrubThrottle {
    /// Makes a limiter for a share of a processor's time, percent.
    #[must_use]
    pub fn new(share_percent: u8) -> Self {
        Self {
            share: u32::from(share_percent).clamp(1, 100),
            worked: Duration::ZERO,
        }
    }

    /// Records more work. Returns the time to sleep now.
    pub fn took(&mut self, busy: Duration) -> Duration {
        self.worked += busy;
        if self.worked < SLICE {
            return Duration::ZERO;
        }
        let worked = std::mem::take(&mut self.worked);
        worked.saturating_mul(100 - self.share) / self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_time_it_is_the_share() {
        for share in [1, 10, 50, 100] {
            let mut pace = ScrubThrottle::new(share);
            let (mut busy, mut slept) = (Duration::ZERO, Duration::ZERO);
            for n in 0..10_000_u64 {
                let took = Duration::from_micros(n % 900);
                busy += took;
                let sleep = pace.took(took);
                // Never for long, so that it can be stopped soon.
                assert!(sleep <= 100 * (SLICE + took));
                slept += sleep;
            }
            let percent = busy.as_secs_f64() * 100.0 / (busy + slept).as_secs_f64();
            assert!(
                (percent - f64::from(share)).abs() < 0.2,
                "{percent} of {share}"
            );
        }
    }
}
