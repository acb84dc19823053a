//! Page sizes of memory and what the kernel charges for it: alone, in mixtures, at any offset and
//! length.

use crate::common::*;
use pinfold::folios::{Backing, Survey};
use pinfold::uring::RingBuffers;
use pinfold_core::addr::PageSize;
use rustix::thread::CapabilitySet;

/// Registers the pages of `len` bytes at `from` with a ring, and checks that the kernel charges what
/// was forecast, and takes it back. `None` without io_uring. What it charges for a mapping needs a
/// device: the example `vfio_check`, in the virtual machine.
fn charged(area: &Area, from: usize, len: usize) -> Option<u64> {
    let (ring, memory) = (ring()?, area.owned(from, len));
    let before = pinned_by_kernel();
    let table = RingBuffers::register(&ring, &[memory.fixed()]).unwrap();
    let forecast = memory.survey().unwrap().forecast();
    assert_eq!(pinned_by_kernel() - before, forecast.ring, "the kernel's charge, and the forecast");
    assert_eq!(forecast.mapping, memory.len() as u64, "a mapping is charged its own pages");
    drop(table);
    assert_eq!(pinned_by_kernel(), before);
    Some(forecast.ring)
}

#[test]
fn hugepages_aligned_or_beginning_and_ending_anywhere() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(4) else { return skipped("may not reserve hugepages") };
    for kind in [Kind::Hugetlb, Kind::HugetlbShared, Kind::HugetlbMemfd] {
        let area = Area::new(0, &[(kind, 4 * HUGE)]).unwrap();
        // One, several, with an unaligned start, an unaligned end, both; within one page; across
        // two.
        for (from, len, pages) in [
            (0, HUGE, 1),
            (0, 4 * HUGE, 4),
            (PAGE, 4 * HUGE - PAGE, 4),
            (0, 3 * HUGE + 1, 4),
            (HUGE - 1, 2, 2),
            (HUGE + 12_345, 2 * HUGE, 3),
            (3 * HUGE + 7, 100, 1),
        ] {
            let survey = Survey::new(area.addr + from, len as u64).unwrap();
            assert_eq!(survey.pages(PageSize::Size2M), pages, "{kind:?} {from} {len}: {survey:?}");
            assert_eq!(survey.pages(PageSize::Size4K), 0);
            assert!(survey.pieces().iter().all(|piece| piece.backing == Backing::Hugetlb));
            let Some(charged) = charged(&area, from, len) else { return };
            assert_eq!(charged, pages * HUGE as u64, "{kind:?} {from} {len}");
        }
    }
}

#[test]
fn pages_of_1_gib() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve_1g() else { return skipped("no pages of 1 GiB") };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_1GB;
    let Some(addr) = map(0, 1 << 30, libc::PROT_READ | libc::PROT_WRITE, flags, None) else {
        return skipped("no page of 1 GiB to be mapped");
    };
    let survey = Survey::new(addr + 5, 1 << 29).unwrap();
    assert_eq!(survey.pages(PageSize::Size1G), 1);
    assert_eq!(survey.forecast().ring, 1 << 30);
    unmap(addr, 1 << 30).unwrap();
}

#[test]
fn each_plain_page_is_charged() {
    let _alone = alone();
    for kind in [Kind::Plain, Kind::Untouched, Kind::Memfd, Kind::PrivateFile, Kind::Disk] {
        let Some(area) = Area::new(PAGE, &[(kind, 100 * PAGE)]) else {
            skipped(&format!("no {kind:?} memory"));
            continue;
        };
        for (from, len, pages) in
            [(0, 100 * PAGE, 100), (1, 1, 1), (PAGE - 1, 2, 2), (5, 99 * PAGE, 100)]
        {
            let Some(charged) = charged(&area, from, len) else { return };
            assert_eq!(charged, pages * PAGE as u64, "{kind:?} {from} {len}");
        }
    }
}

#[test]
fn transparent_hugepages_are_found_and_charged_whole() {
    let _alone = alone();
    let area = Area::new(0, &[(Kind::Transparent, 3 * HUGE)]).unwrap();
    let survey = Survey::new(area.addr, 3 * HUGE as u64).unwrap();
    if survey.means().transparent.is_err() || survey.pages(PageSize::Size2M) != 3 {
        return skipped("no transparent hugepages, or a kernel that does not tell");
    }
    let survey = Survey::new(area.addr + 5, 2 * HUGE as u64).unwrap();
    assert_eq!((survey.pages(PageSize::Size2M), survey.pages(PageSize::Size4K)), (3, 0));
    assert!(survey.pieces().iter().all(|piece| piece.backing == Backing::Transparent));
    if let Some(charged) = charged(&area, 5, 2 * HUGE) {
        assert_eq!(charged, 3 * HUGE as u64);
    }
    // Pages that were only read are not present yet, though one entry maps zeroes there.
    let read = Area::new(0, &[(Kind::Untouched, 2 * HUGE)]).unwrap();
    advise(read.addr, 2 * HUGE, libc::MADV_HUGEPAGE);
    assert_eq!(peek(read.addr + HUGE), 0);
    let survey_read = Survey::new(read.addr, 2 * HUGE as u64).unwrap();
    assert_eq!(survey_read.pages(PageSize::Size4K), 1024);
    // One of them is no longer mapped as one: its pages are plain.
    advise(area.addr + HUGE + PAGE, PAGE, libc::MADV_DONTNEED);
    let survey = Survey::new(area.addr, 3 * HUGE as u64).unwrap();
    assert_eq!((survey.pages(PageSize::Size2M), survey.pages(PageSize::Size4K)), (2, 512));
}

/// Returns all kinds in one buffer, beginning and ending in plain pages.
pub(crate) fn mixture() -> Option<Area> {
    let parts = [
        (Kind::Plain, 3 * PAGE),
        (Kind::Hugetlb, 2 * HUGE),
        (Kind::Transparent, HUGE),
        (Kind::Memfd, 16 * PAGE),
        (Kind::Untouched, HUGE - 16 * PAGE),
        (Kind::HugetlbMemfd, HUGE),
        (Kind::PrivateFile, 5 * PAGE),
    ];
    Area::new(HUGE - 3 * PAGE, &parts)
}

#[test]
fn a_mixture_keeps_its_hugepages_whole() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(3) else { return skipped("may not reserve hugepages") };
    let area = mixture().unwrap();
    for frames in [true, false] {
        let body = || {
            let survey = Survey::new(area.addr, area.bytes as u64).unwrap();
            let thp = survey.pieces().iter().any(|piece| piece.backing == Backing::Transparent);
            assert_eq!(survey.pages(PageSize::Size2M), if thp { 4 } else { 3 }, "{survey:?}");
            let plain = 3 + 512 + 5 + if thp { 0 } else { 512 };
            assert_eq!(survey.pages(PageSize::Size4K), plain);
            assert_eq!(
                survey.pieces().iter().map(|piece| piece.len).sum::<u64>(),
                area.bytes as u64
            );
            let Some(whole) = charged(&area, 0, area.bytes) else { return };
            let huge = survey.pages(PageSize::Size2M) * HUGE as u64;
            assert_eq!(whole, huge + plain * PAGE as u64, "each page once, and whole");
            assert_eq!(charged(&area, 1, area.bytes - 2), Some(whole), "not by byte");
        };
        if frames { body() } else { without(CapabilitySet::SYS_ADMIN, body) }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % bound as u64).unwrap()
    }
}

#[test]
fn any_part_of_a_mixture_is_charged_as_forecast() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(3) else { return skipped("may not reserve hugepages") };
    let area = mixture().unwrap();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..100 {
        let from = random.below(area.bytes - 1);
        let most = if random.below(3) == 0 { 2 * HUGE } else { 9 * PAGE };
        if charged(&area, from, 1 + random.below(most.min(area.bytes - from))).is_none() {
            return;
        }
    }
}
