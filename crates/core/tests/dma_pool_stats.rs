//! The metadata of a DMA pool, counted at the global allocator: per block, for ten million live
//! ones, and after many chunks.
//!
//! One test, so that nothing else allocates meanwhile. The blocks' memory is never touched, so ten
//! million of them take only address space; `PINFOLD_LARGE=1` enables this in a debug build too.

#![expect(clippy::unwrap_used, reason = "a test")]

use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, DmaPool, SourceError};
use pinfold_core::frame::{Frame, FrameError, Order};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Memory that is never touched. Runs are allocated in ascending order; when all are released it
/// starts again.
struct Bump {
    base: NonNull<u8>,
    layout: Layout,
    next: AtomicU32,
    out: AtomicU32,
    /// The largest order that is not refused.
    largest: AtomicU32,
}

// SAFETY: a range of addresses that nothing accesses.
unsafe impl Send for Bump {}
// SAFETY: as for `Send`.
unsafe impl Sync for Bump {}

impl Bump {
    fn new(bytes: usize) -> Arc<Self> {
        let layout = Layout::from_size_align(bytes, 2 << 20).unwrap();
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { System.alloc(layout) }).unwrap();
        let zero = || AtomicU32::new(0);
        Arc::new(Self { base, layout, next: zero(), out: zero(), largest: AtomicU32::new(18) })
    }
}

impl Drop for Bump {
    fn drop(&mut self) {
        // SAFETY: from `alloc` with this layout.
        unsafe { System.dealloc(self.base.as_ptr(), self.layout) };
    }
}

// SAFETY: one allocation; runs are aligned to their size, and none is allocated twice before all
// are released.
unsafe impl ChunkSource for Bump {
    fn span(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.base, self.layout.size())
    }
    fn iova(&self) -> Iova {
        Iova::new(1 << 40)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let frames = u32::try_from(self.layout.size() / 4096).unwrap();
        let first = self.next.load(Ordering::Relaxed).next_multiple_of(order.frames());
        if first + order.frames() > frames
            || u32::from(order.get()) > self.largest.load(Ordering::Relaxed)
        {
            return Err(FrameError::Exhausted { order, frames }.into());
        }
        self.next.store(first + order.frames(), Ordering::Relaxed);
        self.out.fetch_add(1, Ordering::Relaxed);
        Ok(Frame::new(first).unwrap())
    }
    unsafe fn release(&self, _: Frame, _: Order) {
        if self.out.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.next.store(0, Ordering::Relaxed);
        }
    }
}

/// Allocates and frees blocks of 64 bytes; returns the bytes of metadata per block.
fn metadata_per_block(blocks: usize) -> f64 {
    let source = Bump::new((blocks * 64).next_multiple_of(2 << 20) + (8 << 20));
    let mut slots = vec![None; blocks];
    let before = BYTES.load(Ordering::Relaxed);
    let pool = DmaPool::builder("many").block(64).build(&source).unwrap();
    let mut local = pool.local();
    let half = blocks / 2;
    assert_eq!(local.fill(&mut slots[..half]), half);
    for slot in &mut slots[half..] {
        *slot = Some(local.alloc_raw().unwrap());
    }
    let kept = BYTES.load(Ordering::Relaxed) - before;
    let stats = pool.stats();
    assert_eq!(stats.in_use, blocks as u64);
    #[cfg(feature = "bench-internals")]
    {
        let own = pool.metadata_bytes() as f64;
        assert!(
            (own / kept as f64 - 1.0).abs() < 0.01,
            "{own} bytes by its own sizes, {kept} allocated"
        );
    }
    let mut at: Vec<_> = slots.iter().flatten().map(|block| block.iova()).collect();
    at.sort_unstable();
    assert!(at.windows(2).all(|two| two[0] < two[1]), "no block twice");
    let blocks: Vec<_> = slots.into_iter().flatten().collect();
    local.free_bulk(&blocks).unwrap();
    drop(local);
    assert_eq!(pool.stats().in_use, 0);
    assert!(pool.stats().peak >= blocks.len() as u64);
    pool.destroy().unwrap();
    kept as f64 / stats.blocks as f64
}

/// Chunks of every order at every place: released chunks leave nothing behind that grows.
fn metadata_after_chunks_of_all_orders() {
    let source = Bump::new(4 << 20);
    let pool = DmaPool::builder("many").block(64).build(&source).unwrap();
    let mut blocks = Vec::with_capacity((4 << 20) / 64);
    let mut kept = Vec::with_capacity(40);
    for round in 0..40 {
        source.largest.store(round % 10, Ordering::Relaxed);
        blocks.extend(std::iter::from_fn(|| pool.alloc_raw().ok()));
        assert_eq!(blocks.len(), (4 << 20) / 64);
        blocks.drain(..).for_each(|block| pool.free_raw(block).unwrap());
        assert_eq!(pool.shrink(), 4 << 20);
        kept.push(BYTES.load(Ordering::Relaxed));
    }
    // The last rounds do what the first ten did.
    let (first, last) = (kept[9], kept[39]);
    assert!(last <= first + 16_384, "{first} bytes after 10 rounds, {last} after 40");
}

/// A state byte and a place in a magazine for each block; the rest is for units that are partly
/// used.
#[test]
fn metadata_is_at_most_six_bytes_per_block_of_sixty_four() {
    metadata_after_chunks_of_all_orders();
    for blocks in [100_000, 1_000_000] {
        let kept = metadata_per_block(blocks);
        assert!(kept <= 6.0, "{kept} bytes a block");
    }
    let large = std::env::var_os("PINFOLD_LARGE").is_some() || !cfg!(debug_assertions);
    if large {
        let kept = metadata_per_block(10_000_000);
        assert!(kept <= 5.2, "{kept} bytes a block");
        println!("ten million blocks: {kept:.3} bytes a block");
    } else {
        println!("left out: ten million blocks (PINFOLD_LARGE=1, or a release build)");
    }
}
