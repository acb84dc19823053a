//! One owner's handle of an arena.

use super::error::AllocError;
use super::handle::ArenaMemory;
use super::state::{Run, State};
use crate::memory::buffer::Buffer;
use pinfold_core::frame::{Frame, Order, ZoneLocal};
use pinfold_core::share::Stock;
use std::fmt;

/// The most frames that are moved at once.
const BATCH: usize = 64;

/// One owner's handle of an arena, for buffers of one frame (4096 bytes): bulk calls, and a cache
/// of frames, so that allocating and freeing take no lock and no shared read-modify-write.
///
/// It keeps the arena. Cached frames are returned when it is dropped, and when the arena runs
/// short.
///
/// ```
/// use pinfold::{Arena, Buffer};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = Arena::builder().size(4 << 20).build_unmapped()?;
/// let mut local = memory.local(); // one per thread
/// let mut ring: [Option<Buffer>; 32] = [const { None }; 32];
/// assert_eq!(local.fill(&mut ring), 32); // a receive ring, filled at once
/// let received = ring[3].take().ok_or("empty")?;
/// assert_eq!(local.fill(&mut ring), 32); // only the hole is filled
/// local.free(received);
/// local.free_all(&mut ring);
/// # Ok(()) }
/// ```
pub struct ArenaLocal {
    frames: ZoneLocal,
    shares: Stock<State>,
}

impl ArenaMemory {
    /// Returns an owner's handle, for one thread of control. O(owners), and allocates its cache of
    /// at most 64 KiB.
    pub fn local(&self) -> ArenaLocal {
        ArenaLocal { frames: self.state().zone().local(), shares: self.share().stock() }
    }
}

impl ArenaLocal {
    /// Allocates a buffer of one frame. O(1) on average.
    ///
    /// # Errors
    /// [`AllocError::Exhausted`]; the cache has been returned then.
    pub fn alloc(&mut self) -> Result<Buffer, AllocError> {
        let frame = self.frames.alloc(Order::PAGE);
        frame
            .map(|frame| self.buffer(frame))
            .map_err(|error| self.shares.alloc_error(Frame::BYTES, error))
    }

    /// Fills the empty slots with buffers of one frame, and returns how many slots are full
    /// afterwards: fewer than all if the arena runs short. Slots that are full stay as they are.
    ///
    /// It stops at the zone's *low* watermark, and then tries one more frame, so that a small
    /// request does not fail while memory remains.
    pub fn fill(&mut self, slots: &mut [Option<Buffer>]) -> usize {
        let mut missing = slots.iter().filter(|slot| slot.is_none()).count();
        let mut empty = slots.iter_mut().filter(|slot| slot.is_none());
        while missing > 0 {
            let mut frames = [None; BATCH];
            let batch = frames.get_mut(..missing.min(BATCH)).unwrap_or_default();
            let filled = self.frames.fill(batch);
            for (frame, slot) in batch.iter_mut().filter_map(Option::take).zip(&mut empty) {
                *slot = Some(self.buffer(frame));
            }
            missing -= filled;
            if filled < batch.len() {
                break;
            }
        }
        self.shares.update_peak();
        slots.len() - missing
    }

    /// Frees a buffer: into the cache if it is of one frame and of this arena. O(1) on average.
    pub fn free(&mut self, buffer: Buffer) {
        if !std::ptr::eq(buffer.arena().state(), &*self.shares) {
            return; // dropped, which frees it in its own arena
        }
        let (arena, run) = buffer.into_parts();
        match run {
            Run { first, frames: 1 } => {
                if let Err(error) = self.frames.free(first, Order::PAGE) {
                    tracing::error!(%first, %error, "a frame could not be freed");
                }
            }
            run => arena.state().free(run),
        }
        self.shares.take_back(arena.into_share());
    }

    /// Frees the buffers in all slots, which are empty afterwards.
    pub fn free_all(&mut self, slots: &mut [Option<Buffer>]) {
        slots.iter_mut().filter_map(Option::take).for_each(|buffer| self.free(buffer));
    }

    /// Returns how many frames are cached.
    pub fn held(&self) -> u32 {
        self.frames.held()
    }

    fn buffer(&mut self, first: Frame) -> Buffer {
        Buffer::new(ArenaMemory::from_share(self.shares.issue()), Run { first, frames: 1 })
    }
}

impl fmt::Debug for ArenaLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaLocal").field("held", &self.held()).finish_non_exhaustive()
    }
}
