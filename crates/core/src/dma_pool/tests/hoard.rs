//! The memory that owners hold is bounded, as documented in the module.

use super::*;
use std::sync::mpsc;

const ROW: u64 = 64;
/// Blocks that an owner may hold at any use: free rows, the current one, spent ones with remote frees, and the stash.
const SLACK: u64 = (32 + 1 + 128) * ROW + 2 * 16;

/// The bound of the module documentation in blocks, without the newest chunk.
fn bound(live: u64, owners: u64) -> u64 {
    2 * live + owners * SLACK
}

/// Allocates all blocks that are available.
fn exhaust<'h, H: Hold<Target = DmaPool<&'h Heap>>>(local: &mut Local<&'h Heap, H>) -> Vec<RawBlock> {
    std::iter::from_fn(|| local.alloc_raw().ok()).collect()
}

#[test]
fn remote_frees_to_any_spent_row_are_found() {
    // More rows than an owner releases at a time, each freed into and allocated from since.
    let heap = Heap::new(2 << 20);
    let pool = pool(&heap, 64);
    let (mut a, mut b) = (pool.local(), pool.local());
    let mut blocks = exhaust(&mut a);
    assert_eq!(blocks.len(), 32_768);
    for row in blocks.chunks_mut(64) {
        a.free_raw(row[0]).unwrap();
        row[0] = a.alloc_raw().unwrap();
    }
    // Freed remotely, the least recently used first.
    let (freed, rest) = blocks.split_at(16_384);
    b.free_bulk(freed).unwrap();
    for left in (1..=16_384u64).rev() {
        assert!(a.alloc_raw().is_ok() || left <= SLACK, "{left} blocks are free");
    }
    assert!(!rest.is_empty());
}

#[test]
fn blocks_of_half_free_rows_are_available_to_other_owners() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let (mut a, mut b) = (pool.local(), pool.local());
    let blocks = exhaust(&mut a);
    let freed: Vec<_> = blocks.iter().copied().step_by(2).collect();
    b.free_bulk(&freed).unwrap();
    let got = exhaust(&mut a).len() as u64;
    assert!(got + 33 * ROW >= freed.len() as u64, "{got} of {}", freed.len());
}

#[test]
fn one_owner_allocates_and_another_frees_63_of_64() {
    // The live blocks stay within the bound.
    let live = (65_536 - 3 * SLACK) / 2;
    for (zone, live) in [(4 << 20, live), (64 << 20, 20_000)] {
        let heap = Heap::new(zone);
        let pool = pool(&heap, 64);
        let (mut a, mut b) = (pool.local(), pool.local());
        let mut slots = [None; 64];
        for (kept, slot) in (0..live).zip((0..64).cycle()) {
            assert_eq!(a.fill(&mut slots), 64, "with {kept} blocks in use");
            slots[slot] = None;
            b.free_slots(&mut slots).unwrap();
        }
        let stats = pool.stats();
        assert_eq!(stats.in_use, live);
        let newest = (2 << 20) / 64;
        assert!(stats.blocks <= bound(live + 64, 3) + newest, "{stats:?}");
    }
}

#[test]
fn nearly_free_rows_of_a_single_owner_are_available_to_a_later_one() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let mut a = pool.local();
    let blocks = exhaust(&mut a);
    for row in blocks.chunks(64) {
        a.free_bulk(&row[1..]).unwrap();
    }
    // The first owner makes no more calls from here on.
    let got = exhaust(&mut pool.local()).len() as u64;
    assert!(got + SLACK >= 63 * 1024, "{got} of {}", 63 * 1024);
    // What the pool's own owner holds is available too.
    drop(a);
    let (live, mut b) = (pool.stats().in_use, pool.local());
    let blocks: Vec<_> = std::iter::from_fn(|| pool.alloc_raw().ok()).collect();
    pool.free_bulk(&blocks).unwrap();
    assert_eq!(exhaust(&mut b).len() as u64 + live, pool.stats().blocks);
}

/// Two owners alternately free blocks of the same rows, and neither allocates: remote frees are collected.
#[test]
fn two_owners_free_what_a_third_allocates() {
    let heap = Heap::new(64 << 20);
    let pool = pool(&heap, 64);
    let (mut a, mut b, mut c) = (pool.local(), pool.local(), pool.local());
    let mut slots = [None; 64];
    let live = 20_000;
    for kept in 0..live {
        assert_eq!(a.fill(&mut slots), 64, "with {kept} blocks in use");
        slots[kept % 64] = None;
        let (first, second) = slots.split_at_mut(20);
        b.free_slots(first).unwrap();
        c.free_slots(second).unwrap();
    }
    let stats = pool.stats();
    assert_eq!(stats.in_use, live as u64);
    let newest = (2 << 20) / 64;
    assert!(stats.blocks <= bound(live as u64 + 64, 4) + newest, "{stats:?}");
}

#[test]
fn a_producer_and_a_consumer_use_memory_for_the_blocks_in_transit_only() {
    let heap = Heap::new(64 << 20);
    let pool = pool(&heap, 64);
    let batches = if cfg!(miri) { 50 } else { 4_000 };
    crate::testing::scope(|scope| {
        let (send, receive) = mpsc::sync_channel::<[Option<RawBlock>; 64]>(4);
        let pool = &pool;
        scope.spawn(move || {
            let mut local = pool.local();
            for mut batch in receive {
                local.free_slots(&mut batch).unwrap();
            }
        });
        let mut local = pool.local();
        for _ in 0..batches {
            let mut batch = [None; 64];
            assert_eq!(local.fill(&mut batch), 64);
            send.send(batch).unwrap();
        }
    });
    // Five batches in the channel and one on each side.
    let stats = pool.stats();
    assert!(stats.blocks <= 2 * bound(7 * 64, 3), "{stats:?}");
    pool.destroy().unwrap();
}

/// Owners with live sets of changing sizes free each other's blocks; at every growth the pool is within the bound for its
/// peak of live blocks.
#[test]
fn many_owners_with_live_sets_of_random_sizes() {
    let heap = Heap::new(64 << 20);
    let pool = pool(&heap, 64);
    let mut locals: Vec<_> = (0..12).map(|_| pool.local()).collect();
    let mut sets: Vec<Vec<RawBlock>> = vec![Vec::new(); 12];
    let mut random = Random::new(7);
    let mut random = |below| random.below(below);
    let (mut live, mut most) = (0usize, 0usize);
    for _ in 0..if cfg!(miri) { 20 } else { 600 } {
        let (who, set) = (random(12), random(12));
        let size = random(4_000);
        while sets[set].len() < size {
            sets[set].push(locals[who].alloc_raw().unwrap());
            live += 1;
        }
        most = most.max(live);
        while sets[set].len() > size {
            let at = random(sets[set].len());
            locals[who].free_raw(sets[set].swap_remove(at)).unwrap();
            live -= 1;
        }
        let stats = pool.stats();
        assert_eq!(stats.in_use, live as u64);
        let newest = (2 << 20) / 64;
        assert!(stats.blocks <= bound(most as u64, 13) + newest, "{most} in use at most: {stats:?}");
    }
}

/// A row of such blocks has 256 KiB: the zone has four for each owner.
#[test]
fn a_thousand_owners_find_a_block_each() {
    const OWNERS: usize = if cfg!(miri) { 32 } else { 1024 };
    for in_turn in [true, false] {
        let heap = Heap::new(OWNERS << 20);
        let pool = pool(&heap, 4096);
        let mut owners = Vec::new();
        let mut blocks = HashSet::new();
        for _ in 0..OWNERS {
            owners.push(pool.local());
            if in_turn {
                blocks.insert(owners.last_mut().unwrap().alloc_raw().unwrap());
            }
        }
        for owner in &mut owners {
            if !in_turn {
                blocks.insert(owner.alloc_raw().unwrap());
            }
        }
        assert_eq!(blocks.len(), OWNERS);
        let error = loop {
            match owners[0].alloc_raw() {
                Ok(block) => assert!(blocks.insert(block)),
                Err(error) => break error,
            }
        };
        assert!(
            error.to_string().contains("; other owners of the pool may hold free blocks: drop"),
            "{error}"
        );
    }
}

/// An owner that is refused every free does not collect rows, in which it would not notice the frees of others.
#[test]
fn refused_frees_do_not_pile_up_rows() {
    let heap = Heap::new(64 << 20);
    let pool = pool(&heap, 64);
    let (mut idle, mut busy) = (pool.local(), pool.local());
    for _ in 0..10 {
        let blocks: Vec<_> = (0..40_000).map(|_| busy.alloc().unwrap()).collect();
        for block in &blocks {
            assert!(idle.free_raw(block.as_raw()).is_err());
        }
        blocks.into_iter().for_each(|block| busy.free(block));
    }
    let stats = pool.stats();
    assert!(stats.blocks <= bound(40_000, 3) + 32_768, "{stats:?}");
}

/// A quarter of the pool's rows divided by its owners, but 8 to 32, and at most all of them divided by the owners.
#[test]
fn what_an_owner_keeps_is_its_share_of_the_rows() {
    // The pool's own owner is one of them.
    for (owners, keep) in [(2, 32), (4, 32), (8, 16), (16, 8), (64, 8), (128, 4), (512, 1), (1024, 1)] {
        let heap = Heap::new(2 << 20);
        let pool = pool(&heap, 64);
        pool.set_limits(Limits { minimum: 512 * ROW, maximum: 512 * ROW }).unwrap();
        let mut locals: Vec<_> = (1..owners).map(|_| pool.local()).collect();
        let local = &mut locals[0];
        let blocks: Vec<_> = (0..200 * ROW).map(|_| local.alloc_raw().unwrap()).collect();
        // In whole rows, past the stash.
        local.free_bulk(&blocks).unwrap();
        let kept = local.owner.sparse.len() + local.owner.whole.len();
        assert!((keep / 2..=keep).contains(&kept), "{kept} rows of 512 with {owners} owners");
    }
}
