//! Threads that free each other's blocks by calls for many, in pools that cannot grow too.

use super::*;
use std::sync::Arc;

type Source = Arc<Heap>;

/// Blocks on their way from one thread to another.
#[derive(Default)]
struct Post {
    owned: Mutex<Vec<Block<Source>>>,
    raws: Mutex<Vec<RawBlock>>,
}

fn write(block: &Block<Source>, value: u64) {
    block.memory().write_u64(0, value).unwrap();
}

fn one(me: usize, pool: &Shared<DmaPool<Source>>, posts: &[Post], rounds: usize, counted: &AtomicUsize) {
    let mut random = Random::new(me as u64 * 77 + 5);
    let mut local = pool.local();
    let mut cell = pool.local().into_cell();
    for round in 0..rounds {
        let (to, n) = (&posts[random.below(posts.len())], random.below(90));
        match random.below(4) {
            0 => {
                let new: Vec<_> = (0..n).map_while(|_| cell.alloc().ok()).collect();
                let new = new.into_iter().map(LocalBlock::into_block).inspect(|b| write(b, b.iova().raw()));
                to.owned.lock().extend(new);
            }
            1 => {
                let new = (0..n).map_while(|_| local.alloc().ok()).inspect(|b| write(b, b.iova().raw()));
                let new: Vec<_> = new.collect();
                to.owned.lock().extend(new);
            }
            2 => {
                let mut slots = vec![None; n];
                local.fill(&mut slots);
                to.raws.lock().extend(slots.into_iter().flatten());
            }
            _ => {
                let new = NonZeroUsize::new(n).and_then(|most| local.alloc_run(most).ok());
                to.raws.lock().extend(new.into_iter().flat_map(|run| run.iter()));
            }
        }
        let mine = std::mem::take(&mut *posts[me].owned.lock());
        let checked = mine.into_iter().inspect(|block| {
            assert_eq!(block.memory().read_u64(0), Ok(block.iova().raw()), "a block of two holders");
            write(block, 0);
        });
        match round % 4 {
            0 => local.free_many(checked),
            // With calls of the same cell in between.
            1 => cell.free_many(checked.inspect(|_| drop(cell.alloc()))),
            2 => pool.free_many(checked),
            _ => checked.for_each(|block| local.free(block)),
        }
        let mine = std::mem::take(&mut *posts[me].raws.lock());
        match round % 3 {
            0 => local.free_bulk(&mine).unwrap(),
            1 => local.free_slots(&mut mine.into_iter().map(Some).collect::<Vec<_>>()).unwrap(),
            _ => pool.free_bulk(&mine).unwrap(),
        }
        if round % 50 == 49 {
            local = pool.local();
            cell = pool.local().into_cell();
            pool.shrink_shared();
            counted.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[test]
fn stress_threads_free_each_others_blocks_many_at_a_time() {
    let rounds = if cfg!(miri) { 20 } else { 3_000 };
    for (size, watched, maximum) in
        [(64, false, None), (96, false, Some(600)), (4096, false, None), (64, true, Some(500))]
    {
        let heap = Arc::new(Heap::new(64 << 20));
        let make = if watched { DmaPool::with_debug } else { DmaPool::new };
        let pool = Shared::new(make(Arc::clone(&heap), "threads", size, 0, 0).unwrap());
        if let Some(blocks) = maximum {
            pool.set_limits(Limits { minimum: blocks, maximum: blocks }).unwrap();
        }
        let posts: [Post; 4] = Default::default();
        let counted = AtomicUsize::new(0);
        crate::testing::scope(|scope| {
            for me in 0..posts.len() {
                let (pool, posts, counted) = (pool.clone(), &posts, &counted);
                scope.spawn(move || one(me, &pool, posts, rounds, counted));
            }
        });
        let raws: Vec<_> = posts.iter().flat_map(|post| std::mem::take(&mut *post.raws.lock())).collect();
        let owned: Vec<_> = posts.iter().flat_map(|post| std::mem::take(&mut *post.owned.lock())).collect();
        let stats = pool.stats();
        assert_eq!((stats.in_use, stats.late_double_frees), ((raws.len() + owned.len()) as u64, 0));
        pool.free_bulk(&raws).unwrap();
        pool.free_many(owned);
        let pool = pool.try_into_inner().unwrap();
        assert_eq!(pool.stats().in_use, 0);
        // Each free block is found.
        let all: HashSet<_> = (0..pool.stats().blocks).map(|_| pool.alloc_raw().unwrap()).collect();
        assert_eq!(all.len() as u64, pool.stats().in_use);
        all.iter().for_each(|&block| pool.free_raw(block).unwrap());
        // Has the pool's own owner report.
        assert_eq!(pool.stats().in_use, 0);
        assert_eq!(pool.depot.reported_in_use(), 0);
        pool.set_limits(Limits::default()).unwrap();
        pool.shrink_shared();
        assert_eq!((pool.stats().blocks, heap.frames_taken()), (0, 0), "blocks were lost");
    }
}

/// What idle handles may keep, by the table of the module documentation, after calls of all kinds by all of them.
#[test]
fn idle_handles_keep_few_blocks_after_calls_for_many() {
    for (blocks, handles) in [(300u64, 2usize), (1_500, 3), (6_400, 2), (6_400, 5), (32_000, 3)] {
        for seed in 1..if cfg!(miri) { 2 } else { 8 } {
            let heap = Arc::new(Heap::new(32 << 20));
            let pool = Shared::new(DmaPool::new(Arc::clone(&heap), "idle", 64, 0, 0).unwrap());
            pool.set_limits(Limits { minimum: blocks, maximum: blocks }).unwrap();
            let total = pool.stats().blocks;
            let mut random = Random::new(seed);
            let mut all: Vec<_> = (0..handles).map(|_| pool.local()).collect();
            let mut other = pool.local();
            let mut live = vec![];
            let most = usize::try_from(total).unwrap();
            for _ in 0..2_000 {
                let who = random.below(handles);
                let n = 1 + random.below((most / 4).min(300));
                match random.below(5) {
                    0 | 1 => live.extend((0..n).map_while(|_| all[who].alloc().ok())),
                    2 => {
                        let n = n.min(live.len());
                        let at = random.below(live.len() - n + 1);
                        all[who].free_many(live.drain(at..at + n));
                    }
                    3 => {
                        for _ in 0..n.min(live.len()) {
                            let at = random.below(live.len());
                            all[who].free(live.swap_remove(at));
                        }
                    }
                    _ => {
                        let n = n.min(live.len());
                        pool.free_many(live.drain(..n));
                    }
                }
            }
            let free = total - live.len() as u64;
            let available = std::iter::from_fn(|| other.alloc_raw().ok()).count() as u64;
            let each = total.div_ceil(64) / (handles as u64 + 2);
            let rows = (each / 4).clamp(each.clamp(1, 8), 32);
            let bound = (64 * (2 * rows + 1) + 16) * handles as u64;
            assert!(
                available + bound >= free,
                "{available} of {free} free blocks of {total}, {handles} handles: {bound}"
            );
        }
    }
}
