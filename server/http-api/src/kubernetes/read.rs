//! Reads the relevant facts of a pod: its job, whether it requires a checkpoint, its memory, and its start
//! time.

use std::time::Duration;

use permafrost_protocol::manifest::CheckpointRef;
use serde_json::Value;

use super::types::Pod;

/// Annotation that names the pod's job, or one checkpoint of it.
pub(super) const JOB: &str = "permafrost.io/job";

/// Annotation that names the kind of the job: jobs of a kind have similar dumps.
pub(super) const PROGRAM: &str = "permafrost.io/program";

/// Annotation that can be `required`: the pod is not started where its checkpoint cannot be read.
pub(super) const RESUME: &str = "permafrost.io/resume";

/// Annotation that has all the work of the pod, in seconds.
pub(super) const WORK: &str = "permafrost.io/work-seconds";

/// Annotation that has the time by which the pod's controller is to be done, RFC 3339 in UTC.
pub(super) const DEADLINE: &str = "permafrost.io/deadline";

/// Grace period of a pod that sets none, seconds: the default of the API server
/// (`DefaultTerminationGracePeriodSeconds`).
const GRACE_S: i64 = 30;

impl Pod {
    fn annotation(&self, name: &str) -> Option<&str> {
        let value = self.metadata.annotations.as_ref()?.get(name)?.trim();
        (!value.is_empty()).then_some(value)
    }

    /// Returns `JOB` or `JOB@GENERATION`, if the annotation names a job of the pod's own namespace. A user who may
    /// create pods in one namespace of Kubernetes can write any annotation, and must learn nothing of other
    /// tenants' jobs.
    pub(super) fn job(&self) -> Option<&str> {
        let name = self.annotation(JOB)?;
        self.check_job(name).is_ok().then_some(name)
    }

    /// Returns the reason why the annotation names no job that the pod may name, if that is so.
    pub(super) fn wrong_job(&self) -> Option<String> {
        self.check_job(self.annotation(JOB)?).err()
    }

    fn check_job(&self, name: &str) -> Result<(), String> {
        let named: CheckpointRef = name
            .parse()
            .map_err(|_| format!("{name:?} is no job and no checkpoint"))?;
        if named.job.namespace() == self.metadata.namespace {
            return Ok(());
        }
        Err(format!(
            "{name} is not a job of the pod's namespace {}",
            self.metadata.namespace
        ))
    }

    pub(super) fn program(&self) -> Option<&str> {
        self.annotation(PROGRAM)
    }

    /// Returns true if the pod must not start without its checkpoint.
    pub(super) fn must_resume(&self) -> bool {
        self.annotation(RESUME) == Some("required")
    }

    /// Returns the memory that the pod's containers request, bytes; `None` if one of them requests none, or in an
    /// unknown notation.
    pub(super) fn requested_bytes(&self) -> Option<u64> {
        let containers = self.spec.containers.as_deref()?;
        let mut sum = 0_u64;
        for container in containers {
            let requested = container.resources.requests.as_ref()?.get("memory")?;
            sum = sum.checked_add(quantity(requested)?)?;
        }
        (sum > 0).then_some(sum)
    }

    /// Returns the time that the pod has to end when it is preempted, seconds. A negative time is one second, as
    /// for the API server.
    pub(super) fn grace_s(&self) -> f64 {
        let told = self.spec.termination_grace_period_seconds;
        let seconds = told.unwrap_or(GRACE_S);
        if seconds < 0 { 1.0 } else { seconds as f64 }
    }

    /// Returns the uid of the controller that started the pod (a Job, a ReplicaSet); its own if there is none.
    pub(super) fn controller(&self) -> &str {
        let owners = self.metadata.owner_references.iter().flatten();
        let mut controllers = owners.filter(|owner| owner.controller == Some(true));
        controllers
            .next()
            .map_or(&self.metadata.uid, |owner| &owner.uid)
    }

    /// Returns all the work of the pod, if the annotation is a number of seconds.
    pub(super) fn work(&self) -> Option<Duration> {
        let seconds: f64 = self.annotation(WORK)?.parse().ok()?;
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// Returns the time from `now` to the deadline of its controller; none left if that is past.
    pub(super) fn deadline(&self, now: Duration) -> Option<Duration> {
        let deadline = unix_time(self.annotation(DEADLINE)?)?;
        Some(deadline.saturating_sub(now))
    }

    /// Returns the time since the pod was started, by this machine's clock; 0 if that clock is behind.
    pub(super) fn age(&self, now: Duration) -> Option<Duration> {
        let started = unix_time(self.status.start_time.as_deref()?)?;
        Some(now.saturating_sub(started))
    }
}

/// Parses a quantity of Kubernetes (`resource.Quantity`), rounded to whole units: a number, and a suffix or an
/// exponent.
fn quantity(value: &Value) -> Option<u64> {
    let text = match value {
        Value::String(text) => text.trim(),
        Value::Number(number) => return number.as_u64(),
        _ => return None,
    };
    let is_of_number = |character: char| character.is_ascii_digit() || ".+-".contains(character);
    let end = text
        .find(|character| !is_of_number(character))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let number: f64 = number.parse().ok()?;
    let factor = match suffix {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => f64::from(1 << 20),
        "Gi" => f64::from(1 << 30),
        "Ti" => f64::from(1 << 20) * f64::from(1 << 20),
        "Pi" => f64::from(1 << 20) * f64::from(1 << 30),
        "Ei" => f64::from(1 << 30) * f64::from(1 << 30),
        exponent => {
            let exponent = exponent.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?;
            10_f64.powi(exponent)
        }
    };
    let value = (number * factor).round();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "checked: it is whole, and in range"
    )]
    (0.0..1.8e19).contains(&value).then_some(value as u64)
}

/// Parses a time of RFC 3339 in UTC, as Kubernetes writes all of its times, to the time since the Unix epoch.
/// `None` for others.
fn unix_time(text: &str) -> Option<Duration> {
    let text = text.strip_suffix('Z')?;
    let (date, time) = text.split_once('T')?;
    let number = |text: &str| text.parse::<u64>().ok();
    let mut date = date.splitn(3, '-').map(number);
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut time = time.splitn(3, ':');
    let (hour, minute) = (number(time.next()?)?, number(time.next()?)?);
    // Fractions of a second are ignored.
    let second = number(time.next()?.split('.').next()?)?;
    let in_range = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !in_range {
        return None;
    }
    // Civil date to days: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms". Years begin in March, eras of 400
    // years in the year 0; Unix time begins 719,468 days later.
    let year = year - u64::from(month <= 2);
    let (era, year_of_era) = (year / 400, year % 400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    let days = (era * 146_097 + day_of_era).checked_sub(719_468)?;
    Some(Duration::from_secs(
        days * 86_400 + hour * 3_600 + minute * 60 + second,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Option<u64> {
        quantity(&Value::String(text.to_owned()))
    }

    #[test]
    fn quantities_are_those_of_kubernetes() {
        for (text, value) in [
            ("128974848", 128_974_848),
            ("129e6", 129_000_000),
            ("129M", 129_000_000),
            ("128974848000m", 128_974_848),
            ("123Mi", 128_974_848),
            ("1.5Gi", 1_610_612_736),
            ("1E3", 1_000),
            ("2k", 2_000),
            ("0", 0),
        ] {
            assert_eq!(bytes(text), Some(value), "{text}");
        }
        assert_eq!(quantity(&serde_json::json!(7)), Some(7));
        for bad in [
            "", "Gi", "1 Gi", "1gi", "-1", "1e", "1e400", "1..5", "16384Ei", "NaN",
        ] {
            assert_eq!(bytes(bad), None, "{bad}");
        }
    }

    #[test]
    fn times_are_those_of_kubernetes() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T00:00:00Z", 951_782_400),
            ("2024-02-29T23:59:59Z", 1_709_251_199),
            ("2026-11-21T01:04:29.123456Z", 1_795_223_069),
        ] {
            assert_eq!(
                unix_time(text),
                Some(Duration::from_secs(seconds)),
                "{text}"
            );
        }
        for bad in [
            "",
            "2024-02-29",
            "2024-13-01T00:00:00Z",
            "2024-01-01T25:00:00Z",
            "2024-01-01T00:00:00+01:00",
            "1969-12-31T23:59:59Z",
            "x-y-zTa:b:cZ",
        ] {
            assert_eq!(unix_time(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_pod_that_requests_no_memory_has_no_known_memory() {
        let pod = |containers: Value| -> Pod {
            serde_json::from_value(serde_json::json!({"spec": {"containers": containers}})).unwrap()
        };
        let one = serde_json::json!({"resources": {"requests": {"memory": "1Gi"}}});
        let other = serde_json::json!({"resources": {}});
        assert_eq!(
            pod(serde_json::json!([one, one])).requested_bytes(),
            Some(2 << 30)
        );
        assert_eq!(pod(serde_json::json!([one, other])).requested_bytes(), None);
        assert_eq!(pod(serde_json::json!([])).requested_bytes(), None);
        assert_eq!(pod(Value::Null).requested_bytes(), None);
    }
}
