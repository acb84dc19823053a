//! The suite `frame`: page frames beside the page allocator of a kernel.
//!
//! All of it is account: no subject touches a page. An operation (`ns/op`) is
//!
//! | cases | an operation |
//! | --- | --- |
//! | `pair-4k`, `pair-4k-2t` | one frame out and back again, by one thread or by two |
//! | `fill-64`, `fill-512` | one frame handed out, of 64 or 512 asked for at a time, until 8,192 are out |
//! | `alloc-2m` | one aligned run of 2 MiB out and back again, 128 of them at a time |
//! | `random-free` | one of 65,536 frees of single frames, in random order |
//! | `rpc-259` | one call of a server's receive loop: fill what is missing of 259 pages |
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
//! | `single` | the page allocator of a kernel, one call for each page: lists of runs under a lock, a list of single pages before them |
//! | `lifo`, `thread-list` | stacks of numbers that check nothing: with a lock and without |

mod account;
mod bulk;
mod rpc;
mod single;

use super::BenchError;
use crate::baseline::buddy::Buddy;
use crate::harness::Harness;
use crate::record::Record;
use pinfold_core::frame::Zone;

/// How many frames the subjects have: 1 GiB.
const FRAMES: u32 = 1 << 18;

/// Measures the suite.
///
/// # Errors
/// Where a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let zone = Zone::new(FRAMES)?;
    let buddy = Buddy::new(FRAMES);
    let mut records = single::pairs(harness, &zone, &buddy)?;
    records.extend(bulk::fills(harness, &zone, &buddy)?);
    records.extend(bulk::huge(harness, &zone, &buddy)?);
    records.extend(single::random_frees(harness, &zone, &buddy)?);
    records.extend(rpc::run(harness, &zone, &buddy)?);
    records.extend(account::churn(harness)?);
    records.extend(account::one_tebibyte(harness)?);
    Ok(records)
}
