//! What invalidations cost, and the rule that weighs them against each other.

/// What a queue's invalidations cost, in expected nanoseconds: decides how a batch is expressed in
/// descriptors.
///
/// The rule: pages that were requested are covered by aligned blocks, exactly, with these
/// exceptions.
/// - One block replaces several if the descriptors that it saves cost at least as much as the
///   refills of the pages that it flushes in addition, and **at least half of its pages were
///   requested**: so no batch flushes more than twice the pages that were requested.
/// - One flush of the domain replaces all blocks if their descriptors cost more than it does.
///
/// The defaults are those of VT-d as published: 0.22 us for a descriptor (fifteen flushes and a
/// wait take 4.1 us, one and a wait 0.97 us), 197 ns for a read of a table entry by the walker, and
/// 256 entries in use in an IOTLB. Of the pages beside those that were requested, half are assumed
/// to be in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlushCosts {
    /// A descriptor in a batch.
    pub descriptor_ns: u64,
    /// A page that is flushed although it was not requested: a refill, times the probability that
    /// there is one.
    pub refill_ns: u64,
    /// A flush of the whole domain: the refills of everything that it drops.
    pub domain_ns: u64,
}

impl FlushCosts {
    /// Costs by which nothing is flushed that was not requested, unless a batch has too many
    /// descriptors.
    pub const EXACT: Self = Self { descriptor_ns: 1, refill_ns: u64::MAX, domain_ns: u64::MAX };
}

impl Default for FlushCosts {
    fn default() -> Self {
        Self { descriptor_ns: 220, refill_ns: 197 / 2, domain_ns: 256 * 197 }
    }
}
