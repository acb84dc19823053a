//! Shared pools, which their handles and blocks keep alive.

use super::*;
use std::sync::Arc;

fn shared(size: usize) -> (Shared<DmaPool<Arc<Heap>>>, Arc<Heap>) {
    let heap = Arc::new(Heap::new(8 << 20));
    (Shared::new(DmaPool::new(Arc::clone(&heap), "test", size, 0, 0).unwrap()), heap)
}

fn outstanding(heap: &Heap) -> usize {
    heap.acquired.load(Ordering::Relaxed) - heap.released.load(Ordering::Relaxed)
}

/// A driver's struct: pool, handle and blocks, without a lifetime and movable between threads.
struct Driver {
    pool: Shared<DmaPool<Arc<Heap>>>,
    local: Local<Arc<Heap>>,
    blocks: Vec<Block<Arc<Heap>>>,
}

impl Driver {
    fn new() -> (Self, Arc<Heap>) {
        let (pool, heap) = shared(64);
        let mut local = pool.local();
        let mut blocks: Vec<_> = (0..100).map(|_| local.alloc_zeroed().unwrap()).collect();
        blocks.extend((0..100).map(|_| pool.alloc_zeroed().unwrap()));
        (Self { pool, local, blocks }, heap)
    }
}

#[test]
fn a_struct_owns_pool_handle_and_blocks_and_moves_between_threads() {
    let (mut driver, heap) = Driver::new();
    driver = std::thread::spawn(move || {
        driver.local.free(driver.blocks.pop().unwrap());
        driver.blocks.push(driver.local.alloc().unwrap());
        driver.blocks[0].memory().write_u64(0, 7).unwrap();
        driver
    })
    .join()
    .unwrap();
    assert_eq!(driver.blocks[0].memory().read_u64(0), Ok(7));
    assert_eq!(driver.pool.stats().in_use, 200);
    drop(driver);
    assert_eq!(outstanding(&heap), 0);
}

#[test]
fn pool_handle_and_blocks_are_dropped_in_any_order() {
    for order in 0..6 {
        let (Driver { pool, local, blocks }, heap) = Driver::new();
        let mut parts: Vec<Box<dyn Send>> = vec![Box::new(pool), Box::new(local), Box::new(blocks)];
        drop(parts.remove(order / 2));
        assert_ne!(outstanding(&heap), 0);
        drop(parts.remove(order % 2));
        assert_ne!(outstanding(&heap), 0);
        drop(parts);
        assert_eq!((outstanding(&heap), Arc::strong_count(&heap)), (0, 1));
    }
}

#[test]
fn a_block_of_another_pool_is_freed_there() {
    let ((pool, _heap), (other, other_heap)) = (shared(64), shared(64));
    let mut local = pool.local();
    let block = other.alloc().unwrap();
    drop(other);
    local.free(block);
    assert_eq!((outstanding(&other_heap), pool.stats().in_use), (0, 0));
}

#[test]
fn a_shared_pool_is_returned_when_nothing_else_holds_it() {
    let (mut pool, heap) = shared(64);
    let (local, block) = (pool.local(), pool.alloc().unwrap());
    assert!(pool.get_mut().is_none());
    drop(local);
    pool = pool.try_into_inner().unwrap_err();
    let raw = block.into_raw();
    assert_eq!(pool.get_mut().unwrap().shrink(), 0);
    let busy = pool.try_into_inner().unwrap().destroy().unwrap_err();
    assert_eq!((busy.blocks, busy.first), (1, raw));
    busy.pool.free_raw(raw).unwrap();
    busy.pool.destroy().unwrap();
    assert_eq!(outstanding(&heap), 0);
}

#[test]
fn sources_may_be_borrowed_boxed_or_shared() {
    fn use_it<S: ChunkSource>(source: S) {
        let pool = Shared::new(DmaPool::new(source, "test", 64, 0, 0).unwrap());
        let block = pool.local().alloc_zeroed().unwrap();
        drop(pool);
        assert_eq!(block.memory().read_u64(0), Ok(0));
    }
    let heap = Arc::new(Heap::new(4 << 20));
    use_it(&*heap);
    use_it(&heap);
    use_it(Arc::clone(&heap));
    use_it(Heap::new(4 << 20));
    use_it(Box::new(Heap::new(4 << 20)));
    use_it(Shared::new(Heap::new(4 << 20)));
    use_it(Box::new(Arc::clone(&heap)) as Box<dyn ChunkSource>);
    use_it(Arc::clone(&heap) as Arc<dyn ChunkSource>);
    assert_eq!(outstanding(&heap), 0);
}

/// Owners allocate, pass blocks to each other, and are dropped; so is the shared reference meanwhile, and blocks outlive
/// all of them.
#[test]
fn stress_blocks_outlive_the_shared_reference_and_owners() {
    const THREADS: usize = 4;
    let (pool, heap) = shared(64);
    let rounds = if cfg!(miri) { 40 } else { 5_000 };
    let exchange: Mutex<Vec<Block<Arc<Heap>>>> = Mutex::default();
    let locals: Vec<_> = (0..THREADS).map(|_| pool.local()).collect();
    let pool_ref = Mutex::new(Some(pool));
    crate::testing::scope(|scope| {
        for (thread, mut local) in locals.into_iter().enumerate() {
            let (exchange, pool_ref) = (&exchange, &pool_ref);
            scope.spawn(move || {
                let mut mine = Vec::new();
                for round in 0..rounds {
                    let block = local.alloc().unwrap();
                    block.memory().write_u64(0, round).unwrap();
                    mine.push(block);
                    if round % 3 == 0 {
                        let block = mine.swap_remove(0);
                        let mut exchange = exchange.lock();
                        exchange.push(block);
                        let oldest = if exchange.len() > 50 { Some(exchange.swap_remove(0)) } else { None };
                        drop(exchange);
                        match oldest {
                            Some(block) if round % 2 == 0 => local.free(block),
                            block => drop(block),
                        }
                    }
                    if mine.len() > 100 {
                        local.free(mine.swap_remove(0));
                    }
                    if thread == 0 && round == rounds / 2 {
                        drop(pool_ref.lock().take());
                    }
                }
                drop(local);
                drop(mine);
            });
        }
    });
    assert_ne!(outstanding(&heap), 0);
    drop(exchange);
    assert_eq!((outstanding(&heap), Arc::strong_count(&heap)), (0, 1));
}
