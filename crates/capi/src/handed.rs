//! [`Handed`]: a descriptor that a C program is given, which it may close by mistake.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, RawFd};

/// A duplicate of one of the library's descriptors. The library uses its own: only the program
/// depends on the duplicate.
pub(crate) struct Handed {
    fd: RawFd,
    /// The library's own.
    own: RawFd,
}

/// `linux/kcmp.h`: compares open files. Missing in libc.
const KCMP_FILE: libc::c_int = 0;

impl Handed {
    /// Duplicates a descriptor that outlives the duplicate.
    ///
    /// # Errors
    /// `EMFILE` and the like.
    pub(crate) fn new(own: BorrowedFd<'_>) -> io::Result<Self> {
        let fd = rustix::io::fcntl_dupfd_cloexec(own, 0)?.into_raw_fd();
        Ok(Self { fd, own: own.as_raw_fd() })
    }

    /// Returns the duplicate in `place`, which the first call makes.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn of(place: &mut Option<Self>, own: BorrowedFd<'_>) -> io::Result<RawFd> {
        let handed = match place.take() {
            Some(handed) => handed,
            None => Self::new(own)?,
        };
        Ok(place.insert(handed).fd())
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    /// Whether the program has closed it, and perhaps opened something else under its number.
    fn is_gone(&self) -> bool {
        let process = std::process::id();
        // SAFETY: numbers only; it compares two descriptors of this process.
        let order = unsafe {
            libc::syscall(libc::SYS_kcmp, process, process, KCMP_FILE, self.fd, self.own)
        };
        match order {
            0 => false,
            1.. => true,
            _ => self.is_another_inode(),
        }
    }

    /// As [`is_gone`](Self::is_gone), where the kernel does not compare descriptors (without
    /// `CONFIG_KCMP`), or a seccomp filter forbids it. All eventfds may have one inode, so
    /// another one of the program is not told from this.
    fn is_another_inode(&self) -> bool {
        let inode = |fd| {
            // SAFETY: numbers only in the structure, so all zeros are one.
            let mut found: libc::stat = unsafe { std::mem::zeroed() };
            // SAFETY: the structure is valid for writes during the call.
            let failed = unsafe { libc::fstat(fd, &raw mut found) };
            (failed == 0).then_some((found.st_dev, found.st_ino))
        };
        inode(self.fd).is_none_or(|found| inode(self.own) != Some(found))
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        if !self.is_gone() {
            // Closed directly, because an `OwnedFd` may end the process if the program has closed
            // it. SAFETY: the duplicate, which is this object's and the program's.
            unsafe { libc::close(self.fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_nvme::EventFd;
    use std::os::fd::AsFd;

    /// Above all numbers that other tests use.
    const NUMBER: RawFd = 900;

    fn is_open(fd: RawFd) -> bool {
        // SAFETY: numbers only.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
        flags >= 0
    }

    /// A duplicate under a number that no other test gets meanwhile.
    fn handed(own: &EventFd, at: RawFd) -> Handed {
        let mut handed = Handed::new(own.as_fd()).unwrap();
        // SAFETY: numbers only.
        assert_eq!(unsafe { libc::dup3(handed.fd, at, libc::O_CLOEXEC) }, at);
        // SAFETY: the duplicate, which nothing uses from here on.
        assert_eq!(unsafe { libc::close(handed.fd) }, 0);
        handed.fd = at;
        handed
    }

    #[test]
    fn a_descriptor_is_closed_unless_the_program_has_closed_it() {
        let own = EventFd::new().unwrap();
        drop(handed(&own, NUMBER));
        assert!(!is_open(NUMBER) && is_open(own.as_fd().as_raw_fd()));

        // Closed by the program.
        let closed = handed(&own, NUMBER);
        // SAFETY: as a program might.
        assert_eq!(unsafe { libc::close(NUMBER) }, 0);
        assert!(closed.is_gone());
        drop(closed);
        assert!(is_open(own.as_fd().as_raw_fd()));

        // And then its number is that of another file of the program, of the same kind, which the
        // kernel orders before or behind it.
        let another = EventFd::new().unwrap();
        for (own, other) in [(&own, &another), (&another, &own)] {
            let replaced = handed(own, NUMBER);
            let other = other.as_fd().as_raw_fd();
            // SAFETY: numbers only.
            assert_eq!(unsafe { libc::dup3(other, NUMBER, libc::O_CLOEXEC) }, NUMBER);
            drop(replaced);
            assert!(is_open(NUMBER));
            // SAFETY: the test's own.
            assert_eq!(unsafe { libc::close(NUMBER) }, 0);
        }
    }

    /// As where the kernel does not compare descriptors.
    #[test]
    fn a_descriptor_of_another_file_is_told_by_its_inode() {
        let own = EventFd::new().unwrap();
        let mut replaced = handed(&own, NUMBER + 2);
        assert!(!replaced.is_another_inode());
        let null = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: numbers only.
        let at = unsafe { libc::dup3(null.as_raw_fd(), NUMBER + 2, libc::O_CLOEXEC) };
        assert_eq!(at, NUMBER + 2);
        assert!(replaced.is_another_inode());
        // SAFETY: the test's own.
        assert_eq!(unsafe { libc::close(NUMBER + 2) }, 0);
        assert!(replaced.is_another_inode());
        replaced.fd = -1;
    }

    /// An errno left by an earlier call says nothing about this one.
    #[test]
    fn an_open_descriptor_is_not_gone_after_an_earlier_failure() {
        let own = EventFd::new().unwrap();
        let open = handed(&own, NUMBER + 1);
        // SAFETY: a number that no file has.
        assert_eq!(unsafe { libc::fcntl(-1, libc::F_GETFD) }, -1);
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
        assert!(!open.is_gone());
        drop(open);
        assert!(!is_open(NUMBER + 1));
    }

    #[test]
    fn the_first_call_makes_it() {
        let (own, mut place) = (EventFd::new().unwrap(), None);
        let fd = Handed::of(&mut place, own.as_fd()).unwrap();
        assert_ne!(fd, own.as_fd().as_raw_fd());
        assert_eq!(Handed::of(&mut place, own.as_fd()).unwrap(), fd);
    }
}
