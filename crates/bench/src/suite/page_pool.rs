//! The suite `page-pool`: pages that stay mapped while they are recycled.
//!
//! Only the pages of `pinfold` are mapped for the device. What mapping would cost the others is
//! left out.

mod cached;
mod handles;
mod receive;
mod setup;

use super::Entry;
use crate::baseline::buddy::Buddy;
use crate::error::BenchError;
use crate::harness::Harness;
use crate::record::Record;
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::frame::Frame;
use setup::FRAMES;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("local", "allocate, write one word of, and recycle one page, by the consumer"),
    ("local-nowrite", "the same, without the write"),
    ("local-64", "the same without the write, 64 pages allocated at a time"),
    ("ring", "allocate and write a page, free it through the ring; 512 at a time, one thread"),
    (
        "slow",
        "allocate, write and free a page that no cache holds: 4,096 of a new pool, and its destruction",
    ),
    ("rx-512", "receive a packet, pass its page to a thread that frees it, refill the descriptor"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "a page pool on an arena; a Page is freed by recycle (local, slow) or by its drop"),
    ("pinfold-uncounted", "the same, without the counters of the consumer's path"),
    ("pinfold-raw", "the same with raw pages, whose frees are checked"),
    ("pinfold-bulk", "the same, many pages freed by one call"),
    ("pinfold-full", "the same with a ring of 1, which is always full: the slow path"),
    ("single", "the page allocator of a kernel, one call per page"),
    ("list, array", "a zone's Local: take_list or fill; the receiving thread has its own Local"),
    (
        "lifo, thread-list",
        "unchecked stacks of numbers: under a lock, and of one thread (the floor)",
    ),
];

/// How much memory the pools get, all together.
const MEMORY: u64 = 256 << 20;

/// Measures the suite.
///
/// # Errors
/// Where the memory is unavailable or a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let domain = Domain::soft()?;
    let arena =
        Arena::builder().size(MEMORY).mapping_policy(MappingPolicy::PerUse).build(&domain)?;
    let packets = Arena::builder()
        .size(u64::from(FRAMES) * Frame::BYTES)
        .mapping_policy(MappingPolicy::Whole)
        .build(&domain)?
        .alloc(FRAMES as usize * 4096)?;
    // Touched first: no subject pays for the first use of a page. The range is the whole buffer, so
    // it is never refused.
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
