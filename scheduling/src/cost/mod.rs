//! Costs of each mechanism of preempting a task and of resuming it, in seconds.
//!
//! Paper 000, §4.1, has one sum: size/bw_write + size/bw_read + queue time. Here each mechanism has its own parts,
//! and three sums of them, one for each party that loses time:
//!
//! - [`overhead`](TaskCost::overhead): the time that the victim loses: without progress, or with work that it does again.
//!   This is what Algorithm 1 compares.
//! - [`delay`](TaskCost::delay): the time that the preempting party waits until the resources are free.
//! - [`until_running`](TaskCost::until_running): the time that a resumed task waits until it runs.

mod node;
mod resume;
mod suspend;
mod task;
mod without;

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use permafrost_api_types::cost::By;
pub use permafrost_api_types::cost::{Copies, Part};

pub use node::{NodeFigures, Replica, SwapFigures, TierRoom};
pub use resume::{LazyRestore, MissingPages, Recall, full as resume, lazy as resume_lazily};
pub use suspend::{checkpoint, in_memory};
pub use task::{TaskFigures, TaskResources};
pub use without::{kill, rollback, wait};

pub(crate) use suspend::{DumpWait, Dumps, in_memory_as};
pub(crate) use without::{kill_as, rollback_as, wait_as};

use crate::figure::{Estimate, Missing};
use crate::quantity::{Bytes, Seconds};

/// Part of the memory that a dump takes, and whether the task is frozen meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dump {
    /// Dump all of the memory, frozen.
    Full,
    /// Pages that changed since the last checkpoint, frozen.
    Incremental,
    /// Dump all of the memory while the task runs, then the pages that changed meanwhile, frozen.
    PreCopied,
}

/// A way to take the resources of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PreemptionMechanism {
    /// Wait for its end.
    Wait,
    /// Stop it, its memory stays and is paged out as far as needed (paper 001).
    SuspendInMemory,
    /// Dump the task.
    Checkpoint {
        /// Part of the memory that is dumped.
        dump: Dump,
        /// Place where the dump has to be stored.
        copies: Copies,
    },
    /// Kill it; it continues later from its last checkpoint.
    Rollback,
    /// Kill it; it restarts from the beginning later.
    Kill,
}

impl fmt::Display for PreemptionMechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wait => "wait for its end",
            Self::SuspendInMemory => "suspend in memory",
            Self::Rollback => "kill and go back to the last checkpoint",
            Self::Kill => "kill",
            Self::Checkpoint { dump, copies } => match (dump, copies) {
                (Dump::Full, Copies::Local) => "full dump",
                (Dump::Full, Copies::Replicated) => "replicated full dump",
                (Dump::Incremental, Copies::Local) => "incremental dump",
                (Dump::Incremental, Copies::Replicated) => "replicated incremental dump",
                (Dump::PreCopied, Copies::Local) => "pre-copied dump",
                (Dump::PreCopied, Copies::Replicated) => "replicated pre-copied dump",
            },
        })
    }
}

/// Returns true if the victim loses the time of the part.
const fn is_overhead(part: Part) -> bool {
    // The victim works on during these.
    !matches!(part, Part::PreCopy | Part::Wait)
}

/// Returns true if the preempting party waits for the end of the part.
const fn is_delay(part: Part) -> bool {
    matches!(
        part,
        Part::WriteQueue
            | Part::DumpStart
            | Part::PreCopy
            | Part::Write
            | Part::Replicate
            | Part::PageOut
            | Part::Wait
    )
}

/// Returns true if a resumed task runs only after the part.
const fn is_before_running(part: Part) -> bool {
    matches!(
        part,
        Part::Start
            | Part::ReadQueue
            | Part::RestoreStart
            | Part::Recall
            | Part::Transfer
            | Part::Read
            | Part::PageIn
    )
}

/// Duration with its median and its 95th percentile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeSpread {
    /// Median of the durations.
    pub p50: Seconds,
    /// Upper bound for 95 of 100 durations. For a sum it is never below the median.
    pub p95: Seconds,
}

impl TimeSpread {
    /// Makes the spread of an estimate. Estimates come from outside; one whose p95 is below its median has no spread.
    fn of(time: &Estimate<Seconds>) -> Self {
        Self {
            p50: time.p50,
            p95: time.p95.max(time.p50),
        }
    }

    /// Returns the quantile that decides.
    pub(crate) const fn quantile(self, by: By) -> Seconds {
        match by {
            By::P50 => self.p50,
            By::P95 => self.p95,
        }
    }

    fn plus(self, other: Self) -> Self {
        let p50 = self.p50.plus(other.p50);
        // What `beyond` took off and this adds again may come back smaller by a rounding.
        let p95 = self.p95.plus(other.p95).max(p50);
        Self { p50, p95 }
    }

    /// Returns the time by which this one is longer than `other`. Where the upper bound of `other` is further from
    /// its median than this one's, the upper bound of the difference is below its median; the sum of both is right
    /// again.
    fn beyond(self, other: Self) -> Self {
        Self {
            p50: self.p50.less(other.p50),
            p95: self.p95.less(other.p95),
        }
    }
}

/// Accumulator of a cost's parts: a whole cost, or only the sums that a decision compares, which most evaluations
/// need.
pub(crate) trait Tally: Sized {
    /// Makes a tally without any part.
    fn nothing() -> Self;

    /// Adds a part.
    fn add(&mut self, part: Part, time: TimeSpread);

    /// Adds the age of a figure that the cost includes.
    fn aged(&mut self, age: Seconds);

    /// Records that the cost does not include a fixed part.
    fn omitted(&mut self, missing: Missing);

    #[inline]
    fn with(mut self, part: Part, time: Estimate<Seconds>) -> Self {
        self.aged(time.age);
        self.add(part, TimeSpread::of(&time));
        self
    }

    /// Adds a part that is small and often unmeasured; without it the cost is still valid, and names the part that it
    /// omits.
    #[inline]
    fn with_fixed(mut self, part: Part, time: Result<Estimate<Seconds>, Missing>) -> Self {
        match time {
            Ok(time) => self.with(part, time),
            Err(missing) => {
                self.omitted(missing);
                self
            }
        }
    }
}

/// Sums that a decision compares.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    pub(crate) overhead: TimeSpread,
    pub(crate) delay: TimeSpread,
}

impl Tally for Sums {
    #[inline]
    fn nothing() -> Self {
        Self::default()
    }

    #[inline]
    fn add(&mut self, part: Part, time: TimeSpread) {
        if is_overhead(part) {
            self.overhead = self.overhead.plus(time);
        }
        if is_delay(part) {
            self.delay = self.delay.plus(time);
        }
    }

    #[inline]
    fn aged(&mut self, _age: Seconds) {}

    #[inline]
    fn omitted(&mut self, _missing: Missing) {}
}

/// Cost of preempting or resuming a task, part by part.
///
/// The 95th percentile of a sum is the sum of the parts' 95th percentiles. That is exact when the parts are slow
/// together, as parts on one medium are, and too high otherwise: never too low.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(into = "Answer")]
pub struct TaskCost {
    parts: [TimeSpread; Part::ALL.len()],
    /// Sums of the parts, kept up: a decision reads them far more often than the parts.
    sums: Sums,
    until_running: TimeSpread,
    age: Seconds,
    omits: Option<Missing>,
}

impl Tally for TaskCost {
    fn nothing() -> Self {
        Self {
            parts: [TimeSpread::default(); Part::ALL.len()],
            sums: Sums::nothing(),
            until_running: TimeSpread::default(),
            age: Seconds::ZERO,
            omits: None,
        }
    }

    #[inline]
    fn add(&mut self, part: Part, time: TimeSpread) {
        if let Some(sum) = self.parts.get_mut(part as usize) {
            *sum = sum.plus(time);
        }
        self.sums.add(part, time);
        if is_before_running(part) {
            self.until_running = self.until_running.plus(time);
        }
    }

    #[inline]
    fn aged(&mut self, age: Seconds) {
        self.age = self.age.max(age);
    }

    #[inline]
    fn omitted(&mut self, missing: Missing) {
        self.omits = Some(missing);
    }
}

impl TaskCost {
    /// Returns the parts that are not 0, in the order in which they happen.
    pub fn parts(&self) -> impl Iterator<Item = (Part, TimeSpread)> {
        let all = Part::ALL.into_iter().zip(self.parts);
        all.filter(|(_, time)| time.p95 > Seconds::ZERO)
    }

    /// Returns the sums that a decision compares.
    pub(crate) const fn sums(&self) -> &Sums {
        &self.sums
    }

    /// Returns the time that the victim loses.
    #[must_use]
    pub const fn overhead(&self) -> TimeSpread {
        self.sums.overhead
    }

    /// Returns the time until the victim's resources are free.
    #[must_use]
    pub const fn delay(&self) -> TimeSpread {
        self.sums.delay
    }

    /// Returns the time from the decision to resume until the task runs.
    #[must_use]
    pub const fn until_running(&self) -> TimeSpread {
        self.until_running
    }

    /// Returns the age of the oldest figure in the cost.
    #[must_use]
    pub const fn age(&self) -> Seconds {
        self.age
    }

    /// Returns a fixed part that the cost does not include because it was never measured.
    #[must_use]
    pub const fn omits(&self) -> Option<Missing> {
        self.omits
    }
}

impl fmt::Display for TaskCost {
    /// Writes the explanation in words.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self
            .parts()
            .fold(TimeSpread::default(), |sum, (_, time)| sum.plus(time));
        write!(f, "{} (p95 {})", all.p50, all.p95)?;
        for (index, (part, time)) in self.parts().enumerate() {
            f.write_str(if index == 0 { ": " } else { " + " })?;
            part.fmt(f)?;
            f.write_str(" ")?;
            time.p50.fmt(f)?;
        }
        if self.age > Seconds::ZERO {
            write!(f, "; figures up to {} old", self.age)?;
        }
        if let Some(missing) = self.omits {
            write!(f, "; not counted: {missing}")?;
        }
        Ok(())
    }
}

/// A cost as an answer shows it.
#[derive(Clone, Debug, Serialize)]
struct Answer {
    overhead: TimeSpread,
    delay: TimeSpread,
    until_running: TimeSpread,
    parts: Vec<NamedPart>,
    age_seconds: Seconds,
    reason: String,
}

#[derive(Clone, Debug, Serialize)]
struct NamedPart {
    part: Part,
    #[serde(flatten)]
    time: TimeSpread,
}

impl From<TaskCost> for Answer {
    fn from(cost: TaskCost) -> Self {
        let parts = cost.parts();
        Self {
            overhead: cost.overhead(),
            delay: cost.delay(),
            until_running: cost.until_running(),
            parts: parts.map(|(part, time)| NamedPart { part, time }).collect(),
            age_seconds: cost.age,
            reason: cost.to_string(),
        }
    }
}

/// Reason why something has no cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Error)]
#[serde(rename_all = "snake_case")]
pub enum NoCost {
    /// A figure it needs is missing.
    #[error(transparent)]
    Unknown(#[from] Missing),
    /// The task has no earlier checkpoint to build on.
    #[error("the task has no checkpoint")]
    NoCheckpoint,
    /// The cluster has no other node to take a copy.
    #[error("there is no node for another copy")]
    NoReplica,
    /// The figures of the machine's swap are missing.
    #[error("nothing is to be suspended in memory on that node")]
    NoSwap,
    /// The task would not fit swap, and the kernel would kill it or another (paper 001, §III).
    #[error("{needed} do not fit the {free} of swap that are free")]
    Swap {
        /// Resident memory of the task.
        needed: Bytes,
        /// Swap that no suspended task has.
        free: Bytes,
    },
    /// The task dirties memory at least as fast as it can be written.
    #[error("the task dirties memory faster than it can be written")]
    DirtiesTooFast,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::What;

    #[test]
    fn the_sums_say_who_pays() {
        let second = |n: u64| Estimate::given(Seconds::from_millis(n * 1000));
        let mut cost = TaskCost::nothing();
        for (part, time) in [
            (Part::WriteQueue, 1),
            (Part::PreCopy, 2),
            (Part::Write, 4),
            (Part::Read, 8),
            (Part::LostWork, 16),
            (Part::Faults, 32),
        ] {
            cost = cost.with(part, second(time));
        }
        assert_eq!(cost.overhead().p50.value(), 61.0);
        assert_eq!(cost.delay().p50.value(), 7.0);
        assert_eq!(cost.until_running().p50.value(), 8.0);
    }

    #[test]
    fn a_cost_explains_itself_in_words_and_in_json() {
        let write = Estimate {
            p50: Seconds::from_millis(2000),
            p95: Seconds::from_millis(3000),
            age: Seconds::from_millis(4000),
            samples: 5,
        };
        let cost = TaskCost::nothing().with(Part::Write, write).with_fixed(
            Part::DumpStart,
            Err(Missing::NotMeasured {
                what: What::Latency,
            }),
        );
        assert_eq!(
            cost.to_string(),
            "2.0 s (p95 3.0 s): write 2.0 s; figures up to 4.0 s old; not counted: the latency has not been measured"
        );
        let json = serde_json::to_value(cost).unwrap();
        assert_eq!(json["overhead"]["p95"], 3.0);
        assert_eq!(json["parts"][0]["part"], "write");
        assert_eq!(json["parts"][0]["p50"], 2.0);
        assert_eq!(json["reason"], cost.to_string());
    }
}
