//! Slows answers down while dumps and restores run.
//!
//! A thread priority is not enough: schedulers of processors that weigh sessions or services against each other
//! rank a thread only among those of its own daemon, and CRIU is another. So while something moves here,
//! answers are made one at a time, with pauses between them. No request is refused, and a caller with few
//! requests does not notice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, OwnedMutexGuard};

/// Divisor for the share of one processor that answers take meanwhile: a quarter.
const PART: u32 = 4;

/// Longest pause: an answer that took as long as this was slow anyway.
const LONGEST: Duration = Duration::from_millis(500);

/// Time at which the next answer may be made.
#[derive(Debug)]
pub(super) struct Pace {
    next: Arc<Mutex<Instant>>,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            next: Arc::new(Mutex::new(Instant::now())),
        }
    }
}

/// Slot of an answer: no other answer is made meanwhile.
#[derive(Debug)]
pub(super) struct Turn(OwnedMutexGuard<Instant>);

impl Pace {
    /// Waits for the slot, in the order of the calls.
    pub(super) async fn turn(&self) -> Turn {
        let next = Arc::clone(&self.next).lock_owned().await;
        tokio::time::sleep_until((*next).into()).await;
        Turn(next)
    }
}

impl Turn {
    /// Ends the slot of an answer that was made by `now` and took `took`.
    pub(super) fn over(mut self, now: Instant, took: Duration) {
        *self.0 = now + pause(took);
    }
}

fn pause(took: Duration) -> Duration {
    took.saturating_mul(PART - 1).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_of_the_time_is_answers() {
        let took = Duration::from_millis(2);
        assert_eq!(took + pause(took), Duration::from_millis(8));
        assert_eq!(pause(Duration::from_secs(9)), LONGEST);
    }

    #[tokio::test]
    async fn turns_come_one_after_the_other_and_not_before_the_pause_is_over() {
        let pace = Pace::default();
        let first = pace.turn().await;
        let second = pace.turn();
        tokio::pin!(second);
        let too_soon = tokio::time::timeout(Duration::ZERO, &mut second).await;
        assert!(too_soon.is_err());
        let over = Instant::now();
        first.over(over, Duration::from_millis(10));
        let second = second.await;
        assert!(Instant::now() >= over + Duration::from_millis(30));
        // A request that gives up its slot leaves it to the next.
        drop(second);
        pace.turn().await;
    }
}
