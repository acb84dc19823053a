//! What a queue's owner sleeps on until its controller has something to say.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// An interrupt of a controller, as far as its driver sees it.
pub trait Interrupt: Send + Sync {
    /// Sleeps until the interrupt has come, at most `limit`. One that came since the last call counts; it is forgotten
    /// when this returns, so whoever calls this looks at the completion queue afterwards.
    ///
    /// Whether it came. It may return early, on a signal for example: the caller looks again, and minds the time.
    fn wait(&self, limit: Duration) -> bool;
}

impl<I: Interrupt + ?Sized> Interrupt for Arc<I> {
    fn wait(&self, limit: Duration) -> bool {
        (**self).wait(limit)
    }
}

/// An interrupt that arrives at an eventfd (Linux 2.6.27): MSI-X by VFIO, or the model controller's.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, on which nothing has arrived.
    ///
    /// # Errors
    /// The system's: too many files are open.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Lets the interrupt come.
    pub fn signal(&self) {
        // A counter that is full (2^64 - 2 signals nobody took) says what there is to say already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// An eventfd that was made elsewhere. It must not block (`EFD_NONBLOCK`).
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
        // An error other than EINTR is no sleep: the caller looks again and minds the time, as if it polled.
        if !matches!(poll(&mut fds, limit.as_ref()), Ok(1..)) {
            return false;
        }
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn what_came_before_counts_once() {
        let event = EventFd::new().unwrap();
        event.signal();
        event.signal();
        assert!(event.wait(Duration::from_secs(60)));
        let began = Instant::now();
        assert!(!event.wait(Duration::from_millis(20)));
        assert!(began.elapsed() >= Duration::from_millis(20));
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
