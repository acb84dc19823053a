//! VFIO without an IOMMU: nothing is translated and nothing is protected. The device finds memory at its physical address,
//! and finds all other memory too.
//!
//! The kernel gives the device and its interrupts, and does not care for memory. So what a device is to reach must
//! stay where it is by itself: hugetlb pages do, as long as they are mapped. Other pages can be moved by the kernel
//! although they are locked, and are refused.

use super::error::OpenError;
use super::lookup::Group;
use super::mapper::{Limits, Mapper};
use super::type1::Type1;
use crate::probe::Roots;
use crate::sys::pages::Pagemap;
use crate::sys::vfio::layout;
use crate::sys::{Errno, smaps};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

/// A container that maps nothing, and the way to physical addresses.
#[derive(Debug)]
pub(crate) struct NoIommu {
    container: Type1,
    pagemap: Pagemap,
}

impl NoIommu {
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        let pagemap = Pagemap::open().map_err(|errno| OpenError::Kernel {
            call: "open",
            path: "/proc/self/pagemap".to_owned(),
            errno,
        })?;
        Ok(Self { container: Type1::open(roots)?, pagemap })
    }

    pub(crate) fn device(
        &self,
        roots: &Roots,
        group: &Group,
        name: &CStr,
    ) -> Result<Option<OwnedFd>, OpenError> {
        self.container.device(roots, group, name, layout::NOIOMMU)
    }
}

/// Where the pages of the memory are, if they are side by side.
fn physical(pagemap: &Pagemap, memory: DmaMemory) -> Result<u64, BackendError> {
    let (start, end) = (memory.addr(), memory.addr().saturating_add(memory.len()));
    let mut first = None;
    let mut contiguous = 0usize;
    let mut known = true;
    let looked = pagemap.each(start, end, |at, entry| {
        let (Some(frame), offset) = (entry.frame(), (at - start) as u64 / 4096) else {
            known = false;
            return;
        };
        let wanted = *first.get_or_insert(frame) + offset;
        if frame == wanted && contiguous == at - start {
            contiguous += 4096;
        }
    });
    let frame = first.filter(|_| known && looked.is_ok());
    let frame = frame.ok_or(BackendError::PhysAddrUnknown { addr: start })?;
    if contiguous < memory.len() {
        return Err(BackendError::NotContiguous { addr: start, len: memory.len(), run: contiguous });
    }
    frame.checked_mul(4096).ok_or(BackendError::PhysAddrUnknown { addr: start })
}

/// Where the device finds the memory, if it stays there and is in one piece.
fn place(pagemap: &Pagemap, memory: DmaMemory) -> Result<IovaRange, BackendError> {
    let (addr, len) = (memory.addr(), memory.len());
    let page = smaps::of_range(addr, len).map_or(0, |vma| vma.page_bytes);
    if page < 2 << 20 {
        return Err(BackendError::Movable { addr, len });
    }
    // A page that was never touched is nowhere yet.
    let step = usize::try_from(page).unwrap_or(usize::MAX);
    for offset in (0..len).step_by(step) {
        memory.touch(offset).map_err(|_| BackendError::PhysAddrUnknown { addr })?;
    }
    let start = Iova::new(physical(pagemap, memory)?);
    IovaRange::new(start, len as u64).map_err(|_| BackendError::PhysAddrUnknown { addr })
}

impl Mapper for NoIommu {
    fn name(&self) -> &'static str {
        "none"
    }

    fn call(&self) -> &'static str {
        "looking memory up"
    }

    fn more_entries(&self) -> &'static str {
        "there is no limit"
    }

    fn translates(&self) -> bool {
        false
    }

    fn place(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        place(&self.pagemap, memory).map(Some)
    }

    /// There is nothing to do: the device reaches it anyway.
    unsafe fn map(&self, _: IovaRange, _: NonNull<u8>, _: Access) -> Result<(), Errno> {
        Ok(())
    }

    /// Nor here: it reaches it still.
    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        Ok(iova.len())
    }

    fn limits(&self) -> Result<Limits, Errno> {
        Ok(Limits { ranges: Some(vec![(0, u64::MAX)]), page_sizes: 4096, entries_left: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Domain, Source};

    fn place_of(source: Source) -> Option<Result<IovaRange, BackendError>> {
        let domain = Domain::soft().unwrap();
        let arena = Arena::builder().size(2 << 20).source(source).build(&domain).ok()?;
        let buffer = arena.alloc(2 << 20).unwrap();
        Some(place(&Pagemap::open().unwrap(), buffer.memory()))
    }

    #[test]
    fn memory_that_can_move_is_refused() {
        assert!(matches!(place_of(Source::Plain), Some(Err(BackendError::Movable { .. }))));
    }

    #[test]
    fn a_hugepage_is_where_it_is() {
        match place_of(Source::Hugetlb2M) {
            None => eprintln!("skipped: no hugepages are reserved here"),
            Some(Ok(place)) => assert!(place.is_aligned(2 << 20) && place.len() == 2 << 20, "{place}"),
            Some(Err(error)) => {
                assert!(matches!(error, BackendError::PhysAddrUnknown { .. }), "{error}");
                assert!(!crate::sys::asking::pagemap_tells_frames(), "{error}");
            }
        }
    }
}
