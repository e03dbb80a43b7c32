//! Reading traces: lines of text, each error with its place and what to do.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A trace that cannot be replayed.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("read {}: {error}", path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Reason given by the system.
        error: std::io::Error,
    },
    /// A line of it makes no sense.
    #[error("{}, line {line}: {what}; {advice}", path.display())]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Fault of the line.
        what: String,
        /// Way to mend it.
        advice: &'static str,
    },
    /// It has more lines than are replayed.
    #[error(
        "{} has more than {limit} lines; a run keeps about 500 bytes for each task: split the trace, by hours for example",
        path.display()
    )]
    TooLong {
        /// Path of the file.
        path: PathBuf,
        /// Most lines that are read.
        limit: usize,
    },
    /// It has more tasks than are replayed.
    #[error(
        "{}, line {line}: more than {limit} tasks up to here; a run keeps about 500 bytes for each: split the trace, by \
         hours for example",
        path.display()
    )]
    TooManyTasks {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Most tasks that are simulated.
        limit: usize,
    },
    /// It has no line.
    #[error("{} has no jobs; is the download complete?", path.display())]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
}

/// Most lines of a trace: a file of 10^9 lines is refused after these, and not read into memory.
pub(super) const MOST_LINES: usize = 5_000_000;

/// Most tasks of a trace: 20 million take about 10 GiB.
pub(super) const MOST_TASKS: usize = 20_000_000;

/// Most bytes of a line: a file without line ends is not read into memory.
const LONGEST_LINE: usize = 4096;

/// Place in a trace, for errors.
pub(super) struct Place<'a> {
    pub(super) path: &'a Path,
    pub(super) line: usize,
}

impl Place<'_> {
    pub(super) fn refuse(&self, what: impl Into<String>, advice: &'static str) -> TraceError {
        TraceError::Line {
            path: self.path.to_owned(),
            line: self.line,
            what: what.into(),
            advice,
        }
    }

    /// Reads a number that is finite, not negative and below 10^15.
    pub(super) fn number(&self, name: &str, text: Option<&str>) -> Result<f64, TraceError> {
        let text = text.map(str::trim).unwrap_or_default();
        if text.is_empty() {
            return Err(self.refuse(
                format!("it has no {name}"),
                "the line is torn: fetch the trace again, or remove the line",
            ));
        }
        match text.parse::<f64>() {
            Ok(number) if (0.0..1e15).contains(&number) => Ok(number),
            Ok(_) => Err(self.refuse(
                format!("{text:?} is no {name}: it is negative, too large or no number"),
                "correct the line, or remove it",
            )),
            Err(_) => Err(self.refuse(
                format!("{text:?} is no {name}, but a text"),
                "is it another trace's file, or one with a header? Correct the line, or remove it",
            )),
        }
    }

    /// Reads a whole number.
    pub(super) fn whole(&self, name: &str, text: Option<&str>) -> Result<u64, TraceError> {
        let number = self.number(name, text)?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it was checked to be from 0 to 10^15"
        )]
        let whole = number as u64;
        Ok(whole)
    }
}

/// Calls `each` with every line that is not empty.
pub(super) fn lines(
    path: &Path,
    mut each: impl FnMut(&Place<'_>, &str) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let io = |error| TraceError::Io {
        path: path.to_owned(),
        error,
    };
    let mut file = BufReader::new(File::open(path).map_err(io)?);
    let mut bytes = Vec::new();
    let mut any = false;
    for line in 1.. {
        bytes.clear();
        let limit = LONGEST_LINE as u64;
        let read = std::io::Read::take(&mut file, limit).read_until(b'\n', &mut bytes);
        if read.map_err(io)? == 0 {
            break;
        }
        let place = Place { path, line };
        if line > MOST_LINES {
            return Err(TraceError::TooLong {
                path: path.to_owned(),
                limit: MOST_LINES,
            });
        }
        if bytes.len() >= LONGEST_LINE {
            return Err(place.refuse(
                format!("it is longer than {LONGEST_LINE} bytes"),
                "is it a trace, unpacked, with one job a line?",
            ));
        }
        let text = std::str::from_utf8(&bytes).map_err(|_| {
            place.refuse("it is no text", "is it still compressed? Unpack it first")
        })?;
        let text = text.trim_end_matches(['\n', '\r']);
        if text.trim().is_empty() {
            continue;
        }
        any = true;
        each(&place, text)?;
    }
    if any {
        return Ok(());
    }
    Err(TraceError::Empty {
        path: path.to_owned(),
    })
}
