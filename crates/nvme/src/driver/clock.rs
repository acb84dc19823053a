//! The driver's source of time, and the delays of retries.

use crate::spec::{ControllerData, Status};
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

/// A clock that stops while the process is stopped: the time between two readings, of all threads,
/// counts as at most a second. The driver reads it ten times a second or more while requests are in
/// flight.
///
/// A process that was stopped (SIGSTOP, a debugger, the freezer of a control group, a paused
/// virtual machine) finds every deadline passed, even if the device was on time, and a device of
/// the same machine was stopped too. A program that polls more rarely than every second finds
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
            // Another thread has read the clock since, perhaps after a pause: read again.
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
    pub(super) const SPINS: u32 = 64;
    const YIELDS: u32 = 2000;

    pub(super) fn pause(&mut self) {
        self.0 = self.0.saturating_add(1);
        if self.0 < Self::SPINS {
            std::hint::spin_loop();
        } else {
            Self::pause_after(self.0);
        }
    }

    /// The pause after so many polls, without the spins: for a thread that another may wait for.
    pub(super) fn pause_after(polls: u32) {
        if polls < Self::YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
}

// How long to wait before a command is retried: CRDT1 to CRDT3 of the identify data, as the status
// selects by CRD (Base 3.3.3.2.1); without one, a back-off that doubles.

/// The first delay where the controller asks for none; each further one is twice as long.
const FIRST_DELAY_NS: u64 = 1_000_000;
const MAX_DELAY_NS: u64 = 1_000_000_000;

/// CRDT1 to CRDT3 of a controller, in nanoseconds; 0 means that it reports none.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct RetryDelays([u64; 3]);

impl RetryDelays {
    pub(super) fn new(data: &ControllerData) -> Self {
        Self(
            data.retry_delays
                .map(|units| u64::from(units.get()) * ControllerData::RETRY_DELAY_UNIT_NS),
        )
    }

    /// Returns whether the controller reports any delay.
    pub(super) fn any(self) -> bool {
        self.0.iter().any(|ns| *ns > 0)
    }

    /// Returns how long to wait after `status`, when the command has been retried `attempts` times
    /// and `left_ns` are left; `None` if that is too short. A back-off ends with a last attempt at
    /// the limit.
    pub(super) fn delay_ns(self, status: Status, attempts: u32, left_ns: u64) -> Option<u64> {
        let reported =
            usize::from(status.retry_delay()).checked_sub(1).and_then(|index| self.0.get(index));
        match reported {
            Some(&ns @ 1..) => (ns <= left_ns).then_some(ns),
            _ if left_ns == 0 => None,
            _ => Some((FIRST_DELAY_NS << attempts.min(16)).min(MAX_DELAY_NS).min(left_ns)),
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
        // Time that does not fit any more counts.
        raw_ns.store(u64::MAX - 1_000 * MS, Ordering::Relaxed);
        clock.now_ns();
        assert_eq!(after_ms(500), 500);
    }
}

#[cfg(test)]
mod retry_tests {
    use super::*;
    use zerocopy::little_endian::U16;

    #[test]
    fn a_delay_is_the_controllers_or_a_back_off() {
        let mut data = ControllerData::zeroed();
        assert!(!RetryDelays::new(&data).any());
        data.retry_delays = [20, 0, 65_535].map(U16::new);
        let delays = RetryDelays::new(&data);
        let status = |crd| Status::NAMESPACE_NOT_READY.with_retry_delay(crd);
        let second = 1_000_000_000;
        assert_eq!(delays.delay_ns(status(1), 9, 2 * second), Some(2 * second));
        assert_eq!(delays.delay_ns(status(1), 0, 2 * second - 1), None);
        assert_eq!(delays.delay_ns(status(3), 0, u64::MAX), Some(6_553_500_000_000));
        // CRD 2 selects a delay that is not reported, and CRD 0 none.
        for crd in [0, 2] {
            let after = |attempts, left_ns| delays.delay_ns(status(crd), attempts, left_ns);
            let long: Vec<_> =
                [0, 1, 2, 9, 10, u32::MAX].map(|n| after(n, u64::MAX).unwrap() / 1_000_000).into();
            assert_eq!(long, [1, 2, 4, 512, 1000, 1000]);
            assert_eq!((after(9, 5), after(9, 0)), (Some(5), None));
        }
    }
}
