//! One owner's handle of an arena.

use super::AllocError;
use super::handle::ArenaMemory;
use super::state::{Run, State};
use crate::memory::buffer::Buffer;
use pinfold_core::frame::{Frame, Order, ZoneLocal};
use pinfold_core::share::Stock;
use std::fmt;
use std::ptr::NonNull;

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

    /// Allocates up to `count` buffers of one frame, and passes the memory of each to `each`, as
    /// [`Buffer::into_raw`] returns it. Returns how many there were, as [`fill`](Self::fill) does.
    /// For a caller that keeps only addresses, as a C interface does.
    ///
    /// If `each` panics, it owns the memory of its calls, that one included, and no more is
    /// allocated.
    pub fn fill_raw(&mut self, count: usize, mut each: impl FnMut(NonNull<u8>)) -> usize {
        let mut missing = count;
        while missing > 0 {
            let wanted = missing.min(BATCH);
            let mut batch = Batch { local: self, frames: [None; BATCH], passed: 0 };
            let filled = batch.fill(wanted);
            while let Some(memory) = batch.pass() {
                each(memory);
            }
            missing -= filled;
            if filled < wanted {
                break;
            }
        }
        self.shares.update_peak();
        count - missing
    }

    /// Frees a buffer of one frame by its address: into the cache. O(1) on average.
    ///
    /// # Safety
    /// As for [`Buffer::from_raw`]: `memory` is that of a buffer of one frame of this arena, which
    /// [`fill_raw`](Self::fill_raw) or [`Buffer::into_raw`] returned, and which has not become a
    /// buffer again or been freed since; no device reaches it except through mappings that last as
    /// long as the arena.
    #[inline]
    pub unsafe fn free_raw(&mut self, memory: NonNull<u8>) {
        let base = self.shares.region().memory().as_ptr();
        let offset = memory.addr().get().wrapping_sub(base.addr().get()) as u64;
        let frame = u32::try_from(offset / Frame::BYTES).ok().and_then(Frame::new);
        let freed = frame.map(|frame| self.frames.free(frame, Order::PAGE));
        if let Some(Err(error)) = freed {
            tracing::error!(?frame, %error, "a frame could not be freed");
        }
        // SAFETY: as the caller promises, the buffer's share was left counted for it.
        unsafe { self.shares.take_back_lent() };
    }

    fn buffer(&mut self, first: Frame) -> Buffer {
        Buffer::new(ArenaMemory::from_share(self.shares.issue()), Run { first, frames: 1 })
    }
}

/// Frames that are passed to a callback, one after another. It frees the rest on drop: the callback
/// may panic.
struct Batch<'l> {
    local: &'l mut ArenaLocal,
    frames: [Option<Frame>; BATCH],
    /// The number of frames passed.
    passed: usize,
}

impl Batch<'_> {
    fn fill(&mut self, wanted: usize) -> usize {
        self.local.frames.fill(self.frames.get_mut(..wanted).unwrap_or_default())
    }

    /// Returns the memory of the next frame, which keeps the arena from now on.
    fn pass(&mut self) -> Option<NonNull<u8>> {
        let frame = self.frames.get_mut(self.passed)?.take()?;
        self.passed += 1;
        self.local.shares.lend(1);
        let base = self.local.shares.region().memory().as_ptr();
        #[expect(clippy::cast_possible_truncation, reason = "less than the arena's length")]
        // SAFETY: a frame of the zone, which has as many as the region.
        Some(unsafe { base.add(frame.offset() as usize) })
    }
}

impl Drop for Batch<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.frames.get(self.passed).is_some_and(Option::is_some) {
            self.free_rest();
        }
    }
}

impl Batch<'_> {
    #[cold]
    fn free_rest(&mut self) {
        if let Err(error) = self.local.frames.free_bulk(&mut self.frames) {
            tracing::error!(%error, "frames could not be freed");
        }
    }
}

impl fmt::Debug for ArenaLocal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaLocal").field("held", &self.frames.held()).finish_non_exhaustive()
    }
}
