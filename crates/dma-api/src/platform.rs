//! [`Platform`]: the operations of `dma-api` over a domain.

use crate::mapped::{Failed, Mapped};
use crate::plan::{PAGE, Plan, Refused};
use crate::stats::{Counts, Stats, count};
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use core::alloc::Layout;
use core::fmt;
use core::num::{NonZeroU64, NonZeroUsize};
use core::ptr::NonNull;
use dma_api::{
    DeviceDma, DmaAddr, DmaAllocHandle, DmaCoherency, DmaConstraints, DmaDeviceInfo, DmaDirection,
    DmaDomainId, DmaError, DmaMapHandle, DmaOp,
};
use pinfold_core::access::Access;
use pinfold_core::domain::{Domain, Pinned};
use pinfold_core::mem::DmaMemory;
use spin::Mutex;

const READ_WRITE: Access = Access::READ.union(Access::WRITE);

/// The memory of a domain's drivers: a [`DmaOp`]. See the [crate] documentation for what a device
/// can access, and when.
///
/// `S` is the source of memory; `P` is what that returns.
pub struct Platform<S, P: Pinned> {
    domain: Domain,
    source: S,
    /// Memory that devices reach, by its device address.
    lent: Mutex<BTreeMap<u64, Lent<P>>>,
    counts: Counts,
}

/// Memory that a driver has.
struct Lent<P: Pinned> {
    mapped: Mapped<P>,
    /// The length that the driver asked for.
    size: usize,
    /// The buffer that the memory is a copy of, if it was mapped and not allocated.
    copy_of: Option<CopyOf>,
}

/// A driver's buffer, and the access of the device to its copy.
#[derive(Clone, Copy)]
struct CopyOf {
    /// Accessed in `sync` only.
    original: DmaMemory<'static>,
    access: Access,
}

impl<P: Pinned> Lent<P> {
    fn is(&self, alloc: &DmaAllocHandle) -> bool {
        let ours =
            self.copy_of.is_none() && self.mapped.memory().as_ptr() == alloc.allocation_ptr();
        ours && self.size == alloc.size()
    }

    fn is_copy_for(&self, map: &DmaMapHandle) -> bool {
        let same = |copy: CopyOf| copy.original.as_ptr() == map.as_ptr();
        self.copy_of.is_some_and(same) && self.size == map.size()
    }
}

impl<S, P> Platform<S, P>
where
    P: Pinned,
    S: Fn(usize) -> Option<P> + Send + Sync + 'static,
{
    /// Creates the platform of `domain`, whose memory comes from `source`: it is called with a
    /// number of bytes, and returns at least as many whole pages in one piece.
    ///
    /// A `DmaOp` must be `'static`, so the platform is leaked: with its domain and its source it
    /// lives until the process ends. A program creates one for each domain, once; a second one of
    /// the same domain is of no harm, and shares nothing with the first.
    pub fn leak(domain: Domain, source: S) -> &'static Self {
        let counts = Counts::default();
        Box::leak(Box::new(Self { domain, source, lent: Mutex::default(), counts }))
    }

    /// Returns the interface for the drivers of a device: the `DeviceDma` that they are given.
    ///
    /// The device is one of the domain, and coherent, as those are that VFIO opens.
    pub fn device(&'static self, constraints: DmaConstraints) -> DeviceDma {
        // The numbers of domains begin with 1.
        let number = NonZeroU64::new(self.domain.id().number()).unwrap_or(NonZeroU64::MAX);
        let (domain, coherency) = (DmaDomainId::Translated(number), DmaCoherency::Coherent);
        DeviceDma::new(DmaDeviceInfo::new(domain, coherency, constraints), self)
    }

    /// Returns the counters. O(what exists).
    pub fn stats(&self) -> Stats {
        let lent = self.lent.lock();
        let bytes = lent.values().map(|lent| lent.mapped.memory().len() as u64).sum();
        self.counts.stats(lent.len() as u64, bytes)
    }

    /// Maps memory, which begins with `copy_of` or is zero. Returns it and its address for the
    /// device.
    fn lend(
        &self,
        plan: Result<Plan, Refused>,
        copy_of: Option<CopyOf>,
    ) -> Result<(NonNull<u8>, DmaAddr, Layout), Refused> {
        let made = plan.map_err(Failed::from).and_then(|plan| {
            let bytes = plan.bytes_to_align();
            let payload = (self.source)(bytes).ok_or(Refused::NoMemory { bytes })?;
            let access = copy_of.map_or(READ_WRITE, |copy| copy.access);
            let fill = |memory: DmaMemory<'_>| {
                if let Some(CopyOf { original, .. }) = copy_of {
                    self.copy_in(original, memory);
                }
            };
            let mapped = Mapped::new(&self.domain, payload, &plan, access, fill)?;
            Ok((mapped, plan.layout))
        });
        let (mapped, layout) = made.map_err(|Failed { error, quarantined }| {
            tracing::warn!(%error, quarantined, "memory for a driver is refused");
            count(&self.counts.refused, 1);
            count(&self.counts.quarantined_bytes, quarantined);
            error
        })?;
        let Counts { allocations, maps, .. } = &self.counts;
        count(if copy_of.is_some() { maps } else { allocations }, 1);
        let (iova, at) = (mapped.iova().raw(), mapped.memory().as_ptr());
        let lent = Lent { mapped, size: layout.size(), copy_of };
        self.lent.lock().insert(iova, lent);
        Ok((at, DmaAddr::from(iova), layout))
    }

    /// Ends the driver's use of the memory at `at`, if `is` accepts it.
    fn take_back(&self, at: DmaAddr, is: impl FnOnce(&Lent<P>) -> bool) -> Result<(), DmaError> {
        let mut all = self.lent.lock();
        let known = all.get(&at.as_u64()).is_some_and(is);
        let lent = if known { all.remove(&at.as_u64()) } else { None };
        drop(all);
        let Some(lent) = lent else {
            self.count_invalid(at, "a driver frees or unmaps");
            return Err(DmaError::CoherentReleaseFailed);
        };
        lent.mapped.unmap(&self.domain).map_err(|Failed { error, quarantined }| {
            tracing::error!(%at, quarantined, %error, "a device may reach freed memory, which is quarantined");
            count(&self.counts.quarantined_bytes, quarantined);
            DmaError::CoherentReleaseFailed
        })
    }

    /// Calls `copy` with a part of a mapped buffer and the same part of its copy.
    fn sync(
        &self,
        map: &DmaMapHandle,
        part: (usize, usize),
        copy: impl FnOnce(&Self, CopyOf, DmaMemory<'_>),
    ) {
        let (offset, len) = part;
        // Held during the copy: the buffer is valid until it is unmapped.
        let all = self.lent.lock();
        let lent = all.get(&map.dma_addr().as_u64()).filter(|lent| lent.is_copy_for(map));
        let parts = lent.and_then(|lent| {
            let of = lent.copy_of?;
            let original = of.original.part(offset, len).ok()?;
            Some((CopyOf { original, ..of }, lent.mapped.memory().part(offset, len).ok()?))
        });
        match parts {
            Some((of, memory)) => copy(self, of, memory),
            None => self.count_invalid(map.dma_addr(), "a driver synchronises"),
        }
    }

    /// Copies a driver's buffer to the start of `memory`.
    fn copy_in(&self, original: DmaMemory<'_>, memory: DmaMemory<'_>) {
        let (at, len) = (original.as_ptr().as_ptr(), original.len());
        // SAFETY: valid from `map_streaming` to `unmap_streaming` by their contract, and not written
        // meanwhile: the caller maps or synchronises it. The bytes are only copied.
        let from = unsafe { core::slice::from_raw_parts(at, len) };
        // Does not fail: the copy is at least as long.
        let copied = memory.copy_from_slice(0, from);
        debug_assert_eq!(copied, Ok(()));
        count(&self.counts.copied_bytes, len as u64);
    }

    /// Copies the start of `memory` to a driver's buffer.
    fn copy_out(&self, memory: DmaMemory<'_>, original: DmaMemory<'_>) {
        let (at, len) = (original.as_ptr().as_ptr(), original.len());
        // SAFETY: as in `copy_in`; exclusive, since the driver leaves it to the platform meanwhile.
        let to = unsafe { core::slice::from_raw_parts_mut(at, len) };
        // Does not fail: as there.
        let copied = memory.copy_to_slice(0, to);
        debug_assert_eq!(copied, Ok(()));
        count(&self.counts.copied_bytes, len as u64);
    }

    fn count_invalid(&self, at: DmaAddr, what: &str) {
        tracing::error!(%at, "{what} what is not allocated or mapped there");
        count(&self.counts.invalid, 1);
    }

    fn alloc(&self, constraints: &DmaConstraints, layout: Layout) -> Option<DmaAllocHandle> {
        if layout.size() == 0 {
            return Some(nothing(layout));
        }
        let (at, iova, _) = self.lend(Plan::new(constraints, layout), None).ok()?;
        // SAFETY: both are the memory that was just mapped at `iova`, with this layout. Until it is
        // freed nothing else gives access to it.
        Some(unsafe { DmaAllocHandle::new(at, at, iova, layout) })
    }

    fn dealloc(&self, alloc: &DmaAllocHandle) -> Result<(), DmaError> {
        if alloc.size() == 0 {
            return Ok(());
        }
        self.take_back(alloc.dma_addr(), |lent| lent.is(alloc))
    }
}

/// Returns the handle of no bytes, which `dma-api` never frees: at an address that satisfies every
/// mask and alignment.
fn nothing(layout: Layout) -> DmaAllocHandle {
    let align = NonZeroUsize::new(layout.align()).unwrap_or(NonZeroUsize::MIN);
    let at = NonNull::without_provenance(align);
    // SAFETY: it describes no memory.
    unsafe { DmaAllocHandle::new(at, at, DmaAddr::from(0), layout) }
}

impl<S, P> DmaOp for Platform<S, P>
where
    P: Pinned,
    S: Fn(usize) -> Option<P> + Send + Sync + 'static,
{
    fn page_size(&self) -> usize {
        PAGE
    }

    unsafe fn alloc_contiguous(
        &self,
        constraints: DmaConstraints,
        layout: Layout,
    ) -> Option<DmaAllocHandle> {
        self.alloc(&constraints, layout)
    }

    unsafe fn dealloc_contiguous(&self, handle: DmaAllocHandle) {
        // Reported and counted; this call has no result.
        let _ = self.dealloc(&handle);
    }

    /// The same memory as of `alloc_contiguous`: all of it is coherent.
    unsafe fn alloc_coherent(
        &self,
        constraints: DmaConstraints,
        layout: Layout,
    ) -> Option<DmaAllocHandle> {
        self.alloc(&constraints, layout)
    }

    unsafe fn dealloc_coherent(&self, handle: DmaAllocHandle) -> Result<(), DmaError> {
        self.dealloc(&handle)
    }

    unsafe fn map_streaming(
        &self,
        constraints: DmaConstraints,
        addr: NonNull<u8>,
        size: NonZeroUsize,
        direction: DmaDirection,
    ) -> Result<DmaMapHandle, DmaError> {
        let layout = Layout::from_size_align(size.get(), 1).map_err(Refused::from);
        let plan = layout.and_then(|layout| Plan::new(&constraints, layout));
        // SAFETY: valid until `unmap_streaming` by the caller's contract, and accessed only by
        // `copy_in` and `copy_out`, which name what they need.
        let original = unsafe { DmaMemory::from_raw(addr, size.get()) };
        let access = match direction {
            DmaDirection::ToDevice => Access::READ,
            DmaDirection::FromDevice => Access::WRITE,
            DmaDirection::Bidirectional => READ_WRITE,
        };
        let (at, iova, layout) = self.lend(plan, Some(CopyOf { original, access }))?;
        // SAFETY: `addr` is the caller's; `at` is its copy, with this layout, until it is unmapped.
        Ok(unsafe { DmaMapHandle::new(addr, iova, layout, Some(at)) })
    }

    /// Does not touch the buffer: `sync_map_for_cpu` copies the device's data, after which the
    /// driver may have changed the buffer.
    unsafe fn unmap_streaming(&self, handle: DmaMapHandle) {
        // As for `dealloc_contiguous`.
        let _ = self.take_back(handle.dma_addr(), |lent| lent.is_copy_for(&handle));
    }

    fn sync_map_for_device(
        &self,
        handle: &DmaMapHandle,
        offset: usize,
        size: usize,
        _: DmaDirection,
        _: DmaCoherency,
    ) {
        // Also what the device only writes: bytes that it does not write must keep their value.
        self.sync(handle, (offset, size), |platform, of, memory| {
            platform.copy_in(of.original, memory);
        });
    }

    fn sync_map_for_cpu(
        &self,
        handle: &DmaMapHandle,
        offset: usize,
        size: usize,
        _: DmaDirection,
        _: DmaCoherency,
    ) {
        self.sync(handle, (offset, size), |platform, of, memory| {
            if of.access.contains(Access::WRITE) {
                platform.copy_out(memory, of.original);
            }
        });
    }
}

impl<S, P: Pinned> fmt::Debug for Platform<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Platform").field("domain", &self.domain).finish_non_exhaustive()
    }
}
