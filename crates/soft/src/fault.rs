//! Accesses that faulted.

use pinfold_core::addr::Iova;

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
    /// An entry links to a page outside the table's memory.
    #[error("a table entry links to a page outside the table's memory")]
    BadTable,
    /// An entry has reserved bits set.
    #[error("a table entry has reserved bits set")]
    ReservedBits,
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
