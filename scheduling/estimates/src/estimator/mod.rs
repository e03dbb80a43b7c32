//! Estimated bandwidths of nodes and links, from the durations of their transfers.
//!
//! A *channel* is one direction of one tier of one node, or the link from one node to another. Its transfers are kept
//! by size class, as latency dominates small ones and bandwidth large ones. The estimator has no clock and does no
//! I/O: the caller passes samples and the time in.

mod line;
mod window;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::NodeId;
use crate::figure::{Estimate, Figure, Missing, What};
pub use permafrost_api_types::reserve::Direction;

use crate::quantity::{Bytes, BytesPerSecond, Moment, OutOfRange, Seconds};
pub use line::Line;
use line::Wholes;
use window::Quantiles;
pub(crate) use window::{Window, Worse};

/// Kind of medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MediumTier {
    /// Persistent memory (NVM).
    Nvm,
    /// Flash storage (SSD).
    Ssd,
    /// Magnetic hard disks.
    Hdd,
    /// Tier that the operator named, numbered by the caller.
    Named(u16),
    /// Object store. It is read rarely and not probed, so its figures hold for a month, and weigh half after a day.
    ObjectStore,
}

/// Channel that a bandwidth belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Channel {
    /// A tier of a node.
    Medium {
        /// Id of the node.
        node: NodeId,
        /// Tier of the node.
        tier: MediumTier,
        /// Read or write.
        direction: Direction,
    },
    /// Pages that a node brings to processes which it restores lazily; its figures are rare.
    Lazy {
        /// Id of the node.
        node: NodeId,
    },
    /// Link from one node to another.
    Link {
        /// Node that sends.
        from: NodeId,
        /// Node that receives.
        to: NodeId,
    },
}

impl Channel {
    fn bandwidth(self) -> What {
        match self {
            Self::Medium {
                tier: MediumTier::ObjectStore,
                ..
            } => What::RecallBandwidth,
            Self::Medium {
                direction: Direction::Read,
                ..
            } => What::ReadBandwidth,
            Self::Medium {
                direction: Direction::Write,
                ..
            } => What::WriteBandwidth,
            Self::Lazy { .. } => What::LazyBandwidth,
            Self::Link { .. } => What::LinkBandwidth,
        }
    }

    fn is_of(self, node: NodeId) -> bool {
        match self {
            Self::Medium { node: of, .. } | Self::Lazy { node: of } => of == node,
            Self::Link { from, to } => from == node || to == node,
        }
    }
}

/// Number of size classes.
const CLASSES: usize = 4;
/// Upper limits of the size classes: 1 MiB is where latency stops to dominate, 1 GiB where caches do.
const CLASS_ENDS: [u64; CLASSES - 1] = [1 << 20, 64 << 20, 1 << 30];

/// A size in each class.
const CLASS_SIZES: [u64; CLASSES] = [1 << 19, 8 << 20, 256 << 20, 2 << 30];

#[inline]
fn class_of(size: Bytes) -> usize {
    let is_beyond = |end: &&u64| size.count() >= **end;
    CLASS_ENDS.iter().filter(is_beyond).count()
}

/// Transfer with its measured duration.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// Time at which it ended.
    pub at: Moment,
    /// Number of bytes moved.
    pub bytes: Bytes,
    /// Duration of the transfer, without the time in a queue.
    pub elapsed: Seconds,
}

/// Measurements of a channel, as they are saved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedMeasurements {
    /// Transfers, in the order of their ends.
    pub transfers: Vec<Transfer>,
    /// Latencies, with the times at which they were measured, in order.
    pub latencies: Vec<(Moment, Seconds)>,
    /// Durations of whole transfers, in the order in which they were reported.
    pub wholes: Vec<Transfer>,
}

/// A sample that was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
pub enum Refused {
    /// The transfer has no rate: nothing moved, or in no time.
    #[error("the transfer has no rate")]
    NoRate(#[from] OutOfRange),
    /// Slower or faster than anything there is.
    #[error("{rate} is not between {slowest} and {fastest}")]
    Implausible {
        /// Rate that was reported.
        rate: BytesPerSecond,
        /// Slowest rate that is believed.
        slowest: BytesPerSecond,
        /// Fastest rate that is believed.
        fastest: BytesPerSecond,
    },
    /// The transfer ended before the one reported before it.
    #[error("the report lies {by} before the one before it")]
    Backwards {
        /// Time by which it ended earlier.
        by: Seconds,
    },
    /// The transfer has not ended yet.
    #[error("the report lies {by} in the future")]
    Future {
        /// Time until it ends.
        by: Seconds,
    },
    /// The estimator has no room for another channel.
    #[error("there are {limit} channels already")]
    TooManyChannels {
        /// Maximum number of channels.
        limit: usize,
    },
}

/// Limits and weights by which samples are judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EstimatorConfig {
    /// After this long a sample weighs half. Shorter follows changes sooner, longer is steadier. 5 minutes.
    pub half_life: Seconds,
    /// After this long a figure does not hold any more. 1 hour: idle nodes probe themselves far more often.
    pub stale_after: Seconds,
    /// Rates below are not believed. 1 kB/s: slower than any medium that works.
    pub slowest: BytesPerSecond,
    /// Rates above this are not believed. 1 TB/s: twice the bandwidth of one machine's memory.
    pub fastest: BytesPerSecond,
    /// Time by which reports of one channel may be out of order: concurrent transfers report in any order. 10 s.
    pub disorder: Seconds,
    /// Refused reports in a row after which a channel's figures are not believed either. 3.
    pub distrust_after: u32,
    /// Channels at most; each takes at most about 5 KiB. 100,000.
    pub channels: usize,
}

/// After this long a sample of an object store weighs half. A day.
const OBJECT_STORE_HALF_LIFE: Seconds = Seconds::ONE_DAY;

/// After this long a figure of an object store does not hold any more. 30 days: it is read when a cold checkpoint is
/// restored, which is rare, and nothing probes it.
pub const OBJECT_STORE_STALE_AFTER: Seconds = Seconds::THIRTY_DAYS;

/// Time for which figures of lazy restores hold, which are as rare as those of object stores.
pub const LAZY_STALE_AFTER: Seconds = OBJECT_STORE_STALE_AFTER;

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
    wholes: Wholes,
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

/// Number of samples from which a size class is estimated by itself; with fewer its neighbours are used.
const ENOUGH: u32 = 3;

impl Estimator {
    /// Makes an estimator without samples.
    #[must_use]
    pub fn new(config: EstimatorConfig) -> Self {
        Self {
            config,
            channels: HashMap::new(),
        }
    }

    /// Records a finished transfer.
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

    /// Records the time that the channel took at `at` to answer at all, or to begin: the fixed time of every
    /// transfer.
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

    /// Records the whole duration of a transfer, from the first preparation to the last clean-up.
    ///
    /// # Errors
    ///
    /// [`Refused`] if it cannot be true.
    pub fn took(&mut self, channel: Channel, now: Moment, whole: Transfer) -> Result<(), Refused> {
        let config = self.config;
        let samples = self.samples(channel)?;
        let checked = samples
            .check_time(&config, now, whole.at)
            // With its start it may be slower than any medium; only the existence of a rate is checked.
            .and_then(|()| Ok(BytesPerSecond::measured(whole.bytes, whole.elapsed)?));
        match checked {
            Ok(_) => {
                samples.accept(whole.at);
                samples.wholes.push(whole);
                Ok(())
            }
            Err(refused) => Err(samples.refuse(refused)),
        }
    }

    /// Replaces the duration of the whole transfer with this end and size. Returns true if there is one.
    pub fn correct(&mut self, channel: Channel, whole: Transfer) -> bool {
        let samples = self.channels.get_mut(&channel);
        samples.is_some_and(|samples| samples.wholes.correct(whole))
    }

    /// Returns the line through the whole transfers of a channel: their fixed time, and their rates by size. With a
    /// known `start` only the rates are fitted; where the sizes do not determine the start it is `unless_told`.
    /// `None` with fewer than three transfers. Compares all pairs of up to 64: call it once a second.
    #[must_use]
    pub fn line(
        &self,
        channel: Channel,
        now: Moment,
        start: Option<Seconds>,
        unless_told: Seconds,
    ) -> Option<Line> {
        let samples = self.believed(channel, channel.bandwidth()).ok()?;
        samples.wholes.line(&self.config, now, start, unless_told)
    }

    /// Returns the measurements of a channel, oldest first: the transfers as [`transferred`](Self::transferred) would
    /// take them (each of a size of its class), and the latencies. The caller saves them, and replays them after a
    /// restart.
    #[must_use]
    pub fn kept(&self, channel: Channel) -> SavedMeasurements {
        let Some(samples) = self.channels.get(&channel) else {
            return SavedMeasurements::default();
        };
        let mut transfers = Vec::new();
        for (window, bytes) in samples.rates.iter().zip(CLASS_SIZES) {
            let bytes = Bytes::new(bytes);
            transfers.extend(window.values().map(|(at, rate)| Transfer {
                at,
                bytes,
                elapsed: bytes.at(BytesPerSecond::clamped(rate)),
            }));
        }
        // Reports of a channel are to be in order.
        transfers.sort_by_key(|transfer| transfer.at);
        let latencies = samples.latency.values();
        SavedMeasurements {
            transfers,
            latencies: latencies
                .map(|(at, latency)| (at, Seconds::clamped(latency)))
                .collect(),
            wholes: samples.wholes.values().collect(),
        }
    }

    /// Forgets a node that has left or whose clock restarted, and its links.
    pub fn forget(&mut self, node: NodeId) {
        self.channels.retain(|channel, _| !channel.is_of(node));
    }

    /// Forgets the measurements of one channel.
    pub fn forget_channel(&mut self, channel: Channel) {
        self.channels.remove(&channel);
    }

    /// Returns the number of a channel's reports that were refused since the channel is known.
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
        let (half_life, stale_after) = self.ages(channel);
        let classes = samples
            .rates
            .each_ref()
            .map(|window| window.quantiles(now, half_life, stale_after, Worse::Low));
        let mut figures = [Figure::Unknown {
            why: stale(samples, now, what, stale_after),
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

    /// Returns the latency of a channel.
    #[must_use]
    pub fn latency(&self, channel: Channel, now: Moment) -> Figure<Seconds> {
        let what = What::Latency;
        let samples = match self.believed(channel, what) {
            Ok(samples) => samples,
            Err(why) => return Figure::Unknown { why },
        };
        let (half_life, stale_after) = self.ages(channel);
        let quantiles = samples
            .latency
            .quantiles(now, half_life, stale_after, Worse::High);
        match quantiles {
            Some(quantiles) => Figure::Known(Estimate {
                p50: Seconds::clamped(quantiles.p50),
                p95: Seconds::clamped(quantiles.p95),
                age: now.since(quantiles.newest),
                samples: quantiles.samples,
            }),
            None if samples.latency.newest().is_none() => Missing::NotMeasured { what }.into(),
            None => stale(samples, now, what, stale_after).into(),
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

    /// Returns the half-life of a channel's samples, and the time for which they hold.
    const fn ages(&self, channel: Channel) -> (Seconds, Seconds) {
        match channel {
            Channel::Medium {
                tier: MediumTier::ObjectStore,
                ..
            } => (OBJECT_STORE_HALF_LIFE, OBJECT_STORE_STALE_AFTER),
            Channel::Lazy { .. } => (OBJECT_STORE_HALF_LIFE, LAZY_STALE_AFTER),
            _ => (self.config.half_life, self.config.stale_after),
        }
    }
}

/// Returns the reason why there is no figure of samples that hold for so long.
fn stale(samples: &Samples, now: Moment, what: What, limit: Seconds) -> Missing {
    if samples.newest == Moment::default() {
        return Missing::NotMeasured { what };
    }
    Missing::TooOld {
        what,
        age: now.since(samples.newest),
        limit,
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

/// Returns the nearest class with enough samples, else the nearest with any, and its distance.
fn nearest(classes: &[Option<Quantiles>; CLASSES], class: usize) -> Option<(Quantiles, u32)> {
    let known = classes.iter().enumerate().filter_map(|(other, quantiles)| {
        let quantiles = (*quantiles)?;
        let distance = u32::try_from(other.abs_diff(class)).unwrap_or(u32::MAX);
        Some((quantiles, distance))
    });
    known.min_by_key(|(quantiles, distance)| (quantiles.samples < ENOUGH, *distance))
}

/// Bandwidths of one channel by the size of the transfer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SizedRates([Figure<BytesPerSecond>; CLASSES]);

impl SizedRates {
    /// Makes rates that are equal for every size.
    #[must_use]
    pub const fn uniform(figure: Figure<BytesPerSecond>) -> Self {
        Self([figure; CLASSES])
    }

    /// Returns the bandwidth for transfers of `size`.
    #[inline]
    #[must_use]
    pub fn of(&self, size: Bytes) -> Figure<BytesPerSecond> {
        let [.., largest] = &self.0;
        *self.0.get(class_of(size)).unwrap_or(largest)
    }

    /// Returns one figure for each size class, the smallest sizes first, with a size of each class.
    pub fn by_class(&self) -> impl Iterator<Item = (Bytes, Figure<BytesPerSecond>)> + '_ {
        CLASS_SIZES.into_iter().map(Bytes::new).zip(self.0)
    }

    /// Returns the figures after `change` was applied to each.
    #[must_use]
    pub fn map(self, change: impl FnMut(Figure<BytesPerSecond>) -> Figure<BytesPerSecond>) -> Self {
        Self(self.0.map(change))
    }

    /// Returns the rates with those of some sizes replaced, each for all sizes of its class.
    #[must_use]
    pub fn with(mut self, of_sizes: impl Iterator<Item = (Bytes, Figure<BytesPerSecond>)>) -> Self {
        for (size, figure) in of_sizes {
            if let Some(of_class) = self.0.get_mut(class_of(size)) {
                *of_class = figure;
            }
        }
        self
    }

    /// Returns each size class: its upper limit (`None` for the largest), and its bandwidth.
    pub fn classes(&self) -> impl Iterator<Item = (Option<Bytes>, Figure<BytesPerSecond>)> {
        let ends = CLASS_ENDS.into_iter().map(|end| Some(Bytes::new(end)));
        ends.chain([None]).zip(self.0)
    }

    /// Returns true if the bandwidth does not depend on the size.
    #[must_use]
    pub fn is_uniform(&self) -> bool {
        let [first, rest @ ..] = &self.0;
        rest.iter().all(|one| one == first)
    }

    /// Returns the bandwidth for a long row of transfers: the drain rate of a queue.
    #[must_use]
    pub const fn sustained(&self) -> Figure<BytesPerSecond> {
        let [.., largest] = &self.0;
        *largest
    }
}

#[cfg(test)]
mod tests;
