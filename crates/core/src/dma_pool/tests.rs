//! A source over the heap, and tests of ordinary use. The submodules have one subject each.

mod aside;
mod bulk;
mod cell;
mod debug;
mod directory;
mod faults;
mod giant;
mod growth;
mod hoard;
mod hooked;
mod idle;
mod lend;
mod limits;
mod lists;
mod mark;
mod mixed;
mod model;
mod notices;
mod owned;
mod places;
mod relief;
mod rows;
mod run;
mod shared;
mod shrink;
mod stash;
mod stress;
mod texts;
mod threads;
mod twice;

use super::*;
use crate::addr::Iova;
use crate::frame::{Frame, FrameError, Order};
use crate::mem::DmaMemory;
use crate::share::{Hold, Shared};
use crate::sync::Mutex;
use crate::testing::Random;
use std::alloc::Layout;
use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

const IOVA: u64 = 0x12_3400_0000 << 4;

/// A part of the heap whose frames are allocated first fit; fails on request.
struct Heap {
    base: NonNull<u8>,
    layout: Layout,
    taken: Mutex<Vec<bool>>,
    /// How many more acquisitions succeed.
    left: AtomicUsize,
    /// The only acquisition from now on that fails, counted from 1; 0 for none.
    fail_at: AtomicUsize,
    asked: AtomicUsize,
    acquired: AtomicUsize,
    released: AtomicUsize,
}

// SAFETY: the memory is owned, and the tests access it only through `DmaMemory`.
unsafe impl Send for Heap {}
// SAFETY: as for `Send`.
unsafe impl Sync for Heap {}

impl Heap {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 2 << 20).unwrap();
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { std::alloc::alloc(layout) }).unwrap();
        let taken = Mutex::new(vec![false; bytes / 4096]);
        let zero = || AtomicUsize::new(0);
        let left = AtomicUsize::new(usize::MAX);
        Self { base, layout, taken, left, fail_at: zero(), asked: zero(), acquired: zero(), released: zero() }
    }

    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: owned, and the tests access it only through `DmaMemory`.
        unsafe { DmaMemory::from_raw(self.base, self.layout.size()) }
    }

    /// Makes only the `n`-th acquisition from now fail.
    fn fail_at(&self, n: usize) {
        self.fail_at.store(n, Ordering::Relaxed);
    }

    fn frames_taken(&self) -> usize {
        self.taken.lock().iter().filter(|&&taken| taken).count()
    }

    fn exhausted(&self, order: Order) -> SourceError {
        let frames = u32::try_from(self.layout.size() / 4096).unwrap();
        FrameError::Exhausted { order, frames }.into()
    }

    /// Returns a source of the same memory from its second page on.
    fn page_aligned(&self) -> PageAligned<'_> {
        PageAligned(self)
    }

    fn fail_after(self, acquisitions: usize) -> Self {
        self.left.store(acquisitions, Ordering::Relaxed);
        self
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: from `alloc` with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

// SAFETY: allocates whole, aligned runs, and none twice before it is released.
unsafe impl ChunkSource for Heap {
    fn span(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.base, self.layout.size())
    }
    fn iova(&self) -> Iova {
        Iova::new(IOVA)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let mut taken = self.taken.lock();
        let frames = order.frames() as usize;
        let failed = self.exhausted(order);
        let fail_at = self.fail_at.load(Ordering::Relaxed);
        self.fail_at.store(fail_at.saturating_sub(1), Ordering::Relaxed);
        if fail_at == 1 {
            return Err(failed);
        }
        let left = self.left.load(Ordering::Relaxed);
        let free = taken.chunks_exact(frames).position(|run| !run.contains(&true)).filter(|_| left > 0);
        let first = free.ok_or(failed)? * frames;
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        self.acquired.fetch_add(1, Ordering::Relaxed);
        taken[first..first + frames].fill(true);
        Ok(Frame::new(u32::try_from(first).unwrap()).unwrap())
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        let first = frame.index() as usize;
        let mut taken = self.taken.lock();
        let run = &mut taken[first..first + order.frames() as usize];
        assert!(!run.contains(&false), "released a run that was not acquired");
        run.fill(false);
        self.released.fetch_add(1, Ordering::Relaxed);
    }
}

/// A heap without its first page, so that the span is aligned to one page only.
struct PageAligned<'h>(&'h Heap);

// SAFETY: allocates single pages of the heap, and none twice before it is released.
unsafe impl ChunkSource for PageAligned<'_> {
    fn span(&self) -> NonNull<[u8]> {
        let base = NonNull::new(self.0.base.as_ptr().wrapping_add(4096)).unwrap();
        NonNull::slice_from_raw_parts(base, self.0.layout.size() - 4096)
    }
    fn iova(&self) -> Iova {
        Iova::new(IOVA + 4096)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        assert_eq!(order, Order::PAGE);
        let mut frame = (&self.0).acquire(order)?;
        if frame.index() == 0 {
            frame = (&self.0).acquire(order)?;
        }
        Ok(Frame::new(frame.index() - 1).unwrap())
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the same contract.
        unsafe { (&self.0).release(Frame::new(frame.index() + 1).unwrap(), order) };
    }
}

fn pool(heap: &Heap, size: usize) -> DmaPool<&Heap> {
    DmaPool::new(heap, "test", size, 0, 0).unwrap()
}

fn moved(block: RawBlock, bytes: isize) -> RawBlock {
    let ptr = NonNull::new(block.as_ptr().as_ptr().wrapping_offset(bytes)).unwrap();
    RawBlock::from_parts(ptr, Iova::new(block.iova().raw().wrapping_add_signed(bytes as i64)))
}

#[test]
fn the_mpt3sas_workload() {
    const N: usize = 373_959;
    let heap = Heap::new(64 << 20);
    let orders: [fn(&mut Vec<RawBlock>); 3] = [
        |_| (),
        |blocks| blocks.reverse(),
        |blocks| {
            let mut random = Random::new(1);
            for i in (1..blocks.len()).rev() {
                blocks.swap(i, random.below(i + 1));
            }
        },
    ];
    for order in orders {
        let pool = DmaPool::new(&heap, "chain pool", 128, 128, 0).unwrap();
        let mut local = pool.local();
        let mut blocks: Vec<_> = (0..N).map(|_| local.alloc_raw().unwrap()).collect();
        let distinct: HashSet<_> = blocks.iter().map(|b| b.as_ptr()).collect();
        assert_eq!(distinct.len(), N);
        order(&mut blocks);
        // Free every second one and allocate them again.
        for block in blocks.iter_mut().step_by(2) {
            local.free_raw(*block).unwrap();
        }
        for block in blocks.iter_mut().step_by(2) {
            *block = local.alloc_raw().unwrap();
        }
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.high_water), (N as u64, N as u64));
        assert!(stats.blocks < N as u64 + 2 * (2 << 20) / 128);
        for block in blocks {
            local.free_raw(block).unwrap();
        }
        drop(local);
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.high_water, stats.in_depot), (0, N as u64, stats.blocks));
        pool.destroy().unwrap();
        assert!(!heap.taken.lock().contains(&true));
    }
}

#[test]
fn the_wide_table_has_a_column_for_each_number() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 192);
    let mut local = pool.local();
    let blocks: Vec<_> = (0..30).map(|_| local.alloc_raw().unwrap()).collect();
    local.free_bulk(&blocks[..10]).unwrap();
    assert!(pool.stats().in_magazines > 0);
    // A dropped owner has reported its counts.
    drop(local);
    let stats = pool.stats();
    let wide = stats.wide().to_string();
    let (header, line) = wide.trim_end().split_once('\n').unwrap();
    assert_eq!(header, WIDE_HEADER);
    assert_eq!(header.len(), line.len(), "{wide}");
    let columns: Vec<_> = line.split_whitespace().collect();
    assert_eq!(columns.len(), header.split_whitespace().count());
    let PoolStats { in_magazines, in_rows, in_depot, .. } = stats;
    assert_eq!(in_magazines + in_rows + in_depot, stats.blocks - 20);
    let numbers = [192, 20, 30, stats.blocks, in_magazines, in_rows, in_depot, 2, 0, 8192, 0, 0];
    assert_eq!(columns[1..], numbers.map(|number: u64| number.to_string()));
}

#[test]
fn the_report_is_the_kernels_byte_for_byte() {
    let stats = PoolStats {
        name: "chain pool".into(),
        block_bytes: 128,
        in_use: 373_959,
        high_water: 373_959,
        blocks: 386_048,
        in_magazines: 0,
        in_rows: 0,
        in_depot: 0,
        chunks: 12_064,
        free_chunks: 0,
        bytes: 0,
        late_double_frees: 0,
        damaged: 0,
    };
    assert_eq!(stats.to_string(), "poolinfo - 0.1\nchain pool       373959 386048  128 12064\n");
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 192);
    let _block = pool.alloc().unwrap();
    assert_eq!(pool.stats().to_string(), "poolinfo - 0.1\ntest                1   21  192  1\n");
}

#[test]
fn a_fresh_chunk_is_allocated_in_ascending_order_and_not_touched() {
    let heap = Heap::new(8 << 20);
    let memory = heap.memory();
    memory.fill(0, memory.len(), 0x5a).unwrap();
    let pool = DmaPool::new(&heap, "test", 192, 64, 4096).unwrap();
    let mut local = pool.local();
    let mut last = BTreeMap::new();
    for _ in 0..20_000 {
        let block = local.alloc_raw().unwrap();
        let chunk = pool.chunk_of(block).unwrap();
        let before = last.insert(chunk, block.iova());
        assert!(before.is_none_or(|before| before < block.iova()), "{before:?} then {block:?}");
    }
    for word in 0..memory.len() / 8 {
        assert_eq!(memory.read_u64(word * 8), Ok(0x5a5a_5a5a_5a5a_5a5a));
    }
    drop(local);
    let _ = pool.alloc_zeroed().map(|block| {
        let mut bytes = [1; 192];
        block.memory().copy_to_slice(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 192]);
    });
}

/// In both kinds of geometry. What an alloc does is the same in either case, so nothing else would tell.
#[test]
fn an_alloc_prefetches_the_eighth_block_on_only_where_the_pool_is_told_to() {
    for (size, boundary) in [(64, 0), (96, 512)] {
        for told in [false, true] {
            let heap = Heap::new(2 << 20);
            let pool = DmaPool::new(&heap, "prefetch", size, 0, boundary).unwrap();
            assert_eq!(pool.geometry.is_even(), boundary == 0);
            let pool = if told { pool.with_prefetch() } else { pool };
            let mut local = pool.local();
            let block = local.alloc_raw().unwrap();
            assert_eq!(block.addr(), heap.memory().addr());
            assert_eq!(local.owner.current.prefetches(&pool.geometry), told);
            let ahead = block.addr() + 8 * pool.block_size();
            assert_eq!(pool.geometry.ahead().map(|at| at.get()), told.then_some(ahead));
        }
    }
}

#[test]
fn dropped_blocks_return_to_their_pool_from_any_thread() {
    let heap = Heap::new(4 << 20);
    let (pool, other) = (pool(&heap, 64), super::tests::pool(&heap, 64));
    let mut local = pool.local();
    let a = local.alloc().unwrap();
    let b = local.alloc_zeroed().unwrap();
    let c = other.local().alloc().unwrap();
    assert_eq!(b.memory().read_u64(56), Ok(0));
    std::thread::scope(|scope| {
        scope.spawn(|| drop(a));
    });
    local.free(b);
    local.free(c);
    drop(local);
    for pool in [pool, other] {
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.late_double_frees), (0, 0));
        pool.destroy().unwrap();
    }
}

#[test]
fn handles_and_blocks_are_send_and_the_pool_is_sync() {
    fn is_send<T: Send>(_: &T) {}
    fn is_sync<T: Sync>(_: &T) {}
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    is_sync(&pool);
    is_send(&pool.local());
    is_send(&pool.alloc().unwrap());
}

#[test]
fn shrink_releases_free_chunks_and_the_pool_grows_again() {
    let heap = Heap::new(8 << 20);
    let pool = pool(&heap, 64);
    for _ in 0..3 {
        let blocks: Vec<_> = (0..60_000).map(|_| pool.alloc_raw().unwrap()).collect();
        let (kept, rest) = blocks.split_first().unwrap();
        pool.free_bulk(rest).unwrap();
        let before = pool.stats();
        let bytes = pool.shrink_shared();
        let stats = pool.stats();
        assert_eq!(stats.chunks, 1);
        assert_eq!(stats.bytes + bytes, before.bytes);
        pool.free_raw(*kept).unwrap();
        assert_eq!(pool.shrink_shared(), stats.bytes);
    }
    assert_eq!(heap.acquired.load(Ordering::Relaxed), heap.released.load(Ordering::Relaxed));
}

#[test]
fn bulk_calls_fill_empty_slots_only_and_stop_at_the_first_wrong_free() {
    let heap = Heap::new(1 << 21);
    let pool = pool(&heap, 4096);
    let mut slots = [None; 32];
    slots[3] = Some(pool.alloc_raw().unwrap());
    let kept = slots[3];
    assert_eq!(pool.fill(&mut slots), 32);
    assert_eq!(slots[3], kept);
    let mut blocks: Vec<_> = slots.iter().flatten().copied().collect();
    blocks[10] = moved(blocks[10], 8);
    let error = pool.free_bulk(&blocks).unwrap_err();
    assert!(matches!(error, BulkFreeError { freed: 10, error: FreeError::Misaligned { .. } }));
    assert_eq!(pool.stats().in_use, 22);
    let mut all = vec![None; 600];
    assert_eq!(pool.local().fill(&mut all), 512 - 22);
}
