//! The software IOMMU: an adversary. (Skeleton: the face is fixed, the inside is being written.)
#![allow(unused_variables, clippy::todo, missing_debug_implementations)]

use pinfold_core::addr::Iova;
use std::time::Duration;

/// How a software IOMMU behaves.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SoftConfig {
    /// How many 4 KiB translations each port keeps.
    pub iotlb_entries: usize,
    /// What a flush costs: one that is submitted at t is over at max(t, previous) + cost.
    pub flush_cost: Duration,
    /// A flush is over up to this much later, at random, and out of order.
    pub late_by: Duration,
    /// What the randomness starts from.
    pub seed: u64,
    /// Entries that are not present are cached too (VT-d: caching mode).
    pub caching_mode: bool,
    /// How long a waiter waits for a flush.
    pub timeout: Duration,
    /// Memory for I/O page tables, in bytes.
    pub table_bytes: usize,
}

/// Why an access of a device did not land.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FaultKind {
    /// Nothing is mapped there.
    NotMapped,
    /// The device may not read there.
    NoRead,
    /// The device may not write there.
    NoWrite,
}

/// An access of a device that did not land.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the device may not reach {iova}: {kind:?}")]
pub struct Fault {
    /// The first address that was not reached.
    pub iova: Iova,
    /// Why.
    pub kind: FaultKind,
}

/// One device's way to memory. A clone is another device (it caches for itself).
#[derive(Clone)]
pub struct Port(());

impl Port {
    /// Reads from `iova`, across pages; after a fault part of `to` may have been filled.
    ///
    /// # Errors
    /// [`Fault`] at the first address that may not be read.
    pub fn read(&self, iova: Iova, to: &mut [u8]) -> Result<(), Fault> {
        todo!()
    }
    /// Writes to `iova`, across pages; after a fault part of `from` may have been written, as real devices do.
    ///
    /// # Errors
    /// [`Fault`] at the first address that may not be written.
    pub fn write(&self, iova: Iova, from: &[u8]) -> Result<(), Fault> {
        todo!()
    }
    /// Reads a `u32` so that what its writer wrote before it is seen after it. `iova` is a multiple of 4.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn read_u32_acquire(&self, iova: Iova) -> Result<u32, Fault> {
        todo!()
    }
    /// Writes a `u32` after everything that this thread wrote before. `iova` is a multiple of 4.
    ///
    /// # Errors
    /// [`Fault`].
    pub fn write_u32_release(&self, iova: Iova, value: u32) -> Result<(), Fault> {
        todo!()
    }
}
