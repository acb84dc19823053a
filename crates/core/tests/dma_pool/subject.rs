//! The pool under test, by its public calls.

use crate::heap::Heap;
use pinfold_core::dma_pool::{self, CreateError, LimitError, Limits};
use pinfold_core::share::Shared;
use std::sync::Arc;

pub(crate) type Source = Arc<Heap>;
pub(crate) type Pool = Shared<dma_pool::DmaPool<Source>>;
pub(crate) type Local = dma_pool::Local<Source>;
pub(crate) type Block = dma_pool::Block<Source>;

/// Whether two raw frees of one block at the same instant are told apart, whoever makes them.
pub(crate) const EXACT: bool = false;
/// Whether chunks in which memory was lent come back, and what is kept of a released chunk is bounded by the span.
pub(crate) const BOUNDED: bool = false;

pub(crate) fn build(heap: &Source, size: usize, align: usize, boundary: usize) -> Result<Pool, CreateError> {
    dma_pool::DmaPool::new(Arc::clone(heap), "test", size, align, boundary).map(Shared::new)
}

pub(crate) fn limited(heap: &Source, size: usize, minimum: u64, maximum: u64) -> Result<Pool, LimitError> {
    let pool = build(heap, size, 0, 0).unwrap();
    pool.set_limits(Limits { minimum, maximum })?;
    Ok(pool)
}

pub(crate) fn shrink(pool: &Pool) -> u64 {
    pool.shrink_shared()
}

/// Destroys a pool, or returns how many blocks are allocated and what the error says.
pub(crate) fn destroy(pool: Pool) -> Result<(), (u64, String)> {
    let pool = pool.try_into_inner().map_err(|_| (0, String::from("other handles exist")))?;
    pool.destroy().map_err(|busy| (busy.blocks, busy.to_string()))
}
