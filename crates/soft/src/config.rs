//! The configuration of a software IOMMU.

use std::time::Duration;

/// When, between the submission and the completion of their batch, requests take effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// On submission: exposes flushes that are submitted before the entries are cleared.
    AtOnce,
    /// On completion: exposes code that does not wait for it.
    AtLast,
    /// Each request independently: on submission, on completion, or at any time between.
    AtRandom,
}

/// The configuration of a software IOMMU. Start from [`SoftConfig::default`]: fields may be added.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SoftConfig {
    /// 4 KiB translations that each port caches, rounded up to a power of two; for 2 MiB a quarter of that.
    pub iotlb_entries: usize,
    /// The cost of a batch of flushes: one submitted at t completes at max(t, previous) + cost.
    pub flush_cost: Duration,
    /// The longest random delay of a batch beyond its cost (a thousandth of it is as likely as all of it). Makes batches
    /// complete out of order.
    pub late_by: Duration,
    /// When its requests take effect.
    pub effect: Effect,
    /// The seed of the pseudo-random numbers.
    pub seed: u64,
    /// Whether entries that are not present are cached too, at every level (VT-d: caching mode): a map then needs a flush.
    pub caching_mode: bool,
    /// The first batch (counted from 1) that never completes: the IOMMU hangs.
    pub hang_from: Option<u64>,
    /// The most batches in flight, up to [`MAX_IN_FLIGHT`](pinfold_core::invalidate::MAX_IN_FLIGHT).
    pub queue_depth: u64,
    /// How long a waiter waits for a flush.
    pub timeout: Duration,
    /// Memory for I/O page tables, in bytes.
    pub table_bytes: usize,
    /// The largest physically contiguous piece of memory, rounded up to a power of two: a larger buffer is mapped in several
    /// steps, as scattered pages are. `None`: all memory is contiguous.
    pub contiguous_bytes: Option<u64>,
    /// Levels of the table: 3 for 39 bits of address, 4 for 48, 5 for 57.
    pub levels: u8,
}

impl Default for SoftConfig {
    /// A flush of 1 us (published for VT-d: 2,127 cycles; measured in an emulated one: 0.97 us), without delay.
    fn default() -> Self {
        Self {
            iotlb_entries: 1024,
            flush_cost: Duration::from_micros(1),
            late_by: Duration::ZERO,
            effect: Effect::AtRandom,
            seed: 1,
            caching_mode: false,
            hang_from: None,
            queue_depth: 1,
            timeout: Duration::from_secs(5),
            table_bytes: 16 << 20,
            contiguous_bytes: None,
            levels: 4,
        }
    }
}
