//! What keeps a pool alive, and its lock.

use super::super::error::SourceError;
use super::super::pool::DmaPool;
use super::super::source::ChunkSource;
use super::*;
use crate::share::Shared;
use crate::sync::SpinLock;
use core::ptr::NonNull;
use loom::sync::atomic::AtomicU32;

/// The spin lock has one holder at a time, which sees what the previous one did.
#[test]
fn the_spin_lock_has_one_holder() {
    check(|| {
        let lock = Arc::new(SpinLock::new(0));
        let other = {
            let lock = lock.clone();
            thread::spawn(move || *lock.lock() += 1)
        };
        *lock.lock() += 1;
        other.join().unwrap();
        assert_eq!(*lock.lock(), 2);
    });
}

/// A source of one page. Its cell is read by users of the pool and written when the source is dropped.
struct Page {
    alive: UnsafeCell<()>,
    runs: Arc<AtomicU32>,
    drops: Arc<AtomicU32>,
}

// SAFETY: loom checks the accesses to the cell.
unsafe impl Send for Page {}
// SAFETY: as for `Send`.
unsafe impl Sync for Page {}

impl Page {
    fn read(&self) {
        // Loom reports a drop that is not ordered after it.
        self.alive.with(|_| ());
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.alive.with_mut(|_| ());
        self.drops.fetch_add(1, Ordering::SeqCst);
    }
}

// SAFETY: the one run is acquired once. No model accesses its memory.
unsafe impl ChunkSource for Page {
    fn span(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(
            NonNull::without_provenance(const { core::num::NonZero::new(4096).unwrap() }),
            4096,
        )
    }
    fn iova(&self) -> Iova {
        Iova::new(0)
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        assert_eq!((order, self.runs.fetch_add(1, Ordering::SeqCst)), (Order::PAGE, 0));
        Ok(Frame::new(0).unwrap())
    }
    unsafe fn release(&self, _: Frame, _: Order) {
        self.read();
        self.runs.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The shared pool, an owner and a block are dropped by three threads: the pool is dropped once, after all uses, and has
/// released its chunk.
#[test]
fn a_block_outlives_the_shared_reference_and_the_owner() {
    check(|| {
        let (runs, drops) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let page = Page { alive: UnsafeCell::new(()), runs: runs.clone(), drops: drops.clone() };
        let pool = Shared::new(DmaPool::new(page, "model", SIZE as usize, 0, 0).unwrap());
        let mut local = pool.local();
        let block = local.alloc().unwrap();
        let user = thread::spawn(move || {
            block.pool().source().read();
            drop(block);
        });
        let owner = thread::spawn(move || drop(local));
        pool.source().read();
        drop(pool);
        user.join().unwrap();
        owner.join().unwrap();
        assert_eq!((runs.load(Ordering::SeqCst), drops.load(Ordering::SeqCst)), (0, 1));
    });
}
