//! `pinfold-unchecked`: what the checks of a free cost. The one place of this crate that needs `unsafe`.
#![expect(unsafe_code, reason = "what has no checks asks its caller to keep the rules")]

use super::{BenchError, pool};
use crate::harness::Cost;
use pinfold::Arena;
use pinfold_core::dma_pool::Local;
use std::hint::black_box;

/// One block out and back again without a check, so many times.
pub(super) fn pairs(arena: &Arena, size: usize, times: usize) -> Result<Cost, BenchError> {
    let pool = pool(arena, size)?;
    let mut local = pool.local();
    repeat(&mut local, 64)?;
    let (cost, result) = Cost::of(|| repeat(&mut local, times));
    result.map(|()| cost)
}

/// `local` is of the pool that [`pairs`] made.
#[inline(always)]
fn repeat(local: &mut Local<'_, &Arena>, times: usize) -> Result<(), BenchError> {
    for _ in 0..times {
        // SAFETY: the pool was made above by `DmaPool::new`, so it is not in debug mode; the block is freed right below,
        // by the same `Local`, which borrows the pool, so that it is neither shrunk nor dropped before.
        let block = unsafe { local.alloc_raw_unchecked() }?;
        black_box(block.iova().raw());
        // SAFETY: this `Local` gave it just now by that call, and no copy of it is left.
        unsafe { local.free_raw_unchecked(block) };
    }
    Ok(())
}
