//! Measured limit of concurrent transfers: as many as still raise the sum of their rates.
//!
//! Paper 000 runs dumps one after the other, as two writes on one disk only alternate, and keep two tasks frozen
//! where one would do. More are worth while on a medium that serves several at once (memory, an SSD with deep
//! queues), or where a start moves no bytes. This module measures the limit by climbing: it tries one more for a few
//! transfers and keeps it if the rate rises, and it tries to do without the last one.
//!
//! **Measurement.** A transfer that moved `bytes` in `elapsed` while on average `beside` ran, itself included, had
//! 1/`beside` of the medium's rate: `bytes / elapsed × beside` is the rate of all together. The logarithms of these
//! rates are kept for each limit, weighted by the durations: a short transfer is mostly its start. Differences
//! between sizes are noise to them.
//!
//! **Changes.** One more must raise the mean by [`margin`](ConcurrencyConfig::margin), or by half of the possible
//! gain where that is less (one more beside 9 brings 11 % at the best); half of that keeps one that runs. A
//! difference counts only when it is 2.5 times its own standard error away from that, so noise decides nothing: a
//! trial that is undecided after [`longest_trial`](ConcurrencyConfig::longest_trial) transfers changes nothing. After
//! a trial that changed nothing, or took back the change of the previous one, the next comes after twice the
//! transfers.

use std::collections::VecDeque;

use permafrost_api_types::quantity::{Bytes, BytesPerSecond, Ratio, Seconds};

/// Parameters of [`Concurrency`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConcurrencyConfig {
    /// Limit at first. 2: while one transfer starts or ends, another moves its bytes.
    pub start: usize,
    /// Highest limit. 16: more than that never raised the rate of a medium without each transfer taking much longer.
    pub most: usize,
    /// Relative gain of the total rate that one more transfer must bring. 0.1.
    pub margin: Ratio,
    /// Number of transfers after which a trial that decided nothing ends. 32.
    pub longest_trial: usize,
    /// Number of transfers between two trials at first. 8.
    pub pause: usize,
    /// Maximum number of transfers between two trials: trials become rarer while they change nothing. 1024.
    pub longest_pause: usize,
}

impl Default for ConcurrencyConfig {
    fn default() -> Self {
        Self {
            start: 2,
            most: 16,
            margin: Ratio::new(0.1).unwrap_or(Ratio::ZERO),
            longest_trial: 32,
            pause: 8,
            longest_pause: 1024,
        }
    }
}

/// A dump or a restore that has run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FinishedTurn {
    /// Number of bytes moved.
    pub bytes: Bytes,
    /// Duration of the transfer.
    pub elapsed: Seconds,
    /// Average number of transfers that ran meanwhile, itself included. [`Concurrency`] ignores a value that is not
    /// finite or clearly below 1.
    pub beside: f64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Concurrency {
    config: ConcurrencyConfig,
    settled: usize,
    trial: Option<Trial>,
    /// Levels by the number of concurrent transfers: that of one first.
    levels: Vec<Level>,
    /// Number of transfers at the full limit since the last trial.
    since_trial: usize,
    pause: usize,
    /// True if the next trial is of one less.
    down_next: bool,
    /// True if the last change was to one less.
    went_down: bool,
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    level: usize,
    turns: usize,
}

/// Logarithms of the total rates at one limit, and their weights; the latest last.
#[derive(Clone, Debug, Default)]
struct Level {
    samples: VecDeque<(f64, f64)>,
}

/// Number of samples that are remembered for a level.
const REMEMBERED: usize = 32;

/// Largest distance of `beside` from a whole number: a transfer further away ran at two levels, and is no sample of
/// either.
const TOLERANCE: f64 = 0.3;

/// Least effective number of transfers in a mean: with fewer, a few heavy transfers decide it.
const LEAST_EFFECTIVE: f64 = 3.0;

/// Number of standard errors from which a difference is significant.
const STANDARD_ERRORS: f64 = 2.5;

impl Level {
    fn push(&mut self, sample: (f64, f64)) {
        if self.samples.len() >= REMEMBERED {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
    }

    /// Returns the weighted mean, and the square of its standard error; `None` with too few samples.
    fn mean(&self) -> Option<(f64, f64)> {
        let sum = self.samples.iter().map(|sample| sample.1).sum::<f64>();
        let weighed = self.samples.iter().map(|(sample, weight)| sample * weight);
        let mean = weighed.sum::<f64>() / sum;
        let squares = self.samples.iter().map(|sample| sample.1.powi(2));
        let effective = sum * sum / squares.sum::<f64>();
        // `effective` is NaN where nothing was measured.
        if effective.is_nan() || effective < LEAST_EFFECTIVE {
            return None;
        }
        let errors = self
            .samples
            .iter()
            .map(|(sample, weight)| (weight * (sample - mean)).powi(2));
        let squared = errors.sum::<f64>() / (sum * sum);
        Some((mean, squared * effective / (effective - 1.0)))
    }
}

/// Result of a trial, about the larger of two limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pays,
    DoesNot,
    Undecided,
}

impl Concurrency {
    /// Makes a limit without measurements.
    #[must_use]
    pub fn new(config: ConcurrencyConfig) -> Self {
        let config = ConcurrencyConfig {
            most: config.most.clamp(1, 1024),
            ..config
        };
        Self {
            config,
            settled: config.start.clamp(1, config.most),
            trial: None,
            levels: vec![Level::default(); config.most],
            since_trial: 0,
            pause: config.pause,
            down_next: false,
            went_down: false,
        }
    }

    /// Returns the number of transfers that may run now.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.trial.map_or(self.settled, |trial| trial.level)
    }

    /// Returns the limit that was found best so far; a trial may allow one more or less for a while.
    #[must_use]
    pub const fn settled(&self) -> usize {
        self.settled
    }

    /// Learns from a finished transfer. One that moved nothing, or whose figures are not valid, is ignored. O(1).
    pub fn finished(&mut self, turn: &FinishedTurn) {
        let Some((level, sample)) = self.sample(turn) else {
            return;
        };
        let Some(measured) = self.levels.get_mut(level - 1) else {
            return;
        };
        measured.push(sample);
        match &mut self.trial {
            Some(trial) if trial.level == level => {
                trial.turns += 1;
                let trial = *trial;
                self.judge(trial);
            }
            None if level == self.settled => {
                self.since_trial += 1;
                self.try_another();
            }
            // The transfer ran when the limit changed, or the queue was empty.
            _ => {}
        }
    }

    fn sample(&self, turn: &FinishedTurn) -> Option<(usize, (f64, f64))> {
        let beside = turn.beside;
        if !beside.is_finite() || beside < 1.0 - TOLERANCE {
            return None;
        }
        let rounded = beside.round().max(1.0);
        if (beside - rounded).abs() > TOLERANCE {
            return None;
        }
        let mut numbers = 1..=self.config.most;
        let level = numbers.find(|number| *number as f64 >= rounded)?;
        let rate = BytesPerSecond::measured(turn.bytes, turn.elapsed).ok()?;
        let logarithm = (rate.value() * beside).ln();
        Some((level, (logarithm, turn.elapsed.value())))
    }

    /// Returns the least number of transfers by which a level is judged: each slot was used twice.
    fn enough(&self, level: usize) -> usize {
        (2 * level).clamp(4, REMEMBERED.min(self.config.longest_trial.max(4)))
    }

    fn try_another(&mut self) {
        let here = &self.levels[self.settled - 1];
        if self.since_trial < self.pause || here.samples.len() < self.enough(self.settled) {
            return;
        }
        let up = (self.settled < self.config.most).then_some(self.settled + 1);
        let down = (self.settled > 1).then_some(self.settled - 1);
        let level = if self.down_next {
            down.or(up)
        } else {
            up.or(down)
        };
        let Some(level) = level else {
            return;
        };
        self.down_next = level > self.settled;
        self.levels[level - 1].samples.clear();
        self.trial = Some(Trial { level, turns: 0 });
    }

    fn judge(&mut self, trial: Trial) {
        if trial.turns < self.enough(trial.level) {
            return;
        }
        let verdict = match self.verdict(trial.level.min(self.settled)) {
            Verdict::Undecided if trial.turns < self.config.longest_trial => return,
            verdict => verdict,
        };
        let moved = match verdict {
            Verdict::Pays => trial.level > self.settled,
            Verdict::DoesNot => trial.level < self.settled,
            Verdict::Undecided => false,
        };
        self.trial = None;
        self.since_trial = 0;
        let down = trial.level < self.settled;
        if moved {
            self.settled = trial.level;
            self.down_next = down;
        }
        if moved && down == self.went_down {
            // Continue in this direction, and soon.
            self.pause = self.config.pause;
        } else {
            self.pause = (self.pause.max(1) * 2).min(self.config.longest_pause.max(1));
        }
        self.went_down = if moved { down } else { self.went_down };
    }

    /// Judges whether one more transfer than `fewer` raises the sum of the rates by the wanted margin.
    fn verdict(&self, fewer: usize) -> Verdict {
        let means = (self.levels.get(fewer - 1)).zip(self.levels.get(fewer));
        let Some(((before, before_error), (after, after_error))) =
            means.and_then(|(before, after)| before.mean().zip(after.mean()))
        else {
            return Verdict::Undecided;
        };
        let at_best = 1.0 / fewer as f64;
        let wanted = self.config.margin.value().min(at_best / 2.0);
        // A transfer that runs already needs to bring less to stay: the limit does not alternate between two levels
        // with equal rates.
        let wanted = if fewer < self.settled {
            wanted / 2.0
        } else {
            wanted
        };
        let gained = after - before - wanted.ln_1p();
        let error = STANDARD_ERRORS * (before_error + after_error).sqrt();
        if gained >= error {
            Verdict::Pays
        } else if gained < -error {
            Verdict::DoesNot
        } else {
            Verdict::Undecided
        }
    }
}

#[cfg(test)]
mod tests;
