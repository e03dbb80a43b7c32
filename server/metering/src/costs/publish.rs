//! Decides when a report is published to other nodes: etcd must not be written each second without need.

use std::time::{Duration, Instant};

use super::report::NodeReport;

/// Shortest interval between two publications of changed figures: they change with every dump.
const FIGURES: Duration = Duration::from_secs(5);

/// Interval at which an unchanged report is published, so that its age is known.
const UNCHANGED: Duration = Duration::from_secs(30);

/// The last published report.
#[derive(Debug, Default)]
pub struct Publication {
    last: Option<(NodeReport, Instant)>,
}

impl Publication {
    /// Returns the report if it is to be published now: at once when a queue has changed, after 5 s when a figure
    /// has changed by 5 %, else every half minute.
    pub fn next(&mut self, report: NodeReport, now: Instant) -> Option<NodeReport> {
        if let Some((last, when)) = &self.last {
            let since = now.saturating_duration_since(*when);
            let is_due = since >= UNCHANGED
                || since >= FIGURES && report.figures_differ(last)
                || report.queues_differ(last);
            if !is_due {
                return None;
            }
        }
        self.last = Some((report.clone(), now));
        Some(report)
    }
}

#[cfg(test)]
mod tests {
    use permafrost_scheduling::estimator::SizedRates;
    use permafrost_scheduling::figure::{Estimate, Figure};
    use permafrost_scheduling::quantity::{BytesPerSecond, Seconds};

    use super::*;
    use crate::QueueReport;

    fn report(bytes_per_s: f64, queued: u64, age_s: u64) -> NodeReport {
        let rate = BytesPerSecond::new(bytes_per_s).unwrap();
        let figure = Figure::Known(Estimate {
            age: Seconds::from_millis(age_s * 1000),
            ..Estimate::given(rate)
        });
        NodeReport {
            sequence: age_s,
            write: SizedRates::uniform(figure),
            write_queue: QueueReport {
                bytes: queued,
                ..QueueReport::default()
            },
            ..NodeReport::default()
        }
    }

    #[test]
    fn only_what_has_changed_is_told_and_all_of_it_now_and_then() {
        let mut publication = Publication::default();
        let began = Instant::now();
        let mut told = |second, report| {
            let now = began + Duration::from_secs(second);
            publication.next(report, now).is_some()
        };
        assert!(told(0, report(1e9, 0, 0)));
        assert!(
            !told(1, report(1e9, 0, 1)),
            "nothing has changed but the age"
        );
        assert!(!told(2, report(2e9, 0, 2)), "figures are not told so often");
        assert!(told(3, report(2e9, 1 << 30, 3)), "queues are");
        assert!(!told(9, report(2.05e9, 1 << 30, 9)), "2.5 % are nothing");
        assert!(told(10, report(2.2e9, 1 << 30, 10)));
        assert!(!told(39, report(2.2e9, 1 << 30, 39)));
        assert!(told(40, report(2.2e9, 1 << 30, 40)));
        assert!(
            told(
                46,
                NodeReport {
                    write_queue: report(1e9, 1 << 30, 46).write_queue,
                    ..NodeReport::default()
                }
            ),
            "a figure that is gone is news"
        );
    }
}
