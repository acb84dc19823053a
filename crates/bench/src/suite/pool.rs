//! The suite `pool`: DMA pools beside those of the kernel.
//!
//! Every subject but `malloc` gets memory of the same kind, touched before, and takes its pages or chunks from an
//! allocator that costs next to nothing, so that the figures are about the pools. One word of each block is written when
//! it is handed out, except in the cases that say so. An operation (`ns/op`) is
//!
//! | cases | an operation |
//! | --- | --- |
//! | `mpt3sas-alloc` | one of 373,959 allocs of 128 bytes, the pool growing as it goes |
//! | `mpt3sas-free`, `mpt3sas-free-random` | one of as many frees, in the order of the allocs or a random one; destroying the pool counts too |
//! | `pair-N` | one block of N bytes out and back again |
//! | `pair-N-nowrite` | the same, the block not written |
//! | `bulk-32`, `bulk-512` | one block of 64 bytes out and back again, 32 or 512 by one call, or one by one where there is no such call |
//! | `random-4096` | one block of 128 bytes out and back again, 4,096 out at a time, freed at random |
//! | `pair-64-2t` | `pair-64` by two threads at once: the time of both together by the pairs of both |
//! | `remote-free` | one block out by one thread and back by another |
//!
//! | subject | what it is |
//! | --- | --- |
//! | `pinfold` | a `Local`, raw blocks |
//! | `pinfold-unchecked` | a `Local`, raw blocks, no record of what is out and no check of what is freed |
//! | `pinfold-block` | a `Local`, blocks that free themselves: each is dropped, which takes the pool's lock |
//! | `pinfold-block-local` | the same, each given back to the `Local` |
//! | `pinfold-shared` | the pool's own calls, under its lock |
//! | `linear`, `rbtree`, `inblock` | the kernel's pools, by age, each under a lock as the kernel's |
//! | `malloc` | the process's allocator, aligned to 64 bytes |
//! | `lifo`, `thread-list` | stacks of blocks, all there from the start, checking nothing: under a lock, and of one thread; the floor |
//! | `batches` | a list of each thread, before a stack under a lock to which it goes for 32 at a time |

mod hot;
mod threads;
mod workload;

use super::BenchError;
use super::hand::Pool;
use crate::harness::Harness;
use crate::record::Record;
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::dma_pool::DmaPool;

pub use workload::{BLOCKS, SIZE};

/// How much memory the baselines get, and the pools.
const MEMORY: usize = 96 << 20;

/// Measures the suite.
///
/// # Errors
/// Where the memory cannot be had, or a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(MEMORY as u64).mapping_policy(MappingPolicy::Whole).build(&domain)?;
    // Of the same kind, for the baselines, and theirs alone.
    let others = Arena::builder().size(MEMORY as u64).mapping_policy(MappingPolicy::PerUse).build(&domain)?;
    let mut others = others.alloc(MEMORY)?;
    let baseline = others.as_mut_slice()?;
    // All memory is touched, so that no subject pays for a page's first use.
    baseline.fill(0);
    arena.alloc_zeroed(MEMORY)?;

    let mut records = workload::run(harness, &arena, baseline)?;
    records.extend(hot::run(harness, &arena, baseline)?);
    records.extend(threads::run(harness, &arena, baseline)?);
    Ok(records)
}

fn pool<'a>(arena: &'a Arena, size: usize) -> Result<Pool<'a>, BenchError> {
    Ok(DmaPool::new(arena, "bench", size, 0, 0)?)
}
