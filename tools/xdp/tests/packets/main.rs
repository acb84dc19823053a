//! The parsing of packets: of those that another library makes, and of any bytes.

#![allow(clippy::unwrap_used, clippy::panic)]

mod fuzzed;

use etherparse::{
    IpFragOffset, IpHeaders, IpNumber, Ipv4Extensions, Ipv4Header, Ipv6Extensions,
    Ipv6FragmentHeader, Ipv6Header, Ipv6RawExtHeader, NetSlice, PacketBuilder, SlicedPacket,
};
use pinfold_xdp::mirror::reflect_bytes;
use pinfold_xdp::{LinkType, Protocol};
use proptest::prelude::*;

const ONE: [u8; 6] = [2, 0, 0, 0, 0, 1];
const TWO: [u8; 6] = [2, 0, 0, 0, 0, 2];

macro_rules! built {
    ($builder:expr, $payload:expr) => {{
        let (builder, payload) = ($builder, $payload);
        let mut bytes = Vec::new();
        builder.write(&mut bytes, payload).unwrap();
        bytes
    }};
}

/// Returns the packet with the checksum that a sender writes who leaves the rest to its card: the
/// sum of the pseudo header.
fn partial(packet: &[u8], link: LinkType) -> Vec<u8> {
    let sliced = sliced(packet, link);
    let pseudo = |addresses: &[u8], number: u8, len: usize| {
        let len = u32::try_from(len).unwrap().to_be_bytes();
        let words = [addresses, &[0, number], &len].concat();
        let sum: u32 =
            words.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
        let folded = (sum >> 16) + (sum & 0xffff);
        u16::try_from((folded >> 16) + (folded & 0xffff)).unwrap()
    };
    let (addresses, number, payload) = match sliced.net.as_ref().unwrap() {
        NetSlice::Ipv4(ip) => {
            (&ip.header().slice()[12..20], ip.payload().ip_number, ip.payload().payload)
        }
        NetSlice::Ipv6(ip) => {
            (&ip.header().slice()[8..40], ip.payload().ip_number, ip.payload().payload)
        }
        other => panic!("{other:?}"),
    };
    let field = match number {
        IpNumber::UDP => 6,
        IpNumber::TCP => 16,
        IpNumber::IPV6_ICMP => 2,
        other => panic!("{other:?}"),
    };
    let at = packet.len() - payload.len() + field;
    let mut packet = packet.to_vec();
    packet[at..at + 2].copy_from_slice(&pseudo(addresses, number.0, payload.len()).to_be_bytes());
    packet
}

fn sliced(packet: &[u8], link: LinkType) -> SlicedPacket<'_> {
    match link {
        LinkType::RawIp => SlicedPacket::from_ip(packet).unwrap(),
        _ => SlicedPacket::from_ethernet(packet).unwrap(),
    }
}

fn reflected(packet: &[u8], link: LinkType) -> Option<Vec<u8>> {
    let mut reply = packet.to_vec();
    reflect_bytes(&mut reply, link).then_some(reply)
}

/// The packets of a kind, there and back, as another library makes them.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Udp,
    Tcp,
    Echo,
}

/// Extension headers of IPv6: options for each hop and for the destination, and a fragment header
/// of a whole packet.
fn extended(header: Ipv6Header, with: [bool; 3]) -> IpHeaders {
    let raw = || Ipv6RawExtHeader::new_raw(IpNumber::UDP, &[1, 4, 0, 0, 0, 0]).unwrap();
    let extensions = Ipv6Extensions {
        hop_by_hop_options: with[0].then(raw),
        destination_options: with[1].then(raw),
        fragment: with[2]
            .then(|| Ipv6FragmentHeader::new(IpNumber::UDP, IpFragOffset::ZERO, false, 7)),
        ..Ipv6Extensions::default()
    };
    IpHeaders::Ipv6(header, extensions)
}

fn packet(
    kind: Kind,
    is_v6: bool,
    link: LinkType,
    back: bool,
    extensions: [bool; 3],
    payload: &[u8],
) -> Vec<u8> {
    let (one, two) = if back { (2u8, 1u8) } else { (1, 2) };
    let (from, to) = if back { (TWO, ONE) } else { (ONE, TWO) };
    let (a, b) = (u16::from(one) * 1000, u16::from(two) * 1000);
    let ip = if is_v6 {
        let header = Ipv6Header {
            hop_limit: 9,
            source: [one; 16],
            destination: [two; 16],
            ..Ipv6Header::default()
        };
        extended(header, extensions)
    } else {
        let header = Ipv4Header {
            time_to_live: 9,
            source: [one; 4],
            destination: [two; 4],
            ..Ipv4Header::default()
        };
        IpHeaders::Ipv4(header, Ipv4Extensions::default())
    };
    let step = match link {
        LinkType::RawIp => PacketBuilder::ip(ip),
        _ => PacketBuilder::ethernet2(from, to).ip(ip),
    };
    match (kind, is_v6, back) {
        (Kind::Udp, ..) => built!(step.udp(a, b), payload),
        (Kind::Tcp, ..) => built!(step.tcp(a, b, 5, 6), payload),
        (Kind::Echo, false, false) => built!(step.icmpv4_echo_request(77, 88), payload),
        (Kind::Echo, false, true) => built!(step.icmpv4_echo_reply(77, 88), payload),
        (Kind::Echo, true, false) => built!(step.icmpv6_echo_request(77, 88), payload),
        (Kind::Echo, true, true) => built!(step.icmpv6_echo_reply(77, 88), payload),
    }
}

#[test]
fn a_datagram_without_a_checksum_is_answered_over_ipv4_only() {
    for (is_v6, answered) in [(false, true), (true, false)] {
        let link = LinkType::RawIp;
        let mut datagram = packet(Kind::Udp, is_v6, link, false, [false; 3], &[5; 30]);
        let at = datagram.len() - 30 - 2;
        datagram[at..at + 2].fill(0);
        let reply = reflected(&datagram, link);
        assert_eq!(reply.is_some(), answered);
        assert!(reply.is_none_or(|reply| reply[at..at + 2] == [0, 0]));
    }
}

#[test]
fn tags_of_vlans_stay_and_padding_is_not_summed() {
    let tagged = |from, to, one: u8, two: u8, ports: (u16, u16)| {
        let builder = PacketBuilder::ethernet2(from, to).single_vlan(7.try_into().unwrap());
        let mut bytes = built!(builder.ipv4([one; 4], [two; 4], 9).udp(ports.0, ports.1), &[1]);
        bytes.resize(64, 0xa5);
        bytes
    };
    let reply = reflected(&tagged(ONE, TWO, 1, 2, (8, 9)), LinkType::Ethernet);
    assert_eq!(reply, Some(tagged(TWO, ONE, 2, 1, (9, 8))));
}

#[test]
fn packets_without_a_correct_reply_are_left_alone() {
    let link = LinkType::Ethernet;
    let of = |kind, is_v6| packet(kind, is_v6, link, false, [false; 3], &[3; 16]);
    let mut cases = Vec::new();
    let mut case = |what: &'static str, packet: Vec<u8>, change: &dyn Fn(&mut Vec<u8>)| {
        assert!(reflected(&packet, link).is_some(), "{what}: before the change");
        let mut changed = packet;
        change(&mut changed);
        cases.push((what, changed));
    };
    case("from a group", of(Kind::Udp, false), &|packet| packet[6] |= 1);
    case("to a group", of(Kind::Udp, false), &|packet| packet[0] |= 1);
    case("a wrong byte of UDP", of(Kind::Udp, false), &|packet| packet[50] ^= 1);
    case("a wrong byte of TCP", of(Kind::Tcp, true), &|packet| *packet.last_mut().unwrap() ^= 1);
    case("a wrong byte of ICMP", of(Kind::Echo, false), &|packet| packet[45] ^= 1);
    case("a wrong byte of ICMPv6", of(Kind::Echo, true), &|packet| packet[65] ^= 1);
    case("a wrong header", of(Kind::Udp, false), &|packet| packet[22] ^= 1);
    case("it is cut", of(Kind::Tcp, true), &|packet| packet.truncate(packet.len() - 1));
    case("a length beyond the packet", of(Kind::Udp, true), &|packet| packet[59] = 200);
    case("a length below a header", of(Kind::Udp, true), &|packet| packet[59] = 7);
    case("another protocol", of(Kind::Udp, true), &|packet| packet[20] = 132);
    case("an extension that is not known", of(Kind::Udp, true), &|packet| packet[20] = 135);
    for (what, packet) in cases {
        assert_eq!(reflected(&packet, link), None, "{what}");
    }
    let fragment = |more, offset: u16| {
        let header = Ipv4Header {
            time_to_live: 9,
            source: [1; 4],
            destination: [2; 4],
            more_fragments: more,
            fragment_offset: offset.try_into().unwrap(),
            ..Ipv4Header::default()
        };
        let ip = IpHeaders::Ipv4(header, Ipv4Extensions::default());
        built!(PacketBuilder::ethernet2(ONE, TWO).ip(ip).udp(1, 2), &[3; 16])
    };
    assert!(reflected(&fragment(false, 0), link).is_some());
    for packet in [fragment(true, 0), fragment(false, 1)] {
        assert_eq!(reflected(&packet, link), None, "a fragment");
        assert_eq!(Protocol::of(&packet, link), Protocol::Udp);
    }
    // A payload that is a group address would answer from it.
    let group = built!(PacketBuilder::ipv4([1; 4], [224, 0, 0, 251], 9).udp(1, 2), &[]);
    assert_eq!(reflected(&group, LinkType::RawIp), None);
    assert_eq!(
        reflected(&of(Kind::Udp, false), LinkType::Other(32)),
        None,
        "a link that is not known"
    );
    assert_eq!(reflected(&[0x45; 3], LinkType::RawIp), None);
}

#[test]
fn a_frame_that_is_not_ip_has_its_addresses_swapped() {
    let frame = [&ONE[..], &TWO, &[0x88, 0xb5], &[9; 40]].concat();
    assert_eq!(
        reflected(&frame, LinkType::Ethernet),
        Some([&TWO[..], &ONE, &[0x88, 0xb5], &[9; 40]].concat())
    );
}

/// A header of options that is cut within its length; a parser that takes it for a whole one reads
/// past its end.
#[test]
fn a_cut_extension_header_has_no_reply() {
    let packet = [
        0x62, 0x43, 0xd8, 0xdb, 0x02, 0x00, 0x00, 0xd6, 0x00, 0x43, 0xd8, 0x00, 0x0f, 0x00, 0xfd,
        0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0x2e,
        0xfd, 0xfd, 0xbf, 0xfd, 0xfd, 0xfd, 0xfd, 0xfd, 0x00, 0x00, 0x00, 0x00, 0x81, 0x00, 0xfd,
        0x00, 0x00, 0x28,
    ];
    fuzzed::check(&packet);
    assert!(!reflect_bytes(&mut packet.to_vec(), LinkType::RawIp));
}

proptest! {
    /// With a whole checksum and with one that the sender left to its card.
    #[test]
    fn a_reply_is_what_another_library_makes(
        kind in prop_oneof![Just(Kind::Udp), Just(Kind::Tcp), Just(Kind::Echo)],
        is_v6 in any::<bool>(),
        link in prop_oneof![Just(LinkType::Ethernet), Just(LinkType::RawIp)],
        extensions in any::<[bool; 3]>(),
        payload in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let packet = |back| packet(kind, is_v6, link, back, extensions, &payload);
        let (request, reply) = (packet(false), packet(true));
        prop_assert_eq!(reflected(&request, link), Some(reply.clone()));
        let name = match kind {
            Kind::Udp => Protocol::Udp,
            Kind::Tcp => Protocol::Tcp,
            Kind::Echo => Protocol::Icmp,
        };
        prop_assert_eq!((Protocol::of(&request, link), Protocol::of(&reply, link)), (name, name));
        if is_v6 || !matches!(kind, Kind::Echo) {
            prop_assert_eq!(reflected(&partial(&request, link), link), Some(reply));
        }
    }

    #[test]
    fn any_bytes_are_a_packet(input in proptest::collection::vec(any::<u8>(), 0..200)) {
        fuzzed::check(&input);
    }

    /// Bytes that get further: an ether type that is known, and then anything.
    #[test]
    fn any_bytes_behind_a_header_are_a_packet(
        kind in prop_oneof![Just([0x08, 0]), Just([0x86, 0xdd]), Just([0x81, 0]), Just([0x08, 0x06])],
        version in prop_oneof![Just(0x45u8), Just(0x4f), Just(0x60)],
        rest in proptest::collection::vec(any::<u8>(), 0..120),
    ) {
        fuzzed::check(&[&TWO[..], &ONE, &kind, &[version], &rest].concat());
    }
}
