//! Progress on standard error, for operations that take longer than about a second: a bar on a terminal, a line
//! now and then otherwise.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use permafrost_protocol::control;

use crate::context::Context;
use crate::human;

/// Time without any display: most requests are done by then.
const SILENT_FOR: Duration = Duration::from_millis(900);

/// Time between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Progress display of an operation that moves bytes.
pub struct ProgressDisplay {
    label: String,
    started: Instant,
    bar: Option<ProgressBar>,
    next_line: Option<Instant>,
}

impl ProgressDisplay {
    /// Starts the timer; shows nothing with `--json` or `--quiet`.
    pub fn new(context: &Context, label: impl Into<String>) -> Self {
        let started = Instant::now();
        let shown = !context.json && !context.quiet;
        let terminal = io::stderr().is_terminal();
        Self {
            label: label.into(),
            started,
            bar: (shown && terminal)
                .then(|| ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden())),
            next_line: (shown && !terminal).then(|| started + SILENT_FOR),
        }
    }

    /// Shows the progress that the daemon reports, or nothing while the request is queued.
    pub fn begun(&mut self, so_far: &control::Progress) {
        if so_far.waiting.is_none() {
            self.update(so_far.done_bytes, so_far.total_bytes);
        }
    }

    /// Shows `done_bytes` of `total_bytes`, which is 0 while unknown.
    pub fn update(&mut self, done_bytes: u64, total_bytes: u64) {
        let now = Instant::now();
        if let Some(bar) = &self.bar {
            if bar.is_hidden() && now.duration_since(self.started) >= SILENT_FOR {
                bar.set_draw_target(ProgressDrawTarget::stderr());
                bar.set_message(self.label.clone());
            }
            if total_bytes > 0 && bar.length() != Some(total_bytes) {
                bar.set_length(total_bytes);
                bar.set_style(style(
                    "{msg} [{bar:30}] {percent:>3} %  {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
                ));
            } else if total_bytes == 0 && bar.length().is_none() {
                bar.set_style(style("{msg} {spinner} {binary_bytes}, {elapsed}"));
            }
            bar.set_position(done_bytes);
        }
        if self.next_line.is_some_and(|next| now >= next) {
            self.next_line = Some(now + LINE_EVERY);
            let line = if total_bytes > 0 {
                format!(
                    "{}: {} ({} of {})\n",
                    self.label,
                    human::percent(done_bytes, total_bytes),
                    human::bytes(done_bytes),
                    human::bytes(total_bytes),
                )
            } else {
                format!("{}: {}\n", self.label, human::bytes(done_bytes))
            };
            let _ = io::stderr().write_all(line.as_bytes());
        }
    }
}

impl Drop for ProgressDisplay {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Display of a request's place in a queue.
pub struct QueueDisplay {
    label: String,
    /// Noun for the queued requests, in the plural.
    many: &'static str,
    /// Further text that is shown after the place.
    remark: &'static str,
    shown: bool,
    bar: Option<ProgressBar>,
    next_line: Instant,
    asked: Instant,
    /// True if the request has to wait.
    waits: bool,
    /// Time from the request to its admission, once it was admitted.
    waited: Option<Duration>,
}

impl QueueDisplay {
    /// Returns the display of a place in a queue of `many`.
    pub fn new(context: &Context, label: String, many: &'static str, remark: &'static str) -> Self {
        Self {
            label,
            many,
            remark,
            shown: !context.json && !context.quiet,
            bar: None,
            next_line: Instant::now(),
            asked: Instant::now(),
            waits: false,
            waited: None,
        }
    }

    /// Returns the time for which the request has been queued; 0 if it has not been queued.
    pub fn waited(&self) -> Duration {
        match self.waited {
            Some(waited) => waited,
            None if self.waits => self.asked.elapsed(),
            None => Duration::ZERO,
        }
    }

    /// Shows the place in the queue, or nothing once the request is admitted.
    pub fn update(&mut self, progress: &control::Progress) {
        if progress.waiting.is_some() {
            self.waits = true;
        } else if self.waits && self.waited.is_none() {
            self.waited = Some(self.asked.elapsed());
        }
        let Some(waiting) = progress.waiting.as_ref().filter(|_| self.shown) else {
            self.clear();
            return;
        };
        let text = self.text(waiting);
        if io::stderr().is_terminal() {
            let bar = self.bar.get_or_insert_with(|| {
                let bar = ProgressBar::new_spinner();
                bar.set_style(style("{msg}, {elapsed}"));
                bar
            });
            bar.set_message(text);
            bar.tick();
        } else if Instant::now() >= self.next_line {
            self.next_line = Instant::now() + LINE_EVERY;
            let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
        }
    }

    fn text(&self, waiting: &control::Waiting) -> String {
        let about = waiting
            .starts_in_ms
            .map_or_else(String::new, |ms| format!(", about {}", human::millis(ms)));
        format!(
            "{}: waiting for {} {} before it, {}{about}{}",
            self.label,
            waiting.before,
            self.many,
            human::bytes(waiting.bytes_before),
            self.remark
        )
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for QueueDisplay {
    fn drop(&mut self) {
        self.clear();
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants; a test renders them.
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_are_well_formed() {
        for template in [
            "{msg} [{bar:30}] {percent:>3} %  {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left",
            "{msg} {spinner} {binary_bytes}, {elapsed}",
            "{msg}, {elapsed}",
        ] {
            ProgressStyle::with_template(template).unwrap();
        }
    }
}
