//! Progress of the bench, and the estimated time that remains.

use std::time::{Duration, Instant};

use crate::ui;

/// Overhead of a sample besides its memory, expressed as MiB of memory: starting, ending, cleaning up.
const FIXED_MIB: u64 = 256;

/// Returns the weight of a sample of this size in the progress.
pub(super) fn weight(size_mib: u64) -> u64 {
    size_mib + FIXED_MIB
}

/// Counter of the finished work.
pub(super) struct Progress {
    start: Instant,
    done: u64,
    all: u64,
    task: Option<ui::Task>,
}

impl Progress {
    /// Begins; `all` is the sum of the weights to come.
    pub(super) fn begin(all: u64) -> Self {
        Self {
            start: Instant::now(),
            done: 0,
            all,
            task: None,
        }
    }

    pub(super) fn step(&mut self, what: &str) {
        let left = left(self.start.elapsed(), self.done, self.all);
        self.task = Some(ui::Task::begin(&match left {
            Some(left) => format!("[{} left] {what}", minutes(left)),
            None => what.to_owned(),
        }));
    }

    pub(super) fn done(&mut self, size_mib: u64, outcome: &str) {
        self.done += weight(size_mib);
        if let Some(task) = self.task.take() {
            task.done(outcome);
        }
    }
}

/// Returns the estimated time for the rest at the rate so far, or `None` before anything is done.
fn left(elapsed: Duration, done: u64, all: u64) -> Option<Duration> {
    let elapsed_ms = u64::try_from(elapsed.as_millis()).ok()?;
    let left_ms = elapsed_ms
        .saturating_mul(all.saturating_sub(done))
        .checked_div(done)?;
    Some(Duration::from_millis(left_ms))
}

fn minutes(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds => format!("{} min", seconds.div_ceil(60)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_takes_as_long_as_the_pace_says() {
        assert_eq!(left(Duration::from_secs(10), 0, 100), None);
        let left_of = |done| left(Duration::from_secs(10), done, 100).map(minutes);
        assert_eq!(left_of(10), Some("2 min".to_owned()));
        assert_eq!(left_of(50), Some("10 s".to_owned()));
        assert_eq!(left_of(100), Some("0 s".to_owned()));
    }
}
