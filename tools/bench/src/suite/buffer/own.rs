//! 1 GiB of the program's own memory, registered and pinned.
#![expect(unsafe_code, reason = "memory from mmap is given up by its address")]

use crate::baseline::page_segments::PageSegments;
use crate::error::BenchError;
use crate::suite::available_bytes;
use pinfold::registered::{
    Backing, BufferIndex, Buffers, Registration, RegistrationError, Survey, View,
};
use pinfold::{Access, OwnedMemory};
use pinfold_core::addr::{Iova, PageSize};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::ptr::NonNull;

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

/// Memory that can be registered.
pub(super) struct Own {
    memory: OwnedMemory,
    view: View,
    /// The pages that the memory consists of, and the addresses that its table has.
    pub(super) note: String,
}

/// A mapping, which lasts as long as this value.
struct Mapping {
    base: NonNull<c_void>,
    len: usize,
}

// SAFETY: unmapping is not bound to a thread, and the value gives no other access to the memory.
unsafe impl Send for Mapping {}

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

    /// Gives up [`LEN`] bytes at the first multiple of 2 MiB.
    fn into_memory(self) -> Result<OwnedMemory, BenchError> {
        let start = self.base.addr().get().next_multiple_of(HUGE) - self.base.addr().get();
        // SAFETY: the mapping has `HUGE` bytes more than `LEN`, or begins at a hugepage.
        let base = unsafe { self.base.cast::<u8>().add(start) };
        // Plain pages where the kernel has no transparent hugepages: the note says so.
        // SAFETY: the advice changes no content, and the range is inside the mapping.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), LEN, Advice::LinuxHugepage) };
        // SAFETY: zeroed memory of the mapping, which is unmapped only when it is dropped, and is
        // not used otherwise.
        let memory = unsafe { OwnedMemory::new(NonNull::slice_from_raw_parts(base, LEN), self) };
        memory.map_err(|error| BenchError::Own(error.to_string()))
    }
}

impl Memory {
    /// Allocates the memory: reserved hugepages of 2 MiB, else transparent ones, else plain pages.
    /// Registers it once, which faults it in.
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
        let mut own =
            Own { memory: mapping.into_memory()?, view: View::Physical, note: String::new() };
        let described = match own.describe() {
            Err(BenchError::Registration(RegistrationError::FramesUnknown { .. })) => {
                own.view = View::Process;
                own.describe()
            }
            described => described,
        };
        match described {
            Ok(note) => Ok(Self::Ready(Own { note, ..own })),
            Err(BenchError::Registration(
                why @ (RegistrationError::Memlock { .. }
                | RegistrationError::NoRing(_)
                | RegistrationError::NotPinned { .. }),
            )) => Ok(Self::Unable(why.to_string())),
            Err(error) => Err(error),
        }
    }
}

impl Own {
    /// Returns an empty table for it.
    pub(super) fn table(&self) -> Result<Buffers<'static>, BenchError> {
        Ok(Buffers::new(1, self.view)?)
    }

    /// Pins and describes the memory.
    pub(super) fn register(&self, table: &mut Buffers<'_>) -> Result<BufferIndex, BenchError> {
        Ok(table.register_owned(&self.memory, Access::READ | Access::WRITE)?)
    }

    fn describe(&self) -> Result<String, BenchError> {
        let mut table = self.table()?;
        let index = self.register(&mut table)?;
        let registration = table.get(index)?;
        let addresses = match self.view {
            View::Physical => "physical addresses",
            View::Process => {
                "addresses of the process, since frames are shown to CAP_SYS_ADMIN only"
            }
        };
        let segments = registration.table().segments(0, BYTES)?.count();
        Ok(format!(
            "1 GiB, {}; {addresses}; segments in the table: {segments}",
            pages(registration.survey())
        ))
    }
}

/// Returns the registered memory with a segment for every 4 KiB page.
pub(super) fn each_page(registration: &Registration) -> Result<PageSegments, BenchError> {
    let table = registration.table();
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
