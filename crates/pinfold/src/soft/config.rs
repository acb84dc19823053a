//! How a software IOMMU behaves.

use std::time::Duration;

/// When, between the submission and the completion of their batch, requests take effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// When it is submitted: this finds flushes that are submitted before entries are cleared.
    AtOnce,
    /// When it is over: this finds what does not wait for it.
    AtLast,
    /// Each request by itself: at once, at the last moment, or at any time between.
    AtRandom,
}

/// How a software IOMMU behaves. Start from [`SoftConfig::default`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SoftConfig {
    /// How many 4 KiB translations each port keeps, rounded up to a power of two; for 2 MiB a quarter of that.
    pub iotlb_entries: usize,
    /// What a batch of flushes costs: one that is submitted at t is over at max(t, previous) + cost.
    pub flush_cost: Duration,
    /// A batch completes up to this much later, at random (a thousandth of it is as likely as all of it), and so out
    /// of order.
    pub late_by: Duration,
    /// When, until then, its requests take effect.
    pub effect: Effect,
    /// What the randomness starts from.
    pub seed: u64,
    /// Entries that are not present are cached too, at every level (VT-d: caching mode), so that a map needs a flush.
    pub caching_mode: bool,
    /// From this batch on (the first is 1) no flush is ever over: the IOMMU hangs.
    pub hang_from: Option<u64>,
    /// How many batches may be in flight, up to [`MAX_IN_FLIGHT`](pinfold_core::invalidate::MAX_IN_FLIGHT).
    pub queue_depth: u64,
    /// How long a waiter waits for a flush before it gives it up.
    pub timeout: Duration,
    /// Memory for I/O page tables, in bytes; used as it is needed.
    pub table_bytes: usize,
    /// The largest piece of memory that is physically contiguous, rounded up to a power of two: a buffer that is
    /// larger is mapped in several steps, as scattered pages are. `None`: all memory is contiguous.
    pub contiguous_bytes: Option<u64>,
    /// Levels of the table: 3 for 39 bits of address, 4 for 48, 5 for 57.
    pub levels: u8,
}

impl Default for SoftConfig {
    /// A flush of 1 us (published for VT-d: 2,127 cycles; measured in an emulated one: 0.97 us), on time.
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
