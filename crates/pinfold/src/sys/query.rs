//! System calls that are made only to find out whether they work.

use super::errno::Errno;
use rustix::mm::UserfaultfdFlags;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{FromRawFd, OwnedFd};

/// Creates an AF_XDP socket, and closes it. Since Linux 4.18; needs `CAP_NET_RAW`.
pub(crate) fn xdp_socket() -> Result<(), Errno> {
    // SAFETY: the call takes no pointer.
    let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(super::errno::last_errno());
    }
    // SAFETY: the kernel has just returned this descriptor, so this is its only owner.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// Creates a userfaultfd, and closes it. Since Linux 4.3; without privileges for user-mode faults only since 5.11.
pub(crate) fn userfaultfd() -> Result<(), Errno> {
    // SAFETY: the descriptor is registered with no memory, and closed at once: no fault is ever delivered to it.
    drop(unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC) }?);
    Ok(())
}

/// Returns whether `/proc/self/pagemap` shows the frame of a page that is certainly present. Since Linux 2.6.25; the frame number
/// reads as 0 without `CAP_SYS_ADMIN` since 4.2.
pub(crate) fn pagemap_shows_frames() -> bool {
    let here = 1u8;
    let page = std::ptr::from_ref(&here).addr() as u64 / rustix::param::page_size() as u64;
    let entry = || -> std::io::Result<u64> {
        let mut pagemap = std::fs::File::open("/proc/self/pagemap")?;
        pagemap.seek(SeekFrom::Start(page.saturating_mul(8)))?;
        let mut bytes = [0; 8];
        pagemap.read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    };
    const FRAME: u64 = (1 << 55) - 1;
    entry().is_ok_and(|entry| entry & FRAME != 0)
}
