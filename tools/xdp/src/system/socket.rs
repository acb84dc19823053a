//! A socket, the memory of its rings, and an arena as its UMEM.

use super::calls::{self as xdp, RingKind, RingMemory};
use super::interface::{CallError, Interface, at};
use pinfold::memory::Offsets;
use pinfold_core::dma_pool::ChunkSource;
use rustix::event::Timespec;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// The number of entries in each ring of a socket: powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingSizes {
    /// The fill ring: chunks that the kernel may write packets to.
    pub fill: u32,
    /// The completion ring: chunks that have been sent.
    pub completion: u32,
    /// The receive ring.
    pub receive: u32,
    /// The transmit ring.
    pub transmit: u32,
}

/// The memory of a socket's four rings.
#[derive(Debug)]
pub struct RingMemories {
    /// The fill ring.
    pub fill: RingMemory,
    /// The completion ring.
    pub completion: RingMemory,
    /// The receive ring.
    pub receive: RingMemory,
    /// The transmit ring.
    pub transmit: RingMemory,
}

/// The kernel's counters of a socket (`XDP_STATISTICS`), in packets.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SocketStats {
    /// Dropped, but not because the receive ring was full: without a chunk to receive into, or
    /// larger than one.
    pub dropped: u64,
    /// Dropped because the receive ring was full.
    pub receive_ring_full: u64,
    /// The number of times that the fill ring was empty when the kernel needed a chunk. In copy
    /// mode such a packet is dropped.
    pub fill_ring_empty: u64,
    /// Entries of the fill ring that the kernel refused.
    pub fill_invalid: u64,
    /// Entries of the transmit ring that the kernel refused.
    pub transmit_invalid: u64,
}

/// A socket bound to no queue yet or to one, with its memory registered. It is closed when it and
/// its [`RingMemories`], whose mappings refer to it, have been dropped: the kernel reads and writes
/// none of its memory afterwards, except what it has not finished sending.
#[derive(Debug)]
pub struct RawSocket {
    fd: OwnedFd,
    /// Registered: not released before the descriptor is closed, which is above.
    umem: Umem,
}

impl RawSocket {
    /// Creates a socket, registers all of the UMEM in chunks of `chunk_bytes`, and maps the rings.
    ///
    /// # Errors
    /// A [`CallError`]: `EPERM` without `CAP_NET_RAW`, `ENOBUFS` beyond `RLIMIT_MEMLOCK`, `EINVAL`
    /// for sizes that the kernel does not accept.
    ///
    /// # Safety
    /// The caller makes each address that it enters in the fill or transmit ring, and the bytes up
    /// to the end of its chunk, memory of the UMEM that the caller owns (a page of a pool over the
    /// UMEM, for instance) until the entry has come back in the receive or completion ring, or the
    /// socket and its ring memories have been dropped. No reference points there meanwhile.
    pub unsafe fn open(
        umem: Umem,
        chunk_bytes: u32,
        sizes: RingSizes,
    ) -> Result<(Self, RingMemories), CallError> {
        let fd = xdp::socket().map_err(at("socket (AF_XDP)"))?;
        let registered = xdp::register_umem(fd.as_fd(), umem.span(), chunk_bytes);
        registered.map_err(at("setsockopt (XDP_UMEM_REG)"))?;
        let ring =
            |kind, entries, call| xdp::make_ring(fd.as_fd(), kind, entries).map_err(at(call));
        let rings = RingMemories {
            fill: ring(RingKind::Fill, sizes.fill, "the fill ring")?,
            completion: ring(RingKind::Completion, sizes.completion, "the completion ring")?,
            receive: ring(RingKind::Receive, sizes.receive, "the receive ring")?,
            transmit: ring(RingKind::Transmit, sizes.transmit, "the transmit ring")?,
        };
        Ok((Self { fd, umem }, rings))
    }

    /// Binds it to a queue. `zero_copy`: required, refused, or the kernel's choice (`None`).
    ///
    /// # Errors
    /// A [`CallError`]: `EBUSY` if another socket has the queue, `EINVAL` if there is no such
    /// queue, `EOPNOTSUPP` if the driver has no zero-copy, `ENETDOWN` if the interface is down.
    pub fn bind(
        &self,
        interface: &Interface,
        queue: u32,
        zero_copy: Option<bool>,
        need_wakeup: bool,
    ) -> Result<(), CallError> {
        xdp::bind(self.fd(), interface.index(), queue, zero_copy, need_wakeup).map_err(at("bind"))
    }

    /// Makes the kernel poll the driver for up to `time` and `budget` packets in each call, instead
    /// of waiting for interrupts.
    ///
    /// # Errors
    /// [`CallError`]: `ENOPROTOOPT` before Linux 5.11.
    pub fn prefer_busy_poll(&self, time: Duration, budget: u32) -> Result<(), CallError> {
        let microseconds = u32::try_from(time.as_micros()).unwrap_or(u32::MAX).min(1_000_000);
        xdp::prefer_busy_poll(self.fd(), microseconds, budget.min(65_535))
            .map_err(at("setsockopt (SO_PREFER_BUSY_POLL)"))
    }

    /// Returns whether the driver and the socket share pages, so that packets are not copied.
    pub fn is_zero_copy(&self) -> bool {
        xdp::is_zero_copy(self.fd())
    }

    /// Returns the kernel's counters.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn stats(&self) -> Result<SocketStats, CallError> {
        let raw = xdp::statistics(self.fd()).map_err(at("getsockopt (XDP_STATISTICS)"))?;
        Ok(SocketStats {
            dropped: raw.rx_dropped,
            receive_ring_full: raw.rx_ring_full.unwrap_or(0),
            fill_ring_empty: raw.rx_fill_ring_empty_descs.unwrap_or(0),
            fill_invalid: raw.rx_invalid_descs,
            transmit_invalid: raw.tx_invalid_descs,
        })
    }

    /// Waits until a packet has been received or, with `writable`, one can be sent; returns false
    /// if none was within `limit`, or a signal arrived.
    ///
    /// # Errors
    /// [`CallError`], with `ENETDOWN` if the interface has been removed.
    pub fn wait(&self, writable: bool, limit: Duration) -> Result<bool, CallError> {
        let limit = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        xdp::wait(self.fd(), writable, limit).map_err(at("poll"))
    }

    /// Makes the kernel process the transmit ring.
    ///
    /// # Errors
    /// [`CallError`]: `EAGAIN`, `EBUSY` or `ENOBUFS` if it could not now.
    pub fn kick_transmit(&self) -> Result<(), CallError> {
        xdp::kick_transmit(self.fd()).map_err(at("sendto"))
    }

    /// Makes the driver check the fill ring.
    ///
    /// # Errors
    /// As [`kick_transmit`](Self::kick_transmit).
    pub fn kick_receive(&self) -> Result<(), CallError> {
        xdp::kick_receive(self.fd()).map_err(at("recvfrom"))
    }

    /// Returns the registered memory.
    pub fn umem(&self) -> &Umem {
        &self.umem
    }

    /// Not public: a duplicate would outlive the value, and the kernel would write on.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The memory that packets are received into: an arena, addressed from 0, in which a page's device
/// address is its address in the UMEM.
pub type Umem = Offsets;
