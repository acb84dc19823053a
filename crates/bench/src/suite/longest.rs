//! The longest of several calls.

use crate::harness::{Samples, thread_time};
use crate::record::Metric;
use std::time::Duration;

/// The unit of the longest call. The time is the thread's own, so that what else runs on the processor does not count; page
/// faults do, and interrupts, which the subject `empty-loop` shows by itself.
pub(crate) const LONGEST: &str = "us, longest call";

/// The longest of several calls.
pub(super) struct Longest {
    last: Duration,
    longest: Duration,
}

impl Longest {
    pub(super) fn new() -> Self {
        Self { last: thread_time(), longest: Duration::ZERO }
    }

    /// Begins a call.
    pub(super) fn begin(&mut self) {
        self.last = thread_time();
    }

    /// Notes that a call has ended, and begins the next one.
    pub(super) fn note(&mut self) {
        let now = thread_time();
        self.longest = self.longest.max(now.saturating_sub(self.last));
        self.last = now;
    }

    /// Returns the longest so far, in microseconds.
    pub(super) fn us(&self) -> f64 {
        self.longest.as_secs_f64() * 1e6
    }

    pub(super) fn record(&self, out: &mut Samples, case: &'static str) {
        out.figure(case, Metric::Time, LONGEST, self.us());
    }
}

/// Calls nothing as often as the other subjects call what is measured, and records the longest time for it.
pub(super) fn empty_loop(out: &mut Samples, case: &'static str, calls: usize) {
    let mut longest = Longest::new();
    (0..calls).for_each(|_| longest.note());
    longest.record(out, case);
}
