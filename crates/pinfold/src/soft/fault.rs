//! Accesses that did not land.

use pinfold_core::addr::Iova;
use std::collections::VecDeque;

/// Why an access of a device did not land.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FaultKind {
    /// No entry is present.
    #[error("nothing is mapped there")]
    NotMapped,
    /// The device may not read there.
    #[error("the mapping does not let the device read")]
    NoRead,
    /// The device may not write there.
    #[error("the mapping does not let the device write")]
    NoWrite,
    /// The access is not aligned to its size.
    #[error("the access is not aligned to its size")]
    Misaligned,
    /// The access reaches beyond the width of the table's addresses.
    #[error("the access reaches beyond the addresses that the table translates")]
    TooWide,
    /// An entry leads to memory that was not admitted, or was expelled.
    #[error("the entry leads to memory that was not admitted to the domain")]
    NotRegistered,
    /// An entry has reserved bits set, or a link leads out of the table's memory.
    #[error("the table is damaged on the way there")]
    BadTable,
}

/// An access of a device that did not land.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("a device's access at {iova} did not land: {kind}")]
pub struct Fault {
    /// The first address that was not reached.
    pub iova: Iova,
    /// Why.
    pub kind: FaultKind,
}

/// The last faults.
#[derive(Debug, Default)]
pub(super) struct FaultLog(VecDeque<Fault>);

impl FaultLog {
    const KEPT: usize = 64;

    pub(super) fn note(&mut self, fault: Fault) {
        if self.0.len() == Self::KEPT {
            self.0.pop_front();
        }
        self.0.push_back(fault);
    }

    pub(super) fn all(&self) -> Vec<Fault> {
        self.0.iter().copied().collect()
    }
}
