//! The suite `iommu`: what protection costs.
//!
//! Flushes are those of the software IOMMU, so figures that contain them are modelled.

mod addresses;
mod beside;
mod bounce;
mod iova;
mod life;
mod live;
mod payload;
mod rr;
mod table;

use super::Entry;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness};
use crate::record::Record;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    (
        "rr-1, -2, -16, -200",
        "one transaction of as many threads: map two buffers, a packet each way, unmap both",
    ),
    ("iova-pair", "allocate and free the addresses of one page"),
    ("iova-128", "the same for 128 pages, beside 50,000 ranges of 8 pages and as many holes"),
    (
        "iova-worst",
        "allocate one page or two below 4 GiB among 10^6 ranges: the 99.9th percentile of 40,000 calls (the tree: the worst of 32)",
    ),
    ("map-4k, clear-4k", "one entry of a table, in a table page that is in use"),
    ("map-1m, clear-1m", "the same for 256 entries by one call"),
    ("domain-4k, domain-1m", "map, revoke and wait for 1 page, or 256; flushes take no time"),
    (
        "domain-4k-batch",
        "domain-4k, 256 mappings revoked by one call; pinfold-many: also mapped by one",
    ),
    (
        "bounce-64, -256, -1k, -4k, -8k, -16k",
        "a payload of so many bytes to the device and one from it: copied, or their whole pages mapped and unmapped",
    ),
    ("static-50k", "the entries that 50,000 mappings of four drivers need"),
    ("tables-16t", "use 16 TiB of addresses once: the time per 2 MiB, and the table pages left"),
    (
        "live-1k, live-1m",
        "unmap and map one page among 10^3 mappings or 10^6, at random; the longest call: own time, each its least of 3 passes",
    ),
    (
        "revoke-many-1m",
        "10^6 mappings revoked by one call: the longest map or revoke of another thread meanwhile, by the clock, the least of 3 passes",
    ),
    ("flush-64p", "unmap 64 pages that one descriptor uses: invalidations, and waits per page"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "an owner of a domain; in the cases of addresses, its addresses alone"),
    (
        "pinfold-mapping",
        "the same with the life of a mapping around them, over a backend without a table",
    ),
    ("pinfold-pinned", "a table page that is pinned for an owner: nothing is counted"),
    ("pinfold-shared", "the domain's own calls, or the address space's, without an owner"),
    ("pinfold-strict", "an owner: an unmap waits for its flush"),
    (
        "pinfold-revoke",
        "an owner: an unmap returns, and the memory is held until its flush has completed",
    ),
    ("pinfold-batch", "the same, 16 mappings revoked by one call"),
    ("pinfold-many", "an owner that maps by `map_many`"),
    (
        "pinfold-ahead",
        "pinfold-revoke, each chosen two exchanges before and prefetched (`Mapping::prefetch`)",
    ),
    ("bounced", "bounce-*: copies into and out of pages that stay mapped (`BouncePool`)"),
    (
        "tree-2015",
        "Linux in 2015: a tree per device, locked across the invalidations of 250 unmaps",
    ),
    ("tree-merged", "the same, entries that abut merged"),
    (
        "magazines, magazines-strict",
        "Linux since: per-CPU caches over a tree; lazy flushes, or one per unmap",
    ),
    ("magazines-ahead", "magazines, prefetched in the same way"),
    ("identity", "the physical address, counted per page, strict"),
    (
        "never-freed",
        "the same table, which frees no page; it uses 1 GiB of addresses again and again",
    ),
    ("none", "all memory mapped once: no protection"),
    ("handles-only", "live-*: the list of the caller alone, of as many handles of the same size"),
    ("copies", "rr-*: the copying of a transaction alone, without mappings, a device or a pause"),
    (
        "empty-loop",
        "live-*, revoke-many-1m: nothing, timed in the same way: what the machine itself pauses for",
    ),
];

/// Measures the suite.
///
/// # Errors
/// Where the memory is unavailable or a subject fails.
pub fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let mut records = Vec::new();
    if !COUNTS_RMW {
        records.extend(rr::run(harness)?);
    }
    records.extend(iova::pairs(harness)?);
    records.extend(iova::worst(harness)?);
    records.extend(table::small(harness)?);
    records.extend(life::domain(harness)?);
    records.extend(bounce::run(harness)?);
    records.extend(iova::static_50k(harness)?);
    records.extend(table::cycle(harness)?);
    records.extend(live::run(harness)?);
    records.extend(beside::revoke_many(harness)?);
    records.extend(life::flush_64p(harness)?);
    Ok(records)
}
