//! All kinds of calls in random order by several owners, wrong frees among them, beside a simple
//! model.

use super::heap;
use super::subject::{Block, Pool, PoolLocal, build};
use crate::dma_pool::{FreeError, RawBlock};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The model: what is allocated, by its address for the device.
#[derive(Default)]
struct Model {
    raw: BTreeMap<u64, RawBlock>,
    owned: Vec<Block>,
    freed: Vec<RawBlock>,
}

impl Model {
    fn add_raw(&mut self, block: RawBlock) {
        self.check_new(block);
        self.raw.insert(block.iova().raw(), block);
    }

    fn check_new(&self, block: RawBlock) {
        assert!(!self.raw.contains_key(&block.iova().raw()), "allocated twice: {block:?}");
        assert!(
            !self.owned.iter().any(|owned| owned.as_raw() == block),
            "allocated twice: {block:?}"
        );
    }

    fn some_raw(&self, at: usize) -> Option<RawBlock> {
        self.raw.values().nth(at.checked_rem(self.raw.len())?).copied()
    }

    fn is_allocated(&self, block: RawBlock) -> bool {
        self.raw.contains_key(&block.iova().raw())
            || self.owned.iter().any(|owned| owned.as_raw().iova() == block.iova())
    }
}

fn step(pool: &Pool, locals: &mut [PoolLocal], model: &mut Model, call: (u8, u8, u16)) {
    let (kind, owner, at) = call;
    let (owner, at) = (usize::from(owner) % locals.len(), usize::from(at));
    let local = &mut locals[owner];
    match kind % 14 {
        0 => local.alloc_raw().into_iter().for_each(|block| model.add_raw(block)),
        1 => pool.alloc_raw().into_iter().for_each(|block| model.add_raw(block)),
        2 | 3 => {
            let block = if kind % 14 == 2 { local.alloc() } else { pool.alloc() };
            if let Ok(block) = block {
                model.check_new(block.as_raw());
                model.owned.push(block);
            }
        }
        4 | 5 => {
            if let Some(block) = model.some_raw(at) {
                if kind % 14 == 4 {
                    local.free_raw(block).unwrap()
                } else {
                    pool.free_raw(block).unwrap()
                }
                model.raw.remove(&block.iova().raw());
                model.freed.push(block);
            }
        }
        6 | 7 => {
            if let Some(at) = at.checked_rem(model.owned.len()) {
                let block = model.owned.swap_remove(at);
                model.freed.push(block.as_raw());
                if kind % 14 == 6 { local.free(block) } else { drop(block) }
            }
        }
        8 => {
            let mut slots = vec![None; at % 150];
            let full = local.fill(&mut slots);
            assert_eq!(full, slots.iter().flatten().count());
            slots.into_iter().flatten().for_each(|block| model.add_raw(block));
        }
        9 => {
            let blocks: Vec<_> = model.raw.values().copied().take(at % 150).collect();
            local.free_bulk(&blocks).unwrap();
            for block in blocks {
                model.raw.remove(&block.iova().raw());
            }
        }
        10 => {
            if let Some(at) = at.checked_rem(model.freed.len()) {
                let block = model.freed[at];
                if !model.is_allocated(block) {
                    let error = local.free_raw(block).unwrap_err();
                    let wrong =
                        matches!(error, FreeError::Owned { .. } | FreeError::WrongIova { .. });
                    assert!(!wrong, "{error}");
                }
            }
            for block in &model.owned {
                assert!(matches!(local.free_raw(block.as_raw()), Err(FreeError::Owned { .. })));
            }
        }
        11 => {
            if let Some(at) = at.checked_rem(model.owned.len()) {
                model.add_raw_from(at);
            }
        }
        12 => locals[owner] = pool.local(),
        _ => {
            pool.shrink();
        }
    }
}

impl Model {
    fn add_raw_from(&mut self, at: usize) {
        let block = self.owned.swap_remove(at).into_raw();
        self.add_raw(block);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 60 }))]
    #[test]
    fn all_calls_agree_with_a_simple_model(
        layout in 0usize..5,
        calls in prop::collection::vec((any::<u8>(), any::<u8>(), any::<u16>()), 1..400),
    ) {
        let (size, align, boundary) =
            [(64, 64, 0), (192, 0, 0), (3000, 8, 8192), (4096, 4096, 0), (40_000, 0, 0)][layout];
        let heap = heap(2);
        let pool = build(&heap, size, align, boundary).unwrap();
        let mut locals = vec![pool.local(), pool.local(), pool.local()];
        let mut model = Model::default();
        for call in calls {
            step(&pool, &mut locals, &mut model, call);
        }
        let live = model.raw.len() + model.owned.len();
        prop_assert_eq!(pool.stats().in_use, live as u64);
        for block in std::mem::take(&mut model.raw).into_values() {
            pool.free_raw(block).unwrap();
        }
        model.owned.clear();
        drop(locals);
        pool.shrink();
        prop_assert_eq!((pool.stats().in_use, heap.frames_taken()), (0, 0));
    }
}
