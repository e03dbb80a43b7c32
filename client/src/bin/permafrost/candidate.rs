//! A process of this machine as a task that may be preempted.

use std::time::Duration;

use clap::Args;
use permafrost_agent::host::arguments::parse_duration;
use permafrost_api_types::quantity::{Bytes, Count, Seconds};
use permafrost_api_types::task::{Resources, Task};
use permafrost_criu::{origin, processes};
use permafrost_terminal::failure::{Code, Failure};

use crate::api::seconds;

/// Properties of a task that cannot be read in `/proc`.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Known {
    /// Kind of the job: jobs of a kind have dumps that are alike.
    #[arg(long, value_name = "KIND")]
    pub(crate) program: Option<String>,
    /// Work it has done, such as 90m [default: its processor time, but no more than the time since its start; and
    /// what it had done before it was restored, as the job's last checkpoint tells].
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) progress: Option<Duration>,
    /// Time to its end.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) remaining: Option<Duration>,
    /// What it needs to start up before it works.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) start_up: Option<Duration>,
}

/// Describes the tree of `pid`, whose dumps belong to `job` and go to `node`.
pub(crate) fn task(
    pid: u32,
    job: Option<&str>,
    node: &str,
    known: &Known,
) -> Result<Task<'static>, Failure> {
    let usage = processes::usage(&processes::tree(pid))?;
    let time = |time: Duration| {
        Seconds::new(seconds(time)).map_err(|error| Failure::new(Code::Invalid, error.to_string()))
    };
    let resident = Bytes::try_from(usage.resident_bytes).unwrap_or(Bytes::MAX);
    Ok(Task {
        id: pid.to_string().into(),
        node: Some(node.to_owned().into()),
        job: job.map(|job| job.to_owned().into()),
        program: known.program.clone().map(Into::into),
        resident_bytes: Some(resident),
        progress_s: Some(time(known.progress.unwrap_or(usage.progress()))?),
        progress_of_this_run: known.progress.is_none(),
        process: Some(origin::process(pid)?.into()),
        remaining_s: known.remaining.map(time).transpose()?,
        start_s: known.start_up.map(time).transpose()?,
        holds: Resources {
            cpu_millis: Count::try_from(usage.cpu_millis()).unwrap_or(Count::MAX),
            memory_bytes: resident,
        },
        ..Task::default()
    })
}

/// An argument `PID:JOB` or `PID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PidOfJob {
    pub(crate) pid: u32,
    pub(crate) job: Option<String>,
}

pub(crate) fn parse_pid(text: &str) -> Result<PidOfJob, String> {
    let (pid, job) = match text.split_once(':') {
        // A job's name may hold colons, a pid does not.
        Some((pid, job)) if !job.is_empty() => (pid, Some(job.to_owned())),
        Some(_) => return Err(format!("{text:?} names no job after the colon")),
        None => (text, None),
    };
    match pid.parse() {
        Ok(pid) if pid > 0 => Ok(PidOfJob { pid, job }),
        _ => Err(format!("{pid:?} is no process")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_comes_with_its_job() {
        let parsed = |pid, job: Option<&str>| {
            Ok(PidOfJob {
                pid,
                job: job.map(str::to_owned),
            })
        };
        assert_eq!(parse_pid("42:train"), parsed(42, Some("train")));
        assert_eq!(parse_pid("42:team-a/x:1"), parsed(42, Some("team-a/x:1")));
        assert_eq!(parse_pid("42"), parsed(42, None));
        for bad in ["", "0", "-1", "x", "42:", ":train", "0:train"] {
            assert!(parse_pid(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_given_goes_before_what_is_measured() {
        let own = std::process::id();
        let measured = task(own, Some("train"), "n1", &Known::default()).unwrap();
        assert!(measured.resident_bytes.unwrap().count() > 100_000);
        assert_eq!(
            measured.holds.memory_bytes,
            measured.resident_bytes.unwrap()
        );
        assert_eq!(measured.job.as_deref(), Some("train"));
        assert!(measured.progress_s.unwrap().value() < 3_600.0);
        let given = Known {
            progress: Some(Duration::from_secs(7_200)),
            ..Known::default()
        };
        let given = task(own, None, "n1", &given).unwrap();
        assert!((given.progress_s.unwrap().value() - 7_200.0).abs() < 1e-9);
        assert_eq!(
            task(5_000_000, None, "n", &Known::default())
                .unwrap_err()
                .code,
            Code::NotFound
        );
    }
}
