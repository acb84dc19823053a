//! Tests that the baselines are correct: a wrong baseline proves nothing.

use super::block::{Block, Pages, blocks};
use super::buddy::Buddy;
use super::inblock::InBlock;
use super::lifo::{Lifo, ThreadList};
use super::mimalloc::MiBlock;
use super::{BaselineError, Blocks};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// One page of memory, aligned to itself.
#[derive(Clone, Debug)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "it is read as bytes")] [u8; 4096]);

/// Calls `work` with `pages` pages of memory.
fn with_memory<R>(pages: usize, work: impl FnOnce(&mut [u8]) -> R) -> R {
    let mut memory = vec![Page([0; 4096]); pages];
    work(as_bytes(&mut memory))
}

#[expect(unsafe_code, reason = "pages as bytes")]
fn as_bytes(pages: &mut [Page]) -> &mut [u8] {
    // SAFETY: a page is 4,096 bytes and nothing else, so the middle is all of it; it is borrowed
    // exclusively.
    unsafe { pages.align_to_mut().1 }
}

/// The identity of an object in the model.
trait Place {
    fn place(&self) -> u64;
}

impl Place for Block<'_> {
    fn place(&self) -> u64 {
        self.address()
    }
}

impl Place for u64 {
    fn place(&self) -> u64 {
        *self
    }
}

/// Allocates and frees as `steps` says, compares with a model of what is allocated.
fn agrees<B: Blocks<Block: Place>>(
    mut pool: B,
    size: u64,
    steps: &[(bool, usize)],
) -> Result<B, TestCaseError> {
    let mut out: BTreeMap<u64, B::Block> = BTreeMap::new();
    for (alloc, pick) in steps {
        if *alloc || out.is_empty() {
            match pool.alloc() {
                Ok(block) => {
                    let place = block.place();
                    let clash = out.range(place.saturating_sub(size - 1)..place + size).next();
                    prop_assert!(clash.is_none(), "{:#x} overlaps", place);
                    out.insert(place, block);
                }
                Err(error) => prop_assert!(matches!(error, BaselineError::NoPages(_))),
            }
        } else {
            let place = *out.keys().nth(pick % out.len()).unwrap();
            pool.free(out.remove(&place).unwrap()).unwrap();
        }
    }
    out.into_values().for_each(|block| pool.free(block).unwrap());
    Ok(pool)
}

proptest! {
    #[test]
    fn blocks_of_every_pool_do_not_overlap(
        size in prop::sample::select(vec![16usize, 64, 104, 128, 1024, 4096]),
        steps in prop::collection::vec((prop::bool::weighted(0.6), any::<usize>()), 1..400),
    ) {
        let bytes = size as u64;
        with_memory(64, |memory| {
            agrees(&InBlock::new(Pages::new(memory), size), bytes, &steps)?;
            agrees(ThreadList::new(&Lifo::new(blocks(memory, size)), 64), bytes, &steps)?;
            agrees(Buddy::new(1024).owner(), 4096, &steps).map(drop)
        })?;
    }
}

/// Words written to an allocated block do no harm once it is free.
#[test]
fn contents_of_a_block_are_not_used_as_a_link() {
    with_memory(2, |memory| {
        let pool = InBlock::new(Pages::new(memory), 64);
        let mut all: Vec<_> = (0..128).map(|_| pool.alloc_shared().unwrap()).collect();
        assert!(pool.alloc_shared().is_err());
        all.iter_mut().for_each(|block| block.write(u64::MAX));
        all.into_iter().for_each(|block| pool.free_shared(block));
        let again: BTreeSet<u64> =
            (0..128).map(|_| pool.alloc_shared().unwrap().address()).collect();
        assert_eq!(again.len(), 128);
    });
}

#[test]
fn mimallocs_blocks_are_aligned_and_apart() {
    let mut blocks: Vec<MiBlock<100>> = (0..100).map(|_| MiBlock::alloc().unwrap()).collect();
    blocks.iter_mut().for_each(|block| block.write(u64::MAX));
    let places: BTreeSet<u64> = blocks.iter().map(MiBlock::address).collect();
    assert!(places.len() == 100 && places.iter().all(|place| place % 16 == 0));
}

#[test]
fn lists_of_a_thread_return_all_objects() {
    let stack = Lifo::new(0..100u64);
    let mut list = ThreadList::new(&stack, 60);
    let some: Vec<_> = (0..60).map(|_| list.alloc().unwrap()).collect();
    assert_eq!(list.alloc(), Err(BaselineError::NoPages(100)));
    some.into_iter().for_each(|thing| list.free(thing).unwrap());
    drop(list);
    let mut all = Vec::new();
    stack.alloc_many(200, &mut all);
    assert_eq!(all.into_iter().collect::<BTreeSet<_>>().len(), 100);
}

/// The list of an owner is refilled with 63 pages and returns 63 above six times as many, as a
/// processor's list does.
#[test]
fn an_owner_takes_the_lock_once_per_batch() {
    let buddy = Buddy::new(1024);
    let mut owner = buddy.owner();
    let first = owner.alloc_page().unwrap();
    assert_eq!(buddy.free_of(0), 1024 - 63);
    owner.free_page(first);
    let pages: Vec<_> = (0..379).map(|_| owner.alloc_page().unwrap()).collect();
    assert_eq!(buddy.free_of(0), 1024 - 7 * 63);
    let (last, rest) = pages.split_last().unwrap();
    rest.iter().take(378 - 62).for_each(|page| owner.free_page(*page));
    assert_eq!(buddy.free_of(0), 1024 - 7 * 63);
    owner.free_page(*last);
    assert_eq!(buddy.free_of(0), 1024 - 6 * 63);
    rest.iter().skip(378 - 62).for_each(|page| owner.free_page(*page));
    drop(owner);
    assert_eq!((buddy.free_of(0), buddy.free_of(10)), (1024, 1));
}

proptest! {
    /// Runs of any order do not overlap, and after all are freed the largest are whole again.
    #[test]
    fn freed_runs_merge(
        steps in prop::collection::vec((any::<bool>(), 0u8..=10, any::<usize>()), 1..300),
    ) {
        let buddy = Buddy::new(4096);
        let mut owner = buddy.owner();
        let mut out: Vec<(u64, u8)> = Vec::new();
        for (alloc, order, pick) in steps {
            if alloc || out.is_empty() {
                let run = match order {
                    0 => owner.alloc_page(),
                    9 => owner.alloc_huge(),
                    _ => buddy.alloc_run(order),
                };
                if let Ok(run) = run {
                    prop_assert_eq!(run % (4096 << order), 0);
                    let end = |(run, order): (u64, u8)| run + (4096 << order);
                    for other in &out {
                        prop_assert!(end((run, order)) <= other.0 || end(*other) <= run);
                    }
                    out.push((run, order));
                }
            } else {
                match out.swap_remove(pick % out.len()) {
                    (page, 0) => owner.free_page(page),
                    (run, 9) => owner.free_huge(run),
                    (run, order) => buddy.free_run(run, order),
                }
            }
        }
        out.into_iter().for_each(|(run, order)| buddy.free_run(run, order));
        drop(owner);
        prop_assert_eq!(buddy.free_of(10), 4);
    }
}
