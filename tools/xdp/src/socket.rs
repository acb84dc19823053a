//! One queue of an interface: receive, hold, transmit, recycle.
//!
//! ```no_run
//! use pinfold_xdp::{ChunkSize, Copying, Redirect, Socket, redirect};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let interface = redirect::interface("eth1")?;
//! let redirect = Redirect::attach(&interface)?;
//! // One socket and one thread for each queue: each has its own memory, and nothing is shared.
//! let sockets = (0..interface.queues().unwrap_or(1))
//!     .map(|queue| {
//!         let options = Socket::options().queue(queue).chunk(ChunkSize::HalfPage);
//!         let options = options.copying(Copying::KernelChooses);
//!         let mut socket = options.open(&interface)?;
//!         socket.redirect(&redirect)?;
//!         Ok(socket)
//!     })
//!     .collect::<Result<Vec<_>, pinfold_xdp::OpenError>>()?;
//! # drop(sockets);
//! # Ok(()) }
//! ```

mod queue;

pub use queue::{Closed, Socket};

use crate::system::RingSizes;
use std::time::Duration;

// The options of a socket.

/// The bytes that the kernel reserves in front of each packet (`XDP_PACKET_HEADROOM`).
const HEADROOM: u32 = 256;
/// The header of Ethernet with one VLAN tag. Links without a header have that much to spare.
const LINK_HEADER: u32 = 18;

/// Returns the largest MTU whose packets fit into a chunk.
pub(crate) fn mtu_limit(chunk_bytes: u32) -> u32 {
    chunk_bytes - HEADROOM - LINK_HEADER
}

/// The memory of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ChunkSize {
    /// 2048 bytes, two in a page: for an MTU of up to 1774. Half the memory; the holders of parts
    /// of a page have no names.
    HalfPage,
    /// 4096 bytes: for an MTU of up to 3822.
    #[default]
    Page,
}

impl ChunkSize {
    /// Returns its size in bytes.
    pub fn bytes(self) -> u32 {
        1 << self.shift()
    }

    fn shift(self) -> u32 {
        match self {
            Self::HalfPage => 11,
            Self::Page => 12,
        }
    }
}

/// Whether the kernel copies packets into the socket's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Copying {
    /// Zero-copy if the driver supports it.
    #[default]
    KernelChooses,
    /// Copied always.
    Always,
    /// Zero-copy, or an error.
    Never,
}

impl Copying {
    fn zero_copy(self) -> Option<bool> {
        match self {
            Self::KernelChooses => None,
            Self::Always => Some(false),
            Self::Never => Some(true),
        }
    }
}

/// The options of busy polling, by the kernel on the caller's behalf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BusyPoll {
    /// The time for which [`wait`](Socket::wait) polls before it sleeps, and for which a call of
    /// the kernel polls.
    pub time: Duration,
    /// The most packets that a call handles.
    pub budget: u32,
}

impl Default for BusyPoll {
    fn default() -> Self {
        Self { time: Duration::from_micros(20), budget: 64 }
    }
}

/// Collects the options of a socket. See [`Socket::options`](Socket::options).
#[derive(Clone, Copy, Debug)]
pub struct Options {
    queue: u32,
    chunk: ChunkSize,
    memory: u64,
    rings: RingSizes,
    copying: Copying,
    need_wakeup: bool,
    busy_poll: Option<BusyPoll>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queue: 0,
            chunk: ChunkSize::default(),
            memory: 32 << 20,
            rings: RingSizes {
                fill: Self::DEFAULT_RING,
                completion: Self::DEFAULT_RING,
                receive: Self::DEFAULT_RING,
                transmit: Self::DEFAULT_RING,
            },
            copying: Copying::default(),
            need_wakeup: true,
            busy_poll: None,
        }
    }
}

impl Options {
    /// The entries of each ring by default. The fill ring needs memory for as many chunks.
    pub const DEFAULT_RING: u32 = 2048;
    /// The largest ring.
    pub const MAX_RING: u32 = 1 << 16;

    /// Sets the queue; the default is 0.
    #[must_use]
    pub fn queue(mut self, queue: u32) -> Self {
        self.queue = queue;
        self
    }

    /// Sets the size of a chunk; the default is a page.
    #[must_use]
    pub fn chunk(mut self, chunk: ChunkSize) -> Self {
        self.chunk = chunk;
        self
    }

    /// Sets the size of the memory for packets in bytes; the default is 32 MiB. The program may
    /// hold the part that the rings do not hold.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Sets the sizes of the rings; the default is [`DEFAULT_RING`](Self::DEFAULT_RING) each.
    #[must_use]
    pub fn rings(mut self, rings: RingSizes) -> Self {
        self.rings = rings;
        self
    }

    /// Sets whether packets are copied; the default is the kernel's choice.
    #[must_use]
    pub fn copying(mut self, copying: Copying) -> Self {
        self.copying = copying;
        self
    }

    /// Sets whether the kernel says when it must be called (`XDP_USE_NEED_WAKEUP`); the default is
    /// that it does.
    #[must_use]
    pub fn need_wakeup(mut self, need_wakeup: bool) -> Self {
        self.need_wakeup = need_wakeup;
        self
    }

    /// Makes the kernel poll the driver in [`wait`](Socket::wait), instead of waiting for
    /// interrupts.
    #[must_use]
    pub fn busy_poll(mut self, busy_poll: BusyPoll) -> Self {
        self.busy_poll = Some(busy_poll);
        self
    }
}
