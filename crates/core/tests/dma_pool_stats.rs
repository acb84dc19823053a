//! The metadata of a DMA pool, counted at the global allocator: per block, for ten million live
//! ones, and after many chunks; that a free allocates nothing; and an allocator that fails.
//!
//! The blocks' memory is never touched, so ten million of them take only address space;
//! `PINFOLD_LARGE=1` enables this in a debug build too.

#![expect(clippy::unwrap_used, reason = "a test")]

use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{
    AllocError, ChunkSource, CreateError, DmaPool, RangeError, SourceError,
};
use pinfold_core::frame::{Frame, FrameError, Order};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

struct Counting;

// Of the thread, since the one that runs the tests allocates at any time.
thread_local! {
    static BYTES: Cell<usize> = const { Cell::new(0) };
    static CALLS: Cell<usize> = const { Cell::new(0) };
    /// Allocations of at least this many bytes fail, after as many as this.
    static FAILS: Cell<(usize, usize)> = const { Cell::new((usize::MAX, 0)) };
}

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (from, left) = FAILS.get();
        if layout.size() >= from {
            FAILS.set((from, left.wrapping_sub(1)));
            if left == 0 {
                return std::ptr::null_mut();
            }
        }
        BYTES.set(BYTES.get().wrapping_add(layout.size()));
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get().wrapping_sub(layout.size()));
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
    let before = BYTES.get();
    let pool = DmaPool::builder("many").block(64).build(&source).unwrap();
    let mut local = pool.local();
    let half = blocks / 2;
    assert_eq!(local.fill(&mut slots[..half]), half);
    for slot in &mut slots[half..] {
        *slot = Some(local.alloc_raw().unwrap());
    }
    let kept = BYTES.get() - before;
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
        kept.push(BYTES.get());
    }
    // The last rounds do what the first ten did.
    let (first, last) = (kept[9], kept[39]);
    assert!(last <= first + 16_384, "{first} bytes after 10 rounds, {last} after 40");
}

/// A free never allocates memory, whoever frees what others allocated, before and after a shrink.
fn frees_allocate_nothing() {
    let source = Bump::new(16 << 20);
    let pool = DmaPool::builder("frees").block(64).build(&source).unwrap();
    let base = BYTES.get();
    let (mut a, mut b) = (pool.local(), pool.local());
    let owners = BYTES.get() - base;
    let mut blocks: Vec<_> = (0..200_000).map(|_| a.alloc_raw().unwrap()).collect();
    let mut free = |pool: &DmaPool, blocks: &[_]| {
        let calls = CALLS.get();
        // In an order in which no chunk's blocks stay together.
        for at in 0..7 {
            for &block in blocks.iter().skip(at).step_by(7) {
                if at % 2 == 0 { b.free_raw(block).unwrap() } else { pool.free_raw(block).unwrap() }
            }
        }
        b.flush();
        assert_eq!(CALLS.get(), calls, "a free allocated memory");
    };
    let kept = blocks.split_off(100_000);
    free(&pool, &blocks);
    a.flush();
    assert!(pool.shrink() > 0);
    assert!(pool.shrink() > 0 || pool.stats().cached == 0);
    free(&pool, &kept);
    drop((a, b));
    pool.shrink();
    assert_eq!(pool.stats().blocks, 0);
    // The remaining bytes are the states of the units and the tables that lead to them.
    let units = 16 << 20 >> 21;
    let left = BYTES.get() - base - blocks.capacity() * 16 - kept.capacity() * 16;
    let most = units * ((2 << 20) / 64 + 1_024) + 8_192;
    assert!(left <= most, "{left} bytes, {owners} of them of owners; {most} allowed");
}

/// Metadata in proportion to the length of a range is allocated completely or not at all.
fn a_range_that_has_no_memory_is_refused() {
    let memory = Bump::new(256 << 20);
    let range = memory.span();
    let pool = DmaPool::builder("ranges").block(64).build_empty().unwrap();
    let mut refused = 0;
    let before = BYTES.get();
    let added = loop {
        FAILS.set((512, refused));
        // SAFETY: nothing uses the memory, which outlives the pool.
        let added = unsafe { pool.add_range(range, Iova::new(0)) };
        FAILS.set((usize::MAX, 0));
        match added {
            Ok(added) => break added,
            Err(error) => {
                assert_eq!(error, RangeError::NoMemory { len: 256 << 20, size: 64 });
                assert_eq!((pool.stats().blocks, pool.stats().chunks), (0, 0));
                // The lists of chunks may have room for them already.
                let kept = BYTES.get() - before;
                assert!(kept <= 32 << 10, "{kept} bytes are kept after {refused} allocations");
                refused += 1;
            }
        }
    };
    // The states of 128 units, and the lists and tables.
    assert!(refused > 128 + 4, "{refused}");
    assert_eq!((added, pool.stats().chunks), ((256 << 20) / 64, 128));
    let mut local = pool.local();
    let blocks: Vec<_> = (0..100).map(|_| local.alloc().unwrap()).collect();
    local.free_many(blocks);
}

/// A chunk whose states cannot be allocated is released.
fn a_chunk_that_has_no_memory_is_released() {
    let source = Bump::new(4 << 20);
    let pool = DmaPool::builder("chunk").block(64).build(&source).unwrap();
    for left in [0, 1] {
        FAILS.set((16 << 10, left));
        let refused = pool.alloc();
        FAILS.set((usize::MAX, 0));
        assert_eq!(refused.unwrap_err(), AllocError::NoMemory { bytes: 4096, size: 64 });
        assert_eq!((pool.stats().blocks, source.out.load(Ordering::Relaxed)), (0, 0));
    }
    drop(pool.alloc().unwrap());
    let long = Bump::new(4 << 30);
    FAILS.set((16 << 10, 0));
    let refused = DmaPool::builder("span").block(64).build(&long);
    FAILS.set((usize::MAX, 0));
    assert_eq!(refused.unwrap_err(), CreateError::NoMemory { len: 4 << 30 });
}

/// A state byte and a place in a magazine for each block; the rest is for units that are partly
/// used.
#[test]
fn metadata_is_at_most_six_bytes_per_block_of_sixty_four() {
    metadata_after_chunks_of_all_orders();
    frees_allocate_nothing();
    a_range_that_has_no_memory_is_refused();
    a_chunk_that_has_no_memory_is_released();
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
