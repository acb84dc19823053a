//! Memory that a device reaches at its physical address, or through a table that this process
//! keeps: nothing but the process keeps it in its frames. It is pinned when it is registered
//! ([`PinnedFolios`]), and its physical addresses are looked up then, once.

use crate::folios::{PinError, PinnedFolios};
use pinfold_core::addr::IovaRange;
#[cfg(feature = "vtd")]
use pinfold_core::addr::{PhysAddr, PhysRange};
use pinfold_core::domain::BackendError;
#[cfg(feature = "vtd")]
use pinfold_core::domain::PhysExtent;
use pinfold_core::mem::DmaMemory;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The registered memory, by its address: no two overlap.
#[derive(Debug, Default)]
pub(crate) struct PinnedMemory(Mutex<BTreeMap<usize, PinnedFolios>>);

impl PinnedMemory {
    /// A panic while the lock was held has left the map consistent.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, PinnedFolios>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, memory: DmaMemory) -> Result<(), BackendError> {
        let folios = PinnedFolios::new(memory, false).map_err(|error| refused(memory, &error))?;
        self.lock().insert(memory.addr(), folios);
        Ok(())
    }

    /// Removes the memory, as it was registered.
    pub(crate) fn remove(&self, memory: DmaMemory) -> Result<(), BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let mut registered = self.lock();
        if registered.get(&addr).is_none_or(|folios| folios.table().len() != len as u64) {
            return Err(BackendError::NotRegistered { addr, len });
        }
        registered.remove(&addr);
        Ok(())
    }

    /// Returns the addresses at which the device reaches the memory, a part of a registration, if
    /// it is contiguous. Logarithmic in the registrations, and constant in the length.
    pub(crate) fn place(&self, memory: DmaMemory) -> Result<IovaRange, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let registered = self.lock();
        let unknown = BackendError::NotRegistered { addr, len };
        let (start, folios) = registered.range(..=addr).next_back().ok_or(unknown.clone())?;
        let part = folios.table().segments((addr - start) as u64, len as u64);
        let first = part.ok().and_then(|mut part| part.next()).ok_or(unknown)?;
        if first.len < len as u64 {
            let run = crate::sys::bytes(first.len);
            return Err(BackendError::NotContiguous { addr, len, run });
        }
        IovaRange::new(first.iova, first.len).map_err(|_| unknown_place(addr))
    }

    /// Returns the physically contiguous extent from the start of the memory, a part of what is
    /// registered, to the end of its run there. Constant in the length, too.
    #[cfg(feature = "vtd")]
    pub(crate) fn extent(&self, memory: DmaMemory) -> Result<PhysExtent, BackendError> {
        let (addr, len) = (memory.addr(), memory.len());
        let registered = self.lock();
        let unknown = BackendError::NotRegistered { addr, len };
        let (start, folios) = registered.range(..=addr).next_back().ok_or(unknown.clone())?;
        let (table, offset) = (folios.table(), (addr - start) as u64);
        let rest = table.len().checked_sub(offset).filter(|rest| *rest >= len as u64);
        let run = rest.and_then(|rest| table.segments(offset, rest).ok()?.next()).ok_or(unknown)?;
        let phys = PhysRange::new(PhysAddr::new(run.iova.raw()), run.len);
        Ok(PhysExtent::new(addr, phys.map_err(|_| unknown_place(addr))?))
    }
}

/// Returns the error of memory whose physical address the kernel does not tell.
#[cold]
fn unknown_place(addr: usize) -> BackendError {
    let remedy = "the kernel tells it with CAP_SYS_ADMIN only; run the program as root".into();
    BackendError::PhysAddrUnknown { addr, remedy }
}

/// Returns the meaning of memory that could not be pinned for a device.
#[cold]
fn refused(memory: DmaMemory, error: &PinError) -> BackendError {
    let (addr, len) = (memory.addr(), memory.len());
    tracing::debug!(addr, len, %error, "memory without an IOMMU was refused");
    match error {
        PinError::FramesUnknown { addr } => unknown_place(*addr),
        PinError::Memlock { requested, limit } => BackendError::LockedMemory {
            asked: *requested,
            used: limit.used.unwrap_or(0),
            limit: limit.soft.unwrap_or(u64::MAX),
            remedy: limit.raise_command_for_user(*requested),
        },
        _ => BackendError::Movable { addr, len },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Errno;
    use crate::sys::region::Region;
    use pinfold_core::addr::PageSize;

    const HUGE: usize = 2 << 20;

    /// Returns the memory, registered; `None` if its frames are hidden here.
    fn registered(region: &Region) -> Option<PinnedMemory> {
        let pinned = PinnedMemory::default();
        match pinned.add(region.memory()) {
            Ok(()) => Some(pinned),
            Err(error) => {
                assert!(matches!(error, BackendError::PhysAddrUnknown { .. }), "{error}");
                assert!(crate::sys::kernel::pagemap().is_err(), "{error}");
                eprintln!("SKIPPED: {error}");
                None
            }
        }
    }

    #[test]
    fn a_page_has_a_place_while_its_memory_is_registered() {
        let region = Region::anonymous(16 << 12, 4096).unwrap();
        region.ask_for_plain_pages().unwrap();
        let Some(pinned) = registered(&region) else { return };
        let page = region.memory().part(3 << 12, 4096).unwrap();
        let place = pinned.place(page).unwrap();
        assert!(place.is_aligned(4096) && place.len() == 4096, "{place}");
        assert_eq!(pinned.place(page), Ok(place));
        let other = Region::anonymous(4096, 4096).unwrap();
        let outside = other.memory();
        let unknown = |memory: DmaMemory| {
            Err(BackendError::NotRegistered { addr: memory.addr(), len: memory.len() })
        };
        assert_eq!(pinned.place(outside), unknown(outside));
        assert_eq!(pinned.remove(page), unknown(page).map(drop), "a part of it");
        assert_eq!(pinned.place(page), Ok(place));
        pinned.remove(region.memory()).unwrap();
        assert_eq!(pinned.place(page), unknown(page));
    }

    #[test]
    fn memory_in_several_runs_is_refused_with_the_length_of_the_first() {
        let region = Region::anonymous(64 << 12, 4096).unwrap();
        region.ask_for_plain_pages().unwrap();
        let Some(pinned) = registered(&region) else { return };
        let all = region.memory();
        let pages = (0..64).map(|page| pinned.place(all.part(page << 12, 4096).unwrap()).unwrap());
        let pages: Vec<u64> = pages.map(|place| place.start().raw()).collect();
        let adjacent = pages.windows(2).take_while(|pair| pair[0] + 4096 == pair[1]).count();
        let run = (adjacent + 1) << 12;
        match pinned.place(all) {
            Ok(place) => assert_eq!((run, place.start().raw()), (64 << 12, pages[0])),
            Err(error) => {
                let addr = all.addr();
                assert_eq!(error, BackendError::NotContiguous { addr, len: 64 << 12, run });
            }
        }
        let first = pinned.place(all.part(0, run).unwrap()).unwrap();
        assert_eq!((first.start().raw(), first.len()), (pages[0], run as u64));
    }

    #[test]
    fn a_hugepage_is_in_one_piece() {
        let Ok(region) = Region::hugetlb(HUGE, PageSize::Size2M) else {
            return eprintln!("SKIPPED: no hugepages are reserved here");
        };
        let Some(pinned) = registered(&region) else { return };
        let place = pinned.place(region.memory()).unwrap();
        assert!(place.is_aligned(2 << 20) && place.len() == 2 << 20, "{place}");
        let inside = pinned.place(region.memory().part(4096, 8192).unwrap()).unwrap();
        assert_eq!(inside.start().raw(), place.start().raw() + 4096);
    }

    #[test]
    fn memory_that_cannot_be_pinned_is_refused_by_its_reason() {
        let region = Region::anonymous(4096, 4096).unwrap();
        let (memory, addr) = (region.memory(), region.addr());
        let of = |error| refused(memory, &error);
        let errno = Errno::new(libc::EFAULT);
        let movable = BackendError::Movable { addr, len: 4096 };
        assert_eq!(of(PinError::Refused { addr, len: 4096, errno }), movable);
        let hidden = of(PinError::FramesUnknown { addr: 5 });
        let BackendError::PhysAddrUnknown { addr: 5, remedy } = &hidden else { panic!("{hidden}") };
        assert!(remedy.contains("CAP_SYS_ADMIN"), "{hidden}");
        let limit =
            crate::MemlockLimit { soft: Some(7), hard: Some(9), used: Some(3), lifted: false };
        let full = of(PinError::Memlock { requested: 4096, limit });
        assert!(
            matches!(full, BackendError::LockedMemory { asked: 4096, used: 3, limit: 7, .. }),
            "{full}"
        );
    }
}
