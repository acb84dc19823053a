//! Interrupts that a queue's owner waits for.
//!
//! ```
//! use pinfold_nvme::{EventFd, Interrupt};
//! use std::time::Duration;
//!
//! # fn main() -> std::io::Result<()> {
//! let event = EventFd::new()?;
//! event.signal();
//! assert!(event.wait(Duration::from_secs(1)));
//! assert!(event.interrupt_fd().is_some()); // for epoll
//! # Ok(()) }
//! ```

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// An interrupt of a controller.
///
/// A queue waits for it on the thread of its owner, one call at a time; queues that share one may
/// take it from each other. Nothing but time depends on it: whatever a wait returns, and whenever,
/// the queue reads its completions afterwards, and it never asks for a wait of more than 100 ms. A
/// panic passes through the call of the queue, whose requests stay in flight.
pub trait Interrupt: Send + Sync {
    /// Sleeps until the interrupt arrives, for at most `limit`, and clears it; returns whether it
    /// arrived, which is counted. An interrupt since the last call counts. A `limit` of zero only
    /// clears it.
    ///
    /// It may return early, on a signal for example; the caller keeps the time.
    fn wait(&self, limit: Duration) -> bool;

    /// Returns a descriptor that is readable while the interrupt is pending, if there is one, always
    /// the same; without one, a program cannot wait for it in its own event loop.
    fn interrupt_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl<I: Interrupt + ?Sized> Interrupt for Arc<I> {
    fn wait(&self, limit: Duration) -> bool {
        (**self).wait(limit)
    }

    fn interrupt_fd(&self) -> Option<BorrowedFd<'_>> {
        (**self).interrupt_fd()
    }
}

/// An interrupt that arrives at an eventfd (Linux 2.6.27): MSI-X by VFIO, or of the model
/// controller.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Creates an eventfd without a pending interrupt.
    ///
    /// # Errors
    /// The system error: too many files are open.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Raises the interrupt.
    pub fn signal(&self) {
        // A full counter (2^64 - 2 signals) is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// Wraps an eventfd, which must be non-blocking (`EFD_NONBLOCK`).
impl From<OwnedFd> for EventFd {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Interrupt for EventFd {
    fn wait(&self, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).ok();
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        // On an error the caller polls.
        if !matches!(poll(&mut fds, limit.as_ref()), Ok(1..)) {
            return false;
        }
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }

    fn interrupt_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn earlier_signals_count_once() {
        let event = EventFd::new().unwrap();
        event.signal();
        event.signal();
        assert!(event.wait(Duration::from_secs(60)));
        let start = Instant::now();
        assert!(!event.wait(Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(20));
    }

    #[test]
    fn a_sleeper_is_woken() {
        let event = Arc::new(EventFd::new().unwrap());
        let waker = {
            let event = event.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(10));
                event.signal();
            })
        };
        assert!(event.wait(Duration::from_secs(60)));
        waker.join().unwrap();
    }
}
