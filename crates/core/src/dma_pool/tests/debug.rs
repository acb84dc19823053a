//! Debug mode: detection and reports of writes into free blocks.

use super::*;

fn debugged(heap: &Heap, size: usize) -> DmaPool<&Heap> {
    DmaPool::with_debug(heap, "debug", size, 0, 0).unwrap()
}

fn bytes(pool: &DmaPool<&Heap>, block: RawBlock) -> Vec<u8> {
    let mut bytes = vec![0; pool.block_size()];
    pool.memory(block).unwrap().copy_to_slice(0, &mut bytes).unwrap();
    bytes
}

/// Writes to a free block, as a device that was not stopped would.
fn late_write(heap: &Heap, block: RawBlock, offset: usize, value: u8) {
    let at = block.as_ptr().as_ptr().addr() - heap.base.as_ptr().addr();
    heap.memory().write_u8(at + offset, value).unwrap();
}

/// The row of the block has other blocks in use, and is that owner's.
#[test]
fn a_block_that_its_owner_allocates_again_at_once_is_checked() {
    let heap = Heap::new(2 << 20);
    for by_pool in [false, true] {
        let pool = debugged(&heap, 64);
        let mut local = pool.local();
        let alloc =
            |local: &mut Local<_, _>| if by_pool { pool.alloc_raw() } else { local.alloc_raw() }.unwrap();
        let (block, kept) = (alloc(&mut local), alloc(&mut local));
        let freed = if by_pool { pool.free_raw(block) } else { local.free_raw(block) };
        assert_eq!(freed, Ok(()));
        late_write(&heap, block, 5, 0x11);
        assert_eq!(alloc(&mut local), block);
        assert_eq!((pool.stats().damaged, bytes(&pool, block)), (1, vec![FRESH_PATTERN; 64]));
        pool.free_bulk(&[block, kept]).unwrap();
    }
}

#[test]
fn a_write_into_a_free_block_is_reported_with_its_last_owner() {
    let heap = Heap::new(2 << 20);
    let mut pool = debugged(&heap, 100);
    let (mut rx, mut tx) = (pool.local(), pool.local());
    rx.set_tag("rx");
    let (of_rx, of_tx) = (rx.number(), tx.number());
    let block = rx.alloc_raw().unwrap();
    assert_eq!(bytes(&pool, block), [FRESH_PATTERN; 100]);
    tx.free_raw(block).unwrap();
    late_write(&heap, block, 70, 0x11);
    late_write(&heap, block, 99, 0x22);
    // Until the block is allocated again, through any owner.
    drop((rx, tx));
    let again: Vec<_> = (0..40).map(|_| pool.alloc_raw().unwrap()).collect();
    assert!(again.contains(&block));
    assert_eq!(bytes(&pool, block), [FRESH_PATTERN; 100]);
    let [damage] = pool.damages()[..] else { panic!("one report") };
    let last_use = LastUse {
        allocated_by: OwnerTag { number: of_rx, tag: "rx" },
        freed_by: OwnerTag { number: of_tx, tag: "" },
    };
    let expected = FREE_PATTERN;
    let report =
        Damage { block, offset: 70, expected, found: 0x11, wrong_bytes: 2, last_use: Some(last_use) };
    assert_eq!(damage, report);
    let text = damage.to_string();
    assert!(text.contains("byte 70 is 0x11 instead of 0xa7, 2 bytes are wrong"), "{text}");
    assert!(
        text.ends_with(&format!("last allocated by owner {of_rx} (rx), freed by owner {of_tx}")),
        "{text}"
    );
    assert_eq!(pool.stats().damaged, 1);
    pool.free_bulk(&again).unwrap();
    assert_eq!(pool.inspect().len(), 1, "a reported block is filled again");
    late_write(&heap, again[7], 0, 0);
    let found = pool.inspect();
    assert_eq!((found.len(), found[1].block, found[1].offset), (2, again[7], 0));
    pool.destroy().unwrap();
}

#[test]
fn unused_blocks_are_checked_and_a_reacquired_chunk_has_no_history() {
    let heap = Heap::new(2 << 20);
    let mut pool = debugged(&heap, 64);
    let block = pool.alloc_raw().unwrap();
    late_write(&heap, moved(block, 64), 3, 9);
    assert_eq!(pool.inspect()[0].last_use, None);
    pool.free_raw(block).unwrap();
    assert_eq!(pool.shrink(), 4096);
    // Another user of the source wrote to the chunk meanwhile.
    late_write(&heap, block, 0, 1);
    assert_eq!(pool.alloc_raw(), Ok(block));
    assert_eq!(pool.stats().damaged, 1);
    let _ = pool.free_raw(block);
    late_write(&heap, block, 63, 0xff);
    let last = pool.inspect().pop().unwrap();
    assert_eq!((last.offset, last.last_use.unwrap().freed_by.number), (63, 2));
}

#[test]
fn debug_mode_allocates_and_frees_by_the_same_rules() {
    let heap = Heap::new(8 << 20);
    let pool = debugged(&heap, 192);
    let (mut a, mut b) = (pool.local(), pool.local());
    let mut slots = [None; 300];
    assert_eq!(a.fill(&mut slots), 300);
    let ascending: Vec<_> = slots.iter().flatten().take(20).map(RawBlock::iova).collect();
    assert!(ascending.is_sorted());
    for (i, slot) in slots.iter_mut().enumerate() {
        let block = slot.take().unwrap();
        let owner = if i % 2 == 0 { &mut a } else { &mut b };
        owner.free_raw(block).unwrap();
        let addr = block.as_ptr().as_ptr().addr();
        for owner in [&mut a, &mut b] {
            assert_eq!(owner.free_raw(block), Err(FreeError::DoubleFree { addr }));
        }
    }
    let zeroed = a.alloc_zeroed().unwrap().into_raw();
    assert_eq!(bytes(&pool, zeroed), [0; 192]);
    assert_eq!(b.free_raw(zeroed), Ok(()));
    drop((a, b));
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.high_water, stats.damaged), (0, 300, 0));
    assert_eq!(stats.in_depot, stats.blocks);
    pool.destroy().unwrap();
    assert!(!heap.taken.lock().contains(&true));
}

#[test]
fn blocks_of_whole_rows_are_checked_in_calls_for_many() {
    let heap = Heap::new(2 << 20);
    let pool = debugged(&heap, 64);
    pool.set_limits(Limits { minimum: 1000, maximum: 1000 }).unwrap();
    let mut local = pool.local();
    // So that it has rows all of whose blocks are free.
    local.alloc_raw().unwrap();
    assert!(local.owner.whole.len() >= 2);
    let mut slots = [None; 300];
    assert_eq!(local.fill(&mut slots), 300);
    let mut runs = local.alloc_run(NonZeroUsize::new(100).unwrap()).unwrap().iter().collect::<Vec<_>>();
    runs.extend(slots.into_iter().flatten());
    for block in runs {
        assert_eq!(bytes(&pool, block), [FRESH_PATTERN; 64]);
    }
}

#[test]
fn stress_eight_threads_in_debug_mode_see_no_damage() {
    let heap = Heap::new(8 << 20);
    let mut pool = debugged(&heap, 64);
    let inboxes: [Mutex<Vec<RawBlock>>; 8] = Default::default();
    let rounds = if cfg!(miri) { 5 } else { 300 };
    crate::testing::scope(|scope| {
        for me in 0..8usize {
            let (pool, inboxes) = (&pool, &inboxes);
            scope.spawn(move || {
                let mut local = pool.local();
                for round in 0..rounds {
                    for _ in 0..8 {
                        let block = local.alloc_raw().unwrap();
                        pool.memory(block).unwrap().write_u64(8, 7).unwrap();
                        inboxes[(me + round) % 8].lock().push(block);
                    }
                    for block in std::mem::take(&mut *inboxes[me].lock()) {
                        local.free_raw(block).unwrap();
                    }
                }
            });
        }
    });
    for inbox in &inboxes {
        pool.free_bulk(&inbox.lock()).unwrap();
    }
    assert_eq!(pool.inspect(), []);
    assert_eq!(pool.stats().in_use, 0);
}
