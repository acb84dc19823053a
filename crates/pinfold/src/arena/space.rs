//! What an arena asks of its domain.

use crate::domain::Domain;
use pinfold_core::access::Access;
use pinfold_core::addr::IovaRange;
use pinfold_core::domain::BackendError;
use pinfold_core::mem::DmaMemory;

/// The part of a domain that an arena uses; a seam, so that a test can make any step of it fail.
pub(super) trait Space: Send + Sync {
    /// The memory will be mapped from until `expel`.
    ///
    /// # Safety
    /// The caller keeps it valid until `expel` has returned.
    unsafe fn admit(&self, memory: DmaMemory) -> Result<(), BackendError>;
    fn expel(&self, memory: DmaMemory);
    fn reserve(&self, len: u64, align: u64) -> Result<IovaRange, BackendError>;
    fn release(&self, range: IovaRange);
    fn map_at(&self, iova: IovaRange, memory: DmaMemory, access: Access) -> Result<(), BackendError>;
    /// Strict: no device reaches the range when this has returned `Ok`.
    fn unmap_at(&self, iova: IovaRange) -> Result<(), BackendError>;
}

impl Space for Domain {
    unsafe fn admit(&self, _memory: DmaMemory) -> Result<(), BackendError> {
        unimplemented!()
    }
    fn expel(&self, _memory: DmaMemory) {}
    fn reserve(&self, _len: u64, _align: u64) -> Result<IovaRange, BackendError> {
        unimplemented!()
    }
    fn release(&self, _range: IovaRange) {}
    fn map_at(&self, _iova: IovaRange, _memory: DmaMemory, _access: Access) -> Result<(), BackendError> {
        unimplemented!()
    }
    fn unmap_at(&self, _iova: IovaRange) -> Result<(), BackendError> {
        Ok(())
    }
}
