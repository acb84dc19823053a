//! Statistics of an address space.

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
        write!(f, "{bytes_in_use:#x} bytes in use in {allocated} runs, {bytes_reserved:#x} reserved, ")?;
        write!(f, "{free} free extents (largest {largest_free:#x} bytes)")
    }
}
