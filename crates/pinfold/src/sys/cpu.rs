//! What this process has computed.

use std::time::Duration;

/// Processor time of the whole process, all its threads and those of the kernel that work for its rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CpuTime {
    /// In the program.
    pub user: Duration,
    /// In the kernel, for the program.
    pub system: Duration,
}

impl CpuTime {
    /// Until now: `getrusage`, since the first Linux.
    pub fn here() -> Self {
        // SAFETY: a struct of integers, for which zeroes are a value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one `rusage` there. It can not fail: the one who is asked about is there.
        unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
        let time = |time: libc::timeval| {
            let micros = u64::try_from(time.tv_usec).unwrap_or(0);
            Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0)) + Duration::from_micros(micros)
        };
        Self { user: time(usage.ru_utime), system: time(usage.ru_stime) }
    }

    /// What was computed since then.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        let (user, system) =
            (self.user.saturating_sub(before.user), self.system.saturating_sub(before.system));
        Self { user, system }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_seen() {
        let before = CpuTime::here();
        let mut sum = 0u64;
        while CpuTime::here().since(before) == CpuTime::default() {
            sum = std::hint::black_box(sum + 1);
        }
        assert!(before.since(CpuTime::here()) == CpuTime::default());
    }
}
