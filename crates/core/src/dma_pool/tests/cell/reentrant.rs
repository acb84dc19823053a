//! Sources that use the cell for which they acquire a chunk.

use super::super::hooked::{HOOK, Hooked};
use super::*;

type Cell = &'static LocalCell<Hooked>;
type Held = Vec<LocalBlock<'static, Hooked>>;

/// How many blocks the first chunk has, a row of them.
const FIRST: usize = 64;

/// Allocates all blocks of a pool, and has the source run a hook, which gets them, when the next alloc needs a chunk. Afterwards
/// drops all blocks, and checks that none is lost.
fn test(hook: impl FnOnce(Cell, Held) + 'static) {
    let pool = Shared::new(DmaPool::new(Hooked(Heap::new(4 << 20)), "test", 64, 0, 0).unwrap());
    let owned = Box::into_raw(Box::new(pool.local().into_cell()));
    // SAFETY: freed below, after the last block.
    let cell: Cell = unsafe { &*owned };
    // A thread's variables cannot hold what borrows from this function.
    let held: Held = (0..FIRST).map(|_| cell.alloc().unwrap()).collect();
    assert_eq!(pool.stats().blocks, FIRST as u64);
    HOOK.set(Some(Box::new(move || hook(cell, held))));
    let block = cell.alloc();
    assert!(HOOK.take().is_none());
    drop(block);
    // SAFETY: from `Box::into_raw`, and no block borrows it any more: the hook has run, and dropped its own.
    unsafe { end(pool, owned) };
}

/// Checks that all blocks are free and none is lost, and ends a cell and its pool.
///
/// # Safety
/// The cell is from `Box::into_raw`, and neither borrowed any more nor used afterwards.
unsafe fn end<S: ChunkSource>(pool: Shared<DmaPool<S>>, owned: *mut LocalCell<S>) {
    // SAFETY: the contract.
    let cell = unsafe { Box::from_raw(owned) };
    assert_eq!(pool.stats().in_use, 0);
    let all: Vec<_> = (0..500).map(|_| cell.alloc().unwrap()).collect();
    assert_eq!(all.iter().map(LocalBlock::as_raw).collect::<HashSet<_>>().len(), 500);
    drop(all);
    drop(cell);
    assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (0, 0));
    pool.try_into_inner().unwrap().destroy().unwrap();
}

#[test]
fn a_block_that_the_source_drops_is_freed() {
    test(|cell, mut held| {
        assert_eq!(cell.pool().stats().in_use, FIRST as u64);
        drop(held.pop());
        assert_eq!(cell.pool().stats().in_use, FIRST as u64 - 1);
        drop(held);
        assert_eq!(cell.pool().stats().in_use, 0);
    });
}

#[test]
fn a_source_allocates_what_is_free_and_gets_an_error_otherwise() {
    test(|cell, mut held| {
        assert_eq!(cell.alloc().unwrap_err(), AllocError::Reentrant);
        assert_eq!(cell.alloc_zeroed().unwrap_err(), AllocError::Reentrant);
        let free = held.pop().unwrap();
        let (raw, iova) = (free.as_raw(), free.iova().raw());
        free.memory().write_u64(0, iova).unwrap();
        drop(free);
        let again = cell.alloc_zeroed().unwrap();
        assert_eq!((again.as_raw(), again.memory().read_u64(0)), (raw, Ok(0)));
        assert_eq!(cell.alloc().unwrap_err(), AllocError::Reentrant);
    });
}

#[test]
fn a_source_turns_and_frees_blocks() {
    test(|cell, mut held| {
        let (one, two, three) = (held.pop().unwrap(), held.pop().unwrap(), held.pop().unwrap());
        let block = one.into_block();
        block.memory().write_u64(0, 1).unwrap();
        cell.free(block);
        cell.pool().free_raw(two.into_raw()).unwrap();
        let block = three.into_block();
        std::thread::spawn(move || drop(block)).join().unwrap();
        assert_eq!(cell.pool().stats().in_use, FIRST as u64 - 3);
        cell.free_many(held.drain(..).map(LocalBlock::into_block));
        assert_eq!(cell.pool().stats().in_use, 0);
    });
}

#[test]
fn a_source_that_panics_leaves_the_cell_usable() {
    let pool = Shared::new(DmaPool::new(Hooked(Heap::new(4 << 20)), "test", 64, 0, 0).unwrap());
    let cell = pool.local().into_cell();
    HOOK.set(Some(Box::new(|| panic!("the source"))));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| cell.alloc().is_ok()));
    assert!(panicked.is_err());
    let blocks: Vec<_> = (0..100).map(|_| cell.alloc().unwrap()).collect();
    drop(blocks);
    assert_eq!(pool.stats().in_use, 0);
}

type Last = Shared<DmaPool<OnRelease>>;

/// A heap that runs the hook after it has released a run.
struct OnRelease(Heap);

// SAFETY: every call is forwarded to the heap.
unsafe impl ChunkSource for OnRelease {
    fn span(&self) -> NonNull<[u8]> {
        self.0.span()
    }
    fn iova(&self) -> Iova {
        self.0.iova()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        self.0.acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.release(frame, order) };
        if let Some(hook) = HOOK.take() {
            hook();
        }
    }
}

/// A cell that is given another pool's last block drops that pool, whose source uses the cell meanwhile.
#[test]
fn the_source_of_another_pool_that_ends_uses_the_cell() {
    let new = || Shared::new(DmaPool::new(OnRelease(Heap::new(4 << 20)), "test", 64, 0, 0).unwrap());
    for many in [false, true] {
        let pool: Last = new();
        let owned = Box::into_raw(Box::new(pool.local().into_cell()));
        // SAFETY: freed below, after the last block.
        let cell: &'static LocalCell<OnRelease> = unsafe { &*owned };
        let mut held: Vec<_> = (0..100).map(|_| cell.alloc().unwrap()).collect();
        let blocks = pool.stats().blocks;
        let last = new().alloc().unwrap();
        let ran = std::rc::Rc::new(std::cell::Cell::new(false));
        let seen = std::rc::Rc::clone(&ran);
        HOOK.set(Some(Box::new(move || {
            let in_use = || cell.pool().stats().in_use;
            drop(held.split_off(90));
            assert_eq!(in_use(), 90);
            cell.free(held.pop().unwrap().into_block());
            cell.free_many(held.drain(80..).map(LocalBlock::into_block));
            cell.pool().free_raw(held.pop().unwrap().into_raw()).unwrap();
            assert_eq!(in_use(), 79);
            // What others can get, and no chunk: the cell may be one that waits for it.
            let rest: Vec<_> = std::iter::from_fn(|| cell.alloc().ok()).collect();
            assert_eq!(cell.alloc().unwrap_err(), AllocError::Reentrant);
            let all: HashSet<_> = held.iter().chain(&rest).map(LocalBlock::as_raw).collect();
            assert_eq!(all.len(), held.len() + rest.len());
            assert!(all.len() as u64 <= blocks && cell.pool().stats().blocks == blocks);
            seen.set(true);
        })));
        match many {
            false => cell.free(last),
            true => cell.free_many([last]),
        }
        assert!(ran.get() && HOOK.take().is_none());
        // SAFETY: from `Box::into_raw`, and no block borrows it any more.
        unsafe { end(pool, owned) };
    }
}
