//! The composition of memory: the size of its pages, and their frames; the borders and alignments
//! that follow.

use crate::sys::pages::{Entry, Mappings, MmapRegion, Pagemap};
use crate::sys::{Errno, bytes};
use pinfold_core::addr::{Iova, PageSize, Segment};
use pinfold_core::folio::{BufferError, Folios};
use pinfold_core::mem::DmaMemory;
use std::fmt;

/// The composition of a range of this process's memory, at one moment unless the memory is pinned.
///
/// Pages of unknown size are reported as small, never as large.
///
/// ```
/// use pinfold::OwnedMemory;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = OwnedMemory::from_vec(vec![0u8; 1 << 20])?;
/// let survey = memory.survey()?;
/// assert!(survey.forecast().ring >= memory.len() as u64);
/// println!("{}; {}", survey.forecast(), survey.means());
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Survey {
    addr: usize,
    len: u64,
    pieces: Vec<Piece>,
    means: Means,
}

/// A part of the memory in pages of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its address.
    pub addr: usize,
    /// Its length in bytes.
    pub len: u64,
    /// The size of its pages; the first and the last may be touched partially.
    pub page: PageSize,
    /// The origin of the pages.
    pub backing: Backing,
    /// Whether other mappings may share the pages.
    pub shared: bool,
}

/// The origin of pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Backing {
    /// A pool of hugepages.
    Hugetlb,
    /// Transparent hugepages.
    Transparent,
    /// Plain pages; some may not be resident.
    Plain,
}

/// The sources of a survey's facts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Means {
    /// Whether mappings were queried (`PROCMAP_QUERY`, Linux 6.11); otherwise `/proc/self/smaps`
    /// was read.
    pub mappings_queried: bool,
    /// Whether transparent hugepages were found by `PAGEMAP_SCAN` (Linux 6.7), or why not. Without
    /// it they are reported as plain pages.
    pub transparent: Result<(), Errno>,
}

/// Pages with consecutive frames, or that are not resident.
#[derive(Clone, Copy)]
pub(super) struct FrameRun {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) frame: Option<u64>,
}

impl FrameRun {
    /// Calls `each` with the frames of the piece's pages, run by run. Returns whether the frames
    /// are visible to the process; if not, the calls are incomplete, or report resident pages as
    /// not resident.
    pub(super) fn each(pagemap: &Pagemap, piece: &Piece, mut each: impl FnMut(Self)) -> bool {
        let (page, mask) = (bytes(piece.page.bytes()), bytes(piece.page.mask()));
        let (first, last) = (piece.addr & !mask, (piece.addr + bytes(piece.len) + mask) & !mask);
        let mut run = Self { start: first, end: first, frame: None };
        let mut hidden = false;
        let mut enter = |addr: usize, entry: Entry| {
            let frame = entry.frame();
            hidden |= entry.is_present() && frame.is_none();
            let next = run.frame.map(|first| first + ((addr - run.start) / 4096) as u64);
            if frame == next {
                run.end = addr + page;
                return;
            }
            if run.start < run.end {
                each(run);
            }
            run = Self { start: addr, end: addr + page, frame };
        };
        let read = if piece.page == PageSize::Size4K {
            pagemap.each(first, last, enter)
        } else {
            // The range that one entry maps is contiguous, so its first page suffices.
            (first..last).step_by(page).try_for_each(|at| pagemap.each(at, at + 4096, &mut enter))
        };
        if run.start < run.end {
            each(run);
        }
        read.is_ok() && !hidden
    }
}

fn check_rights(mapping: &MmapRegion, addr: usize) -> Result<(), MemoryError> {
    if mapping.is_special() {
        return Err(MemoryError::Special { addr });
    }
    if !mapping.readable || !mapping.writable {
        return Err(MemoryError::NoAccess { addr });
    }
    Ok(())
}

impl fmt::Display for Means {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.mappings_queried {
            "mappings by PROCMAP_QUERY"
        } else {
            "mappings by /proc/self/smaps"
        })?;
        match self.transparent {
            Ok(()) => f.write_str(", transparent hugepages by PAGEMAP_SCAN"),
            Err(errno) => {
                write!(f, ", transparent hugepages reported as plain pages (PAGEMAP_SCAN: {errno})")
            }
        }
    }
}

impl Survey {
    /// Examines `len` bytes at `addr`. Pages that are not resident are not faulted in.
    ///
    /// O(mappings touched).
    ///
    /// # Errors
    /// [`MemoryError`] if the range is empty, wraps, is longer than a table of folios may be, is
    /// partly unmapped, no ordinary memory, or not readable and writable; or without `/proc`.
    pub fn new(addr: usize, len: u64) -> Result<Self, MemoryError> {
        let unknown = |errno| MemoryError::Unknown { addr, errno };
        let mut mappings = Mappings::open().map_err(unknown)?;
        Self::of_mappings(&mut mappings, &Pagemap::open().map_err(unknown)?, addr, len)
    }

    fn of_mappings(
        mappings: &mut Mappings,
        pagemap: &Pagemap,
        addr: usize,
        len: u64,
    ) -> Result<Self, MemoryError> {
        let end = check_extent(addr, len)?;
        let means = Means { mappings_queried: true, transparent: Ok(()) };
        let mut survey = Self { addr, len, pieces: Vec::new(), means };
        let mut at = addr;
        while at < end {
            let failed = |errno| MemoryError::Unknown { addr: at, errno };
            let mapping =
                mappings.at(at).map_err(failed)?.ok_or(MemoryError::Unmapped { addr: at })?;
            check_rights(&mapping, at)?;
            let upto = mapping.end.min(end);
            survey.mapping(pagemap, &mapping, at, upto);
            at = upto;
        }
        survey.means.mappings_queried = mappings.are_queried();
        Ok(survey)
    }

    /// Adds the pieces of `at..end`, which is in one mapping.
    fn mapping(&mut self, pagemap: &Pagemap, mapping: &MmapRegion, at: usize, end: usize) {
        let shared = mapping.shared;
        // A hugetlb page of another size is at least as large as the next smaller one.
        let page = PageSize::ALL.into_iter().rev().find(|page| page.bytes() <= mapping.page_bytes);
        if let Some(page) = page.filter(|page| *page != PageSize::Size4K) {
            self.push(at, end, page, Backing::Hugetlb, shared);
            return;
        }
        let huge = bytes(PageSize::Size2M.bytes());
        // Whole hugepages around the part, which may begin and end within them.
        let around =
            (at & !(huge - 1)).max(mapping.start)..end.next_multiple_of(huge).min(mapping.end);
        let found = match pagemap.huge(around.start & !4095, around.end.next_multiple_of(4096)) {
            Ok(found) => found,
            Err(errno) => {
                self.means.transparent = Err(errno);
                Vec::new()
            }
        };
        let mut from = at;
        for (start, stop) in found {
            // The part on whole hugepages only.
            let (start, stop) =
                (start.next_multiple_of(huge).max(from), (stop & !(huge - 1)).min(end));
            if start < stop {
                self.push(from, start, PageSize::Size4K, Backing::Plain, shared);
                self.push(start, stop, PageSize::Size2M, Backing::Transparent, shared);
                from = stop;
            }
        }
        self.push(from, end, PageSize::Size4K, Backing::Plain, shared);
    }

    fn push(&mut self, addr: usize, end: usize, page: PageSize, backing: Backing, shared: bool) {
        if addr < end {
            self.pieces.push(Piece { addr, len: (end - addr) as u64, page, backing, shared });
        }
    }

    /// Returns where the memory is physically, or the first address of unknown frame: the process may
    /// not see it, or the page is not resident.
    ///
    /// O(pages), of their real size.
    pub(super) fn frames(&self, pagemap: &Pagemap) -> Result<Vec<Segment>, usize> {
        let mut segments = Vec::with_capacity(self.pieces.len());
        for piece in &self.pieces {
            let stop = piece.addr + bytes(piece.len);
            let mut unknown = None;
            let visible = FrameRun::each(pagemap, piece, |run| {
                let (from, to) = (run.start.max(piece.addr), run.end.min(stop));
                let Some(frame) = run.frame else {
                    unknown = unknown.or(Some(from));
                    return;
                };
                let iova = Iova::new(frame * 4096 + (from - run.start) as u64);
                segments.push(Segment { iova, len: (to - from) as u64 });
            });
            match unknown {
                Some(addr) => return Err(addr),
                None if !visible => return Err(piece.addr),
                None => {}
            }
        }
        Ok(segments)
    }

    /// Returns the bytes of the system's pages that the range touches.
    pub(super) fn page_span(&self) -> u64 {
        self.span_of_pages(rustix::param::page_size() as u64)
    }

    /// Like [`page_span`](Self::page_span), where a page has `page` bytes.
    fn span_of_pages(&self, page: u64) -> u64 {
        let end = self.addr as u64 + self.len;
        end.next_multiple_of(page) - (self.addr as u64 & !(page - 1))
    }

    /// Returns the pieces, in order and without gaps.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Returns how the facts were obtained.
    pub fn means(&self) -> Means {
        self.means
    }

    /// Returns whether all of it is of a pool of hugepages, which the kernel does not move while
    /// they are mapped.
    pub(super) fn is_hugetlb(&self) -> bool {
        self.pieces.iter().all(|piece| piece.backing == Backing::Hugetlb)
    }

    /// Returns the size of the page at an address in the range. Logarithmic in the pieces.
    fn page_at(&self, addr: usize) -> PageSize {
        let after = self.pieces.partition_point(|piece| piece.addr <= addr);
        let piece = after.checked_sub(1).and_then(|before| self.pieces.get(before));
        piece.map_or(PageSize::Size4K, |piece| piece.page)
    }

    /// Returns the size of the largest page that lies in the range as a whole.
    fn largest_whole(&self) -> PageSize {
        let has_whole = |piece: &&Piece| {
            let mask = bytes(piece.page.mask());
            let (start, end) = (piece.addr, piece.addr + bytes(piece.len));
            start.saturating_add(mask) & !mask < end & !mask
        };
        let whole = self.pieces.iter().filter(has_whole).map(|piece| piece.page);
        whole.max().unwrap_or(PageSize::Size4K)
    }

    /// Returns the number of pages of a size that the range touches.
    pub fn pages(&self, page: PageSize) -> u64 {
        let mut last = None;
        let mut pages = 0;
        for piece in self.pieces.iter().filter(|piece| piece.page == page) {
            let first = piece.addr as u64 >> page.shift();
            let end = (piece.addr as u64 + piece.len - 1) >> page.shift();
            pages += end - first + u64::from(last != Some(first));
            last = Some(end);
        }
        pages
    }
}

// The borders of a ring's places, and the leaves of a map.

/// The most that one place of a ring's table holds: the kernel's own limit.
pub(crate) const PLACE: usize = 1 << 30;

/// Cuts memory into parts of at most 1 GiB, one for each place of a ring's table, none of which
/// ends within a page: a transfer within a page then never crosses two places, and no page is
/// pinned twice. Pages of unknown size count as small ones.
pub(crate) fn places(addr: usize, len: usize) -> Vec<(usize, usize)> {
    // Most memory fits one place, for any page size.
    let survey = (len > PLACE).then(|| Survey::new(addr, len as u64).ok()).flatten();
    cut(addr, len, |at| survey.as_ref().map_or(PageSize::Size4K, |survey| survey.page_at(at)))
}

fn cut(addr: usize, len: usize, page_at: impl Fn(usize) -> PageSize) -> Vec<(usize, usize)> {
    let end = addr.saturating_add(len);
    let mut places = Vec::with_capacity(len.div_ceil(PLACE));
    let mut at = addr;
    while at < end {
        let mut upto = end;
        if end - at > PLACE {
            let most = at + PLACE;
            // No page is larger than a place, so this is behind `at`.
            upto = most & !bytes(page_at(most).mask());
        }
        places.push((at, upto - at));
        at = upto;
    }
    places
}

/// Returns the size of the leaves that memory can be mapped with, if that needs an address chosen
/// for it: one as far behind a multiple of that size as the memory is itself. `None` where the
/// address is such a multiple, for which the domain aligns already, or the pages are small.
pub(crate) fn leaf(memory: DmaMemory) -> Option<PageSize> {
    let (addr, len) = (memory.addr() as u64, memory.len() as u64);
    let within = |size: PageSize| len >= size.bytes() && addr & size.mask() != 0;
    if !within(PageSize::Size2M) && !within(PageSize::Size1G) {
        return None;
    }
    let survey = Survey::new(memory.addr(), len).ok()?;
    Some(survey.largest_whole()).filter(|size| addr & size.mask() != 0)
}

// Why memory has no folios that can be used.

/// Why memory cannot be examined, or not be registered as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// It is empty, wraps around the end of the address space, or is too long.
    #[error(transparent)]
    Extent(BufferError),
    /// Part of it is unmapped.
    #[error("nothing is mapped at {addr:#x}: register memory after it is mapped")]
    Unmapped {
        /// The first unmapped address.
        addr: usize,
    },
    /// The process may not read and write it, so no device may on its behalf.
    #[error("the memory at {addr:#x} may not be read and written: allow both with mprotect first")]
    NoAccess {
        /// The first such address.
        addr: usize,
    },
    /// It is not ordinary memory: a device's registers, or pages of the kernel.
    #[error(
        "the mapping at {addr:#x} is not ordinary memory but a device's or the kernel's: it cannot be pinned"
    )]
    Special {
        /// The first such address.
        addr: usize,
    },
    /// The mapping cannot be inspected.
    #[error("the mapping at {addr:#x} cannot be inspected: {errno}; mount /proc")]
    Unknown {
        /// The address.
        addr: usize,
        /// The error.
        errno: Errno,
    },
}

/// Returns the end of the memory.
fn check_extent(addr: usize, len: u64) -> Result<usize, MemoryError> {
    let extent = |error| Err(MemoryError::Extent(error));
    if len == 0 {
        return extent(BufferError::Empty { addr });
    }
    if len > Folios::MAX_BYTES {
        return extent(BufferError::TooLong { len });
    }
    // Its last page ends in the address space as well.
    let end = usize::try_from(len).ok().and_then(|len| addr.checked_add(len));
    match end.filter(|end| end.checked_next_multiple_of(4096).is_some()) {
        Some(end) => Ok(end),
        None => extent(BufferError::Wraps { addr, len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::region;
    use crate::sys::region::Region;
    use proptest::prelude::*;
    use std::os::fd::AsFd;

    #[test]
    fn smaps_and_queries_give_the_same_survey() {
        let region = Region::anonymous(64 << 10, 4096).unwrap();
        region.ask_for_plain_pages().unwrap();
        region.populate(32 << 10).unwrap();
        let fd = region::memory_file(64 << 10, PageSize::Size4K).unwrap();
        let shared = Region::shared(fd.as_fd(), 64 << 10).unwrap();
        shared.populate(64 << 10).unwrap();
        let pagemap = Pagemap::open().unwrap();
        for (addr, is_shared) in [(region.addr(), false), (shared.addr(), true)] {
            let [one, other] = [Mappings::open(), Mappings::by_smaps()].map(|mappings| {
                Survey::of_mappings(&mut mappings.unwrap(), &pagemap, addr + 5, 50_000).unwrap()
            });
            assert_eq!(one.pieces(), other.pieces());
            assert!(
                one.pieces()
                    .iter()
                    .all(|piece| piece.shared == is_shared && piece.page == PageSize::Size4K)
            );
            assert_eq!((one.pages(PageSize::Size4K), one.span_of_pages(4096)), (13, 13 * 4096));
            assert!(!other.means().mappings_queried);
            assert!(other.means().to_string().starts_with("mappings by /proc/self/smaps, "));
        }
    }

    /// Returns a survey of pieces of these pages, one after the other.
    fn survey(addr: usize, parts: &[(PageSize, u64)]) -> Survey {
        let mut at = addr;
        let mut piece = |&(page, len)| {
            let piece = Piece { addr: at, len, page, backing: Backing::Plain, shared: false };
            at += bytes(len);
            piece
        };
        let pieces: Vec<Piece> = parts.iter().map(&mut piece).collect();
        let means = Means { mappings_queried: true, transparent: Ok(()) };
        Survey { addr, len: (at - addr) as u64, pieces, means }
    }

    const HUGE: u64 = 2 << 20;

    #[test]
    fn the_largest_page_is_one_that_is_there_whole() {
        use PageSize::{Size1G, Size2M, Size4K};
        let base = 1 << 40;
        let largest = |addr, parts: &[_]| survey(addr, parts).largest_whole();
        assert_eq!(largest(base, &[(Size4K, 8 << 20)]), Size4K);
        assert_eq!(largest(base, &[(Size2M, HUGE)]), Size2M);
        assert_eq!(largest(base + 4096, &[(Size2M, HUGE)]), Size4K, "two parts of pages");
        assert_eq!(largest(base + 4096, &[(Size2M, 2 * HUGE - 8192)]), Size4K);
        assert_eq!(largest(base + 4096, &[(Size2M, 2 * HUGE - 4096)]), Size2M);
        assert_eq!(largest(base, &[(Size2M, HUGE - 4096)]), Size4K);
        let mixed = [(Size2M, 1 << 30), (Size4K, 4096), (Size1G, 4096)];
        assert_eq!(largest(base, &mixed), Size2M, "4 KiB of the page of 1 GiB");
        assert_eq!(largest(base, &[(Size4K, 1 << 30), (Size1G, 1 << 30)]), Size1G);
    }

    #[test]
    fn the_page_at_an_address_is_that_of_its_piece() {
        use PageSize::{Size2M, Size4K};
        let survey = survey(1 << 40, &[(Size4K, HUGE), (Size2M, HUGE), (Size4K, 4096)]);
        let at = |offset: u64| survey.page_at((1 << 40) + bytes(offset));
        assert_eq!([at(0), at(HUGE - 1)], [Size4K; 2]);
        assert_eq!([at(HUGE), at(2 * HUGE - 1)], [Size2M; 2]);
        assert_eq!(at(2 * HUGE), Size4K);
    }

    #[test]
    fn a_place_ends_where_a_page_does() {
        let base = 1 << 40;
        let of = |addr, len, page| cut(addr, len, |_| page);
        assert_eq!(of(base, 0, PageSize::Size4K), []);
        assert_eq!(of(base + 5, PLACE, PageSize::Size1G), [(base + 5, PLACE)]);
        assert_eq!(of(base, 2 * PLACE, PageSize::Size1G), [(base, PLACE), (base + PLACE, PLACE)]);
        assert_eq!(
            of(base + 4096, PLACE + 4096, PageSize::Size2M),
            [(base + 4096, PLACE - 4096), (base + PLACE, 8192)],
            "the hugepage at the border is in one place"
        );
        assert_eq!(
            of(base + 4096, PLACE + 4096, PageSize::Size4K),
            [(base + 4096, PLACE), (base + PLACE + 4096, 4096)]
        );
    }

    proptest! {
        #[test]
        fn places_are_at_most_a_gib_and_split_no_page(
            addr in 0usize..1 << 47, len in 1usize..=1 << 40,
            page in prop::sample::select(&PageSize::ALL[..]),
        ) {
            let mut at = addr;
            for (start, len) in cut(addr, len, |_| page) {
                prop_assert_eq!(start, at);
                prop_assert!((1..=PLACE).contains(&len));
                at = start + len;
            }
            prop_assert_eq!(at, addr + len);
            let borders = cut(addr, len, |_| page).into_iter().skip(1).map(|(start, _)| start as u64);
            prop_assert!(borders.into_iter().all(|border| border & page.mask() == 0));
        }
    }
}
