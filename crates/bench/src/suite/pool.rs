//! The suite `pool`: DMA pools beside those of the kernel.
//!
//! Every subject but `malloc` gets memory of the same kind, touched before, and allocates its pages
//! or chunks from an allocator that costs next to nothing, so the figures are about the pools. One
//! word of each block is written when it is allocated, except in the cases called `-nowrite`, and
//! in `mpt3sas-write`, where it is 64 bytes.

mod fresh;
mod held;
mod hot;
mod scale;
mod setup;
mod threads;
mod workload;

use super::Entry;
use crate::error::BenchError;
use crate::harness::Harness;
use crate::record::Record;
use pinfold::{Arena, Domain, MappingPolicy};

pub use workload::{BLOCKS, SIZE};

/// The cases.
pub(super) const CASES: &[Entry] = &[
    (
        "mpt3sas-alloc",
        "one of 373,959 allocations of 128 bytes from a new pool, which grows meanwhile, and one word written",
    ),
    (
        "mpt3sas-free, -free-random",
        "one of as many frees, in that order or at random, with the pool's destruction",
    ),
    ("mpt3sas-alloc-nowrite", "one of those allocations, without writing to the block"),
    ("mpt3sas-write", "one of those allocations, and 64 bytes written"),
    ("pair-16, -64, -256, -1024, -4096", "allocate and free one block of that size"),
    ("pair-...-nowrite", "the same, without writing a word of the block"),
    ("pair-64-2t", "pair-64 by two threads at once: the time of both over the pairs of both"),
    (
        "bulk-32, -512",
        "allocate and free a block of 64 bytes, 32 or 512 by one call if there is one",
    ),
    (
        "random-4096",
        "allocate and free a block of 128 bytes, 4,096 allocated at a time and freed at random",
    ),
    (
        "out-4096",
        "free a block of 64 bytes and allocate another, with 4,096 allocated, of which a random one is freed",
    ),
    ("queue-64, -4096", "free the oldest of as many blocks of 64 bytes and allocate another"),
    ("remote-free", "allocate a block on one thread and free it on another, 256 passed at a time"),
    (
        "owners-64",
        "free a block of 64 bytes at random and allocate another: 64 owners with 32 blocks each take turns, on one thread",
    ),
    (
        "grow-full-1g, -256g",
        "one of 65,536 allocations of 128 bytes from a pool that grows in a zone of that size, 99 % full at random; the longest",
    ),
    (
        "locals-1024",
        "owners of 1,024 that get a block of 4 KiB from 1 GiB, and the pool's blocks for each in use",
    ),
    ("metadata", "bytes of the pool's own state for each block of 64 bytes, of 10^6"),
    ("free-random-100k, -10m", "free one of 10^5 blocks of 64 bytes, or of 10^7, at random"),
    (
        "held-2t-pipe",
        "memory held and in use at its peak: a thread allocates, another frees, in order",
    ),
    (
        "held-2t-random",
        "the same: both allocate and free at random, in sets of changing sizes that they share",
    ),
    (
        "held-2t-waves",
        "the same: a thread allocates all blocks, another frees all at random, in waves of random sizes",
    ),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "a Local, and blocks that are freed through it"),
    (
        "pinfold-raw",
        "a Local and raw blocks, each of which is claimed when it is freed by its address",
    ),
    ("pinfold-alone", "remote-free: one thread that allocates and frees as many"),
    ("pinfold-shared", "the pool's own calls, which take its lock"),
    (
        "linear, rbtree, inblock",
        "the DMA pools of Linux to 6.2, of the 2022 patches, and since 6.3",
    ),
    ("malloc", "the process's allocator, aligned to 16 bytes"),
    (
        "lifo, thread-list",
        "unchecked stacks of blocks: under a lock, and of one thread (the floor)",
    ),
    (
        "batches",
        "a list per thread before a stack under a lock, which it uses for 32 blocks at a time",
    ),
    (
        "empty-loop",
        "grow-full-*: nothing, timed in the same way: what the machine itself pauses for",
    ),
];

/// How much memory the baselines get, and the pools.
const MEMORY: usize = 96 << 20;

/// Measures the suite.
///
/// # Errors
/// Where the memory is unavailable or a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let domain = Domain::soft()?;
    let arena =
        Arena::builder().size(MEMORY as u64).mapping_policy(MappingPolicy::Whole).build(&domain)?;
    // Memory of the same kind, for the baselines alone.
    let others = Arena::builder()
        .size(MEMORY as u64)
        .mapping_policy(MappingPolicy::PerUse)
        .build(&domain)?;
    let mut others = others.alloc(MEMORY)?;
    let baseline = others.as_mut_slice()?;
    // All memory is touched first: no subject pays for the first use of a page.
    baseline.fill(0);
    arena.alloc_zeroed(MEMORY)?;

    let mut records = workload::run(harness, &arena, baseline)?;
    records.extend(fresh::run(harness, &arena, baseline)?);
    records.extend(hot::run(harness, &arena, baseline)?);
    records.extend(threads::run(harness, &arena, baseline)?);
    drop((arena, others));
    records.extend(scale::run(harness)?);
    records.extend(held::run(harness)?);
    Ok(records)
}
