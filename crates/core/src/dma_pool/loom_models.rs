//! Every interleaving (within a bound of preemptions) of owners of a pool of two blocks.
//!
//! A cell models the memory of each block: the model checker reports two concurrent owners, and
//! accesses of one owner that do not happen before the next owner's. It is accessed between a
//! thread's alloc and its free only, as a program would.

use super::state::State;
use super::{ChunkSource, DmaPool, PoolLocal, RawBlock, SourceError};
use crate::addr::Iova;
use crate::domain::DomainId;
use crate::frame::{Frame, FrameError, Order};
use crate::sync::in_all_orders;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use std::alloc::{Layout, alloc};
use std::ptr::NonNull;
use std::sync::OnceLock;

const SIZE: usize = 1 << 20;
const BYTES: usize = 2 << 20;

/// 2 MiB that are never accessed, allocated once at a time. Its lock is not one of the model: no
/// interleaving of it matters.
#[derive(Clone, Default)]
struct Source {
    taken: std::sync::Arc<std::sync::Mutex<bool>>,
    /// After the first run, the source has but the second half of its memory.
    halves: bool,
    used: std::sync::Arc<std::sync::Mutex<bool>>,
}

// SAFETY: one allocation; the one run is given to one caller at a time.
unsafe impl ChunkSource for Source {
    fn span(&self) -> NonNull<[u8]> {
        static BASE: OnceLock<usize> = OnceLock::new();
        let base = BASE.get_or_init(|| {
            let layout = Layout::from_size_align(BYTES, BYTES).unwrap();
            // SAFETY: the layout is not empty.
            unsafe { alloc(layout) }.expose_provenance()
        });
        let base = NonNull::new(std::ptr::with_exposed_provenance_mut(*base)).unwrap();
        NonNull::slice_from_raw_parts(base, BYTES)
    }
    fn iova(&self) -> Iova {
        Iova::new(0)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let mut taken = self.taken.lock().unwrap();
        let half = self.halves && *self.used.lock().unwrap();
        if *taken || order > Order::HUGE || half && order == Order::HUGE {
            return Err(FrameError::Exhausted { order, frames: 512 }.into());
        }
        (*taken, *self.used.lock().unwrap()) = (true, true);
        Ok(Frame::new(if half { 256 } else { 0 }).unwrap())
    }
    unsafe fn release(&self, _: Frame, _: Order) {
        assert!(std::mem::replace(&mut *self.taken.lock().unwrap(), false));
    }
}

/// A pool of two blocks, and the cells that model their memory.
struct Model {
    pool: DmaPool,
    memory: [UnsafeCell<u32>; 2],
}

impl Model {
    fn new(minimum: u64) -> Arc<Self> {
        let source = Source::default();
        let builder = DmaPool::builder("model").block(SIZE).minimum(minimum).cached_bytes(0);
        let pool = builder.build(&source).unwrap();
        Arc::new(Self { pool, memory: core::array::from_fn(|_| UnsafeCell::new(0)) })
    }

    fn use_memory(&self, block: RawBlock) {
        let at = usize::try_from(block.iova().raw()).unwrap() / SIZE;
        // SAFETY: loom reports any access that is not exclusive.
        self.memory[at].with_mut(|memory| unsafe { *memory += 1 });
    }

    /// Allocates a raw block and uses it.
    fn take(&self, local: &mut PoolLocal) -> Option<RawBlock> {
        let block = local.alloc_raw().ok()?;
        self.use_memory(block);
        Some(block)
    }
}

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    (builder.preemption_bound, builder.max_branches) = (Some(preemptions), 20_000);
    in_all_orders(|| builder.check(model));
}

/// Two raw frees of one allocation; the thread that succeeds owns the block, and passes it to a
/// next owner at once.
fn two_raw_frees(claim: fn(&State) -> bool) {
    check(3, move || {
        let state = Arc::new(State::new(State::RAW));
        let frees = Arc::new(AtomicUsize::new(0));
        let free = {
            let (state, frees) = (Arc::clone(&state), Arc::clone(&frees));
            move || {
                if claim(&state) {
                    frees.fetch_add(1, Ordering::Relaxed);
                }
            }
        };
        let other = thread::spawn(free.clone());
        free();
        other.join().unwrap();
        assert_eq!(frees.load(Ordering::Relaxed), 1, "the number of the block is in two magazines");
    });
}

#[test]
fn loom_one_of_two_raw_frees_succeeds() {
    two_raw_frees(State::claim);
}

/// The known mistake: it finds the state right, and changes it later.
#[test]
#[should_panic(expected = "two magazines")]
fn loom_a_load_and_a_store_are_no_claim() {
    two_raw_frees(|state| {
        let raw = state.get() == State::RAW;
        if raw {
            state.set(State::FREE);
        }
        raw
    });
}

/// A free by load and store that is preempted frees the block under its next owner, which the claim
/// excludes: the stale free comes before the second alloc and is refused, or it frees that
/// allocation and the right free is refused.
#[test]
fn loom_wrong_frees_beside_an_owner_that_allocates() {
    check(2, || {
        let model = Model::new(2);
        let mut local = model.pool.local();
        let stale = model.take(&mut local).unwrap();
        local.free_raw(stale).unwrap();
        let wrong = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let mut local = model.pool.local();
                local.free_raw(stale).is_ok()
            })
        };
        let first = local.alloc_raw().unwrap();
        let freed = local.free_raw(first).is_ok();
        assert_eq!(usize::from(freed) + usize::from(wrong.join().unwrap()), 1);
        drop(local);
        // Each block is there once.
        let mut local = model.pool.local();
        let (a, b) = (local.alloc_raw().unwrap(), local.alloc_raw().unwrap());
        assert!(a != b && local.alloc_raw().is_err());
    });
}

/// A `Block` is never freed by address, at whatever moment.
#[test]
fn loom_a_wrong_free_never_frees_a_block_that_is_owned() {
    check(2, || {
        let model = Model::new(2);
        let mut local = model.pool.local();
        let block = local.alloc().unwrap();
        let stale = block.as_raw();
        let wrong = {
            let model = Arc::clone(&model);
            thread::spawn(move || assert!(model.pool.free_raw(stale).is_err()))
        };
        model.use_memory(stale);
        local.free(block);
        let next = local.alloc().unwrap();
        model.use_memory(next.as_raw());
        drop(next);
        wrong.join().unwrap();
    });
}

/// A block that one owner frees is allocated by another, through the depot: the accesses of the
/// second come after those of the first.
#[test]
fn loom_blocks_move_between_owners_through_the_depot() {
    check(2, || {
        let model = Model::new(2);
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let mut local = model.pool.local();
                for _ in 0..2 {
                    if let Some(block) = model.take(&mut local) {
                        local.free_raw(block).unwrap();
                        local.flush();
                    }
                }
            })
        };
        let mut local = model.pool.local();
        let (a, b) = (model.take(&mut local), model.take(&mut local));
        assert!(a.is_some(), "an owner of two blocks keeps at most one");
        a.into_iter().chain(b).for_each(|block| model.pool.free_raw(block).unwrap());
        other.join().unwrap();
    });
}

/// A chunk is released only when all of its blocks are in the depot.
#[test]
fn loom_shrink_beside_an_owner_that_allocates() {
    check(2, || {
        let model = Model::new(0);
        let mut local = model.pool.local();
        let block = local.alloc().unwrap();
        local.free(block);
        local.flush();
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.pool.shrink())
        };
        // From the chunk that is there, or from the same memory acquired again.
        let block = local.alloc().unwrap();
        model.use_memory(block.as_raw());
        let released = other.join().unwrap();
        assert!(released == 0 || released == SIZE as u64);
        assert_eq!(model.pool.stats().in_use, 1);
        local.free(block);
        drop(local);
        assert_eq!(model.pool.shrink(), SIZE as u64);
    });
}

/// Under pressure owners return what they cache, and no block is lost.
#[test]
fn loom_pressure_loses_no_block() {
    check(2, || {
        let model = Model::new(2);
        let mut local = model.pool.local();
        let (a, b) = (model.take(&mut local).unwrap(), model.take(&mut local).unwrap());
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                // Refused while the first owner has both, which raises the pressure.
                let mut local = model.pool.local();
                let block = model.take(&mut local);
                block.is_some_and(|block| local.free_raw(block).is_ok())
            })
        };
        local.free_raw(a).unwrap();
        local.free_raw(b).unwrap();
        other.join().unwrap();
        drop(local);
        let mut local = model.pool.local();
        assert!(local.alloc_raw().is_ok() && local.alloc_raw().is_ok());
    });
}

/// A chunk is released while a late free looks its block up, and another one is acquired there that
/// has but a part of the block. No block of that is freed.
#[test]
fn loom_a_late_free_frees_no_block_of_a_later_chunk() {
    check(1, || {
        // Four blocks in 2 MiB: the third one starts in the first half, and ends in the second.
        let source = Source { halves: true, ..Source::default() };
        let builder = DmaPool::builder("model").block(500_000).cached_bytes(0);
        let pool = builder.build(&source).unwrap();
        let mut local = pool.local();
        let blocks = [(); 3].map(|()| local.alloc_raw().unwrap());
        blocks.iter().for_each(|&block| local.free_raw(block).unwrap());
        local.flush();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || {
                let mut local = pool.local();
                pool.shrink();
                local.alloc_raw().unwrap()
            })
        };
        assert!(local.free_raw(blocks[2]).is_err(), "a free block was freed");
        let later = other.join().unwrap();
        local.free_raw(later).unwrap();
    });
}

/// A free block is marked while the pool is shrunk; a wrong free of it is refused then too.
#[test]
fn loom_a_wrong_free_beside_shrink_is_refused() {
    check(2, || {
        let model = Model::new(2);
        let mut local = model.pool.local();
        let (kept, stale) = (model.take(&mut local).unwrap(), model.take(&mut local).unwrap());
        local.free_raw(stale).unwrap();
        local.flush();
        let other = {
            let model = Arc::clone(&model);
            thread::spawn(move || assert_eq!(model.pool.shrink(), 0))
        };
        assert!(local.free_raw(stale).is_err());
        other.join().unwrap();
        assert_eq!(model.take(&mut local), Some(stale), "it is there");
        assert!(local.alloc_raw().is_err(), "and once");
        local.free_raw(kept).unwrap();
    });
}

/// Chunks stay while their blocks are visited.
#[test]
fn loom_shrink_beside_a_visit_of_all_blocks() {
    check(2, || {
        let source = Source::default();
        let builder = DmaPool::builder("model").block(SIZE).cached_bytes(0);
        let pool = builder.build(&source).unwrap();
        drop(pool.alloc().unwrap());
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.shrink())
        };
        pool.for_each_block(|_, _| {
            thread::yield_now();
            assert!(*source.taken.lock().unwrap(), "the chunk was released");
        });
        let released = other.join().unwrap();
        assert_eq!(released + pool.shrink(), SIZE as u64);
    });
}

/// A guessed address leads to no unit before that is complete.
#[test]
fn loom_a_wrong_free_beside_the_first_chunk_is_refused() {
    check(2, || {
        let model = Model::new(0);
        let guess = RawBlock::from_parts(Source::default().span().cast(), Iova::new(0));
        let wrong = {
            let model = Arc::clone(&model);
            thread::spawn(move || assert!(model.pool.free_raw(guess).is_err()))
        };
        let mut local = model.pool.local();
        let block = local.alloc().unwrap();
        assert_eq!(block.as_raw(), guess);
        wrong.join().unwrap();
        local.free(block);
    });
}

/// Two threads that find no free block need one chunk: the second finds what the first acquired,
/// although it has looked for it before. The source has no other.
#[test]
fn loom_two_threads_that_need_a_chunk_share_one() {
    check(1, || {
        // Three blocks in a chunk.
        let builder = DmaPool::builder("model").block(690_000).cached_bytes(0);
        let pool = builder.build(&Source::default()).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || pool.local().alloc_raw().unwrap())
        };
        let block = pool.local().alloc_raw().unwrap();
        assert_ne!(other.join().unwrap(), block);
    });
}

/// Debug mode sees an alloc before the block can be freed, by a wrong free too: nothing fills a
/// block that is free already.
#[test]
fn loom_debug_mode_sees_an_alloc_before_its_free() {
    check(2, || {
        let builder = DmaPool::builder("model").block(4096).minimum(1).maximum(1).debug();
        let pool = builder.build(&Source::default()).unwrap();
        let guess = RawBlock::from_parts(Source::default().span().cast(), Iova::new(0));
        let wrong = {
            let pool = pool.clone();
            thread::spawn(move || pool.free_raw(guess).is_ok())
        };
        let mut local = pool.local();
        let block = local.alloc_raw().unwrap();
        assert_eq!(block, guess);
        let freed = local.free_raw(block).is_ok();
        assert_eq!(usize::from(freed) + usize::from(wrong.join().unwrap()), 1);
        drop(local);
        assert_eq!(pool.damages(), []);
    });
}

/// A pool ends once: with its last handle, or with the last of its blocks after that.
#[test]
fn loom_the_last_block_or_handle_ends_the_pool() {
    for raw in [false, true] {
        check(2, move || {
            let source = Source::default();
            let builder = DmaPool::builder("model").block(SIZE).minimum(2).cached_bytes(0);
            let pool = builder.build(&source).unwrap();
            let mut local = pool.local();
            let (a, b) = (local.alloc().unwrap(), local.alloc().unwrap());
            drop(pool);
            let other = thread::spawn(move || drop(a));
            if raw {
                let _ = b.into_raw();
            } else {
                drop(b);
            }
            drop(local);
            other.join().unwrap();
            let is_kept = *source.taken.lock().unwrap();
            assert_eq!(is_kept, raw, "a chunk is released unless a block of it is raw");
            assert_eq!(std::sync::Arc::strong_count(&source.taken), 1, "the pool has ended");
        });
    }
}

/// A source whose end loom reports unless all uses come before it.
struct Watched(Source, UnsafeCell<u32>);

// SAFETY: the source is; the cell is loom's, which reports what is not ordered.
unsafe impl Send for Watched {}
// SAFETY: as for `Send`.
unsafe impl Sync for Watched {}

// SAFETY: as the source.
unsafe impl ChunkSource for Watched {
    fn span(&self) -> NonNull<[u8]> {
        self.0.span()
    }
    fn iova(&self) -> Iova {
        self.0.iova()
    }
    fn domain(&self) -> Option<DomainId> {
        // SAFETY: written by the drop only.
        self.1.with(|cell| assert_eq!(unsafe { *cell }, 0));
        None
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.0.acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the contract of the same method.
        unsafe { self.0.release(frame, order) };
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: exclusive; loom reports a use that is not ordered before.
        self.1.with_mut(|cell| unsafe { *cell = 1 });
    }
}

/// Lock-free calls of one handle happen before another handle ends the pool.
#[test]
fn loom_the_end_of_a_pool_comes_after_the_uses_of_all_handles() {
    check(2, || {
        let builder = DmaPool::builder("model").block(SIZE).cached_bytes(0);
        let source = Watched(Source::default(), UnsafeCell::new(0));
        let pool = builder.build(&std::sync::Arc::new(source)).unwrap();
        let other = thread::spawn({
            let pool = pool.clone();
            move || assert_eq!(pool.domain(), None)
        });
        assert_eq!(pool.domain(), None);
        drop(pool);
        other.join().unwrap();
    });
}

/// Half of the memory, for a pool without a source.
fn half(at: usize) -> (NonNull<[u8]>, Iova) {
    // SAFETY: in the memory of the source, which is not freed.
    let start = unsafe { Source::default().span().cast::<u8>().add(at * SIZE) };
    (NonNull::slice_from_raw_parts(start, SIZE), Iova::new((at * SIZE) as u64))
}

/// An owner that takes no lock finds the unit of a number while the table of units is replaced by a
/// larger one.
#[test]
fn loom_the_table_of_units_is_replaced_beside_an_owner() {
    check(2, || {
        let builder = DmaPool::builder("model").block(SIZE / 2).cached_bytes(2 * SIZE as u64);
        let pool = builder.build_empty().unwrap();
        let add = |pool: &DmaPool, at| {
            let (memory, iova) = half(at);
            // SAFETY: not accessed, and not freed.
            assert_eq!(unsafe { pool.add_range(memory, iova) }, Ok(2));
        };
        add(&pool, 0);
        let mut local = pool.local();
        let first = local.alloc().unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || add(&pool, 1))
        };
        // From the owner's own magazine.
        let second = local.alloc().unwrap();
        assert_ne!(first.as_raw(), second.as_raw());
        other.join().unwrap();
    });
}

/// A guessed address leads to no range before that is complete, nor to a unit of it.
#[test]
fn loom_a_wrong_free_beside_a_second_range_is_refused() {
    check(2, || {
        let pool = DmaPool::builder("model").block(SIZE).build_empty().unwrap();
        let ((memory, iova), (second, second_iova)) = (half(0), half(1));
        // SAFETY: not accessed, and not freed.
        assert_eq!(unsafe { pool.add_range(memory, iova) }, Ok(1));
        let wrong = {
            let pool = pool.clone();
            thread::spawn(move || {
                let guess = RawBlock::from_parts(half(1).0.cast(), second_iova);
                assert!(pool.free_raw(guess).is_err());
            })
        };
        // SAFETY: as above.
        assert_eq!(unsafe { pool.add_range(second, second_iova) }, Ok(1));
        wrong.join().unwrap();
    });
}
