//! An owner's addresses without mappings: what allocating addresses costs by itself. For
//! benchmarks.

use super::addresses::Addresses;
use super::error::BackendError;
use super::local::DomainLocal;
use super::owner::Caller;
use super::space::PAGE_BYTES;
use crate::addr::IovaRange;

/// Addresses in use, at which nothing is mapped. Dropping them leaves them in use for good.
#[derive(Debug)]
#[must_use = "what is dropped stays in use"]
pub struct BareAddresses(Addresses);

impl BareAddresses {
    /// Returns the range.
    pub fn range(&self) -> IovaRange {
        self.0.iova
    }
}

impl DomainLocal {
    /// Allocates `len` bytes of addresses, whole pages, as a map does.
    ///
    /// # Errors
    /// As for an allocation of the domain's address space.
    #[inline(always)]
    pub fn alloc_addresses(&mut self, len: u64) -> Result<BareAddresses, BackendError> {
        self.owner.alloc(&self.domain, len, || PAGE_BYTES as u64).map(BareAddresses)
    }

    /// Frees them, as the end of a mapping does.
    #[inline(always)]
    pub fn free_addresses(&mut self, addresses: BareAddresses) {
        self.owner.release(&self.domain, addresses.0);
    }
}
