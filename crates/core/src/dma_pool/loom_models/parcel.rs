//! Blocks of another owner's row that a call for many frees: marked one by one, announced together.

use super::*;

/// Frees blocks by one call.
fn free_together(pool: &Pool, owner: &mut Owner, blocks: [u64; 2], form: Form) -> [bool; 2] {
    owner.gather();
    let freed = blocks.map(|block| {
        pool.use_memory(block);
        pool.free_as(owner, block, form).is_ok()
    });
    owner.announce();
    freed
}

/// Both blocks of a row that its owner leaves, releases and allocates from again meanwhile.
#[test]
fn frees_announced_together_against_the_release_of_their_row() {
    for form in [Form::Raw, Form::Owned] {
        check(move || {
            let pool = Pool::new();
            let mut a = pool.depot.register();
            let both = [pool.alloc_as(&mut a, form).unwrap(), pool.alloc_as(&mut a, form).unwrap()];
            let other = elsewhere(&pool, move |pool, b| free_together(pool, b, both, form));
            let z = pool.alloc(&mut a).unwrap();
            assert!(pool.free(&mut a, z));
            pool.depot.retire(&mut a);
            assert_eq!(other.join().unwrap(), [true, true]);
            assert_eq!(pool.is_whole(), 0);
        });
    }
}

/// The row's owner frees one of the blocks itself, wrongly, in the same instant.
#[test]
fn one_of_two_frees_announced_together_is_a_second_one() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let shared = pool.clone();
        let other = elsewhere(&pool, move |_, b| {
            b.gather();
            let freed = [x, y].map(|block| shared.free_again(b, block));
            b.announce();
            freed
        });
        let here = pool.free_again(&mut a, x);
        pool.depot.retire(&mut a);
        let [there, alone] = other.join().unwrap();
        assert!(alone && (here || there));
        assert_eq!(pool.is_whole(), u64::from(here && there));
    });
}

/// The marks and the announcement are apart: until that, neither owner allocates the block.
#[test]
fn a_marked_block_is_allocated_once() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let mut b = pool.depot.register();
        let shared = pool.clone();
        let other = thread::spawn(move || {
            assert_eq!(free_together(&shared, &mut b, [x, y], Form::Raw), [true, true]);
            b
        });
        let mut allocated: BTreeSet<_> = core::iter::from_fn(|| pool.alloc(&mut a)).collect();
        let count = allocated.len();
        let mut b = other.join().unwrap();
        for owner in [&mut a, &mut b] {
            while let Some(block) = pool.alloc(owner) {
                assert!(allocated.insert(block), "{block} twice");
            }
        }
        assert!(count >= 2 && allocated.len() <= 4);
    });
}

/// A block that one call frees twice, and its row's owner frees and allocates again in between: a second free that was not refused
/// is counted.
#[test]
fn a_block_that_one_call_frees_twice() {
    check(|| {
        let (pool, mut a, x, _y) = with_an_allocated_row();
        let shared = pool.clone();
        let other = elsewhere(&pool, move |_, b| {
            b.gather();
            let freed = [(); 2].map(|()| shared.free_again(b, x));
            b.announce();
            freed
        });
        let here = pool.free_again(&mut a, x);
        let again = here && pool.alloc(&mut a) == Some(x);
        let there = other.join().unwrap().map(u64::from).iter().sum::<u64>();
        // What is still allocated of the row: `y`, and `x` if no free came after.
        let number = |block| split(pool.geometry.index_of(block));
        let live = [x, x + SIZE].into_iter().filter(|&block| {
            let (row, bit) = number(block);
            pool.chunk.row(row).unwrap().is_live(bit)
        });
        let live: Vec<_> = live.collect();
        let left = live.len() as u64;
        for block in live {
            assert!(pool.free_again(&mut a, block));
        }
        pool.depot.retire(&mut a);
        let (allocs, frees) = (2 + u64::from(again), u64::from(here) + there);
        let late = pool.is_whole();
        assert_eq!(left + frees, allocs + late);
    });
}

/// Two calls free the blocks of one row together, while its owner leaves it, releases it, and allocates from it again.
#[test]
fn two_calls_that_free_blocks_of_one_row() {
    for form in [Form::Raw, Form::Owned] {
        check_within(2, move || {
            let pool = Pool::new();
            let mut a = pool.depot.register();
            let all = [(); 4].map(|()| pool.alloc_as(&mut a, form).unwrap());
            let [w, x, y, z] = all;
            // Each has a block of both rows.
            let first = elsewhere(&pool, move |pool, b| free_together(pool, b, [w, y], form));
            let second = elsewhere(&pool, move |pool, c| free_together(pool, c, [x, z], form));
            pool.depot.retire(&mut a);
            assert_eq!(first.join().unwrap(), [true, true]);
            assert_eq!(second.join().unwrap(), [true, true]);
            assert_eq!(pool.is_whole(), 0);
        });
    }
}

/// The row's owner releases it, and a third owner adopts it, while a call has marked a block and not announced it.
#[test]
fn a_parcel_against_the_adoption_of_its_row() {
    check_within(2, || {
        let pool = Pool::new();
        let mut a = pool.depot.register();
        let [w, x, y, _z] = [(); 4].map(|()| pool.alloc_as(&mut a, Form::Raw).unwrap());
        let first = elsewhere(&pool, move |pool, b| free_together(pool, b, [w, y], Form::Raw));
        let second = elsewhere(&pool, move |pool, c| {
            assert!(pool.free(c, x));
            // May get its own block, or what the other call has freed.
            pool.alloc(c).is_none_or(|block| pool.free(c, block))
        });
        a.release(2);
        assert_eq!(first.join().unwrap(), [true, true]);
        assert!(second.join().unwrap());
        pool.depot.retire(&mut a);
        let mut owner = pool.depot.register();
        let free: BTreeSet<_> = core::iter::from_fn(|| pool.alloc(&mut owner)).collect();
        assert_eq!(free.len(), 3, "{free:?}");
    });
}

/// The row moves to the depot and is lent to the owner whose call has marked one of its blocks.
#[test]
fn a_parcel_of_a_row_that_its_sender_gets_from_the_depot() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let other = elsewhere(&pool, move |pool, b| {
            b.gather();
            pool.use_memory(x);
            assert!(pool.free_as(b, x, Form::Raw).is_ok());
            // As an iterator of `LocalCell::free_many`.
            let taken: Vec<_> = core::iter::from_fn(|| pool.alloc(b)).collect();
            assert!(!taken.contains(&y));
            for &block in &taken {
                assert!(pool.free(b, block));
            }
            b.announce();
            taken.len()
        });
        let z = pool.alloc(&mut a);
        z.into_iter().for_each(|z| assert!(pool.free(&mut a, z)));
        pool.depot.retire(&mut a);
        assert!(other.join().unwrap() <= 3);
        let mut owner = pool.depot.register();
        assert!(pool.free(&mut owner, y));
        pool.depot.retire(&mut owner);
        assert_eq!(pool.is_whole(), 0);
    });
}
