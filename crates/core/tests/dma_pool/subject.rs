//! The pool under test, by its public calls.

use crate::heap::Heap;
pub(crate) use pinfold_core::pool as api;
use pinfold_core::pool::CreateError;
pub(crate) use pinfold_core::pool::{Block, DmaPool as Pool, Local};
use std::sync::Arc;

pub(crate) type Source = Arc<Heap>;

/// Whether two raw frees of one block at the same instant are told apart, whoever makes them.
pub(crate) const EXACT: bool = true;
/// Whether what is kept of released chunks is bounded by the span.
pub(crate) const BOUNDED: bool = true;

pub(crate) fn build(heap: &Source, size: usize, align: usize, boundary: usize) -> Result<Pool, CreateError> {
    Pool::builder("test").block(size).align(align).boundary(boundary).build(heap)
}

pub(crate) fn limited(heap: &Source, size: usize, minimum: u64, maximum: u64) -> Result<Pool, CreateError> {
    Pool::builder("test").block(size).minimum(minimum).maximum(maximum).build(heap)
}

pub(crate) fn shrink(pool: &Pool) -> u64 {
    pool.shrink()
}

/// Destroys a pool, or returns how many blocks are allocated and what the error says.
pub(crate) fn destroy(pool: Pool) -> Result<(), (u64, String)> {
    pool.destroy().map_err(|busy| (busy.blocks, busy.to_string()))
}
