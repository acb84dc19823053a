//! `pinfold-unchecked`: what the checks of a free cost.
#![expect(unsafe_code, reason = "what has no checks asks its caller to keep the rules")]

use super::{BenchError, Pool};
use crate::harness::Cost;
use pinfold::Arena;
use pinfold_core::dma_pool::{DmaPool, Local};
use std::hint::black_box;

/// One block out and back again without a check, so many times, each written where `WRITE` says so.
pub(in crate::suite) fn pairs<const WRITE: bool>(
    arena: &Arena,
    size: usize,
    times: usize,
) -> Result<Cost, BenchError> {
    let pool = DmaPool::new(arena, "bench", size, 0, 0)?;
    let mut local = pool.local();
    repeat::<WRITE>(&mut local, super::WARM)?;
    let (cost, result) = Cost::of(|| repeat::<WRITE>(&mut local, times));
    result.map(|()| cost)
}

/// `local` is of the pool that [`pairs`] made.
#[inline(always)]
fn repeat<'a, const WRITE: bool>(
    local: &mut Local<&'a Arena, &Pool<'a>>,
    times: usize,
) -> Result<(), BenchError> {
    for _ in 0..times {
        // SAFETY: the pool was made above by `DmaPool::new`, so it is not in debug mode; the block is freed right below,
        // by the same `Local`, which borrows the pool, so that it is neither shrunk nor dropped before.
        let block = unsafe { local.alloc_raw_unchecked() }?;
        if WRITE {
            // SAFETY: the block has at least 16 bytes, was handed out just now, and nobody else knows of it.
            unsafe { block.as_ptr().cast::<u64>().write_unaligned(block.iova().raw()) };
        }
        black_box(block.iova().raw());
        // SAFETY: this `Local` gave it just now by that call, and no copy of it is left.
        unsafe { local.free_raw_unchecked(block) };
    }
    Ok(())
}
