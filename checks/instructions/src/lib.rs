//! Constants shared by the counted paths and their comparison.

/// The number of operations of each path. A multiple of every array's length, and large enough that
/// the few instructions around the loop do not count.
pub const OPERATIONS: usize = 4096;

/// The paths in the order of the record: the name of the benchmark, and its operation.
pub const PATHS: [(&str, &str); 14] = [
    ("pool_pair", "DmaPool, an owner: allocate and free a block of 64 bytes"),
    ("pool_alloc_new", "one of 4,096 allocations from a new pool, which grows meanwhile"),
    ("pool_free_in_order", "one of 4,096 frees, in the order of the allocations"),
    ("pool_free_random", "one of 4,096 frees, in random order"),
    ("pool_replace_random", "free one of 4,096 blocks at random and allocate another"),
    ("pool_bulk_512", "allocate and free a block, 512 by one call"),
    ("zone_pair", "Zone, shared: allocate and free a frame"),
    ("frames_pair", "Zone, an owner: allocate and free a frame"),
    ("frames_bulk_64", "allocate and free a frame, 64 by one call, 4,096 outstanding"),
    ("pages_pair", "PagePool: allocate and free a raw page"),
    ("pages_refill_256", "fill an array of 256 raw pages by one call and free each: one page"),
    (
        "domain_map_unmap",
        "Domain, an owner: map and unmap 4 KiB behind a software IOMMU with free flushes",
    ),
    (
        "domain_revoke_many_32",
        "the same for one of 32 mappings that are revoked by one call and waited for",
    ),
    ("iova_pair", "Domain, an owner: allocate and free the addresses of 4 KiB"),
];
