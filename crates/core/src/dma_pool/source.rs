//! [`ChunkSource`], the source of a pool's chunks; [`Coherent`], one run of it for a ring or
//! another single structure.

use super::error::{SourceError, SpanError};
use crate::addr::{Iova, Segment};
use crate::domain::DomainId;
use crate::drop_guard::for_all;
use crate::frame::{Frame, Order};
use crate::mem::{AccessError, DmaMemory};
use crate::share::Shared;
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::ptr::NonNull;

/// A span of device-reachable memory that runs of frames are acquired from; a run at `offset` in
/// the span is at `iova() + offset` for the device.
///
/// Implemented by references, boxes and reference counts of a source too.
///
/// # Safety
/// Implementers guarantee: `span()` and `iova()` never change, nor do those of a clone; the span is
/// one allocation in the sense of [`core::ptr`], so that a pointer to any byte of it can be
/// computed from its start; a run returned by `acquire` lies inside the span, at a multiple of its
/// size, and is valid memory that is allocated to no other caller and that no reference points
/// into, until it is passed to `release`; the span ends at or below the end of 64 bits for the
/// device. What callers guarantee is stated at `release`.
///
/// # Threads
/// [`acquire`](Self::acquire) and [`release`](Self::release) are called on any thread that uses a
/// pool. A [`DmaPool`](super::DmaPool) calls one of them at a time, on one thread; a
/// [`PagePool`](crate::page_pool::PagePool) acquires on its consumer's thread, and meanwhile, once
/// it is taken down, releases on each thread that returns the last page of a chunk; several pools
/// over one source call it at the same time.
///
/// No lock of a pool is held meanwhile. From inside of them the pool's blocks may be freed and its
/// [statistics](super::DmaPool::stats) read, but an allocation that needs another chunk, and a
/// [shrink](super::DmaPool::shrink), would wait for the call that they are made from.
///
/// # Runs that are never released
/// A pool that ends with blocks or pages that a device may still write to drops its source with
/// their runs acquired. Their memory stays valid, and is allocated to no other caller, also after
/// the source itself has been dropped: a source that owns its memory leaks runs that are not
/// released.
///
/// # Panics
/// A panicking `acquire` loses nothing: it counts as one that failed, so the source must not keep a
/// run for it. A run whose `release` panics no longer belongs to the caller and is not released
/// again; the source decides whether it keeps the run. A pool that has several runs to release
/// continues with the others, and then passes the first panic on, unless its thread unwinds already
/// (all of this with the feature `std`, which catches panics).
pub unsafe trait ChunkSource: Send + Sync {
    /// Returns the whole span that runs can lie in. Callers access the runs they have acquired and
    /// nothing else of it.
    fn span(&self) -> NonNull<[u8]>;
    /// Returns the device's address of the first byte of the span; the rest follows linearly.
    fn iova(&self) -> Iova;
    /// Returns the domain whose devices reach the runs; `None` if that is no
    /// [`Domain`](crate::domain::Domain).
    fn domain(&self) -> Option<DomainId> {
        None
    }
    /// Acquires a run of 2^order frames that the device can read and write.
    ///
    /// # Errors
    /// [`SourceError`]; then nothing has changed.
    fn acquire(&self, order: Order) -> Result<Frame, SourceError>;
    /// Releases a run: the device can no longer reach it when this returns.
    ///
    /// # Safety
    /// The run was returned by [`acquire`](Self::acquire) for this order and has not been released
    /// since, and the caller no longer accesses it.
    unsafe fn release(&self, frame: Frame, order: Order);
}

/// Returns the memory of a source's whole span.
///
/// # Errors
/// [`SpanError`] unless the span has 1 to `limit` bytes and ends within 64 bits for the device.
///
/// # Safety
/// The caller owns the source for as long as the memory is used, and accesses only runs that it has
/// acquired.
pub(crate) unsafe fn span_memory<S: ChunkSource>(
    source: &S,
    limit: u64,
) -> Result<DmaMemory<'static>, SpanError> {
    let (span, iova) = (source.span(), source.iova());
    let (bytes, len) = (span.len() as u64, span.len());
    if bytes == 0 || bytes > limit || iova.checked_add(bytes).is_none() {
        return Err(SpanError { len, iova, limit });
    }
    // SAFETY: the source keeps acquired runs valid and allocates them to no other caller (contract
    // of `ChunkSource`), and the caller accesses nothing else.
    Ok(unsafe { DmaMemory::from_raw(span.cast(), len) })
}

macro_rules! forward {
    ($($holder:ty $(=> $sized:ident)?),*) => {$(
        // SAFETY: every call is forwarded to a source that gives these guarantees and outlives the
        // holder.
        unsafe impl<S: ChunkSource $(+ ?$sized)?> ChunkSource for $holder {
            fn span(&self) -> NonNull<[u8]> {
                S::span(self)
            }
            fn iova(&self) -> Iova {
                S::iova(self)
            }
            fn domain(&self) -> Option<DomainId> {
                S::domain(self)
            }
            fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
                S::acquire(self, order)
            }
            unsafe fn release(&self, frame: Frame, order: Order) {
                // SAFETY: the caller upholds the contract of the same method.
                unsafe { S::release(self, frame, order) };
            }
        }
    )*};
}

// Unsized ones too: a `Box<dyn ChunkSource>` is a source.
forward!(&S => Sized, Box<S> => Sized, Arc<S> => Sized, Shared<S>);

/// A run of frames that the device can reach until it is dropped, as `dma_alloc_coherent` returns
/// in a kernel.
///
/// It owns its source, which can be a reference or a reference count. Its bytes are not
/// initialised: [`zero`](Self::zero) it if that matters. Forgetting it (`core::mem::forget`)
/// quarantines the memory, which is right if the device may access it forever.
pub struct Coherent<S: ChunkSource> {
    source: S,
    frame: Frame,
    order: Order,
    memory: DmaMemory<'static>,
}

impl<S: ChunkSource> Coherent<S> {
    /// Acquires at least `bytes` bytes from `source`, rounded up to an order.
    ///
    /// # Errors
    /// [`SourceError`]; then nothing has changed. `source`, a handle, is dropped: pass a clone if it
    /// is still needed.
    pub fn new(source: S, bytes: u64) -> Result<Self, SourceError> {
        let order =
            Order::for_bytes(bytes).ok_or(SourceError::TooLarge { bytes, limit: 1 << 30 })?;
        // First: no run is lost if it panics.
        let span = source.span();
        let frame = source.acquire(order)?;
        // SAFETY: the source, which the value will own, keeps the run valid and allocates it to no
        // other caller until it is released (contract of `ChunkSource`), which is in `drop`; of the
        // span only the run is accessed.
        let span = unsafe { DmaMemory::from_raw(span.cast(), span.len()) };
        match within(span, frame, order) {
            Ok(memory) => Ok(Self { memory, source, frame, order }),
            Err(error) => {
                // SAFETY: just acquired with this order, and not used.
                unsafe { source.release(frame, order) };
                Err(SourceError::Outside(error))
            }
        }
    }

    /// Returns the memory, to be accessed concurrently with the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        self.memory
    }

    /// Returns the memory's address for the device.
    pub fn iova(&self) -> Iova {
        // Does not wrap: device addresses are linear and the span ends within 64 bits (contract of
        // `ChunkSource`).
        Iova::new(self.source.iova().raw().wrapping_add(self.frame.offset()))
    }

    /// Returns the device's address and the length.
    pub fn segment(&self) -> Segment {
        Segment { iova: self.iova(), len: self.memory.len() as u64 }
    }

    /// Sets all bytes to 0.
    pub fn zero(&self) {
        // Does not fail: the range is the whole memory.
        let _ = self.memory.fill(0, self.memory.len(), 0);
    }
}

fn within(span: DmaMemory<'_>, frame: Frame, order: Order) -> Result<DmaMemory<'_>, AccessError> {
    let offset = usize::try_from(frame.offset()).unwrap_or(usize::MAX);
    span.part(offset, (order.frames() as usize).saturating_mul(4096))
}

impl<S: ChunkSource> Drop for Coherent<S> {
    fn drop(&mut self) {
        // By `for_all`: a release that panics while the thread unwinds does not end the process.
        for_all([(self.frame, self.order)], |(frame, order)| {
            // SAFETY: `new` acquired it with this order, and no borrow of its memory outlives
            // `self`.
            unsafe { self.source.release(frame, order) };
        });
    }
}

impl<S: ChunkSource> fmt::Debug for Coherent<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coherent").field("segment", &self.segment()).finish_non_exhaustive()
    }
}
