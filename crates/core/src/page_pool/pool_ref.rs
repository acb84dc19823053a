//! The counted reference by which handles and late returns keep a pool's shared state alive.

use super::inner::Inner;
use crate::dma_pool::ChunkSource;
use crate::sync::Ordering;
use alloc::boxed::Box;
use core::ptr::NonNull;

/// A counted reference to the shared state. The last one frees it.
pub(super) struct PoolRef<S: ChunkSource>(NonNull<Inner<S>>);

// SAFETY: a counted, shared reference to `Inner`, all of whose fields are `Send` and `Sync`:
// atomics, locks, the source and a `SyncOps`.
unsafe impl<S: ChunkSource> Send for PoolRef<S> {}
// SAFETY: as for `Send`.
unsafe impl<S: ChunkSource> Sync for PoolRef<S> {}

impl<S: ChunkSource> PoolRef<S> {
    /// Creates the first reference.
    pub(super) fn first(shared: Inner<S>) -> Self {
        shared.refs.fetch_add(1, Ordering::Relaxed);
        Self(NonNull::from(Box::leak(Box::new(shared))))
    }

    #[inline(always)]
    pub(super) fn as_ptr(&self) -> NonNull<Inner<S>> {
        self.0
    }

    /// Takes over a reference that has already been counted.
    ///
    /// # Safety
    /// The count includes this reference, and only this value releases it.
    pub(super) unsafe fn adopt(shared: NonNull<Inner<S>>) -> Self {
        Self(shared)
    }
}

impl<S: ChunkSource> Clone for PoolRef<S> {
    fn clone(&self) -> Self {
        self.refs.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<S: ChunkSource> core::ops::Deref for PoolRef<S> {
    type Target = Inner<S>;
    #[inline(always)]
    fn deref(&self) -> &Inner<S> {
        // SAFETY: `self` is a counted reference, and only the last one frees the state.
        unsafe { self.0.as_ref() }
    }
}

impl<S: ChunkSource> Drop for PoolRef<S> {
    fn drop(&mut self) {
        if self.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: created by `Box::leak` in `first`, and this was the last reference.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}
