//! How fast nodes and links are, from what their transfers took.
//!
//! A *channel* is one direction of one tier of one node, or the link from one node to another. Its transfers are kept
//! by size class, as small ones are ruled by latency and large ones by bandwidth. Pure: samples and the time come in.

mod window;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::NodeId;
use crate::figure::{Estimate, Figure, Missing, What};
use crate::quantity::{Bytes, BytesPerSecond, Moment, QuantityError, Seconds};
use window::Quantiles;
pub(crate) use window::{Window, Worse};

/// Kind of medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Persistent memory.
    Nvm,
    /// Flash.
    Ssd,
    /// Spinning disks.
    Hdd,
    /// One that the operator named, numbered by the caller.
    Named(u16),
}

/// Which way pages go, seen from the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Out of it: restores.
    Read,
    /// Into it: dumps.
    Write,
}

/// What a bandwidth is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Channel {
    /// A tier of a node.
    Medium {
        /// Node.
        node: NodeId,
        /// Its tier.
        tier: Tier,
        /// Read or write.
        direction: Direction,
    },
    /// From one node to another.
    Link {
        /// Sender.
        from: NodeId,
        /// Receiver.
        to: NodeId,
    },
}

impl Channel {
    fn bandwidth(self) -> What {
        match self {
            Self::Medium {
                direction: Direction::Read,
                ..
            } => What::ReadBandwidth,
            Self::Medium {
                direction: Direction::Write,
                ..
            } => What::WriteBandwidth,
            Self::Link { .. } => What::LinkBandwidth,
        }
    }

    fn is_of(self, node: NodeId) -> bool {
        match self {
            Self::Medium { node: of, .. } => of == node,
            Self::Link { from, to } => from == node || to == node,
        }
    }
}

/// Number of size classes.
const CLASSES: usize = 4;
/// Where a class ends: 1 MiB is where latency stops to rule, 1 GiB where caches do.
const CLASS_ENDS: [u64; CLASSES - 1] = [1 << 20, 64 << 20, 1 << 30];

fn class_of(size: Bytes) -> usize {
    CLASS_ENDS.partition_point(|&end| size.count() >= end)
}

/// One transfer, as it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// When it ended.
    pub at: Moment,
    /// What was moved.
    pub bytes: Bytes,
    /// How long it took, the time in a queue not counted.
    pub elapsed: Seconds,
}

/// A sample that was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
pub enum Refused {
    /// No rate at all: nothing moved, or in no time.
    #[error("the transfer has no rate")]
    NoRate(#[from] QuantityError),
    /// Slower or faster than anything there is.
    #[error("{rate} is not between {slowest} and {fastest}")]
    Implausible {
        /// What was reported.
        rate: BytesPerSecond,
        /// Slowest believed.
        slowest: BytesPerSecond,
        /// Fastest believed.
        fastest: BytesPerSecond,
    },
    /// It ended before the one reported before it.
    #[error("the report lies {by} before the one before it")]
    Backwards {
        /// How much.
        by: Seconds,
    },
    /// It has not ended yet.
    #[error("the report lies {by} in the future")]
    Future {
        /// How much.
        by: Seconds,
    },
    /// No room for another channel.
    #[error("there are {limit} channels already")]
    TooManyChannels {
        /// How many there may be.
        limit: usize,
    },
}

/// How samples are judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EstimatorConfig {
    /// After this long a sample weighs half. Shorter follows changes sooner, longer is steadier. 5 minutes.
    pub half_life: Seconds,
    /// After this long a figure does not hold any more. 1 hour: idle nodes probe themselves far more often.
    pub stale_after: Seconds,
    /// Rates below are not believed. 1 kB/s: slower than any medium that works.
    pub slowest: BytesPerSecond,
    /// Rates above are not believed. 1 TB/s: twice what the memory of one machine does.
    pub fastest: BytesPerSecond,
    /// How far reports of one channel may be out of order, as concurrent transfers report when they like. 10 s.
    pub disorder: Seconds,
    /// Refused reports in a row after which a channel's figures are not believed either. 3.
    pub distrust_after: u32,
    /// Channels at most; each takes at most about 5 KiB. 100,000.
    pub channels: usize,
}

impl Default for EstimatorConfig {
    fn default() -> Self {
        Self {
            half_life: Seconds::clamped(300.0),
            stale_after: Seconds::clamped(3600.0),
            slowest: BytesPerSecond::clamped(1e3),
            fastest: BytesPerSecond::clamped(1e12),
            disorder: Seconds::clamped(10.0),
            distrust_after: 3,
            channels: 100_000,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Samples {
    rates: [Window; CLASSES],
    latency: Window,
    newest: Moment,
    refused: u32,
    refused_ever: u64,
}

/// Samples by channel.
#[derive(Clone, Debug, Default)]
pub struct Estimator {
    config: EstimatorConfig,
    channels: HashMap<Channel, Samples>,
}

/// Samples of its own that a size class needs before it is gone by; below that its neighbours are asked.
const ENOUGH: u32 = 3;

impl Estimator {
    /// One without samples.
    #[must_use]
    pub fn new(config: EstimatorConfig) -> Self {
        Self {
            config,
            channels: HashMap::new(),
        }
    }

    /// Takes in a finished transfer.
    ///
    /// # Errors
    ///
    /// [`Refused`] if it cannot be true. After a few in a row the channel has no figures until it reports sensibly.
    pub fn transferred(
        &mut self,
        channel: Channel,
        now: Moment,
        transfer: Transfer,
    ) -> Result<(), Refused> {
        let config = self.config;
        let samples = self.samples(channel)?;
        let checked = samples
            .check_time(&config, now, transfer.at)
            .and_then(|()| plausible(&config, transfer));
        match checked {
            Ok(rate) => {
                samples.accept(transfer.at);
                if let Some(window) = samples.rates.get_mut(class_of(transfer.bytes)) {
                    window.push(transfer.at, rate.value());
                }
                Ok(())
            }
            Err(refused) => Err(samples.refuse(refused)),
        }
    }

    /// Takes in how long the channel took at `at` to answer at all, or to begin: what every transfer pays once.
    ///
    /// # Errors
    ///
    /// [`Refused`] if the time of the report cannot be true.
    pub fn answered(
        &mut self,
        channel: Channel,
        now: Moment,
        at: Moment,
        latency: Seconds,
    ) -> Result<(), Refused> {
        let config = self.config;
        let samples = self.samples(channel)?;
        if let Err(refused) = samples.check_time(&config, now, at) {
            return Err(samples.refuse(refused));
        }
        samples.accept(at);
        // Below a microsecond the clock is measured.
        samples.latency.push(at, latency.value().max(1e-6));
        Ok(())
    }

    /// Forgets a node that has gone or whose clock began anew, and its links.
    pub fn forget(&mut self, node: NodeId) {
        self.channels.retain(|channel, _| !channel.is_of(node));
    }

    /// Reports of a channel that were refused since it is known.
    #[must_use]
    pub fn refused(&self, channel: Channel) -> u64 {
        self.channels
            .get(&channel)
            .map_or(0, |samples| samples.refused_ever)
    }

    /// Bandwidths of a channel by size. Sorts up to 256 samples: take it once a second and node, not once an answer.
    #[must_use]
    pub fn rates(&self, channel: Channel, now: Moment) -> SizedRates {
        let what = channel.bandwidth();
        let samples = match self.believed(channel, what) {
            Ok(samples) => samples,
            Err(why) => return SizedRates::uniform(Figure::Unknown { why }),
        };
        let classes = samples.rates.each_ref().map(|window| {
            window.quantiles(
                now,
                self.config.half_life,
                self.config.stale_after,
                Worse::Low,
            )
        });
        let mut figures = [Figure::Unknown {
            why: self.stale(samples, now, what),
        }; CLASSES];
        for (class, figure) in figures.iter_mut().enumerate() {
            if let Some((quantiles, distance)) = nearest(&classes, class) {
                // A neighbour's rate is off by what latency makes of the other size: the slow end is kept wide.
                let wide = f64::from(distance).exp2();
                *figure = Figure::Known(Estimate {
                    p50: BytesPerSecond::clamped(quantiles.p50),
                    p95: BytesPerSecond::clamped(quantiles.p95 / wide),
                    age: now.since(quantiles.newest),
                    samples: quantiles.samples,
                });
            }
        }
        SizedRates(figures)
    }

    /// Latency of a channel.
    #[must_use]
    pub fn latency(&self, channel: Channel, now: Moment) -> Figure<Seconds> {
        let what = What::Latency;
        let samples = match self.believed(channel, what) {
            Ok(samples) => samples,
            Err(why) => return Figure::Unknown { why },
        };
        let quantiles = samples.latency.quantiles(
            now,
            self.config.half_life,
            self.config.stale_after,
            Worse::High,
        );
        match quantiles {
            Some(quantiles) => Figure::Known(Estimate {
                p50: Seconds::clamped(quantiles.p50),
                p95: Seconds::clamped(quantiles.p95),
                age: now.since(quantiles.newest),
                samples: quantiles.samples,
            }),
            None if samples.latency.newest().is_none() => Missing::NotMeasured { what }.into(),
            None => self.stale(samples, now, what).into(),
        }
    }

    fn samples(&mut self, channel: Channel) -> Result<&mut Samples, Refused> {
        let limit = self.config.channels;
        if self.channels.len() >= limit && !self.channels.contains_key(&channel) {
            return Err(Refused::TooManyChannels { limit });
        }
        Ok(self.channels.entry(channel).or_default())
    }

    fn believed(&self, channel: Channel, what: What) -> Result<&Samples, Missing> {
        let samples = self
            .channels
            .get(&channel)
            .ok_or(Missing::NotMeasured { what })?;
        if samples.refused >= self.config.distrust_after {
            let refused = samples.refused;
            return Err(Missing::NotBelieved { what, refused });
        }
        Ok(samples)
    }

    fn stale(&self, samples: &Samples, now: Moment, what: What) -> Missing {
        if samples.newest == Moment::default() {
            return Missing::NotMeasured { what };
        }
        Missing::TooOld {
            what,
            age: now.since(samples.newest),
            limit: self.config.stale_after,
        }
    }
}

impl Samples {
    fn check_time(&self, config: &EstimatorConfig, now: Moment, at: Moment) -> Result<(), Refused> {
        if at > now {
            return Err(Refused::Future { by: at.since(now) });
        }
        let by = self.newest.since(at);
        if by > config.disorder {
            return Err(Refused::Backwards { by });
        }
        Ok(())
    }

    fn accept(&mut self, at: Moment) {
        self.newest = self.newest.max(at);
        self.refused = 0;
    }

    fn refuse(&mut self, refused: Refused) -> Refused {
        self.refused = self.refused.saturating_add(1);
        self.refused_ever = self.refused_ever.saturating_add(1);
        refused
    }
}

fn plausible(config: &EstimatorConfig, transfer: Transfer) -> Result<BytesPerSecond, Refused> {
    let rate = BytesPerSecond::measured(transfer.bytes, transfer.elapsed)?;
    if rate < config.slowest || rate > config.fastest {
        return Err(Refused::Implausible {
            rate,
            slowest: config.slowest,
            fastest: config.fastest,
        });
    }
    Ok(rate)
}

/// The nearest class with enough samples, else the nearest with any, and how far away it is.
fn nearest(classes: &[Option<Quantiles>; CLASSES], class: usize) -> Option<(Quantiles, u32)> {
    let known = classes.iter().enumerate().filter_map(|(other, quantiles)| {
        let quantiles = (*quantiles)?;
        let distance = u32::try_from(other.abs_diff(class)).unwrap_or(u32::MAX);
        Some((quantiles, distance))
    });
    known.min_by_key(|(quantiles, distance)| (quantiles.samples < ENOUGH, *distance))
}

/// Bandwidths of one channel by the size of what is moved.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SizedRates([Figure<BytesPerSecond>; CLASSES]);

impl SizedRates {
    /// The same for every size.
    #[must_use]
    pub const fn uniform(figure: Figure<BytesPerSecond>) -> Self {
        Self([figure; CLASSES])
    }

    /// For transfers of `size`.
    #[must_use]
    pub fn of(&self, size: Bytes) -> Figure<BytesPerSecond> {
        let [.., largest] = self.0;
        self.0.get(class_of(size)).copied().unwrap_or(largest)
    }

    /// For a long row of transfers: what empties a queue.
    #[must_use]
    pub const fn sustained(&self) -> Figure<BytesPerSecond> {
        let [.., largest] = self.0;
        largest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: Channel = Channel::Medium {
        node: NodeId(1),
        tier: Tier::Nvm,
        direction: Direction::Write,
    };

    fn second(n: u64) -> Moment {
        Moment::from_micros(n * 1_000_000)
    }

    /// `mib` MiB in one second, at second `n`.
    fn one_second(n: u64, mib: u64) -> Transfer {
        Transfer {
            at: second(n),
            bytes: Bytes::mib(mib),
            elapsed: Seconds::from_millis(1000),
        }
    }

    fn measured() -> Estimator {
        let mut estimator = Estimator::default();
        for n in 1..=20 {
            estimator
                .transferred(NODE, second(n), one_second(n, 2048))
                .unwrap();
        }
        estimator
    }

    #[test]
    fn a_bandwidth_has_its_age_and_its_number_of_samples() {
        let figure = measured()
            .rates(NODE, second(25))
            .of(Bytes::mib(4096))
            .known()
            .unwrap();
        assert!((figure.p50.value() / Bytes::mib(2048).count() as f64 - 1.0).abs() < 1e-6);
        assert!(figure.p95 < figure.p50);
        assert_eq!(
            (figure.age, figure.samples),
            (Seconds::from_millis(5000), 20)
        );
    }

    #[test]
    fn a_size_without_samples_takes_its_neighbours_with_a_wider_spread() {
        let rates = measured().rates(NODE, second(20));
        let own = rates.of(Bytes::mib(4096)).known().unwrap();
        let next = rates.of(Bytes::mib(100)).known().unwrap();
        assert_eq!(own.p50, next.p50);
        assert!(next.p95.value() <= own.p95.value() / 2.0);
    }

    #[test]
    fn what_was_never_measured_and_what_is_too_old_are_told_apart() {
        let estimator = measured();
        let other = Channel::Link {
            from: NodeId(1),
            to: NodeId(2),
        };
        assert_eq!(
            estimator.rates(other, second(1)).sustained().known(),
            Err(Missing::NotMeasured {
                what: What::LinkBandwidth
            })
        );
        let late = estimator
            .rates(NODE, second(20 + 3601))
            .sustained()
            .known()
            .unwrap_err();
        assert!(matches!(late, Missing::TooOld { age, .. } if age.value() == 3601.0));
        assert_eq!(
            estimator.latency(NODE, second(20)).known(),
            Err(Missing::NotMeasured {
                what: What::Latency
            })
        );
    }

    #[test]
    fn a_node_that_lies_is_refused_then_distrusted_then_forgiven() {
        let mut estimator = measured();
        let honest = estimator.rates(NODE, second(30));
        let lie = |bytes, millis, at| Transfer {
            at: second(at),
            bytes: Bytes::new(bytes),
            elapsed: Seconds::from_millis(millis),
        };
        let now = second(30);
        let nothing = estimator.transferred(NODE, now, lie(0, 1000, 30));
        assert!(matches!(nothing, Err(Refused::NoRate(_))));
        let everything = estimator.transferred(NODE, now, lie(u64::MAX / 10, 1000, 30));
        assert!(
            matches!(
                everything,
                Err(Refused::Implausible { .. } | Refused::NoRate(_))
            ),
            "{everything:?}"
        );
        // Two lies change nothing.
        assert_eq!(estimator.rates(NODE, now), honest);
        let past = estimator.transferred(NODE, now, one_second(2, 1));
        assert!(matches!(past, Err(Refused::Backwards { by }) if by.value() == 18.0));
        assert_eq!(
            estimator.rates(NODE, now).sustained().known(),
            Err(Missing::NotBelieved {
                what: What::WriteBandwidth,
                refused: 3
            })
        );
        assert_eq!(estimator.refused(NODE), 3);
        estimator
            .transferred(NODE, now, one_second(30, 2048))
            .unwrap();
        assert!(estimator.rates(NODE, now).sustained().known().is_ok());
    }

    #[test]
    fn a_report_from_the_future_is_refused() {
        let refused = Estimator::default().transferred(NODE, second(1), one_second(2, 1));
        assert!(matches!(refused, Err(Refused::Future { .. })));
    }

    #[test]
    fn a_node_that_was_forgotten_may_begin_its_clock_anew() {
        let mut estimator = measured();
        estimator.forget(NodeId(1));
        assert!(
            estimator
                .transferred(NODE, second(30), one_second(1, 1))
                .is_ok()
        );
    }

    #[test]
    fn the_number_of_channels_is_bounded() {
        let mut estimator = Estimator::new(EstimatorConfig {
            channels: 1,
            ..EstimatorConfig::default()
        });
        let link = Channel::Link {
            from: NodeId(1),
            to: NodeId(2),
        };
        assert!(
            estimator
                .transferred(NODE, second(9), one_second(1, 1))
                .is_ok()
        );
        assert_eq!(
            estimator.answered(link, second(9), second(9), Seconds::ZERO),
            Err(Refused::TooManyChannels { limit: 1 })
        );
        assert!(
            estimator
                .answered(NODE, second(9), second(9), Seconds::ZERO)
                .is_ok()
        );
        let latency = estimator.latency(NODE, second(9)).known().unwrap();
        assert!(latency.p50.value() > 0.0 && latency.p95 > latency.p50);
    }
}
