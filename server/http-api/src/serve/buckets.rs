//! Rate limiter for requests: a bucket of tokens for each caller.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Rate;

/// Number of callers that are remembered before idle ones are forgotten. Only authenticated callers get a
/// bucket, so that many certificates or tokens are needed to reach it.
const REMEMBERED: usize = 4_096;

/// Buckets of all callers.
#[derive(Debug)]
pub(super) struct Buckets {
    rate: Mutex<Rate>,
    of: Mutex<HashMap<String, Bucket>>,
}

/// A bucket of tokens, full when it is made.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Buckets {
    pub(super) fn new(rate: Rate) -> Self {
        Self {
            rate: Mutex::new(at_least_one(rate)),
            of: Mutex::default(),
        }
    }

    /// Replaces the rate. Tokens above the new burst are lost at the next request of their caller.
    pub(super) fn set_rate(&self, rate: Rate) {
        *self.rate.lock() = at_least_one(rate);
    }

    /// Takes a token of `caller`'s.
    ///
    /// # Errors
    /// There is no token: the time until there is one.
    pub(super) fn take(&self, caller: &str, now: Instant) -> Result<(), Duration> {
        let rate = *self.rate.lock();
        let per_s = f64::from(rate.per_s);
        let burst = f64::from(rate.burst);
        let refilled = |bucket: &Bucket| {
            let passed = now.saturating_duration_since(bucket.at).as_secs_f64();
            (bucket.tokens + passed * per_s).min(burst)
        };
        // No operation under the lock can be left half done.
        let mut of = self.of.lock();
        if of.len() >= REMEMBERED && !of.contains_key(caller) {
            of.retain(|_, bucket| refilled(bucket) < burst);
        }
        if !of.contains_key(caller) {
            let full = Bucket {
                tokens: burst,
                at: now,
            };
            of.insert(caller.to_owned(), full);
        }
        let Some(bucket) = of.get_mut(caller) else {
            return Ok(());
        };
        let tokens = refilled(bucket);
        bucket.at = bucket.at.max(now);
        if tokens >= 1.0 {
            bucket.tokens = tokens - 1.0;
            return Ok(());
        }
        bucket.tokens = tokens;
        Err(Duration::from_secs_f64((1.0 - tokens) / per_s))
    }
}

fn at_least_one(rate: Rate) -> Rate {
    Rate {
        per_s: rate.per_s.max(1),
        burst: rate.burst.max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_rate_holds_from_the_next_request_on() {
        let buckets = Buckets::new(Rate { per_s: 1, burst: 4 });
        let now = Instant::now();
        buckets.take("a", now).unwrap();
        buckets.set_rate(Rate { per_s: 1, burst: 1 });
        buckets.take("a", now).unwrap();
        assert!(
            buckets.take("a", now).is_err(),
            "the tokens of the rate before are gone"
        );
        buckets.set_rate(Rate {
            per_s: 1000,
            burst: 1,
        });
        buckets.take("a", now + Duration::from_millis(1)).unwrap();
    }

    #[test]
    fn a_burst_passes_and_then_the_rate() {
        let buckets = Buckets::new(Rate {
            per_s: 10,
            burst: 3,
        });
        let now = Instant::now();
        for _ in 0..3 {
            buckets.take("a", now).unwrap();
        }
        let wait = buckets.take("a", now).unwrap_err();
        assert!((wait.as_secs_f64() - 0.1).abs() < 1e-6, "{wait:?}");
        // Another caller has a bucket of its own.
        buckets.take("b", now).unwrap();
        buckets.take("a", now + Duration::from_millis(101)).unwrap();
        assert!(buckets.take("a", now + Duration::from_millis(102)).is_err());
        // A long pause fills the bucket, and no more.
        let later = now + Duration::from_secs(60);
        for _ in 0..3 {
            buckets.take("a", later).unwrap();
        }
        assert!(buckets.take("a", later).is_err());
    }

    #[test]
    fn a_clock_that_stands_still_or_an_older_moment_gives_nothing() {
        let buckets = Buckets::new(Rate { per_s: 1, burst: 1 });
        let now = Instant::now() + Duration::from_secs(10);
        buckets.take("a", now).unwrap();
        assert!(buckets.take("a", now - Duration::from_secs(5)).is_err());
        assert!(buckets.take("a", now).is_err());
    }

    #[test]
    fn quiet_callers_are_forgotten_and_busy_ones_are_not() {
        let buckets = Buckets::new(Rate { per_s: 1, burst: 2 });
        let now = Instant::now();
        for caller in 0..REMEMBERED - 1 {
            buckets.take(&caller.to_string(), now).unwrap();
        }
        let later = now + Duration::from_secs(5);
        buckets.take("busy", later).unwrap();
        buckets.take("busy", later).unwrap();
        buckets.take("new", later).unwrap();
        assert_eq!(buckets.of.lock().len(), 2);
        assert!(buckets.take("busy", later).is_err());
    }
}
