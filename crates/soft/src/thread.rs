//! Threads of a library.

/// Runs `start`, which starts a thread, with all signals blocked, and then unblocks those that were
/// not blocked before. The thread inherits the mask: a signal that the program takes by a signalfd,
/// or in a thread of its own, never arrives in a thread that the program does not know.
pub(crate) fn with_signals_blocked<R>(start: impl FnOnce() -> R) -> R {
    let _restore = Blocked::new();
    start()
}

/// The mask before.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn new() -> Self {
        // SAFETY: a struct of integers, for which zero is valid.
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = unsafe { std::mem::zeroed() };
        // SAFETY: it stores a set there.
        unsafe { libc::sigfillset(&raw mut all) };
        // SAFETY: an initialized set, and a place for the mask of this thread. It cannot fail.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, &raw mut before) };
        Self(before)
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        let none = std::ptr::null_mut();
        // SAFETY: the mask that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, none) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the mask of this thread, a bit for each signal.
    fn mask() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    #[test]
    fn a_thread_blocks_all_signals_and_its_starter_those_of_before() {
        let before = mask();
        let inside = with_signals_blocked(|| std::thread::spawn(mask)).join().unwrap();
        // All but SIGKILL and SIGSTOP, and two that libc keeps for itself.
        let never = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1) | 0b11 << 31;
        assert_eq!(inside | never, u64::MAX);
        assert_eq!(mask(), before);
        let panicked = std::panic::catch_unwind(|| with_signals_blocked(|| panic!("as planned")));
        assert!(panicked.is_err() && mask() == before);
    }
}
