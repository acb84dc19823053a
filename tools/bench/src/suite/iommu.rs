//! The suite `iommu`: what protection costs.
//!
//! Flushes are those of the software IOMMU, so figures that contain them are modelled.

mod bounce;
mod life;
mod payload;
mod rr;

use super::Entry;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness};
use crate::record::Record;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("rr-1", "one transaction: map two buffers, a packet each way, unmap both; by one thread"),
    ("rr-2", "the same by two threads"),
    ("rr-200", "the same by 200 threads"),
    ("domain-4k", "map, revoke and wait for one page; flushes take no time"),
    ("domain-1m", "the same for 256 pages, by one call each"),
    ("domain-4k-batch", "domain-4k, 256 mappings revoked by one call"),
    ("domain-1m-batch", "domain-1m, 256 mappings revoked by one call"),
    ("live-1k", "unmap and map one page among 10^3 mappings, at random"),
    ("live-1m", "the same among 10^6"),
    ("bounce-64", "a payload of 64 bytes to the device and one from it: copied, or mapped"),
    ("bounce-1k", "the same of 1 KiB"),
    ("bounce-4k", "the same of 4 KiB"),
    ("bounce-16k", "the same of 16 KiB"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("tree-2015", "Linux in 2015: a tree of addresses, locked across a flush per 250 unmaps"),
    ("tree-merged", "the same, entries that abut merged"),
    ("lazy", "Linux since: per-CPU caches over a tree, a flush per 256 unmaps of a CPU or 10 ms"),
    ("linux-strict", "the same with a flush and a wait for each unmap"),
    ("identity", "the physical address, counted per page; a flush and a wait for each unmap"),
    ("strict", "Pinfold: an unmap waits for its flush"),
    ("revoke", "Pinfold: one flush each; the memory is held until it has completed"),
    ("batch", "Pinfold: one flush for 16 mappings; the memory is held until it has completed"),
    ("static", "Pinfold: all memory stays mapped"),
    ("none", "no protection: physical addresses, everything reachable"),
    ("pinfold", "domain-*: an owner of a domain; bounce-*: mapped, flushes take no time"),
    ("bounced", "bounce-*: copies into and out of pages that stay mapped (BouncePool)"),
];

/// Measures the suite.
///
/// # Errors
/// Where the memory is unavailable or a subject fails.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = Vec::new();
    if !COUNTS_RMW {
        records.extend(rr::run(harness)?);
    }
    let domain = ["domain-4k", "domain-1m", "domain-4k-batch", "domain-1m-batch"];
    records.extend(harness.cases(&domain, || life::domain(harness))?);
    if !COUNTS_RMW {
        records.extend(harness.cases(&["live-1k", "live-1m"], || life::live(harness))?);
    }
    records.extend(bounce::run(harness)?);
    Ok(records)
}
