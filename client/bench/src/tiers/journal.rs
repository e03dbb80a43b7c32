//! The journal of finished runs, from which an interrupted benchmark continues.
//!
//! `journal.jsonl` in --out: the parameters, then a line for each finished run, each made durable. A line that
//! was being written when the power failed is incomplete, is not JSON, and is ignored.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use permafrost_terminal::failure::{Code, Failure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::jobs::JobRun;
use super::measure::Measurement;
use super::plan::{Case, Plan};
use crate::machine::Machine;

const NAME: &str = "journal.jsonl";

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "snake_case")]
enum Line {
    Parameters {
        parameters: Value,
    },
    Run {
        case: Case,
        measurements: Vec<Measurement>,
    },
    Calibrated {
        steps: u64,
    },
    Job {
        job: JobRun,
    },
}

/// An open journal.
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    resumed: bool,
    parameters: Value,
    runs: Vec<(Case, Vec<Measurement>)>,
    steps: Option<u64>,
    jobs: Vec<JobRun>,
}

impl Journal {
    /// Opens the journal in the plan's directory, or creates it.
    pub(super) fn open(plan: &Plan, machine: &Machine) -> Result<Self, Failure> {
        Self::open_in(&plan.out, plan.parameters(machine), plan.restart)
    }

    fn open_in(directory: &Path, parameters: Value, restart: bool) -> Result<Self, Failure> {
        fs::create_dir_all(directory).map_err(|error| Failure::io("create", directory, &error))?;
        let path = directory.join(NAME);
        let failed = |error: std::io::Error| Failure::io("use", &path, &error);
        let text = match fs::read(&path) {
            _ if restart => Vec::new(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(failed)?,
        };
        let (lines, whole_bytes) = read_lines(&text);
        let mut journal = Self {
            file: File::options()
                .create(true)
                .append(true)
                .open(&path)
                .map_err(failed)?,
            resumed: false,
            parameters,
            runs: Vec::new(),
            steps: None,
            jobs: Vec::new(),
            path: path.clone(),
        };
        let mut lines = lines.into_iter();
        match lines.next() {
            None => {
                journal.file.set_len(0).map_err(failed)?;
                let parameters = journal.parameters.clone();
                journal.add(&Line::Parameters { parameters })?;
            }
            Some(Line::Parameters { parameters }) if parameters == journal.parameters => {
                // An incomplete line would make the next one unreadable, too.
                journal.file.set_len(whole_bytes).map_err(failed)?;
                journal.resumed = true;
            }
            Some(Line::Parameters { parameters }) => {
                return Err(other_parameters(&path, &parameters, &journal.parameters));
            }
            Some(_) => {
                return Err(Failure::new(
                    Code::Conflict,
                    format!("{} does not begin with its parameters", path.display()),
                )
                .hint("take another --out, or discard it with --restart"));
            }
        }
        for line in lines {
            match line {
                Line::Parameters { .. } => {}
                Line::Run { case, measurements } => journal.runs.push((case, measurements)),
                Line::Calibrated { steps } => journal.steps = Some(steps),
                Line::Job { job } => journal.jobs.push(job),
            }
        }
        Ok(journal)
    }

    /// Returns true if the journal existed before.
    pub(super) fn is_resumed(&self) -> bool {
        self.resumed
    }

    pub(super) fn parameters(&self) -> &Value {
        &self.parameters
    }

    /// Returns the finished runs of the tiers.
    pub(super) fn runs(&self) -> &[(Case, Vec<Measurement>)] {
        &self.runs
    }

    /// Returns the steps of computation that make a job, once they are determined.
    pub(super) fn steps(&self) -> Option<u64> {
        self.steps
    }

    pub(super) fn calibrated(&mut self, steps: u64) -> Result<(), Failure> {
        self.add(&Line::Calibrated { steps })?;
        self.steps = Some(steps);
        Ok(())
    }

    /// Returns the finished runs of the two jobs.
    pub(super) fn jobs(&self) -> &[JobRun] {
        &self.jobs
    }

    pub(super) fn has(&self, case: &Case) -> bool {
        self.runs.iter().any(|(done, _)| done == case)
    }

    pub(super) fn add_run(
        &mut self,
        case: &Case,
        measurements: Vec<Measurement>,
    ) -> Result<(), Failure> {
        let case = case.clone();
        self.add(&Line::Run {
            case: case.clone(),
            measurements: measurements.clone(),
        })?;
        self.runs.push((case, measurements));
        Ok(())
    }

    pub(super) fn add_job(&mut self, job: JobRun) -> Result<(), Failure> {
        self.add(&Line::Job { job: job.clone() })?;
        self.jobs.push(job);
        Ok(())
    }

    fn add(&mut self, line: &Line) -> Result<(), Failure> {
        let mut bytes = serde_json::to_vec(line)
            .map_err(|error| Failure::new(Code::Internal, format!("write JSON: {error}")))?;
        bytes.push(b'\n');
        self.file
            .write_all(&bytes)
            .and_then(|()| self.file.sync_data())
            .map_err(|error| Failure::io("write", &self.path, &error))
    }
}

/// Returns the lines up to the first incomplete one, and the offset at which they end.
fn read_lines(text: &[u8]) -> (Vec<Line>, u64) {
    let mut lines = Vec::new();
    let mut end = 0;
    for piece in text.split_inclusive(|&byte| byte == b'\n') {
        match serde_json::from_slice(piece) {
            Ok(line) if piece.ends_with(b"\n") => lines.push(line),
            _ => break,
        }
        end += piece.len() as u64;
    }
    (lines, end)
}

/// Returns a failure that names the parameters that differ.
fn other_parameters(path: &Path, there: &Value, here: &Value) -> Failure {
    let empty = serde_json::Map::new();
    let fields = |value: &Value| value.as_object().unwrap_or(&empty).clone();
    let (there, here) = (fields(there), fields(here));
    let differing: Vec<String> = here
        .iter()
        .filter(|(key, value)| there.get(*key) != Some(value))
        .map(|(key, value)| {
            let other = there.get(key).unwrap_or(&Value::Null);
            format!("{key} {value} here, {other} there")
        })
        .collect();
    Failure::new(
        Code::Conflict,
        format!(
            "{} is of a run with other parameters: {}",
            path.display(),
            differing.join("; ")
        ),
    )
    .hint("take another --out, repeat the other run's command to go on with it, or discard it with --restart")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tiers::arguments::Copies;

    fn case(run: u32) -> Case {
        Case {
            tier: "nvm".to_owned(),
            size_bytes: 8 << 20,
            copies: Copies::Local,
            run,
        }
    }

    fn measurement(run: u32) -> Measurement {
        Measurement {
            tier: "nvm".to_owned(),
            emulated: true,
            medium: "emulated nvm over file".to_owned(),
            size_bytes: 8 << 20,
            copies: Copies::Local,
            dirty_percent: None,
            run,
            suspend_s: 0.1,
            frozen_s: 0.05,
            resume_s: 0.2,
            memory_bytes: 9 << 20,
            stored_bytes: 8 << 20,
            cold: false,
            soft_dirty: false,
            verified: true,
        }
    }

    fn open(directory: &Path, sizes: u64) -> Result<Journal, Failure> {
        Journal::open_in(
            directory,
            json!({ "sizes_bytes": [sizes], "runs": 3 }),
            false,
        )
    }

    #[test]
    fn what_was_measured_is_there_again_and_goes_on() {
        let out = tempfile::tempdir().unwrap();
        let mut journal = open(out.path(), 8).unwrap();
        assert!(!journal.is_resumed());
        journal.add_run(&case(1), vec![measurement(1)]).unwrap();
        drop(journal);
        let mut journal = open(out.path(), 8).unwrap();
        assert!(journal.is_resumed());
        assert!(journal.has(&case(1)) && !journal.has(&case(2)));
        assert_eq!(journal.runs()[0].1, [measurement(1)]);
        journal.add_run(&case(2), vec![measurement(2)]).unwrap();
        assert_eq!(open(out.path(), 8).unwrap().runs().len(), 2);
    }

    #[test]
    fn a_line_that_was_cut_off_is_measured_again_at_whatever_byte_it_was() {
        let out = tempfile::tempdir().unwrap();
        let mut journal = open(out.path(), 8).unwrap();
        journal.add_run(&case(1), vec![measurement(1)]).unwrap();
        let first = fs::metadata(out.path().join(NAME)).unwrap().len();
        journal.add_run(&case(2), vec![measurement(2)]).unwrap();
        let whole = fs::read(out.path().join(NAME)).unwrap();
        for cut in usize::try_from(first).unwrap()..whole.len() {
            fs::write(out.path().join(NAME), &whole[..cut]).unwrap();
            let mut journal = open(out.path(), 8).unwrap();
            assert_eq!(journal.runs().len(), 1, "{cut}");
            journal.add_run(&case(2), vec![measurement(2)]).unwrap();
            assert_eq!(fs::read(out.path().join(NAME)).unwrap(), whole, "{cut}");
        }
        // In the parameters, too: then nothing was measured.
        fs::write(out.path().join(NAME), &whole[..20]).unwrap();
        assert!(!open(out.path(), 8).unwrap().is_resumed());
    }

    #[test]
    fn other_parameters_are_refused_and_named_and_can_be_discarded() {
        let out = tempfile::tempdir().unwrap();
        let mut journal = open(out.path(), 8).unwrap();
        journal.add_run(&case(1), vec![measurement(1)]).unwrap();
        let Err(refused) = open(out.path(), 64) else {
            panic!("was taken");
        };
        assert_eq!(refused.code, Code::Conflict);
        assert!(refused.message.contains("sizes_bytes [64] here, [8] there"));
        assert!(!refused.message.contains("runs"));
        assert!(refused.hint.contains("--restart"));
        let parameters = json!({ "sizes_bytes": [64], "runs": 3 });
        let journal = Journal::open_in(out.path(), parameters, true).unwrap();
        assert!(!journal.is_resumed() && journal.runs().is_empty());
        assert!(open(out.path(), 64).unwrap().is_resumed());
    }

    #[test]
    fn another_file_is_not_taken_for_a_journal() {
        let out = tempfile::tempdir().unwrap();
        let line = Line::Run {
            case: case(1),
            measurements: Vec::new(),
        };
        let text = serde_json::to_string(&line).unwrap() + "\n";
        fs::write(out.path().join(NAME), text).unwrap();
        assert!(open(out.path(), 8).is_err());
    }
}
