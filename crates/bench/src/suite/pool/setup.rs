//! The pool that the suite measures.

use crate::error::BenchError;
use crate::suite::handle::Pool;
use pinfold::Arena;
use pinfold_core::dma_pool::DmaPool;

pub(super) fn pool(arena: &Arena, size: usize) -> Result<Pool, BenchError> {
    Ok(DmaPool::builder("bench").block(size).build(arena)?)
}
