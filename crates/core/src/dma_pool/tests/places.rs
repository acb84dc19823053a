//! Pools whose source gives chunks of every size at any place, so that a 2 MiB piece changes from small chunks to a large one and
//! back, and uses the pool and its cells while it acquires and releases.

mod world;

use super::*;
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use world::{Owned, WORLD};

/// A heap that gives any free run, and now and then none of a size.
pub(super) struct Patchy {
    pub(super) heap: Heap,
    random: Mutex<Random>,
}

impl Patchy {
    pub(super) fn new(bytes: usize, seed: u64) -> Self {
        Self { heap: Heap::new(bytes), random: Mutex::new(Random::new(seed)) }
    }

    /// Returns whether a byte of the span is in an acquired run.
    pub(super) fn has_taken(&self, offset: usize) -> bool {
        self.heap.taken.lock()[offset / 4096]
    }
}

// SAFETY: allocates whole, aligned runs, and none twice before it is released.
unsafe impl ChunkSource for Patchy {
    fn span(&self) -> NonNull<[u8]> {
        self.heap.span()
    }
    fn iova(&self) -> Iova {
        Iova::new(IOVA)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        if let Some(world) = WORLD.get() {
            world.inside(true);
        }
        let frames = order.frames() as usize;
        let mut random = self.random.lock();
        let mut taken = self.heap.taken.lock();
        let free: Vec<_> = taken
            .chunks_exact(frames)
            .enumerate()
            .filter(|(_, run)| !run.contains(&true))
            .map(|(at, _)| at * frames)
            .collect();
        if free.is_empty() || order > Order::PAGE && random.below(4) == 0 {
            return Err(self.heap.exhausted(order));
        }
        let first = free[random.below(free.len())];
        taken[first..first + frames].fill(true);
        Ok(Frame::new(u32::try_from(first).unwrap()).unwrap())
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.heap.release(frame, order) };
        if let Some(world) = WORLD.get() {
            world.inside(false);
        }
    }
}

/// What the threads of the stress test share.
struct Shop {
    pool: Shared<DmaPool<Patchy>>,
    size: usize,
    /// Blocks that one worker has allocated and another frees.
    sent: Mutex<Vec<Owned>>,
    /// How many workers there are.
    workers: AtomicUsize,
    refused: AtomicUsize,
    /// How many wrong frees the workers wait for.
    wanted: usize,
}

/// Ends a worker, also if it fails: the other threads run as long as there is one.
struct Ends<'s>(&'s AtomicUsize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn write(block: RawBlock, memory: DmaMemory<'_>) {
    memory.write_u64(0, block.iova().raw()).unwrap();
}

fn check(block: RawBlock, memory: DmaMemory<'_>) {
    assert_eq!(memory.read_u64(0), Ok(block.iova().raw()), "a block of two holders");
}

impl Shop {
    /// Allocates and frees owned blocks.
    fn work(&self, me: u64, rounds: usize) {
        let (_ends, pool) = (Ends(&self.workers), &self.pool);
        let mut random = Random::new(me * 77 + self.size as u64);
        for round in 0..200 * rounds {
            if round >= rounds && self.refused.load(Ordering::Relaxed) >= self.wanted {
                return;
            }
            let (cell, mut local) = (pool.local().into_cell(), pool.local());
            let n = random.below((3 << 20) / self.size);
            let mut pinned: Vec<_> = (0..n / 2).map_while(|_| cell.alloc().ok()).collect();
            let mut owned: Vec<_> = (0..n / 2).map_while(|_| local.alloc().ok()).collect();
            pinned.iter().for_each(|block| write(block.as_raw(), block.memory()));
            owned.iter().for_each(|block| write(block.as_raw(), block.memory()));
            for _ in 0..pinned.len() / 2 {
                let block = pinned.swap_remove(random.below(pinned.len()));
                check(block.as_raw(), block.memory());
            }
            pinned.iter().for_each(|block| check(block.as_raw(), block.memory()));
            let taken = std::mem::take(&mut *self.sent.lock());
            self.sent.lock().extend(owned.drain(owned.len() / 2..));
            let all: Vec<_> = owned.into_iter().chain(taken).collect();
            all.iter().for_each(|block| check(block.as_raw(), block.memory()));
            match round % 3 {
                0 => cell.free_many(all),
                1 => all.into_iter().for_each(|block| local.free(block)),
                _ => pool.free_many(all),
            }
        }
    }

    /// Frees raw blocks at any address, each of which is refused since there are none, and borrows memory by its address.
    fn free_wrongly(&self) {
        let (mut random, mut local, mut lent) = (Random::new(5), self.pool.local(), 0);
        let source = self.pool.source();
        let start = source.span().cast::<u8>();
        while self.workers.load(Ordering::Relaxed) != 0 {
            let at = random.below(source.span().len()) / 32 * 32;
            let ptr = NonNull::new(start.as_ptr().wrapping_add(at)).unwrap();
            let block = RawBlock::from_parts(ptr, Iova::new(IOVA + at as u64));
            let next = moved(block, self.size.cast_signed());
            match random.below(3) {
                0 => assert!(local.free_raw(block).is_err()),
                1 => assert!(self.pool.free_raw(block).is_err()),
                _ => assert_eq!(local.free_bulk(&[block, next]).unwrap_err().freed, 0),
            }
            self.refused.fetch_add(1, Ordering::Relaxed);
            // Not often: each loan keeps its chunk.
            if lent == 6 || random.below(500) != 0 {
                continue;
            }
            let Ok(memory) = self.pool.memory(block) else { continue };
            lent += 1;
            for _ in 0..1000 {
                assert!(source.has_taken(at), "memory of a chunk that was released");
                std::hint::black_box(memory.read_u8(0)).unwrap();
            }
        }
    }
}

#[test]
fn stress_wrong_frees_and_loans_beside_chunks_that_come_and_go() {
    let (rounds, wanted) = if cfg!(miri) { (3, 10) } else { (60, 20_000) };
    for (size, boundary) in [(64, 0), (96, 512), (4096, 0)] {
        let source = Patchy::new(6 << 20, size as u64);
        let pool = Shared::new(DmaPool::new(source, "places", size, 0, boundary).unwrap());
        let (workers, refused) = (AtomicUsize::new(2), AtomicUsize::new(0));
        let shop = Shop { pool, size, sent: Mutex::new(Vec::new()), workers, refused, wanted };
        crate::testing::scope(|threads| {
            let shop = &shop;
            (0..2).for_each(|me| threads.spawn(move || shop.work(me, rounds)));
            threads.spawn(|| shop.free_wrongly());
            threads.spawn(|| {
                while shop.workers.load(Ordering::Relaxed) != 0 {
                    shop.pool.shrink_shared();
                    std::thread::yield_now();
                }
            });
        });
        let Shop { pool, sent, refused, .. } = shop;
        assert!(refused.into_inner() >= wanted);
        sent.lock().clear();
        let mut pool = pool.try_into_inner().unwrap();
        let stats = pool.stats();
        assert_eq!((stats.in_use, pool.depot.reported_in_use(), stats.late_double_frees), (0, 0, 0));
        assert_eq!(pool.shrink(), stats.bytes, "blocks were lost");
        assert_eq!(pool.source().heap.frames_taken(), 0);
    }
}
