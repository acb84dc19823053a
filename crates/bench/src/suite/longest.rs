//! The longest of several calls.

use crate::harness::{Samples, thread_time};
use crate::record::Metric;
use std::time::Duration;

/// The unit of the longest call. The time is the thread's own, so that what else runs on the
/// processor does not count; page faults do, and interrupts, which the subject `empty-loop` shows
/// by itself.
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

/// How often calls are made again, so that what interrupts one of them does not count.
pub(super) const PASSES: usize = 3;
/// The unit of the longest call of any pass, with what interrupted it.
const ONCE: &str = "us, longest once";

/// The longest of many calls that are made in several passes, the same ones in the same order.
///
/// What belongs to a call takes its time in every pass; what the machine interrupts it for (on a
/// virtual one 40 to 100 us, in the thread's own time, too) hits another call each time. So a call
/// takes the least time of its passes, and of these the longest is recorded: what happens once, as
/// the first touch of memory, is not in it. Beside it is the longest of any pass, which the limits
/// are for.
pub(super) struct Repeated {
    /// The least time of each call, in nanoseconds.
    least: Vec<u32>,
    at: usize,
    last: Duration,
    longest: u32,
}

impl Repeated {
    /// Creates the record of passes of at most `calls` calls.
    pub(super) fn new(calls: usize) -> Self {
        Self { least: vec![u32::MAX; calls], at: 0, last: thread_time(), longest: 0 }
    }

    /// Begins a pass, with its first call.
    pub(super) fn begin_pass(&mut self) {
        self.at = 0;
        self.begin();
    }

    /// Begins a call, after something that does not count.
    pub(super) fn begin(&mut self) {
        self.last = thread_time();
    }

    /// Notes that a call has ended, and begins the next one.
    #[inline]
    pub(super) fn note(&mut self) {
        let now = thread_time();
        let ns = u32::try_from(now.saturating_sub(self.last).as_nanos()).unwrap_or(u32::MAX);
        self.last = now;
        self.add(ns);
    }

    fn add(&mut self, ns: u32) {
        self.longest = self.longest.max(ns);
        if let Some(least) = self.least.get_mut(self.at) {
            *least = (*least).min(ns);
        }
        self.at += 1;
    }

    /// Returns the longest call in nanoseconds, each as long as in its shortest pass. Call it after
    /// a pass.
    fn longest_of_least(&self) -> u32 {
        self.least.iter().take(self.at).copied().max().unwrap_or(0)
    }

    pub(super) fn record(&self, out: &mut Samples, case: &'static str) {
        out.figure(case, Metric::Time, LONGEST, f64::from(self.longest_of_least()) / 1e3);
        out.figure(case, Metric::Time, ONCE, f64::from(self.longest) / 1e3);
    }
}

/// Makes passes of calls of nothing, and records the longest as [`Repeated`] does.
pub(super) fn empty_passes(out: &mut Samples, case: &'static str, calls: usize) {
    let mut longest = Repeated::new(calls);
    for _ in 0..PASSES {
        longest.begin_pass();
        (0..calls).for_each(|_| longest.note());
    }
    longest.record(out, case);
}

/// Calls nothing as often as the other subjects call what is measured, and records the longest time
/// for it.
pub(super) fn empty_loop(out: &mut Samples, case: &'static str, calls: usize) {
    let mut longest = Longest::new();
    (0..calls).for_each(|_| longest.note());
    longest.record(out, case);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_interrupts_one_pass_of_a_call_does_not_count() {
        let mut longest = Repeated::new(3);
        for interrupted in 0..PASSES {
            longest.begin_pass();
            for call in 0..3 {
                // The last call is long by itself, and in each pass another one is interrupted for
                // longer.
                longest
                    .add(if call == interrupted { 5000 } else { 10 } + 100 * u32::from(call == 2));
            }
        }
        assert_eq!((longest.longest_of_least(), longest.longest), (110, 5100));
    }
}
