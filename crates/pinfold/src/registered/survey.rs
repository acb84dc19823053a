//! What memory is really made of: the size of its pages, and where they are.

use super::error::MemoryError;
use crate::sys::mapping::{Mappings, MmapRegion};
use crate::sys::pages::{Entry, Pagemap};
use crate::sys::{Errno, bytes};
use pinfold_core::access::Access;
use pinfold_core::addr::{PageSize, PhysAddr};
use std::fmt;

/// What is known of some memory of this process. It holds for the moment, unless the memory is pinned.
///
/// What can not be known is taken for the smaller size, never for a larger one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Survey {
    addr: usize,
    len: u64,
    pieces: Vec<Piece>,
    means: Means,
    read_only: bool,
}

/// A part of the memory in pages of one size; contiguous for a device without an IOMMU where its frames are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where it starts in this process.
    pub addr: usize,
    /// How many bytes.
    pub len: u64,
    /// The size of its pages: the first and the last may be touched in part only.
    pub page: PageSize,
    /// Where the pages come from.
    pub backing: Backing,
    /// Whether other mappings may have the same pages.
    pub shared: bool,
    /// Where it starts in memory; `None` where that may not be known, or no page is there yet.
    pub phys: Option<PhysAddr>,
}

/// Where pages come from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Backing {
    /// A pool of hugepages.
    Hugetlb,
    /// Transparent hugepages.
    Transparent,
    /// Plain pages, of which some may not be there yet.
    Plain,
}

/// By what means a survey knows what it says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Means {
    /// Whether mappings were queried (`PROCMAP_QUERY`, Linux 6.11); else `/proc/self/smaps` was read.
    pub mappings_queried: bool,
    /// Whether transparent hugepages were looked for by `PAGEMAP_SCAN` (Linux 6.7); the reason where not. Then they
    /// are taken for plain pages, unless their frames are known.
    pub transparent: Result<(), Errno>,
    /// Whether `/proc/self/pagemap` told the frames: it tells them to `CAP_SYS_ADMIN`.
    pub frames: bool,
}

/// What surveys look with.
#[derive(Debug)]
pub(super) struct Eyes {
    pub(super) mappings: Mappings,
    pub(super) pagemap: Pagemap,
}

impl Eyes {
    pub(super) fn open() -> Result<Self, MemoryError> {
        let blind = |errno| MemoryError::Unknown { addr: 0, errno };
        Ok(Self { mappings: Mappings::open().map_err(blind)?, pagemap: Pagemap::open().map_err(blind)? })
    }
}

/// Pages whose frames follow one another, or that are not there.
#[derive(Clone, Copy)]
pub(super) struct FrameRun {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) frame: Option<u64>,
}

impl FrameRun {
    /// Calls `each` with the frames of the pages that the piece is on, run by run; whether they may be known (if not,
    /// what it was called with is not all, or says of pages that are there that they are not).
    pub(super) fn each(eyes: &Eyes, piece: &Piece, mut each: impl FnMut(Self)) -> bool {
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
            eyes.pagemap.each(first, last, enter)
        } else {
            // What one entry maps is in one piece: its first page tells.
            (first..last).step_by(page).try_for_each(|at| eyes.pagemap.each(at, at + 4096, &mut enter))
        };
        if run.start < run.end {
            each(run);
        }
        read.is_ok() && !hidden
    }
}

fn check_rights(mapping: &MmapRegion, addr: usize, access: Access) -> Result<(), MemoryError> {
    if mapping.is_special() {
        return Err(MemoryError::Special { addr });
    }
    if access.contains(Access::WRITE) && !mapping.writable {
        return Err(MemoryError::ReadOnly { addr });
    }
    if !mapping.readable && !mapping.writable {
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
            Ok(()) => f.write_str(", transparent hugepages by PAGEMAP_SCAN")?,
            Err(errno) => write!(f, ", transparent hugepages taken for plain pages (PAGEMAP_SCAN: {errno})")?,
        }
        f.write_str(if self.frames {
            ", frames by /proc/self/pagemap"
        } else {
            ", frames unknown (/proc/self/pagemap tells them to CAP_SYS_ADMIN)"
        })
    }
}

impl Survey {
    /// Looks at `len` bytes at `addr`, which a device is to access so. Pages that are not there are not brought in.
    ///
    /// O(mappings touched), O(pages of 4 KiB touched) where frames may be known.
    ///
    /// # Errors
    /// [`MemoryError`]: empty, wrapping, longer than a registered buffer may be, not mapped or special in some part,
    /// or without the rights that the access needs; or `/proc` is not there.
    pub fn new(addr: usize, len: u64, access: Access) -> Result<Self, MemoryError> {
        let mut eyes = Eyes::open()?;
        let mut survey = Self::of_mappings(&mut eyes, addr, len, access)?;
        survey.find_frames(&eyes);
        Ok(survey)
    }

    /// Without the frames. O(mappings touched).
    pub(super) fn of_mappings(
        eyes: &mut Eyes,
        addr: usize,
        len: u64,
        access: Access,
    ) -> Result<Self, MemoryError> {
        let (end, _) = super::error::check_extent(addr, len)?;
        let mut survey = Self {
            addr,
            len,
            pieces: Vec::new(),
            means: Means { mappings_queried: true, transparent: Ok(()), frames: false },
            read_only: false,
        };
        let mut at = addr;
        while at < end {
            let failed = |errno| MemoryError::Unknown { addr: at, errno };
            let mapping = eyes.mappings.at(at).map_err(failed)?.ok_or(MemoryError::Unmapped { addr: at })?;
            check_rights(&mapping, at, access)?;
            survey.read_only |= !mapping.writable;
            let upto = mapping.end.min(end);
            survey.mapping(eyes, &mapping, at, upto);
            at = upto;
        }
        survey.means.mappings_queried = eyes.mappings.are_queried();
        Ok(survey)
    }

    /// Enters the part `at..end`, which one mapping has, in pieces.
    fn mapping(&mut self, eyes: &Eyes, mapping: &MmapRegion, at: usize, end: usize) {
        let shared = mapping.shared;
        // A hugetlb page of a size that has no name here is at least as large as the next smaller one.
        let page = PageSize::ALL.into_iter().rev().find(|page| page.bytes() <= mapping.page_bytes);
        if let Some(page) = page.filter(|page| *page != PageSize::Size4K) {
            self.push(at, end, page, Backing::Hugetlb, shared);
            return;
        }
        let huge = bytes(PageSize::Size2M.bytes());
        // Whole hugepages around the part: what is asked for may begin and end within them.
        let around = (at & !(huge - 1)).max(mapping.start)..end.next_multiple_of(huge).min(mapping.end);
        let found = match eyes.pagemap.huge(around.start & !4095, around.end.next_multiple_of(4096)) {
            Ok(found) => found,
            Err(errno) => {
                self.means.transparent = Err(errno);
                Vec::new()
            }
        };
        let mut from = at;
        for (start, stop) in found {
            // Only what lies on whole hugepages is theirs.
            let (start, stop) = (start.next_multiple_of(huge).max(from), (stop & !(huge - 1)).min(end));
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
            self.pieces.push(Piece { addr, len: (end - addr) as u64, page, backing, shared, phys: None });
        }
    }

    /// Divides the pieces where their frames do not follow one another, if these may be known.
    ///
    /// O(pages), of their real size.
    pub(super) fn find_frames(&mut self, eyes: &Eyes) {
        let mut divided = Vec::with_capacity(self.pieces.len());
        let mut known = false;
        for piece in &self.pieces {
            let stop = piece.addr + bytes(piece.len);
            let told = FrameRun::each(eyes, piece, |run| {
                known |= run.frame.is_some();
                let (from, to) = (run.start.max(piece.addr), run.end.min(stop));
                let phys = run.frame.map(|frame| PhysAddr::new(frame * 4096 + (from - run.start) as u64));
                divided.push(Piece { addr: from, len: (to - from) as u64, phys, ..*piece });
            });
            if !told {
                return;
            }
        }
        if known {
            self.means.frames = true;
            self.pieces = divided;
        }
    }

    /// Where it starts in this process.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// How many bytes, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a survey is never of nothing")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The first address after it.
    pub(super) fn end(&self) -> usize {
        // It is mapped, so it does not wrap.
        self.addr + bytes(self.len)
    }

    /// The pieces, in order and without gaps.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// By what means this is known.
    pub fn means(&self) -> Means {
        self.means
    }

    /// Whether the process itself may only read some of it.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// How many pages of this size the memory touches.
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

    /// How many bytes the pages have that the memory touches, each whole.
    pub fn touched_bytes(&self) -> u64 {
        PageSize::ALL.into_iter().map(|page| self.pages(page) * page.bytes()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::memfd;
    use crate::sys::region::Region;
    use std::os::fd::AsFd;

    #[test]
    fn a_kernel_that_answers_no_queries_is_understood_too() {
        let region = Region::anonymous(64 << 10, 4096).unwrap();
        region.ask_for_plain_pages().unwrap();
        region.populate(32 << 10).unwrap();
        let fd = memfd::create(64 << 10, PageSize::Size4K).unwrap();
        let shared = Region::shared(fd.as_fd(), 64 << 10).unwrap();
        shared.populate(64 << 10).unwrap();
        for (addr, is_shared) in [(region.addr(), false), (shared.addr(), true)] {
            let eyes = || Eyes::open().unwrap();
            let read = Eyes { mappings: Mappings::by_smaps().unwrap(), ..eyes() };
            let [one, other] = [eyes(), read].map(|mut eyes| {
                let mut survey = Survey::of_mappings(&mut eyes, addr + 5, 50_000, Access::WRITE).unwrap();
                survey.find_frames(&eyes);
                survey
            });
            assert_eq!(one.pieces(), other.pieces());
            assert!(
                one.pieces().iter().all(|piece| piece.shared == is_shared && piece.page == PageSize::Size4K)
            );
            assert_eq!((one.pages(PageSize::Size4K), one.touched_bytes()), (13, 13 * 4096));
            assert!(!other.means().mappings_queried);
            assert!(other.means().to_string().starts_with("mappings by /proc/self/smaps, "));
        }
    }
}
