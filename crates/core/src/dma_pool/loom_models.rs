//! Every interleaving (within a bound of preemptions) of owners that share two rows of two blocks each.
//!
//! A cell stands for the memory of each block: the model checker reports two concurrent owners, and accesses of one owner
//! that do not happen before the next owner's. In the borrowed form the type system excludes a drop of the pool during a
//! free; `shared` covers the shared form.

mod lent;
mod owned;
mod parcel;
mod rows;
mod runs;
mod shared;
mod stash;

use super::depot::Depot;
use super::directory::Chunk;
use super::geometry::Geometry;
use super::owner::{Owner, split};
use super::stash::Site;
use super::state::{Form, FreeRefusal};
use crate::addr::Iova;
use crate::frame::{Frame, Order};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering;
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
            || owner.push(site, form)
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
    check_within(3, model);
}

/// The same with fewer preemptions, for models of three threads.
fn check_within(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}
