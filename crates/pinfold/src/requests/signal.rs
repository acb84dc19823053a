//! The time of a loop, and its descriptor: a timer that expires when a flush becomes late, and at
//! once when the backend says that one has ended.

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

/// The most that the coarse clock may lag: two of the longest ticks of a kernel.
const COARSE_LAG: Duration = Duration::from_millis(20);

/// A time of `CLOCK_MONOTONIC`, since the machine was started.
///
/// Not an `Instant`, which cannot be compared with the coarse clock: each poll of a loop checks
/// whether a flush is late, and the exact clock takes as long as the rest of a poll that finds
/// nothing.
#[derive(Clone, Copy)]
pub(super) struct Time(Duration);

impl Time {
    fn of(clock: ClockId) -> Duration {
        // Never before 0.
        Duration::try_from(clock_gettime(clock)).unwrap_or_default()
    }

    pub(super) fn now() -> Self {
        Self(Self::of(ClockId::Monotonic))
    }

    pub(super) fn elapsed(self) -> Duration {
        Self::of(ClockId::Monotonic).saturating_sub(self.0)
    }

    /// False only if less than `limit` has passed.
    #[inline]
    pub(super) fn may_be_older_than(self, limit: Duration) -> bool {
        let coarse = Self::of(ClockId::MonotonicCoarse).saturating_sub(self.0);
        coarse.saturating_add(COARSE_LAG) >= limit
    }
}

/// The shortest time that a timer can be set to; 0 would stop it.
const AT_ONCE: Duration = Duration::from_nanos(1);

/// A timer (timerfd, Linux 2.6.25) that a backend can have expire.
pub(super) struct Signal {
    timer: Arc<Timer>,
    waker: Waker,
}

struct Timer(OwnedFd);

impl Timer {
    fn set(&self, after: Duration) -> io::Result<()> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // The kernel accepts times up to 2^63 - 1 s, and ends those beyond its clock there.
        let value = Timespec::try_from(after).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
        let setting = Itimerspec { it_interval: zero, it_value: value };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &setting)?;
        Ok(())
    }
}

impl Wake for Timer {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Setting a timer that exists to a valid time does not fail.
        let _ = self.set(AT_ONCE);
    }
}

impl Signal {
    fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = Arc::new(Timer(timerfd_create(TimerfdClockId::Monotonic, flags)?));
        Ok(Self { waker: Waker::from(Arc::clone(&timer)), timer })
    }

    /// Sets the signal of a loop, which is created by its first use.
    pub(super) fn set_in(place: &mut Option<Self>, limit: Option<Duration>) -> io::Result<&Self> {
        let signal = match place.take() {
            Some(signal) => signal,
            None => Self::new()?,
        };
        let signal = place.insert(signal);
        signal.set(limit)?;
        Ok(signal)
    }

    /// Makes the descriptor readable after `limit`, and not before unless it is woken; without a
    /// limit only when it is woken.
    pub(super) fn set(&self, limit: Option<Duration>) -> io::Result<()> {
        self.timer.set(limit.map_or(Duration::ZERO, |limit| limit.max(AT_ONCE)))
    }

    /// Makes it readable when it is woken.
    pub(super) fn waker(&self) -> &Waker {
        &self.waker
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.timer.0.as_fd()
    }
}
