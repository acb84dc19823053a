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
