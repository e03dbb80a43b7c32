//! Keeps repeated lines from filling the log.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use permafrost_protocol::control::ErrorCode;

use super::event::{AuditWeight, AuditedRequest};

/// Time window in which reads of one checkpoint by one client make one line; a restore reads several files for
/// each process.
const WINDOW: Duration = Duration::from_secs(60);

/// Maximum number of refusals of one client that are written in a window: enough to see its attempts.
const REFUSALS: u64 = 100;

/// Maximum number of clients and checkpoints that are remembered. Some 100 bytes each.
const MOST_KEYS: usize = 4096;

/// Decision about a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Write the line.
    Write {
        /// Number of similar lines that were left out before.
        left_out: u64,
    },
    /// Leave the line out and count it.
    LeaveOut,
}

#[derive(Debug)]
struct Seen {
    since: Instant,
    written: u64,
    left_out: u64,
}

/// Recently written lines.
#[derive(Debug, Default)]
pub(super) struct Limiter {
    seen: HashMap<String, Seen>,
}

impl Limiter {
    /// Decides about one line; `refused` is the code of a refusal.
    pub(super) fn admit(
        &mut self,
        who: &str,
        event: &AuditedRequest,
        refused: Option<ErrorCode>,
        now: Instant,
    ) -> Verdict {
        let (key, most) = match (event.weight, refused) {
            (AuditWeight::Change, None) => return Verdict::Write { left_out: 0 },
            (AuditWeight::Read, None) => (format!("{who} {} {}", event.action, event.on), 1),
            (AuditWeight::Look, Some(ErrorCode::Denied))
            | (AuditWeight::Change | AuditWeight::Read, Some(_)) => (who.to_owned(), REFUSALS),
            (AuditWeight::Look, _) => return Verdict::LeaveOut,
        };
        if self.seen.len() >= MOST_KEYS && !self.seen.contains_key(&key) {
            self.seen.retain(|_, seen| now - seen.since < WINDOW);
            if self.seen.len() >= MOST_KEYS {
                // When in doubt, more lines are written rather than fewer.
                self.seen.clear();
            }
        }
        let seen = self.seen.entry(key).or_insert(Seen {
            since: now,
            written: 0,
            left_out: 0,
        });
        if now - seen.since >= WINDOW {
            seen.since = now;
            seen.written = 0;
        }
        if seen.written >= most {
            seen.left_out += 1;
            return Verdict::LeaveOut;
        }
        seen.written += 1;
        Verdict::Write {
            left_out: std::mem::take(&mut seen.left_out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Verdict = Verdict::Write { left_out: 0 };

    #[test]
    fn reads_are_written_once_a_minute_and_changes_always() {
        let mut limiter = Limiter::default();
        let now = Instant::now();
        let read = AuditedRequest::read("read", "a@1");
        let change = AuditedRequest::change("remove", "a@1");
        assert_eq!(limiter.admit("agent a", &read, None, now), WRITE);
        for _ in 0..3 {
            assert_eq!(
                limiter.admit("agent a", &read, None, now),
                Verdict::LeaveOut
            );
            assert_eq!(limiter.admit("agent a", &change, None, now), WRITE);
        }
        assert_eq!(limiter.admit("agent b", &read, None, now), WRITE);
        let other = AuditedRequest::read("read", "a@2");
        assert_eq!(limiter.admit("agent a", &other, None, now), WRITE);
        assert_eq!(
            limiter.admit("agent a", &read, None, now + WINDOW),
            Verdict::Write { left_out: 3 }
        );
    }

    #[test]
    fn refusals_of_one_client_are_bounded_and_counted() {
        let mut limiter = Limiter::default();
        let now = Instant::now();
        let denied = Some(ErrorCode::Denied);
        for job in 0..REFUSALS {
            let event = AuditedRequest::change("remove", format!("job{job}"));
            assert_eq!(limiter.admit("agent a", &event, denied, now), WRITE);
        }
        let show = AuditedRequest::look("show", "x");
        for _ in 0..5 {
            assert_eq!(
                limiter.admit("agent a", &show, denied, now),
                Verdict::LeaveOut
            );
        }
        assert_eq!(limiter.admit("agent b", &show, denied, now), WRITE);
        assert_eq!(
            limiter.admit("agent a", &show, denied, now + WINDOW),
            Verdict::Write { left_out: 5 }
        );
        // A refusal because there is no such job is not logged.
        let not_found = Some(ErrorCode::NotFound);
        assert_eq!(
            limiter.admit("agent c", &show, not_found, now),
            Verdict::LeaveOut
        );
        assert_eq!(
            limiter.admit("agent c", &show, None, now),
            Verdict::LeaveOut
        );
    }

    #[test]
    fn many_clients_take_no_more_memory() {
        let mut limiter = Limiter::default();
        let now = Instant::now();
        for n in 0..3 * MOST_KEYS {
            let read = AuditedRequest::read("read", format!("a@{n}"));
            assert_eq!(limiter.admit("agent a", &read, None, now), WRITE);
            assert!(limiter.seen.len() <= MOST_KEYS);
        }
    }
}
