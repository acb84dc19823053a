//! The suite `pool`: DMA pools beside those of the kernel.
//!
//! Every subject gets the same memory, touched before, and takes its pages or chunks from an allocator that costs next
//! to nothing, so that the figures are about the pools. An operation (`ns/op`) is
//!
//! | cases | an operation |
//! | --- | --- |
//! | `mpt3sas-alloc` | one of 373,959 allocs of 128 bytes, the pool growing as it goes |
//! | `mpt3sas-free`, `mpt3sas-free-random` | one of as many frees, in the order of the allocs or a random one; destroying the pool counts too |
//! | `pair-N`, `bulk-32` | one block of N (64) bytes out and back again; `bulk-32` 32 at a time |
//! | `pair-64-2t` | the same by two threads at once: the time of both together by the pairs of both |
//! | `remote-free` | one block out by one thread and back by another |
//!
//! | subject | what it is |
//! | --- | --- |
//! | `pinfold` | a `Local`, raw blocks |
//! | `pinfold-unchecked` | a `Local`, raw blocks, no record of what is out and no check of what is freed |
//! | `pinfold-block` | a `Local`, blocks that free themselves |
//! | `pinfold-shared` | the pool's own calls, under its lock |
//! | `linear`, `rbtree`, `inblock` | the kernel's pools, by age |
//! | `malloc` | the process's allocator, aligned to 64 bytes |
//! | `lifo`, `thread-list` | stacks of numbers, all there from the start, checking nothing: with a lock and without |

mod hot;
mod threads;
mod unchecked;
mod workload;

use super::BenchError;
use super::hand::Pool;
use crate::baseline::pages::Pages;
use crate::harness::Harness;
use crate::record::Record;
use pinfold::{Arena, Domain, Exposure};
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
    let arena = Arena::builder().size(2 * MEMORY as u64).exposure(Exposure::Whole).build(&domain)?;
    let baseline = arena.alloc(MEMORY)?;
    touch(&arena, &baseline);
    let pages = Pages::new(baseline.memory());

    let mut records = workload::run(harness, &arena, &pages)?;
    records.extend(hot::run(harness, &arena, &pages)?);
    records.extend(threads::run(harness, &arena, &pages)?);
    Ok(records)
}

/// Touches all memory, so that no subject pays for a page's first use.
fn touch(arena: &Arena, baseline: &pinfold::Buffer) {
    // Both are inside their memory by construction: a refusal is impossible and would only cost a page fault later.
    let _ = baseline.memory().fill(0, baseline.memory().len(), 0);
    if let Ok(rest) = arena.alloc(MEMORY) {
        let _ = rest.memory().fill(0, rest.memory().len(), 0);
    }
}

fn pool<'a>(arena: &'a Arena, size: usize) -> Result<Pool<'a>, BenchError> {
    Ok(DmaPool::new(arena, "bench", size, 0, 0)?)
}
