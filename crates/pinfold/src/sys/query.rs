//! System calls that are made only to find out whether they work.

use super::bpf;
use super::errno::Errno;
use super::region::Region;
use super::xdp::{self, RingKind};
use rustix::mm::UserfaultfdFlags;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsFd;

/// Makes the calls that reception makes, up to the ones that need an interface, and undoes them: a
/// socket, 1 MiB of memory, its rings, the map, the program. Returns the first one that is refused.
/// Since Linux 4.18.
pub(crate) fn af_xdp() -> Result<(), (&'static str, Errno)> {
    const BYTES: usize = 1 << 20;
    let memory = Region::anonymous(BYTES, 4096).map_err(|errno| ("mmap", errno))?;
    let socket = xdp::socket().map_err(|errno| ("socket (AF_XDP)", errno))?;
    xdp::register_umem(socket.as_fd(), memory.memory(), 4096)
        .map_err(|errno| ("setsockopt (XDP_UMEM_REG)", errno))?;
    for kind in [RingKind::Fill, RingKind::Completion, RingKind::Receive, RingKind::Transmit] {
        xdp::make_ring(socket.as_fd(), kind, 64).map_err(|errno| ("setsockopt (a ring)", errno))?;
    }
    let map = bpf::create_socket_map(1).map_err(|errno| ("bpf (the socket map)", errno))?;
    bpf::load_redirect(map.as_fd()).map_err(|errno| ("bpf (the program)", errno))?;
    Ok(())
}

/// Creates a userfaultfd, and closes it. Since Linux 4.3; without privileges for user-mode faults
/// only since 5.11.
pub(crate) fn userfaultfd() -> Result<(), Errno> {
    // SAFETY: the descriptor is registered with no memory, and closed at once: no fault is ever
    // delivered to it.
    drop(unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC) }?);
    Ok(())
}

/// Reads the frame of a page that is certainly present from `/proc/self/pagemap`; `EPERM` if it is
/// hidden. Since Linux 2.6.25; the frame number reads as 0 without `CAP_SYS_ADMIN` since 4.2.
pub(crate) fn pagemap() -> Result<(), Errno> {
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
    match entry() {
        Ok(entry) if entry & FRAME != 0 => Ok(()),
        Ok(_) => Err(Errno::new(libc::EPERM)),
        Err(error) => Err(Errno::from(&error)),
    }
}
