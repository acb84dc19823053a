//! PRP lists against a controller's walk.

use crate::controller::{least_lists, seg, walk_prps};
use crate::pages::{LISTS, Pages};
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::gather::prp::{ControllerPage, Prps};
use pinfold_core::gather::{GatherError, LayoutError, Profile};
use proptest::prelude::*;

fn check(page: ControllerPage, segments: &[Segment], pages: &Pages) -> Result<(), TestCaseError> {
    let len = segments.iter().map(|s| s.len).sum();
    let prps: Prps<_, 16> = Prps::new(page, segments.iter().copied(), &mut { pages }).unwrap();
    let (pieces, read) =
        walk_prps(page.bytes(), prps.prp1(), prps.prp2(), len, |at| pages.read(at));
    let profile = Profile::new(u32::MAX, page.bytes(), page.bytes(), 1).unwrap();
    let expected: Vec<_> = profile.gather(segments.iter().copied()).map(Result::unwrap).collect();
    prop_assert_eq!(pieces.len() as u64, prps.entries());
    prop_assert_eq!(pieces, expected);
    prop_assert_eq!(read, prps.list_pages());
    let listed = prps.entries() - 1;
    let least = if listed < 2 { 0 } else { least_lists(listed, page.bytes() / 8) };
    prop_assert_eq!(read, least);
    prop_assert_eq!(pages.out(), read);
    prps.release(&mut { pages });
    prop_assert_eq!(pages.out(), 0);
    Ok(())
}

#[test]
fn a_list_that_fits_its_page_does_not_chain() {
    let pages = Pages::new(4096, 16);
    for (bytes, lists) in [
        (1, 0),
        (4096, 0),
        (8192, 0),
        (8193, 1),
        (513 * 4096, 1),
        (513 * 4096 + 1, 2),
        // 2,048 entries: one in PRP1, 2,047 in lists of 511, 511, 511, 511 and 3.
        (8 << 20, 5),
    ] {
        let prps: Prps<_> =
            Prps::new(ControllerPage::SIZE_4K, [seg(0x4000_0000, bytes)], &mut &pages).unwrap();
        assert_eq!(prps.list_pages(), lists, "{bytes} bytes");
        assert_eq!(prps.entries(), bytes.div_ceil(4096));
        prps.release(&mut &pages);
        check(ControllerPage::SIZE_4K, &[seg(0x4000_0000, bytes)], &pages).unwrap();
    }
}

#[test]
fn what_prps_cannot_say_is_refused_and_holds_no_page() {
    let pages = Pages::new(4096, 3);
    let build = |segments: &[Segment]| -> Result<Prps<_, 2>, _> {
        Prps::new(ControllerPage::SIZE_4K, segments.iter().copied(), &mut &pages)
    };
    let ragged = |iova| LayoutError::Ragged { iova: Iova::new(iova), page: 4096 };
    assert_eq!(build(&[]).unwrap_err(), LayoutError::Empty);
    assert_eq!(build(&[seg(2, 4096)]).unwrap_err(), LayoutError::Offset { iova: Iova::new(2) });
    assert_eq!(build(&[seg(4096, 512), seg(8192, 512)]).unwrap_err(), ragged(4608));
    assert_eq!(build(&[seg(4096, 4096), seg(0x9200, 512)]).unwrap_err(), ragged(0x9200));
    assert_eq!(build(&[seg(0, 4 << 20), seg(0x9200, 512), seg(1, 1)]).unwrap_err(), {
        LayoutError::Ragged { iova: Iova::new(0x9200), page: 4096 }
    });
    assert_eq!(build(&[seg(0, 5 << 20)]).unwrap_err(), LayoutError::TooLong { limit: 2 });
    assert!(matches!(build(&[seg(0, 0)]).unwrap_err(), LayoutError::Gather(GatherError::Range(_))));
    assert_eq!(pages.out(), 0);
    let none = Pages::new(4096, 1);
    let few: Result<Prps<_>, _> = Prps::new(ControllerPage::SIZE_4K, [seg(0, 4 << 20)], &mut &none);
    assert_eq!((few.unwrap_err(), none.out()), (LayoutError::Take("none left"), 0));
    let small: Result<Prps<_>, _> =
        Prps::new(ControllerPage::from_mps(1).unwrap(), [seg(0, 1 << 20)], &mut &none);
    let iova = Iova::new(LISTS);
    assert_eq!(
        small.unwrap_err(),
        LayoutError::ListPage { iova, bytes: 4096, needed: 8192, align: 8192 }
    );
    assert_eq!((none.out(), ControllerPage::from_mps(16)), (0, None));
}

proptest! {
    #[test]
    fn prps_agree_with_a_controllers_walk(
        mps in 0u8..3,
        runs in prop::collection::vec((0u64..1 << 20, 1u64..700, any::<bool>()), 1..6),
        head in 0u64..1024, tail in 0u64..4096,
    ) {
        let page = ControllerPage::from_mps(mps).unwrap();
        let bytes = page.bytes();
        let mut segments: Vec<Segment> = Vec::new();
        let mut end = 0;
        for (place, count, beside) in runs {
            let start = if beside { end } else { place * bytes };
            end = start + count * bytes;
            segments.push(seg(start, count * bytes));
        }
        let first = &mut segments[0];
        let head = (head * 4).min(bytes - 4);
        *first = seg(first.iova.raw() + head, first.len - head);
        let last = segments.last_mut().unwrap();
        last.len -= tail.min(last.len - 1);
        check(page, &segments, &Pages::new(bytes, 16))?;
    }
}
