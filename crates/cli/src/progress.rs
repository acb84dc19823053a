//! A progress bar, on a terminal only.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::{Duration, Instant};

/// The progress of a phase, drawn on standard error if that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    /// When it began, if only its runtime ends it.
    began: Option<Instant>,
}

impl Progress {
    /// Creates a bar of `total` bytes, preceded by `title`.
    pub(crate) fn new(title: &str, total: u64) -> Self {
        let template = "{prefix:<16} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        Self { bar: bar(title, total, template), began: None }
    }

    /// Creates a bar of `runtime`, independent of the bytes.
    pub(crate) fn timed(title: &str, runtime: Duration) -> Self {
        let total = u64::try_from(runtime.as_millis()).unwrap_or(u64::MAX);
        Self {
            bar: bar(title, total, "{prefix:<16} {bar:30} {elapsed} {percent}%"),
            began: Some(Instant::now()),
        }
    }

    /// Creates a bar that is never drawn.
    #[cfg(test)]
    pub(crate) fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), began: None }
    }

    /// Advances by `bytes`.
    pub(crate) fn add(&self, bytes: u64) {
        match self.began {
            None => self.bar.inc(bytes),
            Some(began) => {
                self.bar.set_position(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX))
            }
        }
    }
}

/// A line of figures that change, drawn on standard error if that is a terminal.
#[derive(Debug)]
pub(crate) struct Line(ProgressBar);

impl Line {
    /// Creates the line, preceded by `title`.
    pub(crate) fn new(title: &str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
        if let Ok(style) = ProgressStyle::with_template("{prefix}: {wide_msg}") {
            bar.set_style(style);
        }
        bar.set_prefix(title.to_owned());
        Self(bar)
    }

    /// Shows what `text` returns, which is not called where nothing is drawn.
    pub(crate) fn show(&self, text: impl FnOnce() -> String) {
        if !self.0.is_hidden() {
            self.0.set_message(text());
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Creates a bar without a thread to draw it, which could not always be started.
fn bar(title: &str, total: u64, template: &str) -> ProgressBar {
    // `stderr` draws nothing where standard error is not a terminal.
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_prefix(title.to_owned());
    bar
}

impl Drop for Progress {
    /// Removes the bar; the report has the figures.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_of_a_timed_run_shows_the_time() {
        let timed = Progress::timed("running", Duration::from_secs(3600));
        timed.add(u64::MAX / 2);
        assert_eq!(timed.bar.length(), Some(3_600_000));
        assert!(timed.bar.position() < 3_600_000, "{}", timed.bar.position());
        let bytes = Progress::new("running", 100);
        bytes.add(40);
        assert_eq!(bytes.bar.position(), 40);
    }
}
