//! Names of jobs and checkpoints.

use std::fmt;
use std::str::FromStr;

/// Longest job name, bytes.
pub const MAX_JOB_NAME_BYTES: usize = 200;

/// Reason why a text is not a job name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobNameError {
    /// The name is empty.
    #[error("a job name cannot be empty")]
    Empty,
    /// The name is too long.
    #[error("a job name has at most {MAX_JOB_NAME_BYTES} bytes, not {len_bytes}")]
    TooLong {
        /// Length of the name, bytes.
        len_bytes: usize,
    },
    /// A character that job names do not have.
    #[error("a job name cannot have {character:?}, only letters, digits and . _ : / + -")]
    BadCharacter {
        /// The first such character.
        character: char,
    },
    /// A first character that would make it an option, a hidden file or an absolute path.
    #[error("a job name cannot begin with {first:?}")]
    BadStart {
        /// First character of the name.
        first: char,
    },
    /// The name reads like a path that is not in its shortest form.
    #[error("a job name cannot have {component:?} between slashes or at its end")]
    BadComponent {
        /// The component: empty, `.` or `..`.
        component: &'static str,
    },
}

/// Checks a job name: 1 to 200 bytes of letters, digits and `. _ : / + -`, not beginning with `.`, `-` or `/`, no
/// component between slashes that is empty, `.` or `..`: fit for a command line, paths, and to be followed by `@`.
///
/// # Errors
/// The first rule it breaks.
pub fn check_job_name(name: &str) -> Result<(), JobNameError> {
    let Some(first) = name.chars().next() else {
        return Err(JobNameError::Empty);
    };
    if name.len() > MAX_JOB_NAME_BYTES {
        return Err(JobNameError::TooLong {
            len_bytes: name.len(),
        });
    }
    let allowed = |byte: u8| {
        byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b':' | b'/' | b'+' | b'-')
    };
    if !name.bytes().all(allowed) {
        let bad = name
            .chars()
            .find(|character| !u8::try_from(*character).is_ok_and(allowed));
        return Err(JobNameError::BadCharacter {
            character: bad.unwrap_or(first),
        });
    }
    if matches!(first, '.' | '-' | '/') {
        return Err(JobNameError::BadStart { first });
    }
    for component in name.split('/') {
        let bad = match component.as_bytes() {
            [] => "",
            [b'.'] => ".",
            [b'.', b'.'] => "..",
            _ => continue,
        };
        return Err(JobNameError::BadComponent { component: bad });
    }
    Ok(())
}

/// Namespace of jobs whose name has no `/`.
pub const DEFAULT_NAMESPACE: &str = "default";

/// Returns the namespace of a job: its name up to the first `/`, or [`DEFAULT_NAMESPACE`].
///
/// # Errors
/// `job` is no job name, so it is in no namespace. An empty one is not in `default`.
pub fn namespace_of(job: &str) -> Result<&str, JobNameError> {
    check_job_name(job)?;
    Ok(job
        .split_once('/')
        .map_or(DEFAULT_NAMESPACE, |(namespace, _)| namespace))
}

/// Job name that keeps the rules of [`check_job_name`]. Permissions are checked for valid names only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobName(String);

impl JobName {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the namespace that the job is in.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.0
            .split_once('/')
            .map_or(DEFAULT_NAMESPACE, |(namespace, _)| namespace)
    }
}

impl FromStr for JobName {
    type Err = JobNameError;

    fn from_str(name: &str) -> Result<Self, JobNameError> {
        check_job_name(name)?;
        Ok(Self(name.to_owned()))
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<JobName> for String {
    fn from(name: JobName) -> Self {
        name.0
    }
}

/// A checkpoint as people name it: `JOB@GEN`, or `JOB` for the newest.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckpointRef {
    /// Name of the job.
    pub job: JobName,
    /// Generation, from 1; `None` for the newest.
    pub generation: Option<u64>,
}

/// Reason why a text does not name a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointRefError {
    /// The text before `@` is not a job name.
    #[error(transparent)]
    Job(#[from] JobNameError),
    /// The text after `@` is not a generation.
    #[error("{text:?} is no generation: a decimal number from 1 is")]
    Generation {
        /// Text after the `@`.
        text: String,
    },
}

impl FromStr for CheckpointRef {
    type Err = CheckpointRefError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (job, generation) = match text.split_once('@') {
            Some((job, generation)) => (job, Some(generation)),
            None => (text, None),
        };
        let job = job.parse()?;
        let generation = generation.map(parse_generation).transpose()?;
        Ok(Self { job, generation })
    }
}

impl fmt::Display for CheckpointRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.generation {
            Some(generation) => write!(f, "{}@{generation}", self.job),
            None => f.write_str(self.job.as_str()),
        }
    }
}

/// Parses a generation: no sign and no leading zero, so that each checkpoint has one name.
fn parse_generation(text: &str) -> Result<u64, CheckpointRefError> {
    let canonical = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    let parsed = if canonical { text.parse().ok() } else { None };
    parsed.ok_or_else(|| CheckpointRefError::Generation {
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn job_names_keep_the_rules() {
        for good in [
            "a",
            "9",
            "_",
            ":x",
            "+1",
            "ns/pod-1.web:main",
            "a.b",
            "a..b",
            "a/.b",
            "a/..b",
            &"x".repeat(200),
        ] {
            assert_eq!(check_job_name(good), Ok(()), "{good:?}");
        }
        for (bad, why) in [
            ("", JobNameError::Empty),
            (&*"x".repeat(201), JobNameError::TooLong { len_bytes: 201 }),
            ("a b", JobNameError::BadCharacter { character: ' ' }),
            ("a@1", JobNameError::BadCharacter { character: '@' }),
            ("a\0", JobNameError::BadCharacter { character: '\0' }),
            ("jöb", JobNameError::BadCharacter { character: 'ö' }),
            (".a", JobNameError::BadStart { first: '.' }),
            ("..", JobNameError::BadStart { first: '.' }),
            ("-a", JobNameError::BadStart { first: '-' }),
            ("/a", JobNameError::BadStart { first: '/' }),
            ("a//b", JobNameError::BadComponent { component: "" }),
            ("a/", JobNameError::BadComponent { component: "" }),
            ("a/./b", JobNameError::BadComponent { component: "." }),
            ("a/../b", JobNameError::BadComponent { component: ".." }),
            ("a/..", JobNameError::BadComponent { component: ".." }),
        ] {
            assert_eq!(check_job_name(bad), Err(why), "{bad:?}");
        }
    }

    #[test]
    fn a_jobs_namespace_ends_at_the_first_slash() {
        for (job, namespace) in [
            ("train", "default"),
            ("default/train", "default"),
            ("team-a/train", "team-a"),
            ("team-a/x/y", "team-a"),
        ] {
            assert_eq!(namespace_of(job), Ok(namespace));
            assert_eq!(job.parse::<JobName>().unwrap().namespace(), namespace);
        }
    }

    #[test]
    fn what_is_no_job_name_is_in_no_namespace() {
        for job in ["", "/", "/train", "team-a/", "team-a//x", "..", "*", "a@1"] {
            assert!(namespace_of(job).is_err(), "{job:?}");
            assert!(job.parse::<JobName>().is_err(), "{job:?}");
        }
    }

    #[test]
    fn references_name_a_job_and_perhaps_a_generation() {
        let parse = |text: &str| text.parse::<CheckpointRef>();
        assert_eq!(
            parse("job"),
            Ok(CheckpointRef {
                job: JobName("job".into()),
                generation: None
            })
        );
        assert_eq!(
            parse("a/b@12"),
            Ok(CheckpointRef {
                job: JobName("a/b".into()),
                generation: Some(12)
            })
        );
        for text in [
            "",
            "0",
            "01",
            "+1",
            "-1",
            " 1",
            "1 ",
            "x",
            "1@2",
            "18446744073709551616",
        ] {
            let error = CheckpointRefError::Generation { text: text.into() };
            assert_eq!(parse(&format!("job@{text}")), Err(error));
        }
        assert_eq!(parse("@1"), Err(JobNameError::Empty.into()));
        assert_eq!(
            parse("a b@1"),
            Err(JobNameError::BadCharacter { character: ' ' }.into())
        );
        assert_eq!(
            parse("job@").unwrap_err().to_string(),
            r#""" is no generation: a decimal number from 1 is"#
        );
    }

    proptest! {
        #[test]
        fn references_round_trip(job in "[A-Za-z0-9_:+][A-Za-z0-9._:+-]{0,99}(/[A-Za-z0-9_][A-Za-z0-9._:+-]{0,20}){0,3}", generation in proptest::option::of(1_u64..)) {
            let reference = CheckpointRef { job: JobName(job), generation };
            prop_assert_eq!(reference.to_string().parse::<CheckpointRef>(), Ok(reference));
        }

        #[test]
        fn no_text_panics(text: String) {
            if let Ok(reference) = text.parse::<CheckpointRef>() {
                prop_assert_eq!(reference.to_string(), text);
            }
        }
    }
}
