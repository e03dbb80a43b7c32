//! Random choices that can be repeated by their seed.

use std::time::Duration;

/// Returns a number from the environment.
///
/// # Panics
/// It is none.
#[must_use]
pub fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| {
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name}={value} is no number"))
    })
}

/// The splitmix64 generator: small, and the same on every machine.
pub struct Random(u64);

impl Random {
    /// Makes a generator from `PERMAFROST_SEED`, or from a fresh seed, and prints the seed.
    #[must_use]
    pub fn seeded() -> Self {
        let seed = from_env("PERMAFROST_SEED").unwrap_or_else(|| u64::from(std::process::id()));
        println!("PERMAFROST_SEED={seed}");
        Self(seed)
    }

    /// Makes a generator from a seed.
    #[must_use]
    pub const fn of(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns a number less than `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    /// Returns an index into `len` things.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(u64::try_from(len).unwrap_or(1).max(1))).unwrap_or(0)
    }

    /// Returns a duration less than `limit`.
    pub fn time(&mut self, limit: Duration) -> Duration {
        let micros = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.below(micros.max(1)))
    }
}
