//! The pool against a set of live blocks, with wrong frees.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Alloc(usize),
    Free(usize, prop::sample::Index),
    DoubleFree(usize, prop::sample::Index),
    Crooked(usize, prop::sample::Index, isize),
    /// Fills so many slots, every third of which is already full.
    Fill(usize, usize),
    /// The same, all or none.
    FillAll(usize, usize),
    FreeMany(usize, usize),
    /// Allocates so many in runs.
    Runs(usize, usize),
    /// Frees a run, after freeing one of its blocks if there are so many.
    FreeRun(usize, prop::sample::Index, usize),
    Limit(u64, u64),
    Replace(usize),
    Shrink,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let who = 0usize..3;
    let index = || any::<prop::sample::Index>();
    let step = prop_oneof![
        10 => who.clone().prop_map(Step::Alloc),
        8 => (who.clone(), index()).prop_map(|(who, at)| Step::Free(who, at)),
        1 => (who.clone(), index()).prop_map(|(who, at)| Step::DoubleFree(who, at)),
        1 => (who.clone(), index(), -5000isize..5000).prop_map(|(who, at, by)| Step::Crooked(who, at, by)),
        1 => (who.clone(), 1usize..150).prop_map(|(who, n)| Step::Fill(who, n)),
        1 => (who.clone(), 1usize..150).prop_map(|(who, n)| Step::FillAll(who, n)),
        1 => (who.clone(), 1usize..150).prop_map(|(who, n)| Step::FreeMany(who, n)),
        1 => (0usize..2, 1usize..150).prop_map(|(who, n)| Step::Runs(who, n)),
        1 => (0usize..2, index(), 0usize..80).prop_map(|(who, at, n)| Step::FreeRun(who, at, n)),
        1 => (0u64..3000, -1i64..500).prop_map(|(minimum, more)| Step::Limit(minimum, minimum.saturating_add_signed(more))),
        1 => who.prop_map(Step::Replace),
        1 => Just(Step::Shrink),
    ];
    prop::collection::vec((step, 1usize..80), 40)
        .prop_map(|runs| runs.into_iter().flat_map(|(step, n)| std::iter::repeat_n(step, n)).collect())
}

/// Checks what holds between calls: each row has one owner, and each free block is in one place.
pub(super) fn audit<S: ChunkSource, H: Hold<Target = DmaPool<S>>>(pool: &DmaPool<S>, locals: &[Local<S, H>]) {
    let (mut rows, mut loose) = pool.lock().audit();
    for (more, other) in locals.iter().map(|local| local.owner.audit()) {
        assert!(more.iter().all(|row| !rows.contains(row)), "a row of two owners");
        rows.extend(more);
        loose.extend(other);
    }
    for row in pool.chunks.lock().iter().flat_map(|chunk| chunk.rows()) {
        let here = loose.iter().filter(|(of, _)| *of == row);
        let out = here.fold(row.avail(), |free, &(_, bits)| {
            assert_eq!(free & bits, 0, "a free block in two places");
            free | bits
        });
        for bit in 0..u32::try_from(row.blocks()).unwrap() {
            assert!(out & 1 << bit == 0 || !row.is_live(bit), "a live block is free");
        }
        let census = row.census();
        assert_eq!(
            census.in_magazines,
            u64::from((out & !row.avail()).count_ones()),
            "a free block is nowhere"
        );
        assert!(rows.contains(&row) || row.is_in_depot() || row.is_unowned());
    }
}

proptest! {
    #[test]
    fn agrees_with_a_set_of_live_blocks(
        steps in steps(), size in 1usize..3000, align in 0u32..8, boundary in prop_oneof![Just(0u32), 9u32..22],
    ) {
        let heap = Heap::new(4 << 20);
        let align = if align == 0 { 0 } else { 1usize << align };
        let boundary = if boundary == 0 { 0 } else { 1usize << boundary };
        let Ok(pool) = DmaPool::new(&heap, "model", size, align, boundary) else { return Ok(()) };
        let size = pool.block_size() as u64;
        let mut locals = [pool.local(), pool.local()];
        let mut live: BTreeMap<u64, RawBlock> = BTreeMap::new();
        let mut freed: Vec<RawBlock> = Vec::new();
        let mut runs: Vec<BlockRun> = Vec::new();
        let (mut limits, mut blocks_before) = (Limits::default(), 0);
        // Of a chunk of the smallest size.
        let granule = u64::from(pool.geometry.blocks_in(Order::for_bytes(size).unwrap()));
        let pick = |live: &BTreeMap<u64, RawBlock>, at: prop::sample::Index| {
            (!live.is_empty()).then(|| *live.values().nth(at.index(live.len())).unwrap())
        };
        for (number, step) in steps.into_iter().enumerate() {
            if number % 97 == 0 {
                audit(&pool, &locals);
            }
            let free = |locals: &mut [Local<_, _>; 2], who: usize, block| match locals.get_mut(who) {
                Some(local) => local.free_raw(block),
                None => pool.free_raw(block),
            };
            match step {
                Step::Alloc(who) => {
                    let block = match locals.get_mut(who) { Some(local) => local.alloc_raw(), None => pool.alloc_raw() };
                    let block = match block {
                        Ok(block) => block,
                        Err(AllocError::Maximum { maximum, blocks, in_use }) => {
                            prop_assert_eq!((maximum, blocks), (limits.maximum, pool.stats().blocks));
                            prop_assert!(blocks >= maximum && in_use <= blocks);
                            continue;
                        }
                        Err(_) => continue,
                    };
                    let at = block.iova().raw();
                    prop_assert_eq!(at - IOVA, (block.as_ptr().as_ptr().addr() - heap.base.as_ptr().addr()) as u64);
                    prop_assert!(at.is_multiple_of(align.max(1) as u64));
                    prop_assert!(boundary == 0 || at / boundary as u64 == (at + size - 1) / boundary as u64);
                    prop_assert!(live.range(..at + size).next_back().is_none_or(|(&other, _)| other + size <= at));
                    live.insert(at, block);
                }
                Step::Free(who, at) => {
                    let Some(block) = pick(&live, at) else { continue };
                    prop_assert_eq!(free(&mut locals, who, block), Ok(()));
                    live.remove(&block.iova().raw());
                    freed.push(block);
                }
                Step::DoubleFree(who, at) => {
                    if freed.is_empty() { continue }
                    let block = freed[at.index(freed.len())];
                    if live.contains_key(&block.iova().raw()) { continue }
                    let error = free(&mut locals, who, block).unwrap_err();
                    let told = !matches!(error, FreeError::WrongIova { .. });
                    prop_assert!(told, "{}", error);
                }
                Step::Crooked(who, at, by) => {
                    let Some(block) = pick(&live, at) else { continue };
                    let block = moved(block, by);
                    if live.contains_key(&block.iova().raw()) { continue }
                    prop_assert!(free(&mut locals, who, block).is_err());
                }
                Step::Fill(who, n) => {
                    let full = |slots: &[Option<RawBlock>]| slots.iter().flatten().count();
                    let held: Vec<_> = live.values().copied().collect();
                    let mut slots: Vec<_> =
                        (0..n).map(|i| held.get(i).copied().filter(|_| i % 3 == 0)).collect();
                    let before = slots.clone();
                    let filled = match locals.get_mut(who) {
                        Some(local) => local.fill(&mut slots),
                        None => pool.fill(&mut slots),
                    };
                    prop_assert_eq!(filled, full(&slots));
                    for (before, after) in before.into_iter().zip(slots) {
                        if before.is_some() {
                            prop_assert_eq!(before, after);
                        } else if let Some(block) = after {
                            let at = block.iova().raw();
                            let below = live.range(..at + size).next_back();
                            prop_assert!(below.is_none_or(|(&other, _)| other + size <= at));
                            live.insert(at, block);
                        }
                    }
                }
                Step::FillAll(who, n) => {
                    let held: Vec<_> = live.values().copied().collect();
                    let mut slots: Vec<_> =
                        (0..n).map(|i| held.get(i).copied().filter(|_| i % 5 == 1)).collect();
                    let before = slots.clone();
                    let filled = match locals.get_mut(who) {
                        Some(local) => local.fill_all(&mut slots),
                        None => pool.fill_all(&mut slots),
                    };
                    match filled {
                        Ok(()) => {
                            prop_assert!(slots.iter().all(Option::is_some));
                            live.extend(slots.iter().flatten().map(|block| (block.iova().raw(), *block)));
                            let new = before.iter().filter(|slot| slot.is_none()).count();
                            prop_assert_eq!(live.len(), held.len() + new, "a block twice");
                        }
                        Err(BulkAllocError { wanted, available, .. }) => {
                            prop_assert_eq!(&slots, &before);
                            prop_assert_eq!(wanted, before.iter().filter(|slot| slot.is_none()).count());
                            prop_assert!(available < wanted);
                            prop_assert_eq!(pool.stats().in_use, live.len() as u64);
                        }
                    }
                }
                Step::Limit(minimum, maximum) => {
                    let before = pool.stats();
                    let wanted = Limits { minimum, maximum };
                    match pool.set_limits(wanted) {
                        Ok(()) => limits = wanted,
                        Err(error) => {
                            let contradiction = matches!(error, LimitError::Contradiction { .. });
                            prop_assert_eq!(contradiction, maximum < minimum.max(1));
                            let after = pool.stats();
                            prop_assert_eq!((after.blocks, after.chunks), (before.blocks, before.chunks));
                            prop_assert_eq!(heap.frames_taken() as u64 * 4096, after.bytes);
                        }
                    }
                }
                Step::FreeMany(who, n) => {
                    let mut slots: Vec<_> = live.values().copied().step_by(2).take(n).map(Some).collect();
                    slots.push(None);
                    for block in slots.iter().flatten() {
                        live.remove(&block.iova().raw());
                        freed.push(*block);
                    }
                    let result = match locals.get_mut(who) {
                        Some(local) => local.free_slots(&mut slots),
                        None => pool.free_slots(&mut slots),
                    };
                    prop_assert_eq!(result, Ok(()));
                    prop_assert!(slots.iter().all(Option::is_none));
                }
                Step::Runs(who, n) => {
                    let mut left = n;
                    while let Some(most) = NonZeroUsize::new(left) {
                        let Ok(run) = locals[who].alloc_run(most) else { break };
                        prop_assert!((1..=left.min(64)).contains(&run.len()));
                        left -= run.len();
                        for block in run.iter() {
                            let at = block.iova().raw();
                            prop_assert_eq!(at - IOVA, (block.as_ptr().addr().get() - heap.base.as_ptr().addr()) as u64);
                            prop_assert!(live.range(..at + size).next_back().is_none_or(|(&other, _)| other + size <= at));
                            prop_assert!(boundary == 0 || at / boundary as u64 == (at + size - 1) / boundary as u64);
                            live.insert(at, block);
                        }
                        runs.push(run);
                    }
                }
                Step::FreeRun(who, at, hole) => {
                    if runs.is_empty() { continue }
                    let run = runs.swap_remove(at.index(runs.len()));
                    let is_live = |live: &BTreeMap<_, _>, block: &RawBlock| live.contains_key(&block.iova().raw());
                    if let Some(block) = run.get(hole).filter(|block| is_live(&live, block)) {
                        prop_assert_eq!(locals[who].free_raw(block), Ok(()));
                        live.remove(&block.iova().raw());
                        freed.push(block);
                    }
                    // Others may have been freed by other steps.
                    let good: Vec<_> = run.iter().take_while(|block| is_live(&live, block)).collect();
                    match locals[who].free_run(run) {
                        Ok(()) => prop_assert_eq!(good.len(), run.len()),
                        Err(error) => prop_assert!(error.freed == good.len() && good.len() < run.len()),
                    }
                    for block in good {
                        live.remove(&block.iova().raw());
                        freed.push(block);
                    }
                }
                Step::Replace(who) => {
                    if let Some(local) = locals.get_mut(who) { *local = pool.local(); }
                }
                Step::Shrink => { pool.shrink_shared(); }
            }
            let (blocks, most) = (pool.chunks.lock().blocks(), limits.maximum.saturating_add(granule - 1));
            prop_assert!(blocks >= limits.minimum && (blocks <= most.max(blocks_before)), "{} blocks, {:?}", blocks, limits);
            blocks_before = blocks;
        }
        audit(&pool, &locals);
        let stats = pool.stats();
        prop_assert_eq!(stats.in_use, live.len() as u64);
        prop_assert_eq!(stats.in_use + stats.in_magazines + stats.in_rows + stats.in_depot, stats.blocks);
        prop_assert_eq!(stats.late_double_frees, 0);
        drop(locals);
        pool.set_limits(Limits::default()).unwrap();
        for block in live.values() {
            pool.free_raw(*block).unwrap();
        }
        prop_assert_eq!(pool.shrink_shared(), stats.bytes);
        pool.destroy().unwrap();
    }
}
