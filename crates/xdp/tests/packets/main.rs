//! What packets are, on packets of another library's making and on any bytes.

#![allow(clippy::unwrap_used, clippy::panic)]

mod fuzzed;

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TransportSlice};
use pinfold_xdp::Protocol;
use pinfold_xdp::protocol::swap_headers;
use proptest::prelude::*;

const ONE: [u8; 6] = [2, 0, 0, 0, 0, 1];
const TWO: [u8; 6] = [2, 0, 0, 0, 0, 2];

fn ethernet() -> etherparse::PacketBuilderStep<etherparse::Ethernet2Header> {
    PacketBuilder::ethernet2(ONE, TWO)
}

macro_rules! built {
    ($builder:expr, $payload:expr) => {{
        let (builder, payload) = ($builder, $payload);
        let mut bytes = Vec::new();
        builder.write(&mut bytes, payload).unwrap();
        bytes
    }};
}

#[test]
fn a_mirror_swaps_addresses_and_ports() {
    let udp = built!(ethernet().ipv4([10, 0, 0, 1], [10, 0, 0, 2], 9).udp(1, 2), &[5; 30]);
    let tcp6 = built!(ethernet().ipv6([1; 16], [2; 16], 9).tcp(3, 4, 5, 6), &[5; 30]);
    let tagged = built!(ethernet().single_vlan(7.try_into().unwrap()).ipv4([1; 4], [2; 4], 9).udp(8, 9), &[]);
    for (bytes, protocol, ports) in
        [(udp, Protocol::Udp, (2, 1)), (tcp6, Protocol::Tcp, (4, 3)), (tagged, Protocol::Udp, (9, 8))]
    {
        assert_eq!(Protocol::of(&bytes), protocol);
        let mut swapped = bytes.clone();
        assert!(swap_headers(&mut swapped));
        let before = SlicedPacket::from_ethernet(&bytes).unwrap();
        let after = SlicedPacket::from_ethernet(&swapped).unwrap();
        assert_eq!((&swapped[..6], &swapped[6..12]), (&ONE[..], &TWO[..]));
        match (before.net.unwrap(), after.net.unwrap()) {
            (NetSlice::Ipv4(before), NetSlice::Ipv4(after)) => {
                let (before, after) = (before.header(), after.header());
                assert_eq!((before.source(), before.destination()), (after.destination(), after.source()));
                assert_eq!(after.to_header().calc_header_checksum(), after.header_checksum());
            }
            (NetSlice::Ipv6(before), NetSlice::Ipv6(after)) => {
                let (before, after) = (before.header(), after.header());
                assert_eq!((before.source(), before.destination()), (after.destination(), after.source()));
            }
            other => panic!("{other:?}"),
        }
        match after.transport.unwrap() {
            TransportSlice::Udp(udp) => {
                assert_eq!(
                    (udp.source_port(), udp.destination_port(), udp.checksum()),
                    (ports.0, ports.1, 0)
                );
            }
            TransportSlice::Tcp(tcp) => assert_eq!((tcp.source_port(), tcp.destination_port()), ports),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn an_echo_request_becomes_the_reply_with_its_checksum() {
    for payload in [&[0u8; 0][..], &[1, 2, 3], &[0xff; 64]] {
        let request = built!(ethernet().ipv4([1; 4], [2; 4], 9).icmpv4_echo_request(77, 88), payload);
        let reply = built!(
            PacketBuilder::ethernet2(TWO, ONE).ipv4([2; 4], [1; 4], 9).icmpv4_echo_reply(77, 88),
            payload
        );
        assert_eq!(Protocol::of(&request), Protocol::Icmp);
        let mut swapped = request;
        assert!(swap_headers(&mut swapped));
        assert_eq!(swapped, reply);
    }
}

#[test]
fn group_addresses_are_not_answered_and_fragments_keep_what_they_carry() {
    let mut group = built!(ethernet().ipv4([1; 4], [2; 4], 9).udp(1, 2), &[]);
    group[6] |= 1;
    let before = group.clone();
    assert!(!swap_headers(&mut group));
    assert_eq!(group, before);
    let mut fragment = built!(ethernet().ipv4([1; 4], [2; 4], 9).udp(1, 2), &[3; 16]);
    // An offset of 8 bytes: what follows is no header of UDP.
    fragment[21] = 1;
    let before = fragment.clone();
    assert!(swap_headers(&mut fragment));
    assert_eq!(fragment[34..], before[34..]);
    assert_eq!(Protocol::of(&fragment), Protocol::Udp);
}

proptest! {
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
