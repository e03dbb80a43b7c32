//! Progress display of the benchmark, with an estimate of the remaining time.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use permafrost_terminal::context::Context;
use permafrost_terminal::human;

use super::plan::{Case, Plan};

/// Display of the progress: a line under the measurements on a terminal; elsewhere one line for each
/// measurement.
pub(super) struct Progress<'a> {
    context: &'a Context,
    bar: Option<ProgressBar>,
    started: Instant,
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a> Progress<'a> {
    pub(super) fn new(context: &'a Context, plan: &Plan, cases: &[Case]) -> Self {
        let total_bytes = cases.iter().map(|case| plan.moved_bytes(case)).sum();
        let shown = !context.json && !context.quiet && io::stderr().is_terminal();
        let bar = shown.then(|| {
            let bar =
                ProgressBar::with_draw_target(Some(total_bytes), ProgressDrawTarget::stderr());
            bar.set_style(style());
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Self {
            context,
            bar,
            started: Instant::now(),
            done_bytes: 0,
            total_bytes,
        }
    }

    /// Shows the current step.
    pub(super) fn doing(&self, what: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what.to_owned());
        }
    }

    /// Prints the measurement `line`, and counts the memory that it moved.
    pub(super) fn measured(&mut self, line: &str, bytes: u64) {
        self.done_bytes += bytes;
        match &self.bar {
            Some(bar) => {
                bar.println(line);
                bar.set_position(self.done_bytes);
            }
            None => {
                let percent = human::percent(self.done_bytes, self.total_bytes);
                let left = match self.left() {
                    Some(left) => format!(", about {} left", human::span(left.as_secs())),
                    None => String::new(),
                };
                self.context.remark(&format!("{line} ({percent}{left})"));
            }
        }
    }

    /// Takes the cases like `case`, which are left out, out of the total.
    pub(super) fn skip(&mut self, plan: &Plan, case: &Case) {
        let bytes = plan.moved_bytes(case) * u64::from(plan.runs);
        self.total_bytes = self.total_bytes.saturating_sub(bytes).max(self.done_bytes);
        if let Some(bar) = &self.bar {
            bar.set_length(self.total_bytes);
        }
    }

    fn left(&self) -> Option<Duration> {
        let left_bytes = self.total_bytes.checked_sub(self.done_bytes)?;
        if self.done_bytes == 0 || left_bytes == 0 {
            return None;
        }
        let elapsed_ms = self.started.elapsed().as_millis();
        let left_ms = elapsed_ms * u128::from(left_bytes) / u128::from(self.done_bytes);
        u64::try_from(left_ms).ok().map(Duration::from_millis)
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

const TEMPLATE: &str = "{msg} [{bar:30}] {percent:>3} %, {elapsed} so far, {eta} left";

fn style() -> ProgressStyle {
    // A constant; a test renders it.
    ProgressStyle::with_template(TEMPLATE)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_well_formed() {
        ProgressStyle::with_template(TEMPLATE).unwrap();
    }
}
