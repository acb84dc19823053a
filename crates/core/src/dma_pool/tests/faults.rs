//! Wrong frees, late device writes, and failures of the source at every step.

use super::*;

#[test]
fn wrong_frees_are_distinguished_and_change_nothing() {
    let heap = Heap::new(4 << 20);
    let other = Heap::new(2 << 20);
    let (mut pool, stranger) = (pool(&heap, 100), super::tests::pool(&other, 100));
    let neighbour = super::tests::pool(&heap, 100);
    let block = pool.alloc_raw().unwrap();
    let addr = block.as_ptr().as_ptr().addr();
    let before = pool.stats();
    let refused = |pool: &DmaPool<_>, block| matches!(pool.free_raw(block), Err(FreeError::Foreign { .. }));
    let foreign = |block| refused(&pool, block);
    assert!(foreign(stranger.alloc_raw().unwrap()));
    assert!(foreign(neighbour.alloc_raw().unwrap()));
    assert!(foreign(moved(block, -1)));
    assert!(foreign(moved(block, 4 << 20)));
    for bytes in [1, 99, 4000 + 50, 4095] {
        let error = pool.free_raw(moved(block, bytes)).unwrap_err();
        assert!(matches!(error, FreeError::Misaligned { blocks: 40, size: 100, .. }), "{error}");
    }
    let mismatched = RawBlock::from_parts(block.as_ptr(), Iova::new(7));
    let expected = Iova::new(IOVA);
    assert_eq!(pool.free_raw(mismatched), Err(FreeError::WrongIova { addr, iova: Iova::new(7), expected }));
    assert_eq!(pool.free_raw(moved(block, 100)), Err(FreeError::DoubleFree { addr: addr + 100 }));
    assert_eq!(pool.stats(), before);
    assert!(pool.memory(moved(block, 100)).is_err());
    assert_eq!(pool.memory(block).unwrap().len(), 100);
    pool.free_raw(block).unwrap();
    assert_eq!(pool.free_raw(block), Err(FreeError::DoubleFree { addr }));
    // Through another owner, while the block is in the first one's magazine or in the depot.
    assert_eq!(pool.local().free_raw(block), Err(FreeError::DoubleFree { addr }));
    assert_eq!(pool.shrink(), 4096);
    assert!(refused(&pool, block));
}

#[test]
fn late_device_writes_into_freed_blocks_do_not_affect_the_pool() {
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
        let stats = pool.stats();
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
fn a_busy_pool_is_returned_and_a_dropped_one_keeps_blocks_in_use() {
    let heap = Heap::new(4 << 20);
    let busy = pool(&heap, 64);
    let (kept, freed) = (busy.alloc_raw().unwrap(), busy.alloc_raw().unwrap());
    busy.free_raw(freed).unwrap();
    let busy = busy.destroy().unwrap_err();
    assert_eq!((busy.blocks, busy.first), (1, kept));
    assert!(busy.to_string().contains("1 blocks are allocated"));
    let pool = busy.pool;
    assert_eq!(pool.free_raw(freed), Err(FreeError::DoubleFree { addr: freed.as_ptr().as_ptr().addr() }));
    drop(pool);
    assert_eq!(heap.taken.lock().iter().filter(|&&taken| taken).count(), 1);
}

/// The n-th chunk is unavailable at first, for all n up to 10^3: the call fails and changes nothing; once the chunk is
/// available, the next call succeeds.
#[test]
fn a_source_that_fails_is_rolled_back_at_every_step() {
    // 4 KiB chunks, because the span is aligned to no more than that: a thousand of them are a thousand steps.
    let heap = Heap::new(5 << 20);
    let pages = heap.page_aligned();
    let pool = DmaPool::new(&pages, "faults", 2048, 0, 1 << 20).unwrap();
    let mut local = pool.local();
    let mut slots = [None; 1];
    for n in 1..=1000 {
        let before = pool.stats();
        heap.left.store(0, Ordering::Relaxed);
        // Uses up all free blocks, those of the pool's own owner included, then fails; through one of three calls.
        let mut alloc = || match n % 3 {
            0 => local.alloc_raw(),
            1 => pool.alloc_raw(),
            _ => match local.fill(&mut slots) {
                0 => Err(AllocError::Source(heap.exhausted(Order::PAGE))),
                _ => Ok(slots[0].take().unwrap()),
            },
        };
        let mut got = 0;
        let failed = loop {
            match alloc() {
                Ok(_) => got += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(failed, AllocError::Source(SourceError::Frames(FrameError::Exhausted { .. }))));
        let after = pool.stats();
        assert_eq!((after.chunks, after.bytes, after.blocks), (before.chunks, before.bytes, before.blocks));
        assert_eq!(after.in_use, before.in_use + got);
        heap.left.store(usize::MAX, Ordering::Relaxed);
        // Now the chunk is available.
        alloc().unwrap();
        assert_eq!(pool.stats().chunks, before.chunks + 1);
        assert_eq!(pool.stats().in_use, after.in_use + 1);
    }
}

#[test]
fn a_large_chunk_that_is_unavailable_is_replaced_by_a_smaller_one() {
    for n in 1..=60 {
        let heap = Heap::new(16 << 20);
        heap.fail_at(n);
        let pool = pool(&heap, 64);
        let mut slots = vec![None; 100_000];
        let full = pool.fill(&mut slots);
        // Only the first two chunks, of one page, have no smaller replacement.
        let expected = [0, 64].get(n - 1).copied().unwrap_or(100_000);
        assert_eq!(full, expected);
        assert_eq!(pool.fill(&mut slots), 100_000);
        let distinct: HashSet<_> = slots.iter().flatten().collect();
        assert_eq!(distinct.len(), 100_000);
        pool.free_slots(&mut slots).unwrap();
        assert!(slots.iter().all(Option::is_none));
        pool.destroy().unwrap();
        assert!(!heap.taken.lock().contains(&true));
    }
}

#[test]
fn where_large_chunks_are_refused_small_ones_are_asked_for_first() {
    let heap = Heap::new(16 << 20);
    // Every second page is free of the first 12 MiB, and none of the rest.
    for (page, taken) in heap.taken.lock().iter_mut().enumerate() {
        *taken = page % 2 == 0 || page >= 3072;
    }
    let pool = pool(&heap, 64);
    let mut slots = vec![None; 1500 * 64];
    assert_eq!(pool.fill(&mut slots), slots.len());
    assert_eq!(heap.acquired.load(Ordering::Relaxed), 1500);
    // Up to nine orders are refused before a page, for each chunk, if nothing is learnt from it.
    let asked = heap.asked.load(Ordering::Relaxed);
    assert!(asked < 2 * 1500, "{asked}");
    // Large ones are found again.
    heap.taken.lock().iter_mut().skip(3072).for_each(|taken| *taken = false);
    let mut more = vec![None; 32 * 64 + 512 * 64];
    assert_eq!(pool.fill(&mut more), more.len());
    let chunks = pool.stats().chunks;
    assert!(chunks < 1500 + 32 + 9, "{chunks}");
}

/// What is left of a chunk, or of each boundary, behind its last block: a multiple of the size away from the others.
#[test]
fn an_address_behind_the_last_block_is_none() {
    for (size, boundary, last) in [(192, 0, 20), (96, 512, 4), (1000, 4096, 3)] {
        let heap = Heap::new(2 << 20);
        let pool = DmaPool::new(&heap, "test", size, 0, boundary).unwrap();
        let mut local = pool.local();
        let blocks: Vec<_> = (0..200).map(|_| local.alloc_raw().unwrap()).collect();
        let behind = moved(blocks[last], size as isize);
        assert!(!blocks.contains(&behind));
        for freed in [local.free_raw(behind), pool.free_raw(behind), pool.memory(behind).map(|_| ())] {
            assert!(matches!(freed, Err(FreeError::Misaligned { .. })), "{freed:?}");
        }
        assert_eq!(local.free_bulk(&[blocks[last], behind]).unwrap_err().freed, 1);
        assert_eq!(pool.stats().in_use, 199);
    }
}
