use super::prp::{ControllerPage, ListPage, ListPages, PrpError, Prps};
use super::*;
use crate::mem::DmaMemory;
use core::cell::RefCell;
use core::ptr::NonNull;
use proptest::prelude::*;

fn seg(iova: u64, len: u64) -> Segment {
    Segment { iova: Iova::new(iova), len }
}

fn all(profile: Profile, segments: &[Segment]) -> Result<Vec<Segment>, GatherError> {
    profile.gather(segments.iter().copied()).collect()
}

#[test]
fn impossible_profiles_are_refused() {
    assert_eq!(Profile::new(0, 1, 0, 1), Err(ProfileError::NoSegments));
    assert_eq!(Profile::new(1, 1, 0, 0), Err(ProfileError::Align { align: 0 }));
    assert_eq!(Profile::new(1, 8, 0, 6), Err(ProfileError::Align { align: 6 }));
    assert_eq!(Profile::new(1, 8, 2, 4), Err(ProfileError::Boundary { boundary: 2, align: 4 }));
    assert_eq!(Profile::new(1, 8, 12, 4), Err(ProfileError::Boundary { boundary: 12, align: 4 }));
    assert_eq!(Profile::new(1, 3, 0, 4), Err(ProfileError::SegmentBytes { max_segment_bytes: 3, align: 4 }));
    assert_eq!(Profile::new(1, 0, 0, 1), Err(ProfileError::SegmentBytes { max_segment_bytes: 0, align: 1 }));
}

#[test]
fn neighbours_are_merged_before_they_are_cut() {
    let profile = Profile::new(8, 0x3000, 0, 1).unwrap();
    let cut = all(profile, &[seg(0x1000, 0x1000), seg(0x2000, 0x3000), seg(0x4000, 0x10)]).unwrap();
    assert_eq!(cut, [seg(0x1000, 0x3000), seg(0x4000, 0x1000), seg(0x4000, 0x10)]);
    // The other way round they are no neighbours.
    assert_eq!(all(profile, &[seg(0x2000, 0x10), seg(0x1000, 0x1000)]).unwrap().len(), 2);
}

#[test]
fn a_boundary_is_never_crossed() {
    let profile = Profile::new(8, 1 << 40, 0x1_0000, 1).unwrap();
    let cut = all(profile, &[seg(0xffff, 0x1_0002)]).unwrap();
    assert_eq!(cut, [seg(0xffff, 1), seg(0x1_0000, 0x1_0000), seg(0x2_0000, 1)]);
}

#[test]
fn too_many_says_how_many_without_counting_them_one_by_one() {
    let profile = Profile::new(2, 1, 0, 1).unwrap();
    let mut gather = profile.gather([seg(0, 1 << 50), seg(1 << 60, 3)]);
    assert_eq!(gather.by_ref().take(2).filter(Result::is_ok).count(), 2);
    assert_eq!(gather.next(), Some(Err(GatherError::TooMany { needed: (1 << 50) + 3, limit: 2 })));
    assert_eq!(gather.next(), None);
    let mut slots = [seg(0, 0); 1];
    let few = profile.gather_into([seg(0, 2)], &mut slots);
    assert_eq!(few, Err(GatherError::TooMany { needed: 2, limit: 1 }));
    assert_eq!(profile.gather_into([seg(9, 1)], &mut slots).unwrap(), [seg(9, 1)]);
}

#[test]
fn crooked_and_wrapping_segments_are_refused() {
    let profile = Profile::new(8, 0x1000, 0, 4).unwrap();
    let crooked = |iova, len| GatherError::Misaligned { iova: Iova::new(iova), len, align: 4 };
    assert_eq!(all(profile, &[seg(2, 4)]), Err(crooked(2, 4)));
    assert_eq!(all(profile, &[seg(4, 5)]), Err(crooked(4, 5)));
    // Two crooked halves of something straight are straight.
    assert_eq!(all(profile, &[seg(4, 5), seg(9, 3)]).unwrap(), [seg(4, 8)]);
    let wraps = RangeError::Wraps { kind: "iova", start: 8, len: u64::MAX };
    assert_eq!(all(profile, &[seg(8, u64::MAX)]), Err(wraps.into()));
    let empty = RangeError::Empty { kind: "iova", start: 8 };
    assert_eq!(all(profile, &[seg(0, 8), seg(8, 0)]), Err(empty.into()));
}

proptest! {
    #[test]
    fn gather_agrees_with_single_bytes(
        pieces in prop::collection::vec((0u64..3, 0u64..64, 1u64..40), 1..10),
        max in 1u64..40, boundary in 0u32..8, align in 0u32..4, limit in 1u32..40,
    ) {
        let (align, boundary) = (1u64 << align, if boundary == 0 { 0 } else { 1 << boundary });
        let Ok(profile) = Profile::new(limit, max, boundary, align) else {
            prop_assert!(max < align || (boundary != 0 && boundary < align));
            return Ok(());
        };
        let mut segments = Vec::new();
        let mut end = 0;
        for (kind, place, len) in pieces {
            let start = if kind == 0 { place } else { end };
            end = start + len;
            segments.push(seg(start, len));
        }
        let bytes: Vec<u64> = segments.iter().flat_map(|s| s.iova.raw()..s.iova.raw() + s.len).collect();
        // The model goes byte by byte, and begins a new segment only where one must.
        let mut runs = 1;
        let mut model = vec![seg(bytes[0], 1)];
        let mut edges = vec![bytes[0]];
        for pair in bytes.windows(2) {
            let last = model.last_mut().unwrap();
            let jump = pair[1] != pair[0] + 1;
            let full = last.len == max / align * align || (boundary != 0 && pair[1] % boundary == 0);
            if jump {
                runs += 1;
                edges.extend([pair[0] + 1, pair[1]]);
            }
            if jump || full { model.push(seg(pair[1], 1)) } else { last.len += 1 }
        }
        edges.push(bytes.last().unwrap() + 1);
        let straight = edges.iter().all(|edge| edge % align == 0);
        prop_assert_eq!(edges.len(), 2 * runs);

        let mut slots = [seg(0, 0); 512];
        let into = profile.gather_into(segments.iter().copied(), &mut slots).map(|full| full.to_vec());
        let lazily = all(profile, &segments);
        prop_assert_eq!(&into, &lazily);
        prop_assert_eq!(profile.count(segments.iter().copied()).ok(), straight.then_some(model.len() as u64));
        match lazily {
            Ok(cut) => prop_assert!(straight && cut == model && model.len() <= limit as usize),
            Err(GatherError::TooMany { needed, limit: at }) => {
                prop_assert_eq!(at, u64::from(limit));
                prop_assert!(model.len() as u64 > at && (!straight || needed == model.len() as u64));
            }
            Err(GatherError::Misaligned { .. }) => prop_assert!(!straight),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}

const LISTS: u64 = 0x10_0000_0000;

/// List pages in ordinary memory, and what the controller sees there.
struct Pages {
    bytes: usize,
    memory: Vec<u64>,
    free: RefCell<Vec<usize>>,
}

impl Pages {
    fn new(bytes: u64, count: usize) -> Self {
        let bytes = usize::try_from(bytes).unwrap();
        let memory = vec![0xdead_beef_dead_beef; bytes / 8 * count];
        Self { bytes, memory, free: RefCell::new((0..count).rev().collect()) }
    }

    fn part(&self, offset: usize, len: usize) -> DmaMemory<'_> {
        let base = NonNull::from(self.memory.as_slice()).cast::<u8>();
        // SAFETY: the vector is alive as long as `self`, never resized, and reached by nothing but this.
        let whole = unsafe { DmaMemory::from_raw(base, self.memory.len() * 8) };
        whole.part(offset, len).unwrap()
    }

    fn read(&self, iova: u64) -> u64 {
        let offset = usize::try_from(iova - LISTS).unwrap();
        u64::from_le(self.part(offset, 8).read_u64(0).unwrap())
    }

    fn out(&self) -> usize {
        self.memory.len() * 8 / self.bytes - self.free.borrow().len()
    }
}

impl ListPages for Pages {
    type Page = usize;
    type TakeError = &'static str;
    type GiveError = &'static str;
    fn take(&self) -> Result<ListPage<'_, usize>, &'static str> {
        let page = self.free.borrow_mut().pop().ok_or("none left")?;
        let offset = page * self.bytes;
        Ok(ListPage { page, iova: Iova::new(LISTS + offset as u64), memory: self.part(offset, self.bytes) })
    }
    fn give(&self, page: usize) -> Result<(), &'static str> {
        let mut free = self.free.borrow_mut();
        if free.contains(&page) {
            return Err("given twice");
        }
        free.push(page);
        Ok(())
    }
}

/// What a controller does with PRP1, PRP2 and a length: the pieces, and how many list pages it read.
fn walk(page: u64, prp1: u64, prp2: u64, len: u64, read: impl Fn(u64) -> u64) -> (Vec<Segment>, usize) {
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

/// The least number of list pages for so many entries: all but the last page give one entry to the chain.
fn least_lists(entries: u64, page: u64) -> usize {
    let (listed, room) = (entries.saturating_sub(1), page / 8);
    let mut pages = 0;
    let mut reach = 0;
    while entries > 2 && reach < listed {
        pages += 1;
        reach = (pages - 1) * (room - 1) + room;
    }
    usize::try_from(pages).unwrap()
}

fn check(page: ControllerPage, segments: &[Segment], pages: &Pages) -> Result<(), TestCaseError> {
    let len = segments.iter().map(|s| s.len).sum();
    let prps: Prps<usize, 16> = Prps::new(page, segments.iter().copied(), pages).unwrap();
    let (pieces, read) = walk(page.bytes(), prps.prp1(), prps.prp2(), len, |at| pages.read(at));
    let profile = Profile::new(u32::MAX, page.bytes(), page.bytes(), 1).unwrap();
    let expected: Vec<_> = profile.gather(segments.iter().copied()).map(Result::unwrap).collect();
    prop_assert_eq!(pieces.len() as u64, prps.entries());
    prop_assert_eq!(pieces, expected);
    prop_assert_eq!(read, prps.list_pages());
    prop_assert_eq!(read, least_lists(prps.entries(), page.bytes()));
    prop_assert_eq!(pages.out(), read);
    prps.release(pages).unwrap();
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
        let prps: Prps<usize> =
            Prps::new(ControllerPage::SIZE_4K, [seg(0x4000_0000, bytes)], &pages).unwrap();
        assert_eq!(prps.list_pages(), lists, "{bytes} bytes");
        assert_eq!(prps.entries(), bytes.div_ceil(4096));
        prps.release(&pages).unwrap();
        check(ControllerPage::SIZE_4K, &[seg(0x4000_0000, bytes)], &pages).unwrap();
    }
}

#[test]
fn what_prps_cannot_say_is_refused_and_holds_no_page() {
    let pages = Pages::new(4096, 3);
    let build = |segments: &[Segment]| -> Result<Prps<usize, 2>, _> {
        Prps::new(ControllerPage::SIZE_4K, segments.iter().copied(), &pages)
    };
    let ragged = |iova| PrpError::Ragged { iova: Iova::new(iova), page: 4096 };
    assert_eq!(build(&[]).unwrap_err(), PrpError::Empty);
    assert_eq!(build(&[seg(2, 4096)]).unwrap_err(), PrpError::Offset { iova: Iova::new(2) });
    assert_eq!(build(&[seg(4096, 512), seg(8192, 512)]).unwrap_err(), ragged(4608));
    assert_eq!(build(&[seg(4096, 4096), seg(0x9200, 512)]).unwrap_err(), ragged(0x9200));
    assert_eq!(build(&[seg(0, 4 << 20), seg(0x9200, 512), seg(1, 1)]).unwrap_err(), {
        PrpError::Ragged { iova: Iova::new(0x9200), page: 4096 }
    });
    assert_eq!(build(&[seg(0, 5 << 20)]).unwrap_err(), PrpError::TooLong { limit: 2 });
    assert!(matches!(build(&[seg(0, 0)]).unwrap_err(), PrpError::Range(_)));
    assert_eq!(pages.out(), 0);
    let none = Pages::new(4096, 1);
    let few: Result<Prps<usize>, _> = Prps::new(ControllerPage::SIZE_4K, [seg(0, 4 << 20)], &none);
    assert_eq!((few.unwrap_err(), none.out()), (PrpError::Take("none left"), 0));
    let small: Result<Prps<usize>, _> =
        Prps::new(ControllerPage::from_mps(1).unwrap(), [seg(0, 1 << 20)], &none);
    let iova = Iova::new(LISTS);
    assert_eq!(small.unwrap_err(), PrpError::ListPage { iova, bytes: 4096, page: 8192 });
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
