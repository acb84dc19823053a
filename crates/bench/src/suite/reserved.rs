//! Memory that need not exist: the source of pools whose blocks are not accessed.
#![expect(unsafe_code, reason = "a source guarantees that its chunks are the caller's alone")]

use crate::error::BenchError;
use crate::policy::Memory;
use crate::suite::handle::Rng;
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::frame::{Frame, FrameError, Order, Zone};
use std::ptr::NonNull;
use std::sync::Arc;

/// A zone, and as many bytes of address space. Pages take no memory before they are accessed.
#[derive(Debug)]
pub(super) struct Reserved {
    zone: Zone,
    memory: Arc<Memory>,
}

impl Reserved {
    /// Reserves `bytes`, rounded up to 2 MiB; all frames are free.
    pub(super) fn new(bytes: usize) -> Result<Self, BenchError> {
        let memory = Memory::new(bytes)?;
        let frames = u32::try_from(memory.whole().len() / Frame::BYTES).unwrap_or(u32::MAX);
        Ok(Self { zone: Zone::new(frames)?, memory })
    }

    /// Returns its zone.
    pub(super) fn zone(&self) -> &Zone {
        &self.zone
    }
}

// SAFETY: the range of addresses is fixed and stays mapped while the value lives. The zone has a
// frame for each 4 KiB of it, and allocates aligned runs, none of them twice before it is freed. No
// reference into the memory is ever made.
unsafe impl ChunkSource for Reserved {
    fn span(&self) -> NonNull<[u8]> {
        let memory = self.memory.dma();
        NonNull::slice_from_raw_parts(memory.as_ptr(), memory.len())
    }
    fn iova(&self) -> Iova {
        Iova::new(1 << 40)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        Ok(self.zone.alloc(order)?)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        let freed = self.zone.free(frame, order);
        debug_assert_eq!(freed, Ok(()));
    }
}

/// Allocates all frames of a zone that is free.
pub(super) fn fill(zone: &Zone) -> Result<(), FrameError> {
    (0..zone.frames() / Order::HUGE.frames()).try_for_each(|_| zone.alloc(Order::HUGE).map(drop))
}

/// Frees `count` frames at random of a zone that is full.
pub(super) fn free_at_random(zone: &Zone, count: u32) -> Result<(), FrameError> {
    let mut rng = Rng::new();
    let mut left = count;
    while left > 0 {
        let index = rng.below(zone.frames() as usize);
        let Some(frame) = u32::try_from(index).ok().and_then(Frame::new) else { continue };
        match zone.free(frame, Order::PAGE) {
            Ok(()) => left -= 1,
            Err(FrameError::DoubleFree { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
