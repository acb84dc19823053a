//! An arena as the place where a page pool's chunks come from: they can be taken from the device while still in use.

use super::{Arena, Inner, MappingPolicy, Run};
use pinfold_core::frame::{Frame, Order};
use pinfold_core::page_pool::{RevocableSource, RevokeError};

impl Inner {
    fn hide(&self, first: Frame, order: Order) -> Result<(), RevokeError> {
        let run = Run { first, frames: order.frames() };
        if self.mapping_policy == MappingPolicy::Whole {
            return Err(RevokeError::Permanent);
        }
        self.unexpose(run).map_err(|error| {
            // Asking again could seem to succeed, because there is nothing left to be cleared; but a flush that was not
            // seen to be over may never be.
            tracing::error!(first = %run.first, frames = run.frames, %error, "a chunk is kept for ever");
            self.quarantine(run);
            RevokeError::Unmap(error.to_string())
        })
    }
}

// SAFETY: `unexpose` is strict, and the run stays in use, so the zone gives it to nobody else, until `release_hidden`
// frees it; while anything is in use the region stays (`Inner::drop`). A run that could not be unmapped is in use for ever.
unsafe impl RevocableSource for Arena {
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
        self.inner().hide(frame, order)
    }
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        // It is not mapped any more: its frames go back, and that is all.
        self.inner().give_back(Run { first: frame, frames: order.frames() });
    }
}
