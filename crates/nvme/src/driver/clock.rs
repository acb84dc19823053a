//! The driver's source of time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A monotonic clock. Tests pass one that they advance themselves.
pub trait Clock: Send + Sync {
    /// Returns the nanoseconds since a fixed point in time.
    fn now_ns(&self) -> u64;
}

/// The system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        // Saturates after 584 years.
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl<F: Fn() -> u64 + Send + Sync> Clock for F {
    fn now_ns(&self) -> u64 {
        self()
    }
}

/// A clock that stands still while the process does: what passes between two looks at it, of all
/// threads, counts as at most a second. The driver looks ten times a second or more while requests
/// are in flight.
///
/// A process that was stopped (SIGSTOP, a debugger, the freezer of a control group, a paused
/// virtual machine) finds every deadline passed, whatever the device has done, and a device of the
/// same machine has stood still too. A program that polls more rarely than every second finds
/// timeouts later, at most by as much.
#[derive(Debug)]
pub struct Unpaused<C> {
    clock: C,
    /// When it was last looked at, in the upper half, and how much is left out, in the lower one.
    /// In ticks, so that one word holds both: otherwise a thread could subtract a pause from a time
    /// before it.
    state: AtomicU64,
}

impl<C: Clock> Unpaused<C> {
    /// A tick is 2^26 ns, 67 ms: 32 bits last for 9 years.
    const TICK_BITS: u32 = 26;
    /// The ticks that a gap counts at most.
    const MAX_GAP: u64 = 15;

    /// Creates a clock that leaves the pauses of `clock` out from now on.
    pub fn new(clock: C) -> Self {
        let seen = Self::ticks(clock.now_ns());
        Self { clock, state: AtomicU64::new(seen << 32) }
    }

    fn ticks(ns: u64) -> u64 {
        (ns >> Self::TICK_BITS).min(u32::MAX.into())
    }
}

impl<C: Clock> Clock for Unpaused<C> {
    fn now_ns(&self) -> u64 {
        loop {
            let now_ns = self.clock.now_ns();
            let state = self.state.load(Ordering::Acquire);
            let (seen, left_out) = (state >> 32, state & u64::from(u32::MAX));
            // Another thread has looked since, perhaps after a pause: read again.
            let Some(gap) = Self::ticks(now_ns).checked_sub(seen) else { continue };
            let left_out = left_out + gap.saturating_sub(Self::MAX_GAP);
            let seen = (seen + gap) << 32 | left_out;
            // Written once a tick: the threads of all queues share the line.
            if gap == 0
                || self
                    .state
                    .compare_exchange(state, seen, Ordering::AcqRel, Ordering::Acquire)
                    .is_ok()
            {
                return now_ns.saturating_sub(left_out << Self::TICK_BITS);
            }
        }
    }
}

/// Backs off between two polls: spins first, then yields, then sleeps for 50 µs.
#[derive(Debug, Default)]
pub(super) struct Backoff(u32);

impl Backoff {
    const SPINS: u32 = 64;
    const YIELDS: u32 = 2000;

    pub(super) fn pause(&mut self) {
        self.0 = self.0.saturating_add(1);
        if self.0 < Self::SPINS {
            std::hint::spin_loop();
        } else if self.0 < Self::YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_gap_counts_as_at_most_a_second() {
        let raw_ns = Arc::new(AtomicU64::new(3 << 40));
        let clock = {
            let raw_ns = raw_ns.clone();
            Unpaused::new(move || raw_ns.load(Ordering::Relaxed))
        };
        let after_ms = |ms: u64| {
            let before_ns = clock.now_ns();
            raw_ns.fetch_add(ms * MS, Ordering::Relaxed);
            (clock.now_ns() - before_ns) / MS
        };
        // Within a tick of the true time, or of a second.
        for ms in [0, 1, 50, 70, 500, 939] {
            assert_eq!(after_ms(ms), ms);
        }
        for ms in [1_100, 12_000, 35_000, 86_400_000] {
            assert!((939..=1_074).contains(&after_ms(ms)), "{ms} ms");
        }
        assert_eq!(after_ms(100), 100, "time goes on");
        // What does not fit any more counts.
        raw_ns.store(u64::MAX - 1_000 * MS, Ordering::Relaxed);
        clock.now_ns();
        assert_eq!(after_ms(500), 500);
    }
}
