//! Progress messages: a bar or a spinner on a terminal, plain lines otherwise.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Prints a line.
pub(crate) fn say(line: &str) {
    eprintln!("xtask: {line}");
}

/// Prints a line in a frame, so that it is not overlooked among the output of a long run.
pub(crate) fn say_loudly(line: &str) {
    const FRAME: &str = "############################################################";
    say(FRAME);
    say(line);
    say(FRAME);
}

/// Progress display of a longer step.
pub(crate) struct Task {
    bar: Option<ProgressBar>,
    what: String,
    start: std::time::Instant,
}

impl Task {
    /// Shows that the step begins.
    pub(crate) fn begin(what: &str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner().with_message(what.to_owned());
            bar.set_style(
                ProgressStyle::with_template("{spinner} {msg} [{elapsed}]")
                    .unwrap_or_else(|_| ProgressStyle::default_spinner()),
            );
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        if bar.is_none() {
            eprintln!("… {what}");
        }
        Self {
            bar,
            what: what.to_owned(),
            start: std::time::Instant::now(),
        }
    }

    /// Shows that the step is done, and its outcome.
    pub(crate) fn done(mut self, outcome: &str) {
        let line = format!(
            "✓ {}: {outcome} ({:.2} s)",
            self.what,
            self.start.elapsed().as_secs_f64()
        );
        match self.bar.take() {
            Some(bar) => {
                bar.finish_and_clear();
                eprintln!("{line}");
            }
            None => eprintln!("{line}"),
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
