//! A bar on a terminal; nothing in a pipe.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How far a phase has come. Drawn on standard error, and only where that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar of `total` bytes with `title` before it.
    pub(crate) fn new(title: &str, total: u64) -> Self {
        // `stderr` draws nothing where standard error is not a terminal.
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
        let template = "{prefix:<16} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(title.to_owned());
        Self(bar)
    }

    /// One that is never drawn.
    #[cfg(test)]
    pub(crate) fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    /// `bytes` more are done.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    /// The bar goes away; what is worth keeping is in the account.
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
