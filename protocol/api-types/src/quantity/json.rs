//! Reads the quantities from JSON, and describes them in schemas.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, Deserializer, Unexpected, Visitor};
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, schema::Type};
use utoipa::{PartialSchema, ToSchema};

use super::{Bytes, BytesPerSecond, Count, OutOfRange, Ratio, Seconds};

/// Number with a range, converted from a JSON number.
pub(super) trait Number: Sized {
    /// Name and range of the numbers that are accepted.
    const WHAT: &'static str;

    /// Converts an integer; `None` if it is out of range.
    fn of_integer(value: u64) -> Option<Self>;

    /// Converts a float; `None` if it is out of range, or has a fraction where there is none.
    fn of_float(value: f64) -> Option<Self>;
}

/// Integers up to 2^53 are exact as floats: `5e9` is as good as `5000000000`.
fn whole(value: f64) -> Option<u64> {
    let exact = value.fract() == 0.0 && (0.0..=9_007_199_254_740_992.0).contains(&value);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked: it is whole, and in range"
    )]
    exact.then_some(value as u64)
}

macro_rules! integer {
    ($name:ident, $what:literal) => {
        impl Number for $name {
            const WHAT: &'static str = $what;

            fn of_integer(value: u64) -> Option<Self> {
                (value <= Self::MAX.0).then_some(Self(value))
            }

            fn of_float(value: f64) -> Option<Self> {
                whole(value).and_then(Self::of_integer)
            }
        }

        impl TryFrom<u64> for $name {
            type Error = OutOfRange;

            fn try_from(value: u64) -> Result<Self, OutOfRange> {
                Self::of_integer(value).ok_or(OutOfRange {
                    value: value as f64,
                    what: Self::WHAT,
                })
            }
        }

        described!(
            $name,
            stringify!($name),
            Type::Integer,
            0.0,
            Self::MAX.0 as f64
        );
    };
}

macro_rules! float {
    ($name:ident, $schema:expr, $least:expr, $what:literal) => {
        impl Number for $name {
            const WHAT: &'static str = $what;

            fn of_integer(value: u64) -> Option<Self> {
                Self::of_float(value as f64)
            }

            fn of_float(value: f64) -> Option<Self> {
                // Adding zero makes minus zero zero, which minus zero would sort before.
                ($least..=Self::MAX.0)
                    .contains(&value)
                    .then_some(Self(value + 0.0))
            }
        }

        impl TryFrom<f64> for $name {
            type Error = OutOfRange;

            fn try_from(value: f64) -> Result<Self, OutOfRange> {
                Self::of_float(value).ok_or(OutOfRange {
                    value,
                    what: Self::WHAT,
                })
            }
        }

        impl From<$name> for f64 {
            fn from(number: $name) -> Self {
                number.0
            }
        }

        described!($name, $schema, Type::Number, $least, Self::MAX.0);
    };
}

/// Implements a number's JSON, and the schema of the JSON.
macro_rules! described {
    ($name:ident, $schema:expr, $type:expr, $least:expr, $most:expr) => {
        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                ObjectBuilder::new()
                    .schema_type($type)
                    .minimum(Some($least))
                    .maximum(Some($most))
                    .description(Some(Self::WHAT))
                    .into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                Cow::Borrowed($schema)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Reading(PhantomData))
            }
        }
    };
}

struct Reading<T>(PhantomData<T>);

impl<T: Number> Visitor<'_> for Reading<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::WHAT)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<T, E> {
        T::of_integer(value).ok_or_else(|| E::invalid_value(Unexpected::Unsigned(value), &self))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<T, E> {
        let number = u64::try_from(value).ok().and_then(T::of_integer);
        number.ok_or_else(|| E::invalid_value(Unexpected::Signed(value), &self))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<T, E> {
        T::of_float(value).ok_or_else(|| E::invalid_value(Unexpected::Float(value), &self))
    }
}

integer!(Bytes, "number of bytes from 0 to 2^60");
integer!(Count, "whole number from 0 to 2^50");
float!(Seconds, "Seconds", 0.0, "time in seconds from 0 to 1e12");
float!(
    BytesPerSecond,
    "BytesPerSecond",
    Self::MIN.0,
    "rate in bytes a second from 1 to 1e15"
);
// The name that the schema had before there was one type for both.
float!(Ratio, "Weight", 0.0, "factor from 0 to 1e6");

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T: for<'de> Deserialize<'de> + fmt::Debug>(json: &str) -> String {
        serde_json::from_str::<T>(json).unwrap_err().to_string()
    }

    #[test]
    fn integers_may_be_written_as_floats_but_have_no_fraction() {
        for json in ["5000000000", "5e9", "5000000000.0"] {
            assert_eq!(
                serde_json::from_str::<Bytes>(json).unwrap().count(),
                5_000_000_000
            );
        }
        assert!(refused::<Bytes>("1.5").starts_with(
            "invalid value: floating point `1.5`, expected number of bytes from 0 to 2^60"
        ));
    }

    #[test]
    fn what_is_negative_or_too_large_is_refused_with_the_range() {
        assert!(refused::<Bytes>("-1").starts_with("invalid value: integer `-1`, expected number"));
        assert!(refused::<Bytes>("1152921504606846977").contains("from 0 to 2^60"));
        assert!(refused::<Bytes>("1e300").contains("from 0 to 2^60"));
        assert!(refused::<Count>("18446744073709551616").contains("from 0 to 2^50"));
        assert!(refused::<Seconds>("-0.1").contains("from 0 to 1e12"));
        assert!(refused::<Seconds>("1e13").contains("from 0 to 1e12"));
        assert!(refused::<BytesPerSecond>("0").contains("from 1 to 1e15"));
        assert!(refused::<Ratio>("1000001").contains("from 0 to 1e6"));
        assert!(refused::<Seconds>("1e999").contains("number out of range"));
        assert!(refused::<Seconds>("\"5\"").contains("invalid type: string"));
    }

    #[test]
    fn they_are_written_as_plain_numbers() {
        assert_eq!(
            serde_json::to_string(&Bytes::MAX).unwrap(),
            "1152921504606846976"
        );
        assert_eq!(
            serde_json::to_string(&Seconds::new(0.5).unwrap()).unwrap(),
            "0.5"
        );
    }

    #[test]
    fn schemas_have_the_names_and_ranges_of_the_document() {
        assert_eq!(Ratio::name(), "Weight");
        assert_eq!(Bytes::name(), "Bytes");
        let schema = serde_json::to_value(BytesPerSecond::schema()).unwrap();
        assert_eq!(schema["minimum"], 1.0);
        assert_eq!(schema["maximum"], 1e15);
    }
}
