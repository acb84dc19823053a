use super::*;
use crate::frame::FrameError;
use crate::sync::Mutex;
use proptest::prelude::*;
use std::alloc::Layout;
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};

const IOVA: u64 = 0x12_3400_0000 << 4;

/// Frames of a piece of the heap, first fit; can be told to fail.
struct Heap {
    base: NonNull<u8>,
    layout: Layout,
    taken: Mutex<Vec<bool>>,
    /// How many more acquisitions succeed.
    left: AtomicUsize,
    acquired: AtomicUsize,
    released: AtomicUsize,
}

// SAFETY: the memory is owned, and reached by the tests only through `DmaMemory`.
unsafe impl Send for Heap {}
// SAFETY: as for `Send`.
unsafe impl Sync for Heap {}

impl Heap {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 2 << 20).unwrap();
        // SAFETY: the layout has bytes.
        let base = NonNull::new(unsafe { std::alloc::alloc(layout) }).unwrap();
        let taken = Mutex::new(vec![false; bytes / 4096]);
        let zero = || AtomicUsize::new(0);
        Self { base, layout, taken, left: AtomicUsize::new(usize::MAX), acquired: zero(), released: zero() }
    }

    fn memory(&self) -> DmaMemory<'_> {
        // SAFETY: owned, and the tests reach it only through `DmaMemory`.
        unsafe { DmaMemory::from_raw(self.base, self.layout.size()) }
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

// SAFETY: as the trait asks: first fit of whole, aligned runs, each given once until it is released.
unsafe impl ChunkSource for &Heap {
    fn span(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.base, self.layout.size())
    }
    fn iova(&self) -> Iova {
        Iova::new(IOVA)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let mut taken = self.taken.lock();
        let frames = order.frames() as usize;
        let failed = FrameError::Exhausted { order, frames: u32::try_from(taken.len()).unwrap() };
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
        assert!(!run.contains(&false), "given back what was not taken");
        run.fill(false);
        self.released.fetch_add(1, Ordering::Relaxed);
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
fn the_workload_that_began_it() {
    const N: usize = 373_959;
    let heap = Heap::new(64 << 20);
    let orders: [fn(&mut Vec<RawBlock>); 3] = [
        |_| (),
        |blocks| blocks.reverse(),
        |blocks| {
            let mut seed = 1usize;
            for i in (1..blocks.len()).rev() {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                blocks.swap(i, (seed >> 20) % (i + 1));
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
        // Half and half: free every second one and have them again.
        for block in blocks.iter_mut().step_by(2) {
            local.free_raw(*block).unwrap();
        }
        for block in blocks.iter_mut().step_by(2) {
            *block = local.alloc_raw().unwrap();
        }
        let stats = pool.report();
        assert_eq!((stats.in_use, stats.high_water), (N as u64, N as u64));
        assert!(stats.blocks < N as u64 + 2 * (2 << 20) / 128);
        for block in blocks {
            local.free_raw(block).unwrap();
        }
        drop(local);
        let stats = pool.report();
        assert_eq!((stats.in_use, stats.high_water, stats.in_depot), (0, N as u64, stats.blocks));
        pool.destroy().unwrap();
        assert!(!heap.taken.lock().contains(&true));
    }
}

#[test]
fn the_report_is_the_kernels_to_the_letter() {
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
    };
    assert_eq!(stats.to_string(), "poolinfo - 0.1\nchain pool       373959 386048  128 12064\n");
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 192);
    let _block = pool.alloc().unwrap();
    assert_eq!(pool.report().to_string(), "poolinfo - 0.1\ntest                1   21  192  1\n");
}

#[test]
fn wrong_frees_are_told_apart_and_change_nothing() {
    let heap = Heap::new(4 << 20);
    let other = Heap::new(2 << 20);
    let (pool, stranger) = (pool(&heap, 100), super::tests::pool(&other, 100));
    let neighbour = super::tests::pool(&heap, 100);
    let block = pool.alloc_raw().unwrap();
    let addr = block.as_ptr().as_ptr().addr();
    let before = pool.report();
    let foreign = |block| matches!(pool.free_raw(block), Err(FreeError::Foreign { .. }));
    assert!(foreign(stranger.alloc_raw().unwrap()));
    assert!(foreign(neighbour.alloc_raw().unwrap()));
    assert!(foreign(moved(block, -1)));
    assert!(foreign(moved(block, 4 << 20)));
    for bytes in [1, 99, 4000 + 50, 4095] {
        let error = pool.free_raw(moved(block, bytes)).unwrap_err();
        assert!(matches!(error, FreeError::Misaligned { blocks: 40, size: 100, .. }), "{error}");
    }
    let crooked = RawBlock::from_parts(block.as_ptr(), Iova::new(7));
    let expected = Iova::new(IOVA);
    assert_eq!(pool.free_raw(crooked), Err(FreeError::WrongIova { addr, iova: Iova::new(7), expected }));
    assert_eq!(pool.free_raw(moved(block, 100)), Err(FreeError::DoubleFree { addr: addr + 100 }));
    assert_eq!(pool.report(), before);
    assert!(pool.memory(moved(block, 100)).is_err());
    assert_eq!(pool.memory(block).unwrap().len(), 100);
    pool.free_raw(block).unwrap();
    assert_eq!(pool.free_raw(block), Err(FreeError::DoubleFree { addr }));
    // Through another owner, and while it sits in the first one's magazine, or in the depot.
    assert_eq!(pool.local().free_raw(block), Err(FreeError::DoubleFree { addr }));
    assert_eq!(pool.0.shrink(), 4096);
    assert!(foreign(block));
}

#[test]
fn a_fresh_chunk_is_handed_out_in_ascending_order_and_is_not_touched() {
    let heap = Heap::new(8 << 20);
    let memory = heap.memory();
    memory.fill(0, memory.len(), 0x5a).unwrap();
    let pool = DmaPool::new(&heap, "test", 192, 64, 4096).unwrap();
    let mut local = pool.local();
    let mut last = BTreeMap::new();
    for _ in 0..20_000 {
        let block = local.alloc_raw().unwrap();
        let chunk = pool.0.chunk_of(block).unwrap();
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

#[test]
fn late_device_writes_into_freed_blocks_hurt_nothing() {
    let heap = Heap::new(8 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let memory = heap.memory();
    for round in 0..4u8 {
        let blocks: Vec<_> = (0..30_000).map(|_| local.alloc_raw().unwrap()).collect();
        let distinct: HashSet<_> = blocks.iter().collect();
        assert_eq!(distinct.len(), blocks.len());
        for &block in &blocks {
            local.free_raw(block).unwrap();
        }
        memory.fill(0, memory.len(), round.wrapping_sub(1)).unwrap();
    }
    drop(local);
    pool.destroy().unwrap();
}

#[test]
fn running_out_of_memory_at_any_chunk_changes_nothing() {
    for n in 0..40 {
        let heap = Heap::new(16 << 20).fail_after(n);
        let pool = pool(&heap, 2000);
        let mut blocks = Vec::new();
        let error = loop {
            match pool.alloc_raw() {
                Ok(block) => blocks.push(block),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, AllocError::Source(SourceError::Frames(FrameError::Exhausted { .. }))));
        let stats = pool.report();
        assert_eq!((stats.in_use, stats.blocks), (blocks.len() as u64, blocks.len() as u64));
        assert_eq!(stats.chunks, heap.acquired.load(Ordering::Relaxed) as u64);
        assert_eq!(pool.alloc_raw(), Err(error));
        if let Some(block) = blocks.pop() {
            pool.free_raw(block).unwrap();
            blocks.push(pool.alloc_raw().unwrap());
        }
        pool.free_bulk(&blocks).unwrap();
        pool.destroy().unwrap();
        assert!(!heap.taken.lock().contains(&true));
    }
}

#[test]
fn a_busy_pool_is_given_back_and_a_dropped_one_keeps_what_is_out() {
    let heap = Heap::new(4 << 20);
    let busy = pool(&heap, 64);
    let (kept, freed) = (busy.alloc_raw().unwrap(), busy.alloc_raw().unwrap());
    busy.free_raw(freed).unwrap();
    let busy = busy.destroy().unwrap_err();
    assert_eq!((busy.blocks, busy.first), (1, kept));
    assert!(busy.to_string().contains("1 blocks out"));
    let pool = busy.pool;
    assert_eq!(pool.free_raw(freed), Err(FreeError::DoubleFree { addr: freed.as_ptr().as_ptr().addr() }));
    drop(pool);
    assert_eq!(heap.taken.lock().iter().filter(|&&taken| taken).count(), 1);
}

#[test]
fn blocks_free_themselves_and_go_home_from_anywhere() {
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
        let stats = pool.report();
        assert_eq!((stats.in_use, stats.late_double_frees), (0, 0));
        pool.destroy().unwrap();
    }
}

#[test]
fn handles_and_blocks_may_move_between_threads() {
    fn may_move<T: Send>(_: &T) {}
    fn may_be_shared<T: Sync>(_: &T) {}
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    may_be_shared(&pool);
    may_move(&pool.local());
    may_move(&pool.alloc().unwrap());
}

#[test]
fn shrink_gives_back_what_is_whole_and_the_pool_grows_again() {
    let heap = Heap::new(8 << 20);
    let pool = pool(&heap, 64);
    for _ in 0..3 {
        let blocks: Vec<_> = (0..60_000).map(|_| pool.alloc_raw().unwrap()).collect();
        let (kept, rest) = blocks.split_first().unwrap();
        pool.free_bulk(rest).unwrap();
        let before = pool.report();
        let bytes = pool.0.shrink();
        let stats = pool.report();
        assert_eq!(stats.chunks, 1);
        assert_eq!(stats.bytes + bytes, before.bytes);
        pool.free_raw(*kept).unwrap();
        assert_eq!(pool.0.shrink(), stats.bytes);
    }
    assert_eq!(heap.acquired.load(Ordering::Relaxed), heap.released.load(Ordering::Relaxed));
}

#[test]
fn bulk_calls_fill_holes_only_and_stop_at_the_first_wrong_one() {
    let heap = Heap::new(1 << 21);
    let pool = pool(&heap, 4096);
    let mut slots = [None; 32];
    slots[3] = Some(pool.alloc_raw().unwrap());
    let kept = slots[3];
    assert_eq!(pool.fill_zeroed(&mut slots), 32);
    assert_eq!(slots[3], kept);
    let mut blocks: Vec<_> = slots.iter().flatten().copied().collect();
    blocks[10] = moved(blocks[10], 8);
    let error = pool.free_bulk(&blocks).unwrap_err();
    assert!(matches!(error, BulkFreeError { freed: 10, error: FreeError::Misaligned { .. } }));
    assert_eq!(pool.report().in_use, 22);
    let mut all = vec![None; 600];
    assert_eq!(pool.local().fill(&mut all), 512 - 22);
}

#[derive(Clone, Debug)]
enum Step {
    Alloc(usize),
    Free(usize, prop::sample::Index),
    DoubleFree(usize, prop::sample::Index),
    Crooked(usize, prop::sample::Index, isize),
    Replace(usize),
    Shrink,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let who = 0usize..3;
    let index = || any::<prop::sample::Index>();
    let step = prop_oneof![
        10 => who.clone().prop_map(Step::Alloc),
        8 => (who.clone(), index()).prop_map(|(who, at)| Step::Free(who, at)),
        1 => (who.clone(), index()).prop_map(|(who, at)| Step::DoubleFree(who, at)),
        1 => (who.clone(), index(), -5000isize..5000).prop_map(|(who, at, by)| Step::Crooked(who, at, by)),
        1 => who.prop_map(Step::Replace),
        1 => Just(Step::Shrink),
    ];
    prop::collection::vec((step, 1usize..80), 40)
        .prop_map(|runs| runs.into_iter().flat_map(|(step, n)| std::iter::repeat_n(step, n)).collect())
}

proptest! {
    #[test]
    fn agrees_with_a_set_of_live_blocks(
        steps in steps(), size in 1usize..3000, align in 0u32..8, boundary in prop_oneof![Just(0u32), 9u32..22],
    ) {
        let heap = Heap::new(4 << 20);
        let align = if align == 0 { 0 } else { 1usize << align };
        let boundary = if boundary == 0 { 0 } else { 1usize << boundary };
        let Ok(pool) = DmaPool::new(&heap, "model", size, align, boundary) else { return Ok(()) };
        let size = pool.block_size() as u64;
        let mut locals = [pool.local(), pool.local()];
        let mut live: BTreeMap<u64, RawBlock> = BTreeMap::new();
        let mut freed: Vec<RawBlock> = Vec::new();
        let pick = |live: &BTreeMap<u64, RawBlock>, at: prop::sample::Index| {
            (!live.is_empty()).then(|| *live.values().nth(at.index(live.len())).unwrap())
        };
        for step in steps {
            let free = |locals: &mut [Local<'_, _>; 2], who: usize, block| match locals.get_mut(who) {
                Some(local) => local.free_raw(block),
                None => pool.free_raw(block),
            };
            match step {
                Step::Alloc(who) => {
                    let block = match locals.get_mut(who) { Some(local) => local.alloc_raw(), None => pool.alloc_raw() };
                    let Ok(block) = block else { continue };
                    let at = block.iova().raw();
                    prop_assert_eq!(at - IOVA, (block.as_ptr().as_ptr().addr() - heap.base.as_ptr().addr()) as u64);
                    prop_assert!(at.is_multiple_of(align.max(1) as u64));
                    prop_assert!(boundary == 0 || at / boundary as u64 == (at + size - 1) / boundary as u64);
                    prop_assert!(live.range(..at + size).next_back().is_none_or(|(&other, _)| other + size <= at));
                    live.insert(at, block);
                }
                Step::Free(who, at) => {
                    let Some(block) = pick(&live, at) else { continue };
                    prop_assert_eq!(free(&mut locals, who, block), Ok(()));
                    live.remove(&block.iova().raw());
                    freed.push(block);
                }
                Step::DoubleFree(who, at) => {
                    if freed.is_empty() { continue }
                    let block = freed[at.index(freed.len())];
                    if live.contains_key(&block.iova().raw()) { continue }
                    let error = free(&mut locals, who, block).unwrap_err();
                    let told = !matches!(error, FreeError::WrongIova { .. });
prop_assert!(told, "{}", error);
                }
                Step::Crooked(who, at, by) => {
                    let Some(block) = pick(&live, at) else { continue };
                    let block = moved(block, by);
                    if live.contains_key(&block.iova().raw()) { continue }
                    prop_assert!(free(&mut locals, who, block).is_err());
                }
                Step::Replace(who) => {
                    if let Some(local) = locals.get_mut(who) { *local = pool.local(); }
                }
                Step::Shrink => { pool.0.shrink(); }
            }
        }
        let stats = pool.report();
        prop_assert_eq!(stats.in_use, live.len() as u64);
        prop_assert_eq!(stats.in_use + stats.in_magazines + stats.in_rows + stats.in_depot, stats.blocks);
        prop_assert_eq!(stats.late_double_frees, 0);
        drop(locals);
        for block in live.values() {
            pool.free_raw(*block).unwrap();
        }
        prop_assert_eq!(pool.0.shrink(), stats.bytes);
        pool.destroy().unwrap();
    }
}

#[test]
fn stress_blocks_wander_between_eight_threads() {
    let heap = Heap::new(32 << 20);
    let pool = pool(&heap, 64);
    let rounds = if cfg!(miri) { 20 } else { 4_000 };
    let hands: [Mutex<Vec<RawBlock>>; 8] = Default::default();
    std::thread::scope(|scope| {
        for me in 0..8usize {
            let (pool, hands) = (&pool, &hands);
            scope.spawn(move || {
                let mut local = pool.local();
                let mut seed = me + 1;
                for round in 0..rounds {
                    seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let to = (seed >> 33) % 8;
                    for i in 0..(seed >> 40) % 20 {
                        let block = if i == 7 { pool.alloc_raw() } else { local.alloc_raw() }.unwrap();
                        let memory = pool.memory(block).unwrap();
                        memory.write_u64(0, block.iova().raw()).unwrap();
                        hands[to].lock().push(block);
                    }
                    let mine = std::mem::take(&mut *hands[me].lock());
                    for (i, block) in mine.into_iter().enumerate() {
                        let memory = pool.memory(block).unwrap();
                        assert_eq!(memory.read_u64(0), Ok(block.iova().raw()));
                        memory.write_u64(0, 0).unwrap();
                        if i % 16 == 3 { pool.free_raw(block) } else { local.free_raw(block) }.unwrap();
                    }
                    if round % 1000 == 999 {
                        local = pool.local();
                        pool.0.shrink();
                    }
                }
            });
        }
    });
    let rest: Vec<_> = hands.iter().flat_map(|hand| std::mem::take(&mut *hand.lock())).collect();
    let stats = pool.report();
    assert_eq!((stats.in_use, stats.late_double_frees), (rest.len() as u64, 0));
    pool.free_bulk(&rest).unwrap();
    pool.destroy().unwrap();
}

#[test]
fn stress_of_two_frees_of_one_block_one_counts() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let turn = AtomicUsize::new(0);
    let shared: Mutex<Vec<RawBlock>> = Mutex::default();
    let rounds: usize = if cfg!(miri) { 20 } else { 3_000 };
    let freed = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let mut local = pool.local();
        scope.spawn(|| {
            let mut local = pool.local();
            for round in 0..rounds {
                while turn.load(Ordering::Acquire) < 2 * round + 1 {
                    std::hint::spin_loop();
                }
                let blocks = shared.lock().clone();
                let ok = blocks.iter().rev().filter(|&&block| local.free_raw(block).is_ok()).count();
                freed.fetch_add(ok, Ordering::Relaxed);
                turn.store(2 * round + 2, Ordering::Release);
            }
        });
        for round in 0..rounds {
            let blocks: Vec<_> = (0..50).map(|_| local.alloc_raw().unwrap()).collect();
            assert_eq!(blocks.iter().collect::<HashSet<_>>().len(), 50);
            *shared.lock() = blocks.clone();
            turn.store(2 * round + 1, Ordering::Release);
            let ok = blocks.iter().filter(|&&block| local.free_raw(block).is_ok()).count();
            freed.fetch_add(ok, Ordering::Relaxed);
            while turn.load(Ordering::Acquire) < 2 * round + 2 {
                std::hint::spin_loop();
            }
        }
    });
    // Rows in the depot have posts that are collected when they are next lent.
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    let stats = pool.report();
    assert_eq!(stats.in_use, stats.blocks);
    assert_eq!(stats.late_double_frees + rounds as u64 * 50, freed.load(Ordering::Relaxed) as u64);
    pool.free_bulk(&all).unwrap();
    pool.destroy().unwrap();
}

/// Read-modify-writes an operation: none while blocks go to and fro, and rows change hands for 64 blocks at a time.
#[cfg(feature = "count-rmw")]
#[test]
fn hot_paths_share_nothing() {
    use crate::sync::{rmw_count, rmw_reset};
    const N: u32 = 200_000;
    let heap = Heap::new(64 << 20);
    let pool = pool(&heap, 128);
    let mut local = pool.local();
    let first = local.alloc_raw().unwrap();
    local.free_raw(first).unwrap();
    rmw_reset();
    for _ in 0..N {
        let block = local.alloc_raw().unwrap();
        local.free_raw(block).unwrap();
    }
    assert_eq!(rmw_count(), 0);
    let blocks: Vec<_> = (0..N).map(|_| local.alloc_raw().unwrap()).collect();
    for block in blocks {
        local.free_raw(block).unwrap();
    }
    let an_operation = rmw_count() as f64 / f64::from(2 * N);
    assert!(an_operation < 0.02, "{an_operation}");
}
