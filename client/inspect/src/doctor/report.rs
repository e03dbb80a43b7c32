//! The checks of `permafrost doctor`, and their text.

use permafrost_terminal::human;
use permafrost_terminal::visible::visible_line;
use serde::Serialize;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DoctorStatus {
    /// As it should be.
    Ok,
    /// It works, and something may surprise.
    Warning,
    /// Something does not work, or is not safe.
    Error,
    /// Could not be looked at.
    Skipped,
}

impl DoctorStatus {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
            Self::Skipped => "skipped",
        }
    }
}

/// A check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorCheck {
    /// Area that it belongs to: `kernel`, `criu`, `daemon`, `limits`, `memory`, `region`, `ports`, `cluster`, `registry`,
    /// `files`, `certificates` or `api`.
    pub area: &'static str,
    /// Name of the check within its area.
    pub check: String,
    /// Result of the check.
    pub status: DoctorStatus,
    /// Description of what was found.
    pub found: String,
    /// Advice on what to do; empty where nothing is to be done.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

/// All checks of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// Version of `permafrost`.
    pub version: &'static str,
    /// Name of the machine.
    pub host: String,
    /// Time of the checks, milliseconds since the Unix epoch.
    pub at_unix_ms: u64,
    /// Number of checks without a finding.
    pub ok: usize,
    /// Number of warnings.
    pub warnings: usize,
    /// Number of errors.
    pub errors: usize,
    /// Number of checks that could not be made.
    pub skipped: usize,
    /// The checks, by area.
    pub checks: Vec<DoctorCheck>,
}

impl DoctorReport {
    /// Formats the report for people: a line for each check, and a line of advice where there is some.
    pub(super) fn human(&self) -> String {
        let width = |of: fn(&DoctorCheck) -> usize| self.checks.iter().map(of).max().unwrap_or(0);
        let widest = width(|check| check.check.chars().count());
        let mut text = String::new();
        let mut area = "";
        for check in &self.checks {
            if check.area != area {
                area = check.area;
                text.push_str(&format!("{area}\n"));
            }
            text.push_str(&format!(
                "  {:<7}  {:<widest$}  {}\n",
                check.status.word(),
                visible_line(&check.check),
                visible_line(&check.found)
            ));
            if !check.advice.is_empty() {
                text.push_str(&format!("           do: {}\n", visible_line(&check.advice)));
            }
        }
        let count = |number: usize, one, many| {
            human::count(u64::try_from(number).unwrap_or(u64::MAX), one, many)
        };
        text.push_str(&format!(
            "\n{}, {}, {} ok, {} skipped\n",
            count(self.errors, "error", "errors"),
            count(self.warnings, "warning", "warnings"),
            self.ok,
            self.skipped
        ));
        text
    }
}

/// Collector of checks.
#[derive(Debug, Default)]
pub(super) struct Findings(Vec<DoctorCheck>);

impl Findings {
    fn push(
        &mut self,
        (area, check): (&'static str, &str),
        status: DoctorStatus,
        found: String,
        advice: String,
    ) {
        self.0.push(DoctorCheck {
            area,
            check: check.to_owned(),
            status,
            found,
            advice,
        });
    }

    pub(super) fn ok(&mut self, place: (&'static str, &str), found: impl Into<String>) {
        self.push(place, DoctorStatus::Ok, found.into(), String::new());
    }

    pub(super) fn warning(
        &mut self,
        place: (&'static str, &str),
        found: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.push(place, DoctorStatus::Warning, found.into(), advice.into());
    }

    pub(super) fn error(
        &mut self,
        place: (&'static str, &str),
        found: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.push(place, DoctorStatus::Error, found.into(), advice.into());
    }

    pub(super) fn skipped(&mut self, place: (&'static str, &str), why: impl Into<String>) {
        self.push(place, DoctorStatus::Skipped, why.into(), String::new());
    }

    pub(super) fn report(self) -> DoctorReport {
        let mut areas: Vec<&str> = Vec::new();
        for check in &self.0 {
            if !areas.contains(&check.area) {
                areas.push(check.area);
            }
        }
        let mut checks = self.0;
        checks.sort_by_key(|check| areas.iter().position(|area| *area == check.area));
        let count = |status| checks.iter().filter(|check| check.status == status).count();
        DoctorReport {
            version: env!("CARGO_PKG_VERSION"),
            host: rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            at_unix_ms: human::now_unix_ms(),
            ok: count(DoctorStatus::Ok),
            warnings: count(DoctorStatus::Warning),
            errors: count(DoctorStatus::Error),
            skipped: count(DoctorStatus::Skipped),
            checks,
        }
    }
}

#[cfg(test)]
impl Findings {
    /// Returns the result of the check with this name.
    #[track_caller]
    pub(super) fn of(&self, check: &str) -> &DoctorCheck {
        let found = self.0.iter().find(|one| one.check == check);
        found.unwrap_or_else(|| panic!("no check {check}: {:#?}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_its_checks_and_keeps_areas_together() {
        let mut findings = Findings::default();
        findings.ok(("kernel", "version"), "6.1");
        findings.error(("files", "token"), "mode 0644\x1b[2J", "chmod 600 token");
        findings.warning(("kernel", "soft-dirty"), "none", "");
        findings.skipped(("files", "key"), "permafrostd does not run");
        let report = findings.report();
        let counts = (report.ok, report.warnings, report.errors, report.skipped);
        assert_eq!(counts, (1, 1, 1, 1));
        let text = report.human();
        assert_eq!(text.matches("kernel\n").count(), 1, "{text}");
        assert!(text.contains("do: chmod 600 token"), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
        assert!(
            text.ends_with("1 error, 1 warning, 1 ok, 1 skipped\n"),
            "{text}"
        );
    }
}
