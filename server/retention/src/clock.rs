//! The time that ages are counted from, which a step of the wall clock cannot carry away.

use std::time::Duration;

/// Longest step forward of the wall clock that is believed at once: what it may gain on the monotonic clock.
const TOLERANCE: Duration = Duration::from_secs(60);

/// Time for which a clock that was set forward has to stay there before ages are counted by it.
const SETTLE: Duration = Duration::from_secs(3600);

/// The wall clock, as far as it can be believed. A step back counts at once, because everything is younger by it. A
/// step forward counts an hour later: until then time goes on from where it was. So a clock that was wrong for a
/// moment removes nothing.
#[derive(Clone, Debug, Default)]
pub struct AgeClock {
    /// The time that is believed, and the monotonic time at which it was that.
    anchor: Option<(u64, Duration)>,
    /// Monotonic time since which the wall clock has been ahead.
    ahead_since: Option<Duration>,
}

impl AgeClock {
    /// Returns the time to count ages from, milliseconds since the Unix epoch. `wall_ms` is what the wall clock shows
    /// now, `monotonic` the time on a clock that is never set.
    pub fn now(&mut self, wall_ms: u64, monotonic: Duration) -> u64 {
        let Some((anchor_ms, at)) = self.anchor else {
            self.anchor = Some((wall_ms, monotonic));
            return wall_ms;
        };
        let elapsed = monotonic.saturating_sub(at);
        let expected_ms = anchor_ms.saturating_add(millis(elapsed));
        if wall_ms <= expected_ms.saturating_add(millis(TOLERANCE)) {
            self.ahead_since = None;
            self.anchor = Some((wall_ms, monotonic));
            return wall_ms;
        }
        let since = *self.ahead_since.get_or_insert(monotonic);
        if monotonic.saturating_sub(since) < SETTLE {
            return expected_ms;
        }
        self.ahead_since = None;
        self.anchor = Some((wall_ms, monotonic));
        wall_ms
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START_MS: u64 = 1_800_000_000_000;
    const YEAR_MS: u64 = 365 * 86_400_000;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_clock_that_runs_is_believed() {
        let mut clock = AgeClock::default();
        assert_eq!(clock.now(START_MS, seconds(5)), START_MS);
        assert_eq!(clock.now(START_MS + 61_000, seconds(65)), START_MS + 61_000);
    }

    #[test]
    fn a_step_forward_counts_only_when_it_has_lasted() {
        let mut clock = AgeClock::default();
        clock.now(START_MS, seconds(0));
        assert_eq!(
            clock.now(START_MS + YEAR_MS, seconds(10)),
            START_MS + 10_000
        );
        // Set back in time: as if it had never happened.
        assert_eq!(clock.now(START_MS + 20_000, seconds(20)), START_MS + 20_000);
        let ahead = |s: u64| START_MS + YEAR_MS + s * 1000;
        assert_eq!(clock.now(ahead(30), seconds(30)), START_MS + 30_000);
        assert_eq!(clock.now(ahead(3629), seconds(3629)), START_MS + 3_629_000);
        assert_eq!(clock.now(ahead(3630), seconds(3630)), ahead(3630));
    }

    #[test]
    fn a_step_back_counts_at_once() {
        let mut clock = AgeClock::default();
        clock.now(START_MS, seconds(0));
        let earlier = START_MS - YEAR_MS;
        assert_eq!(clock.now(earlier, seconds(1)), earlier);
        assert_eq!(clock.now(earlier + 1000, seconds(2)), earlier + 1000);
    }

    #[test]
    fn extreme_values_do_no_harm() {
        let mut clock = AgeClock::default();
        for (wall_ms, monotonic) in [
            (0, Duration::ZERO),
            (u64::MAX, Duration::MAX),
            (0, Duration::MAX),
            (u64::MAX, Duration::ZERO),
        ] {
            clock.now(wall_ms, monotonic);
        }
    }
}
