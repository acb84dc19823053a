//! Neighbouring blocks that are freed at once.

use super::super::state::{self, REMOTE_FREED};
use super::*;
use crate::sync::AtomicU8;
use crate::sync::lot::LOT;
use loom::sync::atomic::AtomicBool;

/// A row's owner frees both of its blocks at once, and another owner one of them: one free of that block is valid, the other is
/// refused or detected late.
fn a_run_freed_here_and_a_block_of_it_elsewhere(which: usize) {
    check(move || {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let twice = [x, y][which];
        let other = elsewhere(&pool, move |pool, b| pool.free_again(b, twice));
        let here = pool.free_run(&mut a, x, 2);
        // Refused at the block that the other owner has freed: what is behind it is still allocated.
        for &block in [x, y].iter().skip(here + 1) {
            assert!(pool.free_again(&mut a, block));
        }
        pool.depot.retire(&mut a);
        let there = other.join().unwrap();
        assert!(here == 2 || (here == which && there));
        assert_eq!(pool.is_whole(), u64::from(here == 2 && there));
    });
}

#[test]
fn a_run_freed_while_its_first_block_is_freed_remotely() {
    a_run_freed_here_and_a_block_of_it_elsewhere(0);
}

#[test]
fn a_run_freed_while_its_last_block_is_freed_remotely() {
    a_run_freed_here_and_a_block_of_it_elsewhere(1);
}

/// The row has no owner: one of the two adopts it, by a free of both its blocks or of one.
#[test]
fn a_run_whose_row_has_no_owner_freed_against_a_free_of_its_block() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let z = pool.alloc(&mut a).unwrap();
        let other = elsewhere(&pool, move |pool, b| {
            let freed = pool.free_run(b, x, 2);
            // As above.
            freed + [x, y].iter().skip(freed + 1).filter(|&&block| pool.free_again(b, block)).count()
        });
        let here = pool.free_again(&mut a, x);
        assert!(pool.free(&mut a, z));
        pool.depot.retire(&mut a);
        let frees = other.join().unwrap() + usize::from(here);
        assert!(frees >= 2);
        assert_eq!(pool.is_whole(), frees as u64 - 2);
    });
}

/// Eight states that are stored together, where a row of this model has but two. Another owner frees one of the blocks: each is
/// freed once, or its last state says that both have done it; and a free that happened before is not overwritten.
#[test]
fn eight_blocks_freed_together_while_one_of_them_is_freed_remotely() {
    for which in [0, 3, LOT - 1] {
        check(move || {
            let states: [AtomicU8; LOT] = core::array::from_fn(|_| AtomicU8::new(Form::Raw as u8));
            let shared = Arc::new((states, AtomicBool::new(false)));
            let other = {
                let shared = shared.clone();
                thread::spawn(move || {
                    let (states, done) = &*shared;
                    // As `Row::remote_free`.
                    let from = (Form::Raw as u8, REMOTE_FREED);
                    let freed = states[which]
                        .compare_exchange(from.0, from.1, Ordering::AcqRel, Ordering::Relaxed)
                        .is_ok();
                    done.store(freed, Ordering::Release);
                    freed
                })
            };
            let (states, done) = &*shared;
            let before = done.load(Ordering::Acquire);
            let here = state::free_run(states, 0);
            let there = other.join().unwrap();
            assert!(here == LOT || (here == which && there), "{here} here, {there} there");
            assert!(!before || here == which, "a block that was freed before is freed again");
            for (at, state) in states.iter().enumerate() {
                // The store of the row's owner comes last: what `Row::collect` finds then is a second free.
                let left = if at < here {
                    state::FREE
                } else if at == which {
                    REMOTE_FREED
                } else {
                    Form::Raw as u8
                };
                assert_eq!(state.load(Ordering::Relaxed), left, "block {at} of {here}");
            }
        });
    }
}
