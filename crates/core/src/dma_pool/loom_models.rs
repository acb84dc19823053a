//! Every interleaving (within a bound of preemptions) of owners that share two rows of two blocks each.
//!
//! A cell stands for the memory of each block: the model checker reports two concurrent owners, and accesses of one owner
//! that do not happen before the next owner's. In the borrowed form the type system excludes a drop of the pool during a
//! free; the last model covers the shared form.

mod lent;
mod parcel;
mod runs;

use super::depot::Depot;
use super::directory::Chunk;
use super::error::SourceError;
use super::geometry::Geometry;
use super::owner::{Owner, split};
use super::pool::DmaPool;
use super::source::ChunkSource;
use super::stash::Site;
use super::state::{Form, FreeRefusal};
use crate::addr::Iova;
use crate::frame::{Frame, Order};
use crate::share::Shared;
use crate::sync::SpinLock;
use core::ptr::NonNull;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use std::collections::BTreeSet;

const SIZE: u64 = 1024;

struct Pool {
    depot: Depot,
    chunk: Chunk,
    geometry: Geometry,
    memory: [UnsafeCell<u32>; 4],
}

impl Pool {
    fn new() -> Arc<Self> {
        let geometry = Geometry::new(SIZE as usize, 0, 0, 4096, Iova::new(0)).unwrap();
        let chunk = Chunk::new(Frame::new(0).unwrap(), Order::PAGE, 4, true);
        let memory = core::array::from_fn(|_| UnsafeCell::new(0));
        let pool = Arc::new(Self { depot: Depot::new(), chunk, geometry, memory });
        pool.depot.add(pool.chunk.rows());
        pool
    }

    fn alloc(&self, owner: &mut Owner) -> Option<u64> {
        self.alloc_as(owner, Form::Raw)
    }

    fn alloc_as(&self, owner: &mut Owner, form: Form) -> Option<u64> {
        loop {
            if let Some(block) = owner.pop(&self.geometry, form) {
                self.use_memory(block);
                return Some(block);
            }
            if !owner.refill(&self.geometry) && !self.depot.lend(owner) {
                return None;
            }
        }
    }

    fn use_memory(&self, block: u64) {
        // SAFETY: the caller owns the block; loom reports a second owner.
        self.memory[(block / SIZE) as usize].with_mut(|at| unsafe { *at += 1 });
    }

    /// Accesses a block and frees it.
    fn free(&self, owner: &mut Owner, block: u64) -> bool {
        self.use_memory(block);
        self.free_again(owner, block)
    }

    fn free_again(&self, owner: &mut Owner, block: u64) -> bool {
        self.free_as(owner, block, Form::Raw).is_ok()
    }

    fn free_as(&self, owner: &mut Owner, block: u64, form: Form) -> Result<(), FreeRefusal> {
        let (number, bit) = split(self.geometry.index_of(block));
        let site = Site { offset: block, row: self.chunk.row(number).unwrap(), bit };
        // As `DmaPool::free_by`.
        if owner.push_last(block, form)
            || owner.push_current(&self.geometry, block, form)
            || owner.push(site, form, owner.stash.is_full())
        {
            return Ok(());
        }
        owner.free(&self.geometry, site, form)
    }

    /// Frees the first of at most `most` neighbours, up to one that is refused. Returns how many.
    fn free_run(&self, owner: &mut Owner, first: u64, most: usize) -> usize {
        let mut freed = 0;
        while freed < most {
            let block = first + freed as u64 * SIZE;
            let (number, bit) = split(self.geometry.index_of(block));
            let site = Site { offset: block, row: self.chunk.row(number).unwrap(), bit };
            // As `Local::free_run`.
            freed += match owner.push_run(site, most - freed) {
                0 if owner.free(&self.geometry, site, Form::Raw).is_ok() => 1,
                0 => break,
                many => many,
            };
        }
        freed
    }

    /// Checks, after all owners are dropped, that each block can be allocated once. Returns how many second frees were detected
    /// late.
    fn is_whole(&self) -> u64 {
        let mut owner = self.depot.register();
        let all: BTreeSet<_> = core::iter::from_fn(|| self.alloc(&mut owner)).collect();
        assert_eq!(all.len(), 4, "{all:?}");
        for &block in &all {
            assert!(self.free(&mut owner, block));
        }
        self.depot.retire(&mut owner);
        assert!(self.chunk.rows().all(|row| row.is_whole_in_depot()));
        self.depot.counts(0).1
    }
}

/// A pool, and an owner that has allocated both blocks of its first row.
fn with_an_allocated_row() -> (Arc<Pool>, Owner, u64, u64) {
    let pool = Pool::new();
    let mut owner = pool.depot.register();
    let (x, y) = (pool.alloc(&mut owner).unwrap(), pool.alloc(&mut owner).unwrap());
    (pool, owner, x, y)
}

/// Runs `work` with another owner, in a thread of its own.
fn elsewhere<T: 'static>(
    pool: &Arc<Pool>,
    work: impl FnOnce(&Pool, &mut Owner) -> T + 'static,
) -> thread::JoinHandle<T> {
    let pool = pool.clone();
    thread::spawn(move || {
        let mut owner = pool.depot.register();
        let done = work(&pool, &mut owner);
        pool.depot.retire(&mut owner);
        done
    })
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// The second owner frees a block of a row that the first one owns and keeps using.
#[test]
fn a_remote_free_against_alloc_and_free() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let other = elsewhere(&pool, move |pool, b| assert!(pool.free(b, x)));
        assert!(pool.free(&mut a, y));
        let z = pool.alloc(&mut a).unwrap();
        let w = pool.alloc(&mut a).unwrap();
        assert_ne!(z, w);
        assert!(pool.free(&mut a, w));
        assert!(pool.free(&mut a, z));
        pool.depot.retire(&mut a);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A row is released while a block of it is freed remotely: an owner collects it.
#[test]
fn a_remote_free_against_the_release_of_its_row() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, x));
            assert!(pool.free(b, y));
        });
        // The row of `x` and `y` has no free block, so it is released.
        let z = pool.alloc(&mut a).unwrap();
        assert!(pool.free(&mut a, z));
        pool.depot.retire(&mut a);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// Two owners free the two blocks of a row without an owner.
#[test]
fn two_owners_adopt_one_row() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let z = pool.alloc(&mut a).unwrap();
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, x));
            if let Some(again) = pool.alloc(b) {
                assert!(pool.free(b, again));
            }
        });
        assert!(pool.free(&mut a, y));
        assert!(pool.free(&mut a, z));
        pool.depot.retire(&mut a);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A block is freed twice, by its row's owner and remotely: one free is valid, the other is refused or detected late; and the
/// block, allocated again meanwhile, has one owner.
#[test]
fn one_block_freed_twice() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let other = elsewhere(&pool, move |pool, b| pool.free_again(b, x));
        let here = pool.free_again(&mut a, x);
        assert!(pool.free_again(&mut a, y));
        pool.depot.retire(&mut a);
        let there = other.join().unwrap();
        assert!(here || there);
        assert_eq!(pool.is_whole(), u64::from(here && there));
    });
}

/// A block is freed twice by two owners, neither of which owns the row: exactly one free is accepted.
#[test]
fn one_block_freed_twice_remotely() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let others = [0, 1].map(|_| elsewhere(&pool, move |pool, b| pool.free_again(b, x)));
        let freed = others.map(|other| other.join().unwrap());
        assert_eq!(freed.iter().filter(|&&freed| freed).count(), 1);
        assert!(pool.free_again(&mut a, y));
        pool.depot.retire(&mut a);
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A block is freed while its row moves to the depot and to a third owner.
#[test]
fn a_free_against_the_depot() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        assert!(pool.free(&mut a, y));
        let other = elsewhere(&pool, move |pool, b| assert!(pool.free(b, x)));
        pool.depot.retire(&mut a);
        let mut c = pool.depot.register();
        let z = pool.alloc(&mut c).unwrap();
        assert!(pool.free(&mut c, z));
        pool.depot.remove_if_whole(pool.chunk.rows(), || true).then(|| pool.depot.add(pool.chunk.rows()));
        pool.depot.retire(&mut c);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A pool, and an owner whose stash has the first block of a row that it has released, and the second block.
fn with_a_stash() -> (Arc<Pool>, Owner, u64, u64) {
    let (pool, mut owner, x, y) = with_an_allocated_row();
    assert!(pool.free(&mut owner, x));
    owner.leave_current();
    owner.release(1);
    (pool, owner, x, y)
}

/// A stash returns a block to a row that another owner adopts and keeps using.
#[test]
fn a_stash_returned_against_the_adoption_of_its_row() {
    check(|| {
        let (pool, mut a, _, y) = with_a_stash();
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, y));
            if let Some(again) = pool.alloc(b) {
                assert!(pool.free(b, again));
            }
        });
        pool.depot.retire(&mut a);
        other.join().unwrap();
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A stash's block is allocated and freed while another owner adopts its row and frees it there as well, wrongly: one free is
/// valid.
#[test]
fn a_block_of_a_stash_freed_twice_while_its_row_is_adopted() {
    check(|| {
        let (pool, mut a, x, y) = with_a_stash();
        let again = pool.alloc(&mut a).unwrap();
        assert_eq!(again, x);
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, y));
            pool.free_again(b, x)
        });
        let here = pool.free_again(&mut a, x);
        pool.depot.retire(&mut a);
        let there = other.join().unwrap();
        assert!(here || there);
        assert_eq!(pool.is_whole(), u64::from(here && there));
    });
}

/// The same, and then both owners allocate: whichever free was valid, no block is allocated by both.
#[test]
fn a_block_of_a_stash_freed_twice_is_allocated_once() {
    check(|| {
        let (pool, mut a, x, y) = with_a_stash();
        assert_eq!(pool.alloc(&mut a), Some(x));
        let mut b = pool.depot.register();
        let shared = pool.clone();
        let other = thread::spawn(move || {
            assert!(shared.free(&mut b, y));
            shared.free_again(&mut b, x);
            b
        });
        pool.free_again(&mut a, x);
        let mut b = other.join().unwrap();
        let mut allocated = BTreeSet::new();
        for owner in [&mut a, &mut b] {
            while let Some(block) = pool.alloc(owner) {
                assert!(allocated.insert(block), "{block} twice");
            }
        }
    });
}

/// A stash returns a block while the row's owner for now gives it away: that block can be allocated without another free.
#[test]
fn a_stash_returned_against_the_release_of_its_row() {
    check(|| {
        let (pool, mut a, _, y) = with_a_stash();
        let other = elsewhere(&pool, move |pool, b| {
            assert!(pool.free(b, y));
            let again = pool.alloc(b);
            b.leave_current();
            b.release(1);
            again
        });
        pool.depot.retire(&mut a);
        let again = other.join().unwrap();
        let mut c = pool.depot.register();
        let all: Vec<_> = core::iter::from_fn(|| pool.alloc(&mut c)).collect();
        assert_eq!(all.len() + usize::from(again.is_some()), 4);
        for block in all.into_iter().chain(again) {
            assert!(pool.free(&mut c, block));
        }
        pool.depot.retire(&mut c);
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A stash returns a block that was freed remotely as well, at the same instant: it is freed once, and the second free counted.
#[test]
fn a_stash_returns_a_block_that_was_freed_twice() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let mut c = pool.depot.register();
        let other = elsewhere(&pool, move |pool, b| pool.free_again(b, x));
        let here = pool.free_again(&mut a, x);
        a.leave_current();
        a.release(1);
        assert!(pool.free_again(&mut c, y));
        pool.depot.retire(&mut a);
        pool.depot.retire(&mut c);
        let there = other.join().unwrap();
        assert!(here || there);
        assert_eq!(pool.is_whole(), u64::from(here && there));
        assert_eq!(pool.depot.counts(0).0, 4);
    });
}

/// A pool with two blocks allocated as `Owned`, and the owner of their row.
fn with_owned_blocks() -> (Arc<Pool>, Owner, u64, u64) {
    let pool = Pool::new();
    let mut owner = pool.depot.register();
    let mut alloc = || pool.alloc_as(&mut owner, Form::Owned).unwrap();
    let (x, y) = (alloc(), alloc());
    (pool, owner, x, y)
}

/// A `Block` is dropped by the owner that has its row while a raw free of its address is made elsewhere, and the
/// address is allocated as a `Block` again: the raw free is refused in every interleaving.
#[test]
fn an_owned_block_dropped_here_against_a_raw_free_elsewhere() {
    check(|| {
        let (pool, mut a, x, y) = with_owned_blocks();
        let other = elsewhere(&pool, move |pool, b| pool.free_as(b, x, Form::Raw));
        pool.use_memory(x);
        assert_eq!(pool.free_as(&mut a, x, Form::Owned), Ok(()));
        let again = pool.alloc_as(&mut a, Form::Owned).unwrap();
        assert_eq!(pool.free_as(&mut a, again, Form::Owned), Ok(()));
        assert_eq!(pool.free_as(&mut a, y, Form::Owned), Ok(()));
        pool.depot.retire(&mut a);
        assert!(other.join().unwrap().is_err());
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A `Block` is dropped elsewhere, remotely or by adoption of its row, while the owner of its row frees its address raw.
#[test]
fn an_owned_block_dropped_elsewhere_against_a_raw_free_here() {
    check(|| {
        let (pool, mut a, x, y) = with_owned_blocks();
        let other = elsewhere(&pool, move |pool, b| {
            pool.use_memory(x);
            pool.free_as(b, x, Form::Owned)
        });
        assert!(pool.free_as(&mut a, x, Form::Raw).is_err());
        assert_eq!(pool.free_as(&mut a, y, Form::Owned), Ok(()));
        pool.depot.retire(&mut a);
        assert_eq!(other.join().unwrap(), Ok(()));
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A `Block` is dropped elsewhere while a third owner, which does not have the row either, frees its address raw.
#[test]
fn an_owned_block_dropped_elsewhere_against_a_raw_free_elsewhere() {
    check(|| {
        let (pool, mut a, x, y) = with_owned_blocks();
        let drops = elsewhere(&pool, move |pool, b| pool.free_as(b, x, Form::Owned));
        let frees = elsewhere(&pool, move |pool, b| pool.free_as(b, x, Form::Raw));
        assert!(frees.join().unwrap().is_err());
        assert_eq!(drops.join().unwrap(), Ok(()));
        assert_eq!(pool.free_as(&mut a, y, Form::Owned), Ok(()));
        pool.depot.retire(&mut a);
        assert_eq!(pool.is_whole(), 0);
    });
}

/// A `Block` is turned raw and freed by its holder while its address is freed raw elsewhere: one of the two frees
/// is valid, and a second one that returned `Ok` is detected late.
#[test]
fn an_owned_block_turned_raw_against_a_raw_free_elsewhere() {
    check(|| {
        let (pool, mut a, x, y) = with_owned_blocks();
        let other = elsewhere(&pool, move |pool, b| pool.free_again(b, x));
        let (number, bit) = split(pool.geometry.index_of(x));
        pool.chunk.row(number).unwrap().make_raw(bit);
        let here = pool.free_again(&mut a, x);
        assert_eq!(pool.free_as(&mut a, y, Form::Owned), Ok(()));
        pool.depot.retire(&mut a);
        let there = other.join().unwrap();
        assert!(here || there);
        assert_eq!(pool.is_whole(), u64::from(here && there));
    });
}

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
