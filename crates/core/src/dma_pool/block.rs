//! [`Block`]: a block that frees itself on drop.

use super::inner::Inner;
use super::raw::RawBlock;
use super::unit::State;
use crate::addr::Iova;
use crate::mem::DmaMemory;
use crate::share::Shared;
use core::fmt;
use core::mem::ManuallyDrop;

/// A block that frees itself on drop, from any thread. It keeps its pool alive.
///
/// [`Local::free`](super::Local::free) is the fast path, whichever thread allocated the block: no
/// lock and no atomic read-modify-write. A drop anywhere else goes through the pool's front: it
/// takes the front's lock, and gives up the block's share of the pool by a read-modify-write.
pub struct Block {
    pool: Shared<Inner>,
    number: u32,
}

impl Block {
    /// `number` is a block of this pool, and was allocated in the form `OWNED` for this value
    /// alone.
    #[inline(always)]
    pub(super) fn new(pool: Shared<Inner>, number: u32) -> Self {
        Self { pool, number }
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
    pub fn as_raw(&self) -> RawBlock {
        self.pool.site(self.number).raw()
    }

    /// Returns the block's memory, to be accessed concurrently with the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        self.pool.memory_at(self.pool.site(self.number).ptr())
    }

    /// Turns the block into a raw one, which stays allocated until it is freed by address.
    #[must_use = "the block stays allocated until it is freed"]
    pub fn into_raw(self) -> RawBlock {
        let raw = self.as_raw();
        self.pool.units.state(self.number).set(State::RAW);
        drop(self.into_parts());
        raw
    }

    /// The pool that the block belongs to.
    #[inline(always)]
    pub(super) fn pool(&self) -> &Shared<Inner> {
        &self.pool
    }

    /// Its share of the pool, and its number, which the caller frees.
    #[inline(always)]
    pub(super) fn into_parts(self) -> (Shared<Inner>, u32) {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used again, so the value is not duplicated.
        (unsafe { core::ptr::read(&raw const this.pool) }, this.number)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.pool.free_owned(&mut self.pool.front.lock(), self.number);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.as_raw()).finish()
    }
}
