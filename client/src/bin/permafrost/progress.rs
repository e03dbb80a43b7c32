//! Progress on standard error, for what takes longer than about a second: a bar on a terminal, a line
//! now and then otherwise.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::context::Context;
use crate::human;

/// Quiet for this long: most requests are done by then.
const SILENT_FOR: Duration = Duration::from_millis(900);

/// Time between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// How far something is.
pub(crate) struct Progress {
    label: String,
    started: Instant,
    bar: Option<ProgressBar>,
    next_line: Option<Instant>,
}

impl Progress {
    pub(crate) fn new(context: &Context, label: impl Into<String>) -> Self {
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

    /// `done_bytes` of `total_bytes`, which is 0 while unknown.
    pub(crate) fn update(&mut self, done_bytes: u64, total_bytes: u64) {
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

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
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
        ] {
            ProgressStyle::with_template(template).unwrap();
        }
    }
}
