//! Converts figures and costs to the types of the API.

use std::fmt::{self, Write as _};

use permafrost_api_types::figure::{Figure, Known};
use permafrost_scheduling::cost::{Copies, Dump, PreemptionMechanism, TaskCost, TimeSpread};
use permafrost_scheduling::figure;
use permafrost_scheduling::quantity::{Bytes, BytesPerSecond, Seconds};

/// Rounds seconds to a nanosecond: further digits are only rounding errors, and would have to be sent.
pub(super) fn rounded(seconds: f64) -> f64 {
    const NANOS: f64 = 1e9;
    if seconds < 1e6 {
        (seconds * NANOS).round() / NANOS
    } else {
        seconds
    }
}

/// Converts a figure; its age is the age in the snapshot plus that of the snapshot.
fn figure<T: Copy, U>(
    figure: &figure::Figure<T>,
    world_age_s: f64,
    value: impl Fn(T) -> U,
) -> Figure<U> {
    match figure {
        figure::Figure::Known(estimate) => Figure::Known(Known {
            p50: value(estimate.p50),
            p95: value(estimate.p95),
            age_s: rounded(estimate.age.value() + world_age_s),
            samples: estimate.samples,
        }),
        figure::Figure::Unknown { why } => Figure::unknown(why),
    }
}

pub(super) fn rate(of: &figure::Figure<BytesPerSecond>, world_age_s: f64) -> Figure<f64> {
    figure(of, world_age_s, |rate| rate.value().round())
}

pub(super) fn bytes(of: &figure::Figure<Bytes>, world_age_s: f64) -> Figure<u64> {
    figure(of, world_age_s, Bytes::count)
}

pub(super) fn time(of: &figure::Figure<Seconds>, world_age_s: f64) -> Figure<f64> {
    figure(of, world_age_s, |time| rounded(time.value()))
}

fn spread(of: TimeSpread) -> permafrost_api_types::cost::Spread {
    permafrost_api_types::cost::Spread {
        p50: rounded(of.p50.value()),
        p95: rounded(of.p95.value()),
    }
}

/// Converts a cost, in the requested detail.
pub(super) fn cost(
    of: &TaskCost,
    detail: permafrost_api_types::cost::ReplyDetail,
    world_age_s: f64,
) -> permafrost_api_types::cost::Cost {
    permafrost_api_types::cost::Cost {
        reason: reason(of, detail),
        ..cost_alone(of, detail, world_age_s)
    }
}

/// Returns an explanation, unless only sums are requested.
pub(super) fn reason(
    of: &impl fmt::Display,
    detail: permafrost_api_types::cost::ReplyDetail,
) -> Option<String> {
    if detail != permafrost_api_types::cost::ReplyDetail::Full {
        return None;
    }
    // Most texts are shorter, so that the buffer need not grow repeatedly.
    let mut words = String::with_capacity(256);
    // Writing to a string does not fail.
    let _ = write!(words, "{of}");
    Some(words)
}

/// Converts a cost without its reason.
pub(super) fn cost_alone(
    of: &TaskCost,
    detail: permafrost_api_types::cost::ReplyDetail,
    world_age_s: f64,
) -> permafrost_api_types::cost::Cost {
    let full = detail == permafrost_api_types::cost::ReplyDetail::Full;
    let parts = || {
        let parts = of
            .parts()
            .map(|(which, time)| permafrost_api_types::cost::PartOfCost {
                part: which,
                p50_s: rounded(time.p50.value()),
                p95_s: rounded(time.p95.value()),
            });
        parts.collect()
    };
    permafrost_api_types::cost::Cost {
        overhead_s: spread(of.overhead()),
        delay_s: spread(of.delay()),
        until_running_s: spread(of.until_running()),
        parts: full.then(parts),
        age_s: rounded(of.age().value() + world_age_s),
        omits: of.omits().map(|missing| missing.to_string()),
        reason: None,
    }
}

pub(super) const fn mechanism(
    mechanism: PreemptionMechanism,
) -> permafrost_api_types::cost::Mechanism {
    use permafrost_api_types::cost::Mechanism as Said;
    match mechanism {
        PreemptionMechanism::Wait => Said::Wait,
        PreemptionMechanism::Kill => Said::Kill,
        PreemptionMechanism::Rollback => Said::Rollback,
        PreemptionMechanism::SuspendInMemory => Said::SuspendInMemory,
        PreemptionMechanism::Checkpoint { dump, .. } => match dump {
            Dump::Full => Said::FullDump,
            Dump::Incremental => Said::IncrementalDump,
            Dump::PreCopied => Said::PreCopiedDump,
        },
    }
}

pub(super) const fn way(
    mechanism: permafrost_api_types::cost::Mechanism,
    copies: Copies,
) -> PreemptionMechanism {
    use permafrost_api_types::cost::Mechanism as Said;
    let dump = match mechanism {
        Said::Wait => return PreemptionMechanism::Wait,
        Said::Kill => return PreemptionMechanism::Kill,
        Said::Rollback => return PreemptionMechanism::Rollback,
        Said::SuspendInMemory => return PreemptionMechanism::SuspendInMemory,
        Said::IncrementalDump => Dump::Incremental,
        Said::FullDump => Dump::Full,
        Said::PreCopiedDump => Dump::PreCopied,
    };
    PreemptionMechanism::Checkpoint { dump, copies }
}
