//! Accesses that faulted.

use pinfold_core::addr::Iova;
use std::collections::VecDeque;

/// Why a device's access faulted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// No entry is present.
    #[error("no mapping")]
    NotMapped,
    /// The device may not read there.
    #[error("the mapping does not allow reads")]
    NoRead,
    /// The device may not write there.
    #[error("the mapping does not allow writes")]
    NoWrite,
    /// The access is not aligned to its size.
    #[error("the access is not aligned to its size")]
    Misaligned,
    /// The address is wider than the table translates.
    #[error("the address is beyond those that the table translates")]
    TooWide,
    /// An entry maps memory that is not registered.
    #[error("the entry maps memory that is not registered with the domain")]
    NotRegistered,
    /// An entry has reserved bits set, or links to a page outside the table's memory.
    #[error("a table entry is malformed")]
    BadTable,
}

/// A device's access that faulted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("device access at {iova} faulted: {kind}")]
pub struct Fault {
    /// The first address that faulted.
    pub iova: Iova,
    /// Why.
    pub kind: FaultKind,
}

/// The most recent faults.
#[derive(Debug, Default)]
pub(super) struct FaultLog(VecDeque<Fault>);

impl FaultLog {
    const CAPACITY: usize = 64;

    pub(super) fn note(&mut self, fault: Fault) {
        if self.0.len() == Self::CAPACITY {
            self.0.pop_front();
        }
        self.0.push_back(fault);
    }

    pub(super) fn all(&self) -> Vec<Fault> {
        self.0.iter().copied().collect()
    }
}
