//! 1 GiB of the program's own memory, registered and pinned.
#![expect(unsafe_code, reason = "memory from mmap is given up by its address")]

use crate::baseline::page_segments::PageSegments;
use crate::error::BenchError;
use crate::suite::available_bytes;
use pinfold::OwnedMemory;
use pinfold::folios::{Backing, Folios, PinError, Survey};
use pinfold_core::addr::{Iova, PageSize};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

/// The size of the memory.
pub(super) const BYTES: u64 = 1 << 30;
const LEN: usize = 1 << 30;
const HUGE: usize = 2 << 20;
const PAGE: u64 = 4096;

/// The memory, or why this machine cannot register it.
pub(super) enum Memory {
    Ready(Own),
    Unable(String),
}

/// Memory that can be pinned and described.
pub(super) struct Own {
    mapping: Arc<Mapping>,
    /// The pages that the memory consists of, and their charge.
    pub(super) note: String,
}

/// A mapping, which lasts as long as this value.
struct Mapping {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: unmapping is not bound to a thread, and the value gives no other access to the memory.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nothing uses it any more. It cannot fail: the
        // range is what was mapped.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.len) };
    }
}

impl Mapping {
    fn new(len: usize, flags: MapFlags) -> Result<Self, Errno> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so nothing else is mapped there.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, rights, MapFlags::PRIVATE | flags)
        }?;
        NonNull::new(base).map(|base| Self { base, len }).ok_or(Errno::NOMEM)
    }

    /// Returns where [`LEN`] bytes begin: at the first multiple of 2 MiB.
    fn start(&self) -> NonNull<u8> {
        let start = self.base.addr().get().next_multiple_of(HUGE) - self.base.addr().get();
        // SAFETY: the mapping has `HUGE` bytes more than `LEN`, or begins at a hugepage.
        unsafe { self.base.cast::<u8>().add(start) }
    }
}

impl Memory {
    /// Allocates the memory: reserved hugepages of 2 MiB, else transparent ones, else plain pages.
    /// Pins it once, which faults it in.
    pub(super) fn prepare() -> Result<Self, BenchError> {
        let reserved = Mapping::new(LEN, MapFlags::HUGETLB | MapFlags::HUGE_2MB);
        let mapping = match reserved {
            Ok(mapping) => mapping,
            Err(_) => match available_bytes().filter(|available| *available < 2 * BYTES) {
                Some(few) => {
                    return Ok(Self::Unable(format!(
                        "it needs 2 GiB of memory, {} MiB are available",
                        few >> 20
                    )));
                }
                None => match Mapping::new(LEN + HUGE, MapFlags::empty()) {
                    Ok(mapping) => mapping,
                    Err(errno) => return Ok(Self::Unable(format!("cannot map 1 GiB: {errno}"))),
                },
            },
        };
        // Plain pages where the kernel has no transparent hugepages: the note says so.
        let start = mapping.start().as_ptr().cast();
        // SAFETY: the advice changes no content, and the range is inside the mapping.
        let _ = unsafe { rustix::mm::madvise(start, LEN, Advice::LinuxHugepage) };
        let own = Own { mapping: Arc::new(mapping), note: String::new() };
        match own.describe() {
            Ok(note) => Ok(Self::Ready(Own { note, ..own })),
            Err(BenchError::Pin(
                why @ (PinError::Memlock { .. }
                | PinError::NoRing(_)
                | PinError::Refused { .. }
                | PinError::FramesUnknown { .. }),
            )) => Ok(Self::Unable(why.to_string())),
            Err(error) => Err(error),
        }
    }
}

impl Own {
    /// Returns the memory, neither pinned nor described: one value at a time.
    pub(super) fn memory(&self) -> Result<OwnedMemory, BenchError> {
        let memory = NonNull::slice_from_raw_parts(self.mapping.start(), LEN);
        // SAFETY: zeroed memory of the mapping, which its owner keeps, and which nothing accesses
        // otherwise.
        let memory = unsafe { OwnedMemory::new(memory, Arc::clone(&self.mapping)) };
        memory.map_err(|error| BenchError::Own(error.to_string()))
    }

    fn describe(&self) -> Result<String, BenchError> {
        let memory = self.memory()?;
        let table = memory.folios()?;
        let segments = table.segments(0, BYTES)?.count();
        let survey = memory.survey()?;
        Ok(format!(
            "1 GiB, {}; physical addresses; folios of 2^{} bytes: {}; segments in the table: {segments}; {}; {}",
            pages(&survey),
            table.folio_shift(),
            table.folios(),
            survey.forecast(),
            survey.means()
        ))
    }
}

/// Returns the memory with a segment for every 4 KiB page.
pub(super) fn each_page(table: &Folios) -> Result<PageSegments, BenchError> {
    let each = table.segments(0, table.len())?.flat_map(|segment| {
        let start = segment.iova.raw();
        (start..start + segment.len).step_by(4096).map(Iova::new)
    });
    Ok(PageSegments::register(usize::try_from(table.len() / PAGE).unwrap_or(0), each))
}

/// Lists the pages by size and origin.
fn pages(survey: &Survey) -> String {
    let kinds = [
        (Backing::Hugetlb, PageSize::Size1G, "reserved hugepages of 1 GiB"),
        (Backing::Hugetlb, PageSize::Size2M, "reserved hugepages of 2 MiB"),
        (Backing::Transparent, PageSize::Size2M, "transparent hugepages of 2 MiB"),
        (Backing::Plain, PageSize::Size4K, "plain pages of 4 KiB"),
    ];
    let parts = kinds.iter().filter_map(|&(backing, page, name)| {
        let same =
            survey.pieces().iter().filter(|piece| (piece.backing, piece.page) == (backing, page));
        let count = same.map(|piece| piece.len / page.bytes()).sum::<u64>();
        (count > 0).then(|| format!("{count} {name}"))
    });
    parts.collect::<Vec<_>>().join(", ")
}
