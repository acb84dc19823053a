//! Bulk calls, which take neighbours together, against calls for one block each.

use super::*;
use proptest::prelude::*;

/// What is wrong with one of the blocks that a bulk call frees.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Twice,
    Misaligned,
    OtherIova,
    OtherAddress,
    Foreign,
}

fn wrong() -> impl Strategy<Value = Option<Wrong>> {
    proptest::option::of(prop_oneof![
        Just(Wrong::Twice),
        Just(Wrong::Misaligned),
        Just(Wrong::OtherIova),
        Just(Wrong::OtherAddress),
        Just(Wrong::Foreign)
    ])
}

/// Sizes, and boundaries that leave gaps between blocks.
fn geometry() -> impl Strategy<Value = (usize, usize)> {
    prop_oneof![Just((64, 0)), Just((128, 4096)), Just((96, 512)), Just((4096, 0))]
}

proptest! {
    #[test]
    fn bulk_calls_do_what_single_calls_do(
        (size, boundary) in geometry(),
        taken in proptest::collection::vec(any::<bool>(), 1..300),
        order in any::<u64>(),
        shuffled in 0u8..4,
        at in any::<proptest::sample::Index>(),
        wrong in wrong(),
    ) {
        let heap = Heap::new(4 << 20);
        let pool = DmaPool::new(&heap, "bulk", size, 0, boundary).unwrap();
        let mut local = pool.local();
        // Holes of all lengths among the free blocks, and slots that are full already.
        let many: Vec<_> = (0..taken.len()).map(|_| local.alloc_raw().unwrap()).collect();
        let mut slots = vec![None; taken.len()];
        for ((block, slot), &kept) in many.iter().zip(&mut slots).zip(&taken) {
            if kept {
                *slot = Some(*block);
            } else {
                local.free_raw(*block).unwrap();
            }
        }
        let before = slots.clone();
        prop_assert_eq!(local.fill(&mut slots), slots.len());
        prop_assert!(before.iter().zip(&slots).all(|(old, new)| old.is_none() || old == new));
        let distinct: HashSet<_> = slots.iter().flatten().map(|block| (block.as_ptr(), block.iova())).collect();
        prop_assert_eq!(distinct.len(), slots.len());
        for block in slots.iter().flatten() {
            let offset = block.as_ptr().addr().get() as u64 - heap.base.as_ptr().addr() as u64;
            prop_assert_eq!(block.iova().raw(), IOVA + offset);
        }
        prop_assert_eq!(pool.stats().in_use, slots.len() as u64);

        let mut random = Random::new(order | 1);
        match shuffled {
            0 => slots.reverse(),
            1 => (1..slots.len()).rev().for_each(|i| slots.swap(i, random.below(i + 1))),
            _ => {}
        }
        if shuffled == 3 {
            slots.push(None);
        }
        let at = at.index(taken.len());
        let correct = slots.clone();
        // Nothing is freed twice where there is no block before the first.
        let broken = wrong.filter(|wrong| !matches!(wrong, Wrong::Twice) || at > 0);
        if let Some(wrong) = broken {
            let block = slots[at].unwrap();
            slots[at] = Some(match wrong {
                Wrong::Twice => slots[at - 1].unwrap(),
                Wrong::Misaligned => moved(block, 8),
                Wrong::OtherIova => RawBlock::from_parts(block.as_ptr(), Iova::new(block.iova().raw() ^ 64)),
                Wrong::OtherAddress => RawBlock::from_parts(moved(block, size as isize).as_ptr(), block.iova()),
                Wrong::Foreign => moved(block, 1 << 40),
            });
        }
        let freed = local.free_slots(&mut slots);
        match broken {
            None => {
                prop_assert_eq!(freed, Ok(()));
                prop_assert!(slots.iter().all(Option::is_none));
            }
            Some(wrong) => {
                let error = freed.unwrap_err();
                prop_assert_eq!(error.freed, at);
                let named = matches!(
                    (wrong, error.error),
                    (Wrong::Twice, FreeError::DoubleFree { .. })
                        | (Wrong::Misaligned, FreeError::Misaligned { .. })
                        | (Wrong::OtherIova, FreeError::WrongIova { .. })
                        | (Wrong::OtherAddress, FreeError::WrongIova { .. })
                        // Behind the last block of a chunk, or of a boundary.
                        | (Wrong::OtherAddress, FreeError::Misaligned { .. } | FreeError::Foreign { .. })
                        | (Wrong::Foreign, FreeError::Foreign { .. })
                );
                prop_assert!(named, "{:?}: {:?}", wrong, error);
                prop_assert!(slots[..at].iter().all(Option::is_none));
                prop_assert_eq!(&slots[at + 1..], &correct[at + 1..]);
                let rest: Vec<_> = correct[at..].iter().flatten().copied().collect();
                local.free_bulk(&rest).unwrap();
            }
        }
        prop_assert_eq!(pool.stats().in_use, 0);
        // All of it can be allocated again, once.
        let again: HashSet<_> = (0..taken.len()).map(|_| local.alloc_raw().unwrap().as_ptr()).collect();
        prop_assert_eq!(again.len(), taken.len());
    }
}

#[test]
fn whole_rows_of_blocks_with_gaps_are_allocated_at_their_addresses() {
    let heap = Heap::new(4 << 20);
    let pool = DmaPool::new(&heap, "gaps", 96, 0, 512).unwrap();
    pool.set_limits(Limits { minimum: 2_000, maximum: u64::MAX }).unwrap();
    let mut local = pool.local();
    let mut slots = vec![None; 500];
    slots[0] = local.alloc_raw().ok();
    assert!(local.owner.whole.len() >= 2);
    assert_eq!(local.fill(&mut slots), 500);
    for block in slots.iter().flatten() {
        assert!(pool.memory(*block).is_ok(), "{block:?}");
    }
    local.free_slots(&mut slots).unwrap();
    assert_eq!(pool.stats().in_use, 0);
}

/// In the middle of blocks that follow each other, in each place of a lot that is compared at a time.
#[test]
fn a_block_with_one_wrong_address_among_neighbours_is_refused() {
    for at in 1..64 {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        let mut local = pool.local();
        let mut blocks: Vec<_> = (0..64).map(|_| local.alloc_raw().unwrap()).collect();
        let (block, next) = (blocks[at], blocks[(at + 1) % 64]);
        for wrong in [
            RawBlock::from_parts(next.as_ptr(), block.iova()),
            RawBlock::from_parts(block.as_ptr(), next.iova()),
        ] {
            blocks[at] = wrong;
            let error = local.free_bulk(&blocks).unwrap_err();
            assert!(matches!(error.error, FreeError::WrongIova { .. }), "{error}");
            assert_eq!((error.freed, pool.stats().in_use), (at, 64 - at as u64));
            blocks[..at].fill_with(|| local.alloc_raw().unwrap());
            blocks[..at].sort_unstable_by_key(RawBlock::iova);
        }
    }
}

/// An owner that frees what it has allocated keeps its spent rows: nothing changes owners but what the depot is lent.
#[cfg(feature = "count-rmw")]
#[test]
fn rows_that_an_owner_frees_itself_are_not_exchanged() {
    let heap = Heap::new(64 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let mut slots = [None; 512];
    for round in 0..20 {
        crate::sync::rmw_reset();
        assert_eq!(local.fill(&mut slots), 512);
        local.free_slots(&mut slots).unwrap();
        let made = crate::sync::rmw_count();
        assert!(round == 0 || made <= 512 / 50, "{made} read-modify-writes for 512 blocks");
    }
}

/// An owner that keeps its spent rows, since it has freed its own blocks, learns that others free them.
#[test]
fn what_others_free_in_rows_that_were_kept_is_allocated_again() {
    let heap = Heap::new(64 << 20);
    let pool = pool(&heap, 64);
    let (mut local, mut other) = (pool.local(), pool.local());
    let mut slots = [None; 2048];
    for _ in 0..3 {
        assert_eq!(local.fill(&mut slots), 2048);
        local.free_slots(&mut slots).unwrap();
    }
    assert_eq!(local.fill(&mut slots), 2048);
    let blocks = pool.stats().blocks;
    let mut more = Vec::new();
    // Until the pool is exhausted, so that what it has is what it is asked for.
    while pool.stats().blocks == blocks {
        more.push(local.alloc_raw().unwrap());
    }
    let blocks = pool.stats().blocks;
    while (more.len() as u64) < blocks - 2048 {
        more.push(local.alloc_raw().unwrap());
    }
    other.free_slots(&mut slots).unwrap();
    // What the other owner adopted, it moves to the depot but for what it may keep.
    drop(other);
    assert_eq!(local.fill(&mut slots), 2048);
    assert_eq!(pool.stats().blocks, blocks, "the pool has not grown");
    assert_eq!(pool.stats().in_use, blocks);
}
