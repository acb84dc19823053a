//! A source over the heap, shared by the tests: it checks every transition of a frame and fails on
//! request.

use super::*;
use crate::addr::Iova;
use crate::dma_pool::{ChunkSource, SourceError};
use crate::frame::{Frame, FrameError, Order};
use crate::mem::DmaMemory;
use crate::sync::Mutex;
use std::alloc::Layout;
use std::collections::{BTreeMap, HashSet};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const IOVA: u64 = 0x55_0000_0000;

/// The state of a frame of the heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    Free,
    /// Acquired, and reachable by the device.
    Mapped,
    /// Acquired, and hidden from the device.
    Hidden,
}

/// A part of the heap whose frames are allocated first fit.
struct Inner {
    base: NonNull<u8>,
    layout: Layout,
    frames: Mutex<Vec<Use>>,
    /// The number of free frames among them. Written with the lock held.
    free: AtomicUsize,
    /// The number of further acquisitions that succeed.
    left: AtomicUsize,
    largest: AtomicUsize,
    /// The number of calls of `hide` that succeed before one fails; later calls succeed.
    hides: AtomicUsize,
    /// Whether the failing call quarantines the chunk.
    quarantines: AtomicBool,
    /// The number of frames by which the returned runs are shifted out of alignment.
    shift: AtomicUsize,
}

// SAFETY: the memory is owned, and the tests access it only through `DmaMemory`.
unsafe impl Send for Inner {}
// SAFETY: as for `Send`.
unsafe impl Sync for Inner {}

#[derive(Clone)]
struct Heap(Arc<Inner>);

impl Heap {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 2 << 20).unwrap();
        // SAFETY: the layout has bytes.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).unwrap();
        Self(Arc::new(Inner {
            base,
            layout,
            frames: Mutex::new(vec![Use::Free; bytes / 4096]),
            free: AtomicUsize::new(bytes / 4096),
            left: AtomicUsize::new(usize::MAX),
            largest: AtomicUsize::new(usize::MAX),
            hides: AtomicUsize::new(usize::MAX),
            quarantines: AtomicBool::new(false),
            shift: AtomicUsize::new(0),
        }))
    }

    fn pool(&self, config: Config) -> PagePool {
        PagePool::new(self.clone(), "test", config).unwrap()
    }

    fn count(&self, what: Use) -> usize {
        self.0.frames.lock().iter().filter(|&&frame| frame == what).count()
    }

    fn set(&self, frame: Frame, order: Order, from: Use, to: Use) {
        let first = frame.index() as usize;
        let mut frames = self.0.frames.lock();
        let run = &mut frames[first..first + order.frames() as usize];
        assert!(run.iter().all(|&frame| frame == from), "{from:?} -> {to:?}: {run:?}");
        run.fill(to);
        let free = self.0.free.load(Ordering::Relaxed);
        let freed = if to == Use::Free { free + run.len() } else { free };
        self.0
            .free
            .store(if from == Use::Free { freed - run.len() } else { freed }, Ordering::Relaxed);
    }

    fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: from `alloc_zeroed` with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

// SAFETY: allocates whole, aligned runs, and none twice before it is released.
unsafe impl ChunkSource for Heap {
    fn span(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.0.base, self.0.layout.size())
    }
    fn iova(&self) -> Iova {
        Iova::new(IOVA)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let frames = order.frames() as usize;
        let first = {
            let taken = self.0.frames.lock();
            let left = self.0.left.load(Ordering::Relaxed);
            // Without a search where there are too few: the models spend most of their time with an
            // exhausted heap.
            let enough = frames <= self.0.free.load(Ordering::Relaxed);
            let may = enough && left > 0 && frames <= self.0.largest.load(Ordering::Relaxed);
            let run = |run: &[Use]| run.iter().all(|&frame| frame == Use::Free);
            let failed =
                FrameError::Exhausted { order, frames: u32::try_from(taken.len()).unwrap() };
            let at =
                may.then(|| taken.chunks_exact(frames).position(run)).flatten().ok_or(failed)?;
            self.0.left.store(left.saturating_sub(1), Ordering::Relaxed);
            let at = at * frames + self.0.shift.load(Ordering::Relaxed);
            Frame::new(u32::try_from(at).unwrap()).unwrap()
        };
        self.set(first, order, Use::Free, Use::Mapped);
        Ok(first)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        self.set(frame, order, Use::Mapped, Use::Free);
    }
}

// SAFETY: no device accesses the memory; only the state is recorded.
unsafe impl RevocableSource for Heap {
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
        let left = self.0.hides.load(Ordering::Relaxed);
        self.0.hides.store(left.wrapping_sub(1), Ordering::Relaxed);
        if left == 0 {
            let quarantines = self.0.quarantines.load(Ordering::Relaxed);
            return Err(if quarantines {
                RevokeError::Unmap("failed".into())
            } else {
                RevokeError::Permanent
            });
        }
        self.set(frame, order, Use::Mapped, Use::Hidden);
        Ok(())
    }
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        self.set(frame, order, Use::Hidden, Use::Free);
    }
}

mod basics;
mod faults;
mod model;
mod stress;
