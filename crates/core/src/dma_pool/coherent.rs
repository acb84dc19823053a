//! [`Coherent`]: device-reachable memory for rings and other single structures.

use super::error::SourceError;
use super::source::ChunkSource;
use crate::addr::{Iova, Segment};
use crate::frame::{Frame, Order};
use crate::mem::{AccessError, DmaMemory};
use core::fmt;

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
    /// [`SourceError`]; then nothing has changed.
    pub fn new(source: S, bytes: u64) -> Result<Self, SourceError> {
        let order =
            Order::for_bytes(bytes).ok_or(SourceError::TooLarge { bytes, limit: 1 << 30 })?;
        let frame = source.acquire(order)?;
        let span = source.span();
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
        // SAFETY: `new` acquired it with this order, and no borrow of its memory outlives `self`.
        unsafe { self.source.release(self.frame, self.order) };
    }
}

impl<S: ChunkSource> fmt::Debug for Coherent<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coherent").field("segment", &self.segment()).finish_non_exhaustive()
    }
}
