//! The metadata of a DMA pool per block, counted at the global allocator, and ten million live blocks.
//!
//! One test, so that nothing else allocates meanwhile. The blocks' memory is never touched, so ten million of them take only
//! address space; `PINFOLD_LARGE=1` enables this in a debug build too.

#![expect(clippy::unwrap_used, reason = "a test")]

use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, DmaPool, SourceError};
use pinfold_core::frame::{Frame, FrameError, Order};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;
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

/// Memory that is never touched, allocated in ascending order.
struct Bump {
    base: NonNull<u8>,
    layout: Layout,
    next: AtomicU32,
}

// SAFETY: a range of addresses that nothing accesses.
unsafe impl Send for Bump {}
// SAFETY: as for `Send`.
unsafe impl Sync for Bump {}

impl Bump {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 2 << 20).unwrap();
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { System.alloc(layout) }).unwrap();
        Self { base, layout, next: AtomicU32::new(0) }
    }
}

impl Drop for Bump {
    fn drop(&mut self) {
        // SAFETY: from `alloc` with this layout.
        unsafe { System.dealloc(self.base.as_ptr(), self.layout) };
    }
}

// SAFETY: runs are aligned to their size, and none is allocated twice.
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
        if first + order.frames() > frames {
            return Err(FrameError::Exhausted { order, frames }.into());
        }
        self.next.store(first + order.frames(), Ordering::Relaxed);
        Ok(Frame::new(first).unwrap())
    }
    unsafe fn release(&self, _: Frame, _: Order) {}
}

/// Allocates and frees blocks of 64 bytes; returns the bytes of metadata per block.
fn metadata_per_block(blocks: usize) -> f64 {
    let source = Bump::new((blocks * 64).next_multiple_of(2 << 20) + (8 << 20));
    let mut slots = vec![None; blocks];
    let before = BYTES.load(Ordering::Relaxed);
    let pool = DmaPool::new(&source, "many", 64, 0, 0).unwrap();
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
        // The pool itself is not on the heap.
        let own = (pool.metadata_bytes() - size_of_val(&pool)) as f64;
        assert!((own / kept as f64 - 1.0).abs() < 0.01, "{own} bytes by its own sizes, {kept} allocated");
    }
    let mut at: Vec<_> = slots.iter().flatten().map(|block| block.iova()).collect();
    at.sort_unstable();
    assert!(at.windows(2).all(|two| two[0] < two[1]), "no block twice");
    local.free_slots(&mut slots).unwrap();
    drop(local);
    assert_eq!((pool.stats().in_use, pool.stats().high_water), (0, blocks as u64));
    pool.destroy().unwrap();
    kept as f64 / stats.blocks as f64
}

#[test]
fn metadata_is_at_most_four_bytes_per_block_of_sixty_four() {
    for blocks in [100_000, 1_000_000] {
        let kept = metadata_per_block(blocks);
        assert!(kept <= 4.0, "{kept} bytes a block");
    }
    let large = std::env::var_os("PINFOLD_LARGE").is_some() || !cfg!(debug_assertions);
    if large {
        let kept = metadata_per_block(10_000_000);
        assert!(kept <= 2.1, "{kept} bytes a block");
        println!("ten million blocks: {kept:.3} bytes a block");
    } else {
        println!("left out: ten million blocks (PINFOLD_LARGE=1, or a release build)");
    }
}
