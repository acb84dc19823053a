//! Time, as the driver is told it.

use std::time::Instant;

/// A clock that never goes back. Tests pass one that they turn by hand.
pub trait Clock: Send + Sync {
    /// Nanoseconds since some moment that does not change.
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
        // 584 years.
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl<F: Fn() -> u64 + Send + Sync> Clock for F {
    fn now_ns(&self) -> u64 {
        self()
    }
}

/// What a loop does between two looks: spin for a moment, then let others run, then sleep for a little.
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
