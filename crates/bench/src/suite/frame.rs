//! The suite `frame`: page frames beside the page allocator of a kernel.
//!
//! An operation (`ns/op`) is
//!
//! | cases | an operation |
//! | --- | --- |
//! | `pair-4k`, `pair-4k-2t` | one frame out, one word of it written, and back again, by one thread or by two |
//! | `pair-2m` | the same of one run of 2 MiB |
//! | `pair-4k-nowrite`, `pair-2m-nowrite` | the same without the write |
//! | `fill-64`, `fill-512` | one frame out and back again, 64 or 512 by one call, 8,192 out at a time |
//! | `alloc-2m` | one run of 2 MiB out and back again, 128 of them at a time |
//! | `random-4096` | one frame out and back again, 4,096 out at a time, freed at random |
//! | `random-free-all`, `random-free` | one of 262,144 frees of single frames, all of the zone, or of 65,536, in random order |
//! | `rpc-259` | one call of a server's receive loop: fill what is missing of 259 pages |
//!
//! Outside the pairs nothing is written to a frame: no subject does, and a write that each caller makes alike would only
//! hide what they cost.
//!
//! `churn-70` counts how many runs of 2 MiB are to be had of 1 GiB of which 70 % are in use, after 10^7 random frees and
//! allocs of single frames; at the beginning none is to be had, because the free 30 % are spread over all. `zone-1t` is the account of 1 TiB: its bytes a frame, and the time to make it.
//!
//! | subject | what it is |
//! | --- | --- |
//! | `pinfold`, `array` | an owner's `Local`: `alloc`, or `fill`, which fills the empty slots of an array |
//! | `list` | an owner's `Local`: `take_list`, a chain from which the slots are filled |
//! | `pinfold-single` | an owner's `Local`, one call for each frame |
//! | `pinfold-shared` | the zone's own calls, without an owner |
//! | `single` | the page allocator of a kernel, one call for each page: lists of runs under a lock, an owner's lists of pages before them |
//! | `lifo`, `thread-list` | stacks of numbers that check nothing: under a lock, and of one thread; the floor |

mod account;
mod bulk;
mod rpc;
mod single;

use super::BenchError;
use crate::baseline::buddy::Buddy;
use crate::harness::Harness;
use crate::record::Record;
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::frame::{Frame, Zone};
use pinfold_core::mem::DmaMemory;

/// How many frames the subjects have: 1 GiB.
const FRAMES: u32 = 1 << 18;

/// How many frames of memory there are for what is written of a frame: places are taken modulo 64 MiB.
const WRITTEN: u32 = 1 << 14;

/// What the subjects work on.
#[derive(Clone, Copy)]
struct Parts<'s> {
    zone: &'s Zone,
    buddy: &'s Buddy,
    memory: DmaMemory<'s>,
}

/// Measures the suite.
///
/// # Errors
/// Where a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let (zone, buddy) = (Zone::new(FRAMES)?, Buddy::new(FRAMES));
    let domain = Domain::soft()?;
    let bytes = u64::from(WRITTEN) * Frame::BYTES;
    let arena = Arena::builder().size(bytes).mapping_policy(MappingPolicy::Whole).build(&domain)?;
    let frames = arena.alloc_zeroed(WRITTEN as usize * 4096)?;
    let parts = Parts { zone: &zone, buddy: &buddy, memory: frames.memory() };
    let mut records = single::pairs(harness, &parts)?;
    records.extend(single::huge_pairs(harness, &parts)?);
    records.extend(bulk::fills(harness, &parts)?);
    records.extend(bulk::huge(harness, &zone, &buddy)?);
    records.extend(single::scatter(harness, &parts)?);
    records.extend(single::random_frees(harness, &parts)?);
    records.extend(rpc::run(harness, &zone, &buddy)?);
    records.extend(account::churn(harness)?);
    records.extend(account::one_tebibyte(harness)?);
    Ok(records)
}
