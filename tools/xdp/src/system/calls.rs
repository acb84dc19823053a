//! `AF_XDP` sockets: creation, memory, rings, binding, waking the kernel. Linux 4.18; need-wakeup
//! flags since 5.4.

use super::{bpf, last_errno};
use pinfold::Errno;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::mm::{MapFlags, ProtFlags};
pub(crate) use rustix::net::xdp::XdpStatistics;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING,
    XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpOptionsFlags, XdpRingOffset,
    XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// One of a socket's four rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RingKind {
    Fill,
    Completion,
    Receive,
    Transmit,
}

/// Creates a socket. Requires `CAP_NET_RAW`.
pub(crate) fn socket() -> Result<OwnedFd, Errno> {
    Ok(rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

/// Registers the socket's memory, which the kernel pins and charges to `RLIMIT_MEMLOCK`:
/// `XDP_UMEM_REG`.
pub(crate) fn register_umem(
    fd: BorrowedFd<'_>,
    memory: NonNull<[u8]>,
    chunk_bytes: u32,
) -> Result<(), Errno> {
    let registration = XdpUmemReg {
        addr: memory.as_ptr().expose_provenance() as u64,
        len: memory.len() as u64,
        chunk_size: chunk_bytes,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    Ok(sockopt::set_xdp_umem_reg(fd, registration)?)
}

/// Creates a ring of `entries` entries, a power of two, and maps it.
pub(crate) fn make_ring(
    fd: BorrowedFd<'_>,
    kind: RingKind,
    entries: u32,
) -> Result<RingMemory, Errno> {
    match kind {
        RingKind::Fill => sockopt::set_xdp_umem_fill_ring_size(fd, entries),
        RingKind::Completion => sockopt::set_xdp_umem_completion_ring_size(fd, entries),
        RingKind::Receive => sockopt::set_xdp_rx_ring_size(fd, entries),
        RingKind::Transmit => sockopt::set_xdp_tx_ring_size(fd, entries),
    }?;
    let offsets = sockopt::xdp_mmap_offsets(fd)?;
    let (at, page_offset, words) = match kind {
        RingKind::Fill => (offsets.fr, XDP_UMEM_PGOFF_FILL_RING, 1),
        RingKind::Completion => (offsets.cr, XDP_UMEM_PGOFF_COMPLETION_RING, 1),
        RingKind::Receive => (offsets.rx, XDP_PGOFF_RX_RING, 2),
        RingKind::Transmit => (offsets.tx, XDP_PGOFF_TX_RING, 2),
    };
    RingMemory::map(fd, at, page_offset, entries as usize * words)
}

/// Binds the socket to a queue. `zero_copy`: required, refused, or the kernel's choice.
pub(crate) fn bind(
    fd: BorrowedFd<'_>,
    interface: u32,
    queue: u32,
    zero_copy: Option<bool>,
    need_wakeup: bool,
) -> Result<(), Errno> {
    let mut flags = match zero_copy {
        Some(true) => SocketAddrXdpFlags::XDP_ZEROCOPY,
        Some(false) => SocketAddrXdpFlags::XDP_COPY,
        None => SocketAddrXdpFlags::empty(),
    };
    flags.set(SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP, need_wakeup);
    Ok(rustix::net::bind(fd, &SocketAddrXdp::new(flags, interface, queue))?)
}

/// Returns whether the driver and the socket share pages. `XDP_OPTIONS`: Linux 5.3; false before.
pub(crate) fn is_zero_copy(fd: BorrowedFd<'_>) -> bool {
    sockopt::xdp_options(fd)
        .is_ok_and(|options| options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY))
}

/// Returns the kernel's counters of the socket: `XDP_STATISTICS`.
pub(crate) fn statistics(fd: BorrowedFd<'_>) -> Result<XdpStatistics, Errno> {
    Ok(sockopt::xdp_statistics(fd)?)
}

/// Makes the kernel poll the driver on the caller's behalf instead of waiting for interrupts:
/// `SO_PREFER_BUSY_POLL`, Linux 5.11.
pub(crate) fn prefer_busy_poll(
    fd: BorrowedFd<'_>,
    microseconds: u32,
    budget: u32,
) -> Result<(), Errno> {
    for (option, value) in [
        (libc::SO_PREFER_BUSY_POLL, 1),
        (libc::SO_BUSY_POLL, microseconds),
        (libc::SO_BUSY_POLL_BUDGET, budget),
    ] {
        let value = value.cast_signed();
        let len = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or(4);
        let value = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: the kernel reads the 4 bytes of `value`, which outlives the call.
        if unsafe { libc::setsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, option, value, len) } < 0 {
            return Err(last_errno());
        }
    }
    Ok(())
}

/// Waits until something was received or, with `writable`, can be sent; returns false after
/// `limit`.
pub(crate) fn wait(fd: BorrowedFd<'_>, writable: bool, limit: Timespec) -> Result<bool, Errno> {
    let mut interest = PollFlags::IN;
    interest.set(PollFlags::OUT, writable);
    let mut fds = [PollFd::from_borrowed_fd(fd, interest)];
    match rustix::event::poll(&mut fds, Some(&limit)) {
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
        Ok(ready) => {
            let readable = fds.iter().any(|fd| fd.revents().intersects(interest));
            // A removed interface leaves an error at the socket, which its poll does not report.
            if !readable && let Err(errno) = sockopt::socket_error(fd)? {
                return Err(errno.into());
            }
            Ok(ready > 0 && readable)
        }
    }
}

/// Makes the kernel process the transmit ring.
pub(crate) fn kick_transmit(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::send(fd, &[], SendFlags::DONTWAIT).map(drop).map_err(Errno::from)
}

/// Makes the driver check the fill ring.
pub(crate) fn kick_receive(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::recv(fd, &mut [0u8; 0], RecvFlags::DONTWAIT).map(drop).map_err(Errno::from)
}

/// The memory of a ring, shared with the kernel: two indices, flags, and entries of one or two
/// words.
///
/// The producer stores its index with release ordering after it has written the entries, and the
/// consumer loads it with acquire ordering before it reads them; in the other direction the
/// consumer's index does the same for their reuse (`net/xdp/xsk_queue.h` documents it).
#[derive(Debug)]
pub struct RingMemory {
    base: NonNull<c_void>,
    len: usize,
    /// Offsets of the two indices, of the flags if the kernel has them, and of the entries.
    producer: usize,
    consumer: usize,
    flags: Option<usize>,
    entries: usize,
    words: usize,
}

// SAFETY: the memory is accessed by atomics only, and the mapping belongs to the process.
unsafe impl Send for RingMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    fn map(
        fd: BorrowedFd<'_>,
        at: XdpRingOffset,
        page_offset: u64,
        words: usize,
    ) -> Result<Self, Errno> {
        let bytes = |raw: u64| usize::try_from(raw).unwrap_or(usize::MAX);
        let invalid = Errno::from(rustix::io::Errno::INVAL);
        let (producer, consumer) = (bytes(at.producer), bytes(at.consumer));
        let (flags, entries) = (at.flags.map(bytes), bytes(at.desc));
        let len = words.checked_mul(8).and_then(|n| n.checked_add(entries)).ok_or(invalid)?;
        let index_fits =
            |offset: usize| offset.is_multiple_of(4) && offset < len && len - offset >= 4;
        let all_fit = [Some(producer), Some(consumer), flags].into_iter().flatten().all(index_fits);
        if !all_fit || !entries.is_multiple_of(8) {
            return Err(invalid);
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let map_flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: without MAP_FIXED and with no hint the kernel chooses an unused range.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, map_flags, fd.as_fd(), page_offset)
        }?;
        let base = NonNull::new(base).ok_or(invalid)?;
        Ok(Self { base, len, producer, consumer, flags, entries, words })
    }

    fn index_at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: `map` checked that 4 bytes at `offset` lie in the mapping, which has `len` bytes.
        let at = unsafe { self.base.byte_add(offset) };
        // SAFETY: mapped, readable and writable while `self` lives; aligned, since mappings start
        // at pages and `map` checked the offset; accessed in this process through these atomics
        // only.
        unsafe { AtomicU32::from_ptr(at.cast().as_ptr()) }
    }

    /// Returns the producer's index.
    #[inline]
    pub fn producer(&self) -> &AtomicU32 {
        self.index_at(self.producer)
    }

    /// Returns the consumer's index.
    #[inline]
    pub fn consumer(&self) -> &AtomicU32 {
        self.index_at(self.consumer)
    }

    /// Returns the flags that the kernel sets, if it has them (Linux 5.4).
    #[inline]
    pub fn flags(&self) -> Option<&AtomicU32> {
        self.flags.map(|offset| self.index_at(offset))
    }

    /// Returns the entries: one word each in the fill and completion rings (an address), two in the
    /// others (an address; the length in the lower half of the second word in memory order, then
    /// options).
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: `len = entries + 8 * words`, so the entries start inside the mapping.
        let first = unsafe { self.base.byte_add(self.entries) };
        // SAFETY: `words` words from there are mapped while `self` lives, aligned to 8, initialised
        // by the kernel, and accessed in this process as these atomics only.
        unsafe { std::slice::from_raw_parts(first.cast().as_ptr(), self.words) }
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` for this value alone, with this length; what it lent borrows it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.len) };
        if let Err(errno) = unmapped {
            tracing::error!(%errno, bytes = self.len, "a ring could not be unmapped");
        }
    }
}

/// Pages of this process, for the registration that is only tried.
#[derive(Debug)]
struct Pages {
    base: NonNull<c_void>,
    bytes: usize,
}

impl Pages {
    fn new(bytes: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without MAP_FIXED and with no hint the kernel chooses an unused range.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, prot, MapFlags::PRIVATE)
        }?;
        let base = NonNull::new(base).ok_or(Errno::from(rustix::io::Errno::INVAL))?;
        Ok(Self { base, bytes })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` for this value alone, with this length.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.bytes) };
        if let Err(errno) = unmapped {
            tracing::error!(%errno, bytes = self.bytes, "pages could not be unmapped");
        }
    }
}

/// Makes the calls that reception makes, up to the ones that need an interface, and undoes them: a
/// socket, 1 MiB of memory, its rings, the map, the program. Returns the first one that is refused.
/// Since Linux 4.18.
pub(crate) fn try_all() -> Result<(), (&'static str, Errno)> {
    const BYTES: usize = 1 << 20;
    let pages = Pages::new(BYTES).map_err(|errno| ("mmap", errno))?;
    // After the pages: its descriptor is closed before they are unmapped.
    let socket = socket().map_err(|errno| ("socket (AF_XDP)", errno))?;
    let memory = NonNull::slice_from_raw_parts(pages.base.cast(), pages.bytes);
    register_umem(socket.as_fd(), memory, 4096)
        .map_err(|errno| ("setsockopt (XDP_UMEM_REG)", errno))?;
    for kind in [RingKind::Fill, RingKind::Completion, RingKind::Receive, RingKind::Transmit] {
        make_ring(socket.as_fd(), kind, 64).map_err(|errno| ("setsockopt (a ring)", errno))?;
    }
    let map = bpf::create_socket_map(1).map_err(|errno| ("bpf (the socket map)", errno))?;
    bpf::load_redirect(map.as_fd()).map_err(|errno| ("bpf (the program)", errno))?;
    Ok(())
}
