//! The driver's source of time.

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
