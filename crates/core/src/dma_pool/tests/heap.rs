//! A source of chunks over the heap. Its frames are allocated first fit; it fails on request.

use crate::addr::Iova;
use crate::dma_pool::{ChunkSource, RawBlock, SourceError};
use crate::frame::{Frame, FrameError, Order};
use crate::mem::DmaMemory;
use crate::sync::Mutex;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The start of the span as seen by the device.
pub(in crate::dma_pool) const IOVA: u64 = 0x1_2340_0000_0000;

pub(in crate::dma_pool) struct Heap {
    base: NonNull<u8>,
    layout: Layout,
    taken: Mutex<Vec<bool>>,
    /// The largest order that is not refused.
    pub(in crate::dma_pool) largest: AtomicUsize,
    /// The number of further acquisitions that succeed.
    pub(in crate::dma_pool) left: AtomicUsize,
    pub(in crate::dma_pool) acquired: AtomicUsize,
    pub(in crate::dma_pool) released: AtomicUsize,
}

// SAFETY: the memory is owned, and nothing here accesses it.
unsafe impl Send for Heap {}
// SAFETY: as for `Send`.
unsafe impl Sync for Heap {}

impl Heap {
    /// `bytes` is a multiple of a page. The span is aligned to 2 MiB, and its pages are not
    /// touched.
    pub(in crate::dma_pool) fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 2 << 20).unwrap();
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc(layout) }).unwrap();
        Self {
            base,
            layout,
            taken: Mutex::new(vec![false; bytes / 4096]),
            largest: AtomicUsize::new(18),
            left: AtomicUsize::new(usize::MAX),
            acquired: AtomicUsize::new(0),
            released: AtomicUsize::new(0),
        }
    }

    /// The memory of a block, whether it is allocated or not.
    pub(in crate::dma_pool) fn memory(&self, block: RawBlock, bytes: usize) -> DmaMemory<'_> {
        // SAFETY: in this heap, which is only accessed by `DmaMemory`.
        unsafe { DmaMemory::from_raw(block.as_ptr(), bytes) }
    }

    pub(in crate::dma_pool) fn start(&self) -> usize {
        self.base.as_ptr().addr()
    }

    pub(in crate::dma_pool) fn bytes(&self) -> usize {
        self.layout.size()
    }

    pub(in crate::dma_pool) fn frames_taken(&self) -> usize {
        self.taken.lock().iter().filter(|&&taken| taken).count()
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: from `alloc` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

// SAFETY: the span is one allocation; whole, aligned runs of it are allocated, and none twice
// before it is released.
unsafe impl ChunkSource for Heap {
    fn span(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.base, self.layout.size())
    }
    fn iova(&self) -> Iova {
        Iova::new(IOVA)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let mut taken = self.taken.lock();
        let frames = order.frames() as usize;
        let exhausted =
            FrameError::Exhausted { order, frames: u32::try_from(taken.len()).unwrap() };
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 || usize::from(order.get()) > self.largest.load(Ordering::Relaxed) {
            return Err(exhausted.into());
        }
        let free = taken.chunks_exact(frames).position(|run| !run.contains(&true));
        let first = free.ok_or(exhausted)? * frames;
        taken[first..first + frames].fill(true);
        self.left.store(left - 1, Ordering::Relaxed);
        self.acquired.fetch_add(1, Ordering::Relaxed);
        Ok(Frame::new(u32::try_from(first).unwrap()).unwrap())
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        let mut taken = self.taken.lock();
        let run = &mut taken[frame.index() as usize..][..order.frames() as usize];
        assert!(run.iter().all(|&taken| taken), "released twice");
        run.fill(false);
        self.released.fetch_add(1, Ordering::Relaxed);
    }
}
