//! The suite `frame`: page frames beside the page allocator of a kernel.
//!
//! Outside the pairs nothing is written to a frame: no subject does, and a write that each caller
//! makes alike would only hide what they cost.

mod bulk;
mod metadata;
mod refused;
pub(super) mod rpc;
mod setup;
mod single;

use super::Entry;
use crate::baseline::buddy::Buddy;
use crate::error::BenchError;
use crate::harness::Harness;
use crate::record::Record;
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::frame::{Frame, Zone};
use setup::{FRAMES, Parts, WRITTEN};

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("pair-4k, pair-2m", "allocate, write one word of, and free one frame, or one run of 2 MiB"),
    ("pair-4k-nowrite, pair-2m-nowrite", "the same, without the write"),
    ("pair-4k-2t", "pair-4k by two threads at once"),
    (
        "owners-64",
        "free a frame at random and allocate another: 64 owners with 32 frames each take turns, on one thread",
    ),
    (
        "fill-64, -512",
        "allocate and free a frame, 64 or 512 by one call, 8,192 allocated at a time",
    ),
    ("alloc-2m", "allocate and free a run of 2 MiB, 128 allocated at a time"),
    ("random-4096", "allocate and free a frame, 4,096 allocated at a time and freed at random"),
    ("free-all", "one of the frees of all 262,144 frames, in the order of their allocation"),
    ("random-free-all, random-free", "one of the random frees of all 262,144 frames, or of 65,536"),
    ("rpc-259", "one call in a server's receive loop: refill 1 to 259 missing pages of 259"),
    (
        "churn-70",
        "free runs of 2 MiB in 1 GiB, 70 % allocated, after 10^7 random steps; 0 at first",
    ),
    ("zone-1t", "the metadata of a 1 TiB zone: bytes per frame, and the time to create it"),
    (
        "refused-1t",
        "one refused run of each order 1 to 8 of a 1 TiB zone, full or of single free frames, which gave out runs or single frames: the longest",
    ),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold, array", "an owner's Local: alloc, or fill, which fills the empty slots of an array"),
    ("list", "an owner's Local: take_list, a chain from which the slots are filled"),
    ("pinfold-single", "an owner's Local, one call per frame"),
    ("pinfold-shared", "the zone's own calls, without an owner"),
    (
        "single",
        "a kernel's page allocator, one call per page: buddy lists behind lists of each owner",
    ),
    (
        "lifo, thread-list",
        "unchecked stacks of numbers: under a lock, and of one thread (the floor)",
    ),
    (
        "empty-loop",
        "refused-1t: nothing, timed in the same way: what the machine itself pauses for",
    ),
];

/// Measures the suite.
///
/// # Errors
/// Where the memory is unavailable or a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let (zone, buddy) = (Zone::new(FRAMES)?, Buddy::new(FRAMES));
    let domain = Domain::soft()?;
    let bytes = u64::from(WRITTEN) * Frame::BYTES;
    let arena = Arena::builder().size(bytes).mapping_policy(MappingPolicy::Whole).build(&domain)?;
    let frames = arena.alloc_zeroed(WRITTEN as usize * 4096)?;
    let parts = Parts { zone: &zone, buddy: &buddy, memory: frames.memory() };
    let mut records = single::pairs(harness, &parts)?;
    records.extend(single::huge_pairs(harness, &parts)?);
    records.extend(single::owners(harness, &parts)?);
    records.extend(bulk::fills(harness, &parts)?);
    records.extend(bulk::huge(harness, &zone, &buddy)?);
    records.extend(single::scatter(harness, &parts)?);
    records.extend(single::frees(harness, &parts)?);
    records.extend(rpc::run(harness, &zone, &buddy)?);
    records.extend(metadata::churn(harness)?);
    records.extend(metadata::one_tebibyte(harness)?);
    records.extend(refused::run(harness)?);
    Ok(records)
}
