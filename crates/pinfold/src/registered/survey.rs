//! The composition of memory: the size of its pages, and their frames; and why it was refused.

use crate::sys::kernel::RingRefusal;
use crate::sys::pages::{Entry, Mappings, MmapRegion, Pagemap};
use crate::sys::{Errno, bytes};
use pinfold_core::access::Access;
use pinfold_core::addr::{PageSize, PhysAddr};
use pinfold_core::folio::{BufferError, BufferIndex, IndexError, Registered};
use std::fmt;

/// The composition of a range of this process's memory, at one moment unless the memory is pinned.
///
/// Pages of unknown size are reported as small, never as large.
///
/// ```
/// use pinfold::{Access, registered::Survey};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let bytes = vec![0u8; 1 << 20];
/// let survey = Survey::new(bytes.as_ptr().addr(), 1 << 20, Access::READ)?;
/// assert!(survey.touched_bytes() >= 1 << 20);
/// println!("{}", survey.means());
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Survey {
    addr: usize,
    len: u64,
    pieces: Vec<Piece>,
    means: Means,
    read_only: bool,
}

/// A part of the memory in pages of one size; physically contiguous if its frames are known.
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
    /// Its physical address; `None` if it is not visible to the process, or not resident.
    pub phys: Option<PhysAddr>,
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

/// How the facts of a survey were obtained.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Means {
    /// Whether mappings were queried (`PROCMAP_QUERY`, Linux 6.11); otherwise `/proc/self/smaps`
    /// was read.
    pub mappings_queried: bool,
    /// Whether transparent hugepages were found by `PAGEMAP_SCAN` (Linux 6.7), or why not. Without
    /// it they are reported as plain pages, unless their frames are known.
    pub transparent: Result<(), Errno>,
    /// Whether `/proc/self/pagemap` showed the frames, which needs `CAP_SYS_ADMIN`.
    pub frames: bool,
}

/// The files of `/proc` that surveys read.
#[derive(Debug)]
pub(super) struct Inspector {
    pub(super) mappings: Mappings,
    pub(super) pagemap: Pagemap,
}

impl Inspector {
    pub(super) fn open() -> Result<Self, MemoryError> {
        let unknown = |errno| MemoryError::Unknown { addr: 0, errno };
        Ok(Self {
            mappings: Mappings::open().map_err(unknown)?,
            pagemap: Pagemap::open().map_err(unknown)?,
        })
    }
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
    pub(super) fn each(inspector: &Inspector, piece: &Piece, mut each: impl FnMut(Self)) -> bool {
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
            inspector.pagemap.each(first, last, enter)
        } else {
            // The range that one entry maps is contiguous, so its first page suffices.
            (first..last)
                .step_by(page)
                .try_for_each(|at| inspector.pagemap.each(at, at + 4096, &mut enter))
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
            Err(errno) => write!(
                f,
                ", transparent hugepages reported as plain pages (PAGEMAP_SCAN: {errno})"
            )?,
        }
        f.write_str(if self.frames {
            ", frames by /proc/self/pagemap"
        } else {
            ", frames unknown (/proc/self/pagemap shows them to CAP_SYS_ADMIN)"
        })
    }
}

impl Survey {
    /// Examines `len` bytes at `addr`, for `access` by a device. Pages that are not resident are
    /// not faulted in.
    ///
    /// O(mappings touched), or O(pages of 4 KiB touched) if frames are visible to the process.
    ///
    /// # Errors
    /// [`MemoryError`] if the range is empty, wraps, is longer than a registered buffer may be, is
    /// partly unmapped or no ordinary memory, or does not permit the access; or without `/proc`.
    pub fn new(addr: usize, len: u64, access: Access) -> Result<Self, MemoryError> {
        let mut inspector = Inspector::open()?;
        let mut survey = Self::of_mappings(&mut inspector, addr, len, access)?;
        survey.find_frames(&inspector);
        Ok(survey)
    }

    /// Examines the mappings, without the frames. O(mappings touched).
    pub(super) fn of_mappings(
        inspector: &mut Inspector,
        addr: usize,
        len: u64,
        access: Access,
    ) -> Result<Self, MemoryError> {
        let (end, _) = check_extent(addr, len)?;
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
            let mapping = inspector
                .mappings
                .at(at)
                .map_err(failed)?
                .ok_or(MemoryError::Unmapped { addr: at })?;
            check_rights(&mapping, at, access)?;
            survey.read_only |= !mapping.writable;
            let upto = mapping.end.min(end);
            survey.mapping(inspector, &mapping, at, upto);
            at = upto;
        }
        survey.means.mappings_queried = inspector.mappings.are_queried();
        Ok(survey)
    }

    /// Adds the pieces of `at..end`, which is in one mapping.
    fn mapping(&mut self, inspector: &Inspector, mapping: &MmapRegion, at: usize, end: usize) {
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
        let found =
            match inspector.pagemap.huge(around.start & !4095, around.end.next_multiple_of(4096)) {
                Ok(found) => found,
                Err(errno) => {
                    self.means.transparent = Err(errno);
                    Vec::new()
                }
            };
        let mut from = at;
        for (start, stop) in found {
            // Only what is on whole hugepages.
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
            self.pieces.push(Piece {
                addr,
                len: (end - addr) as u64,
                page,
                backing,
                shared,
                phys: None,
            });
        }
    }

    /// Splits the pieces where their frames are not consecutive, if the frames are visible to the
    /// process.
    ///
    /// O(pages), of their real size.
    pub(super) fn find_frames(&mut self, inspector: &Inspector) {
        let mut divided = Vec::with_capacity(self.pieces.len());
        let mut known = false;
        for piece in &self.pieces {
            let stop = piece.addr + bytes(piece.len);
            let visible = FrameRun::each(inspector, piece, |run| {
                known |= run.frame.is_some();
                let (from, to) = (run.start.max(piece.addr), run.end.min(stop));
                let phys =
                    run.frame.map(|frame| PhysAddr::new(frame * 4096 + (from - run.start) as u64));
                divided.push(Piece { addr: from, len: (to - from) as u64, phys, ..*piece });
            });
            if !visible {
                return;
            }
        }
        if known {
            self.means.frames = true;
            self.pieces = divided;
        }
    }

    /// Returns the address of the range.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Returns the length in bytes, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a survey is never of nothing")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the first address after it.
    pub(super) fn end(&self) -> usize {
        // It is mapped, so it does not wrap.
        self.addr + bytes(self.len)
    }

    /// Returns the pieces, in order and without gaps.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Returns how the facts were obtained.
    pub fn means(&self) -> Means {
        self.means
    }

    /// Returns whether some of it is read-only for the process.
    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
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

    /// Returns the bytes of the pages that the range touches, each whole.
    pub fn touched_bytes(&self) -> u64 {
        PageSize::ALL.into_iter().map(|page| self.pages(page) * page.bytes()).sum()
    }
}

// Why memory was not registered.

/// Why memory cannot be registered as it is.
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
    /// The process may not write to it, so no device may on its behalf.
    #[error("the memory at {addr:#x} is read-only: a device must not write to it; map it writable")]
    ReadOnly {
        /// The first such address.
        addr: usize,
    },
    /// The process may not access it.
    #[error(
        "the memory at {addr:#x} may not be accessed (PROT_NONE): allow it with mprotect first"
    )]
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

/// Why memory was not registered, or not found. Nothing has changed then.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistrationError {
    /// The memory cannot be registered.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory could not be described.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// The table cannot hold it.
    #[error(transparent)]
    Table(#[from] pinfold_core::folio::RegisterError),
    /// There is no such buffer in the table.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The process may not pin that much.
    #[error(
        "cannot pin {requested} bytes: {used} of {allowed} bytes that may be locked are in use by this process, and others of \
         its user may have the rest; fix: {command}"
    )]
    Memlock {
        /// Bytes that the kernel would charge, as far as known.
        requested: u64,
        /// Bytes that it has charged to this process. Bytes of the user's other processes count,
        /// too, but are unknown.
        used: u64,
        /// `RLIMIT_MEMLOCK`.
        allowed: u64,
        /// The shell command that raises it.
        command: String,
    },
    /// The kernel refuses to pin this memory.
    #[error("the kernel refuses to pin {len:#x} bytes at {addr:#x}: {errno}{}", match errno.raw() {
        libc::ENOMEM => ": it has no memory for it; free memory of the machine, or of the control group if that has a limit",
        _ => "",
    })]
    NotPinned {
        /// Its address.
        addr: usize,
        /// Its length in bytes.
        len: u64,
        /// The error.
        errno: Errno,
    },
    /// The ring that pins was closed.
    #[error("the io_uring that pins the memory was closed: {errno}; create a new table")]
    RingGone {
        /// The error.
        errno: Errno,
    },
    /// No io_uring could be created to pin with.
    #[error("cannot pin memory: no io_uring with a sparse table of buffers: {}", .0.with_fix())]
    NoRing(RingRefusal),
    /// The table belongs to the parent process.
    #[error("the table of buffers belongs to the parent process: create a new one after the fork")]
    Forked,
    /// The frames are needed, but not visible to the process.
    #[error(
        "where the memory at {addr:#x} lies is not known: /proc/self/pagemap tells it to CAP_SYS_ADMIN only; \
         run as root, or describe it by another view"
    )]
    FramesUnknown {
        /// The first address of unknown frame.
        addr: usize,
    },
    /// The memory was unmapped, moved or discarded while it was registered.
    #[error("{index} is revoked: {why} at {addr:#x} while it was registered; unregister it")]
    Gone {
        /// The buffer.
        index: BufferIndex,
        /// The event.
        why: Gone,
        /// Where.
        addr: usize,
    },
}

/// The change of registered memory that made its pages differ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Gone {
    /// It was unmapped (`munmap`, or another mapping over it): the addresses may have been reused.
    Unmapped,
    /// It was moved to other addresses (`mremap`).
    Moved,
    /// Its content was discarded (`MADV_DONTNEED`, `MADV_REMOVE`, a hole in its file): other pages
    /// are there now.
    Discarded,
}

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unmapped => "memory was unmapped",
            Self::Moved => "memory was moved",
            Self::Discarded => "the content of memory was discarded",
        })
    }
}

/// Returns the end of the memory, and of its last page.
pub(super) fn check_extent(addr: usize, len: u64) -> Result<(usize, usize), MemoryError> {
    let extent = |error| Err(MemoryError::Extent(error));
    if len == 0 {
        return extent(BufferError::Empty { addr });
    }
    if len > Registered::MAX_BYTES {
        return extent(BufferError::TooLong { len });
    }
    let end = usize::try_from(len).ok().and_then(|len| addr.checked_add(len));
    let page_end = end.and_then(|end| end.checked_next_multiple_of(4096));
    match end.zip(page_end) {
        Some(ends) => Ok(ends),
        None => extent(BufferError::Wraps { addr, len }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::region;
    use crate::sys::region::Region;
    use std::os::fd::AsFd;

    #[test]
    fn smaps_and_queries_give_the_same_survey() {
        let region = Region::anonymous(64 << 10, 4096).unwrap();
        region.ask_for_plain_pages().unwrap();
        region.populate(32 << 10).unwrap();
        let fd = region::memory_file(64 << 10, PageSize::Size4K).unwrap();
        let shared = Region::shared(fd.as_fd(), 64 << 10).unwrap();
        shared.populate(64 << 10).unwrap();
        for (addr, is_shared) in [(region.addr(), false), (shared.addr(), true)] {
            let inspector = || Inspector::open().unwrap();
            let read = Inspector { mappings: Mappings::by_smaps().unwrap(), ..inspector() };
            let [one, other] = [inspector(), read].map(|mut inspector| {
                let mut survey =
                    Survey::of_mappings(&mut inspector, addr + 5, 50_000, Access::WRITE).unwrap();
                survey.find_frames(&inspector);
                survey
            });
            assert_eq!(one.pieces(), other.pieces());
            assert!(
                one.pieces()
                    .iter()
                    .all(|piece| piece.shared == is_shared && piece.page == PageSize::Size4K)
            );
            assert_eq!((one.pages(PageSize::Size4K), one.touched_bytes()), (13, 13 * 4096));
            assert!(!other.means().mappings_queried);
            assert!(other.means().to_string().starts_with("mappings by /proc/self/smaps, "));
        }
    }
}
