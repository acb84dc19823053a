//! Clocks of the kernel, read by the C library. (rustix finds the vDSO by itself, also where a tool
//! such as valgrind has unmapped it.)

use std::time::Duration;

/// A clock that counts from the start of the machine.
#[derive(Clone, Copy)]
pub(crate) enum Clock {
    /// `CLOCK_MONOTONIC`.
    Exact,
    /// `CLOCK_MONOTONIC_COARSE`: as of the last tick, and read in a fraction of the time.
    Coarse,
}

impl Clock {
    /// Returns the time since the start of the machine; 0 if the clock cannot be read.
    #[inline]
    pub(crate) fn now(self) -> Duration {
        let clock = match self {
            Self::Exact => libc::CLOCK_MONOTONIC,
            Self::Coarse => libc::CLOCK_MONOTONIC_COARSE,
        };
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the struct is this call's own and outlives it. On an error it is not written.
        unsafe { libc::clock_gettime(clock, &raw mut time) };
        let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
        Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::Clock;
    use std::time::Duration;

    #[test]
    fn the_coarse_clock_is_not_ahead() {
        let (coarse, exact) = (Clock::Coarse.now(), Clock::Exact.now());
        assert!(coarse <= exact && Duration::ZERO < coarse, "{coarse:?} {exact:?}");
    }
}
