//! Counters of a stack.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a stack, and what is outstanding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Allocations of rings (`dma_alloc`).
    pub dma_allocs: u64,
    /// Pages of rings that have not been freed.
    pub dma_pages_live: u64,
    /// Payloads shared with the device.
    pub shares: u64,
    /// Payloads mapped in place.
    pub shares_in_place: u64,
    /// Payloads bounced in pages that stay mapped.
    pub shares_bounced: u64,
    /// Payloads shared now.
    pub shares_live: u64,
    /// Bytes copied, in either direction.
    pub copied_bytes: u64,
    /// Frees of something that was not allocated or shared: errors of the driver.
    pub invalid_frees: u64,
    /// Bytes quarantined because the domain could not revoke them.
    pub quarantined_bytes: u64,
}

impl Stats {
    /// Whether nothing is outstanding, quarantined or wrongly freed.
    pub fn is_clean(&self) -> bool {
        let Self { dma_pages_live, shares_live, invalid_frees, quarantined_bytes, .. } = *self;
        [dma_pages_live, shares_live, invalid_frees, quarantined_bytes] == [0; 4]
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} rings allocated, {} payloads shared ({} in place, {} bounced), {} bytes copied; outstanding: {} pages, {} payloads",
            self.dma_allocs,
            self.shares,
            self.shares_in_place,
            self.shares_bounced,
            self.copied_bytes,
            self.dma_pages_live,
            self.shares_live
        )?;
        if self.invalid_frees > 0 {
            write!(f, "; {} invalid frees", self.invalid_frees)?;
        }
        if self.quarantined_bytes > 0 {
            write!(f, "; {} bytes quarantined", self.quarantined_bytes)?;
        }
        Ok(())
    }
}

/// The counters behind [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) dma_allocs: AtomicU64,
    pub(crate) shares: AtomicU64,
    pub(crate) shares_in_place: AtomicU64,
    pub(crate) shares_bounced: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) invalid_frees: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
}

impl Counts {
    pub(crate) fn stats(&self, dma_pages_live: u64, shares_live: u64) -> Stats {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Stats {
            dma_allocs: get(&self.dma_allocs),
            dma_pages_live,
            shares: get(&self.shares),
            shares_in_place: get(&self.shares_in_place),
            shares_bounced: get(&self.shares_bounced),
            shares_live,
            copied_bytes: get(&self.copied_bytes),
            invalid_frees: get(&self.invalid_frees),
            quarantined_bytes: get(&self.quarantined_bytes),
        }
    }
}

pub(crate) fn count(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}
