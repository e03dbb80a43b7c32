//! Certificates and keys in a directory of `permafrost pki`.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use permafrost_identity::{Identity, Subject, trusted};
use permafrost_terminal::human;

use super::report::Findings;

const AREA: &str = "certificates";

/// Time before the end of a CA's validity at which a successor should be handed out.
const CA_SOON: Duration = Duration::from_secs(60 * 86_400);

pub(super) fn check(findings: &mut Findings, directory: &Path) {
    check_at(findings, directory, SystemTime::now());
}

/// Checks the dates as of `now`.
fn check_at(findings: &mut Findings, directory: &Path, now: SystemTime) {
    let shown = directory.display().to_string();
    let subject = match Subject::in_directory(directory) {
        Ok(subject) => subject,
        Err(error) => {
            return findings.error(
                (AREA, &shown),
                error.to_string(),
                "issue one with `permafrost pki issue --out DIR`",
            );
        }
    };
    let name = format!("{} {}", subject.role, subject.name);
    let place = (AREA, name.as_str());
    let life = subject
        .not_after
        .duration_since(subject.not_before)
        .unwrap_or_default();
    let left = subject.not_after.duration_since(now).unwrap_or_default();
    let expiry = human::expiry(unix_ms(subject.not_after));
    let rotate = format!(
        "`permafrost pki rotate --out {shown}` issues a new one; daemons read it without a restart"
    );
    if subject.not_before > now {
        findings.error(
            place,
            format!(
                "not valid before {}",
                human::date(unix_ms(subject.not_before))
            ),
            "set this machine's clock, or that of the machine that issued it",
        );
    } else if left.is_zero() {
        findings.error(place, format!("expired {expiry}"), rotate);
    } else if left < life / 4 {
        findings.warning(place, format!("expires {expiry}"), rotate);
    } else {
        findings.ok(place, format!("valid, expires {expiry}"));
    }
    // Its dates are judged above; the rest is judged as a connection would.
    let valid = !left.is_zero() && subject.not_before <= now;
    if let (Err(error), true) = (Identity::load(directory), valid) {
        findings.error(
            (AREA, &format!("use of {shown}")),
            error.to_string(),
            format!("make the key its owner's alone (chmod 600 {shown}/key.pem), or issue certificate and key anew"),
        );
    } else if !valid {
        super::files::secret(
            findings,
            &format!("key of {name}"),
            &directory.join("key.pem"),
        );
    }
    match trusted(directory) {
        Ok(authorities) => {
            for authority in authorities {
                let place = (AREA, authority.name.as_str());
                let left = authority.not_after.duration_since(now).unwrap_or_default();
                let expiry = human::expiry(unix_ms(authority.not_after));
                let advice = "`permafrost pki rotate --ca` makes a successor: docs/security.md, \"Rotation\"";
                if left.is_zero() {
                    findings.error(place, format!("the CA expired {expiry}"), advice);
                } else if left < CA_SOON {
                    findings.warning(place, format!("the CA expires {expiry}"), advice);
                } else {
                    findings.ok(place, format!("CA, expires {expiry}"));
                }
            }
        }
        Err(error) => findings.error(
            (AREA, &format!("CA of {shown}")),
            error.to_string(),
            "copy ca.pem of `permafrost pki init` there",
        ),
    }
}

fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use permafrost_identity::{Authority, CertificateOrder, Role};

    use super::super::DoctorStatus;
    use super::*;

    #[test]
    fn dates_are_judged_before_and_after_they_count() {
        let work = tempfile::tempdir().unwrap();
        let (ca, out) = (work.path().join("ca"), work.path().join("n1"));
        let authority = Authority::create(&ca, "test", false).unwrap();
        let order = CertificateOrder::new("n1", Role::Node);
        authority.issue(&order, &out, false).unwrap();
        let days = |days: u64| Duration::from_secs(days * 86_400);
        let now = SystemTime::now();
        for (at, expected) in [
            (now, DoctorStatus::Ok),
            (now + days(80), DoctorStatus::Warning),
            (now + days(400), DoctorStatus::Error),
            (now - days(400), DoctorStatus::Error),
        ] {
            let mut findings = Findings::default();
            check_at(&mut findings, &out, at);
            let found = findings.of("node n1");
            assert_eq!(found.status, expected, "{found:?}");
        }
        let mut findings = Findings::default();
        check_at(&mut findings, &out, now + days(400));
        let expired = findings.of("node n1");
        assert!(expired.advice.contains("pki rotate"), "{expired:?}");
    }

    #[test]
    fn a_directory_without_a_certificate_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let mut findings = Findings::default();
        check(&mut findings, directory.path());
        let found = findings.of(&directory.path().display().to_string());
        assert_eq!(found.status, DoctorStatus::Error);
        assert!(found.advice.contains("pki issue"), "{found:?}");
    }
}
