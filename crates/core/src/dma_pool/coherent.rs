//! Memory that a device reaches for as long as a value lives: for rings and for what is not one of many.

use super::error::SourceError;
use super::source::ChunkSource;
use crate::addr::{Iova, Segment};
use crate::frame::{Frame, Order};
use crate::mem::{AccessError, DmaMemory};
use core::fmt;

/// A run of frames of its own, reachable by the device until it is dropped; what `dma_alloc_coherent` gives a driver
/// in a kernel.
///
/// Its bytes are what its last owner left there: [`zero`](Self::zero) it where that matters. Leaking it
/// (`core::mem::forget`) keeps it for ever, which is right for memory that a device may never let go of.
pub struct Coherent<S: ChunkSource> {
    source: S,
    frame: Frame,
    order: Order,
    memory: DmaMemory<'static>,
}

impl<S: ChunkSource> Coherent<S> {
    /// At least `bytes` bytes of `source`: the next order up.
    ///
    /// # Errors
    /// [`SourceError`]; the source has lost nothing.
    pub fn new(source: S, bytes: u64) -> Result<Self, SourceError> {
        let order = Order::for_bytes(bytes).ok_or(SourceError::TooLarge { bytes, limit: 1 << 30 })?;
        let frame = source.acquire(order)?;
        let span = source.span();
        // SAFETY: the source, which the value will own, keeps the run valid and gives it to nobody else until it gets
        // it back (contract of `ChunkSource`), which is in `drop`; of the span only the run is reached.
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

    /// The memory, to be read and written beside the device.
    #[inline]
    pub fn memory(&self) -> DmaMemory<'_> {
        self.memory
    }

    /// What the device is told.
    pub fn iova(&self) -> Iova {
        // No wrap: a source's addresses follow its memory linearly, and its end fits (contract of `ChunkSource`).
        Iova::new(self.source.iova().raw().wrapping_add(self.frame.offset()))
    }

    /// The same, with the length.
    pub fn segment(&self) -> Segment {
        Segment { iova: self.iova(), len: self.memory.len() as u64 }
    }

    /// Sets all bytes to 0.
    pub fn zero(&self) {
        // All of it is inside of it.
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
