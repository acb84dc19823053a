//! The physical side of an IOMMU.

use crate::addr::PhysRange;
use crate::domain::error::BackendError;
use crate::mem::DmaMemory;

/// Translates memory of this process to physical addresses.
pub trait PhysTranslator: Send + Sync {
    /// Allows the memory to be given to devices.
    ///
    /// # Errors
    /// As for [`Backend::register_memory`](crate::domain::Backend::register_memory).
    ///
    /// # Safety
    /// The caller keeps the memory valid until [`unregister_memory`](Self::unregister_memory) has returned.
    unsafe fn register_memory(&self, memory: DmaMemory) -> Result<(), BackendError>;

    /// Forgets the memory: after this returns, no device reaches it, whatever the table contains.
    fn unregister_memory(&self, memory: DmaMemory);

    /// Returns the physically contiguous run at the start of `memory`: a multiple of 4096 bytes, at most its length.
    ///
    /// # Errors
    /// [`BackendError::NotRegistered`].
    fn run(&self, memory: DmaMemory) -> Result<PhysRange, BackendError>;
}
