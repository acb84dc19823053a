//! Page sizes of memory and what the kernel charges for it: alone, in mixtures, at any offset and
//! length.

use crate::common::*;
use pinfold::registered::{Backing, Survey, View};
use pinfold_core::addr::PageSize;
use rustix::thread::CapabilitySet;

/// Registers `len` bytes at `addr`, and checks that the kernel charges what is said, and takes it
/// back.
fn charged(addr: usize, len: usize) -> u64 {
    let mut buffers = buffers(View::Process).unwrap();
    let before = pinned_by_kernel();
    let index = register(&mut buffers, addr, len).unwrap();
    let said = buffers.stats().charged_bytes;
    assert_eq!(pinned_by_kernel() - before, said, "what the kernel says, and what is said of it");
    assert_eq!(buffers.get(index.into_index()).unwrap().charged_bytes(), said);
    buffers.unregister(index.into_index()).unwrap();
    assert_eq!((pinned_by_kernel(), buffers.stats().charged_bytes), (before, 0));
    assert_eq!(buffers.stats().pinned_bytes, 0);
    said
}

pub(crate) trait IntoIndex {
    fn into_index(self) -> pinfold::registered::BufferIndex;
}

impl IntoIndex for u16 {
    fn into_index(self) -> pinfold::registered::BufferIndex {
        pinfold::registered::BufferIndex::new(self)
    }
}

#[test]
fn hugepages_aligned_or_beginning_and_ending_anywhere() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(4) else { return skipped("may not reserve hugepages") };
    if buffers(View::Process).is_none() {
        return;
    }
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
            let survey = Survey::new(area.addr + from, len as u64, BOTH).unwrap();
            assert_eq!(survey.pages(PageSize::Size2M), pages, "{kind:?} {from} {len}: {survey:?}");
            assert_eq!(survey.pages(PageSize::Size4K), 0);
            assert!(survey.pieces().iter().all(|piece| piece.backing == Backing::Hugetlb));
            assert_eq!(
                charged(area.addr + from, len),
                pages * HUGE as u64,
                "{kind:?} {from} {len}"
            );
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
    let survey = Survey::new(addr + 5, 1 << 29, BOTH).unwrap();
    assert_eq!((survey.pages(PageSize::Size1G), survey.touched_bytes()), (1, 1 << 30));
    if buffers(View::Process).is_some() {
        assert_eq!(charged(addr + 5, 1 << 29), 1 << 30);
    }
    unmap(addr, 1 << 30).unwrap();
}

#[test]
fn each_plain_page_is_charged() {
    let _alone = alone();
    if buffers(View::Process).is_none() {
        return;
    }
    for kind in [Kind::Plain, Kind::Untouched, Kind::Memfd, Kind::PrivateFile, Kind::Disk] {
        let Some(area) = Area::new(PAGE, &[(kind, 100 * PAGE)]) else {
            skipped(&format!("no {kind:?} memory"));
            continue;
        };
        for (from, len, pages) in
            [(0, 100 * PAGE, 100), (1, 1, 1), (PAGE - 1, 2, 2), (5, 99 * PAGE, 100)]
        {
            assert_eq!(
                charged(area.addr + from, len),
                pages * PAGE as u64,
                "{kind:?} {from} {len}"
            );
        }
    }
}

#[test]
fn transparent_hugepages_are_found_and_charged_whole() {
    let _alone = alone();
    let area = Area::new(0, &[(Kind::Transparent, 3 * HUGE)]).unwrap();
    let survey = Survey::new(area.addr, 3 * HUGE as u64, BOTH).unwrap();
    if survey.means().transparent.is_err() || survey.pages(PageSize::Size2M) != 3 {
        return skipped("no transparent hugepages, or a kernel that does not tell");
    }
    let survey = Survey::new(area.addr + 5, 2 * HUGE as u64, BOTH).unwrap();
    assert_eq!((survey.pages(PageSize::Size2M), survey.pages(PageSize::Size4K)), (3, 0));
    assert!(survey.pieces().iter().all(|piece| piece.backing == Backing::Transparent));
    if buffers(View::Process).is_some() {
        assert_eq!(charged(area.addr + 5, 2 * HUGE), 3 * HUGE as u64);
    }
    // Pages that were only read are not present yet, though one entry maps zeroes there.
    let read = Area::new(0, &[(Kind::Untouched, 2 * HUGE)]).unwrap();
    advise(read.addr, 2 * HUGE, libc::MADV_HUGEPAGE);
    assert_eq!(peek(read.addr + HUGE), 0);
    let survey_read = Survey::new(read.addr, 2 * HUGE as u64, BOTH).unwrap();
    assert_eq!(survey_read.pages(PageSize::Size4K), 1024);
    // One of them is no longer mapped as one: its pages are plain.
    advise(area.addr + HUGE + PAGE, PAGE, libc::MADV_DONTNEED);
    let survey = Survey::new(area.addr, 3 * HUGE as u64, BOTH).unwrap();
    assert_eq!((survey.pages(PageSize::Size2M), survey.pages(PageSize::Size4K)), (2, 512));
}

/// Returns all kinds in one buffer, beginning and ending in plain pages.
fn mixture() -> Option<Area> {
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
            let survey = Survey::new(area.addr, area.bytes as u64, BOTH).unwrap();
            assert!(frames || !survey.means().frames, "{}", survey.means());
            let thp = survey.pieces().iter().any(|piece| piece.backing == Backing::Transparent);
            assert_eq!(survey.pages(PageSize::Size2M), if thp { 4 } else { 3 }, "{survey:?}");
            let plain = 3 + 512 + 5 + if thp { 0 } else { 512 };
            assert_eq!(survey.pages(PageSize::Size4K), plain);
            assert_eq!(
                survey.pieces().iter().map(|piece| piece.len).sum::<u64>(),
                area.bytes as u64
            );
            if buffers(View::Process).is_none() {
                return;
            }
            let whole = charged(area.addr, area.bytes);
            assert_eq!(whole, survey.touched_bytes(), "each page once, and whole");
            assert_eq!(charged(area.addr + 1, area.bytes - 2), whole, "not by byte");
        };
        if frames { body() } else { without(CapabilitySet::SYS_ADMIN, body) }
    }
}

#[test]
fn the_physical_view_has_a_segment_for_each_hugepage_at_most() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(7) else { return skipped("may not reserve hugepages") };
    let Some(mut buffers) = buffers(View::Physical) else { return };
    let area = Area::new(0, &[(Kind::Hugetlb, 4 * HUGE)]).unwrap();
    let index = match area.register(&mut buffers) {
        Ok(index) => index.into_index(),
        Err(error) => {
            let unknown = pinfold::registered::RegistrationError::FramesUnknown { addr: area.addr };
            assert_eq!(
                (error, buffers.stats().pinned_bytes),
                (unknown, 0),
                "and nothing stays pinned"
            );
            return skipped("frame numbers are unavailable");
        }
    };
    let table = buffers.get(index).unwrap().table();
    assert!(table.segment_count() <= 4, "8 MiB on 2 MiB pages: {}", table.segment_count());
    assert!(table.table_bytes() <= 32);
    assert!(
        !table.locate(HUGE as u64).unwrap().iova.is_aligned(2 * HUGE as u64) || table.folios() <= 4
    );
    let mixed = mixture().unwrap();
    let index = mixed.register(&mut buffers).unwrap().into_index();
    let registration = buffers.get(index).unwrap();
    let table = registration.table();
    let survey = Survey::new(mixed.addr, mixed.bytes as u64, BOTH).unwrap();
    // Every page is where the survey says, and in the table no more than its folio is divided.
    for piece in survey.pieces() {
        let offset = (piece.addr - mixed.addr) as u64;
        for at in [0, piece.len / 2, piece.len - 1] {
            assert_eq!(
                table.locate(offset + at).unwrap().iova.raw(),
                piece.phys.unwrap().raw() + at
            );
        }
    }
    assert!(table.table_bytes() as u64 <= 16 * (3 + 4 + 512 + 5));
}

#[test]
fn two_buffers_on_one_hugepage_are_pinned_and_charged_once() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(2) else { return skipped("may not reserve hugepages") };
    let Some(mut buffers) = buffers(View::Process) else { return };
    let area = Area::new(0, &[(Kind::Hugetlb, 2 * HUGE)]).unwrap();
    let before = pinned_by_kernel();
    let one = register(&mut buffers, area.addr, HUGE / 2).unwrap().into_index();
    let two = register(&mut buffers, area.addr + HUGE / 2, HUGE).unwrap().into_index();
    let huge = HUGE as u64;
    let stats = buffers.stats();
    assert_eq!((stats.pinned_bytes, stats.charged_bytes), (2 * huge, 2 * huge), "not three");
    assert_eq!(pinned_by_kernel() - before, 2 * huge);
    // The kernel takes back what it charged with the one that it charged it to, though the page
    // stays pinned.
    buffers.unregister(one).unwrap();
    let stats = buffers.stats();
    assert_eq!((stats.pinned_bytes, stats.charged_bytes), (2 * huge, huge));
    assert_eq!(pinned_by_kernel() - before, huge);
    buffers.unregister(two).unwrap();
    assert_eq!((buffers.stats().pinned_bytes, pinned_by_kernel()), (0, before));
}

#[test]
fn plain_pages_of_two_buffers_are_pinned_once_and_charged_twice() {
    let _alone = alone();
    let Some(mut buffers) = buffers(View::Process) else { return };
    let area = Area::new(0, &[(Kind::Plain, 3 * PAGE)]).unwrap();
    let before = pinned_by_kernel();
    register(&mut buffers, area.addr, PAGE + 100).unwrap();
    register(&mut buffers, area.addr + PAGE + 100, PAGE).unwrap();
    let page = PAGE as u64;
    let stats = buffers.stats();
    assert_eq!((stats.pinned_bytes, stats.charged_bytes), (3 * page, 4 * page));
    assert_eq!(pinned_by_kernel() - before, 4 * page);
    assert_eq!(stats.kernel_bytes, Some(pinned_by_kernel()));
}

#[test]
fn shared_memory_that_is_mapped_twice_is_pinned_once() {
    let _alone = alone();
    let Some(_pages) = Hugepages::reserve(1) else { return skipped("may not reserve hugepages") };
    for (flags, len, charges) in [(0, 8 * PAGE, 2), (libc::MFD_HUGETLB, HUGE, 1)] {
        let Some(mut buffers) = buffers(View::Process) else { return };
        let fd = memfd(len, flags).unwrap();
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let [one, two] = [(); 2]
            .map(|()| map(0, len, rw, libc::MAP_SHARED, Some(fd.try_clone().unwrap())).unwrap());
        poke(one, 77);
        assert_eq!(peek(two), 77);
        let before = pinned_by_kernel();
        register(&mut buffers, one, len).unwrap();
        register(&mut buffers, two, len).unwrap();
        let stats = buffers.stats();
        assert_eq!(pinned_by_kernel() - before, charges * len as u64, "{flags}");
        if Survey::new(two, 1, BOTH).unwrap().means().frames {
            assert_eq!(
                (stats.pinned_bytes, stats.charged_bytes),
                (len as u64, charges * len as u64)
            );
        }
        drop(buffers);
        [one, two].into_iter().for_each(|at| unmap(at, len).unwrap());
    }
}
