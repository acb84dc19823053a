//! What a stack has done, and what it holds.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a stack has done so far, and what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Rings and the like that were allocated (`dma_alloc`).
    pub dma_allocs: u64,
    /// Pages of those that are out.
    pub dma_pages_live: u64,
    /// Payloads that were shared with the device.
    pub shares: u64,
    /// Of these, ones that were mapped where they lie.
    pub shares_in_place: u64,
    /// Of these, ones that were copied into a block of the pool.
    pub shares_small: u64,
    /// Payloads that the device may reach now.
    pub shares_live: u64,
    /// Bytes that were copied, in either direction.
    pub copied_bytes: u64,
    /// Calls that gave back what was not out. A driver that makes one is broken.
    pub strays: u64,
    /// Bytes that are kept for ever, because the domain could not take them from the device.
    pub quarantined_bytes: u64,
}

impl Stats {
    /// Whether nothing is out, nothing lost, and nothing was given back that was not owed.
    pub fn is_clean(&self) -> bool {
        let Self { dma_pages_live, shares_live, strays, quarantined_bytes, .. } = *self;
        [dma_pages_live, shares_live, strays, quarantined_bytes] == [0; 4]
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} rings allocated, {} payloads shared ({} in place, {} in small blocks), {} bytes copied; still out: {} pages, {} payloads",
            self.dma_allocs,
            self.shares,
            self.shares_in_place,
            self.shares_small,
            self.copied_bytes,
            self.dma_pages_live,
            self.shares_live
        )?;
        if self.strays > 0 {
            write!(f, "; {} given back that were not out", self.strays)?;
        }
        if self.quarantined_bytes > 0 {
            write!(f, "; {} bytes in quarantine", self.quarantined_bytes)?;
        }
        Ok(())
    }
}

/// The counts behind it.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) dma_allocs: AtomicU64,
    pub(crate) shares: AtomicU64,
    pub(crate) shares_in_place: AtomicU64,
    pub(crate) shares_small: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) strays: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
}

impl Counts {
    pub(crate) fn account(&self, dma_pages_live: u64, shares_live: u64) -> Stats {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Stats {
            dma_allocs: get(&self.dma_allocs),
            dma_pages_live,
            shares: get(&self.shares),
            shares_in_place: get(&self.shares_in_place),
            shares_small: get(&self.shares_small),
            shares_live,
            copied_bytes: get(&self.copied_bytes),
            strays: get(&self.strays),
            quarantined_bytes: get(&self.quarantined_bytes),
        }
    }
}

pub(crate) fn count(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}
