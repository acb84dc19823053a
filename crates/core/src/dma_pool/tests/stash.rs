//! The stash: what it gives out is counted and checked like any other block, and it returns its blocks.

use super::*;

type Own<'p, 'h> = Local<&'h Heap, &'p DmaPool<&'h Heap>>;

/// Allocates the blocks of a row, and the first one of the next, which is the current row then: frees of the others, one after
/// the other, fill the stash.
pub(super) fn row_before_the_current<S: ChunkSource>(local: &mut Local<S, &DmaPool<S>>) -> Vec<RawBlock> {
    let blocks = (0..64).map(|_| local.alloc_raw().unwrap()).collect();
    local.alloc_raw().unwrap();
    blocks
}

/// The last block is in the stash of the first owner, and its row is the second owner's.
fn stash_in_a_row_of_another<'p, 'h>(
    pool: &'p DmaPool<&'h Heap>,
) -> (Own<'p, 'h>, Own<'p, 'h>, Vec<RawBlock>) {
    let mut local = pool.local();
    let blocks: Vec<_> = std::iter::from_fn(|| local.alloc_raw().ok()).collect();
    for _ in 0..2 {
        local.free_raw(blocks[32_767]).unwrap();
        assert_eq!(local.alloc_raw().unwrap(), blocks[32_767]);
    }
    local.free_raw(blocks[32_767]).unwrap();
    for &first in blocks.iter().step_by(64).take(200) {
        local.free_bulk(&[first]).unwrap();
        let mut slot = [None];
        assert_eq!((local.fill(&mut slot), slot), (1, [Some(first)]));
    }
    let mut other = pool.local();
    other.free_raw(blocks[32_766]).unwrap();
    (local, other, blocks)
}

#[test]
fn the_block_given_out_last_is_freed_as_it_was_allocated() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let raw: Vec<_> = (0..3).map(|_| local.alloc_raw().unwrap()).collect();
    raw.iter().for_each(|&raw| local.free_raw(raw).unwrap());
    let owned = local.alloc().unwrap();
    let block = owned.as_raw();
    assert_eq!(local.free_raw(block), Err(FreeError::Owned { addr: block.addr() }));
    local.free(owned);
    assert_eq!(pool.stats().in_use, 0);
}

/// The slot above the top of the stash still names a block that came back below.
#[test]
fn a_block_that_returned_to_another_slot_of_the_stash_is_not_freed_again() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks = row_before_the_current(&mut local);
    let (x, y) = (blocks[0], blocks[1]);
    local.free_raw(x).unwrap();
    local.free_raw(y).unwrap();
    assert_eq!((local.alloc_raw(), local.alloc_raw()), (Ok(y), Ok(x)));
    local.free_raw(y).unwrap();
    assert_eq!(local.free_raw(y), Err(FreeError::DoubleFree { addr: y.addr() }));
    local.free_raw(x).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| local.alloc_raw().ok()).collect();
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
}

/// The slot above names a block that was popped before, and is allocated: it must not be freed in the place of the other.
#[test]
fn a_second_free_of_the_block_given_out_last_frees_no_other() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks = row_before_the_current(&mut local);
    blocks[..16].iter().for_each(|&block| local.free_raw(block).unwrap());
    let again: Vec<_> = (0..16).map(|_| local.alloc_raw().unwrap()).collect();
    for &block in again.iter().rev() {
        local.free_raw(block).unwrap();
        assert_eq!(local.free_raw(block), Err(FreeError::DoubleFree { addr: block.addr() }));
    }
    assert_eq!(pool.stats().in_use, 65 - 16);
}

/// Its distance from the start of the span is that of no block, modulo 2^64 too.
#[test]
fn an_address_before_the_span_is_none_of_a_stash() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks = row_before_the_current(&mut local);
    let (x, y) = (blocks[0], blocks[1]);
    // In each state of the stash; the slot above the top names an allocated block in some.
    let steps: [fn(&mut Own<'_, '_>, RawBlock, RawBlock); 6] = [
        |local, x, _| local.free_raw(x).unwrap(),
        |local, _, y| local.free_raw(y).unwrap(),
        |local, _, y| assert_eq!(local.alloc_raw(), Ok(y)),
        |local, x, _| assert_eq!(local.alloc_raw(), Ok(x)),
        |local, x, _| local.free_raw(x).unwrap(),
        |local, x, _| assert_eq!(local.alloc_raw(), Ok(x)),
    ];
    for step in steps {
        step(&mut local, x, y);
        for bytes in [1, 64] {
            let before = RawBlock::from_parts(
                NonNull::new(heap.base.as_ptr().wrapping_sub(bytes)).unwrap(),
                Iova::new(IOVA - bytes as u64),
            );
            let in_use = pool.stats().in_use;
            assert!(matches!(local.free_raw(before), Err(FreeError::Foreign { .. })));
            assert!(local.free_bulk(&[before]).is_err());
            assert_eq!(pool.stats().in_use, in_use);
        }
    }
}

/// Blocks of a row that are taken while there are some in the stash, and those then.
#[test]
fn blocks_from_the_stash_after_many_raise_the_high_water_mark() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks = row_before_the_current(&mut local);
    blocks[..16].iter().for_each(|&block| local.free_raw(block).unwrap());
    let mut slots = [None; 40];
    assert_eq!((local.fill(&mut slots), local.owner.stash.len()), (40, 16));
    let again: Vec<_> = (0..16).map(|_| local.alloc_raw().unwrap()).collect();
    local.free_slots(&mut slots).unwrap();
    local.free_bulk(&again).unwrap();
    drop(local);
    assert_eq!(pool.stats().high_water, 65 + 40);
}

#[test]
fn pairs_do_not_raise_the_high_water_mark() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    for _ in 0..100 {
        let block = local.alloc_raw().unwrap();
        local.free_raw(block).unwrap();
    }
    drop(local);
    assert_eq!(pool.stats().high_water, 1);
}

#[test]
fn blocks_from_the_stash_raise_the_high_water_mark() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut a, mut b) = (pool.local(), pool.local());
    for round in 0..2 {
        let blocks: Vec<_> = (0..16).map(|_| a.alloc_raw().unwrap()).collect();
        blocks.iter().for_each(|&block| a.free_raw(block).unwrap());
        if round == 0 {
            pool.depot.record(&mut a.owner);
            (0..1000).for_each(|_| _ = b.alloc_raw().unwrap());
            pool.depot.record(&mut b.owner);
        }
    }
    drop(a);
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.high_water), (1000, 1016));
}

#[test]
fn debug_mode_checks_each_block_that_was_freed_aside() {
    let heap = Heap::new(2 << 20);
    let pool = DmaPool::with_debug(&heap, "debug", 64, 0, 0).unwrap();
    let mut local = pool.local();
    let blocks: Vec<_> = (0..200).map(|_| local.alloc_raw().unwrap()).collect();
    // Neither the first nor the last of a row, and no two of one row in turn.
    for i in [5, 70, 135, 20, 90, 150] {
        local.free_raw(blocks[i]).unwrap();
        let at = blocks[i].as_ptr().as_ptr().addr() - heap.base.as_ptr().addr();
        heap.memory().write_u8(at + 3, 1).unwrap();
    }
    let mut again = Vec::new();
    for _ in 0..200 {
        let block = local.alloc_raw().unwrap();
        assert_eq!(pool.memory(block).unwrap().read_u8(3), Ok(FRESH_PATTERN));
        again.push(block);
    }
    assert_eq!(pool.stats().damaged, 6);
}

#[test]
fn a_dropped_owner_announces_what_its_stash_returned() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (local, _other, _) = stash_in_a_row_of_another(&pool);
    let before = pool.depot.notices();
    drop(local);
    assert_ne!(pool.depot.notices(), before);
}

#[test]
fn a_call_for_many_uses_its_own_stash_whoever_has_the_rows() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut local, _other, blocks) = stash_in_a_row_of_another(&pool);
    let mut slots = [None; 2];
    assert_eq!((local.fill(&mut slots), slots), (1, [Some(blocks[32_767]), None]));
}

#[test]
fn a_call_for_many_uses_the_blocks_of_the_stash() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks: Vec<_> = std::iter::from_fn(|| local.alloc_raw().ok()).collect();
    let freed: Vec<_> = (0..16).map(|i| blocks[i * 67 + 5]).collect();
    freed.iter().for_each(|&block| local.free_raw(block).unwrap());
    let mut slots = [None; 20];
    assert_eq!(local.fill(&mut slots), 16);
    assert_eq!(slots.iter().flatten().copied().collect::<HashSet<_>>(), freed.iter().copied().collect());
}

#[test]
fn an_owner_that_frees_and_allocates_in_turn_adopts_a_bounded_number_of_rows() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut a, mut b) = (pool.local(), pool.local());
    let blocks: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    assert_eq!(blocks.len(), 32_768);
    for row in blocks.chunks(64) {
        a.free_raw(row[5]).unwrap();
        assert_eq!(a.alloc_raw(), Ok(row[5]));
    }
    blocks.iter().for_each(|&block| b.free_raw(block).unwrap());
    let got = std::iter::from_fn(|| b.alloc_raw().ok()).count();
    assert!(got + 130 * 64 >= blocks.len(), "{got} of {}", blocks.len());
}

#[test]
fn a_stash_returns_a_block_whose_row_another_owner_has() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (local, mut other, blocks) = stash_in_a_row_of_another(&pool);
    drop(local);
    let all: HashSet<_> = std::iter::from_fn(|| other.alloc_raw().ok()).collect();
    assert_eq!(all, blocks[32_766..].iter().copied().collect());
}

#[test]
fn a_block_of_a_stash_is_freed_after_another_owner_got_its_row() {
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut local, mut other, blocks) = stash_in_a_row_of_another(&pool);
    let last = blocks[32_767];
    assert_eq!(local.alloc_raw().unwrap(), last);
    assert_eq!(other.alloc_raw().unwrap(), blocks[32_766]);
    local.free_raw(last).unwrap();
    assert_eq!(local.free_raw(last), Err(FreeError::DoubleFree { addr: last.addr() }));
    assert_eq!(other.free_raw(last), Err(FreeError::DoubleFree { addr: last.addr() }));
    // It is free in the other owner's row, and not in the stash.
    assert_eq!(other.alloc_raw().unwrap(), last);
    assert!(local.alloc_raw().is_err());
    assert_eq!(pool.stats().late_double_frees, 0);
}

/// The block under the top becomes the top when it is popped: it is recognised when it returns, in whatever state the rows are.
#[test]
fn a_block_from_below_the_top_is_recognised_when_it_returns() {
    let pool = DmaPool::new(Heap::new(2 << 20), "stash", 64, 64, 0).unwrap();
    let mut local = pool.local();
    let blocks = row_before_the_current(&mut local);
    blocks[..8].iter().for_each(|&block| local.free_raw(block).unwrap());
    for &block in blocks[..8].iter().rev() {
        assert_eq!(local.alloc_raw(), Ok(block));
        let offset = pool.place().offset_of(block).unwrap();
        assert!(local.owner.stash.top_at(offset).is_some());
    }
}

/// A stash whose top was popped has room for one more, which is not refused.
#[test]
fn a_stash_is_full_only_with_its_top() {
    let pool = DmaPool::new(Heap::new(2 << 20), "stash", 64, 64, 0).unwrap();
    let mut local = pool.local();
    let blocks = row_before_the_current(&mut local);
    blocks[..16].iter().for_each(|&block| local.free_raw(block).unwrap());
    assert!(local.owner.stash.is_full());
    assert_eq!(local.alloc_raw(), Ok(blocks[15]));
    assert!(!local.owner.stash.is_full());
    local.free_raw(blocks[20]).unwrap();
    assert_eq!((local.owner.stash.len(), local.alloc_raw()), (16, Ok(blocks[20])));
}
