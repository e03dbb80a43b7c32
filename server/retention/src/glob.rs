//! Patterns of job names.

use std::fmt;

use crate::PolicyError;

/// Longest pattern, bytes: that of a job name.
const MAX_BYTES: usize = 200;

/// A pattern of job names within a namespace: `*` stands for any characters, `?` for one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobGlob(String);

impl JobGlob {
    /// Checks a pattern.
    ///
    /// # Errors
    /// It is empty, too long, or has other characters than those of job names, `*` and `?`.
    pub fn new(pattern: &str) -> Result<Self, PolicyError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:+/*?".contains(&byte);
        if pattern.is_empty() || pattern.len() > MAX_BYTES || !pattern.bytes().all(plain) {
            return Err(PolicyError::Glob {
                pattern: pattern.chars().take(64).collect(),
            });
        }
        Ok(Self(pattern.to_owned()))
    }

    /// Returns true if the pattern matches a job, which is named without its namespace. Time: at most the product of
    /// both lengths.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let (pattern, name) = (self.0.as_bytes(), name.as_bytes());
        let (mut at, mut from) = (0, 0);
        // The last `*`, and the name's position that it was tried up to.
        let mut star: Option<(usize, usize)> = None;
        while from < name.len() {
            match pattern.get(at) {
                Some(b'*') => {
                    star = Some((at, from));
                    at += 1;
                }
                Some(&byte) if byte == b'?' || byte == name[from] => {
                    at += 1;
                    from += 1;
                }
                _ => match &mut star {
                    Some((starred, tried)) => {
                        *tried += 1;
                        at = *starred + 1;
                        from = *tried;
                    }
                    None => return false,
                },
            }
        }
        pattern[at..].iter().all(|&byte| byte == b'*')
    }

    /// Returns the number of characters that stand for themselves: of several patterns the one with most is the most
    /// specific.
    #[must_use]
    pub fn literal_chars(&self) -> usize {
        self.0.bytes().filter(|byte| !b"*?".contains(byte)).count()
    }
}

impl fmt::Display for JobGlob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_question_marks() {
        for (pattern, name, expected) in [
            ("train", "train", true),
            ("train", "train-1", false),
            ("train-*", "train-", true),
            ("train-*", "train-7/x", true),
            ("*-7", "a-7-7", true),
            ("*-7", "a-77", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b*", "xxbxxaxx", false),
            ("**", "", true),
            ("?", "", false),
        ] {
            let glob = JobGlob::new(pattern).unwrap();
            assert_eq!(glob.matches(name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn a_pattern_that_makes_others_slow_is_fast() {
        let glob = JobGlob::new(&"*a".repeat(100)).unwrap();
        assert!(!glob.matches(&"a".repeat(99)));
        assert!(!glob.matches(&format!("{}b", "a".repeat(199))));
    }

    #[test]
    fn odd_patterns_are_refused() {
        for pattern in ["", "a b", "[a]", "a\0", "tä*", "a@1", &"x".repeat(201)] {
            assert!(JobGlob::new(pattern).is_err(), "{pattern:?}");
        }
    }
}
