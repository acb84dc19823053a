//! The counts of packets.

use pinfold_xdp::protocol::HEADER_BYTES;
use pinfold_xdp::system::SocketStats;
use pinfold_xdp::{LinkType, Packet, Protocol};
use serde::Serialize;

/// The upper bounds of the classes of sizes in bytes; larger packets are in a class of their own.
pub(crate) const SIZES: [usize; 6] = [64, 128, 256, 512, 1024, 1518];

/// Packets by protocol and size.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    /// In the order of [`Protocol::ALL`].
    pub(crate) protocols: [u64; Protocol::ALL.len()],
    /// In the order of [`SIZES`], and the larger ones.
    pub(crate) sizes: [u64; SIZES.len() + 1],
    /// Packets whose reply the kernel has sent, and those of which it has not.
    pub(crate) reflected: u64,
    pub(crate) not_reflected: NotReflected,
    /// Packets passed to the file, and those for which it was too slow.
    pub(crate) captured: u64,
    pub(crate) not_captured: u64,
    /// Packets written to the target, and those for which it had no room or that it failed to
    /// write.
    pub(crate) stored: u64,
    pub(crate) not_stored: u64,
}

/// Packets that were not sent back, by cause.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct NotReflected {
    /// Without a reply that is known to be correct.
    pub(crate) no_reply: u64,
    /// Received on a queue without a transmit queue of its number.
    pub(crate) no_transmit_queue: u64,
    /// Without room in the transmit ring.
    pub(crate) ring_full: u64,
    /// The interface was down or gone, or the kernel had not sent them when the program ended.
    pub(crate) not_sent: u64,
}

impl NotReflected {
    pub(crate) fn total(&self) -> u64 {
        self.no_reply + self.no_transmit_queue + self.ring_full + self.not_sent
    }

    fn merge(&mut self, other: Self) {
        self.no_reply += other.no_reply;
        self.no_transmit_queue += other.no_transmit_queue;
        self.ring_full += other.ring_full;
        self.not_sent += other.not_sent;
    }
}

/// Packets that the kernel dropped at the sockets, by cause.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Drops {
    pub(crate) receive_ring_full: u64,
    /// No page to receive into: the program holds them.
    pub(crate) no_page: u64,
    /// Larger than a chunk, for instance.
    pub(crate) other: u64,
}

impl Drops {
    /// Returns those of all sockets.
    pub(crate) fn of(sockets: impl IntoIterator<Item = SocketStats>) -> Self {
        let mut drops = Self::default();
        for kernel in sockets {
            drops.receive_ring_full += kernel.receive_ring_full;
            let no_page = kernel.fill_ring_empty.min(kernel.dropped);
            drops.no_page += no_page;
            drops.other += kernel.dropped - no_page;
        }
        drops
    }
}

impl Counts {
    /// Counts a packet that was received on a link.
    pub(crate) fn add(&mut self, packet: &Packet, link: LinkType) {
        self.packets += 1;
        self.bytes += packet.len() as u64;
        let mut first = [0; HEADER_BYTES];
        let protocol = Protocol::of(packet.peek(&mut first), link);
        let at = Protocol::ALL.iter().position(|known| *known == protocol).unwrap_or(0);
        bump(&mut self.protocols, at);
        bump(
            &mut self.sizes,
            SIZES.iter().position(|limit| packet.len() <= *limit).unwrap_or(SIZES.len()),
        );
    }

    /// Adds the counts of another queue.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.protocols.iter_mut().zip(other.protocols).for_each(|(sum, more)| *sum += more);
        self.sizes.iter_mut().zip(other.sizes).for_each(|(sum, more)| *sum += more);
        self.reflected += other.reflected;
        self.not_reflected.merge(other.not_reflected);
        self.captured += other.captured;
        self.not_captured += other.not_captured;
        self.stored += other.stored;
        self.not_stored += other.not_stored;
    }
}

fn bump(counts: &mut [u64], at: usize) {
    if let Some(count) = counts.get_mut(at) {
        *count += 1;
    }
}
