//! Counters of the model controller.

use std::fmt;
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
    /// Adds without a read-modify-write: only one thread writes.
    pub(crate) fn add(counter: &AtomicU64, by: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }
}

/// Counters of a model controller since it was started.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ModelStats {
    /// Commands completed, admin and I/O.
    pub commands: u64,
    /// Commands completed with an error status.
    pub errors: u64,
    /// Bytes read from the media.
    pub bytes_read: u64,
    /// Bytes written to the media.
    pub bytes_written: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Valid doorbell writes.
    pub doorbells: u64,
    /// Doorbell writes with an invalid queue or value.
    pub bad_doorbells: u64,
    /// Shutdowns completed (CC.SHN).
    pub shutdowns: u64,
    /// Changes of CC.EN before CSTS.RDY had followed the last one: undefined results (Base
    /// 3.1.3.5).
    pub early_changes: u64,
}

impl fmt::Display for ModelStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} commands, {} errors; {} bytes read, {} bytes written; {} interrupts, {} doorbells ({} invalid); {} \
             shutdowns, {} early changes of CC.EN",
            self.commands,
            self.errors,
            self.bytes_read,
            self.bytes_written,
            self.interrupts,
            self.doorbells,
            self.bad_doorbells,
            self.shutdowns,
            self.early_changes
        )
    }
}
