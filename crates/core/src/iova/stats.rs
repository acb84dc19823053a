//! Statistics of an address space.

use super::extent::{Extent, GRANULE_SHIFT};
use core::fmt;

/// The contents of an address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IovaStats {
    /// Runs of free addresses (one that crosses 4 GiB counts twice).
    pub free: usize,
    /// Runs of allocated addresses; ranges that abut are one.
    pub allocated: usize,
    /// Bytes allocated.
    pub bytes_in_use: u64,
    /// Bytes reserved, the null page included.
    pub bytes_reserved: u64,
    /// Bytes of the largest free run.
    pub largest_free: u64,
}

impl fmt::Display for IovaStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { free, allocated, bytes_in_use, bytes_reserved, largest_free } = self;
        write!(
            f,
            "{bytes_in_use:#x} bytes in use in {allocated} runs, {bytes_reserved:#x} reserved, "
        )?;
        write!(f, "{free} free extents (largest {largest_free:#x} bytes)")
    }
}

/// Counts the runs of a space that is walked in order.
pub(super) struct Census<'r> {
    /// Reservations that no part has been counted beside, in order.
    reserved: &'r [Extent],
    /// How many granules the free run has that the last part belongs to; 0 if it is not free.
    run: u64,
    /// Where the last allocated run ended.
    allocated_to: Option<u64>,
    stats: IovaStats,
}

impl<'r> Census<'r> {
    pub(super) fn new(reserved: &'r [Extent]) -> Self {
        let bytes_reserved = reserved.iter().map(|r| r.len()).sum::<u64>() << GRANULE_SHIFT;
        let stats = IovaStats { bytes_reserved, ..IovaStats::default() };
        Self { reserved, run: 0, allocated_to: None, stats }
    }

    /// Counts the next part, all of it free or in use (reserved or allocated). Returns true, to
    /// continue the walk.
    pub(super) fn add(&mut self, part: Extent, free: bool) -> bool {
        if free {
            self.stats.free += usize::from(self.run == 0);
            self.run += part.len();
            self.stats.largest_free = self.stats.largest_free.max(self.run << GRANULE_SHIFT);
        } else {
            self.run = 0;
            self.add_used(part);
        }
        true
    }

    /// Ends a free run: what follows is not counted as part of it.
    pub(super) fn end_free_run(&mut self) {
        self.run = 0;
    }

    fn add_used(&mut self, part: Extent) {
        let mut from = part.start;
        while from < part.end {
            while let [first, rest @ ..] = self.reserved
                && first.end <= from
            {
                self.reserved = rest;
            }
            let (reserved_from, reserved_to) =
                self.reserved.first().map_or((u64::MAX, u64::MAX), |next| (next.start, next.end));
            if reserved_from <= from {
                from = reserved_to;
                continue;
            }
            let end = reserved_from.min(part.end);
            self.stats.allocated += usize::from(self.allocated_to != Some(from));
            self.allocated_to = Some(end);
            from = end;
        }
    }

    pub(super) fn finish(mut self, in_use: u64) -> IovaStats {
        self.stats.bytes_in_use = in_use << GRANULE_SHIFT;
        self.stats
    }
}
