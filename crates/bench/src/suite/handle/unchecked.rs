//! `pinfold-unchecked`: a pool without its checks, to show what they cost.
#![expect(unsafe_code, reason = "without the checks the caller must keep the rules of the pool")]

use super::api::PoolLocal;
use super::workloads::WARM_UP;
use crate::error::BenchError;
use crate::harness::Cost;
use pinfold::Arena;
use pinfold_core::dma_pool::DmaPool;
use std::hint::black_box;

/// Allocates and frees one block `times` times without checks, writing each block where `WRITE` is set.
pub(in crate::suite) fn pairs<const WRITE: bool>(
    arena: &Arena,
    size: usize,
    times: usize,
) -> Result<Cost, BenchError> {
    let pool = DmaPool::new(arena, "bench", size, 0, 0)?;
    let mut local = pool.local();
    repeat::<WRITE>(&mut local, WARM_UP)?;
    let (cost, result) = Cost::of(|| repeat::<WRITE>(&mut local, times));
    result.map(|()| cost)
}

/// `local` belongs to the pool that [`pairs`] made.
#[inline(always)]
fn repeat<const WRITE: bool>(local: &mut PoolLocal<'_, '_>, times: usize) -> Result<(), BenchError> {
    for _ in 0..times {
        // SAFETY: `pairs` made the pool by `DmaPool::new`, so it is not in debug mode. The block is freed below by the same
        // `Local`, which borrows the pool, so the pool is neither shrunk nor dropped before.
        let block = unsafe { local.alloc_raw_unchecked() }?;
        if WRITE {
            // SAFETY: the block has at least 16 bytes and was allocated just now; no other code has its address.
            unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.iova().raw()) };
        }
        black_box(block.iova().raw());
        // SAFETY: this `Local` allocated it just now by that call, and no copy of it is left.
        unsafe { local.free_raw_unchecked(block) };
    }
    Ok(())
}
