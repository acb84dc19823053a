//! The descriptor of a queue: readable when its interrupt is, or the timer of its loop, which knows
//! when flushes end.

use super::pf_queue_t;
use crate::failure::{Failure, fail};
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

impl pf_queue_t {
    /// Returns the descriptor, which the first call creates.
    ///
    /// # Errors
    /// `ENOTSUP`: the queue has no interrupt. `EMFILE` and the like.
    pub(super) fn descriptor(&mut self) -> Result<c_int, Failure> {
        if let Some(both) = &self.descriptor {
            return Ok(both.as_raw_fd());
        }
        let Some(interrupt) = self.queue.interrupt_fd() else {
            return Err(fail!(
                ENOTSUP,
                "the queue has no interrupt: create it with PF_QUEUE_INTERRUPT"
            ));
        };
        let both = self.requests.arm().and_then(|timer| joined([interrupt, timer]));
        let both = both.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
            Failure::new(errno, format!("cannot create the descriptor of a queue: {error}"))
        })?;
        Ok(self.descriptor.insert(both).as_raw_fd())
    }
}

/// Returns a descriptor that is readable while one of two is.
fn joined(fds: [BorrowedFd<'_>; 2]) -> io::Result<OwnedFd> {
    // SAFETY: it takes a flag, and returns a descriptor or -1.
    let both = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    if both < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was created above, and nothing else has it.
    let both = unsafe { OwnedFd::from_raw_fd(both) };
    for fd in fds {
        let mut event = libc::epoll_event { events: libc::EPOLLIN.cast_unsigned(), u64: 0 };
        let (both, fd) = (both.as_raw_fd(), fd.as_raw_fd());
        // SAFETY: the descriptors are open, and the event is a local that the call reads.
        let added = unsafe { libc::epoll_ctl(both, libc::EPOLL_CTL_ADD, fd, &raw mut event) };
        if added < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(both)
}
