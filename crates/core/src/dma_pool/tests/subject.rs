//! Construction and destruction of pools for the tests.

use super::heap::Heap;
use crate::dma_pool::CreateError;
pub(super) use crate::dma_pool::{Block, DmaPool as Pool, PoolLocal};
use std::sync::Arc;

pub(super) fn build(
    heap: &Arc<Heap>,
    size: usize,
    align: usize,
    boundary: usize,
) -> Result<Pool, CreateError> {
    Pool::builder("test").block(size).align(align).boundary(boundary).build(heap)
}

pub(super) fn limited(
    heap: &Arc<Heap>,
    size: usize,
    minimum: u64,
    maximum: u64,
) -> Result<Pool, CreateError> {
    Pool::builder("test").block(size).minimum(minimum).maximum(maximum).build(heap)
}
