//! What holds of any bytes as the start of a packet.

use pinfold_xdp::Protocol;
use pinfold_xdp::protocol::swap_headers;

/// Checks that nothing panics, that a mirror moves bytes only, and that a mirror of a mirror restores the addresses.
pub(crate) fn check(input: &[u8]) {
    let protocol = Protocol::of(input);
    assert!(Protocol::ALL.contains(&protocol));
    let mut swapped = input.to_vec();
    if !swap_headers(&mut swapped) {
        assert_eq!(swapped, input);
        return;
    }
    assert_eq!(swapped.len(), input.len());
    assert_eq!((&swapped[..6], &swapped[6..12]), (&input[6..12], &input[..6]));
    assert_eq!(Protocol::of(&swapped), protocol, "the protocol does not depend on the addresses");
    let mut again = swapped.clone();
    if swap_headers(&mut again) {
        assert_eq!(again[..14], input[..14]);
    }
}
