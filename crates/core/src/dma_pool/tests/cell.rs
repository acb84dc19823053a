//! Blocks that return to their [`LocalCell`], and frees of many [`Block`]s.

mod ends;
mod exact;
mod many;
mod reentrant;

use super::*;
use proptest::prelude::*;
use std::sync::Arc;

fn shared(size: usize) -> (Shared<DmaPool<Arc<Heap>>>, Arc<Heap>) {
    let heap = Arc::new(Heap::new(8 << 20));
    (Shared::new(DmaPool::new(Arc::clone(&heap), "test", size, 0, 0).unwrap()), heap)
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Alloc,
    AllocZeroed,
    Drop,
    IntoRaw,
    IntoBlock,
    FreeRaw,
    DropBlock,
    FreeBlock,
    FreeBlocks,
    FreeBlocksByPool,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => Just(Op::Alloc),
        1 => Just(Op::AllocZeroed),
        3 => Just(Op::Drop),
        1 => Just(Op::IntoRaw),
        2 => Just(Op::IntoBlock),
        1 => Just(Op::FreeRaw),
        1 => Just(Op::DropBlock),
        1 => Just(Op::FreeBlock),
        1 => Just(Op::FreeBlocks),
        1 => Just(Op::FreeBlocksByPool),
    ]
}

/// The blocks that a test holds, by the way in which they are freed.
struct Held<'l, S: ChunkSource, H: Hold<Target = DmaPool<S>>> {
    cell: &'l LocalCell<S, H>,
    local: Vec<LocalBlock<'l, S, H>>,
    sendable: Vec<Block<S, H::Item>>,
    raw: Vec<RawBlock>,
}

/// Removes the element that a number picks, if there is one.
fn pick<T>(from: &mut Vec<T>, at: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(at % from.len()))
}

impl<S: ChunkSource, H: Hold<Target = DmaPool<S>>> Held<'_, S, H> {
    fn apply(&mut self, op: Op, at: usize) {
        let cell = self.cell;
        match op {
            Op::Alloc => self.local.push(cell.alloc().unwrap()),
            Op::AllocZeroed => {
                let block = cell.alloc_zeroed().unwrap();
                assert_eq!(block.memory().read_u64(0), Ok(0));
                self.local.push(block);
            }
            Op::Drop => drop(pick(&mut self.local, at)),
            Op::IntoRaw => self.raw.extend(pick(&mut self.local, at).map(LocalBlock::into_raw)),
            Op::IntoBlock => self.sendable.extend(pick(&mut self.local, at).map(LocalBlock::into_block)),
            Op::FreeRaw => _ = pick(&mut self.raw, at).map(|raw| cell.pool().free_raw(raw).unwrap()),
            Op::DropBlock => drop(pick(&mut self.sendable, at)),
            Op::FreeBlock => _ = pick(&mut self.sendable, at).map(|block| cell.free(block)),
            Op::FreeBlocks => cell.free_many(self.sendable.drain(at % (self.sendable.len() + 1)..)),
            Op::FreeBlocksByPool => {
                cell.pool().free_many(self.sendable.drain(at % (self.sendable.len() + 1)..));
            }
        }
    }

    /// The blocks are as many as the pool says, no two at one address, and each has the content that was written there last.
    fn check(&self) {
        let local = self.local.iter().map(|block| (block.as_raw(), block.memory()));
        let sendable = self.sendable.iter().map(|block| (block.as_raw(), block.memory()));
        let owned: Vec<_> = local.chain(sendable).collect();
        let all: HashSet<_> = owned.iter().map(|(raw, _)| raw).chain(&self.raw).collect();
        assert_eq!(all.len(), owned.len() + self.raw.len());
        assert_eq!(self.cell.pool().stats().in_use, all.len() as u64);
        for (raw, memory) in owned {
            memory.write_u64(0, raw.iova().raw()).unwrap();
            let addr = raw.as_ptr().as_ptr().addr();
            assert_eq!(self.cell.pool().free_raw(raw), Err(FreeError::Owned { addr }));
        }
    }
}

/// Runs the operations, drops all blocks, and returns the handle.
fn run<S: ChunkSource, H: Hold<Target = DmaPool<S>>>(local: Local<S, H>, ops: &[(Op, usize)]) -> Local<S, H> {
    let cell = local.into_cell();
    let mut held = Held { cell: &cell, local: Vec::new(), sendable: Vec::new(), raw: Vec::new() };
    for (step, &(op, at)) in ops.iter().enumerate() {
        // Several at a time, so that more rows than one are in use.
        (0..=at % 40).for_each(|more| held.apply(op, at + more));
        if step % 8 == 0 {
            held.check();
        }
    }
    held.check();
    let raw = std::mem::take(&mut held.raw);
    drop(held);
    cell.pool().free_bulk(&raw).unwrap();
    assert_eq!(cell.pool().stats().in_use, 0);
    cell.into_local()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 128 }, ..ProptestConfig::default() })]

    #[test]
    fn a_cell_and_a_set_have_the_same_blocks(
        ops in proptest::collection::vec((op(), any::<u16>().prop_map(usize::from)), 1..120),
        (size, watched) in prop_oneof![Just((64, false)), Just((104, false)), Just((4096, false)), Just((64, true))],
    ) {
        let make = if watched { DmaPool::with_debug } else { DmaPool::new };
        let heap = Heap::new(32 << 20);
        let pool = make(&heap, "test", size, 0, 0).unwrap();
        drop(run(pool.local(), &ops));
        prop_assert_eq!(pool.stats().late_double_frees, 0);
        pool.destroy().unwrap();

        let heap = Arc::new(Heap::new(32 << 20));
        let make = if watched { DmaPool::with_debug } else { DmaPool::new };
        let mut pool = Shared::new(make(Arc::clone(&heap), "test", size, 0, 0).unwrap());
        drop(run(pool.local(), &ops));
        // All shares have returned.
        prop_assert!(pool.get_mut().is_some());
        drop(pool);
        prop_assert_eq!(heap.frames_taken(), 0);
    }
}

#[test]
fn a_local_block_cannot_be_freed_raw_or_twice() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let (cell, mut other) = (pool.local().into_cell(), pool.local());
    let block = cell.alloc().unwrap();
    let raw = block.as_raw();
    let addr = raw.as_ptr().as_ptr().addr();
    assert_eq!((block.iova(), block.memory().len()), (raw.iova(), 64));
    assert_eq!(other.free_raw(raw), Err(FreeError::Owned { addr }));
    assert_eq!(pool.free_bulk(&[raw]), Err(BulkFreeError { freed: 0, error: FreeError::Owned { addr } }));
    drop(block);
    assert_eq!(other.free_raw(raw), Err(FreeError::DoubleFree { addr }));
    // The same block again, as what is freed by address.
    let again = cell.alloc().unwrap().into_raw();
    assert_eq!((again, pool.stats().in_use), (raw, 1));
    assert_eq!(other.free_raw(raw), Ok(()));
    assert_eq!(other.free_raw(raw), Err(FreeError::DoubleFree { addr }));
    assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (0, 0));
}

#[test]
fn a_block_of_a_cell_is_dropped_by_another_thread_and_after_the_cell() {
    let (mut pool, heap) = shared(64);
    let cell = pool.local().into_cell();
    let mut blocks: Vec<_> = (0..200).map(|_| cell.alloc().unwrap().into_block()).collect();
    let rest = blocks.split_off(100);
    std::thread::spawn(move || drop(blocks)).join().unwrap();
    assert_eq!(pool.stats().in_use, 100);
    drop(cell);
    assert!(pool.get_mut().is_none());
    drop(rest);
    assert_eq!(pool.stats().in_use, 0);
    assert!(pool.get_mut().is_some());
    drop(pool);
    assert_eq!(heap.frames_taken(), 0);
}

#[test]
fn a_cell_keeps_its_pool_and_moves_between_threads() {
    let (pool, heap) = shared(64);
    let cell = pool.local().into_cell();
    drop(pool);
    let cell = std::thread::spawn(move || {
        let blocks: Vec<_> = (0..100).map(|_| cell.alloc().unwrap()).collect();
        assert_eq!(cell.pool().stats().in_use, 100);
        drop(blocks);
        cell
    });
    let mut local = cell.join().unwrap().into_local();
    let block = local.alloc().unwrap();
    drop(local);
    assert_ne!(heap.frames_taken(), 0);
    drop(block);
    assert_eq!((heap.frames_taken(), Arc::strong_count(&heap)), (0, 1));
}

#[test]
fn a_forgotten_local_block_stays_allocated() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let cell = pool.local().into_cell();
    std::mem::forget(cell.alloc().unwrap());
    drop(cell);
    assert_eq!(pool.stats().in_use, 1);
    assert!(pool.destroy().is_err());
}

/// No read-modify-write for a block that its thread allocates and drops; rows change hands for 64 blocks at a time.
#[cfg(feature = "count-rmw")]
#[test]
fn blocks_that_return_to_their_cell_share_nothing() {
    fn count<S: ChunkSource, H: Hold<Target = DmaPool<S>>>(cell: &LocalCell<S, H>) {
        use crate::sync::{lock_count, rmw_count, rmw_reset};
        const N: u32 = 10_000;
        drop(cell.alloc().unwrap());
        rmw_reset();
        (0..N).for_each(|_| drop(cell.alloc().unwrap()));
        assert_eq!((rmw_count(), lock_count()), (0, 0));
        // The first pass acquires chunks.
        for _ in 0..2 {
            rmw_reset();
            drop((0..N).map(|_| cell.alloc().unwrap()).collect::<Vec<_>>());
        }
        let an_operation = rmw_count() as f64 / f64::from(2 * N);
        assert!(an_operation < 0.02, "{an_operation}");
        // A share is issued and taken back without one, too.
        drop(cell.alloc().unwrap());
        rmw_reset();
        (0..N).for_each(|_| cell.free(cell.alloc().unwrap().into_block()));
        assert_eq!((rmw_count(), lock_count()), (0, 0));
    }
    let heap = Heap::new(8 << 20);
    count(&pool(&heap, 128).local().into_cell());
    count(&shared(128).0.local().into_cell());
}

/// The cell's share of the pool is issued by the handle's stock, and returns there.
#[cfg(feature = "count-rmw")]
#[test]
fn a_handle_that_becomes_a_cell_and_again_a_handle_makes_no_read_modify_write() {
    let (pool, _) = shared(128);
    let mut local = pool.local();
    crate::sync::rmw_reset();
    for _ in 0..100 {
        local = local.into_cell().into_local();
    }
    assert_eq!(crate::sync::rmw_count(), 0);
}
