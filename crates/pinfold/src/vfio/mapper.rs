//! What a kernel that keeps a domain's table is asked for: the short table of operations of type1 and iommufd.

use crate::sys::Errno;
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange};
use pinfold_core::domain::BackendError;
use pinfold_core::iova::IovaSpace;
use pinfold_core::mem::DmaMemory;
use std::ptr::NonNull;

/// What the kernel translates for the devices of a domain.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Limits {
    /// The first and the last address of each range that may be used; `None` where the kernel does not say (before 5.4).
    pub ranges: Option<Vec<(u64, u64)>>,
    /// A bit for each page size that the IOMMU has.
    pub page_sizes: u64,
    /// How many more mappings the kernel allows; `None` where it sets no limit.
    pub entries_left: Option<u64>,
}

/// The operations, a file each: `type1`, `iommufd`. Each is one system call.
pub(crate) trait Mapper: Send + Sync {
    /// What the kernel's interface is called: `vfio` (that is, type1) or `iommufd`.
    fn name(&self) -> &'static str;

    /// What the call of [`map`](Self::map) is called in messages.
    fn call(&self) -> &'static str;

    /// The command that raises the limit of entries.
    fn more_entries(&self) -> &'static str;

    /// Pins the memory from `addr` and gives the devices access to it: all or nothing. Its length is that of `iova`.
    ///
    /// # Safety
    /// Until [`unmap`](Self::unmap) has taken the range back, or the value and every device in it are gone, the memory
    /// is mapped in this process and nobody has a reference into it.
    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno>;

    /// Takes back the mappings of the range: whole ones, any number of them. When it returns, no device reaches them. How
    /// many bytes were mapped there.
    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno>;

    /// What can be mapped now.
    fn limits(&self) -> Result<Limits, Errno>;

    /// As for [`Backend::translates`](pinfold_core::domain::Backend::translates).
    fn translates(&self) -> bool {
        true
    }

    /// Whether what is mapped counts against `RLIMIT_MEMLOCK`: what is translated is pinned for it.
    fn is_charged(&self) -> bool {
        self.translates()
    }

    /// As for [`Backend::place`](pinfold_core::domain::Backend::place).
    fn place(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        let _ = memory;
        Ok(None)
    }
}

impl<M: Mapper + ?Sized> Mapper for std::sync::Arc<M> {
    fn name(&self) -> &'static str {
        (**self).name()
    }
    fn call(&self) -> &'static str {
        (**self).call()
    }
    fn more_entries(&self) -> &'static str {
        (**self).more_entries()
    }
    unsafe fn map(&self, iova: IovaRange, addr: NonNull<u8>, access: Access) -> Result<(), Errno> {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { (**self).map(iova, addr, access) }
    }
    fn unmap(&self, iova: IovaRange) -> Result<u64, Errno> {
        (**self).unmap(iova)
    }
    fn limits(&self) -> Result<Limits, Errno> {
        (**self).limits()
    }
    fn translates(&self) -> bool {
        (**self).translates()
    }
    fn is_charged(&self) -> bool {
        (**self).is_charged()
    }
    fn place(&self, memory: DmaMemory) -> Result<Option<IovaRange>, BackendError> {
        (**self).place(memory)
    }
}

/// What is free where the kernel does not say: the narrowest IOMMU of x86, without its window for interrupts.
const UNTOLD: [(u64, u64); 2] = [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)];

/// The addresses that may be handed out: what the kernel translates, within the `bits` that the device reaches.
pub(crate) fn iova_space(limits: &Limits, bits: u32) -> Result<IovaSpace, BackendError> {
    let reach = usable(limits).iter().map(|(_, last)| u64::BITS - last.leading_zeros()).max().unwrap_or(0);
    // Narrower than an `IovaSpace` can be is nothing that can be used; wider is used in part.
    let space = IovaSpace::new(reach.min(bits).min(57))?;
    for gap in gaps(limits, bits) {
        space.reserve(gap)?;
    }
    Ok(space)
}

/// What lies between the usable ranges, behind them, and beyond `bits`.
pub(crate) fn gaps(limits: &Limits, bits: u32) -> Vec<IovaRange> {
    let mut gaps = Vec::new();
    let mut free_from = 0u64;
    let beyond = 1u64.checked_shl(bits).unwrap_or(u64::MAX);
    for (first, last) in usable(limits).into_iter().chain([(u64::MAX, u64::MAX)]) {
        // A range need not begin or end at a page: the granules that it does not fill are kept out with the gap.
        let gap = first.saturating_sub(free_from);
        gaps.extend(IovaRange::new(Iova::new(free_from), gap));
        free_from = free_from.max(last.saturating_add(1));
    }
    gaps.extend(IovaRange::new(Iova::new(beyond), u64::MAX - beyond));
    gaps
}

/// The usable ranges, in order.
fn usable(limits: &Limits) -> Vec<(u64, u64)> {
    let mut ranges = limits.ranges.clone().unwrap_or_else(|| UNTOLD.to_vec());
    ranges.retain(|(first, last)| first <= last);
    ranges.sort_unstable();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limits(ranges: &[(u64, u64)]) -> Limits {
        Limits { ranges: Some(ranges.to_vec()), ..Limits::default() }
    }

    #[test]
    fn the_interrupt_window_is_never_handed_out() {
        for limits in [limits(&UNTOLD), Limits::default()] {
            let space = iova_space(&limits, 32).unwrap();
            let window = IovaRange::new(Iova::new(0xfee0_0000), 0x10_0000).unwrap();
            assert!(space.alloc_at(window).is_err());
            let mut got = 0u64;
            while let Ok(range) = space.alloc(1 << 20, 4096, None) {
                assert!(!range.overlaps(&window) && range.end().raw() <= 1 << 32, "{range}");
                got += range.len();
            }
            assert_eq!(
                got,
                (1 << 32) - (2 << 20),
                "all but the window and the piece that the null page breaks"
            );
        }
    }

    #[test]
    fn the_width_is_the_lesser_of_iommu_and_device() {
        assert_eq!(iova_space(&limits(&UNTOLD), 64).unwrap().bits(), 39);
        assert_eq!(iova_space(&limits(&UNTOLD), 36).unwrap().bits(), 36);
        assert_eq!(iova_space(&limits(&[(0, u64::MAX)]), 64).unwrap().bits(), 57);
        assert!(iova_space(&limits(&[]), 64).is_err(), "nothing is translated");
    }

    proptest! {
        #[test]
        fn nothing_outside_the_ranges(ranges in proptest::collection::vec((0u64..1 << 24, 0u64..1 << 24), 1..6)) {
            let limits = limits(&ranges);
            if let Ok(space) = iova_space(&limits, 24) {
                while let Ok(got) = space.alloc(0x4000, 0x1000, None) {
                    let inside = |at: u64| ranges.iter().any(|(first, last)| (*first..=*last).contains(&at));
                    prop_assert!((got.start().raw()..got.end().raw()).step_by(0x400).all(inside), "{got}");
                }
            }
        }
    }
}
