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
/// [`Local::free`](super::Local::free) is the fast path, whichever thread allocated the block: no lock and no atomic read-modify-write. A
/// drop anywhere else goes through the pool's front: it takes the front's lock, and gives up the block's share of the
/// pool by a read-modify-write.
pub struct Block {
    pool: Shared<Inner>,
    raw: RawBlock,
    number: u32,
}

impl Block {
    /// `raw` and `number` are a block of this pool that was allocated in the form `OWNED`, for this value alone.
    #[inline(always)]
    pub(super) fn new(pool: Shared<Inner>, number: u32, raw: RawBlock) -> Self {
        Self { pool, raw, number }
    }

    /// Returns the block's address for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.raw.iova()
    }

    /// Returns both addresses. The block remains owned: until it is dropped or turned [raw](Self::into_raw), a raw
    /// free of it is refused with [`FreeError::Owned`](super::FreeError::Owned).
    #[inline]
    pub fn as_raw(&self) -> RawBlock {
        self.raw
    }

    /// Returns the block's memory, to be accessed concurrently with the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        self.pool.memory_of(self.raw)
    }

    /// Turns the block into a raw one, which stays allocated until it is freed by address.
    #[must_use = "the block stays allocated until it is freed"]
    pub fn into_raw(self) -> RawBlock {
        if let Some(state) = self.pool.state(self.number) {
            state.set(State::RAW);
        }
        let (_share, _, raw) = self.into_parts();
        raw
    }

    /// The pool that the block belongs to.
    #[inline(always)]
    pub(super) fn pool(&self) -> &Shared<Inner> {
        &self.pool
    }

    /// Its share of the pool, and the block, which the caller frees.
    #[inline(always)]
    pub(super) fn into_parts(self) -> (Shared<Inner>, u32, RawBlock) {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used again, so the value is not duplicated.
        (unsafe { core::ptr::read(&raw const this.pool) }, this.number, this.raw)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Self { pool, raw, number } = self;
        pool.free_owned(&mut pool.front.lock(), *number, *raw);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.raw).finish()
    }
}
