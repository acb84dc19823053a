//! SGLs against a controller's walk.

use crate::controller::{least_lists, seg, walk_sgl};
use crate::pages::Pages;
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::gather::sgl::{Kind, Sgl};
use pinfold_core::gather::{GatherError, LayoutError, Profile};
use proptest::prelude::*;

fn any_profile(max_segments: u32) -> Profile {
    Profile::new(max_segments, u64::MAX, 0, 1).unwrap()
}

/// `count` pieces that do not touch.
fn apart(count: u64) -> Vec<Segment> {
    (0..count).map(|i| seg(i * 0x20_0000, 0x1000 + i)).collect()
}

#[test]
fn one_piece_is_in_the_command_itself() {
    let pages = Pages::new(4096, 1);
    // Two hugepages that the device sees side by side are one piece.
    let hugepages = [seg(0x4000_0000, 2 << 20), seg(0x4020_0000, 2 << 20)];
    let sgl: Sgl<_> = Sgl::new(&any_profile(1), hugepages, &mut &pages).unwrap();
    let sgl1 = sgl.sgl1();
    assert_eq!(
        (sgl1.kind(), sgl1.iova().raw(), sgl1.len()),
        (Kind::DataBlock, 0x4000_0000, 4 << 20)
    );
    assert_eq!(sgl1.words(), [0x4000_0000, 4 << 20]);
    assert_eq!((sgl.data_blocks(), sgl.list_pages(), pages.out()), (1, 0, 0));
}

#[test]
fn an_array_that_fits_its_page_does_not_chain() {
    for (bytes, count, lists) in [
        (4096, 2, 1),
        (4096, 256, 1),
        // 255 and the descriptor of the next one, then 2.
        (4096, 257, 2),
        (4096, 511, 2),
        (4096, 512, 3),
        (32, 2, 1),
        (32, 3, 2),
        (32, 9, 8),
    ] {
        let pages = Pages::new(bytes, 8);
        let sgl: Sgl<_> = Sgl::new(&any_profile(1000), apart(count), &mut &pages).unwrap();
        assert_eq!((sgl.data_blocks(), sgl.list_pages()), (count, lists), "{count} pieces");
        let last = lists == 1;
        assert_eq!(sgl.sgl1().kind(), if last { Kind::LastSegment } else { Kind::Segment });
        let (pieces, read) = walk_sgl(sgl.sgl1().words(), |at| pages.read(at));
        assert_eq!((pieces, read), (apart(count), lists));
        sgl.release(&mut &pages);
        assert_eq!(pages.out(), 0);
    }
}

#[test]
fn a_piece_beyond_32_bits_is_cut_where_the_next_is_aligned() {
    let pages = Pages::new(4096, 1);
    let profile = Profile::new(8, u64::MAX, 0, 4).unwrap();
    let sgl: Sgl<_> = Sgl::new(&profile, [seg(0x1000, 5 << 32)], &mut &pages).unwrap();
    let (pieces, _) = walk_sgl(sgl.sgl1().words(), |at| pages.read(at));
    assert_eq!(pieces.len(), 6);
    assert!(pieces.iter().all(|piece| piece.iova.is_aligned(4) && piece.len % 4 == 0));
    assert_eq!(pieces.iter().map(|piece| piece.len).sum::<u64>(), 5 << 32);
    let huge = Profile::new(8, u64::MAX, 0, 1 << 33).unwrap();
    assert!(matches!(
        Sgl::<_>::new(&huge, [seg(0, 1 << 33)], &mut &pages),
        Err(LayoutError::Profile(_))
    ));
}

#[test]
fn what_sgls_cannot_say_is_refused_and_holds_no_page() {
    let pages = Pages::new(64, 2);
    let build = |segments: &[Segment], most| -> Result<Sgl<_, 2>, _> {
        Sgl::new(&any_profile(most), segments.iter().copied(), &mut &pages)
    };
    assert_eq!(build(&[], 9).unwrap_err(), LayoutError::Empty);
    assert!(matches!(
        build(&[seg(0, 0)], 9).unwrap_err(),
        LayoutError::Gather(GatherError::Range(_))
    ));
    let wraps = [seg(0, 8), seg(u64::MAX, 2)];
    assert!(matches!(build(&wraps, 9).unwrap_err(), LayoutError::Gather(GatherError::Range(_))));
    let needed = GatherError::TooMany { needed: 7, limit: 5 };
    assert_eq!(build(&apart(7), 5).unwrap_err(), LayoutError::Gather(needed));
    assert_eq!(pages.out(), 0);
    build(&apart(7), 9).unwrap().release(&mut &pages);
    assert_eq!(build(&apart(8), 9).unwrap_err(), LayoutError::TooLong { limit: 2 });
    let few: Result<Sgl<_, 8>, _> = Sgl::new(&any_profile(9), apart(8), &mut &pages);
    assert_eq!((few.unwrap_err(), pages.out()), (LayoutError::Take("none left"), 0));
    let small = Pages::new(24, 2);
    let tiny: Result<Sgl<_>, _> = Sgl::new(&any_profile(9), apart(2), &mut &small);
    let iova = Iova::new(crate::pages::LISTS);
    assert_eq!(
        (tiny.unwrap_err(), small.out()),
        (LayoutError::ListPage { iova, bytes: 24, needed: 32, align: 8 }, 0)
    );
    let dwords = Profile::new(9, u64::MAX, 0, 4).unwrap();
    let misaligned: Result<Sgl<_>, _> = Sgl::new(&dwords, [seg(0, 4), seg(9, 4)], &mut &pages);
    assert!(matches!(misaligned.unwrap_err(), LayoutError::Gather(GatherError::Misaligned { .. })));
    assert_eq!(pages.out(), 0);
}

proptest! {
    #[test]
    fn sgls_agree_with_a_controllers_walk(
        pieces in prop::collection::vec((0u64..1 << 30, 1u64..1 << 20, any::<bool>()), 1..60),
        max in 1u64..1 << 20, boundary in 12u32..24, room in 2u64..20,
    ) {
        let mut segments: Vec<Segment> = Vec::new();
        let mut end = 0;
        for (place, len, beside) in pieces {
            let start = if beside { end } else { place };
            end = start + len;
            segments.push(seg(start, len));
        }
        let profile = Profile::new(500, max.max(1 << 12), 1 << boundary, 1).unwrap();
        let pages = Pages::new(room * 16, 512);
        let expected: Result<Vec<_>, _> = profile.gather(segments.iter().copied()).collect();
        let sgl: Result<Sgl<_, 512>, _> = Sgl::new(&profile, segments, &mut &pages);
        match (sgl, expected) {
            (Ok(sgl), Ok(expected)) => {
                let (walked, read) = walk_sgl(sgl.sgl1().words(), |at| pages.read(at));
                prop_assert_eq!(sgl.data_blocks(), walked.len() as u64);
                let least = if walked.len() == 1 { 0 } else { least_lists(walked.len() as u64, room) };
                prop_assert_eq!(walked, expected);
                prop_assert_eq!((read, sgl.list_pages(), pages.out()), (least, least, least));
                sgl.release(&mut &pages);
            }
            (Err(LayoutError::Gather(error)), Err(expected)) => prop_assert_eq!(error, expected),
            (sgl, expected) => prop_assert!(false, "{sgl:?} {expected:?}"),
        }
        prop_assert_eq!(pages.out(), 0);
    }
}
