//! A controller's handling of a command's memory, written from the specification alone.

use pinfold_core::addr::{Iova, Segment};

/// A segment, from numbers.
pub(crate) fn seg(iova: u64, len: u64) -> Segment {
    Segment { iova: Iova::new(iova), len }
}

/// PRP1, PRP2 and a length: the pieces, and how many list pages it read. Base Specification 2.0,
/// section 4.1.1.
pub(crate) fn walk_prps(
    page: u64,
    prp1: u64,
    prp2: u64,
    len: u64,
    read: impl Fn(u64) -> u64,
) -> (Vec<Segment>, usize) {
    let mut left = len;
    let mut pieces = Vec::new();
    let mut piece = |entry: u64, left: &mut u64| {
        let len = (page - entry % page).min(*left);
        pieces.push(seg(entry, len));
        *left -= len;
    };
    piece(prp1, &mut left);
    let mut lists = 0;
    if left > page {
        let mut at = prp2;
        lists = 1;
        while left > 0 {
            let last_of_page = at % page == page - 8;
            if last_of_page && left > page {
                at = read(at);
                assert_eq!(at % page, 0, "a chained list begins at a page");
                lists += 1;
            }
            let entry = read(at);
            assert_eq!(entry % page, 0, "an entry of a list has no offset");
            piece(entry, &mut left);
            at += 8;
        }
    } else if left > 0 {
        assert_eq!(prp2 % page, 0);
        piece(prp2, &mut left);
    } else {
        assert_eq!(prp2, 0);
    }
    (pieces, lists)
}

/// An SGL descriptor: the pieces, and how many segments of descriptors it read. Base Specification
/// 2.0, section 4.1.2.
pub(crate) fn walk_sgl(sgl1: [u64; 2], read: impl Fn(u64) -> u64) -> (Vec<Segment>, usize) {
    let mut pieces = Vec::new();
    let (mut lists, mut descriptor) = (0, sgl1);
    loop {
        let (len, reserved, kind) = decode(descriptor);
        assert_eq!(reserved, 0, "reserved bytes and the sub type are 0");
        match kind {
            0x0 => {
                assert!(lists == 0 && len > 0, "one descriptor alone is in the command");
                pieces.push(seg(descriptor[0], len));
                return (pieces, lists);
            }
            0x2 | 0x3 => {}
            other => panic!("type {other:#x}"),
        }
        let start = descriptor[0];
        assert!(
            start.is_multiple_of(8) && len > 0 && len.is_multiple_of(16),
            "an array of descriptors"
        );
        lists += 1;
        let mut next = None;
        for at in (start..start + len).step_by(16) {
            assert!(next.is_none(), "only the last of an array describes another array");
            let inner = [read(at), read(at + 8)];
            let (bytes, reserved, inner_kind) = decode(inner);
            assert!(bytes > 0 && reserved == 0);
            match inner_kind {
                0x0 => pieces.push(seg(inner[0], bytes)),
                0x2 | 0x3 => next = Some(inner),
                other => panic!("type {other:#x}"),
            }
        }
        assert_eq!(kind == 0x3, next.is_none(), "the last array, and no other, is called so");
        match next {
            Some(next) => descriptor = next,
            None => return (pieces, lists),
        }
    }
}

/// Length, reserved bytes with the sub type, type.
fn decode([_, rest]: [u64; 2]) -> (u64, u64, u64) {
    (rest & 0xffff_ffff, rest >> 32 & 0x0fff_ffff, rest >> 60)
}

/// The least number of list pages of `room` places for so many entries: all but the last page give
/// one to the chain.
pub(crate) fn least_lists(entries: u64, room: u64) -> usize {
    let mut pages = 1;
    while (pages - 1) * (room - 1) + room < entries {
        pages += 1;
    }
    usize::try_from(pages).expect("few")
}
