//! [`Marks`]: which regions owners keep.

use super::error::AlreadyFree;
use super::map::REGION;
use super::number::Frame;
use alloc::boxed::Box;
// Not those of `sync`: a mark orders nothing, see `Marks`.
use core::sync::atomic::{AtomicBool, Ordering};

/// Which regions of a zone are kept by any owner, so that whoever frees one again is refused.
///
/// A mark is written by the owner that keeps the region, and read by whoever frees a frame of it. A
/// rightful free happens after the alloc that removed the mark, so it never finds one; a wrong one
/// that runs beside the keeping may not find it.
#[derive(Debug)]
pub(super) struct Marks(Box<[AtomicBool]>);

impl Marks {
    /// Creates marks of which none is set, without touching their memory where the system provides
    /// zeroed memory.
    pub(super) fn new(regions: u32) -> Self {
        let marks = Box::<[AtomicBool]>::new_zeroed_slice(regions as usize);
        // SAFETY: all bytes are 0, as `new_zeroed_slice` promises, and that is an atomic `false`.
        Self(unsafe { marks.assume_init() })
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// Returns whether an owner keeps the region.
    #[inline(always)]
    pub(super) fn has(&self, region: u32) -> bool {
        self.0.get(region as usize).is_some_and(|mark| mark.load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, region: u32, kept: bool) {
        if let Some(mark) = self.0.get(region as usize) {
            mark.store(kept, Ordering::Relaxed);
        }
    }

    /// Refuses to free a run with a frame in a region that is kept.
    #[inline(always)]
    pub(super) fn refuse(&self, first: u32, run: u32) -> Result<(), AlreadyFree> {
        let mut regions = first / REGION..=first.saturating_add(run - 1) / REGION;
        match regions.find(|&region| self.has(region)) {
            Some(region) => Err(AlreadyFree(Frame::inside(first.max(region * REGION)))),
            None => Ok(()),
        }
    }
}
