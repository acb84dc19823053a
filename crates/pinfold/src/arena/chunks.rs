//! An arena as the place where a DMA pool's chunks come from.

use super::space::Place;
use super::{Arena, Inner, MappingPolicy, Run};
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::domain::{BackendError, DomainId, StaticMapping};
use pinfold_core::frame::{Frame, Order};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{MutexGuard, PoisonError};

impl Inner {
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let first = self.zone.alloc(order)?;
        self.note_peak();
        let run = Run { first, frames: order.frames() };
        match self.expose(run) {
            Ok(()) => Ok(first),
            Err(error) => {
                if error.stays_reachable() {
                    self.quarantine(run);
                } else {
                    self.give_back(run);
                }
                Err(SourceError::Map(error))
            }
        }
    }

    fn expose(&self, run: Run) -> Result<(), BackendError> {
        // The range of IOVAs is as long as the region, so a run always has its part of it.
        let (MappingPolicy::PerUse, Some(iova)) = (self.mapping_policy, self.iova_of(run)) else {
            return Ok(());
        };
        let Some(Place::PerUse(place)) = &self.place else { return Ok(()) };
        // SAFETY: the run is in use until `release` has unmapped it, and the region stays while anything is in use
        // (`Inner::drop`). The run is a chunk's and no buffer's, and references are lent into buffers only.
        let mapping = unsafe { self.space.map_at(place, iova, self.memory_of(run)) }?;
        self.chunks().insert(run.first.index(), mapping);
        Ok(())
    }

    /// Takes a chunk from the device. What is not mapped (it was taken before) can not be taken.
    pub(super) fn unexpose(&self, run: Run) -> Result<(), BackendError> {
        let mapping = self.chunks().remove(&run.first.index());
        match mapping {
            Some(mapping) => self.space.unmap(mapping),
            None => Err(BackendError::NotRevoked),
        }
    }

    /// A panic while it was held left the map whole.
    fn chunks(&self) -> MutexGuard<'_, BTreeMap<u32, StaticMapping>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release(&self, first: Frame, order: Order) {
        let run = Run { first, frames: order.frames() };
        let hidden = match self.mapping_policy {
            MappingPolicy::PerUse => self.unexpose(run),
            MappingPolicy::Whole => Ok(()),
        };
        match hidden {
            Ok(()) => self.give_back(run),
            Err(error) => {
                tracing::error!(first = %run.first, frames = run.frames, %error, "a chunk is kept for ever");
                self.quarantine(run);
            }
        }
    }
}

// SAFETY: the region and its range of IOVAs are fixed when the arena is built and stay while a handle is held. A run
// comes from the zone, which gives it to nobody else before `release` frees it; it lies in the region, because the zone
// has as many frames. References into an arena are lent by a `Buffer` only, into the run that it owns.
unsafe impl ChunkSource for Arena {
    fn span(&self) -> NonNull<[u8]> {
        let memory = self.inner().region.memory();
        NonNull::slice_from_raw_parts(memory.as_ptr(), memory.len())
    }
    fn iova(&self) -> Iova {
        self.inner().iova.start()
    }
    fn domain(&self) -> Option<DomainId> {
        self.inner().space.domain()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.inner().acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        self.inner().release(frame, order);
    }
}
