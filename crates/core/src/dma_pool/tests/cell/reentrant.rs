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
    assert_eq!(pool.stats().in_use, 0);
    let all: Vec<_> = (0..500).map(|_| cell.alloc().unwrap()).collect();
    assert_eq!(all.iter().map(LocalBlock::as_raw).collect::<HashSet<_>>().len(), 500);
    drop(all);
    // SAFETY: from `Box::into_raw`, and no block borrows it any more: the hook has run, and dropped its own.
    drop(unsafe { Box::from_raw(owned) });
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
