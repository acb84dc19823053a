//! What a packet is, as far as its first bytes tell, and the reply of a mirror.
//!
//! ```
//! use pinfold_xdp::Protocol;
//!
//! let arp = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[0x08, 0x06], &[0; 28]].concat();
//! assert_eq!(Protocol::of(&arp), Protocol::Arp);
//! ```

use crate::packet::Packet;
use etherparse::{IpNumber, LaxNetSlice, LaxSlicedPacket};
use std::fmt;

/// How many bytes [`Protocol::of`] and [`reflect`] look at: Ethernet with two VLAN tags, IPv6 with extensions, TCP.
pub const HEADER_BYTES: usize = 128;

/// What a packet carries.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Protocol {
    /// UDP over IPv4 or IPv6.
    Udp,
    /// TCP over IPv4 or IPv6.
    Tcp,
    /// ICMP or `ICMPv6`.
    Icmp,
    /// Another protocol over IPv4 or IPv6, or one that the first bytes do not reach.
    OtherIp,
    /// ARP.
    Arp,
    /// Anything else over Ethernet, and what is too short for it.
    Other,
}

impl Protocol {
    /// All of them, in order.
    pub const ALL: [Self; 6] = [Self::Udp, Self::Tcp, Self::Icmp, Self::OtherIp, Self::Arp, Self::Other];

    /// Returns the protocol of a packet that begins with these bytes, whatever they are. O(1).
    pub fn of(first: &[u8]) -> Self {
        let Ok(sliced) = LaxSlicedPacket::from_ethernet(first) else { return Self::Other };
        let number = match &sliced.net {
            Some(LaxNetSlice::Ipv4(ip)) => ip.payload().ip_number,
            Some(LaxNetSlice::Ipv6(ip)) => ip.payload().ip_number,
            Some(LaxNetSlice::Arp(_)) => return Self::Arp,
            None => return Self::Other,
        };
        match number {
            IpNumber::UDP => Self::Udp,
            IpNumber::TCP => Self::Tcp,
            IpNumber::ICMP | IpNumber::IPV6_ICMP => Self::Icmp,
            _ => Self::OtherIp,
        }
    }

    /// Returns its name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Icmp => "icmp",
            Self::OtherIp => "other-ip",
            Self::Arp => "arp",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Turns a packet into the one that a mirror sends back; returns false, and changes nothing, if it has no Ethernet header or
/// comes from a group address.
///
/// The addresses of Ethernet and IP are swapped, and the ports of UDP and TCP. An ICMP echo request becomes the reply. None of
/// this changes an Internet checksum but the last, which is updated. The UDP checksum over IPv4 is removed: between virtual
/// interfaces it is often not computed, and zero says so.
pub fn reflect(packet: &mut Packet) -> bool {
    let mut first = [0; HEADER_BYTES];
    let len = packet.peek(&mut first).len();
    let first = first.get_mut(..len).unwrap_or_default();
    // The range lies inside the packet, as long as it is what `peek` returned.
    swap_headers(first) && packet.memory().copy_from_slice(0, first).is_ok()
}

/// Does what [`reflect`] does to the first bytes of a packet.
pub fn swap_headers(first: &mut [u8]) -> bool {
    // Bit 0 of the first byte of an address: a group.
    if first.len() < 14 || first.get(6).is_none_or(|byte| byte & 1 == 1) {
        return false;
    }
    let Some(layout) = Layout::of(first) else {
        swap(first, 0, 6);
        return true;
    };
    swap(first, 0, 6);
    let Layout { network, transport, is_v6, number } = layout;
    if is_v6 {
        swap(first, network + 8, 16)
    } else {
        swap(first, network + 12, 4)
    }
    let Some(at) = transport else { return true };
    match number {
        IpNumber::UDP | IpNumber::TCP => {
            swap(first, at, 2);
            if number == IpNumber::UDP && !is_v6 {
                set(first, at + 6, 0);
                set(first, at + 7, 0);
            }
        }
        IpNumber::ICMP if first.get(at) == Some(&8) && first.len() >= at + 4 => {
            set(first, at, 0);
            // The type is the upper half of a word of the sum (RFC 1624).
            let high = first.get(at + 2).copied().unwrap_or(0);
            let low = first.get(at + 3).copied().unwrap_or(0);
            let (sum, carry) = u16::from_be_bytes([high, low]).overflowing_add(0x0800);
            let [high, low] = sum.wrapping_add(u16::from(carry)).to_be_bytes();
            set(first, at + 2, high);
            set(first, at + 3, low);
        }
        _ => {}
    }
    true
}

/// Where the headers of an IP packet start.
struct Layout {
    network: usize,
    /// `None` in a fragment, where it may be elsewhere.
    transport: Option<usize>,
    is_v6: bool,
    number: IpNumber,
}

impl Layout {
    fn of(first: &[u8]) -> Option<Self> {
        let sliced = LaxSlicedPacket::from_ethernet(first).ok()?;
        let payload = match sliced.net.as_ref()? {
            LaxNetSlice::Ipv4(ip) => ip.payload(),
            LaxNetSlice::Ipv6(ip) => ip.payload(),
            LaxNetSlice::Arp(_) => return None,
        };
        let is_v6 = matches!(sliced.net, Some(LaxNetSlice::Ipv6(_)));
        let network = 14 + sliced.link_exts.iter().map(|ext| ext.header_len()).sum::<usize>();
        // A part of `first`, so the difference is its place there.
        let at = payload.payload.as_ptr().addr().checked_sub(first.as_ptr().addr())?;
        let transport = (!payload.fragmented).then_some(at);
        Some(Self { network, transport, is_v6, number: payload.ip_number })
    }
}

/// Swaps the `len` bytes at `at` with those behind them, if all are there.
fn swap(bytes: &mut [u8], at: usize, len: usize) {
    let pair = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..2 * len));
    if let Some((one, other)) = pair.and_then(|pair| pair.split_at_mut_checked(len)) {
        one.swap_with_slice(other);
    }
}

fn set(bytes: &mut [u8], at: usize, value: u8) {
    if let Some(byte) = bytes.get_mut(at) {
        *byte = value;
    }
}
