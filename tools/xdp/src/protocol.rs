//! The protocol of a packet, as far as its first bytes tell.
//!
//! ```
//! use pinfold_xdp::{LinkType, Protocol};
//!
//! let arp = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1], &[0x08, 0x06], &[0; 28]].concat();
//! assert_eq!(Protocol::of(&arp, LinkType::Ethernet), Protocol::Arp);
//! ```

use crate::system::LinkType;
use etherparse::{IpNumber, LaxNetSlice, LaxSlicedPacket};
use std::fmt;

/// The number of bytes that [`Protocol::of`] examines: Ethernet with two VLAN tags, IPv6 with
/// extensions, TCP.
pub const HEADER_BYTES: usize = 128;

/// The protocol that a packet carries.
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
    /// Anything else over Ethernet, and packets that are too short for it.
    Other,
}

impl Protocol {
    /// All of them, in order.
    pub const ALL: [Self; 6] =
        [Self::Udp, Self::Tcp, Self::Icmp, Self::OtherIp, Self::Arp, Self::Other];

    /// Returns the protocol of a packet of a link that begins with these bytes, whatever they are.
    /// O(1).
    pub fn of(first: &[u8], link: LinkType) -> Self {
        let Some(sliced) = slice(first, link) else { return Self::Other };
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

/// Finds the headers, as far as they can be read; `None` if there is not even the first one.
pub(crate) fn slice(packet: &[u8], link: LinkType) -> Option<LaxSlicedPacket<'_>> {
    match link {
        LinkType::Ethernet | LinkType::Loopback => LaxSlicedPacket::from_ethernet(packet).ok(),
        LinkType::RawIp => LaxSlicedPacket::from_ip(packet).ok(),
        LinkType::Other(_) => None,
    }
}
