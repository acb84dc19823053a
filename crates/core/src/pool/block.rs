//! [`Block`]: a block that frees itself on drop.

use super::inner::Inner;
use super::raw::RawBlock;
use super::unit::State;
use crate::addr::Iova;
use crate::mem::DmaMemory;
use crate::share::Shared;
use core::fmt;
use core::mem::ManuallyDrop;
use core::ptr::NonNull;

/// A block that frees itself on drop, from any thread. It keeps its pool alive.
///
/// [`Local::free`](super::Local::free) is the fast path, whichever thread allocated the block: no lock and no atomic read-modify-write. A
/// drop anywhere else goes through the pool's front: it takes the front's lock, and gives up the block's share of the
/// pool by a read-modify-write.
pub struct Block {
    pool: Shared<Inner>,
    ptr: NonNull<u8>,
    number: u32,
}

// SAFETY: a share of a pool that is `Send` and `Sync`, a number, and an address that is only passed on.
unsafe impl Send for Block {}
// SAFETY: as for `Send`.
unsafe impl Sync for Block {}

impl Block {
    /// `raw` and `number` are a block of this pool that was allocated in the form `OWNED`, for this value alone.
    #[inline(always)]
    pub(super) fn new(pool: Shared<Inner>, number: u32, raw: RawBlock) -> Self {
        Self { pool, ptr: raw.as_ptr(), number }
    }

    /// Returns the block's address for the device.
    #[inline]
    pub fn iova(&self) -> Iova {
        self.pool.iova_of(self.number, self.ptr)
    }

    /// Returns both addresses. The block remains owned: until it is dropped or turned [raw](Self::into_raw), a raw
    /// free of it is refused with [`FreeError::Owned`](super::FreeError::Owned).
    #[inline]
    pub fn as_raw(&self) -> RawBlock {
        RawBlock::from_parts(self.ptr, self.iova())
    }

    /// Returns the block's memory, to be accessed concurrently with the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        self.pool.memory_at(self.ptr)
    }

    /// Turns the block into a raw one, which stays allocated until it is freed by address.
    #[must_use = "the block stays allocated until it is freed"]
    pub fn into_raw(self) -> RawBlock {
        let raw = self.as_raw();
        self.pool.state(self.number).set(State::RAW);
        drop(self.into_parts());
        raw
    }

    /// The pool that the block belongs to.
    #[inline(always)]
    pub(super) fn pool(&self) -> &Shared<Inner> {
        &self.pool
    }

    /// Its share of the pool, and the block, which the caller frees.
    #[inline(always)]
    pub(super) fn into_parts(self) -> (Shared<Inner>, u32, NonNull<u8>) {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is neither dropped nor used again, so the value is not duplicated.
        (unsafe { core::ptr::read(&raw const this.pool) }, this.number, this.ptr)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Self { pool, ptr, number } = self;
        pool.free_owned(&mut pool.front.lock(), *number, *ptr);
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Block").field(&self.as_raw()).finish()
    }
}
