//! Counters of a platform.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

/// Counters of a [`Platform`](crate::Platform), and of what its drivers have not freed. They print
/// as a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Allocations.
    pub allocations: u64,
    /// Mappings of a driver's own buffers, each through a copy.
    pub maps: u64,
    /// Allocations and mappings that exist.
    pub live: u64,
    /// The bytes that their devices reach.
    pub live_bytes: u64,
    /// Bytes copied between buffers and their copies, in either direction.
    pub copied_bytes: u64,
    /// Allocations and mappings that were refused.
    pub refused: u64,
    /// Frees and synchronisations of something that is not allocated or mapped so: errors of the
    /// driver.
    pub invalid: u64,
    /// Bytes that are never reused, because the domain could not revoke them.
    pub quarantined_bytes: u64,
}

impl Stats {
    /// Returns whether nothing exists, was wrongly freed, or is quarantined.
    pub fn is_clean(&self) -> bool {
        [self.live, self.invalid, self.quarantined_bytes] == [0; 3]
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "allocations        {:>14}", self.allocations)?;
        writeln!(f, "buffers mapped     {:>14}", self.maps)?;
        writeln!(f, "outstanding        {:>14}", self.live)?;
        writeln!(f, "bytes outstanding  {:>14}", self.live_bytes)?;
        writeln!(f, "bytes copied       {:>14}", self.copied_bytes)?;
        writeln!(f, "refused            {:>14}", self.refused)?;
        writeln!(f, "invalid calls      {:>14}", self.invalid)?;
        write!(f, "bytes quarantined  {:>14}", self.quarantined_bytes)
    }
}

/// The counters behind [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) allocations: AtomicU64,
    pub(crate) maps: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) invalid: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
}

impl Counts {
    /// Returns the counters, with what exists.
    pub(crate) fn stats(&self, live: u64, live_bytes: u64) -> Stats {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Stats {
            allocations: get(&self.allocations),
            maps: get(&self.maps),
            live,
            live_bytes,
            copied_bytes: get(&self.copied_bytes),
            refused: get(&self.refused),
            invalid: get(&self.invalid),
            quarantined_bytes: get(&self.quarantined_bytes),
        }
    }
}

pub(crate) fn count(count: &AtomicU64, by: u64) {
    count.fetch_add(by, Ordering::Relaxed);
}
