//! Random numbers for synthetic workloads.

use permafrost_scheduling::policy::SplitMix64;

/// Generator of random numbers of several distributions.
#[derive(Clone, Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// Makes a generator from a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// Returns a number from 0 up to, but not including, 1.
    pub fn uniform(&mut self) -> f64 {
        (self.0.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns an integer from 0 up to, but not including, `below`; 0 if that is 0.
    pub fn below(&mut self, below: u64) -> u64 {
        self.0.below(below)
    }

    /// Returns a number of the exponential distribution with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.uniform()).ln()
    }

    /// Returns a number of the standard normal distribution (Box and Muller 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Returns a number of the log-normal distribution with this median and this standard deviation of the
    /// logarithm.
    pub fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        median * (sigma * self.normal()).exp()
    }

    /// Returns the index of one of the `weights`, with a probability proportional to it.
    pub fn weighted(&mut self, weights: &[f64]) -> usize {
        let mut left = self.uniform() * weights.iter().sum::<f64>();
        for (index, weight) in weights.iter().enumerate() {
            if left < *weight {
                return index;
            }
            left -= weight;
        }
        weights.len().saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_numbers_are_those_of_the_published_algorithm() {
        let mut random = Random::new(1_234_567);
        let first: Vec<u64> = (0..3).map(|_| random.0.bits()).collect();
        assert_eq!(
            first,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn the_distributions_have_their_means() {
        let mut random = Random::new(7);
        let count = 100_000;
        let mean = |draw: &mut dyn FnMut() -> f64| {
            (0..count).map(|_| draw()).sum::<f64>() / f64::from(count)
        };
        assert!((mean(&mut || random.uniform()) - 0.5).abs() < 0.01);
        assert!((mean(&mut || random.exponential(3.0)) - 3.0).abs() < 0.05);
        assert!(mean(&mut || random.normal()).abs() < 0.02);
        let expected = (0.5_f64 * 0.25).exp();
        assert!((mean(&mut || random.log_normal(1.0, 0.5)) - expected).abs() < 0.02);
        assert!((mean(&mut || random.weighted(&[1.0, 3.0]) as f64) - 0.75).abs() < 0.01);
        assert!((mean(&mut || random.below(11) as f64) - 5.0).abs() < 0.05);
    }
}
