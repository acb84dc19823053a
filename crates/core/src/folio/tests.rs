//! Folios of equal size: counts, refused buffers, and agreement with a list of pages.

mod mixture;

use super::*;
use crate::addr::{Iova, PageSize, RangeError, Segment};
use alloc::vec::Vec;
use proptest::prelude::*;

const HUGE: u64 = 2 << 20;

/// Describes `len` bytes at `addr` in pages of `page`, whose device addresses `device` are.
fn from_pages(addr: usize, len: u64, page: PageSize, device: &[u64]) -> Folios {
    let (mut skip, mut left) = (addr as u64 & page.mask(), len);
    let pieces = device.iter().map(|&start| {
        let piece = seg(start + skip, (page.bytes() - skip).min(left));
        left -= piece.len;
        skip = 0;
        piece
    });
    Folios::from_segments(addr, pieces).unwrap()
}

/// Counts the segments of the whole buffer.
fn segment_count(buffer: &Folios) -> usize {
    buffer.segments(0, buffer.len()).unwrap().count()
}

fn seg(iova: u64, len: u64) -> Segment {
    Segment { iova: Iova::new(iova), len }
}

#[test]
fn eight_mebibytes_on_hugepages_are_four_folios() {
    let apart = [0x8000_0000, 0x4000_0000, 0xc000_0000, 0x1_0000_0000];
    let buffer = from_pages(0x7000_0000_0000, 8 << 20, PageSize::Size2M, &apart);
    assert_eq!((buffer.folios(), buffer.folio_shift(), segment_count(&buffer)), (4, 21, 4));
    assert_eq!(buffer.table_bytes(), 32);
    assert_eq!(buffer.locate(HUGE + 5), Ok(seg(0x4000_0005, HUGE - 5)));
}

#[test]
fn adjacent_pages_are_one_folio() {
    let pages: Vec<u64> = (0..4).map(|i| 0x8000_0000 + i * HUGE).collect();
    let buffer = from_pages(0x7000_0000_0123, 6 << 20, PageSize::Size2M, &pages);
    assert_eq!((buffer.folios(), segment_count(&buffer), buffer.table_bytes()), (1, 1, 8));
    assert_eq!(buffer.locate(0), Ok(seg(0x8000_0123, 6 << 20)));
    // 2,048 pages of 4 KiB in adjacent groups of 512 are like hugepages.
    let at = |i: u64| 0x1000_0000 + (i / 512) * 2 * HUGE + (i % 512) * 4096;
    let pages: Vec<u64> = (0..2048).map(at).collect();
    let buffer = from_pages(0x7000_0000_0000, 8 << 20, PageSize::Size4K, &pages);
    assert_eq!((buffer.folios(), buffer.folio_shift()), (4, 21));
}

#[test]
fn addresses_in_the_upper_half_and_an_iova_of_zero_are_valid() {
    let addr = usize::MAX - 0xffff;
    let buffer = Folios::from_segments(addr, [seg(0, 0x8000)]).unwrap();
    assert_eq!(buffer.locate(0x7fff), Ok(seg(0x7fff, 1)));
    // The first folio would begin below IOVA 0.
    let buffer = Folios::from_segments(0x1f_f000, [seg(0, 0x1000), seg(0x10_0000, HUGE)]).unwrap();
    assert_eq!((buffer.folio_shift(), buffer.folios()), (21, 2));
    assert_eq!(buffer.locate(0), Ok(seg(0, 0x1000)));
    assert_eq!(buffer.locate(0x1000), Ok(seg(0x10_0000, HUGE)));
}

#[test]
fn bad_buffers_are_refused() {
    let from = |addr, segment| Folios::from_segments(addr, [segment]);
    assert_eq!(from(usize::MAX, seg(0, 2)), Err(BufferError::Wraps { addr: usize::MAX, len: 2 }));
    assert_eq!(from(0, seg(0, 2 << 40)), Err(BufferError::TooLong { len: 2 << 40 }));
    let wraps = RangeError::Wraps { kind: "iova", start: u64::MAX - 4094, len: 4096 };
    assert_eq!(from(0, seg(u64::MAX - 4094, 4096)), Err(wraps.into()));
    assert_eq!(Folios::from_segments(64, []), Err(BufferError::Empty { addr: 64 }));
    let ragged = Folios::from_segments(0x1000, [seg(0, 0x800), seg(0x2000, 0x800)]);
    assert_eq!(ragged, Err(BufferError::Ragged { addr: 0x1800 }));
    let long = Folios::from_segments(0, [seg(0, u64::MAX), seg(0, u64::MAX)]);
    assert_eq!(long, Err(BufferError::TooLong { len: u64::MAX }));
}

#[test]
fn ranges_outside_are_refused() {
    let buffer = Folios::from_segments(0x1000, [seg(0x5000, 0x1000)]).unwrap();
    let outside = |offset, len| OutsideBuffer { offset, len, size: 0x1000 };
    assert_eq!(buffer.locate(0x1000), Err(outside(0x1000, 1)));
    assert_eq!(buffer.segments(1, 0x1000).unwrap_err(), outside(1, 0x1000));
    assert_eq!(buffer.segments(u64::MAX, 2).unwrap_err(), outside(u64::MAX, 2));
    assert_eq!(buffer.segments(0, 0).unwrap_err(), outside(0, 0));
}

/// A buffer of scattered pages, some of them adjacent; the device address of each of its 4 KiB; and
/// where in the first page it begins.
fn buffers() -> impl Strategy<Value = (Folios, Vec<u64>, u64)> {
    let sizes = prop_oneof![Just(PageSize::Size4K), Just(PageSize::Size2M)];
    (
        sizes,
        0u64..8,
        prop::collection::vec((any::<bool>(), 0u64..1 << 30), 1..40),
        any::<[u16; 2]>(),
    )
        .prop_map(|(page, base, places, [cut, short])| {
            let mut pages = Vec::new();
            for (adjacent, place) in places {
                let elsewhere = place * page.bytes();
                let next = pages.last().map_or(elsewhere, |last| last + page.bytes());
                pages.push(if adjacent { next } else { elsewhere });
            }
            let head = u64::from(cut) * page.bytes() / 65536;
            let room = pages.len() as u64 * page.bytes() - head;
            // Ends anywhere in the last page, after at least one byte.
            let spare = (page.bytes() - 1).min(room - 1);
            let len = room - u64::from(short) * spare / 65536;
            let addr = usize::try_from((1 << 30) + base * page.bytes() + head).unwrap();
            let buffer = from_pages(addr, len, page, &pages);
            // The model: the device address of each 4 KiB of the pages.
            let fine = pages
                .iter()
                .flat_map(|p| (0..page.bytes() / 4096).map(move |i| p + i * 4096))
                .collect();
            (buffer, fine, head)
        })
}

fn model(fine: &[u64], head: u64, offset: u64) -> u64 {
    let at = head + offset;
    fine[(at / 4096) as usize] + at % 4096
}

proptest! {
    #[test]
    fn locate_agrees_with_a_list_of_pages((buffer, fine, head) in buffers(), picks in prop::collection::vec(any::<u64>(), 40)) {
        for pick in picks {
            let offset = pick % buffer.len();
            let found = buffer.locate(offset).unwrap();
            prop_assert_eq!(found.iova.raw(), model(&fine, head, offset));
            prop_assert!(found.len >= 1 && offset + found.len <= buffer.len());
            // The whole of it is contiguous: check its last byte and each page between.
            for step in (0..found.len).step_by(4096).chain([found.len - 1]) {
                prop_assert_eq!(found.iova.raw() + step, model(&fine, head, offset + step));
            }
        }
        prop_assert!(buffer.table_bytes() <= 8 * fine.len());
    }

    #[test]
    fn segments_agree_with_a_list_of_pages((buffer, fine, head) in buffers(), a in any::<u64>(), b in any::<u64>()) {
        let offset = a % buffer.len();
        let len = 1 + b % (buffer.len() - offset);
        let mut at = offset;
        let mut last_end = None;
        for segment in buffer.segments(offset, len).unwrap() {
            prop_assert_ne!(last_end, Some(segment.iova.raw()), "neighbours are merged");
            for step in (0..segment.len).step_by(4096).chain([segment.len - 1]) {
                prop_assert_eq!(segment.iova.raw() + step, model(&fine, head, at + step));
            }
            at += segment.len;
            last_end = Some(segment.iova.raw() + segment.len);
        }
        prop_assert_eq!(at, offset + len);
    }
}
