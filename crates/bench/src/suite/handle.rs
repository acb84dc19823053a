//! What the suites do with every allocator: allocate and free objects, one at a time or in bulk.
//!
//! The workloads are generic, so each subject's calls are inlined into a loop of its own. The
//! address that a device would be given is passed through `black_box`, which keeps the object from
//! the optimiser at the cost of one store.

mod api;
mod blocks;
mod frames;
mod line;
mod raw;
mod workloads;

pub(super) use api::{AllocWritten, AtOffset, Handle, Object, Pool, Written, handle};
pub(super) use blocks::{Baseline, Malloc, OwnedBlocks};
pub(super) use frames::Huge;
pub(super) use line::{AllocLine, Line};
pub(super) use raw::{RawBlocks, SharedRawBlocks, bulk_run};
pub(super) use workloads::{
    OUTSTANDING, PAIRS_2T, Rng, WARM_UP, alloc_all, free_all, owners_run, pairs, pairs_2t_run,
    pairs_run, queue_run, random_run, replace_run, slots, spawn_second,
};
