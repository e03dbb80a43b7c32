//! `PUT /v1/figures`: initial figures, used until there are measured ones.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::batch;
use super::quantity::{Bytes, BytesPerSecond, Seconds};

/// Figures that a benchmark has measured of the node that receives the request. Figures that are left out stay
/// unchanged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct StartFigures {
    /// Bandwidth of dumps, by their size.
    #[serde(
        deserialize_with = "batch::at_most::<16, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(max_items = 16)]
    pub write: Vec<StartRate>,
    /// Bandwidth of restores, by their size.
    #[serde(
        deserialize_with = "batch::at_most::<16, _, _>",
        skip_serializing_if = "Vec::is_empty"
    )]
    #[schema(max_items = 16)]
    pub read: Vec<StartRate>,
    /// Fixed time of a dump, independent of its size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dump_start: Option<StartTime>,
    /// Fixed time of a restore, independent of its size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore_start: Option<StartTime>,
    /// Bandwidth to other nodes, by their names.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub links: BTreeMap<String, BytesPerSecond>,
}

/// A bandwidth at one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartRate {
    /// Size of the transfers, bytes.
    pub size_bytes: Bytes,
    /// Median, bytes a second.
    pub p50_bytes_per_s: BytesPerSecond,
    /// Slow end, bytes a second: 95 of 100 are no slower. The median if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p95_bytes_per_s: Option<BytesPerSecond>,
}

/// Duration, as median and upper bound.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartTime {
    /// Median duration, seconds.
    pub p50_s: Seconds,
    /// Long end, seconds: 95 of 100 take no longer. The median if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p95_s: Option<Seconds>,
}
