//! Warnings before a certificate expires.

use std::time::{Duration, SystemTime};

use super::Subject;

const DAY: Duration = Duration::from_secs(86_400);
const HOUR: Duration = Duration::from_secs(3_600);

/// Returns the number of warnings that are due: one when a quarter of the certificate's validity is left, and
/// one each for three days, a day, an hour and nothing, as far as those are less than a quarter.
pub(super) fn warnings_due(subject: &Subject, now: SystemTime) -> usize {
    let life = subject
        .not_after
        .duration_since(subject.not_before)
        .unwrap_or_default();
    let left = subject.not_after.duration_since(now).unwrap_or_default();
    let quarter = life / 4;
    let later = [3 * DAY, DAY, HOUR, Duration::ZERO];
    let thresholds = later.into_iter().filter(|time| *time < quarter);
    std::iter::once(quarter)
        .chain(thresholds)
        .filter(|threshold| left <= *threshold)
        .count()
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::super::{Namespaces, Role};
    use super::*;

    fn of_days(days: u32) -> Subject {
        Subject {
            serial: "1".to_owned(),
            name: "n".to_owned(),
            role: Role::Node,
            namespaces: Namespaces::default(),
            delete: false,
            hosts: Vec::new(),
            not_before: UNIX_EPOCH,
            not_after: UNIX_EPOCH + DAY * days,
        }
    }

    #[test]
    fn warnings_come_when_a_quarter_is_left_and_then_closer_together() {
        let due = |days: u32, left: Duration| {
            let subject = of_days(days);
            warnings_due(&subject, subject.not_after - left)
        };
        assert_eq!(due(90, 23 * DAY), 0);
        assert_eq!(due(90, 22 * DAY), 1);
        assert_eq!(due(90, 4 * DAY), 1);
        assert_eq!(due(90, 2 * DAY), 2);
        assert_eq!(due(90, 5 * HOUR), 3);
        assert_eq!(due(90, HOUR / 2), 4);
        assert_eq!(due(90, Duration::ZERO), 5);
        // A certificate that is valid for one day gets no warnings counted in days.
        assert_eq!(due(1, 7 * HOUR), 0);
        assert_eq!(due(1, 5 * HOUR), 1);
        assert_eq!(due(1, HOUR), 2);
        assert_eq!(due(1, Duration::ZERO), 3);
    }

    #[test]
    fn a_certificate_that_is_over_stays_so() {
        let subject = of_days(90);
        let long_after = subject.not_after + 1_000 * DAY;
        assert_eq!(warnings_due(&subject, long_after), 5);
    }
}
