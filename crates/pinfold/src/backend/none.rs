//! VFIO without an IOMMU: nothing is translated and nothing is protected. The device reaches memory
//! at its physical address, and all other memory too.
//!
//! The kernel provides the device and its interrupts and ignores memory. Memory that a device is to
//! reach must therefore not move: hugetlb pages do not as long as they are mapped. The kernel can
//! move other pages even if they are locked, so they are refused.

use super::context::{IommuContext, IommuInterface, Limits};
use super::error::OpenError;
use super::vfio::Container;
use crate::pci::lookup::PciDevice;
use crate::sys::files::Roots;
use crate::sys::pages::Pagemap;
use crate::sys::vfio::layout;
use crate::sys::{Errno, pages};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

/// A container that maps nothing, and the source of physical addresses.
#[derive(Debug)]
pub(crate) struct NoIommu {
    container: Container,
    pagemap: Pagemap,
}

impl NoIommu {
    pub(crate) fn open(roots: &Roots) -> Result<Self, OpenError> {
        let pagemap = Pagemap::open().map_err(|errno| OpenError::Kernel {
            call: "open",
            path: "/proc/self/pagemap".to_owned(),
            errno,
        })?;
        Ok(Self { container: Container::open(roots)?, pagemap })
    }
}

/// Returns the physical address of the memory, if its pages are contiguous.
fn physical(pagemap: &Pagemap, memory: DmaMemory) -> Result<u64, BackendError> {
    let (start, end) = (memory.addr(), memory.addr().saturating_add(memory.len()));
    let mut first = None;
    let mut contiguous = 0usize;
    let mut known = true;
    let read = pagemap.each(start, end, |at, entry| {
        let (Some(frame), offset) = (entry.frame(), (at - start) as u64 / 4096) else {
            known = false;
            return;
        };
        let wanted = *first.get_or_insert(frame) + offset;
        if frame == wanted && contiguous == at - start {
            contiguous += 4096;
        }
    });
    let frame = first.filter(|_| known && read.is_ok());
    let frame = frame.ok_or(BackendError::PhysAddrUnknown { addr: start })?;
    if contiguous < memory.len() {
        return Err(BackendError::NotContiguous {
            addr: start,
            len: memory.len(),
            run: contiguous,
        });
    }
    frame.checked_mul(4096).ok_or(BackendError::PhysAddrUnknown { addr: start })
}

/// Returns the addresses at which the device reaches the memory, if it cannot move and is
/// contiguous.
fn place(pagemap: &Pagemap, memory: DmaMemory) -> Result<IovaRange, BackendError> {
    let (addr, len) = (memory.addr(), memory.len());
    let page = pages::vma_of(addr, len).map_or(0, |vma| vma.page_bytes);
    if page < 2 << 20 {
        return Err(BackendError::Movable { addr, len });
    }
    // A page that was never touched has no physical address yet.
    let step = usize::try_from(page).unwrap_or(usize::MAX);
    for offset in (0..len).step_by(step) {
        memory.touch(offset).map_err(|_| BackendError::PhysAddrUnknown { addr })?;
    }
    let start = Iova::new(physical(pagemap, memory)?);
    IovaRange::new(start, len as u64).map_err(|_| BackendError::PhysAddrUnknown { addr })
}

impl IommuContext for NoIommu {
    fn interface(&self) -> IommuInterface {
        IommuInterface::NoIommu
    }

    fn name(&self) -> &'static str {
        "none"
    }

    fn map_call(&self) -> &'static str {
        "the lookup of a physical address"
    }

    fn raise_entries(&self, _limit: u64) -> String {
        "there is no limit".to_owned()
    }

    fn open_device(&self, roots: &Roots, device: &PciDevice) -> Result<Option<OwnedFd>, OpenError> {
        tracing::warn!(bdf = %device.bdf, "opened without an IOMMU: the device can reach all memory of this machine");
        self.container.open_device(roots, device, layout::NOIOMMU)
    }

    fn translates(&self) -> bool {
        false
    }

    fn required_iova(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        place(&self.pagemap, memory).map(Some)
    }

    /// Does nothing: the device reaches the memory anyway.
    unsafe fn map(&self, _: IovaRange, _: NonNull<u8>, _: Access) -> Result<(), Errno> {
        Ok(())
    }

    /// Does nothing: the device still reaches the memory.
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
    fn movable_memory_is_refused() {
        assert!(matches!(place_of(Source::Plain), Some(Err(BackendError::Movable { .. }))));
    }

    #[test]
    fn a_hugepage_has_a_stable_address() {
        match place_of(Source::Hugetlb2M) {
            None => eprintln!("skipped: no hugepages are reserved here"),
            Some(Ok(place)) => {
                assert!(place.is_aligned(2 << 20) && place.len() == 2 << 20, "{place}")
            }
            Some(Err(error)) => {
                assert!(matches!(error, BackendError::PhysAddrUnknown { .. }), "{error}");
                assert!(crate::sys::kernel::pagemap().is_err(), "{error}");
            }
        }
    }
}
