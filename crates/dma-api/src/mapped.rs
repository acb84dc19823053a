//! [`Mapped`]: memory that it owns and has mapped for the device, until it is unmapped.

use crate::plan::{PAGE, Plan, Refused};
use core::mem::ManuallyDrop;
use pinfold_core::access::Access;
use pinfold_core::addr::Iova;
use pinfold_core::domain::{BackendError, Domain, Pinned, StaticMapping};
use pinfold_core::mem::DmaMemory;

/// Mapped memory. Only [`unmap`](Self::unmap) frees it; otherwise it is leaked, because a device may
/// reach it.
#[derive(Debug)]
pub(crate) struct Mapped<P: Pinned> {
    payload: ManuallyDrop<P>,
    mapping: StaticMapping,
    /// The offset of the mapped pages in the payload.
    offset: usize,
    bytes: usize,
}

/// Memory that was not mapped or not unmapped.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) error: Refused,
    /// The bytes that are quarantined: a device may reach them.
    pub(crate) quarantined: u64,
}

impl<E: Into<Refused>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self { error: error.into(), quarantined: 0 }
    }
}

impl<P: Pinned> Mapped<P> {
    /// Maps the pages of `plan` in `payload`, which begin with what `fill` writes, for `access`; the
    /// rest of them is zeroed.
    pub(crate) fn new(
        domain: &Domain,
        payload: P,
        plan: &Plan,
        access: Access,
        fill: impl FnOnce(DmaMemory<'_>),
    ) -> Result<Self, Failed> {
        if payload.fixed_iova(domain.id()).is_some() {
            return Err(Refused::MappedWhole.into());
        }
        let memory = payload.memory();
        let (addr, len) = (memory.addr(), memory.len());
        let aligned = addr.checked_next_multiple_of(plan.layout.align().max(PAGE));
        let offset = aligned.and_then(|aligned| aligned.checked_sub(addr)).unwrap_or(usize::MAX);
        // Not a buffer with neighbours on its pages, and not one in several pieces.
        let whole = payload.extent(0) == Some((0, len as u64));
        let pages = memory.part(offset, plan.bytes).ok().filter(|_| whole);
        let pages = pages.ok_or(Refused::Source { addr, len, bytes: plan.bytes_to_align() })?;
        // They may hold what the program had there before.
        let zeroed = pages.fill(0, plan.bytes, 0);
        debug_assert_eq!(zeroed, Ok(()), "all of the memory");
        fill(pages);
        let place = domain.reserve_iova_up_to(plan.bytes as u64, plan.iova_align, plan.limit)?;
        // From here on only `unmap` drops it: also if the backend panics.
        let payload = ManuallyDrop::new(payload);
        let pages = payload.memory().part(offset, plan.bytes).unwrap_or(DmaMemory::EMPTY);
        // SAFETY: the payload stays valid (contract of `Pinned`): it is dropped only by `free`,
        // below, which is called after an error that leaves nothing reachable, and after
        // `unmap_static` has returned `Ok`. Meanwhile it is accessed only as `DmaMemory`, and by
        // the driver, whose contract with `dma-api` is to leave it to the device.
        match unsafe { domain.map_at(&place, place.range(), pages, access) } {
            Ok(mapping) => Ok(Self { payload, mapping, offset, bytes: plan.bytes }),
            Err(error) => Err(free(domain, payload, plan.bytes, error)),
        }
    }

    /// Returns its address for the device.
    pub(crate) fn iova(&self) -> Iova {
        self.mapping.iova().start()
    }

    /// Returns the mapped pages.
    pub(crate) fn memory(&self) -> DmaMemory<'_> {
        // Inside, by `new`.
        self.payload.memory().part(self.offset, self.bytes).unwrap_or(DmaMemory::EMPTY)
    }

    /// Revokes access, waits until no device reaches the memory, and frees it. If that cannot be
    /// done the memory is quarantined: it and its addresses are never reused.
    pub(crate) fn unmap(self, domain: &Domain) -> Result<(), Failed> {
        let Self { mut payload, mapping, bytes, .. } = self;
        match domain.unmap_static(mapping) {
            Ok(()) => {
                // SAFETY: dropped once, as `self` is consumed; no device reaches it.
                unsafe { ManuallyDrop::drop(&mut payload) };
                Ok(())
            }
            Err(failed) => Err(quarantine(domain, bytes, failed.error)),
        }
    }
}

/// Frees the payload of a map that failed, unless a device may reach it.
fn free<P: Pinned>(
    domain: &Domain,
    mut payload: ManuallyDrop<P>,
    bytes: usize,
    error: BackendError,
) -> Failed {
    if error.stays_reachable() {
        return quarantine(domain, bytes, error);
    }
    // SAFETY: dropped once, as it is passed by value; no device reaches it.
    unsafe { ManuallyDrop::drop(&mut payload) };
    error.into()
}

fn quarantine(domain: &Domain, bytes: usize, error: BackendError) -> Failed {
    domain.count_quarantined(bytes as u64);
    Failed { error: error.into(), quarantined: bytes as u64 }
}
