//! Signals that one thread waits for, so that a thread blocked in the kernel cannot delay them.

use super::errno::{Errno, last_errno};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

/// Signals that are blocked in the thread that made this and in all threads it starts afterwards.
/// They stay pending until [`wait`](Self::wait) takes them.
///
/// A handler runs only when its thread returns from the kernel. A thread that waits for a file
/// system that does not respond sleeps killably: it returns for SIGKILL and runs no handler. A
/// thread that waits for the signals receives them whatever the others do.
#[derive(Clone, Copy)]
pub struct Signals {
    set: libc::sigset_t,
}

impl std::fmt::Debug for Signals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signals").finish_non_exhaustive()
    }
}

impl Signals {
    /// Blocks those of `signals` that the process does not ignore: one that was ignored when the
    /// program started (`nohup`, a job of a non-interactive shell) stays ignored. `sigaction`,
    /// `pthread_sigmask`: since the first Linux.
    ///
    /// # Errors
    /// EINVAL for a number that is not a signal.
    pub fn block(signals: &[i32]) -> Result<Self, Errno> {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initializes the whole set.
        unsafe { libc::sigemptyset(set.as_mut_ptr()) };
        // SAFETY: it was just initialized.
        let mut set = unsafe { set.assume_init() };
        for &signal in signals {
            if is_ignored(signal)? {
                continue;
            }
            // SAFETY: an initialized set; the number was found valid by `is_ignored`.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
        // SAFETY: an initialized set; the old mask is not asked for.
        match unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut())
        } {
            0 => Ok(Self { set }),
            errno => Err(Errno::new(errno)),
        }
    }

    /// Waits until one of the signals arrives, at most `limit` (a day if there is none); `None` if
    /// none did.
    pub fn wait(&self, limit: Option<Duration>) -> Option<i32> {
        let limit = limit.unwrap_or(Duration::from_secs(86_400));
        let timeout = libc::timespec {
            tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(limit.subsec_nanos().cast_signed()),
        };
        // SAFETY: an initialized set and a valid timeout; further information about the signal is
        // not requested.
        let signal = unsafe {
            libc::sigtimedwait(&raw const self.set, std::ptr::null_mut(), &raw const timeout)
        };
        (signal > 0).then_some(signal)
    }

    /// Has a command that is started from a thread with blocked signals start with none blocked: it
    /// would inherit the mask, and could be ended by SIGKILL alone.
    pub fn unblock_in(command: &mut Command) -> &mut Command {
        let unblock = || {
            let mut set = MaybeUninit::<libc::sigset_t>::uninit();
            // SAFETY: `sigemptyset` initializes the whole set.
            unsafe { libc::sigemptyset(set.as_mut_ptr()) };
            // SAFETY: the set is initialized, and the old mask is not asked for.
            match unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, set.as_ptr(), std::ptr::null_mut())
            } {
                0 => Ok(()),
                errno => Err(io::Error::from_raw_os_error(errno)),
            }
        };
        // SAFETY: between fork and exec it calls two functions that are async-signal-safe, and
        // allocates nothing.
        unsafe { command.pre_exec(unblock) }
    }
}

/// Returns whether the process ignores the signal.
fn is_ignored(signal: i32) -> Result<bool, Errno> {
    let mut now = MaybeUninit::uninit();
    // SAFETY: no new action is set; the kernel writes the current one.
    if unsafe { libc::sigaction(signal, std::ptr::null(), now.as_mut_ptr()) } != 0 {
        return Err(last_errno());
    }
    // SAFETY: the call succeeded, so it was written.
    let now: libc::sigaction = unsafe { now.assume_init() };
    Ok(now.sa_sigaction == libc::SIG_IGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_that_was_blocked_is_taken_by_the_thread_that_waits() {
        // In a thread of its own: the mask is the thread's, and is gone with it.
        std::thread::spawn(|| {
            let signals = Signals::block(&[libc::SIGUSR2]).unwrap();
            assert_eq!(signals.wait(Some(Duration::from_millis(1))), None);
            // SAFETY: a signal to this thread, which has it blocked.
            unsafe { libc::raise(libc::SIGUSR2) };
            assert_eq!(signals.wait(None), Some(libc::SIGUSR2));
            assert_eq!(Signals::block(&[12_345]).unwrap_err().raw(), libc::EINVAL);
        })
        .join()
        .unwrap();
    }
}
