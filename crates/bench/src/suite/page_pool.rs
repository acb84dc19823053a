//! The suite `page-pool`: pages that keep their mapping while they go round.
//!
//! An operation (`ns/op`) is
//!
//! | case | an operation |
//! | --- | --- |
//! | `local`, `local-nowrite` | one page out, one word of it written (or not), and back again, by the consumer |
//! | `local-64` | the same without the write, 64 of them out at a time |
//! | `ring` | one page out by the consumer and back through the ring, 512 of them at a time; one thread does both |
//! | `slow` | one page out and back again that no cache has, 4,096 of them: each time of a new pool, which is closed at the end |
//! | `rx-512` | one packet: into a page by the device, on to a second thread which reads it and frees the page, and another page into the ring of 512 descriptors |
//!
//! | subject | what it is |
//! | --- | --- |
//! | `pinfold` | a page pool on an arena; a `Page` goes back by `recycle` (`local`, `slow`) or by being dropped |
//! | `pinfold-uncounted` | the same, without the counters of the consumer's path |
//! | `pinfold-raw` | the same, raw pages, whose frees are checked |
//! | `pinfold-bulk` | the same, many pages given back by one call |
//! | `pinfold-full` | the same, with a ring of 1: every page meets a full ring and comes back from below it |
//! | `single` | the page allocator of a kernel, one call for each page |
//! | `list`, `array` | an owner's `Local` of a zone: a list of pages from which the descriptors are filled, or `fill`; in a ring's path the second thread has a `Local` of its own |
//! | `lifo`, `thread-list` | stacks of numbers that check nothing: under a lock, and of one thread; the floor |
//!
//! In `ring` and `slow` each page is written, too.
//!
//! Only `pinfold`'s pages are mapped for the device. What the others would have to pay for that, each time, is left out.

mod cached;
mod receive;

use super::BenchError;
use crate::baseline::buddy::Buddy;
use crate::harness::Harness;
use crate::record::Record;
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::frame::Frame;
use pinfold_core::page_pool::{Config, PagePool};

/// How many frames the baselines have.
const FRAMES: u32 = 1 << 14;
/// How much memory the pools get, all together.
const MEMORY: u64 = 256 << 20;

/// Measures the suite.
///
/// # Errors
/// Where the memory cannot be had, or a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(MEMORY).mapping_policy(MappingPolicy::PerUse).build(&domain)?;
    let packets = Arena::builder()
        .size(u64::from(FRAMES) * Frame::BYTES)
        .mapping_policy(MappingPolicy::Whole)
        .build(&domain)?
        .alloc(FRAMES as usize * 4096)?;
    // Touched, so that no subject pays for a page's first use. It is as long as was asked for: nothing is refused.
    let _ = packets.memory().fill(0, packets.memory().len(), 0);
    let buddy = Buddy::new(FRAMES);
    let memory = packets.memory();
    let mut records = cached::local(harness, &arena, &buddy, memory)?;
    records.extend(cached::counters(harness, &arena)?);
    records.extend(cached::ring(harness, &arena, &buddy, memory)?);
    records.extend(cached::slow(harness, &arena, &buddy, memory)?);
    records.extend(receive::run(harness, &arena, memory, &buddy)?);
    Ok(records)
}

/// A pool as the suite makes it.
type Pool<'a> = PagePool<&'a Arena>;

fn pool(arena: &Arena, ring: u32) -> Result<Pool<'_>, BenchError> {
    Ok(PagePool::new(arena, "bench", Config { ring, ..Config::default() })?)
}
