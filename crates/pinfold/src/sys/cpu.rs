//! Processor time.

use std::fmt;
use std::time::Duration;

/// Processor time of the process: of its threads, and of the kernel's threads for its rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuTime {
    /// In user mode.
    pub user: Duration,
    /// In the kernel.
    pub system: Duration,
}

impl CpuTime {
    /// Returns the time used so far (`getrusage`).
    pub fn here() -> Self {
        // SAFETY: a struct of integers, for which zero is valid.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one `rusage` there. The call cannot fail for `RUSAGE_SELF`.
        unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
        let time = |time: libc::timeval| {
            let micros = u64::try_from(time.tv_usec).unwrap_or(0);
            Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
                + Duration::from_micros(micros)
        };
        Self { user: time(usage.ru_utime), system: time(usage.ru_stime) }
    }

    /// Returns the time used since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        let (user, system) =
            (self.user.saturating_sub(before.user), self.system.saturating_sub(before.system));
        Self { user, system }
    }
}

impl fmt::Display for CpuTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.2} s user, {:.2} s system",
            self.user.as_secs_f64(),
            self.system.as_secs_f64()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_advances_with_work() {
        let before = CpuTime::here();
        let mut sum = 0u64;
        while CpuTime::here().since(before) == CpuTime::default() {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(before.since(CpuTime::here()) == CpuTime::default());
    }
}
