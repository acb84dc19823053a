//! Memory for rings and buffers, from a chunk source.

use super::error::Error;
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::frame::{Frame, Order};
use pinfold_core::mem::DmaMemory;

/// A run of frames that was taken from a source. It has no `Drop`: whether the controller is done with it is known
/// to its owner alone, who calls [`release`](Self::release) or lets it leak.
#[derive(Debug)]
pub(super) struct Span {
    frame: Frame,
    order: Order,
    pub(super) memory: DmaMemory,
    pub(super) iova: Iova,
}

impl Span {
    /// At least `bytes` bytes, all 0.
    pub(super) fn take(source: &impl ChunkSource, bytes: usize, what: &'static str) -> Result<Self, Error> {
        let bad = || Error::BadSource { what };
        let order = Order::for_bytes(bytes as u64).ok_or_else(bad)?;
        let frame = source.acquire(order).map_err(|error| Error::Source { what, error })?;
        let parts = || {
            let offset = usize::try_from(frame.offset()).ok()?;
            let memory = source.memory().part(offset, bytes).ok()?;
            memory.fill(0, bytes, 0).ok()?;
            Some((memory, source.iova().checked_add(frame.offset())?))
        };
        match parts() {
            Some((memory, iova)) if iova.is_aligned(Frame::BYTES) => Ok(Self { frame, order, memory, iova }),
            _ => {
                source.release(frame, order);
                Err(bad())
            }
        }
    }

    /// Sets all bytes to 0.
    pub(super) fn clear(&self) {
        // `fill` fails only outside the memory, and this is exactly it.
        let _ = self.memory.fill(0, self.memory.len(), 0);
    }

    pub(super) fn release(self, source: &impl ChunkSource) {
        source.release(self.frame, self.order);
    }
}
