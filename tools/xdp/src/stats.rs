//! The statistics of a socket: packets received, packets dropped with the reason, and the holders
//! of pages.
//!
//! ```no_run
//! # fn example(socket: pinfold_xdp::Socket) -> Result<(), Box<dyn std::error::Error>> {
//! let report = socket.stats()?;
//! println!("{report}");
//! assert_eq!(report.kernel_drops(), 0);
//! # Ok(()) }
//! ```

use crate::system::SocketStats;
use pinfold::page_pool::{Counts, Holder, PagePoolStats};
use std::fmt;

/// The counts of a socket itself.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Traffic {
    /// Packets received.
    pub received: u64,
    /// Their bytes, with the header of the link layer.
    pub received_bytes: u64,
    /// Packets that the kernel has finished sending.
    pub sent: u64,
}

/// A socket's counters, and where its pages are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SocketReport {
    /// The socket's own counters.
    pub traffic: Traffic,
    /// The kernel's.
    pub kernel: SocketStats,
    /// Entries of the kernel that named no chunk it had: always 0 with a correct kernel.
    pub unknown_entries: u64,
    /// Chunks that the kernel has to receive into, and packets that it is sending.
    pub in_kernel: u64,
    /// The pages of the pool.
    pub pool: PagePoolStats,
    /// The counters of the pool.
    pub counts: Counts,
    /// The holders of pages, by the names that were given
    /// ([`Packet::hold_for`](crate::Packet::hold_for)).
    pub holders: Vec<Holder>,
}

impl SocketReport {
    /// Returns how many packets the kernel dropped at this socket. Packets dropped earlier, because
    /// the driver's own queue was full, are in the counters of the interface
    /// (`ip -statistics link`).
    ///
    /// Of those in [`SocketStats::dropped`], [`SocketStats::fill_ring_empty`] found no chunk in
    /// copy mode. With zero-copy that counter says only how often the driver found none.
    pub fn kernel_drops(&self) -> u64 {
        self.kernel.dropped + self.kernel.receive_ring_full
    }
}

impl fmt::Display for SocketReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { traffic, kernel, pool, .. } = self;
        writeln!(f, "packets received       {:>14}", traffic.received)?;
        writeln!(f, "bytes received         {:>14}", traffic.received_bytes)?;
        writeln!(f, "packets sent           {:>14}", traffic.sent)?;
        writeln!(f, "dropped by the kernel  {:>14}", self.kernel_drops())?;
        writeln!(f, "  receive ring full    {:>14}", kernel.receive_ring_full)?;
        writeln!(f, "  fill ring empty      {:>14}", kernel.fill_ring_empty)?;
        let refused = kernel.fill_invalid + kernel.transmit_invalid;
        writeln!(f, "  refused entries      {refused:>14}")?;
        writeln!(f, "chunks with the kernel {:>14}", self.in_kernel)?;
        writeln!(f, "pages                  {:>14}", pool.pages)?;
        write!(f, "pages in use           {:>14}", pool.in_use)?;
        self.holders.iter().try_for_each(|holder| write!(f, "\n  {holder}"))
    }
}
