//! Texts that are borrowed from a body where they can be.

use std::borrow::{Borrow, Cow};
use std::fmt;
use std::ops::Deref;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};

/// Text, borrowed unless it has escapes. serde borrows a `Cow` only where it is a field itself, not in an `Option` or
/// a `Vec`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Text<'a>(Cow<'a, str>);

impl<'a> Text<'a> {
    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns a text that borrows from this one.
    #[must_use]
    pub fn borrowed(&'a self) -> Self {
        Self(Cow::Borrowed(&self.0))
    }

    /// Returns a text that owns its characters.
    #[must_use]
    pub fn into_owned(self) -> Text<'static> {
        Text(Cow::Owned(self.0.into_owned()))
    }
}

impl Deref for Text<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Text<'_> {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'a> From<&'a str> for Text<'a> {
    fn from(text: &'a str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

impl From<String> for Text<'_> {
    fn from(text: String) -> Self {
        Self(Cow::Owned(text))
    }
}

impl<'a> From<Text<'a>> for String {
    fn from(text: Text<'a>) -> Self {
        text.0.into_owned()
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Reading)
    }
}

struct Reading;

impl<'de> Visitor<'de> for Reading {
    type Value = Text<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(text.to_owned())))
    }

    fn visit_string<E: de::Error>(self, text: String) -> Result<Self::Value, E> {
        Ok(Text(Cow::Owned(text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_escapes_is_copied() {
        let texts: Vec<Option<Text<'_>>> = serde_json::from_str(r#"["a","b\n",null]"#).unwrap();
        assert!(matches!(texts[0], Some(Text(Cow::Borrowed("a")))));
        assert!(matches!(&texts[1], Some(Text(Cow::Owned(text))) if text == "b\n"));
        assert_eq!(texts[2], None);
        assert_eq!(
            serde_json::to_string(&texts).unwrap(),
            r#"["a","b\n",null]"#
        );
    }
}
