//! Figure with its spread and age, or the reason why there is none.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::quantity::{Bytes, BytesPerSecond, Seconds};

/// Value of a quantity with its spread, its age and the number of its samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate<T> {
    /// Median of the samples.
    pub p50: T,
    /// 95 of 100 are no worse than this: the longer time, the larger size, but the *slower* rate.
    pub p95: T,
    /// Age of the newest sample.
    pub age: Seconds,
    /// Samples it rests on; 0 for one that was given and not measured.
    pub samples: u32,
}

impl<T: Copy> Estimate<T> {
    /// Makes an estimate of a value that was stated, not measured; it has no spread.
    #[must_use]
    pub const fn given(value: T) -> Self {
        Self {
            p50: value,
            p95: value,
            age: Seconds::ZERO,
            samples: 0,
        }
    }
}

/// Estimate, or the reason why there is none. An answer that needs a missing estimate reports the reason; nothing is
/// made up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Figure<T> {
    /// The quantity has an estimate.
    Known(Estimate<T>),
    /// The quantity has no estimate.
    Unknown {
        /// Reason why there is no estimate.
        why: Missing,
    },
}

impl<T: Copy> Figure<T> {
    /// Makes a figure of a value that was stated, not measured; it has no spread.
    #[must_use]
    pub const fn given(value: T) -> Self {
        Self::Known(Estimate::given(value))
    }

    /// Makes a missing figure of a quantity that the caller did not state.
    #[must_use]
    pub const fn not_given(what: What) -> Self {
        Self::Unknown {
            why: Missing::NotGiven { what },
        }
    }

    /// Returns the estimate.
    ///
    /// # Errors
    ///
    /// [`Missing`]: why there is none.
    #[inline]
    pub const fn known(&self) -> Result<Estimate<T>, Missing> {
        match self {
            Self::Known(estimate) => Ok(*estimate),
            Self::Unknown { why } => Err(*why),
        }
    }
}

impl<T> From<Estimate<T>> for Figure<T> {
    fn from(estimate: Estimate<T>) -> Self {
        Self::Known(estimate)
    }
}

impl<T> From<Missing> for Figure<T> {
    fn from(why: Missing) -> Self {
        Self::Unknown { why }
    }
}

impl Estimate<Bytes> {
    /// Returns the time that these bytes take at `rate`: the median at the median rate, the 95th percentile at the
    /// slow rate. A large size and a slow rate may well coincide, so their 95th percentiles are not averaged out.
    #[inline]
    #[must_use]
    pub fn at(&self, rate: &Estimate<BytesPerSecond>) -> Estimate<Seconds> {
        Estimate {
            p50: self.p50.at(rate.p50),
            p95: self.p95.at(rate.p95),
            age: self.age.max(rate.age),
            samples: self.samples.min(rate.samples),
        }
    }
}

/// Quantity whose figure is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the words of `Display` say it")]
pub enum What {
    WriteBandwidth,
    ReadBandwidth,
    RecallBandwidth,
    LinkBandwidth,
    LazyBandwidth,
    SwapBandwidth,
    Latency,
    DirtyRate,
    FullSize,
    IncrementalSize,
    Queue,
    Progress,
    WorkSinceCheckpoint,
    RemainingTime,
    StartTime,
    Memory,
    Accuracy,
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::WriteBandwidth => "bandwidth for writing",
            Self::ReadBandwidth => "bandwidth for reading",
            Self::RecallBandwidth => "bandwidth of the object store",
            Self::LinkBandwidth => "bandwidth between the nodes",
            Self::LazyBandwidth => "bandwidth of lazy pages",
            Self::SwapBandwidth => "bandwidth of swap",
            Self::Latency => "latency",
            Self::DirtyRate => "rate at which the task dirties memory",
            Self::FullSize => "size of a full dump",
            Self::IncrementalSize => "size of an incremental dump",
            Self::Queue => "length of the queue",
            Self::Progress => "task's progress",
            Self::WorkSinceCheckpoint => "work since the last checkpoint",
            Self::RemainingTime => "task's remaining time",
            Self::StartTime => "task's start-up time",
            Self::Memory => "task's memory",
            Self::Accuracy => "accuracy of predictions",
        })
    }
}

/// Reason why a figure is missing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, Error)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// The caller left it out.
    #[error("the {what} was not given")]
    NotGiven {
        /// Quantity that was not given.
        what: What,
    },
    /// The quantity has no sample yet.
    #[error("the {what} has not been measured")]
    NotMeasured {
        /// Quantity that was not measured.
        what: What,
    },
    /// The newest sample is too old to go by.
    #[error("the {what} was last measured {age} ago; figures hold for {limit}")]
    TooOld {
        /// Quantity whose figure is too old.
        what: What,
        /// Age of the newest sample.
        age: Seconds,
        /// Age up to which figures hold.
        limit: Seconds,
    },
    /// The node does not report any more: its last report does not hold.
    #[error("the node is not there")]
    NodeGone,
    /// The latest reports cannot be true.
    #[error("the last {refused} reports of the {what} cannot be true")]
    NotBelieved {
        /// Quantity that was reported.
        what: What,
        /// Reports refused in a row.
        refused: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_figure_says_why_in_words_and_in_json() {
        let figure = Figure::<Seconds>::not_given(What::Progress);
        assert_eq!(
            figure.known().unwrap_err().to_string(),
            "the task's progress was not given"
        );
        let json = serde_json::to_string(&figure).unwrap();
        assert_eq!(
            json,
            r#"{"unknown":{"why":{"not_given":{"what":"progress"}}}}"#
        );
        assert_eq!(
            serde_json::from_str::<Figure<Seconds>>(&json).unwrap(),
            figure
        );
    }

    #[test]
    fn the_bad_end_of_a_time_is_a_large_size_at_a_slow_rate() {
        let size = Estimate {
            p50: Bytes::new(100),
            p95: Bytes::new(200),
            age: Seconds::from_millis(1),
            samples: 9,
        };
        let rate = Estimate {
            p50: BytesPerSecond::new(10.0).unwrap(),
            p95: BytesPerSecond::new(5.0).unwrap(),
            age: Seconds::from_millis(7),
            samples: 3,
        };
        let time = size.at(&rate);
        assert_eq!((time.p50.value(), time.p95.value()), (10.0, 40.0));
        assert_eq!((time.age, time.samples), (Seconds::from_millis(7), 3));
    }
}
