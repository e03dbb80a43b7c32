//! Lists that are read only up to a limit, so that a small body cannot ask for much memory.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};

/// Tasks, checkpoints, placements or nodes of one request.
pub const MOST: usize = 10_000;

/// Start of the error message that reports a list that is too long.
pub const TOO_MANY: &str = "more than";

/// Reads a list of at most `LIMIT` entries.
pub(crate) fn at_most<'de, const LIMIT: usize, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_seq(Reading::<T, LIMIT>(PhantomData))
}

/// Reads an optional list of at most `LIMIT` entries; `None` if the field is missing.
pub(crate) fn if_any<'de, const LIMIT: usize, T, D>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    deserializer.deserialize_option(IfAny::<T, LIMIT>(PhantomData))
}

struct Reading<T, const LIMIT: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const LIMIT: usize> Visitor<'de> for Reading<T, LIMIT> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {LIMIT}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
        let mut taken = Vec::new();
        while let Some(next) = list.next_element()? {
            if taken.len() == LIMIT {
                return Err(de::Error::custom(format_args!("{TOO_MANY} {LIMIT}")));
            }
            taken.push(next);
        }
        Ok(taken)
    }
}

struct IfAny<T, const LIMIT: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const LIMIT: usize> Visitor<'de> for IfAny<T, LIMIT> {
    type Value = Option<Vec<T>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {LIMIT}, or null")
    }

    fn visit_none<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        at_most::<LIMIT, T, D>(deserializer).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Lists {
        #[serde(deserialize_with = "at_most::<2, _, _>")]
        all: Vec<u8>,
        #[serde(default, deserialize_with = "if_any::<1, _, _>")]
        some: Option<Vec<u8>>,
    }

    #[test]
    fn a_list_ends_at_its_limit() {
        let read = |json: &str| serde_json::from_str::<Lists>(json);
        let lists = read(r#"{"all":[1,2],"some":null}"#).unwrap();
        assert_eq!((lists.all.as_slice(), lists.some), (&[1, 2][..], None));
        assert_eq!(
            read(r#"{"all":[],"some":[1]}"#).unwrap().some,
            Some(vec![1])
        );
        // The reader stops at the limit: entries behind it are not even parsed.
        let error = read(r#"{"all":[1,2,3,"x"]}"#).unwrap_err().to_string();
        assert!(error.starts_with("more than 2"), "{error}");
        let error = read(r#"{"all":[],"some":[1,2]}"#).unwrap_err().to_string();
        assert!(error.starts_with("more than 1"), "{error}");
        assert!(read(r#"{"all":7}"#).is_err());
    }
}
