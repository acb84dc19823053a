//! [`Block`]: a block that frees itself on drop.

use super::inner::{Handle, Inner};
use super::state::State;
use super::unit::{RawBlock, Slot, Unit};
use crate::addr::Iova;
use crate::mem::DmaMemory;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;

/// A block that frees itself on drop, from any thread. It keeps its pool alive.
///
/// [`PoolLocal::free`](super::PoolLocal::free) is the fast path, whichever thread allocated the
/// block: no lock and no atomic read-modify-write. A drop anywhere else goes through the pool's
/// front, and takes its lock.
pub struct Block {
    /// Valid as long as the block is owned: that keeps the pool alive (`Handle`).
    unit: NonNull<Unit>,
    number: u32,
}

// SAFETY: a unit and its pool are used by all threads, and the block is exclusive.
unsafe impl Send for Block {}
// SAFETY: as for `Send`.
unsafe impl Sync for Block {}

impl Block {
    /// # Safety
    /// The slot is a block that was allocated in the form `OWNED` for this value alone.
    #[inline(always)]
    pub(super) unsafe fn new(slot: Slot<'_>) -> Self {
        Self { unit: NonNull::from(slot.unit), number: slot.number() }
    }

    /// Returns the block's address for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.as_raw().iova()
    }

    /// Returns both addresses. The block remains owned: until it is dropped or turned
    /// [raw](Self::into_raw), a raw free of it is refused with
    /// [`FreeError::Owned`](super::FreeError::Owned).
    #[inline]
    pub(super) fn as_raw(&self) -> RawBlock {
        // SAFETY: the pool has the chunk of a block that is allocated.
        unsafe { self.slot().block(&self.pool().layout) }
    }

    /// Returns the block's memory, to be accessed concurrently with the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: the block is allocated as long as the value.
        unsafe { self.pool().memory_at(self.as_raw().as_ptr()) }
    }

    /// Turns the block into a raw one, which stays allocated until it is freed by address. Takes
    /// the front's lock.
    #[must_use = "the block stays allocated until it is freed"]
    pub fn into_raw(self) -> RawBlock {
        let (raw, this) = (self.as_raw(), ManuallyDrop::new(self));
        // SAFETY: the block is not used again.
        unsafe { Inner::give_up(this.unit, this.number, State::RAW) };
        raw
    }

    /// Returns the slot of a block of this pool, which the caller frees; a block of another pool is
    /// dropped.
    #[inline(always)]
    pub(super) fn into_slot(self, pool: &Handle) -> Option<Slot<'_>> {
        if !pool.has(self.unit()) {
            drop(self);
            return None;
        }
        let this = ManuallyDrop::new(self);
        // SAFETY: units live as long as their pool, which the handle keeps alive.
        let unit = unsafe { this.unit.as_ref() };
        // SAFETY: from a slot of this unit.
        Some(unsafe { unit.slot(this.number) })
    }

    #[inline(always)]
    fn slot(&self) -> Slot<'_> {
        // SAFETY: from a slot of this unit.
        unsafe { self.unit().slot(self.number) }
    }

    #[inline(always)]
    fn unit(&self) -> &Unit {
        // SAFETY: units live as long as their pool, which lives at least as long as the block.
        unsafe { self.unit.as_ref() }
    }

    #[inline(always)]
    fn pool(&self) -> &Inner {
        // SAFETY: the pool lives at least as long as the block.
        unsafe { Inner::of(self.unit()).as_ref() }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the block is not used again.
        unsafe { Inner::give_up(self.unit, self.number, State::FREE) };
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.as_raw()).finish()
    }
}
