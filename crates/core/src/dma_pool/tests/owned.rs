//! Raw frees of blocks that a [`Block`] owns.

use super::*;

fn owned(block: RawBlock) -> FreeError {
    FreeError::Owned { addr: block.as_ptr().as_ptr().addr() }
}

#[test]
fn a_raw_free_of_an_owned_block_is_refused_and_changes_nothing() {
    let heap = Heap::new(4 << 20);
    for (watched, size) in [(false, 64), (false, 100), (false, 4096), (true, 64)] {
        let make = if watched { DmaPool::with_debug } else { DmaPool::new };
        let pool = make(&heap, "test", size, 0, 0).unwrap();
        let (mut local, mut other) = (pool.local(), pool.local());
        let blocks = [
            pool.alloc().unwrap(),
            pool.alloc_zeroed().unwrap(),
            local.alloc().unwrap(),
            local.alloc_zeroed().unwrap(),
        ];
        for block in &blocks {
            let raw = block.as_raw();
            let before = pool.stats();
            assert_eq!(pool.free_raw(raw), Err(owned(raw)));
            assert_eq!(local.free_raw(raw), Err(owned(raw)));
            assert_eq!(other.free_raw(raw), Err(owned(raw)));
            let refused = Err(BulkFreeError { freed: 0, error: owned(raw) });
            assert_eq!(pool.free_bulk(&[raw]), refused);
            assert_eq!(local.free_bulk(&[raw]), refused);
            let mut slots = [None, Some(raw)];
            assert_eq!(pool.free_slots(&mut slots), refused);
            assert_eq!(other.free_slots(&mut slots), refused);
            assert_eq!(slots, [None, Some(raw)]);
            assert_eq!(pool.stats().in_use, before.in_use);
            assert_eq!(pool.memory(raw).unwrap().len(), size);
        }
        // None of the addresses is allocated a second time.
        let held: HashSet<_> = blocks.iter().map(Block::as_raw).collect();
        let more: Vec<_> = (0..200).map(|_| local.alloc_raw().unwrap()).collect();
        assert!(more.iter().all(|raw| !held.contains(raw)));
        local.free_bulk(&more).unwrap();
        drop(blocks);
        drop((local, other));
        assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (0, 0));
        pool.destroy().unwrap();
    }
}

#[test]
fn a_bulk_free_stops_at_an_owned_block() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let mut list: Vec<_> = (0..5).map(|_| local.alloc_raw().unwrap()).collect();
    let block = local.alloc().unwrap();
    list.push(block.as_raw());
    let rest = [local.alloc_raw().unwrap()];
    list.extend(rest);
    assert_eq!(local.free_bulk(&list), Err(BulkFreeError { freed: 5, error: owned(block.as_raw()) }));
    assert_eq!(pool.stats().in_use, 2);
    drop(block);
    local.free_bulk(&rest).unwrap();
}

#[test]
fn a_block_turned_raw_is_freed_by_address_once() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    for block in [pool.alloc().unwrap(), local.alloc().unwrap()] {
        let raw = block.as_raw();
        assert_eq!(pool.free_raw(raw), Err(owned(raw)));
        assert_eq!(block.into_raw(), raw);
        assert_eq!(local.free_raw(raw), Ok(()));
        let addr = raw.as_ptr().as_ptr().addr();
        assert_eq!(local.free_raw(raw), Err(FreeError::DoubleFree { addr }));
    }
    assert_eq!(pool.stats().in_use, 0);
}

/// Raw frees of an address race with the drop of the block there, and with the next block at the same address.
#[test]
fn stress_raw_frees_never_free_an_owned_block() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let at: Mutex<Option<RawBlock>> = Mutex::default();
    let done = std::sync::atomic::AtomicBool::new(false);
    let rounds = if cfg!(miri) { 50 } else { 20_000 };
    crate::testing::scope(|scope| {
        scope.spawn(|| {
            let mut local = pool.local();
            while !done.load(Ordering::Relaxed) {
                if let Some(raw) = *at.lock() {
                    assert!(local.free_raw(raw).is_err());
                    assert!(pool.free_raw(raw).is_err());
                }
            }
        });
        let mut local = pool.local();
        for round in 0..rounds {
            let block = if round % 2 == 0 { local.alloc() } else { pool.alloc() }.unwrap();
            *at.lock() = Some(block.as_raw());
            block.memory().write_u64(0, round).unwrap();
            assert_eq!(block.memory().read_u64(0), Ok(round));
            if round % 3 == 0 { drop(block) } else { local.free(block) }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (0, 0));
    pool.destroy().unwrap();
}
