//! Whether a waiter gives up the processor before it polls.
//!
//! Where many threads wait for flushes of their own, each that spins until its flush has completed
//! keeps the others from requesting theirs: the queue carries out one after another. If a waiter
//! yields first, they request meanwhile, and share the next flush. Where no other thread requests,
//! a yield may give the processor to one that keeps it for a time slice, so a waiter yields only if
//! the last one that did was followed by a request, and otherwise tries that again ever more
//! rarely.

// Not those of `sync`: what is counted here is a guess, and orders nothing.
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// How many waits in a row spin at most before one tries again whether a yield is worth it. At 1 to
/// 2 us a flush that is a time slice (3 to 6 ms).
const LONGEST: u32 = 4096;

/// What the last yields were worth. Threads may overwrite each other's counts: then one more or one
/// less of them yields.
#[derive(Debug)]
pub(in crate::invalidate) struct Yields {
    /// How many waits spin before the next one yields.
    spins: AtomicU32,
    /// How many did before the last one that yielded in vain; 0 if that was not in vain.
    backoff: AtomicU32,
    /// How often a thread requested what it waits for next.
    requests: AtomicU64,
}

impl Yields {
    pub(in crate::invalidate) const fn new() -> Self {
        Self { spins: AtomicU32::new(0), backoff: AtomicU32::new(0), requests: AtomicU64::new(0) }
    }

    /// Counts a request of a thread that waits for it next. Others would be no reason to yield:
    /// nobody waits for them.
    pub(in crate::invalidate) fn count_request(&self) {
        self.requests.store(self.requests.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(in crate::invalidate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Whether other threads requested what they wait for while the last waiter that yielded had
    /// done so.
    pub(in crate::invalidate) fn are_worth_it(&self) -> bool {
        self.backoff.load(Ordering::Relaxed) == 0
    }

    /// Whether the wait that begins now yields first.
    pub(in crate::invalidate) fn is_due(&self) -> bool {
        let spins = self.spins.load(Ordering::Relaxed);
        if spins > 0 {
            self.spins.store(spins - 1, Ordering::Relaxed);
        }
        spins == 0
    }

    /// Notes whether other threads requested what they wait for while a waiter had yielded, within
    /// less than a time slice.
    pub(in crate::invalidate) fn note(&self, was_worth_it: bool) {
        let before = self.backoff.load(Ordering::Relaxed);
        let backoff = if was_worth_it { 0 } else { (2 * before).clamp(1, LONGEST) };
        if (before, backoff) != (0, 0) {
            self.backoff.store(backoff, Ordering::Relaxed);
            self.spins.store(backoff, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Returns how many waits spin before one yields.
    fn spins(yields: &Yields) -> usize {
        (0..).take_while(|_| !yields.is_due()).count()
    }

    #[test]
    fn a_yield_in_vain_is_tried_again_ever_more_rarely_and_one_that_was_worth_it_at_once() {
        let yields = Yields::new();
        for expected in [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096, 4096] {
            assert_eq!(spins(&yields), expected);
            yields.note(false);
        }
        assert_eq!(spins(&yields), 4096);
        yields.note(true);
        assert_eq!((spins(&yields), spins(&yields)), (0, 0));
        yields.note(false);
        assert_eq!(spins(&yields), 1);
    }
}
