//! `POST /v1/reserve`, `DELETE /v1/reserve/{token}`: a place in a queue, for later.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::figure::Figure;
use super::quantity::{Bytes, Seconds};

/// A place that is wanted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Reserve)]
pub struct ReserveRequest {
    /// Name of the node; default: the node that receives the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Queue that the reservation is for: dumps or restores.
    pub direction: Direction,
    /// Size of the transfer, bytes.
    pub bytes: Bytes,
    /// Priority from 0, the lowest, to 11.
    #[serde(default)]
    #[schema(value_type = u8, minimum = 0, maximum = 11)]
    pub priority: Priority,
    /// Time within which the transfer should start, seconds from now.
    #[serde(
        rename = "deadline_s",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub start_within_s: Option<Seconds>,
    /// Time for which the reservation is kept, seconds; at most the limit of the node, which is also the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifetime_s: Option<Seconds>,
    /// Namespace whose quota the reservation counts in. Default: the caller's only one, or none for a caller with
    /// access to all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// A priority: 0, the lowest, to 11, as in the Google trace.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(try_from = "u8")]
pub struct Priority(u8);

/// A number that is no priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{level} is no priority: 0 to 11 is")]
pub struct NoPriority {
    /// The number that was given.
    pub level: u8,
}

impl Priority {
    /// Highest priority there is.
    pub const MAX: Self = Self(11);

    /// Makes the priority `level`, at most the highest.
    #[must_use]
    pub const fn new(level: u8) -> Self {
        if level > Self::MAX.0 {
            return Self::MAX;
        }
        Self(level)
    }

    /// Returns the priority as a number.
    #[must_use]
    pub const fn level(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Priority {
    type Error = NoPriority;

    fn try_from(level: u8) -> Result<Self, NoPriority> {
        if level > Self::MAX.0 {
            return Err(NoPriority { level });
        }
        Ok(Self(level))
    }
}

/// Direction of a transfer, seen from the medium.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Into it: dumps.
    Write,
    /// Out of the medium: restores.
    Read,
}

impl Direction {
    /// Both directions, in the order in which they are listed.
    pub const ALL: [Self; 2] = [Self::Write, Self::Read];

    /// Returns `write` or `read`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }

    /// Returns the direction with that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// Returns the plural name of the transfers, `dumps` or `restores`.
    #[must_use]
    pub const fn many(self) -> &'static str {
        match self {
            Self::Write => "dumps",
            Self::Read => "restores",
        }
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A place that was reserved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Reservation {
    /// Token with which the dump or restore takes the reservation up, and with which it is cancelled.
    pub token: String,
    /// Name of the node whose queue it is.
    pub node: String,
    /// Queue that the reservation is for: dumps or restores.
    pub direction: Direction,
    /// Bytes that come first.
    pub bytes_before: u64,
    /// Time until the transfer would start, seconds.
    pub starts_in_s: Figure<f64>,
    /// Time until the reservation lapses if it is not taken up, seconds.
    #[schema(minimum = 0)]
    pub lapses_in_s: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_of_a_reservation_is_for_its_start() {
        let json = r#"{"direction":"read","bytes":1,"priority":0,"deadline_s":60.0}"#;
        let reserve: ReserveRequest = serde_json::from_str(json).unwrap();
        assert_eq!(reserve.start_within_s, Seconds::new(60.0).ok());
        assert_eq!(serde_json::to_string(&reserve).unwrap(), json);
    }

    #[test]
    fn priorities_are_twelve() {
        let reserve = |priority: &str| {
            let json = format!(r#"{{"direction":"write","bytes":1,"priority":{priority}}}"#);
            serde_json::from_str::<ReserveRequest>(&json)
        };
        assert_eq!(reserve("11").unwrap().priority, Priority::MAX);
        assert!(reserve("12").unwrap_err().to_string().contains("0 to 11"));
        assert!(reserve("-1").is_err());
    }
}
