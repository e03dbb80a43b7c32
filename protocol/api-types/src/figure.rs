//! Figure with its spread and age, or the reason why there is none.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Measured value of a quantity, or the reason why there is none; the unit is in the name of the field that holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Figure<T> {
    /// The quantity has a figure.
    Known(Known<T>),
    /// The quantity has no figure.
    Unknown(Unknown),
}

/// A figure: its median `p50`, and `p95`, which 95 of 100 are no worse than: a longer time, a larger size, a slower
/// rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Known<T> {
    /// Median of the samples.
    pub p50: T,
    /// 95 of 100 are no worse than this: the longer time, the larger size, but the *slower* rate.
    pub p95: T,
    /// Age of the newest sample, seconds.
    #[schema(minimum = 0)]
    pub age_s: f64,
    /// Samples it rests on; 0 for one that was given and not measured.
    pub samples: u32,
}

/// Absence of a figure, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unknown {
    /// Reason why there is no figure, in words.
    pub unknown: String,
}

impl<T> Figure<T> {
    /// Returns the figure, if there is one.
    pub const fn known(&self) -> Option<&Known<T>> {
        match self {
            Self::Known(known) => Some(known),
            Self::Unknown(_) => None,
        }
    }

    /// Makes an unknown figure with its reason.
    pub fn unknown(why: impl ToString) -> Self {
        Self::Unknown(Unknown {
            unknown: why.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_told_from_a_reason_by_its_fields() {
        let known = Figure::Known(Known {
            p50: 2.0,
            p95: 1.0,
            age_s: 0.5,
            samples: 7,
        });
        let json = r#"{"p50":2.0,"p95":1.0,"age_s":0.5,"samples":7}"#;
        assert_eq!(serde_json::to_string(&known).unwrap(), json);
        assert_eq!(serde_json::from_str::<Figure<f64>>(json).unwrap(), known);
        let unknown = Figure::<f64>::unknown("not measured");
        let json = r#"{"unknown":"not measured"}"#;
        assert_eq!(serde_json::to_string(&unknown).unwrap(), json);
        assert_eq!(serde_json::from_str::<Figure<f64>>(json).unwrap(), unknown);
    }
}
