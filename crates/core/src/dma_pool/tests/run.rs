//! Runs of neighbours; the model has them too.

use super::*;

/// Allocates so many blocks in runs.
fn runs<'h>(local: &mut Local<&'h Heap, &DmaPool<&'h Heap>>, many: usize) -> Vec<BlockRun> {
    let (mut left, mut runs) = (many, Vec::new());
    while let Some(most) = NonZeroUsize::new(left) {
        let run = local.alloc_run(most).unwrap();
        left -= run.len();
        runs.push(run);
    }
    runs
}

fn one<'h>(local: &mut Local<&'h Heap, &DmaPool<&'h Heap>>, most: usize) -> BlockRun {
    local.alloc_run(NonZeroUsize::new(most).unwrap()).unwrap()
}

#[test]
fn a_ring_is_laid_out_in_few_runs() {
    let heap = Heap::new(4 << 20);
    let pool = DmaPool::new(&heap, "test", 64, 0, 0).unwrap();
    let mut local = pool.local();
    for _ in 0..3 {
        let ring = runs(&mut local, 512);
        assert_eq!(ring.len(), 8);
        let blocks: HashSet<_> = ring.iter().flat_map(BlockRun::iter).collect();
        assert_eq!(blocks.len(), 512);
        assert_eq!(pool.stats().in_use, 512);
        for run in ring {
            assert_eq!((run.stride(), run.get(0), run.get(run.len())), (64, Some(run.first()), None));
            assert_eq!(run.iter().len(), run.len());
            for (index, block) in run.iter().enumerate() {
                assert_eq!(block.iova().raw() - run.first().iova().raw(), 64 * index as u64);
                assert_eq!(block.as_ptr().addr().get() - run.first().as_ptr().addr().get(), 64 * index);
                // SAFETY: the block is allocated, and this loop alone has its address.
                unsafe { block.as_ptr().cast::<[u8; 64]>().write([u8::try_from(index).unwrap(); 64]) };
            }
            local.free_run(run).unwrap();
        }
        assert_eq!(pool.stats().in_use, 0);
    }
}

#[test]
fn a_run_is_refused_at_the_first_block_that_is_free() {
    for by_other in [false, true] {
        let heap = Heap::new(4 << 20);
        let pool = pool(&heap, 64);
        let (mut local, mut other) = (pool.local(), pool.local());
        let run = one(&mut local, 1000);
        assert_eq!(run.len(), 64);
        let holes: HashSet<_> = run.iter().skip(10).take(32).collect();
        for &block in &holes {
            if by_other { &mut other } else { &mut local }.free_raw(block).unwrap();
        }
        let error = local.free_run(run).unwrap_err();
        assert_eq!((error.freed, pool.stats().in_use), (10, 64 - 32 - 10));
        let addr = run.get(10).unwrap().as_ptr().addr().get();
        assert_eq!(error.error, FreeError::DoubleFree { addr });
        // What is behind the holes is still allocated, and freed by a run of its own.
        for block in run.iter().skip(42) {
            local.free_raw(block).unwrap();
        }
        assert_eq!(pool.stats().in_use, 0);
        let ring = runs(&mut local, 300);
        let blocks: HashSet<_> = ring.iter().flat_map(BlockRun::iter).collect();
        assert_eq!((blocks.len(), pool.stats().in_use), (300, 300));
        ring.into_iter().for_each(|run| local.free_run(run).unwrap());
    }
}

#[test]
fn another_owner_frees_a_run() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let (mut local, mut other) = (pool.local(), pool.local());
    for _ in 0..10 {
        for run in runs(&mut local, 700) {
            other.free_run(run).unwrap();
            assert_eq!(other.free_run(run).unwrap_err().freed, 0);
        }
        assert_eq!((pool.stats().in_use, pool.stats().late_double_frees), (0, 0));
    }
}

#[test]
fn a_run_of_another_pool_is_refused() {
    let (heap, elsewhere) = (Heap::new(4 << 20), Heap::new(4 << 20));
    let (one_pool, other_pool) = (pool(&heap, 64), pool(&elsewhere, 64));
    let (mut local, mut other) = (one_pool.local(), other_pool.local());
    let run = one(&mut local, 64);
    let error = other.free_run(run).unwrap_err();
    assert!(error.freed == 0 && matches!(error.error, FreeError::Foreign { .. }), "{error}");
    // Blocks of another size in the same chunk of memory: each but the first is misaligned there, or free.
    local.free_run(run).unwrap();
    drop(local);
    one_pool.destroy().unwrap();
    let wide = pool(&heap, 256);
    let mut local = wide.local();
    let kept = one(&mut local, 64);
    let error = local.free_run(run).unwrap_err();
    assert!(
        error.freed <= 1 && matches!(error.error, FreeError::Misaligned { .. } | FreeError::Foreign { .. }),
        "{error}"
    );
    assert_eq!(wide.stats().in_use, (kept.len() - error.freed) as u64);
}

#[test]
fn gaps_and_debug_mode_make_runs_of_one_block() {
    let heap = Heap::new(4 << 20);
    let gaps = DmaPool::new(&heap, "test", 1000, 0, 4096).unwrap();
    let debug = DmaPool::with_debug(&heap, "test", 1000, 0, 0).unwrap();
    for pool in [gaps, debug] {
        let mut local = pool.local();
        for run in runs(&mut local, 100) {
            assert_eq!(run.len(), 1);
            local.free_run(run).unwrap();
            assert!(matches!(local.free_run(run).unwrap_err().error, FreeError::DoubleFree { .. }));
        }
        assert_eq!((pool.stats().in_use, pool.damages().is_empty()), (0, true));
        drop(local);
        pool.destroy().unwrap();
    }
}

#[test]
fn an_exhausted_pool_names_its_limit() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    pool.set_limits(Limits { minimum: 0, maximum: 64 }).unwrap();
    let mut local = pool.local();
    let run = one(&mut local, 100);
    let stats = pool.stats();
    assert_eq!((run.len() as u64, stats.in_use), (stats.blocks, stats.blocks));
    let error = local.alloc_run(NonZeroUsize::MIN).unwrap_err();
    assert!(matches!(error, AllocError::Maximum { maximum: 64, .. }), "{error}");
    local.free_run(run).unwrap();
    assert_eq!(one(&mut local, 100).len(), run.len());
}
