//! Reads reports that may be malformed: each field by itself; one that cannot be read becomes a figure that is
//! not believed.

use std::collections::BTreeMap;

use permafrost_scheduling::cost::{SwapFigures, TierRoom};
use permafrost_scheduling::estimator::SizedRates;
use permafrost_scheduling::figure::{Figure, Missing, What};
use permafrost_scheduling::quantity::Seconds;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::NodeReport;
use crate::QueueReport;

/// A value that has a substitute where it cannot be read.
pub(super) trait Readable: Sized {
    fn read(value: Value) -> Self;
}

/// Deserializes one field of a report.
pub(super) fn field<'de, D: Deserializer<'de>, T: Readable>(from: D) -> Result<T, D::Error> {
    Ok(T::read(Value::deserialize(from)?))
}

/// Deserializes a node's report, if there is one.
pub fn report<'de, D: Deserializer<'de>>(from: D) -> Result<Option<NodeReport>, D::Error> {
    let value = Value::deserialize(from)?;
    if value.is_null() {
        return Ok(None);
    }
    let unreadable = || NodeReport {
        unreadable: true,
        ..NodeReport::default()
    };
    // serde also reads a struct from a list, and an empty one has every field left out.
    Ok(Some(if value.is_object() {
        read_or(value, unreadable)
    } else {
        unreadable()
    }))
}

fn read_or<T: DeserializeOwned>(value: Value, otherwise: impl FnOnce() -> T) -> T {
    serde_json::from_value(value).unwrap_or_else(|_| otherwise())
}

/// Returns the figure for a value that cannot be read.
fn nonsense<T>(what: What) -> Figure<T> {
    Figure::Unknown {
        why: Missing::NotBelieved { what, refused: 1 },
    }
}

impl Readable for SizedRates {
    fn read(value: Value) -> Self {
        // The caller knows which bandwidth it is, and replaces the kind.
        read_or(value, || Self::uniform(nonsense(What::WriteBandwidth)))
    }
}

impl Readable for Figure<Seconds> {
    fn read(value: Value) -> Self {
        read_or(value, || nonsense(What::Latency))
    }
}

impl Readable for BTreeMap<String, SizedRates> {
    fn read(value: Value) -> Self {
        match value {
            Value::Object(links) => links
                .into_iter()
                .map(|(peer, rates)| (peer, SizedRates::read(rates)))
                .collect(),
            _ => Self::new(),
        }
    }
}

impl Readable for Vec<TierRoom> {
    fn read(value: Value) -> Self {
        read_or(value, Self::new)
    }
}

impl Readable for QueueReport {
    fn read(value: Value) -> Self {
        // A queue that is too long to be believed.
        read_or(value, || Self {
            bytes: u64::MAX,
            ..Self::default()
        })
    }
}

impl Readable for u64 {
    fn read(value: Value) -> Self {
        value.as_u64().unwrap_or(0)
    }
}

impl Readable for Option<SwapFigures> {
    fn read(value: Value) -> Self {
        read_or(value, || None)
    }
}

impl Readable for Option<String> {
    fn read(value: Value) -> Self {
        value.as_str().map(str::to_owned)
    }
}
