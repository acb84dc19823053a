//! The properties of any bytes as a packet.

use pinfold_xdp::mirror::reflect_bytes;
use pinfold_xdp::{LinkType, Protocol};

/// Checks that nothing panics, that a mirror that refuses a packet changes nothing, and that a
/// mirror of a mirror restores it.
pub(crate) fn check(input: &[u8]) {
    for link in [LinkType::Ethernet, LinkType::Loopback, LinkType::RawIp, LinkType::Other(1)] {
        let protocol = Protocol::of(input, link);
        assert!(Protocol::ALL.contains(&protocol));
        let mut reply = input.to_vec();
        if !reflect_bytes(&mut reply, link) {
            assert_eq!(reply, input);
            continue;
        }
        assert_eq!(reply.len(), input.len());
        if link != LinkType::RawIp {
            assert_eq!((&reply[..6], &reply[6..12]), (&input[6..12], &input[..6]));
        }
        assert_eq!(
            Protocol::of(&reply, link),
            protocol,
            "the protocol does not depend on the addresses"
        );
        let first = reply.clone();
        // A reply has a correct checksum, so it has a reply itself, and from then on nothing but
        // addresses changes.
        assert!(reflect_bytes(&mut reply, link));
        assert!(reflect_bytes(&mut reply, link));
        assert_eq!(reply, first);
    }
}
