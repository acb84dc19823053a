//! The descriptor of a queue: readable when its interrupt is, or the timer of its loop, which knows
//! when flushes end.

use super::pf_queue_t;
use crate::failure::{Failure, fail};
use crate::handed::Handed;
use rustix::event::epoll;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

impl pf_queue_t {
    /// Returns the descriptor, which the first call creates.
    ///
    /// # Errors
    /// `ENOTSUP`: the queue has no interrupt. `EMFILE` and the like.
    pub(super) fn descriptor(&mut self) -> Result<c_int, Failure> {
        if let Some((handed, _)) = &self.descriptor {
            return Ok(handed.fd());
        }
        let Some(interrupt) = self.queue.interrupt_fd() else {
            return Err(fail!(
                ENOTSUP,
                "the queue has no interrupt: create it with PF_QUEUE_INTERRUPT"
            ));
        };
        let both = self.requests.arm().and_then(|timer| joined([interrupt, timer]));
        let both = both.and_then(|both| Ok((Handed::new(both.as_fd())?, both)));
        let both = both.map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EMFILE);
            Failure::new(errno, format!("cannot create the descriptor of a queue: {error}"))
        })?;
        Ok(self.descriptor.insert(both).0.fd())
    }
}

/// Returns a descriptor that is readable while one of two is.
fn joined(fds: [BorrowedFd<'_>; 2]) -> io::Result<OwnedFd> {
    let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for fd in fds {
        epoll::add(&both, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Ok(both)
}
