//! What memory is really made of: the size of its pages, and where they are.

use super::error::MemoryError;
use crate::sys::mapping::{Mapping, Mappings};
use crate::sys::pages::Pagemap;
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
struct FrameRun {
    start: usize,
    end: usize,
    frame: Option<u64>,
}

/// The frames of the pages in `start..end`; `None` where they may not be known.
fn frame_runs(eyes: &Eyes, start: usize, end: usize) -> Option<Vec<FrameRun>> {
    let mut runs: Vec<FrameRun> = Vec::new();
    let mut hidden = false;
    let read = eyes.pagemap.each(start, end, |addr, entry| {
        let frame = entry.frame();
        hidden |= entry.is_present() && frame.is_none();
        let goes_on = |run: &&mut FrameRun| match (run.frame, frame) {
            (Some(first), Some(frame)) => first + ((addr - run.start) / 4096) as u64 == frame,
            (None, None) => true,
            _ => false,
        };
        match runs.last_mut().filter(goes_on) {
            Some(run) => run.end = addr + 4096,
            None => runs.push(FrameRun { start: addr, end: addr + 4096, frame }),
        }
    });
    let told = read.is_ok() && !hidden && runs.iter().any(|run| run.frame.is_some());
    told.then_some(runs)
}

fn check_rights(mapping: &Mapping, addr: usize, access: Access) -> Result<(), MemoryError> {
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
        Self::with(&mut Eyes::open()?, addr, len, access)
    }

    pub(super) fn with(eyes: &mut Eyes, addr: usize, len: u64, access: Access) -> Result<Self, MemoryError> {
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
        survey.frames(eyes, end);
        Ok(survey)
    }

    /// Enters the part `at..end`, which one mapping has, in pieces.
    fn mapping(&mut self, eyes: &Eyes, mapping: &Mapping, at: usize, end: usize) {
        // A hugetlb page of a size that has no name here is at least as large as the next smaller one.
        let page = PageSize::ALL.into_iter().rev().find(|page| page.bytes() <= mapping.page_bytes);
        if let Some(page) = page.filter(|page| *page != PageSize::Size4K) {
            self.push(at, end, page, Backing::Hugetlb);
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
                self.push(from, start, PageSize::Size4K, Backing::Plain);
                self.push(start, stop, PageSize::Size2M, Backing::Transparent);
                from = stop;
            }
        }
        self.push(from, end, PageSize::Size4K, Backing::Plain);
    }

    fn push(&mut self, addr: usize, end: usize, page: PageSize, backing: Backing) {
        if addr < end {
            self.pieces.push(Piece { addr, len: (end - addr) as u64, page, backing, phys: None });
        }
    }

    /// Divides the pieces where their frames do not follow one another, if these may be known.
    fn frames(&mut self, eyes: &Eyes, end: usize) {
        let Some(runs) = frame_runs(eyes, self.addr & !4095, end.next_multiple_of(4096)) else { return };
        self.means.frames = true;
        let mut divided = Vec::with_capacity(self.pieces.len().max(runs.len()));
        let mut runs = runs.into_iter().peekable();
        for piece in &self.pieces {
            let stop = piece.addr + bytes(piece.len);
            let mut from = piece.addr;
            while from < stop {
                let Some(run) = runs.next_if(|run| run.end <= from).or_else(|| runs.peek().copied()) else {
                    break;
                };
                if run.end <= from {
                    continue;
                }
                let to = run.end.min(stop);
                let phys = run.frame.map(|frame| PhysAddr::new(frame * 4096 + (from - run.start) as u64));
                divided.push(Piece { addr: from, len: (to - from) as u64, phys, ..*piece });
                from = to;
            }
        }
        self.pieces = divided;
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
