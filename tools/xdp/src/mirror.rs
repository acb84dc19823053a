//! The reply of a mirror: a packet with its addresses swapped, whose checksums are correct.
//!
//! ```
//! use pinfold_xdp::{LinkType, mirror};
//!
//! let (one, two) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
//! let mut frame = [&one[..], &two, &[0x88, 0xb5], b"any bytes"].concat();
//! assert!(mirror::reflect_bytes(&mut frame, LinkType::Ethernet));
//! assert!(frame.starts_with(&[two, one].concat()));
//! ```

use crate::packet::Packet;
use crate::protocol;
use crate::system::LinkType;
use etherparse::checksum::Sum16BitWords;
use etherparse::{IpNumber, LaxNetSlice, LenSource};

/// The largest packet: a chunk.
const LARGEST: usize = 4096;
/// The header of Ethernet.
const ETHERNET: usize = 14;
/// Types of ICMP.
const ECHO: u8 = 8;
const ECHO_V6: u8 = 128;
const ECHO_REPLY_V6: u8 = 129;

/// Turns a packet of a link into the one that a mirror sends back; returns false, and changes
/// nothing, if there is none.
///
/// The addresses of Ethernet and IP are swapped, and the ports of UDP and TCP; an ICMP or `ICMPv6`
/// echo request becomes the reply. A checksum that the sender left to its card, as between virtual
/// interfaces, is computed; one that is complete stays complete, and a UDP datagram over IPv4
/// without one stays without. A packet that is not IP has its Ethernet addresses swapped.
///
/// No reply is made of a packet from or to a group address, and of IP of which the reply's checksum
/// is not known to be correct: another protocol, a fragment, a packet that is cut or authenticated,
/// and a checksum that is wrong.
pub fn reflect(packet: &mut Packet, link: LinkType) -> bool {
    let mut bytes = [0; LARGEST];
    let len = packet.peek(&mut bytes).len();
    let bytes = bytes.get_mut(..len).unwrap_or_default();
    // The range is the packet's, unless it is larger than a chunk, which no packet is.
    len == packet.len()
        && reflect_bytes(bytes, link)
        && packet.memory().copy_from_slice(0, bytes).is_ok()
}

/// Does what [`reflect`] does to the bytes of a packet, which are all of it.
pub fn reflect_bytes(packet: &mut [u8], link: LinkType) -> bool {
    let has_ethernet = match link {
        LinkType::Ethernet | LinkType::Loopback => true,
        LinkType::RawIp => false,
        LinkType::Other(_) => return false,
    };
    // Bit 0 of the first byte of an address: a group.
    let is_group = |at: usize| packet.get(at).is_none_or(|byte| byte & 1 == 1);
    if has_ethernet && (packet.len() < ETHERNET || is_group(0) || is_group(6)) {
        return false;
    }
    let ip = match Ip::of(packet, link) {
        Ok(Some(ip)) => Some(ip),
        // ARP and others, which have no checksum that depends on what is swapped.
        Ok(None) if has_ethernet => None,
        Ok(None) | Err(NoReply) => return false,
    };
    if has_ethernet {
        swap(packet, 0, 6);
    }
    if let Some(ip) = ip {
        ip.reply(packet);
    }
    true
}

/// There is no reply to a packet.
struct NoReply;

/// The treatment of the checksum behind the header of IP.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Checksum {
    /// It is correct, and stays so.
    Keep,
    /// It is computed anew.
    Compute,
}

/// An IP packet that has a reply.
struct Ip {
    /// The start of the first address, and the length of each.
    addresses: (usize, usize),
    /// The start of the header behind that of IP, and the bytes that its checksum covers.
    transport: (usize, usize),
    number: IpNumber,
    /// The offset of its checksum.
    field: usize,
    checksum: Checksum,
    /// The sum of what the checksum covers outside of the transport: the same for the reply.
    pseudo: Sum16BitWords,
}

/// Returns whether an authentication header (RFC 4302) is among the extension headers of IPv6, of
/// which the first is `next`.
///
/// The iterator of `etherparse` takes the headers of a packet that is cut for whole ones, so they
/// are walked here.
fn is_authenticated(mut next: IpNumber, mut headers: &[u8]) -> bool {
    loop {
        let [first, length, ..] = headers else { return next == IpNumber::AUTHENTICATION_HEADER };
        let bytes = match next {
            IpNumber::AUTHENTICATION_HEADER => return true,
            IpNumber::IPV6_FRAGMENTATION_HEADER => 8,
            _ => (usize::from(*length) + 1) * 8,
        };
        next = IpNumber(*first);
        headers = headers.get(bytes..).unwrap_or_default();
    }
}

impl Ip {
    /// `None` if it is not IP.
    fn of(packet: &[u8], link: LinkType) -> Result<Option<Self>, NoReply> {
        let sliced = protocol::slice(packet, link).ok_or(NoReply)?;
        let (header, addresses, length, payload, is_authenticated) = match &sliced.net {
            Some(LaxNetSlice::Ipv4(ip)) => {
                let is_authenticated = ip.extensions().auth.is_some();
                (ip.header().slice().as_ptr().addr(), 12, 4, ip.payload(), is_authenticated)
            }
            Some(LaxNetSlice::Ipv6(ip)) => {
                let is_authenticated =
                    is_authenticated(ip.header().next_header(), ip.extensions().slice());
                (ip.header().slice().as_ptr().addr(), 8, 16, ip.payload(), is_authenticated)
            }
            Some(LaxNetSlice::Arp(_)) | None => return Ok(None),
        };
        if payload.fragmented
            || payload.incomplete
            || payload.len_source == LenSource::Slice
            || is_authenticated
        {
            return Err(NoReply);
        }
        // Parts of `packet`, so the differences are their places there.
        let place = |address: usize| address.checked_sub(packet.as_ptr().addr()).ok_or(NoReply);
        let start = place(header)? + addresses;
        let transport = (place(payload.payload.as_ptr().addr())?, payload.payload);
        Self::check(packet, (start, length), transport, payload.ip_number).map(Some).ok_or(NoReply)
    }

    /// Looks at the addresses and at the checksum; `None` if there is no reply.
    fn check(
        packet: &[u8],
        addresses: (usize, usize),
        (at, segment): (usize, &[u8]),
        number: IpNumber,
    ) -> Option<Self> {
        let (start, length) = addresses;
        let is_v6 = length == 16;
        let both = packet.get(start..start + 2 * length)?;
        let (from, to) = both.split_at_checked(length)?;
        let is_group = |address: &[u8]| match address.first() {
            Some(first) if is_v6 => *first == 0xff,
            // Also what is reserved, and the address of all.
            Some(first) => *first >= 224,
            None => true,
        };
        if is_group(from) || is_group(to) {
            return None;
        }
        if !is_v6 {
            // The header of IPv4 has a checksum of its own, which the swap does not change.
            let header = packet.get(start.checked_sub(12)?..at)?;
            if Sum16BitWords::new().add_slice(header).ones_complement() != 0 {
                return None;
            }
        }
        let word = |at: usize| Some(u16::from_be_bytes(*segment.get(at..)?.first_chunk()?));
        // The offset of the checksum, the least length of the header, and the bytes that the
        // checksum covers.
        let (field, least, covered) = match number {
            IpNumber::UDP => (6, 8, usize::from(word(4)?)),
            IpNumber::TCP => (16, 20, segment.len()),
            IpNumber::ICMP if !is_v6 => (2, 4, segment.len()),
            IpNumber::IPV6_ICMP if is_v6 => (2, 4, segment.len()),
            _ => return None,
        };
        let segment = segment.get(..covered).filter(|segment| segment.len() >= least)?;
        let mut pseudo = Sum16BitWords::new();
        if number != IpNumber::ICMP {
            pseudo = pseudo.add_slice(both).add_2bytes([0, number.0]);
            pseudo = pseudo.add_4bytes(u32::try_from(covered).ok()?.to_be_bytes());
        }
        let found: [u8; 2] = *segment.get(field..)?.first_chunk()?;
        let type_ = segment.first().copied();
        let checksum = if number == IpNumber::UDP && found == [0; 2] {
            // None, which IPv6 does not allow.
            if is_v6 {
                return None;
            }
            Checksum::Keep
        } else if pseudo.clone().add_slice(segment).ones_complement() == 0 {
            let becomes_reply = number == IpNumber::ICMP && type_ == Some(ECHO)
                || number == IpNumber::IPV6_ICMP && type_ == Some(ECHO_V6);
            if becomes_reply { Checksum::Compute } else { Checksum::Keep }
        } else if number != IpNumber::ICMP && found == (!pseudo.ones_complement()).to_ne_bytes() {
            // The sum of the pseudo header alone: the sender's card was to add the rest.
            Checksum::Compute
        } else {
            return None;
        };
        Some(Self { addresses, transport: (at, covered), number, field, checksum, pseudo })
    }

    fn reply(self, packet: &mut [u8]) {
        let Self {
            addresses: (start, length),
            transport: (at, covered),
            number,
            field,
            checksum,
            pseudo,
        } = self;
        swap(packet, start, length);
        // All of it is there, as was checked.
        let Some(segment) = packet.get_mut(at..).and_then(|rest| rest.get_mut(..covered)) else {
            return;
        };
        match (number, segment.first_mut()) {
            (IpNumber::UDP | IpNumber::TCP, _) => swap(segment, 0, 2),
            (IpNumber::ICMP, Some(type_ @ &mut ECHO)) => *type_ = 0,
            (IpNumber::IPV6_ICMP, Some(type_ @ &mut ECHO_V6)) => *type_ = ECHO_REPLY_V6,
            _ => {}
        }
        if checksum == Checksum::Compute {
            set(segment, field, [0; 2]);
            let sum = pseudo.add_slice(segment);
            // Zero is no checksum in UDP.
            let is_udp = number == IpNumber::UDP;
            let sum =
                if is_udp { sum.to_ones_complement_with_no_zero() } else { sum.ones_complement() };
            set(segment, field, sum.to_ne_bytes());
        }
    }
}

fn set(bytes: &mut [u8], at: usize, word: [u8; 2]) {
    if let Some(to) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut()) {
        *to = word;
    }
}

/// Swaps the `len` bytes at `at` with those behind them, if all are there.
fn swap(bytes: &mut [u8], at: usize, len: usize) {
    let pair = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..2 * len));
    if let Some((one, other)) = pair.and_then(|pair| pair.split_at_mut_checked(len)) {
        one.swap_with_slice(other);
    }
}
