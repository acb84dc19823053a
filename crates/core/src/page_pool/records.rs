//! The state of each page, in a table that the pool owns: never in the memory, which a device can
//! write.
//!
//! # Writers
//!
//! While a page is free or allocated raw, only the consumer writes its record. While a
//! [`Page`](super::Page) owns it, that owner may write its tag; holders of fragments count their
//! shares. A raw free from another thread writes `remote_freed` only: the consumer decides whether
//! it is valid by comparing the *generation* of the free with the page's. A second free can
//! therefore neither affect a later holder nor be counted twice, and the ring's is the only
//! read-modify-write of the path.

use crate::dma_pool::list;
use crate::frame::Frame;
use crate::sync::{AtomicPtr, AtomicU32, Ordering};
use alloc::boxed::Box;
use alloc::collections::TryReserveError;
use core::ptr::{NonNull, null_mut};

/// log2 of the number of frames in a region: 2 MiB, or a few frames under the model checker.
pub(super) const REGION_SHIFT: u32 = if cfg!(loom) { 2 } else { 9 };
/// The number of frames in a region.
pub(super) const REGION_FRAMES: usize = 1 << REGION_SHIFT;

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// No page of the pool starts at this frame.
    Absent,
    /// In the magazine or never allocated. (A page that its owner has freed stays `Owned` while it
    /// is in the ring.)
    Free,
    /// Held by a `Page` or by fragments.
    Owned,
    /// Allocated raw.
    Raw,
    /// Returned to a pool that has been taken down.
    Returned,
}

/// The record of one frame: 16 bytes for each 4096.
#[derive(Debug)]
pub(super) struct PageRecord {
    /// The state in the low byte, the holder's tag above.
    word: AtomicU32,
    /// The number of raw allocations of the page, modulo 2^32. Before it wraps, the consumer takes
    /// all entries out of the ring and the spill list, so that none has the generation of an
    /// allocation 2^32 later.
    generation: AtomicU32,
    /// The generation of a raw free by a thread other than the consumer's. Every allocation makes
    /// it differ from the new generation, so that no free of 2^32 allocations ago is taken for one
    /// of the current.
    remote_freed: AtomicU32,
    /// The page's shares held by fragments, and the rest of the bias (see `fragment`).
    shares: AtomicU32,
}

impl PageRecord {
    fn new() -> Self {
        let zero = || AtomicU32::new(0);
        Self { word: zero(), generation: zero(), remote_freed: zero(), shares: zero() }
    }

    #[inline(always)]
    pub(super) fn state(&self) -> State {
        match self.word.load(Ordering::Relaxed) & 0xff {
            0 => State::Absent,
            1 => State::Free,
            2 => State::Owned,
            3 => State::Raw,
            _ => State::Returned,
        }
    }

    pub(super) fn tag(&self) -> u32 {
        self.word.load(Ordering::Relaxed) >> 8
    }

    #[inline(always)]
    pub(super) fn set_free(&self) {
        self.word.store(1, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn set_owned(&self, tag: u32) {
        self.word.store(2 | tag << 8, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn set_raw(&self, tag: u32) {
        let before = self.generation();
        self.remote_freed.store(before, Ordering::Relaxed);
        self.generation.store(before.wrapping_add(1), Ordering::Relaxed);
        self.word.store(3 | tag << 8, Ordering::Relaxed);
    }

    /// Sets the generation, as that number of raw allocations would.
    #[cfg(all(test, not(loom)))]
    pub(super) fn set_generation(&self, generation: u32) {
        self.generation.store(generation, Ordering::Relaxed);
    }

    pub(super) fn set_returned(&self) {
        self.word.store(4, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Returns whether the next raw allocation starts the generations again.
    #[inline(always)]
    pub(super) fn is_last_generation(&self) -> bool {
        self.generation() == u32::MAX
    }

    /// Returns whether a raw free of the current generation is in the ring or the spill list.
    #[inline(always)]
    pub(super) fn is_remote_freed(&self) -> bool {
        self.remote_freed.load(Ordering::Relaxed) == self.generation()
    }

    #[inline(always)]
    pub(super) fn remote_free(&self, generation: u32) {
        self.remote_freed.store(generation, Ordering::Relaxed);
    }

    /// Returns the count of the page's shares.
    #[inline(always)]
    pub(super) fn shares(&self) -> &AtomicU32 {
        &self.shares
    }
}

/// The page that fragments are cut from.
#[derive(Clone, Copy)]
pub(super) struct OpenPage {
    pub(super) frame: u32,
    /// The offset of the next fragment in bytes.
    pub(super) at: usize,
    /// The number of fragments cut.
    pub(super) cut: u32,
}

/// The records of 2 MiB of the span.
struct Region([PageRecord; REGION_FRAMES]);

impl Region {
    /// Allocates one, which has the layout of a `Box<Region>`.
    fn leak() -> Result<*mut Self, TryReserveError> {
        let one = list(1, |_| Self(core::array::from_fn(|_| PageRecord::new())))?;
        Ok(Box::into_raw(one.into_boxed_slice()).cast())
    }
}

/// Maps a frame's number to its record. The consumer adds regions; any thread looks them up.
pub(super) struct Directory(Box<[AtomicPtr<Region>]>);

impl Directory {
    /// Creates the directory of this many [`regions`](Self::regions), unless there is no memory for
    /// it.
    pub(super) fn new(regions: usize) -> Result<Self, TryReserveError> {
        Ok(Self(list(regions, |_| AtomicPtr::new(null_mut()))?.into()))
    }

    /// Returns how many regions have the frames below `frames`.
    pub(super) fn regions(frames: u64) -> usize {
        usize::try_from(frames.div_ceil(REGION_FRAMES as u64)).unwrap_or(usize::MAX)
    }

    /// Returns the size of a directory in bytes: 8 for each region.
    pub(super) fn bytes(regions: usize) -> usize {
        regions.saturating_mul(size_of::<AtomicPtr<Region>>())
    }

    /// Returns the record of a frame, if the pool has had a chunk in its region. Lock-free.
    #[inline(always)]
    pub(super) fn record(&self, frame: u32) -> Option<&PageRecord> {
        let region = self.0.get((frame >> REGION_SHIFT) as usize)?.load(Ordering::Acquire);
        // SAFETY: null, or a pointer from `Region::leak` that only the directory's drop frees,
        // which the borrow of `self` excludes; accessed by shared references only. The acquire
        // pairs with the release in `make_room`.
        let region = unsafe { region.as_ref() }?;
        Some(&region.0[frame as usize & (REGION_FRAMES - 1)])
    }

    /// Allocates the records of these frames; those that it has are kept where there is no memory
    /// for the others. Only the consumer calls it, so no other thread makes the same region.
    pub(super) fn make_room(&self, first: Frame, frames: u32) -> Result<(), TryReserveError> {
        let last = first.index() + (frames - 1);
        for at in (first.index() >> REGION_SHIFT)..=(last >> REGION_SHIFT) {
            let Some(slot) = self.0.get(at as usize) else { break };
            if slot.load(Ordering::Relaxed).is_null() {
                slot.store(Region::leak()?, Ordering::Release);
            }
        }
        Ok(())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        for slot in &self.0 {
            if let Some(region) = NonNull::new(slot.load(Ordering::Relaxed)) {
                // SAFETY: from `Region::leak` in `make_room`: a box of one region, whose layout is
                // the region's. `&mut self` excludes borrows of it.
                drop(unsafe { Box::from_raw(region.as_ptr()) });
            }
        }
    }
}
