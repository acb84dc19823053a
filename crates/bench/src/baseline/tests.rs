//! A slow baseline that is wrong proves nothing.

use super::buddy::Buddy;
use super::inblock::InBlock;
use super::lifo::{Lifo, ThreadList};
use super::linear::Linear;
use super::malloc::Malloced;
use super::pages::Pages;
use super::rbtree::RbTree;
use super::{BaselineError, Blocks};
use pinfold::{Arena, Domain, Exposure};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn memory(pages: usize) -> pinfold::Buffer {
    let domain = Domain::soft().unwrap();
    let arena = Arena::builder().size(pages as u64 * 4096).exposure(Exposure::Whole).build(&domain).unwrap();
    arena.alloc(pages * 4096).unwrap()
}

/// Allocs and frees as `steps` says and compares with a set of what is out.
fn agrees(mut pool: impl Blocks, size: u64, steps: &[(bool, usize)]) -> Result<(), TestCaseError> {
    let mut out: BTreeSet<u64> = BTreeSet::new();
    for (alloc, pick) in steps {
        if *alloc || out.is_empty() {
            match pool.alloc() {
                Ok(block) => {
                    let clash = out.range(block.saturating_sub(size - 1)..block + size).next();
                    prop_assert_eq!(clash, None, "{:#x} overlaps", block);
                    out.insert(block);
                }
                Err(error) => prop_assert!(matches!(error, BaselineError::NoPages(_))),
            }
        } else {
            let block = *out.iter().nth(pick % out.len()).unwrap();
            out.remove(&block);
            pool.free(block).unwrap();
        }
    }
    pool.destroy();
    Ok(())
}

proptest! {
    #[test]
    fn every_pool_hands_out_blocks_that_do_not_overlap(
        size in prop::sample::select(vec![16u64, 64, 100, 128, 1024, 4096]),
        steps in prop::collection::vec((prop::bool::weighted(0.6), any::<usize>()), 1..400),
    ) {
        let size = size.next_multiple_of(8);
        let memory = memory(64);
        let source = Pages::new(memory.memory());
        agrees(Linear::new(source.clone(), size), size, &steps)?;
        agrees(RbTree::new(source.clone(), size), size, &steps)?;
        agrees(InBlock::new(source, size), size, &steps)?;
        let stack = Lifo::new(64, size);
        agrees(&stack, size, &steps)?;
        agrees(ThreadList::new(&Lifo::new(64, size)), size, &steps)?;
        agrees(&Buddy::new(1024), 4096, &steps)?;
    }
}

#[test]
fn a_foreign_address_is_noticed_where_the_original_looks_for_its_page() {
    let memory = memory(4);
    let source = Pages::new(memory.memory());
    assert_eq!(Linear::new(source.clone(), 64).free(0x40), Err(BaselineError::Foreign(0x40)));
    assert_eq!(RbTree::new(source, 64).free(0x40), Err(BaselineError::Foreign(0x40)));
}

#[test]
fn malloced_blocks_are_aligned() {
    let blocks: Vec<Malloced<100>> = (0..100).map(|_| Malloced::alloc()).collect();
    assert!(blocks.iter().all(|b| b.address() % 64 == 0));
}

#[test]
fn a_thread_list_gives_all_back() {
    let stack = Lifo::new(100, 64);
    let mut list = ThreadList::new(&stack);
    let blocks: Vec<_> = (0..100).map(|_| list.alloc().unwrap()).collect();
    assert_eq!(list.alloc(), Err(BaselineError::NoPages(100)));
    blocks.into_iter().for_each(|block| list.free(block).unwrap());
    drop(list);
    let all: BTreeSet<_> = (0..100).map(|_| stack.alloc_shared().unwrap()).collect();
    assert_eq!((all.len(), stack.alloc_shared()), (100, Err(BaselineError::NoPages(100))));
}

proptest! {
    /// Runs of any order do not overlap, and when all are back the largest are whole again.
    #[test]
    fn runs_of_the_page_allocator_merge_again(
        steps in prop::collection::vec((any::<bool>(), 0u8..=10, any::<usize>()), 1..300),
    ) {
        let buddy = Buddy::new(4096);
        let mut out: Vec<(u64, u8)> = Vec::new();
        for (alloc, order, pick) in steps {
            if alloc || out.is_empty() {
                let run = if order == 0 { buddy.alloc_page() } else { buddy.alloc_run(order) };
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
                    (page, 0) => buddy.free_page(page),
                    (run, order) => buddy.free_run(run, order),
                }
            }
        }
        out.into_iter().for_each(|(run, order)| buddy.free_run(run, order));
        prop_assert_eq!(buddy.free_of(10), 4);
    }
}
