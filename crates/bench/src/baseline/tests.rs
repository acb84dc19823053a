//! A slow baseline that is wrong proves nothing.

use super::inblock::InBlock;
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
