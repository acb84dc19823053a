//! What the model counts.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commands: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) interrupts: AtomicU64,
    pub(crate) shutdowns: AtomicU64,
}

impl Counters {
    /// One thread writes, so a load and a store do.
    pub(crate) fn add(counter: &AtomicU64, by: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }
}

/// What the model controller did since it was spawned.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ModelStats {
    /// Commands completed, admin and I/O.
    pub commands: u64,
    /// Of these, with an error status.
    pub errors: u64,
    /// Bytes read from the media.
    pub bytes_read: u64,
    /// Bytes written to the media.
    pub bytes_written: u64,
    /// Interrupts that were raised.
    pub interrupts: u64,
    /// Doorbell writes that were taken.
    pub doorbells: u64,
    /// Doorbell writes to queues that are not there, or with values that are not allowed.
    pub bad_doorbells: u64,
    /// Shutdowns that were completed (CC.SHN).
    pub shutdowns: u64,
    /// Changes of CC.EN before CSTS.RDY had followed the last one: undefined results (Base 3.1.3.5).
    pub early_changes: u64,
}
