//! The pool that the suite measures.

use crate::error::BenchError;
use pinfold::Arena;
use pinfold_core::dma_pool::DmaPool;

pub(super) fn pool(arena: &Arena, size: usize) -> Result<DmaPool<&Arena>, BenchError> {
    Ok(DmaPool::new(arena, "bench", size, 0, 0)?)
}
