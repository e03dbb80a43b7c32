//! The freeze limit: the longest time that a dump may keep a process tree frozen, and the steps that end a freeze.
//!
//! ```text
//! 0 ─────────────────── limit/2, or limit - 20 s ─────── halfway ──────────────── limit
//! CRIU starts           1 roll back: page socket         2 end CRIU's children    3 end CRIU
//!                         shut down, seal given up
//! ```
//!
//! Step 1 is the orderly one: CRIU sees the end of its page server, or a non-zero exit of the action script,
//! cures the tasks of its parasite and lets them go. The later steps are for a CRIU, or children of it, that do
//! not react.

use std::time::Duration;

/// Time for the steps at the end of the limit, where the limit is long enough. A CRIU that is killed in the middle of
/// its rollback can cost a task its life, and on a machine with more runnable processes than processors a rollback of
/// milliseconds takes seconds.
const LONGEST_MARGIN: Duration = Duration::from_secs(20);

/// Time between two attempts to end a CRIU that does not end.
const REPEAT_AFTER: Duration = Duration::from_secs(1);

/// Part of the default limit that does not depend on the memory.
const DEFAULT_BASE: Duration = Duration::from_secs(120);

/// Slowest transfer that the default limit allows for beyond that, bytes a second: 1 GiB in 10 s.
const DEFAULT_BYTES_PER_S: u64 = (1 << 30) / 10;

/// Longest time that a dump may keep its process tree frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreezeLimit(Duration);

impl FreezeLimit {
    /// Shortest limit: CRIU needs some of it to roll back.
    pub const SHORTEST: Duration = Duration::from_secs(1);

    /// Returns a limit of `time`; `None` below [`Self::SHORTEST`].
    pub fn new(time: Duration) -> Option<Self> {
        (time >= Self::SHORTEST).then_some(Self(time))
    }

    /// Returns the default limit for a tree with so much resident memory: 2 minutes, and 10 s more for each
    /// GiB.
    pub fn for_memory(resident_bytes: u64) -> Self {
        let transfer_ms = u128::from(resident_bytes) * 1000 / u128::from(DEFAULT_BYTES_PER_S);
        let transfer = Duration::from_millis(u64::try_from(transfer_ms).unwrap_or(u64::MAX));
        Self(DEFAULT_BASE.saturating_add(transfer))
    }

    /// Returns the limit as a duration.
    pub fn time(self) -> Duration {
        self.0
    }

    /// Returns the time from CRIU's start to step 1, the rollback.
    pub fn until_rollback(self) -> Duration {
        self.0 - self.margin()
    }

    fn margin(self) -> Duration {
        (self.0 / 2).min(LONGEST_MARGIN)
    }
}

/// A step towards the end of a freeze.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Makes CRIU roll back by itself.
    RollBack,
    /// Ends the processes that CRIU waits for.
    EndChildren,
    /// Ends CRIU itself.
    EndCriu,
}

/// The steps of one dump, in order.
#[derive(Debug)]
pub(super) struct Steps {
    limit: FreezeLimit,
    taken: Option<Step>,
    /// Time from CRIU's start to the next step.
    next_at: Duration,
}

impl Steps {
    pub(super) fn new(limit: FreezeLimit) -> Self {
        Self {
            limit,
            taken: None,
            next_at: limit.until_rollback(),
        }
    }

    /// Returns the time until the next step, `elapsed` after CRIU's start.
    pub(super) fn wait(&self, elapsed: Duration) -> Duration {
        self.next_at.saturating_sub(elapsed)
    }

    /// Takes the next step if it is due.
    pub(super) fn due(&mut self, elapsed: Duration) -> Option<Step> {
        (elapsed >= self.next_at).then(|| self.advance(elapsed))
    }

    /// Takes the next step because a user interrupts the dump. CRIU itself is ended at the limit only: in the middle
    /// of a rollback that would cost tasks their lives.
    pub(super) fn interrupt(&mut self, elapsed: Duration) -> Option<Step> {
        match self.taken {
            None | Some(Step::RollBack) => Some(self.advance(elapsed)),
            Some(Step::EndChildren | Step::EndCriu) => None,
        }
    }

    fn advance(&mut self, elapsed: Duration) -> Step {
        let limit = self.limit;
        let (step, next_at) = match self.taken {
            None => (Step::RollBack, limit.time() - limit.margin() / 2),
            Some(Step::RollBack) => (Step::EndChildren, limit.time()),
            Some(Step::EndChildren | Step::EndCriu) => (Step::EndCriu, elapsed + REPEAT_AFTER),
        };
        self.taken = Some(step);
        self.next_at = next_at;
        step
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(seconds: u64) -> FreezeLimit {
        FreezeLimit::new(Duration::from_secs(seconds)).unwrap()
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_default_grows_with_the_memory() {
        assert_eq!(FreezeLimit::for_memory(0).time(), Duration::from_secs(120));
        let of_64_gib = FreezeLimit::for_memory(64 << 30).time();
        assert_eq!(of_64_gib.as_secs(), 120 + 640);
        assert!(FreezeLimit::for_memory(u64::MAX).time() > of_64_gib);
        assert_eq!(FreezeLimit::new(ms(999)), None);
    }

    #[test]
    fn every_step_comes_before_the_limit_is_over() {
        let mut steps = Steps::new(limit(120));
        assert_eq!(steps.wait(Duration::ZERO), Duration::from_secs(100));
        assert_eq!(steps.due(ms(99_999)), None);
        assert_eq!(steps.due(ms(100_000)), Some(Step::RollBack));
        assert_eq!(steps.wait(ms(100_000)), ms(10_000));
        assert_eq!(steps.due(ms(109_999)), None);
        assert_eq!(steps.due(ms(110_000)), Some(Step::EndChildren));
        assert_eq!(steps.wait(ms(110_000)), ms(10_000));
        assert_eq!(steps.due(ms(120_000)), Some(Step::EndCriu));
        // The last step is repeated while CRIU does not end.
        assert_eq!(steps.wait(ms(120_000)), REPEAT_AFTER);
        assert_eq!(steps.due(ms(121_000)), Some(Step::EndCriu));
        assert_eq!(limit(2).until_rollback(), ms(1_000));
    }

    #[test]
    fn interrupts_bring_steps_forward_but_never_end_criu_early() {
        let mut steps = Steps::new(limit(120));
        assert_eq!(steps.interrupt(ms(100)), Some(Step::RollBack));
        assert_eq!(steps.interrupt(ms(200)), Some(Step::EndChildren));
        assert_eq!(steps.interrupt(ms(300)), None);
        assert_eq!(steps.wait(ms(300)), ms(119_700));
        assert_eq!(steps.due(ms(120_000)), Some(Step::EndCriu));
        assert_eq!(steps.interrupt(ms(120_001)), None);
    }
}
